"""A bias in registers, read from global memory where it is added."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.block_info import broadcast_index
from pallas_flash.kernels.mosaic.elements import Tiling
from pallas_flash.kernels.mosaic.registers import ScoreTile, load, per_column, per_row


def pad(bias: jax.Array | None, t: Tiling) -> jax.Array | None:
    """A bias [B or 1, N or 1, T or 1, S or 1] as the scores' rows and columns have it, whole tiles
    of them. None without one."""
    if bias is None:
        return None
    pads = (
        (0, 0 if n == 1 else -n % size)
        for n, size in zip(bias.shape[2:], (t.block_q, t.block_k), strict=True)
    )
    x = jnp.pad(bias, ((0, 0), (0, 0), *pads))
    return x.swapaxes(2, 3) if t.transposed else x


class HeadBias(NamedTuple):
    """The bias of one batch row and head, a ref."""

    array: jax.Array
    batch: IntLike
    head: IntLike

    def load(self, tile: ScoreTile):
        """The bias of a tile of scores, float32."""
        _, _, rows, columns = self.array.shape
        part = [
            0 if size == 1 else pl.ds(start, n)
            for size, start, n in zip((rows, columns), tile.first, tile.shape, strict=True)
        ]
        at = self.batch, self.head, *part
        if rows == columns == 1:
            return self.array[at].astype(jnp.float32)
        ref, layouts = self.array.at[at], tile.layouts
        if rows == 1:
            return per_column(load(ref, layouts.column).astype(jnp.float32), tile.shape)
        if columns == 1:
            return per_row(load(ref, layouts.row).astype(jnp.float32), tile.shape)
        return load(ref, layouts.tile).astype(jnp.float32)


def for_head(x, batch: IntLike, head: IntLike) -> HeadBias | None:
    """The bias of a head, from a ref of what `pad` made; None without one."""
    return None if x is None else HeadBias(x, *broadcast_index(x, batch, head))
