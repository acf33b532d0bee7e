"""How the Hopper kernels tile a problem: tables, and which row a problem takes."""

import functools

from pallas_flash import dropout
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.hopper.tile_sizes import SWIZZLES, AllTiles, KeyTiles, Tiles
from pallas_flash.kernels.mma import tuning as mma
from pallas_flash.kernels.mosaic import scheduler
from pallas_flash.kernels.mosaic.tiling import cheapest
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import schedule

WIDEST = 512  # head size
# bytes of shared memory for a program's matrices, beside statistics and mbarriers
SHARED = (hardware.SHARED_KB[9.0] - 3) << 10
LONG = 64  # blocks of keys, beside which the start and the end of a program are short

# The tables: by registers, spills, shared memory and instructions of the code compiled for an H200,
# and by the clock of an H100: results.md#hopper-by-the-clock.

# Three warpgroups hide more latency at value width 64 and spill at 128. From 192 on shared memory
# is as busy as it can be, of which Q takes less the wider a block is; 128 keys spill at 256 and do
# not fit twice at 192. A block whose size is no multiple of 32 takes no dropout, and dropout spills
# wherever there are three warpgroups. O rescaled seldom spills at 64 with documents, and gains
# nothing at 256; where it is, ptxas leaves the wait for products in its place, but not if a program
# goes over several tiles: results.md#hopper-as-compiled. From 257 on blocks are as large as fit
# twice, and there are 128 queries where the registers of a warpgroup hold o of 64.
_FORWARD = (
    Tiles(width=64, value_width=64, warpgroups=3, block_k=128, k_wait="early", q_stages=2),
    Tiles(width=64, value_width=64, warpgroups=2, block_k=128, rescale_threshold=8.0),
    Tiles(width=64, value_width=128, warpgroups=2, block_k=128, rescale_threshold=8.0),
    Tiles(width=128, value_width=64, warpgroups=3, block_k=128, k_wait="early"),
    Tiles(width=128, value_width=128, warpgroups=2, block_k=128, rescale_threshold=8.0, q_stages=2),
    Tiles(width=192, value_width=128, warpgroups=2, block_k=128, rescale_threshold=8.0),
    Tiles(width=192, value_width=192, warpgroups=2, block_k=96, k_wait="early"),
    Tiles(width=128, value_width=256, warpgroups=2, block_k=96, k_wait="early"),
    Tiles(width=256, value_width=256, warpgroups=2, block_k=80, k_wait="early"),
    Tiles(width=256, value_width=256, warpgroups=2, block_k=64, k_wait="early"),
    Tiles(width=512, value_width=256, warpgroups=2, block_k=64, k_wait="early"),
    Tiles(width=512, value_width=256, warpgroups=2, block_k=32, k_wait="early"),
    Tiles(width=512, value_width=512, warpgroups=2, block_k=64, k_wait="early", split=True),
    Tiles(width=512, value_width=512, warpgroups=2, block_k=32, k_wait="early", split=True),
)
# Blocks of 128 keys leave no registers at 128, nor beside three warpgroups. A block of keys is held
# for a step longer than one of values, so there are three; at 256 there is room for two, and one of
# values. From 257 on both warpgroups compute dS of the same 64 queries: to hand it over there is no
# room beside these. No swizzle may be wider than the 32 keys that dS K sums over.
_DQ = (
    Tiles(width=64, value_width=64, warpgroups=3, block_k=64, stages=3),
    Tiles(width=128, value_width=128, warpgroups=2, block_k=64, stages=3),
    Tiles(width=192, value_width=128, warpgroups=2, block_k=64, stages=3),
    Tiles(width=192, value_width=192, warpgroups=2, block_k=64, stages=3),
    Tiles(width=256, value_width=256, warpgroups=2, block_k=64, stages=2, value_stages=1),
    *(
        Tiles(
            width=512,
            value_width=512,
            warpgroups=2,
            block_k=block_k,
            value_stages=1,
            swizzle=SWIZZLES[1],
            split=True,
        )
        for block_k in (64, 32)
    ),
)
# With all tangents there are twice as many blocks as in the forward.
_TANGENT = (
    Tiles(width=64, value_width=64, warpgroups=2, block_k=64),
    Tiles(width=128, value_width=128, warpgroups=2, block_k=64),
    Tiles(width=192, value_width=192, warpgroups=2, block_k=32),
    Tiles(width=256, value_width=256, warpgroups=1, block_k=32),
)
# Registers of a warpgroup hold S and dP beside 256 columns of dK and dV of 64 keys, one of them
# beside 320, and then nothing that a soft cap, a bias or a score_mod needs of S: these are split.
_TWO = KeyTiles(width=128, value_width=128, warpgroups=2, block_q=64, stages=2)
_SPLIT = _TWO._replace(width=256, value_width=256, split=True)
_DKV = (
    KeyTiles(width=64, value_width=64, warpgroups=3, block_q=64, stages=2),
    KeyTiles(width=64, value_width=64, warpgroups=2, block_q=64, stages=2),
    _TWO,
    *(_TWO._replace(width=n, value_width=320 - n, s_before_dp=True) for n in range(64, 257, 32)),
    _SPLIT,
    _SPLIT._replace(width=512, value_width=512, block_q=32, swizzle=SWIZZLES[1]),
)
OWNED = 288  # columns of dK and dV that the registers of a warpgroup hold where they are split
# Each alone, where they do not hold both. Beside V, which dV does without, blocks have 32 queries.
_DK = tuple(_DKV[-1]._replace(stages=n, sums=("dk",)) for n in (2, 1))
_DV = tuple(
    _DKV[-1]._replace(block_q=64, stages=n, swizzle=SWIZZLES[0], sums=("dv",)) for n in (2, 1)
)
# Each consumer computes 64 x 64 of a block's dQ. Wider heads leave no shared memory for it.
_FUSED = (
    KeyTiles(width=64, value_width=64, warpgroups=2, block_q=128, stages=2),
    KeyTiles(width=128, value_width=128, warpgroups=2, block_q=64, stages=2),
)


