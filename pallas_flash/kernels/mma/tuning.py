"""Which of a kernel's rows of tiles a problem takes: the cheapest that fits."""

import functools
import itertools
from collections.abc import Callable, Iterable

from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.mma import (
    backward,
    decode,
    forward,
    listed_keys,
    score_gradients,
    tangent,
)
from pallas_flash.kernels.mma.memory import Memory
from pallas_flash.kernels.mma.tile_sizes import (
    AllTiles,
    DecodeTiles,
    Gpu,
    Row,
    ScoreTiles,
    Tiles,
    swizzle_of,
    widths,
)
from pallas_flash.kernels.mosaic.elements import cheapest
from pallas_flash.kernels.mosaic.launch import shared_bytes
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv

PAGE = 64  # keys, where they are not in pages
# Of splits where lists name the keys: of 512 tokens of MLA with 2048 keys each, whose products take
# 2.2 ms at 130 TFLOP/s, an A100's memory moves the outputs of two splits in 0.13 ms
MIN_GAIN_OF_LISTS = 1.1


def tiles(problem: Problem) -> AllTiles:
    """The tiles of each kernel for a problem."""
    if problem.resolved_mask.lists is not None:
        chosen = AllTiles(None, None, None, None)
    else:
        chosen = _tiles(problem, Gpu.here())
    return chosen._replace(decode=tiles_if_decoding(problem))


@functools.lru_cache(256)  # an eager call chooses each time
def _tiles(p: Problem, gpu: Gpu) -> AllTiles:
    return AllTiles(
        _row(forward.TILES, p, gpu, forward.Memory.allocate),
        _row(backward.DQ_TILES, p, gpu, Memory.allocate),
        _row(backward.DKV_TILES, p, gpu, Memory.allocate),
        _cheapest(tangent.TILES, p, gpu, tangent.scratch),
    )


def tiles_if_decoding(problem: Problem) -> DecodeTiles | None:
    """The tiles of decoding, for a problem whose forward that is."""
    has_lists = problem.resolved_mask.lists is not None
    return decode_tiles(problem) if has_lists or split_kv.is_decoding(problem) else None


def decode_tiles(
    problem: Problem, page: int = PAGE, stored: str | None = None
) -> DecodeTiles | None:
    """The first of decoding's candidates that shared memory holds, with as many splits as keep the
    GPU busy; or None."""
    problem, page = _as_decoding(problem, page)
    t = _decode_tiles(problem, Gpu.here(), page, stored)
    if t is None:
        return None
    gain = [MIN_GAIN_OF_LISTS] if t.gathers else []
    splits = split_kv.num_splits(problem, t.block_k, hardware.processors(), *gain)
    return t._replace(num_splits=splits)


def _as_decoding(problem: Problem, page: int) -> tuple[Problem, int | None]:
    """The problem that decoding has, and the keys of a page; None where lists name them."""
    if problem.resolved_mask.lists is None:
        return problem, page
    return listed_keys.decoding_problem(problem), None


@functools.lru_cache(256)
def _decode_tiles(p: Problem, gpu: Gpu, page: int | None, stored: str | None) -> DecodeTiles | None:
    candidates = lambda: decode.candidates(p, gpu, page, stored)
    fit = lambda programs: (
        lambda t: _fits(shared_bytes(decode.Memory.allocate(p, t)), gpu, programs)
    )
    # of two programs on a multiprocessor one may multiply while the other widens 8 bits
    widening = itertools.takewhile(lambda t: t.sliced_k and t.stored, candidates())
    return next(itertools.chain(filter(fit(2), widening), filter(fit(1), candidates())), None)


def score_tiles(problem: Problem) -> ScoreTiles | None:
    """The tiles of score_gradients.py; None where shared memory does not hold them."""
    by_query, by_key = (
        _cheapest(table, problem, Gpu.here(), Memory.allocate, beside=beside)
        for table, beside in (
            (score_gradients.QUERY_TILES, score_gradients.REDUCTION),
            (score_gradients.KEY_TILES, 0),
        )
    )
    return None if by_query is None or by_key is None else ScoreTiles(by_query, by_key)


def decoding_bytes(problem: Problem, page: int = PAGE, stored: str | None = None) -> int:
    """Bytes of shared memory that decoding needs at least, where it has no tiles."""
    problem, page = _as_decoding(problem, page)
    candidates = decode.candidates(problem, Gpu.here(), page, stored)
    return min(shared_bytes(decode.Memory.allocate(problem, t)) for t in candidates)


def _row(table: Iterable[Row], p: Problem, gpu: Gpu, scratch: Callable) -> Tiles | None:
    """The cheapest row that leaves shared memory for two programs on a multiprocessor, or else for
    one. The warps of two run in each other's waits. Rows beside which registers spill are left
    out."""
    has = dict(
        ids=p.resolved_mask.query_ids is not None,
        dropout=bool(p.dropped),
        score=p.score is not None or p.soft_cap is not None,
    )
    spills = lambda row: any(has[feature] for feature in row.spills_beside)
    rows = [row.tiles for row in table if row.is_for(gpu) and not spills(row)]
    single = [row for row in rows if row.warpgroups == 1]
    return _cheapest(single, p, gpu, scratch, programs=2) or _cheapest(rows, p, gpu, scratch)


def _cheapest(
    table: Iterable[Tiles],
    p: Problem,
    gpu: Gpu,
    scratch: Callable,
    programs: int = 1,
    beside: int = 0,
) -> Tiles | None:
    """The cheapest row that holds the problem's heads, as narrow as they are, and whose scratch(p,
    row) a multiprocessor's shared memory holds for so many programs, with as many bytes `beside`
    it."""
    width, value_width = widths(p)

    def narrow(row: Tiles) -> Tiles:
        slices = width // row.warpgroups, value_width // row.warpgroups
        swizzle = min(swizzle_of(p.dtype, slices, min(row.block_q, row.block_k)), row.swizzle)
        return row._replace(width=width, value_width=value_width, swizzle=swizzle, tma=gpu.has_tma)

    fits = lambda row: _fits(shared_bytes(scratch(p, row)) + beside, gpu, programs)
    return cheapest(table, p, fits, narrow)


def _fits(size: int, gpu: Gpu, programs: int = 1) -> bool:
    """Whether a multiprocessor's shared memory holds so many programs of this size: it has
    gpus.RESERVED bytes more than one of them can have."""
    return programs * (size + gpus.RESERVED) <= gpu.shared_memory + gpus.RESERVED
