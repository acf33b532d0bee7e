"""What XLA does slowly on a CPU, in a form that it does fast.

Of float8, and in jax 0.10 of bfloat16, it has no gather, scatter or slice: it converts all of an
array to a wider dtype, and a loop keeps the result. Of the same bits as integers it has them.
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
    """The sums [..] of a b [.., n] over the last axis. In jax 0.10 they take ten times as long as a
    product of matrices does, if the first axis has one element."""
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
    return _read(_gather, x, index)


def dynamic_slice(x, starts: Sequence, sizes: Sequence[int]):
    """lax.dynamic_slice, from starts [int32] that are not negative."""
    return _read(functools.partial(_slice, tuple(sizes)), x, starts)


def put(x, index: tuple, new):
    """x.at[index].set(new), for indices of the first axis, and of others, of which no two are
    equal. What is beyond x is dropped."""
    new = new.astype(x.dtype)
    if new.size == 0 or not (_has_bits(x.dtype) and on_cpu()):
        return _from_bits(_put(_bits(x), index, _bits(new)), x.dtype)
    # A choice for each element, which XLA makes in place and in one loop with the conversions to
    # bits and from bits: it writes what is new alone.
    axes = tuple(axis for axis, i in enumerate(index) if not isinstance(i, slice))
    index = jnp.broadcast_arrays(*(index[axis] for axis in axes))
    numbers = jnp.arange(index[0].size, dtype=jnp.int32).reshape(index[0].shape)
    none = jnp.full([x.shape[axis] for axis in axes], -1, jnp.int32)
    new = new.reshape(-1, *new.shape[numbers.ndim :])
    return _by_bits(functools.partial(_choose, axes), _put(none, tuple(index), numbers), new, x)


def on_cpu() -> bool:
    return hardware.here().platform == "cpu"


def _read(f, x, index):
    """f(index, x), which copies elements of x. XLA would take the bits of all of x before a loop
    that reads some of them; behind a barrier with the index x is another in each step."""
    if not _has_bits(x.dtype):
        return f(index, x)
    x, index = lax.optimization_barrier((x, index))
    return _by_bits(f, index, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_bits(f, index, *arrays):
    """f(index, *arrays) by bits, which have no derivative."""
    return _from_bits(f(index, *map(_bits, arrays)), arrays[0].dtype)


@_by_bits.defjvp
def _(f, primals, tangents):
    return _by_bits(f, *primals), f(primals[0], *tangents[1:])


def _gather(index, x):
    return x.at[index].get(mode="promise_in_bounds")


def _slice(sizes, starts, x):
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _put(x, index, new):
    return x.at[index].set(new, mode="drop", unique_indices=True)


def _choose(axes, number, new, x):
    """x with new[number] where the number, by the index of the axes, is not negative."""
    first = range(len(axes))
    is_new = jnp.expand_dims(number >= 0, range(len(axes), x.ndim))
    return jnp.where(*(jnp.moveaxis(a, first, axes) for a in (is_new, new[number])), x)


def _has_bits(dtype) -> bool:
    """Whether integers of the same bits are copied faster."""
    return _is_float8(dtype) or (dtype == jnp.bfloat16 and JAX_0_10 and on_cpu())


def _bits(x):
    if not _has_bits(x.dtype):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_bits(x, dtype):
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _is_float8(dtype) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
