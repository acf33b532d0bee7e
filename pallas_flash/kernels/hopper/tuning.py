"""Which of a kernel's rows of tiles a problem takes: the cheapest that fits."""

import functools
from collections.abc import Callable

from pallas_flash import dropout
from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.decoding import tuning as decoding
from pallas_flash.kernels.hopper import backward_dkv, backward_dq, forward, tangent
from pallas_flash.kernels.hopper.tile_sizes import HopperTiles, KeyTiles, QueryTiles
from pallas_flash.kernels.mosaic import elements, scheduler
from pallas_flash.kernels.mosaic.elements import cheapest
from pallas_flash.kernels.mosaic.launch import shared_bytes
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import schedule

SHARED = gpus.SM90.program_bytes  # bytes of shared memory of a program
LONG = 64  # blocks of keys, beside which the start and the end of a program are short
OWNED = 288  # columns of dK and dV that the registers of a warpgroup hold where they are split

# Keys that a tile of queries sees, on average, from which on one kernel is faster than two
# (results.md#an-h100): zeros of dQ and its conversion cost the same whatever is seen. Causal calls
# of 1024 have 576, of 2048 1088.
ONE_KERNEL_KEYS = 768


def tiles(problem: Problem, fused: bool | None = None) -> HopperTiles:
    """The tiles of each kernel for a problem. One kernel has all gradients if `fused`, or by
    default where that is faster and gradients may be added in any order."""
    if decoding.is_only_way(problem):
        return HopperTiles(*(None,) * 7, decode=decoding.tiles_if_decoding(problem))
    if fused is None:
        fused = not problem.deterministic and _keys_of_a_tile(problem) >= ONE_KERNEL_KEYS
    chosen = _tiles(problem, fused, hardware.processors())
    return chosen._replace(decode=decoding.tiles_if_decoding(problem))


@functools.lru_cache(256)  # an eager call chooses each time
def _tiles(p: Problem, fused: bool, processors: int) -> HopperTiles:
    one = _fused_row(p, processors) if fused else None
    backward = (None,) * 4 if one else (_dq_row(p), *_key_rows(p))
    return HopperTiles(
        _forward_row(p, processors), *backward, one, _row(tangent.TILES, p, tangent.TangentMemory)
    )


def _row(table, p: Problem, memory, slices: Callable = lambda row: (1, 1)):
    """The cheapest row that holds the problem's heads, as narrow as they are, and whose `memory`
    fits; None where there is none. slices(row): arguments of `_narrow`."""
    fits = lambda row: shared_bytes(memory.allocate(p, row)) <= SHARED
    return cheapest(table, p, fits, lambda row: _narrow(row, p, *slices(row)))


def _narrow(row, p: Problem, slices: int, value_slices: int):
    """The row with as few columns as hold the heads: whole tiles in each of the slices of queries
    and keys, and of values. The swizzle is the widest by which heads, or slices of values, are
    whole tiles or one that hangs over."""
    sizes = p.head_size, schedule.ceil_div(p.value_size, value_slices)
    step = elements.columns(p.dtype, elements.SWIZZLES[-1])
    whole = lambda n: all(x <= n or elements.round_up(x, step) % n == 0 for x in sizes)
    swizzle = min(row.swizzle, elements.widest_swizzle(p.dtype, whole))
    columns = elements.columns(p.dtype, swizzle)
    return row._replace(
        width=elements.round_up(p.head_size, slices * columns),
        value_width=elements.round_up(p.value_size, value_slices * columns),
        swizzle=swizzle,
    )


def _without_spills(table, p: Problem) -> list:
    """The rows in which dropout does not spill and finds whole units of keys, where p has it."""
    return [
        row
        for row in table
        if not p.dropped or (row.warpgroups == 2 and row.block_k % dropout.UNIT == 0)
    ]


def _forward_row(p: Problem, processors: int) -> QueryTiles | None:
    rows = _without_spills(forward.TILES, p)
    row = _row(rows, p, forward.ForwardMemory, lambda row: (1, row.column_slices))
    return row and _with_tiles_per_program(row, p, processors)


