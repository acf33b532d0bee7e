"""A dense mask in registers: a bit for each pair of a query and a key, 32 of a row to a word."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.block_info import broadcast_index
from pallas_flash.kernels.mosaic.registers import (
    ScoreTile,
    iota,
    load,
    opaque,
    per_column,
    per_row,
)
from pallas_flash.kernels.mosaic.tiling import Tiling

WORD = 32  # bits


class Words(NamedTuple):
    """Those of a mask, as the rows and columns of the scores have it: bit n % 32 of word n // 32 is
    that of the n-th column of a block. Where all rows or all blocks have the same bits there is
    one."""

    words: jax.Array  # int32 [B or 1, N or 1, blocks or 1, words, whole tiles of rows or 1]


def pack(mask, t: Tiling) -> Words:
    """Of a mask bool [B or 1, N or 1, T or 1, S or 1], in blocks of the columns of scores that are
    computed at once."""
    if t.transposed:
        x, rows, whole = mask.swapaxes(2, 3), t.block_k, t.block_q
    else:
        x, rows, whole = mask, t.block_q, t.block_k
    more = lambda n, size: 0 if n == 1 else -n % size
    x = jnp.pad(x, ((0, 0), (0, 0), (0, more(x.shape[2], rows)), (0, more(x.shape[3], whole))))
    x = jnp.broadcast_to(x, (*x.shape[:3], max(x.shape[3], t.columns))).reshape(
        *x.shape[:3], -1, t.columns
    )
    x = jnp.pad(x, ((0, 0),) * 4 + ((0, -t.columns % WORD),))
    bytes_ = jnp.packbits(x, axis=-1, bitorder="little").reshape(*x.shape[:4], -1, WORD // 8)
    return Words(jnp.moveaxis(lax.bitcast_convert_type(bytes_, jnp.int32), 2, 4))


class HeadMask(NamedTuple):
    """The words of one batch row and head, a ref."""

    words: jax.Array
    batch: IntLike
    head: IntLike

    def visible(self, tile: ScoreTile):
        """Whether the mask lets each query see each key."""
        (first_row, first_column), shape = tile.first, tile.shape
        _, _, blocks, count, rows = self.words.shape
        block = lax.div(first_column, jnp.int32(shape[1])) if blocks > 1 else 0
        columns = tile.layouts.columns
        part = shape[0], columns
        column = per_column(iota(columns, tile.layouts.column), part)

        def bits(n):
            at = self.batch, self.head, block, n
            if rows == 1:
                word = jnp.broadcast_to(self.words[(*at, 0)], part)
            else:
                at = (i if isinstance(i, int) else opaque(i) for i in at)
                ref = self.words.at[(*at, pl.ds(first_row, shape[0]))]
                word = per_row(load(ref, tile.layouts.row), part)
            word = lax.shift_right_logical(word, column)
            return [
                word & (1 << bit) != 0 for bit in range(0, min(WORD, shape[1] - n * WORD), columns)
            ]

        return jnp.concatenate([x for n in range(count) for x in bits(n)], axis=1)


def for_head(x: Words, batch: IntLike, head: IntLike) -> HeadMask:
    """From refs."""
    return HeadMask(x.words, *broadcast_index(x.words, batch, head))
