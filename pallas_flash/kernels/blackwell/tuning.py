"""Which of a kernel's rows of tiles a problem takes: the cheapest that fits."""

import functools
import heapq

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
# What programs of dK and dV take beside their steps, in steps of 1340 to 2160 clocks of a B200: to
# load the first blocks and to write the sums, some 4; and for one of several parts, whose sums
# leave and come back in float32, 8 (width + value_width) bytes for each key at 29 a clock for each
# processor, 4, and 2 for the kernel that adds them.
START, PART = 4, 6


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
    first, dq, dkv = (
        row and row._replace(exp2_columns=_exp2_columns(row, p, capability)) for row in rows
    )
    if first:
        first = first._replace(row_tiles=_row_tiles(p, processors), in_order=not p.waits_for_reads)
    if p.sinks or p.bias is not None or p.score is not None:  # whose gradients read delta
        dq = dq and dq._replace(sums_delta=False)
    return first, dq, dkv and _with_parts(dkv, p, processors)


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


def _with_parts(t: GradientTiles, p: Problem, processors: int) -> GradientTiles:
    """Chooses group_parts where whole groups leave processors idle: the fewest that end within 5%
    of the first, if each processor begins the next program when it has ended one."""
    programs = functools.partial(scheduler.key_programs, p, t.block_k)
    if programs() >= processors:
        return t
    blocks = [x.resize(ROWS) for x in schedule.key_ranges(p.resolved_mask, p.queries, ROWS)]
    tiles = range(schedule.ceil_div(p.keys, ROWS))
    steps = [sum(x.first <= tile < x.last for x in blocks) for tile in tiles]  # of a head

    def last_end(parts: int) -> int:
        """In steps."""
        ends, others = [0] * processors, START + (PART if parts > 1 else 0)
        for n in steps:
            for _ in range(programs(parts) // len(steps)):
                heapq.heapreplace(ends, ends[0] + n * p.group // parts + others)
        return max(ends)

    ends = {n: last_end(n) for n in range(1, p.group + 1) if p.group % n == 0}
    return t._replace(group_parts=next(n for n in ends if ends[n] <= 1.05 * min(ends.values())))


def _row(table, p: Problem, memory) -> ForwardTiles | GradientTiles | None:
    """The cheapest row that holds the problem's heads and whose `memory` fits."""
    fits = lambda row: shared_bytes(memory.allocate(p, row)) <= SHARED
    return cheapest(table, p, fits)