def _dq_row(p: Problem) -> QueryTiles | None:
    others = p.sinks or p.bias is not None or p.score is not None  # whose gradients read delta
    rows = [row for row in backward_dq.TILES if not (row.sums_delta and others)]
    return _row(rows, p, backward_dq.DqMemory, lambda row: (row.column_slices, 1))


def _key_rows(p: Problem) -> tuple[KeyTiles | None, ...]:
    """The rows of dK and dV together, or of dK and of dV."""
    rows = _without_spills(backward_dkv.TILES, p)
    if p.soft_cap is not None or p.log_base is LogBase.E:
        rows = [row for row in rows if not row.s_before_dp]
    choose = functools.partial(_row, p=p, memory=backward_dkv.DkvMemory)
    both = choose([row for row in rows if _registers_hold(_narrow(row, p, 1, 1), p)])
    if both is not None:
        return both, None, None
    return None, choose(backward_dkv.DK_TILES), choose(backward_dkv.DV_TILES)


def _registers_hold(t: KeyTiles, p: Problem) -> bool:
    """Whether a consumer holds its columns of dK and dV together."""
    owned = (t.owned_columns(p.dtype, width) for width in (t.width, t.value_width))
    return not t.split or sum(owned) <= OWNED


def _fused_row(p: Problem, processors: int) -> KeyTiles | None:
    slices = lambda row: (row.dq_column_slices, 1)
    row = _row(backward_dkv.FUSED_TILES, p, backward_dkv.DkvMemory, slices)
    return row and _with_parts(row, p, processors)


def _with_tiles_per_program(t: QueryTiles, p: Problem, processors: int) -> QueryTiles:
    """Chooses tiles_per_program: the most, up to LONG blocks of keys, that leave programs equal and
    none longer than before. Every SM starts with one, and L2 holds the keys of the heads that run
    together. It is 1 where shared memory has no room for two tiles."""
    count = schedule.ceil_div(p.queries, t.block_q)
    programs = lambda n: p.batch * p.heads * count // n
    work = lambda n: schedule.ceil_div(programs(n), processors) * n
    keys = lambda n: processors * min(n, count) // (count * p.group) * p.keys
    fits = lambda n: (
        scheduler.divide_evenly(p, count, n)
        and programs(n) > processors
        and work(n) <= work(1)
        and keys(n) * t.row_bytes(p.dtype) <= scheduler.section_bytes()
    )
    most = LONG // schedule.ceil_div(p.keys, t.block_k) if t.q_stages > 1 else 1
    n = max(filter(fits, range(2, most + 1)), default=1)
    # beside several tiles ptxas moves the wait for products before a wait at use
    k_wait = t.k_wait if n == 1 else "early"
    return t._replace(tiles_per_program=n, q_stages=min(n, t.q_stages), k_wait=k_wait)


def _with_parts(t: KeyTiles, p: Problem, processors: int) -> KeyTiles:
    """Chooses group_parts: the fewest that leave four programs to an SM, so that the last ones are
    short, and that each have queries for half of L2 at most."""
    programs = functools.partial(scheduler.key_programs, p, t.block_k)
    head_bytes = p.queries * t.row_bytes(p.dtype)
    fits = lambda n: (
        programs(n) >= 4 * processors
        and 2 * head_bytes * (p.group // n) <= scheduler.section_bytes()
    )
    parts = (n for n in range(1, p.group) if p.group % n == 0 and fits(n))
    return t._replace(group_parts=next(parts, p.group))


@functools.lru_cache(64)  # of as many steps as there are tiles
def _keys_of_a_tile(p: Problem) -> float:
    """Keys that a tile of 128 queries may see, on average, by what of the mask is no data."""
    ranges = schedule.key_ranges(p.resolved_mask, p.queries, 128)
    return sum(max(0, x.last - x.first) for x in ranges) / max(1, len(ranges))
