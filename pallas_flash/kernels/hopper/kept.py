"""Which weights of a tile dropout keeps. Random words are shared as registers are: ptxas alone does
not always see who shares."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout
from pallas_flash.kernels.hopper import tile
from pallas_flash.pytrees import IntLike


class Dropout(NamedTuple):
    """Of a batch row and head. The first key of a tile is a multiple of 32."""

    dropped: int
    first: jax.Array
    second: jax.Array

    def keeps(self, first_query: IntLike, first_key: IntLike, shape):
        """Whether each weight is kept, [queries, keys]."""
        queries, keys = shape
        number, words = tile.count(keys // 4, tile.COLUMN), (queries, keys // 4)
        of_row = dropout.of_row(self.first, first_query + tile.count(queries, tile.ROW))
        of_column = dropout.of_column(self.second, first_key + (number & ~7) * 4 + (number & 7))
        word = dropout.word(tile.across(of_row, words), tile.down(of_column, words))
        eight = lambda key: dropout.stays(
            self.dropped, word[:, key // 32 * 8 :][:, :8], np.int32(key)
        )
        return jnp.concatenate([eight(key) for key in range(0, keys, 8)], axis=1)

    def keeps_transposed(self, first_query: IntLike, first_key: IntLike, shape):
        """Whether each weight is kept, [keys, queries]."""
        keys, queries = shape
        key = tile.count(keys, tile.ROW)
        of_row = dropout.of_row(self.first, first_query + tile.count(queries, tile.COLUMN))
        of_column = dropout.of_column(dropout.of_column(self.second, first_key), key)
        word = dropout.word(tile.down(of_row, shape), tile.across(of_column, shape))
        return dropout.stays(self.dropped, word, tile.across(key, shape))


def of(dropped: int, seeds, batch: IntLike, head: IntLike) -> Dropout | None:
    """From seeds [B, N, 2]; None without dropout."""
    return Dropout(dropped, seeds[batch, head, 0], seeds[batch, head, 1]) if dropped else None
