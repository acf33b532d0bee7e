"""Dataclasses as pytrees in which arrays are data and ints are part of the program, and arithmetic
that keeps ints static."""

import dataclasses
import inspect
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

IntLike = Any  # an int, or an int32 array
NO_DATA = int, type(None)
_ARRAY_TYPES = np.ndarray, jax.Array


@dataclass_transform(frozen_default=True)
def dataclass(cls=None, *, static: tuple[str, ...] = (), **options):
    """A frozen dataclass that is a pytree: its arrays are leaves; ints, None and the fields
    `static` belong to its structure. An == of a base class stays. help() shows no field that is
    keyword-only: the package sets them."""
    if cls is None:
        return lambda cls: dataclass(cls, static=static, **options)
    options = dict(eq=cls.__eq__ is object.__eq__, **options)
    cls = dataclasses.dataclass(frozen=True, **options)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    given = inspect.signature(cls.__init__)
    shown = [x for x in given.parameters.values() if x.kind != x.KEYWORD_ONLY]
    setattr(cls.__init__, "__signature__", given.replace(parameters=shown))  # noqa: B010, types know none

    def flatten(x):
        data, structure, leaves = [], [], vars(x).get("_leaves", ())
        for name in names:
            value = getattr(x, name)
            is_leaf = name in leaves or (not isinstance(value, NO_DATA) and name not in static)
            data.append(value if is_leaf else None)
            structure.append(None if is_leaf else value)
        return data, tuple(structure)

    def unflatten(structure, data):
        x, leaves = object.__new__(cls), []
        for name, s, d in zip(names, structure, data, strict=True):
            object.__setattr__(x, name, d if s is None else s)
            if s is None and d is not None:
                leaves.append(name)
        # they stay leaves where jax.tree.map made ints or bools of them
        object.__setattr__(x, "_leaves", leaves)
        return x

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


class _Shown:
    """Prints as the type of an array."""

    def __init__(self, x):
        self.text = f"{x.dtype}{list(x.shape)}"

    def __repr__(self):
        return self.text


def shown(tree):
    """The tree to be printed, with the types of its arrays in place of their values."""
    return jax.tree.map(lambda x: _Shown(x) if hasattr(x, "dtype") else x, tree)


def are_equal(a, b) -> bool:
    """Whether two fields, or tuples of these, are equal; a traced array equals itself alone."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    are_arrays = {isinstance(x, _ARRAY_TYPES) for x in (a, b)}
    if are_arrays == {False} or a is b:
        return a is b or a == b
    if are_arrays == {True, False} or isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    return a.dtype == b.dtype and np.array_equal(a, b)


def without_values(x):
    """A field with shapes and dtypes, which hash, in place of arrays."""
    if isinstance(x, tuple):
        return tuple(map(without_values, x))
    return (x.shape, x.dtype) if isinstance(x, _ARRAY_TYPES) else x


def is_data(value) -> bool:
    """Whether a field is a leaf of its pytree."""
    return not isinstance(value, NO_DATA)


def larger(a: IntLike, b: IntLike) -> IntLike:
    """The maximum, an int where both are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def smaller(a: IntLike, b: IntLike) -> IntLike:
    """The minimum, an int where both are."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)
