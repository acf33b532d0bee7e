"""Copies by TMA: arrays that it can read, rows of a head, the slots of blocks, and the way out.

TMA knows only where an array ends. Behind the lengths of batch rows may be NaN, and 0 * NaN is NaN:
tails have zeros there."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import elements
from pallas_flash.kernels.mosaic.registers import opaque


def pad(x, swizzle: int):
    """An array [B, length, heads, size] with zeros up to what TMA's tiles divide."""
    _, length, _, size = x.shape
    rows = elements.round_up(length, elements.TILE_ROWS) - length
    columns = elements.padded_size(x.dtype, size, swizzle) - size
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) if rows or columns else x


class Tails(NamedTuple):
    """The block of some arrays in which the length of each batch row ends."""

    block: Any  # int32 [B]
    arrays: tuple  # each [B, size, heads, n], with zeros behind the length


def copy_tails(lengths: jax.Array | None, size: int, *arrays: jax.Array) -> Tails | None:
    """The Tails of arrays [B, length, heads, n] in blocks of `size` rows; lengths: int32 [B], or
    None where there are none."""
    if lengths is None:
        return None
    block = jnp.maximum(lengths - 1, 0) // size
    row = block[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    rows = lambda x: jnp.take_along_axis(x, row[:, :, None, None], axis=1, mode="clip")
    exists = (row < lengths[:, None])[:, :, None, None]
    return Tails(block, jax.tree.map(lambda x: jnp.where(exists, rows(x), 0), arrays))


class RaggedRows(NamedTuple):
    """q and do, or k and v, each an array or a pytree, of which a kernel reads blocks of rows."""

    arrays: tuple
    tails: Tails | None

    def reader(self, batch: IntLike, size: int):
        """read(block, copy), which calls copy(first row, *arrays) with the arrays, or from the
        block on in which the length ends with the tails."""
        arrays, tails = self
        if tails is None:
            return lambda block, copy: copy(block * size, *arrays)
        end = tails.block[batch]
        return lambda block, copy: lax.cond(
            block < end, lambda: copy(block * size, *arrays), lambda: copy(0, *tails.arrays)
        )


def padded_rows(arrays, size: int, lengths, swizzle: int) -> RaggedRows:
    """Arrays [B, length, heads, n], padded, to be read in blocks of `size` rows."""
    arrays = jax.tree.map(lambda x: pad(x, swizzle), tuple(arrays))
    return RaggedRows(arrays, copy_tails(lengths, size, *arrays))


def head_rows(array, batch, rows: pl.Slice, head, width: int):
    """Rows of a head of a global array [B, length, heads, n]: `width` columns. From column n on
    TMA reads zeros and writes nothing."""
    whole = array.shape[3] == width
    # jax 0.12 refuses to know that it hangs over
    columns = pl.ds(0 if whole else opaque(0) * 64, width)
    return array.at[batch, rows, head, columns]


def slot(t: IntLike, stages: int):
    """The slot of the t-th block."""
    # the remainder of a signed number takes more instructions
    unsigned = jnp.asarray(t, jnp.uint32)
    return lax.rem(unsigned, jnp.uint32(stages)).astype(jnp.int32)


def fence():
    """Lets TMA and tensor cores read what this thread has written to shared memory."""

    @plgpu.inline_mgpu()
    def fence_async_shared_cta(_):  # a name that the interpreter knows
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;")

    fence_async_shared_cta()


def copy_out(*pairs):
    """Copies what was just written to shared memory to global memory, and waits until it has left:
    a program may end then."""
    plgpu.commit_smem()
    for smem, target in pairs:
        plgpu.copy_smem_to_gmem(smem, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
