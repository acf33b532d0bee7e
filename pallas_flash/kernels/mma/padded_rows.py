"""Matrices in global memory, of which the kernels copy blocks of rows to shared memory."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.tuning import padded_length
from pallas_flash.kernels.mosaic.ragged_tail import RaggedRows, copy_tails


class PaddedRows(RaggedRows):
    """Arrays [B, length, heads * width]. cp.async cannot stop where an array ends: a block that
    hangs over is read from a copy that has zeros behind that end."""

    @classmethod
    def make(cls, arrays, widths, size: int, lengths: jax.Array | None) -> "PaddedRows":
        """Of arrays [B, length, heads, n], with zeros up to these widths, in blocks of `size` rows;
        of each batch row so many are read, int32 [B], or all."""
        B, length = arrays[0].shape[:2]
        if lengths is None and length % size and length > size:
            lengths = jnp.full((B,), length, jnp.int32)
        rows = max(length, size)  # at least one block
        arrays = [pad(x, rows, width) for x, width in zip(arrays, widths, strict=True)]
        tails = copy_tails(lengths, size, *arrays)
        if tails is not None:
            tails = tails._replace(arrays=tuple(map(flat, tails.arrays)))
        return cls(tuple(map(flat, arrays)), tails)

    @property
    def dtype(self):
        return self.arrays[0].dtype

    def copy(self, block: IntLike, batch: IntLike, head: IntLike, slots, full):
        """Begins to copy a block of rows of a head to each slot; `full` as in tile.copy."""
        size = slots[0].shape[0]

        def copy(first, *arrays):
            for x, slot in zip(arrays, slots, strict=True):
                width = slot.shape[1]
                tile.copy(x.at[batch, pl.ds(first, size), pl.ds(head * width, width)], slot, full)

        self.reader(batch, size)(block, copy)

    def loader(self, ring: tile.CopyRing, batch: IntLike, head: IntLike, blocks, position=None):
        """load(t), which begins to copy the block at position t of `blocks` of a head, if there is
        one; to the ring it is the position(t)-th, by default the t-th."""

        def load(t):
            n = t if position is None else position(t)
            copy = lambda: self.copy(blocks.index(t), batch, head, ring.at(n), ring.full_at(n))
            pl.when(t < blocks.last)(copy)

        return load


def pad(x: jax.Array, rows: int, width: int) -> jax.Array:
    """[B, length, heads, n] with zeros up to so many rows, or those that TMA asks for, and to this
    width."""
    more = padded_length(rows) - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, width - x.shape[3])))


def flat(x: jax.Array) -> jax.Array:
    """[B, length, heads * width] of [B, length, heads, width]: cp.async takes no axis between rows
    and columns."""
    return x.reshape(*x.shape[:2], -1)
