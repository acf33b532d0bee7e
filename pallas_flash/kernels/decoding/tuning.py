"""The tiles of decoding that a problem takes: the first that shared memory holds."""

import functools
import itertools

from pallas_flash.jax_support import hardware
from pallas_flash.kernels.decoding import forward, listed_keys
from pallas_flash.kernels.mma.memory import fits
from pallas_flash.kernels.mma.tile_sizes import DecodeTiles, Gpu
from pallas_flash.kernels.mosaic.launch import shared_bytes
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv

PAGE = 64  # keys, where they are not in pages
# Of splits where lists name the keys: of 512 tokens of MLA with 2048 keys each, whose products take
# 2.2 ms at 130 TFLOP/s, an A100's memory moves the outputs of two splits in 0.13 ms
MIN_GAIN_OF_LISTS = 1.1


def is_only_way(problem: Problem) -> bool:
    """Whether no other kernels run a problem: decoding alone gathers the keys of lists."""
    return problem.resolved_mask.lists is not None


def tiles_if_decoding(problem: Problem) -> DecodeTiles | None:
    """The tiles of decoding, for a problem whose forward that is."""
    is_decoding = is_only_way(problem) or split_kv.is_decoding(problem)
    return decode_tiles(problem) if is_decoding else None


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
    if not is_only_way(problem):
        return problem, page
    return listed_keys.decoding_problem(problem), None


@functools.lru_cache(256)
def _decode_tiles(p: Problem, gpu: Gpu, page: int | None, stored: str | None) -> DecodeTiles | None:
    candidates = lambda: forward.candidates(p, gpu, page, stored)
    size = lambda t: shared_bytes(forward.DecodeMemory.allocate(p, t))
    fit = lambda programs: lambda t: fits(size(t), gpu, programs)
    # of two programs on a multiprocessor one may multiply while the other widens 8 bits
    widening = itertools.takewhile(lambda t: t.sliced_k and t.stored, candidates())
    return next(itertools.chain(filter(fit(2), widening), filter(fit(1), candidates())), None)


def decoding_bytes(problem: Problem, page: int = PAGE, stored: str | None = None) -> int:
    """Bytes of shared memory that decoding needs at least, where it has no tiles."""
    problem, page = _as_decoding(problem, page)
    candidates = forward.candidates(problem, Gpu.here(), page, stored)
    return min(shared_bytes(forward.DecodeMemory.allocate(problem, t)) for t in candidates)
