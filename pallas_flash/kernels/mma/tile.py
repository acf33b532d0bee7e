"""The primitives of the kernels by mma: values in registers, copies, products.

A warpgroup's four warps each own a quarter of the rows of a tile. It copies the next block while it
computes with this one, by cp.async, or by TMA where the GPU has it (FlashAttention-2,
arXiv:2307.08691). A program is one warpgroup, or two: each has half of the columns of all arrays,
and they add up their parts of S.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import widening
from pallas_flash.kernels.mosaic import registers
from pallas_flash.kernels.mosaic.launch import named_barrier, shared_matrix
from pallas_flash.kernels.mosaic.registers import Layouts, iota, per_row

# of operands of 16 bits; a jax before 0.11.2 lacks them, and tiles alone are chosen there
LHS, RHS, ACC = (
    getattr(plgpu.Layout, name, lambda dtype: None)(jnp.bfloat16)
    for name in ("MMA_LHS", "MMA_RHS", "MMA_ACC")
)
LAYOUTS = ACC and Layouts(tile=ACC, row=ACC.reduce(1), column=ACC.reduce(0))


# Values in registers


def zeros(*shape: int):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUTS.tile)


def rows(size: int, value: float):
    """A float32 for each row of a tile, all of this value."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), LAYOUTS.row)


