"""A dense mask in registers: a bit for each pair of a query and a key, 32 of a row to a word."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import ruled, seen, sync, tile
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles, Tiles
from pallas_flash.mods.mask_mod import BoundMaskMod
from pallas_flash.pytrees import IntLike

WORD = 32  # bits
COLUMNS = 8  # of a tile that lie in the registers as the next ones do


class Words(NamedTuple):
    """Those of a mask, as the rows and columns of the scores have it: bit n % 32 of word n // 32 is
    that of the n-th column of a block. Where all rows or all blocks have the same bits there is
    one."""

    words: jax.Array  # int32 [B or 1, N or 1, blocks or 1, words, whole tiles of rows or 1]

    def of(self, batch: IntLike, head: IntLike) -> "OfHead":
        """From refs."""
        return OfHead(self.words, *seen.entry(self.words, batch, head))


def inputs(
    p: Problem, mask: jax.Array | None, where: BoundMaskMod | None, t: Tiles | KeyTiles
) -> Words | ruled.Numbers | None:
    """What a kernel reads of a dense mask [B or 1, N or 1, T or 1, S or 1], or of a rule; None
    without either."""
    return ruled.numbers(p, where, t.block_q, t.block_k) if mask is None else _words(mask, t)


def of(
    p: Problem, x: Words | ruled.Numbers | None, batch: IntLike, head: IntLike
) -> "OfHead | ruled.OfHead | None":
    """That of a batch row and head, from refs."""
    return (
        x.of(batch, head)
        if isinstance(x, Words)
        else ruled.of(p.resolved_mask.mask_mod, x, batch, head)
    )


def _words(mask, t: Tiles | KeyTiles) -> Words:
    """In blocks of the columns that scores are computed of at once: of keys; or, where keys are the
    rows, of 64 queries."""
    if isinstance(t, KeyTiles):
        x, rows, whole, columns = mask.swapaxes(2, 3), t.block_k, t.block_q, ROWS
    else:
        x, rows, whole, columns = mask, t.block_q, t.block_k, t.block_k
    more = lambda n, size: 0 if n == 1 else -n % size
    x = jnp.pad(x, ((0, 0), (0, 0), (0, more(x.shape[2], rows)), (0, more(x.shape[3], whole))))
    x = jnp.broadcast_to(x, (*x.shape[:3], max(x.shape[3], columns))).reshape(
        *x.shape[:3], -1, columns
    )
    x = jnp.pad(x, ((0, 0),) * 4 + ((0, -columns % WORD),))
    bytes_ = jnp.packbits(x, axis=-1, bitorder="little").reshape(*x.shape[:4], -1, WORD // 8)
    return Words(jnp.moveaxis(lax.bitcast_convert_type(bytes_, jnp.int32), 2, 4))


class OfHead(NamedTuple):
    """The words of one batch row and head, a ref."""

    words: jax.Array
    batch: IntLike
    head: IntLike

    def allowed(self, first_query: IntLike, first_key: IntLike, shape, transposed: bool = False):
        """Whether the mask lets each query see each key of a block, in the shape of the scores."""
        first_row, first_column = (
            (first_key, first_query) if transposed else (first_query, first_key)
        )
        _, _, blocks, count, rows = self.words.shape
        block = lax.div(first_column, jnp.int32(shape[1])) if blocks > 1 else 0
        eight = shape[0], COLUMNS
        column = tile.down(tile.count(COLUMNS, tile.COLUMN), eight)

        def bits(n):
            at = self.batch, self.head, block, n
            if rows == 1:
                word = jnp.broadcast_to(self.words[(*at, 0)], eight)
            else:
                at = (i if isinstance(i, int) else sync.opaque(i) for i in at)
                word = tile.across(
                    tile.load(self.words.at[(*at, pl.ds(first_row, shape[0]))], tile.ROW), eight
                )
            word = lax.shift_right_logical(word, column)
            return [
                word & (1 << bit) != 0 for bit in range(0, min(WORD, shape[1] - n * WORD), COLUMNS)
            ]

        return jnp.concatenate([part for n in range(count) for part in bits(n)], axis=1)
