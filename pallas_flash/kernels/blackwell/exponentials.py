"""2^x on the units of multiply-adds, for a share of the exponentials: where a B200 computes 16 of
them a clock by its special units, which bind the forward of small heads, and 128 multiply-adds."""

import jax.numpy as jnp
from jax import lax

# 2^f for f in [-1/2, 1/2]: 1 + f (C1 + f (C2 + f C3)), whose relative error is at most ERROR and 0
# on average, so that sums of weights keep their precision. 2^0 is 1 exactly.
COEFFICIENTS = 0.693973423, 0.241864104, 0.0520157097
ERROR = 1.84e-4
# adding it rounds to an integer n, which the low bits of the sum then have
_ROUND = 1.5 * 2**23
_LEAST = -127.0  # 2^x is 0 from here on, as a number below 2^-126 is by the special units


def exp2(x):
    """2^x of float32 x below 127, by a polynomial; 0 for x up to -127."""
    x = jnp.maximum(x, _LEAST)
    rounded = lax.optimization_barrier(x + _ROUND)  # XLA would add both constants first
    f = x - (rounded - _ROUND)
    c1, c2, c3 = COEFFICIENTS
    power = 1.0 + f * (c1 + f * (c2 + f * c3))
    exponent = lax.bitcast_convert_type(rounded, jnp.int32) << 23
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(power, jnp.int32) + exponent, jnp.float32
    )


def with_share(x, columns: int):
    """2^x of a tile, by the polynomial for the last `columns` columns."""
    if not columns:
        return jnp.exp2(x)
    first = x.shape[1] - columns
    return jnp.concatenate([jnp.exp2(x[:, :first]), exp2(x[:, first:])], axis=1)