# Keys that a tile of queries sees, on average, from which on one kernel is faster than two
# (results.md#an-h100): zeros of dQ and its conversion cost the same whatever is seen. Causal calls
# of 1024 have 576, of 2048 1088.
ONE_KERNEL_KEYS = 768


def tiles(problem: Problem, fused: bool | None = None) -> AllTiles:
    """The cheapest row of each table that holds the problem's heads, as narrow as they are. One
    kernel has all gradients if `fused`, or by default where that is faster and gradients may be
    added in any order."""
    p = problem
    if fused is None:
        fused = not p.deterministic and _keys_of_a_tile(p) >= ONE_KERNEL_KEYS
    fused = _row(_FUSED, p) if fused else None
    if fused is None:
        backward = _dq_row(p), *_key_rows(p), None
    else:
        backward = *[None] * 4, _with_parts(_narrow(fused, p, fused.dq_column_slices), p)
    forward = _forward_row(p)
    forward = forward and _with_tiles_per_program(forward, p)
    tangent = _narrow(_row(_TANGENT, p), p)
    return AllTiles(forward, *backward, tangent, mma.tiles_if_decoding(p))


def _forward_row(p: Problem) -> Tiles | None:
    """The cheapest that shared memory holds, as narrow as the heads are; None of wider heads."""
    # of each vector of statistics, which is aligned, and of the mbarriers
    beside = 1024 * (2 + (p.log_base is LogBase.E) + p.max_logits)
    most = (hardware.SHARED_KB[9.0] << 10) - beside

    def of_heads(row: Tiles) -> Tiles:
        a_slice = schedule.ceil_div(p.value_size, row.column_slices)
        row = row._replace(swizzle=_swizzle(p.head_size, a_slice))
        return _narrow(row, p, value_slices=row.column_slices)

    fits = lambda row: of_heads(row).forward_bytes <= most
    row = cheapest(_allowed(_FORWARD, p), p, fits)
    return row and of_heads(row)


def _dq_row(p: Problem) -> Tiles | None:
    """The same for dQ."""
    swizzle = _swizzle(p.head_size, p.value_size)

    def of_heads(row: Tiles) -> Tiles:
        return _narrow(row._replace(swizzle=min(row.swizzle, swizzle)), p, row.column_slices)

    others = p.sinks or p.bias is not None or p.score is not None  # whose gradients read delta
    summing = [] if others else [row._replace(sums_delta=True) for row in _DQ if not row.split]
    row = cheapest([*summing, *_DQ], p, lambda row: of_heads(row).dq_bytes <= SHARED)
    return row and of_heads(row)