def store(ref, x):
    """Writes to global memory, without stmatrix, which GPUs before Hopper lack."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # jax 0.11
        ref[...] = x


def store_rows(ref, x, count: int):
    """Writes the first `count` rows to global memory; warps that have none of them write
    nothing."""

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def warp(_):  # a name that the interpreter in tests/ knows
        return mgpu.FragmentedArray.splat(mgpu.utils.warp_idx(), (), is_signed=True)

    pl.when(16 * (warp() & 3) < count)(lambda: store(ref, x))


# Copies


def copy(source, smem, full=None):
    """Begins to copy to shared memory; `full`: the mbarrier of a copy by TMA, None with
    cp.async."""
    if full is None:
        plgpu.copy_gmem_to_smem(source, smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, smem, full)


def wait(full=None, running: int = 0):
    """Waits until the copies by TMA that arrive at `full` have landed, or the copies by cp.async
    except the last `running`, for all threads. All have then read what they read before, and
    copies may overwrite it."""
    if full is None:
        _wait_for_cp_async(running)
    else:
        plgpu.barrier_wait(full)
        release(tma=True)


def _wait_for_cp_async(running: int):
    """`plgpu.wait_gmem_to_smem`, which GPUs with TMA refuse."""

    @plgpu.inline_mgpu()
    def wait_for_cp_async(_):  # a name that the interpreter in tests/ knows
        mgpu.utils.nvvm.cp_async_wait_group(running)
        mgpu.warpgroup_barrier()

    wait_for_cp_async()


def release(tma: bool):
    """Waits until all threads have read what they read before, which copies may then overwrite."""
    if tma:
        plgpu.commit_smem()  # a barrier too
    else:
        plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def widen(x, stored: str, to, swizzle: int):
    """Converts a block from 8 bits to 16, and writes it to other shared memory of this swizzle."""
    # of vectors of 16 bytes in 16 bits; an assignment also loads what was there, which the compiler
    # leaves out in this layout
    layout = plgpu.Layout.SMEM_GMEM_COPY(to.shape, to.dtype, swizzle)
    x = plgpu.load(x, layout=layout, optimized=False)
    to[...] = widening.widen(x, stored, to.dtype, layout)


def sync(warpgroups: int):
    """The warpgroups of a program wait for each other, if there are several."""
    if warpgroups > 1:  # Mosaic has barrier 0, and one for each warpgroup
        named_barrier("sync", warpgroups + 1, warpgroups)


class CopyRing(NamedTuple):
    """Slots of shared memory that blocks fill in turn."""

    slots: tuple  # an array [stages, rows, width] for each matrix of a block
    full: Any  # an mbarrier for each slot; None with cp.async
    copies: int = 1  # that a matrix takes
    # warpgroups that have slots of their own among these, and which of them this one is
    parts: int = 1
    part: IntLike = 0
    warpgroups: int = 1  # that read each slot, which the first of them fills

    @property
    def stages(self) -> int:
        return self.slots[0].shape[0] // self.parts

    def _slot(self, t: IntLike):
        slot = lax.rem(jnp.asarray(t, jnp.uint32), jnp.uint32(self.stages)).astype(jnp.int32)
        return slot if self.parts == 1 else self.part * self.stages + slot

    def at(self, t: IntLike) -> list:
        """The slots of the t-th block."""
        return [x.at[self._slot(t)] for x in self.slots]

    def full_at(self, t: IntLike):
        return None if self.full is None else self.full.at[self._slot(t)]

    def wait(self, t: IntLike, behind: IntLike = 0) -> list:
        """Waits for the t-th block, behind which so many are on their way; then nobody reads the
        blocks before it."""
        self._wait(self.full_at(t), behind, max(self.stages - 2, 0))
        sync(self.warpgroups)
        return self.at(t)

    def next(self, t: IntLike, load: Callable) -> list:
        """Waits for the t-th block. load(ahead) begins to copy the block so far behind it, which is
        on its way under the products with this one. With one slot it is the t-th itself, once
        nobody reads the one before it."""
        ahead = self.stages - 1
        if not ahead:
            release(tma=self.full is not None)
            load(0)
        slots = self.wait(t)
        if ahead:
            load(ahead)
        return slots

    def wait_before(self, full, behind: IntLike):
        """Waits for a copy to other memory, behind which so many blocks are on their way."""
        self._wait(full, behind, self.stages - 1)
        sync(self.warpgroups)

    def _wait(self, full, behind: IntLike, most: int):
        """Waits with `behind` blocks on their way: `most`, except at the last blocks."""
        wait(full, most * len(self.slots) * self.copies)
        if full is None and most:  # cp.async waits for a number that is known
            pl.when(behind < most)(lambda: self._wait(full, behind, most - 1))


# Products


def load(smem):
    """A left operand, from shared memory."""
    return plgpu.load(smem, layout=LHS)


def left_operand(smem, keep: bool) -> Callable:
    """A function that returns a left operand: from registers that hold it if `keep`, or else read
    again for each product."""
    operand = load(smem) if keep else None
    return lambda: load(smem) if operand is None else operand


def dot(acc, a, b):
    """acc + a b, of a left operand a and shared memory b."""
    return plgpu.mma(acc, a, plgpu.load(b, layout=RHS))


def dot_of_rows(acc, a, b, first, last):
    """acc + a b by the rows [first, last) of b; the others may hold NaN."""
    return plgpu.mma(acc, a, load_rows(b, RHS, first, last))


def load_rows(smem, layout, first, last):
    """The rows [first, last) of shared memory, and 0 for the others."""
    # an iota of two axes would be wrong: a register has two rows, and Mosaic counts two columns
    row = iota(smem.shape[0], layout.reduce(1))
    inside = plgpu.layout_cast(per_row((row >= first) & (row < last), smem.shape), layout)
    x = plgpu.load(smem, layout=layout)
    return jnp.where(inside, x, jnp.zeros_like(x))


def dot_t(a, b, acc=None):
    """acc + a b^T, by default without an acc."""
    acc = zeros(a.shape[0], b.shape[0]) if acc is None else acc
    return dot(acc, a, b.transpose((1, 0)))


def parts_of_sum(*shape: int):
    """Shared memory for a `SumOfParts`."""
    return shared_matrix(jnp.float32, 2, 2, *shape, swizzle=32)


class SumOfParts(NamedTuple):
    """Adds up the parts of a tile that two warpgroups have, for both; the part of one is the
    sum."""

    slots: Any  # float32 [2, 2, rows, columns]: for sums in turn, of each warpgroup; or None
    part: IntLike  # the warpgroup's number

    def __call__(self, n: IntLike, x):
        """The n-th sum, after which nobody reads the (n - 2)th."""
        if self.slots is None:
            return x
        turn = lax.rem(jnp.asarray(n, jnp.int32), jnp.int32(2))
        store(self.slots.at[turn, self.part], x)
        sync(2)
        return x + registers.load(self.slots.at[turn, 1 - self.part], LAYOUTS.tile)


def by_warp(x):
    """x itself: a warp has whole rows, unlike in `sliced_k`."""
    return x


def as_left(x):
    """Reinterprets an accumulator, rounded to 16 bits, as mma's left operand."""

    @plgpu.inline_mgpu(
        arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=LHS)
    )
    def relabel(_, x):  # a name that the interpreter in tests/ knows
        left = mgpu.MMALayouts(x.mlir_dtype).lhs
        registers = x.registers.reshape(left.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=left, _is_signed=None)

    return relabel(x)
