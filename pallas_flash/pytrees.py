"""Dataclasses as pytrees in which arrays are data and ints are part of the program, and arithmetic
that keeps ints static."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

IntLike = Any  # an int, or an int32 array


def is_data(value) -> bool:
    return value is not None and not isinstance(value, int)


def register(cls, *static: str):
    """Makes a mask a pytree: arrays are its leaves, ints and None, and the fields `static`, belong
    to its structure."""
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(mask):
        values, known = [getattr(mask, name) for name in names], vars(mask).get("_leaves", ())
        is_leaf = [
            name in known or (is_data(x) and name not in static)
            for name, x in zip(names, values, strict=True)
        ]
        data = [x if leaf else None for x, leaf in zip(values, is_leaf, strict=True)]
        return data, tuple(None if leaf else x for x, leaf in zip(values, is_leaf, strict=True))

    def unflatten(structure, data):
        mask = object.__new__(cls)
        for name, s, d in zip(names, structure, data, strict=True):
            object.__setattr__(mask, name, d if s is None else s)
        leaves = [
            name
            for name, s, d in zip(names, structure, data, strict=True)
            if s is None and d is not None
        ]
        # they stay so where jax.tree.map made ints or bools of them
        object.__setattr__(mask, "_leaves", leaves)
        return mask

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def larger(a: IntLike, b: IntLike) -> IntLike:
    """An int where both are."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def smaller(a: IntLike, b: IntLike) -> IntLike:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)
