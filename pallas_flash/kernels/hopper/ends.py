"""Where the lengths of batch rows end: behind them may be NaN, 0 * NaN is NaN, and TMA knows only
where an array ends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.pytrees import IntLike


class Blocks(NamedTuple):
    """Of some arrays the block in which the length of each batch row ends."""

    number: Any  # int32 [B]
    of: tuple  # for each of the arrays [B, size, heads, n], with zeros behind the length


def blocks(lengths: jax.Array | None, size: int, *arrays: jax.Array) -> Blocks | None:
    """Of arrays [B, length, heads, n] in blocks of `size` rows; lengths: int32 [B], or None where
    there are none."""
    if lengths is None:
        return None
    number = jnp.maximum(lengths - 1, 0) // size
    row = number[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    rows = lambda x: jnp.take_along_axis(x, row[:, :, None, None], axis=1, mode="clip")
    is_there = (row < lengths[:, None])[:, :, None, None]
    return Blocks(number, tuple(jnp.where(is_there, rows(x), 0) for x in arrays))


def reader(last: Blocks | None, batch: IntLike, size: int):
    """read(number, copy, *arrays), which is copy(first row, *arrays) of a block of the arrays, or
    from the one on in which the length ends, of that one in `last`."""
    if last is None:
        return lambda number, copy, *arrays: copy(number * size, *arrays)
    end = last.number[batch]

    def read(number, copy, *arrays):
        lax.cond(number < end, lambda: copy(number * size, *arrays), lambda: copy(0, *last.of))

    return read
