"""Compares programs by what they compute, and pickles them.

Printed text is no substitute for a comparison: in it all functions lie at 0xXXXX, any object may
print as another, and large arrays are "...".
"""

import hashlib
import io
import pickle
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax import lax

from pallas_flash.jax_support.jax_internals import Literal, Primitive, primitives
from pallas_flash.mods import derivatives


def key(jaxpr) -> Hashable:
    """A key that is equal for programs with the same equations on the same values. A parameter of
    an unknown type is compared by its ==, or if it has no hash by identity."""
    numbers = {}

    def known(x):
        if isinstance(x, Literal):
            return x.aval, _value(x.val)
        return numbers.setdefault(x, len(numbers)), x.aval

    inputs = tuple(map(known, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (
            eqn.primitive,
            tuple(map(known, eqn.invars)),
            tuple((name, _value(eqn.params[name])) for name in sorted(eqn.params)),
            tuple(map(known, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(map(known, jaxpr.outvars))


def _value(x: Any) -> Hashable:
    if (inner := derivatives.jaxpr_of(x)) is not None:
        return key(inner), _value(tuple(getattr(x, "consts", ())))
    if hasattr(x, "__array__"):
        try:
            values = np.asarray(x)
        except (TypeError, RuntimeError):  # a tracer, a random key, an array of other hosts
            return _Itself(x)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        return _Itself(x) if values.dtype == object else (values.dtype, values.shape, digest)
    if isinstance(x, bool | int | float | complex):
        return type(x), repr(x)  # 1 == True == 1.0, 0.0 == -0.0, and nan is not nan
    if isinstance(x, tuple | list):
        return type(x), *map(_value, x)
    if isinstance(x, dict):
        return dict, *((name, _value(value)) for name, value in x.items())
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return type(x), x


class _Itself:
    """Compares a value by identity."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, _Itself) and self.x is other.x

    def __hash__(self):
        return id(self.x)


def has_name(of: Hashable) -> bool:
    """Whether the repr of a key identifies it, in other processes too."""
    if isinstance(of, tuple):
        return all(map(has_name, of))
    origin = type(of).__module__.partition(".")[0]
    return origin in ("builtins", "numpy", "jax", "jaxlib") and "0x" not in repr(of)


# ---- in a pickle ----


class _Pickler(pickle.Pickler):
    """Pickles what jax 0.12 cannot pickle, or restores as something else."""

    def reducer_override(self, x):
        if isinstance(x, Primitive):
            if _PRIMITIVES.get(x.name) is not x:
                raise pickle.PicklingError(
                    f"a mask that is pickled may use jax's own operations; got `{x.name}`. Pickle "
                    "what the mask is made of, and make it again."
                )
            return _primitive, (x.name,)
        if isinstance(x, jax.core.ShapedArray):
            return _aval, (x.shape, x.dtype, x.weak_type)
        match type(x).__name__:
            case "Traceback":  # where the equation was written
                return type(None), ()
            case "TypedNdArray":  # a number
                return np.asarray, (np.asarray(x),)
            case "UnspecifiedValue":  # the one sharding of a jitted function that has none
                return _unspecified, ()
        return NotImplemented


_PRIMITIVES = {
    x.name: x
    for module in (derivatives, lax, primitives)
    for x in vars(module).values()
    if isinstance(x, Primitive)
}


def _primitive(name: str) -> Primitive:
    return _PRIMITIVES[name]


def _aval(shape, dtype, weak_type):
    with derivatives.any_mesh():
        return jax.core.ShapedArray(shape, dtype, weak_type)


def _unspecified():
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0).eqns
    return eqn.params["in_shardings"][0]


def dumps(jaxpr) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(jaxpr)
    return file.getvalue()


loads = pickle.loads
