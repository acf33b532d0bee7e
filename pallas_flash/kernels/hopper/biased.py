"""A bias in registers, read from global memory where it is added."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.hopper import seen, tile
from pallas_flash.kernels.hopper.tuning import KeyTiles, Tiles
from pallas_flash.pytrees import IntLike


def whole(bias: jax.Array | None, t: Tiles | KeyTiles) -> jax.Array | None:
    """A bias [B or 1, N or 1, T or 1, S or 1] as the scores' rows and columns have it, whole tiles
    of them: where keys are the rows, transposed. None without one."""
    if bias is None:
        return None
    more = (
        (0, 0 if n == 1 else -n % size)
        for n, size in zip(bias.shape[2:], (t.block_q, t.block_k), strict=True)
    )
    x = jnp.pad(bias, ((0, 0), (0, 0), *more))
    return x.swapaxes(2, 3) if isinstance(t, KeyTiles) else x


class OfHead(NamedTuple):
    """That of one batch row and head, a ref."""

    array: jax.Array
    batch: IntLike
    head: IntLike

    def of(self, first_query: IntLike, first_key: IntLike, shape, transposed: bool):
        """Of a block of queries and keys, float32 in the shape of the scores."""
        first, (_, _, rows, columns) = (
            (first_key, first_query) if transposed else (first_query, first_key),
            self.array.shape,
        )
        part = [
            0 if whole == 1 else pl.ds(start, n)
            for whole, start, n in zip((rows, columns), first, shape, strict=True)
        ]
        at = (self.batch, self.head, *part)
        if rows == columns == 1:
            return self.array[at].astype(jnp.float32)
        layout = tile.COLUMN if rows == 1 else tile.ROW if columns == 1 else tile.TILE
        spread = tile.down if rows == 1 else tile.across if columns == 1 else lambda x, shape: x
        return spread(tile.load(self.array.at[at], layout).astype(jnp.float32), shape)


def of(x, batch: IntLike, head: IntLike) -> OfHead | None:
    """From a ref of `whole`; None without one."""
    return None if x is None else OfHead(x, *seen.entry(x, batch, head))