def _key_rows(p: Problem) -> tuple[KeyTiles | None, ...]:
    """Of dK and dV together, of dK, and of dV."""
    rows = _allowed(_DKV, p)
    if p.soft_cap is not None or p.log_base is LogBase.E:
        rows = [row for row in rows if not row.s_before_dp]
    both = _narrow(_row(rows, p), p)
    if both is None:
        return None, None, None
    owned = both.owned_columns(both.width) + both.owned_columns(both.value_width)
    if not both.split or owned <= OWNED:
        return both, None, None
    rows = ([_narrow(_row([row], p), p) for row in table] for table in (_DK, _DV))
    return None, *(next(t for t in of_one if t.shared_bytes <= SHARED) for of_one in rows)


def _allowed(table, p: Problem) -> list:
    """The rows in which dropout does not spill and finds whole units of keys, where p has it."""
    return [
        row
        for row in table
        if not p.dropped or (row.warpgroups == 2 and row.block_k % dropout.UNIT == 0)
    ]


def _with_tiles_per_program(t: Tiles, p: Problem) -> Tiles:
    """The same with as many tiles of queries to a program, of one head or of several, as LONG
    blocks of keys allow, where two fit into shared memory: all programs have as many, each
    processor has one to begin with, none has more to do than before, and the L2 cache holds the
    keys of all heads that run at a time, which each tile reads again."""
    count, processors = schedule.ceil_div(p.queries, t.block_q), hardware.processors()
    programs = lambda n: p.batch * p.heads * count // n
    work = lambda n: schedule.ceil_div(programs(n), processors) * n
    in_use = lambda n: processors * min(n, count) // (count * p.group) * p.keys * t.key_bytes
    fits = lambda n: (
        scheduler.divide_evenly(p, count, n)
        and programs(n) > processors
        and work(n) <= work(1)
        and in_use(n) <= scheduler.L2
    )
    most = LONG // schedule.ceil_div(p.keys, t.block_k) if t.q_stages > 1 else 1
    n = max(filter(fits, range(2, most + 1)), default=1)
    k_wait = t.k_wait if n == 1 else "early"
    return t._replace(tiles_per_program=n, q_stages=min(n, t.q_stages), k_wait=k_wait)


@functools.lru_cache(64)  # of as many steps as there are tiles
def _keys_of_a_tile(p: Problem) -> float:
    """How many keys a tile of 128 queries may see, on average, by what of the mask is no data."""
    ranges = schedule.key_ranges(p.resolved_mask, p.queries, 128)
    return sum(max(0, x.last - x.first) for x in ranges) / max(1, len(ranges))


def _with_parts(t: KeyTiles, p: Problem) -> KeyTiles:
    """The same with the heads that share keys in as few parts as leave four programs to a
    processor, so that the last ones are short, and each with queries for half of L2 at most."""
    programs = functools.partial(scheduler.key_programs, p, t.block_k)
    of_head = p.queries * t.query_bytes(fused=True)
    fits = lambda n: (
        programs(n) >= 4 * hardware.processors() and 2 * of_head * (p.group // n) <= scheduler.L2
    )
    parts = (n for n in range(1, p.group) if p.group % n == 0 and fits(n))
    return t._replace(group_parts=next(parts, p.group))


def _row(table, problem: Problem):
    """The cheapest that holds the problem's heads, with their swizzle; None where none does."""
    row = cheapest(table, problem)
    p = problem
    return row and row._replace(swizzle=min(row.swizzle, _swizzle(p.head_size, p.value_size)))


def _narrow(row, problem: Problem, slices: int = 1, value_slices: int = 1):
    """A row with no more columns than the heads need, those of queries and keys, and of values, in
    so many slices of whole tiles; None of none."""
    if row is None:
        return None
    whole = lambda size, columns: -(-size // columns) * columns
    columns = row.swizzle // 2
    return row._replace(
        width=whole(problem.head_size, slices * columns),
        value_width=whole(problem.value_size, value_slices * columns),
    )


def _swizzle(*sizes: int) -> int:
    """The widest for heads of these sizes: their columns are whole tiles, or one that hangs
    over."""
    fits = lambda size, columns: size <= columns or -(-size // 16) * 16 % columns == 0
    return next(swizzle for swizzle in SWIZZLES if all(fits(size, swizzle // 2) for size in sizes))


def padded_size(size: int, swizzle: int, itemsize: int = 2) -> int:
    """How many columns an array has for heads of `size`: whole tiles, or one that hangs over, in
    strides of 16 bytes."""
    columns = (16 if size <= swizzle // itemsize else swizzle) // itemsize
    return -(-size // columns) * columns


def padded_length(length: int) -> int:
    """How many rows: whole tiles of 8."""
    return -(-length // 8) * 8
