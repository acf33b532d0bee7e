"""Matrices in global memory, padded so that kernels may copy whole blocks of rows."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.tile_sizes import padded_length
from pallas_flash.kernels.mosaic.tma import RaggedRows, copy_tails


class PaddedRows(RaggedRows):
    """Arrays [B, length, heads * width]. cp.async cannot stop where an array ends: a block that
    hangs over is read from a copy with zeros behind the end."""

    @classmethod
    def make(cls, arrays, widths, size: int, lengths: jax.Array | None) -> "PaddedRows":
        """Pads arrays [B, length, heads, n] with zeros to these widths, for blocks of `size` rows,
        of which the kernel reads `lengths` in each batch row, int32 [B], or all."""
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
        """A function load(t) that begins to copy the t-th of a head's `blocks`, if there is one, to
        the ring, where it is the position(t)-th, by default the t-th."""

        def load(t):
            n = t if position is None else position(t)
            copy = lambda: self.copy(blocks.index(t), batch, head, ring.at(n), ring.full_at(n))
            pl.when(t < blocks.last)(copy)

        return load


def pad(x: jax.Array, rows: int, width: int) -> jax.Array:
    """Pads [B, length, heads, n] with zeros to so many rows, or the next number that TMA takes, and
    to this width."""
    rows = padded_length(rows)
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, width - x.shape[3])))


def flat(x: jax.Array) -> jax.Array:
    """Reshapes [B, length, heads, width] to [B, length, heads * width]: cp.async takes no axis
    between rows and columns."""
    return x.reshape(*x.shape[:2], -1)
