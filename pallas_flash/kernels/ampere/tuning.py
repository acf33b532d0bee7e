"""Which of a kernel's rows of tiles a problem takes: the cheapest that fits."""

import functools
from collections.abc import Callable, Iterable

from pallas_flash.kernels.ampere import backward, forward, tangent
from pallas_flash.kernels.decoding import tuning as decoding
from pallas_flash.kernels.mma.memory import TileMemory, cheapest_that_fits
from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, Gpu, MmaTiles, Row
from pallas_flash.problem.arguments import Problem


def tiles(problem: Problem) -> AmpereTiles:
    """The tiles of each kernel for a problem."""
    if decoding.is_only_way(problem):
        chosen = AmpereTiles(None, None, None, None)
    else:
        chosen = _tiles(problem, Gpu.here())
    return chosen._replace(decode=decoding.tiles_if_decoding(problem))


@functools.lru_cache(256)  # an eager call chooses each time
def _tiles(p: Problem, gpu: Gpu) -> AmpereTiles:
    return AmpereTiles(
        _row(forward.TILES, p, gpu, forward.ForwardMemory.allocate),
        _row(backward.DQ_TILES, p, gpu, TileMemory.allocate),
        _row(backward.DKV_TILES, p, gpu, TileMemory.allocate),
        cheapest_that_fits(tangent.TILES, p, gpu, tangent.scratch),
    )


def _row(table: Iterable[Row], p: Problem, gpu: Gpu, scratch: Callable) -> MmaTiles | None:
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
    in_two_programs = cheapest_that_fits(single, p, gpu, scratch, programs=2)
    return in_two_programs or cheapest_that_fits(rows, p, gpu, scratch)
