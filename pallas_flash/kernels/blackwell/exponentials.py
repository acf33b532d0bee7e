"""2^x by multiply-adds, for a share of a tile: of exponentials the special units of a B200 compute
16 a clock, which binds the forward of narrow heads."""

import jax.numpy as jnp
from jax import lax

# 2^f for f in [-1/2, 1/2] is 1 + f (C1 + f (C2 + f (C3 + f C4))), with a relative error of at most
# ERROR: lse keeps the precision that it has elsewhere. 2^0 is 1, so that 2^-127 can be 0.
COEFFICIENTS = 0.693124201, 0.240240994, 0.0559063402, 0.00958281374
ERROR = 3e-6
LEAST = -127.0  # 2^x is 0 from here on, and inexact from -126 on, where numbers are subnormal
_TO_INTEGER = 1.5 * 2**23  # what is added to it is rounded to an integer, in the low bits


def exp2(x):
    """2^x of float32 x below 127."""
    x = jnp.maximum(x, LEAST)
    integer = lax.optimization_barrier(x + _TO_INTEGER)  # XLA would add up both constants
    f = x - (integer - _TO_INTEGER)
    c1, c2, c3, c4 = COEFFICIENTS
    power = 1.0 + f * (c1 + f * (c2 + f * (c3 + f * c4)))
    bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits(power) + (bits(integer) << 23), jnp.float32)


def exp2_of_tile(x, columns: int):
    """2^x of a tile, of its last `columns` columns by multiply-adds."""
    first = x.shape[1] - columns
    parts = [(jnp.exp2, x[:, :first])] if first else []
    parts += [(exp2, x[:, first:])] if columns else []
    return jnp.concatenate([power(part) for power, part in parts], axis=1)
