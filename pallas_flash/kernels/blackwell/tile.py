"""The primitives of the Blackwell kernels: values in registers, tensor memory, rings of blocks,
roles of warps."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.blackwell.tile_sizes import CONSUMERS, HALF, ROWS
from pallas_flash.kernels.mosaic import launch, logits, tma
from pallas_flash.kernels.mosaic.launch import Role
from pallas_flash.kernels.mosaic.registers import Layouts, per_row, some_below_one
from pallas_flash.kernels.mosaic.scheduler import WorkTile
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread holds a row
LAYOUTS = Layouts(tile=NATIVE, row=NATIVE.reduce(1), column=NATIVE.reduce(0))
# whose stores to shared memory meet no bank conflicts
EPILOGUE = Layouts(
    tile=plgpu.Layout.TCGEN05,
    row=plgpu.Layout.TCGEN05.reduce(1),
    column=plgpu.Layout.TCGEN05.reduce(0),
)


def rows(value: float):
    """A float32 value of each row of a warpgroup, the same for all."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUTS.row)


def store_rows(ref, x):
    """Stores a value of each row, or several, to global memory."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # jax 0.11
        ref[...] = x


# 2^x by multiply-adds, for a share of a tile: of exponentials the special units of a B200 compute
# 16 a clock, which binds the forward of narrow heads

# 2^f for f in [-1/2, 1/2] is 1 + f (C1 + f (C2 + f (C3 + f C4))), with a relative error of at most
# EXP2_ERROR: lse keeps the precision that it has elsewhere. 2^0 is 1, so that 2^-127 can be 0.
_COEFFICIENTS = 0.693124201, 0.240240994, 0.0559063402, 0.00958281374
EXP2_ERROR = 3e-6
_LEAST = -127.0  # 2^x is 0 from here on, and inexact from -126 on, where numbers are subnormal
_TO_INTEGER = 1.5 * 2**23  # what is added to it is rounded to an integer, in the low bits


def exp2(x):
    """2^x of float32 x below 127."""
    x = jnp.maximum(x, _LEAST)
    integer = lax.optimization_barrier(x + _TO_INTEGER)  # XLA would add up both constants
    f = x - (integer - _TO_INTEGER)
    c1, c2, c3, c4 = _COEFFICIENTS
    power = 1.0 + f * (c1 + f * (c2 + f * (c3 + f * c4)))
    bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits(power) + (bits(integer) << 23), jnp.float32)


def exp2_of_tile(x, columns: int):
    """2^x of a tile, of its last `columns` columns by multiply-adds."""
    first = x.shape[1] - columns
    parts = [(jnp.exp2, x[:, :first])] if first else []
    parts += [(exp2, x[:, first:])] if columns else []
    return jnp.concatenate([power(part) for power, part in parts], axis=1)


def head_logits(p: Problem, t, x: logits.Arrays, batch: IntLike, head: IntLike) -> logits.Logits:
    """The logits of a head, for a kernel of gradients with the tiles t."""
    of_head = logits.for_head(p, LAYOUTS, x, batch, head)
    return of_head._replace(exp2=functools.partial(exp2_of_tile, columns=t.exp2_columns))


# mbarriers


def ordered_barriers(count: int, arrivals: int = 1) -> plgpu.Barrier:
    """mbarriers by which products, or loads and stores of tensor memory, wait for each other."""
    return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals, orders_tensor_core=True)


# Tensor memory

SWIZZLED_COLUMNS = 64  # of 16 bits, side by side in shared memory


def left_operands(dtype, *columns: int) -> tuple:
    """A tile of 16 bits in parts of so many columns."""
    return tuple(plgpu.TMEM((ROWS, n), dtype, packed=True) for n in columns)


def column_slices(width: int, size: int) -> list[pl.Slice]:
    """The columns of a matrix, `size` at a time."""
    return [pl.ds(first, min(size, width - first)) for first in range(0, width, size)]


def rescale(o, alpha):
    """Multiplies O [128, n] in tensor memory by alpha [128], at most 1, of each row; each warp does
    only if one of its rows asks for it, and without waiting for other warps."""

    @pl.when(some_below_one(alpha, LAYOUTS.row) > 0)
    def _():
        for columns in column_slices(o.shape[1], 32):
            x = plgpu.async_load_tmem(o.at[:, columns], layout=LAYOUTS.tile)
            await_loads()
            plgpu.async_store_tmem(o.at[:, columns], x * per_row(alpha, x.shape))
        await_stores()


def in_16_bits(dtype):
    """P or dS of a tile, as a left operand."""
    return plgpu.TMEM((ROWS, ROWS), dtype, packed=True)


def half_slice(number: int) -> pl.Slice:
    """The first or the second half of the rows or columns of a tile."""
    return pl.ds(number * HALF, HALF)


def dot_t(acc, a, b, accumulate: bool = False):
    """acc = a b^T, or acc += a b^T."""
    plgpu.tcgen05_mma(acc, a, b.transpose((1, 0)), accumulate=accumulate)


def load_columns(ref, columns: pl.Slice, size: int) -> list:
    """These columns of a float32 tile, in pieces of `size`."""
    pieces = [
        plgpu.async_load_tmem(ref.at[:, pl.ds(columns.start + d, size)], layout=LAYOUTS.tile)
        for d in range(0, columns.size, size)
    ]
    await_loads()
    return pieces


def store(ref, first: int, pieces: list):
    """Stores pieces side by side, from column `first` on, and waits until they are there."""
    for piece in pieces:
        at = pl.ds(first, piece.shape[1])
        plgpu.async_store_tmem(ref.at[:, at], piece.astype(ref.dtype))
        first += piece.shape[1]
    await_stores()


def write(smem, ref, columns: range, factor: float = 1.0):
    """Writes float32 sums, times a factor, to shared memory: SWIZZLED_COLUMNS from each of these
    columns on."""
    for d in columns:
        at = pl.ds(d, SWIZZLED_COLUMNS)
        x = plgpu.async_load_tmem(ref.at[:, at], layout=EPILOGUE.tile)
        smem[:, at] = (x if factor == 1.0 else x * factor).astype(smem.dtype)
    await_loads()


def write_out(gmem, ref, factor: float):
    """Writes float32 sums, times a factor, to rows of global memory."""
    for columns in column_slices(ref.shape[1], SWIZZLED_COLUMNS):
        x = plgpu.async_load_tmem(ref.at[:, columns], layout=EPILOGUE.tile)
        store_rows(gmem.at[:, columns], x if factor == 1.0 else x * factor)
    await_loads()


def await_loads():
    """Waits, as a warp by itself, for its loads from tensor memory."""

    @plgpu.inline_mgpu()
    def tcgen05_wait_ld(_):  # a name that jax's interpreter knows
        mgpu.utils.inline_ptx("tcgen05.wait::ld.sync.aligned;")

    tcgen05_wait_ld()


def await_stores():
    """Waits, as a warp by itself, for its stores to tensor memory."""

    @plgpu.inline_mgpu()
    def tcgen05_wait_st(_):  # a name that jax's interpreter knows
        mgpu.utils.inline_ptx("tcgen05.wait::st.sync.aligned;")

    tcgen05_wait_st()


# Blocks in shared memory


class Ring(NamedTuple):
    """Slots in shared memory for `count` blocks, numbered from 0 on, which TMA fills and products
    read."""

    smem: Any  # [stages, ...], or a pytree of such arrays
    full: Any  # an mbarrier for each slot
    free: Any
    count: IntLike
    is_lent: bool = False  # whether the last slot is taken until whoever has it arrives at `free`

    @property
    def stages(self) -> int:
        return jax.tree.leaves(self.smem)[0].shape[0]

    def slot(self, n: IntLike) -> IntLike:
        return tma.slot(n, self.stages)

    def block(self, n: IntLike):
        return jax.tree.map(lambda smem: smem.at[self.slot(n)], self.smem)

    def fill(self, n: IntLike, source):
        """Begins to load block n, once its slot is free."""
        at = self.slot(n)
        taken = n >= self.stages - self.is_lent
        pl.when(taken)(lambda: plgpu.barrier_wait(self.free.at[at]))
        copy = lambda smem, source: plgpu.copy_gmem_to_smem(source, smem.at[at], self.full.at[at])
        jax.tree.map(copy, self.smem, source)

    def wait(self, n: IntLike):
        """Waits until block n is there."""
        plgpu.barrier_wait(self.full.at[self.slot(n)])

    def release(self, n: IntLike):
        """Frees the slot of block n after the products that this thread has begun, if another block
        waits for it."""
        free = lambda: plgpu.tcgen05_commit_arrive(self.free.at[self.slot(n)])
        pl.when(n + self.stages < self.count)(free)

    def give_back(self):
        """Frees the slot that is lent, if a block waits for it."""
        last = self.stages - 1
        pl.when(last < self.count)(lambda: plgpu.barrier_arrive(self.free.at[last]))

    def if_block(self, n: IntLike, *functions: Callable[[IntLike], None]):
        """Calls functions of block n where there is one."""

        @pl.when(n < self.count)
        def _():
            for function in functions:
                function(n)


def rows_of_pair(t, batch: IntLike, head: IntLike, first: IntLike, arrays) -> Iterator:
    """128 rows of a head, from `first` on, of q and do, or of k and v, in global memory."""
    for array, width in zip(arrays, (t.width, t.value_width), strict=True):
        yield tma.head_rows(array, batch, pl.ds(first, ROWS), head, width)


def load_owned(t, work: WorkTile, head: IntLike, rows: tma.RaggedRows, smem, full):
    """Begins to load what a program owns: its tile of q and do, or of k and v."""

    def copy(first, *arrays):
        sources = rows_of_pair(t, work.batch, head, first, arrays)
        for source, to, loaded in zip(sources, smem, full, strict=True):
            plgpu.copy_gmem_to_smem(source, to, loaded)

    rows.reader(work.batch, ROWS)(work.tile, copy)


def load_keys(t, work: WorkTile, keys: tma.RaggedRows, blocks: schedule.Blocks, k: Ring, v: Ring):
    """Fills the rings with the blocks of keys and values that a program visits."""
    read = keys.reader(work.batch, ROWS)

    def load(n, _):
        def fill(first, *arrays):
            sources = rows_of_pair(t, work.batch, work.kv_head, first, arrays)
            for ring, source in zip((k, v), sources, strict=True):
                ring.fill(n, source)

        read(blocks.index(blocks.first + n), fill)

    schedule.loop(0, k.count, load, None)


# Roles


def specialize(compute: Callable[[int], None], products: Callable, produce: Callable):
    """The roles of the backward: compute(number) in each of the CONSUMERS, and in one warpgroup
    more a warp that begins the products, and one that loads."""
    launch.specialize(
        *(Role(lambda _, n=n: compute(n), registers=208) for n in range(CONSUMERS)),
        Role(warps(products, produce), registers=88),
    )


def warps(*tasks: Callable[[], None]) -> Callable:
    """What a warpgroup runs whose warps have a task each; those without one end."""

    def run(_):
        @plgpu.warp_map
        def _(warp):
            for number, task in enumerate(tasks):
                pl.when(warp == number)(task)

    return run
