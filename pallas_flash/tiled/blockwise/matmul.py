"""Products of blocks, in the orders that a CPU's library multiplies fast."""

import jax.numpy as jnp
from jax import lax

from pallas_flash.checks import sums


def dot(a, b, dtype=None):
    """[B, K, m, n] [B, K, n, h] -> [B, K, m, h], in the dtype of sums if no other is given"""
    return _matmul(a, b, 2, dtype)


def dot_t(a, b):
    """[B, K, m, h] [B, K, n, h] -> [B, K, m, n]"""
    return _matmul(a, b, 3)


def dot_over_rows(x, x_t, weights):
    """The sum of rows x [B, K, rows, h] by weights [B, K, rows, keys], [B, K, h, keys]: from x_t,
    which is x transposed, or, if that is None, from the weights transposed."""
    if x_t is not None:
        return dot(x_t, weights)
    return jnp.swapaxes(dot(lax.optimization_barrier(jnp.swapaxes(weights, 2, 3)), x), 2, 3)


def transpose(x):
    """[.., m, n] -> [.., n, m] of x that is made first: else XLA makes both in one loop, which
    reads far apart and is slow."""
    return jnp.swapaxes(lax.optimization_barrier(x), -1, -2)


def _matmul(a, b, axis: int, dtype=None):
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(
        a, b, dims, precision="highest", preferred_element_type=dtype or sums(a.dtype)
    )
