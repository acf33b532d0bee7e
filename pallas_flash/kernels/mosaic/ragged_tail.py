"""Where the lengths of batch rows end: behind them may be NaN, 0 * NaN is NaN, and TMA knows only
where an array ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support.pytrees import IntLike


class Tails(NamedTuple):
    """The block of some arrays in which the length of each batch row ends."""

    block: Any  # int32 [B]
    arrays: tuple  # each [B, size, heads, n], with zeros behind the length


def copy_tails(lengths: jax.Array | None, size: int, *arrays: jax.Array) -> Tails | None:
    """The Tails of arrays [B, length, heads, n] in blocks of `size` rows; lengths: int32 [B], or
    None where there are none."""
    if lengths is None:
        return None
    block = jnp.maximum(lengths - 1, 0) // size
    row = block[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    rows = lambda x: jnp.take_along_axis(x, row[:, :, None, None], axis=1, mode="clip")
    exists = (row < lengths[:, None])[:, :, None, None]
    return Tails(block, jax.tree.map(lambda x: jnp.where(exists, rows(x), 0), arrays))


class RaggedRows(NamedTuple):
    """q and do, or k and v, each an array or a pytree, of which a kernel reads blocks of rows."""

    arrays: tuple
    tails: Tails | None

    def reader(self, batch: IntLike, size: int):
        """read(block, copy), which calls copy(first row, *arrays) with the arrays, or from the
        block on in which the length ends with the tails."""
        arrays, tails = self
        if tails is None:
            return lambda block, copy: copy(block * size, *arrays)
        end = tails.block[batch]
        return lambda block, copy: lax.cond(
            block < end, lambda: copy(block * size, *arrays), lambda: copy(0, *tails.arrays)
        )
