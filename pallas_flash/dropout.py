"""Dropout: which weights of P are kept, as a function of the key, batch row, head, row and column
alone. The functions here take and return arrays.

Whoever needs the mask computes it, a tile at a time, in the backward again. None of it is stored,
and it is the same in every implementation, for every size of tile and on any number of devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from pallas_flash import checks
from pallas_flash.checks import unexpected

LEVELS = 256  # a weight has 8 random bits
WITHIN_WORD = np.uint32(24)  # bits of a column that choose 8 bits of 32
STRIDE = np.uint32(0x9E3779B9)  # from column to column
UNIT = 32  # a part of the weights begins at a multiple of so many columns


def dropped(rate: float) -> int:
    """How many of 256 weights are dropped: the nearest to `rate`, but at least one, and not all,
    where the rate is above 0."""
    return 0 if rate == 0 else min(max(round(rate * LEVELS), 1), LEVELS - 1)


class Shared(NamedTuple):
    """A key of jax.random with one mask [T, S] for all batch rows and heads: `dropout_mask(key,
    rate, (T, S))`."""

    key: Array


def seeds(rng, *shape: int):
    """Two numbers for each batch row and head, uint32 [*shape, 2], from a key of jax.random; with
    Shared all have the same two."""
    if isinstance(rng, Shared):
        return jnp.broadcast_to(seeds(rng.key), (*shape, 2))
    return jax.random.bits(checks.rng("dropout_rng", rng), (*shape, 2), jnp.uint32)


def moved(seeds, row=0, column=0):
    """The seeds for weights that count from 0 at this row and column; the column is a multiple of
    UNIT."""
    by = [jnp.asarray(n, jnp.int32).astype(jnp.uint32) for n in (row, column)]
    by = jnp.stack([by[0], by[1] * STRIDE + jnp.zeros_like(by[0])], axis=-1)
    return seeds + by.reshape((1,) * (seeds.ndim - by.ndim) + by.shape)


def keeps(dropped: int, first, second, row, column):
    """Whether the weights at `row` and `column` are kept, from the two seeds of their batch row and
    head; shapes broadcast."""
    return stays(dropped, word(row_part(first, row), column_part(second, column)), column)


def row_part(first, row):
    """The part of a random word that a row determines."""
    return _hashed(_fold(row.astype(jnp.uint32) + first))


def column_part(second, column):
    """The part of a random word that a column determines: the same for four columns, which differ
    in the bits of WITHIN_WORD alone."""
    return (column.astype(jnp.uint32) & ~WITHIN_WORD) * STRIDE + second


def word(row_part, column_part):
    """32 random bits for four weights of a row: a thread of a tensor core that holds one of them
    holds all.

    The permutation of uint32 whose every bit depends on every bit, Chris Wellons' lowbias32, is
    fold(hashed(fold(x))), where fold is its own inverse and linear. So what the permutation of a
    row and a column have in common is computed for each of them, not for each word: fold(a ^ b) =
    fold(a) ^ fold(b), and fold(permutation(row)) = hashed(fold(row)).
    """
    return _fold(_hashed(row_part ^ _fold(column_part)))


def stays(dropped: int, word, column):
    """Whether a weight is kept, by its 8 bits of the word."""
    return word << (column.astype(jnp.uint32) & WITHIN_WORD) >= np.uint32(
        dropped * (2**32 // LEVELS)
    )


def _fold(x):
    return x ^ (x >> np.uint32(16))


def _hashed(x):
    x = x * np.uint32(0x7FEB352D)
    return (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)


@unexpected.refused
def dropout_mask(
    dropout_rng: Array, dropout_rate: float, shape: tuple[int, ...]
) -> Bool[Array, "*B N T S"]:
    """The dense mask, of shape (*B, N, T, S), of the weights that `flash_attention` keeps with this
    key and rate.

    Examples:
      >>> import jax
      >>> from pallas_flash import dropout_mask
      >>> keep = dropout_mask(jax.random.key(0), 0.1, (2, 4, 100, 100))  # [B, N, T, S]
      >>> print(f"{keep.mean():.2f}")
      0.90
    """
    is_size = lambda n: checks.is_int(n) and n >= 0
    if not isinstance(shape, tuple | list) or len(shape) < 2 or not all(map(is_size, shape)):
        raise ValueError(f"shape must be (*B, N, T, S), that of the weights; got {shape!r}.")
    *lead, T, S = shape
    return mask(dropped(checks.rate("dropout_rate", dropout_rate)), seeds(dropout_rng, *lead), T, S)


def mask(dropped: int, seeds, queries: int, keys: int):
    """`keeps` for all weights, [..., T, S], from seeds [..., 2]."""
    first, second = (seeds[..., None, None, i] for i in range(2))
    row, column = (
        lax.broadcasted_iota(jnp.int32, (*(1,) * (first.ndim - 2), queries, keys), first.ndim - i)
        for i in (2, 1)
    )
    return keeps(dropped, first, second, row, column)
