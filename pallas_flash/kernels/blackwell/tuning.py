"""Which of a kernel's rows of tiles a problem takes: the cheapest that fits."""

import functools

from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.ampere import tuning as ampere
from pallas_flash.kernels.blackwell import backward_dkv, backward_dq, forward
from pallas_flash.kernels.blackwell.tile_sizes import (
    ROWS,
    BlackwellTiles,
    ForwardTiles,
    GradientTiles,
)
from pallas_flash.kernels.decoding import tuning as decoding
from pallas_flash.kernels.mosaic import scheduler
from pallas_flash.kernels.mosaic.elements import cheapest
from pallas_flash.kernels.mosaic.launch import shared_bytes
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import schedule

SHARED = gpus.SM100.program_bytes  # bytes of shared memory of a program


def tiles(problem: Problem) -> BlackwellTiles:
    """The tiles of each kernel for a problem."""
    by_mma = ampere.tiles(problem)
    if decoding.is_only_way(problem):
        return BlackwellTiles(None, None, None, by_mma)
    forward, *backward = _tiles(problem, hardware.compute_capability(), hardware.processors())
    return BlackwellTiles(None if by_mma.decode else forward, *backward, by_mma)


@functools.lru_cache(256)  # an eager call chooses each time
def _tiles(
    p: Problem, capability: float | None, processors: int
) -> tuple[ForwardTiles | GradientTiles | None, ...]:
    """The rows of the forward, of dQ, and of dK and dV."""
    rows = (
        _row(forward.TILES, p, forward.ForwardMemory),
        _row(backward_dq.TILES, p, backward_dq.DqMemory),
        _row(backward_dkv.TILES, p, backward_dkv.DkvMemory),
    )
    first, *others = (
        row and row._replace(exp2_columns=_exp2_columns(row, p, capability)) for row in rows
    )
    if first:
        first = first._replace(row_tiles=_row_tiles(p, processors), in_order=not p.waits_for_reads)
    return first, *others


def _row_tiles(p: Problem, processors: int) -> int:
    """Tiles of queries to a program: one where two leave processors idle, or are half empty. A
    step of one takes two thirds of the clocks of a step of two, by a model of the waits."""
    rounds = lambda n: schedule.ceil_div(scheduler.query_programs(p, n * ROWS), processors)
    return min((2, 1), key=lambda n: rounds(n) * (1 + n))


def _exp2_columns(t: ForwardTiles | GradientTiles, p: Problem, capability: float | None) -> int:
    """Columns whose exponentials are polynomials: none on a B300, whose special units compute
    twice as many as a B200's, and none where instructions bind."""
    if capability == 10.3 or p.dropped or p.log_base is LogBase.E:
        return 0
    # a soft cap takes two of the special units for each score by itself
    return t.exp2_columns if p.soft_cap is None else t.columns


def _row(table, p: Problem, memory) -> ForwardTiles | GradientTiles | None:
    """The cheapest row that holds the problem's heads and whose `memory` fits."""
    fits = lambda row: shared_bytes(memory.allocate(p, row)) <= SHARED
    return cheapest(table, p, fits)
