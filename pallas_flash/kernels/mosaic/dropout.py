"""Which weights of a tile dropout keeps. Random words are shared as registers are: ptxas alone does
not always see who shares. Where a thread holds a row, it keeps a bit for each weight."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import row_mask
from pallas_flash.kernels.mosaic.registers import ScoreTile, iota, per_column, per_row


class BitsAndWeight(NamedTuple):
    """P before dropout, or what stands for it, and which of it is kept, for `gradient`."""

    weight: Any
    words: list


class Dropout(NamedTuple):
    """The dropout of a batch row and head. The first key of a tile is a multiple of 32, or of 16 in
    a tile of 16 keys."""

    dropped: int
    first: jax.Array
    second: jax.Array

    def drop(self, p, tile: ScoreTile):
        """P with 0 where a weight is dropped."""
        if tile.layouts.row_in_thread:
            return row_mask.select(p, self._words(tile), 0.0)
        return jnp.where(self._keeps(tile), p, 0.0)

    def mark(self, p, weight, tile: ScoreTile):
        """P with 0 where a weight is dropped, and the weight as `gradient` takes it."""
        if tile.layouts.row_in_thread:
            words = self._words(tile)
            return row_mask.select(p, words, 0.0), BitsAndWeight(weight, words)
        keeps = self._keeps(tile)
        return jnp.where(keeps, p, 0.0), jnp.where(keeps, weight, -weight)

    def _keeps(self, tile: ScoreTile):
        """Whether each weight is kept."""
        return self._keeps_transposed(tile) if tile.transposed else self._keeps_rows(tile)

    def _words(self, tile: ScoreTile) -> list:
        """Whether each weight is kept, in bits, where a thread holds a row."""
        words = self._words_of_keys if tile.transposed else self._words_of_queries
        return [words(part) for part in tile.split(row_mask.WORD)]

    def _words_of_queries(self, tile: ScoreTile):
        row = iota(tile.shape[0], tile.layouts.row)
        row_part = dropout.row_part(self.first, tile.first_query + row)
        second = dropout.column_part(self.second, jnp.asarray(tile.first_key, jnp.int32))
        keys = (jnp.asarray(n, jnp.int32) for n in range(8))
        return self._pack(dropout.word(row_part, dropout.column_part(second, key)) for key in keys)

    def _words_of_keys(self, tile: ScoreTile):
        """Four rows share random words: each of them computes the words of eight queries, and
        then they exchange the bits."""
        row, lane = iota(tile.shape[0], tile.layouts.row), row_mask.lane(tile.shape[0])
        row_part = dropout.row_part(self.first, tile.first_query + lane)
        column_part = dropout.column_part(self.second, tile.first_key + row)
        words = (dropout.word(row_mask.from_eight(row_part, n), column_part) for n in range(8))
        return row_mask.transpose(self._pack(words), (16, 8))

    def _pack(self, words: Iterator):
        """Whether the weights of eight random words are kept: bit n of each byte is for word n, and
        the bytes, the first of which is a word's highest, come in order."""
        in_each_byte = lambda n: np.uint32(n * 0x01010101)
        bits = np.uint32(0)
        for word in words:
            # the highest bit of a byte: whether the byte is at least `dropped`
            sum_ = (word & in_each_byte(0x7F)) + in_each_byte(-self.dropped % 128)
            kept = word | sum_ if self.dropped <= 128 else word & sum_
            bits = (bits >> np.uint32(1)) + (kept & in_each_byte(0x80))
        bits = row_mask.swap_halves(bits)
        return (bits & np.uint32(0xFF00FF)) << np.uint32(8) | bits >> np.uint32(8) & np.uint32(
            0xFF00FF
        )

    def _keeps_rows(self, tile: ScoreTile):
        queries, keys = tile.shape
        count = max(keys // 4, 8)
        number, words = iota(count, tile.layouts.column), (queries, count)
        row_part = dropout.row_part(self.first, tile.first_query + iota(queries, tile.layouts.row))
        key = tile.first_key + (number & ~7) * 4 + (number & 7)
        column_part = dropout.column_part(self.second, key)
        word = dropout.word(per_row(row_part, words), per_column(column_part, words))
        # the first of its 32 keys, which the program knows
        first = tile.first_key if keys < dropout.UNIT else np.int32(0)
        eight = lambda key: dropout.stays(
            self.dropped, word[:, key // 32 * 8 :][:, :8], first + np.int32(key)
        )
        return jnp.concatenate([eight(key) for key in range(0, keys, 8)], axis=1)

    def _keeps_transposed(self, tile: ScoreTile):
        keys, queries = shape = tile.shape
        key = iota(keys, tile.layouts.row)
        row_part = dropout.row_part(
            self.first, tile.first_query + iota(queries, tile.layouts.column)
        )
        column_part = dropout.column_part(dropout.column_part(self.second, tile.first_key), key)
        word = dropout.word(per_column(row_part, shape), per_row(column_part, shape))
        return dropout.stays(self.dropped, word, per_row(key, shape))


def gradient(marked, dp, delta):
    """dS without dropout's scale, from a weight of `Dropout.mark`."""
    if isinstance(marked, BitsAndWeight):
        words = [row_mask.swap_halves(word) for word in marked.words]
        return marked.weight * (row_mask.select(dp, words, 0.0, flip=row_mask.WORD // 2) - delta)
    return jnp.maximum(marked, 0.0) * dp - jnp.abs(marked) * delta


def for_head(dropped: int, seeds, batch: IntLike, head: IntLike) -> Dropout | None:
    """The dropout of a head, from seeds [B, N, 2]; None without it."""
    return Dropout(dropped, seeds[batch, head, 0], seeds[batch, head, 1]) if dropped else None
