"""What the queries of a tile see of a block of keys: their interval, their document, and a dense
mask, as bits, or a mask_mod."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.block_info import broadcast_index
from pallas_flash.kernels.mosaic.elements import Tiling
from pallas_flash.kernels.mosaic.registers import (
    Layouts,
    ScoreTile,
    iota,
    load,
    opaque,
    per_column,
    per_row,
)
from pallas_flash.kernels.mosaic.row_mask import WORD, RowMask
from pallas_flash.masks.resolved_mask import ResolvedMask


class TileMask(NamedTuple):
    """The mask of some queries, whose intervals are in registers, which a loop over blocks
    keeps."""

    resolved_mask: ResolvedMask  # its data by row are in registers, data by key are refs
    batch: IntLike
    start: IntLike  # [queries]
    stop: IntLike
    by_pair: Any  # HeadBits, mods.HeadMod or None

    def visible(self, tile: ScoreTile):
        """Whether each query sees each key."""
        allowed = None if self.by_pair is None else self.by_pair.visible(tile)
        seen, ids = self._in_interval(tile), self.resolved_mask.query_ids
        if ids is not None:
            key_ids = tile.load_per_key(
                lambda keys: self.resolved_mask.key_ids.at[self.batch, keys]
            )
            seen = seen & (tile.per_query(ids) == key_ids)
        return seen if allowed is None else seen & allowed

    def select(self, tile: ScoreTile) -> Callable:
        """A function of x and `other`: x where each query sees each key, and `other` elsewhere."""
        visible = self.visible(tile)
        return lambda x, other: jnp.where(visible, x, other)

    def _in_interval(self, tile: ScoreTile):
        visible = self.resolved_mask.visible
        # where all rows see all keys, what follows would spill beside a mask_mod
        if tile.transposed or isinstance(self.stop, int):
            return visible(tile.per_query(self.start), tile.per_query(self.stop), tile.key_index())
        # `columns` keys at a time: relative to the first of them the ends of an interval are
        # compared with a number that the program knows
        columns = tile.layouts.columns
        shape, layout = (tile.shape[0], columns), tile.layouts.broadcast
        key = per_column(tile.first_key + iota(columns, tile.layouts.column), shape, layout)
        relative = lambda end: per_row(end, shape, layout) - key
        start = 0 if isinstance(self.start, int) and self.start == 0 else relative(self.start)
        stop = relative(self.stop)
        seen = lambda first: visible(start, stop, jnp.full(shape, first, jnp.int32))
        return jnp.concatenate([seen(n) for n in range(0, tile.shape[1], columns)], axis=1)


def load_mask(
    layouts: Layouts,
    resolved_mask: ResolvedMask,
    batch: IntLike,
    first_query: IntLike,
    size: int,
    by_pair,
    transposed: bool = False,
) -> TileMask | RowMask:
    """The mask of `size` queries from `first_query` on; transposed: they are the columns."""
    if layouts.row_in_thread:
        by = (by_pair, None) if isinstance(by_pair, HeadBits) else (None, by_pair)
        return RowMask.load(resolved_mask, batch, first_query, size, *by, transposed)
    queries = pl.ds(first_query, size)
    layout = layouts.column if transposed else layouts.row
    at = resolved_mask.narrow(
        ("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, queries], layout)
    )
    return TileMask(at, batch, *at.interval(first_query + iota(size, layout)), by_pair)


# A dense mask, a bit for each pair of a query and a key, 32 of a row to a word


class PackedMask(NamedTuple):
    """The bits of a mask, as the rows and columns of the scores have it: bit n % 32 of word n // 32
    is that of the n-th column of a block. Where all rows or all blocks have the same bits there is
    one."""

    words: jax.Array  # int32 [B or 1, N or 1, blocks or 1, words, whole tiles of rows or 1]


def pack(mask, t: Tiling) -> PackedMask:
    """A mask bool [B or 1, N or 1, T or 1, S or 1], packed in blocks of the columns of scores that
    are computed at once."""
    if t.transposed:
        x, rows, whole = mask.swapaxes(2, 3), t.block_k, t.block_q
    else:
        x, rows, whole = mask, t.block_q, t.block_k
    missing = lambda n, size: 0 if n == 1 else -n % size
    x = jnp.pad(
        x, ((0, 0), (0, 0), (0, missing(x.shape[2], rows)), (0, missing(x.shape[3], whole)))
    )
    x = jnp.broadcast_to(x, (*x.shape[:3], max(x.shape[3], t.columns))).reshape(
        *x.shape[:3], -1, t.columns
    )
    x = jnp.pad(x, ((0, 0),) * 4 + ((0, -t.columns % WORD),))
    bytes_ = jnp.packbits(x, axis=-1, bitorder="little").reshape(*x.shape[:4], -1, WORD // 8)
    return PackedMask(jnp.moveaxis(lax.bitcast_convert_type(bytes_, jnp.int32), 2, 4))


class HeadBits(NamedTuple):
    """The words of one batch row and head, a ref."""

    words: jax.Array
    batch: IntLike
    head: IntLike

    @classmethod
    def load(cls, x: PackedMask, batch: IntLike, head: IntLike) -> "HeadBits":
        return cls(x.words, *broadcast_index(x.words, batch, head))

    def visible(self, tile: ScoreTile):
        """Whether the mask lets each query see each key."""
        columns, shape = tile.layouts.columns, tile.shape
        part = shape[0], columns
        column = per_column(iota(columns, tile.layouts.column), part)

        def bits(n, word):
            word = per_row(word, part) if jnp.ndim(word) else jnp.broadcast_to(word, part)
            word = lax.shift_right_logical(word, column)
            return [
                word & (1 << bit) != 0 for bit in range(0, min(WORD, shape[1] - n * WORD), columns)
            ]

        words = self.words_of_rows(tile)
        return jnp.concatenate([x for at in enumerate(words) for x in bits(*at)], axis=1)

    def words_of_rows(self, tile: ScoreTile) -> Iterator:
        """The words of 32 columns each, a vector by row; a scalar if all rows have the same one."""
        first_row, first_column = tile.first
        _, _, blocks, count, rows = self.words.shape
        block = lax.div(first_column, jnp.int32(tile.shape[1])) if blocks > 1 else 0
        for n in range(count):
            at = self.batch, self.head, block, n
            if rows == 1:
                yield self.words[(*at, 0)]
            else:
                at = (i if isinstance(i, int) else opaque(i) for i in at)
                ref = self.words.at[(*at, pl.ds(first_row, tile.shape[0]))]
                yield load(ref, tile.layouts.row)
