"""Dropout: which weights of P are kept, as a function of the key, batch row, head, row and column alone. Plain values only.

Whoever needs the mask computes it, a tile at a time, in the backward again: nothing of it is stored, and it is the same on every
implementation, for every size of tile and on any number of devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from pallas_flash import checks

LEVELS = 256  # a weight has 8 random bits
SHARED = np.uint32(24)  # bits of a column, that choose 8 of 32


def dropped(rate: float) -> int:
    """How many of 256 weights are dropped: the nearest to `rate`, but at least one, and not all, where the rate is above 0."""
    return 0 if rate == 0 else min(max(round(rate * LEVELS), 1), LEVELS - 1)


def seeds(rng, *shape: int):
    """Two numbers for each batch row and head, uint32 [*shape, 2], from a key of jax.random."""
    return jax.random.bits(rng, (*shape, 2), jnp.uint32)


def keeps(dropped: int, first, second, row, column):
    """Whether the weights at `row` and `column` are kept, from the two seeds of their batch row and head; shapes broadcast.

    Four weights of a row, whose columns differ in the bits of SHARED alone, have 8 bits each of one random word: a thread of a
    tensor core that holds one of them holds all.
    """
    row, column = row.astype(jnp.uint32), column.astype(jnp.uint32)
    by_column = (column & ~SHARED) * np.uint32(0x9E3779B9) + second
    word = _mixed(_mixed(row ^ first) ^ by_column)
    return word << (column & SHARED) >= np.uint32(dropped * (2**32 // LEVELS))


def _mixed(x):
    """A permutation of uint32 whose every bit depends on every bit of x: the lowbias32 of Chris Wellons' hash prospector."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def dropout_mask(dropout_rng: Array, dropout_rate: float, shape: tuple[int, ...]) -> Bool[Array, "*B N T S"]:
    """Which weights `flash_attention` keeps with this key and rate, dense, for shape = (*B, N, T, S)."""
    *lead, T, S = shape
    rng, rate = checks.rng("dropout_rng", dropout_rng), checks.rate("dropout_rate", dropout_rate)
    return mask(dropped(rate), seeds(rng, *lead), T, S)


def mask(dropped: int, seeds, queries: int, keys: int):
    """`keeps` of all weights, [..., T, S], from seeds [..., 2]."""
    first, second = (seeds[..., None, None, i] for i in range(2))
    row, column = (lax.broadcasted_iota(jnp.int32, (*(1,) * (first.ndim - 2), queries, keys), first.ndim - i) for i in (2, 1))
    return keeps(dropped, first, second, row, column)
