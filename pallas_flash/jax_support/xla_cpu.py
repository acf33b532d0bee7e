"""What XLA does slowly on a CPU, in a form that it does fast.

It has no gather, scatter or slice of some dtypes: it converts the whole array to a wider dtype, and
in a loop keeps that. As integers they are as fast as others.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import hardware

JAX_0_10 = jax.__version_info__ < (0, 11)


def after(results, *arrays) -> tuple:
    """The results and the arrays (None stays), ordered: nothing is computed from the arrays before
    all results are there."""
    if not JAX_0_10:
        return lax.optimization_barrier((results, *arrays))
    # XLA for CPUs drops barriers; but it cannot tell that what is computed here is always true
    first = (x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(results) if x.size)
    bits = functools.reduce(operator.or_, (lax.bitcast_convert_type(x, jnp.uint32) for x in first))
    is_there = lax.population_count(bits) <= 32
    return results, *(x if x is None else jnp.where(is_there, x, 0) for x in arrays)


def rowsum(a, b):
    """The sums of a b [.., n] over the last axis, [..]. Those of jax 0.10 take ten times as long as
    a product of matrices, where the first axis has one element."""
    if JAX_0_10 and on_cpu():
        return jnp.einsum("...n,...n->...", a, b, precision="highest")
    return jnp.sum(a * b, -1)


def widen(x, dtype):
    """x in a dtype that holds all of its numbers. Float8 goes through float16, in a third of the
    time."""
    if not (_is_float8(x.dtype) and on_cpu()):
        return x.astype(dtype)
    b = _bits(x).astype(jnp.uint16)
    as_half = lambda b: lax.bitcast_convert_type(b, jnp.float16).astype(dtype)
    if x.dtype == jnp.float8_e5m2:
        return as_half(b << 8)
    sign, rest = b & 0x80, b & 0x7F
    # float8_e4m3fn's exponent has a bias of 7, float16's of 15
    return jnp.where(rest == 0x7F, jnp.nan, as_half(sign << 8 | rest << 7) * 2**8)


def gather(x, index):
    """x[index], for an index in bounds."""
    bits, index = _bits_in_loop(x, index)
    return _from_bits(bits.at[index].get(mode="promise_in_bounds"), x.dtype)


def dynamic_slice(x, starts: Sequence, sizes: Sequence[int]):
    """lax.dynamic_slice, from starts [int32] that are not negative."""
    bits, starts = _bits_in_loop(x, starts)
    part = lax.dynamic_slice(bits, starts, sizes, allow_negative_indices=False)
    return _from_bits(part, x.dtype)


def put(x, index: tuple, new):
    """x.at[index].set(new), for an index of the first axis, and others, that differ; new elements
    beyond x are dropped."""
    bits, new = _bits(x), _bits(new.astype(x.dtype))
    put = _put if bits is x or not on_cpu() else _select
    return _from_bits(put(bits, index, new), x.dtype)


def on_cpu() -> bool:
    return hardware.here().platform == "cpu"


def _put(x, index, new):
    return x.at[index].set(new, mode="drop", unique_indices=True)


def _select(x, index, new):
    """`_put` by elements, which XLA does in place where x and the result are bits of others."""
    if new.size == 0:
        return x
    axes = [axis for axis, i in enumerate(index) if not isinstance(i, slice)]
    index = jnp.broadcast_arrays(*(index[axis] for axis in axes))
    numbers = jnp.arange(index[0].size, dtype=jnp.int32).reshape(index[0].shape)
    number = _put(jnp.full([x.shape[axis] for axis in axes], -1, jnp.int32), tuple(index), numbers)
    new = new.reshape(-1, *new.shape[numbers.ndim :])[number]
    is_new = jnp.expand_dims(number >= 0, range(number.ndim, new.ndim))
    new, is_new = (jnp.moveaxis(a, range(len(axes)), axes) for a in (new, is_new))
    return jnp.where(is_new, new, x)


def _bits_in_loop(x, index):
    """The `_bits` of x, which a loop takes of what it reads alone: for an index that XLA takes to
    be another in each step, as it takes x to be."""
    if _bits(x) is x:
        return x, index
    x, index = lax.optimization_barrier((x, index))
    return _bits(x), index


def _bits(x):
    """x as integers where its dtype is slow, else x itself."""
    if _is_float8(x.dtype):
        return lax.bitcast_convert_type(x, jnp.uint8)
    if x.dtype == jnp.bfloat16 and JAX_0_10 and on_cpu():
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def _from_bits(x, dtype):
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _is_float8(dtype) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
