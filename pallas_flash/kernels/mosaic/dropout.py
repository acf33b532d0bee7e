"""Which weights of a tile dropout keeps. Random words are shared as registers are: ptxas alone does
not always see who shares."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.registers import ScoreTile, iota, per_column, per_row


class Dropout(NamedTuple):
    """The dropout of a batch row and head. The first key of a tile is a multiple of 32, or of 16 in
    a tile of 16 keys."""

    dropped: int
    first: jax.Array
    second: jax.Array

    def keeps(self, tile: ScoreTile):
        """Whether each weight is kept."""
        return self._keeps_transposed(tile) if tile.transposed else self._keeps(tile)

    def _keeps(self, tile: ScoreTile):
        queries, keys = tile.shape
        count = max(keys // 4, 8)
        number, words = iota(count, tile.layouts.column), (queries, count)
        of_row = dropout.of_row(self.first, tile.first_query + iota(queries, tile.layouts.row))
        key = tile.first_key + (number & ~7) * 4 + (number & 7)
        of_column = dropout.of_column(self.second, key)
        word = dropout.word(per_row(of_row, words), per_column(of_column, words))
        # the first of its 32 keys, which the program knows
        first = tile.first_key if keys < dropout.UNIT else np.int32(0)
        eight = lambda key: dropout.stays(
            self.dropped, word[:, key // 32 * 8 :][:, :8], first + np.int32(key)
        )
        return jnp.concatenate([eight(key) for key in range(0, keys, 8)], axis=1)

    def _keeps_transposed(self, tile: ScoreTile):
        keys, queries = shape = tile.shape
        key = iota(keys, tile.layouts.row)
        of_row = dropout.of_row(self.first, tile.first_query + iota(queries, tile.layouts.column))
        of_column = dropout.of_column(dropout.of_column(self.second, tile.first_key), key)
        word = dropout.word(per_column(of_row, shape), per_row(of_column, shape))
        return dropout.stays(self.dropped, word, per_row(key, shape))


def for_head(dropped: int, seeds, batch: IntLike, head: IntLike) -> Dropout | None:
    """The dropout of a head, from seeds [B, N, 2]; None without it."""
    return Dropout(dropped, seeds[batch, head, 0], seeds[batch, head, 1]) if dropped else None
