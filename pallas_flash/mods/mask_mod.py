"""A mask_mod: any function that says which keys a query sees."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import checks
from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods.bound import BoundMod
from pallas_flash.mods.traced import INDEX, TracedMod, describe, trace_function, vectorize


def trace_mask_mod(mask_mod: Callable, name: str | None = None) -> tuple[TracedMod, tuple]:
    """Traces a mask_mod: its program, and the arrays that it captures."""
    if not callable(mask_mod):
        raise TypeError(
            "masks.MaskMod takes a function mask_mod(b, h, q_idx, kv_idx) -> bool; got "
            f"{checks.description(mask_mod)}."
        )
    jaxpr, arrays, _, out = trace_function(
        "mask_mod(b, h, q_idx, kv_idx)", mask_mod, INDEX, INDEX, INDEX, INDEX
    )
    if getattr(out, "shape", None) != () or out.dtype != bool:
        raise TypeError(
            f"mask_mod(b, h, q_idx, kv_idx) must return one bool for four scalars; got "
            f"{describe(out)}."
        )
    traced = TracedMod(
        jaxpr, len(arrays), name or getattr(mask_mod, "__name__", type(mask_mod).__name__)
    )
    return traced, tuple(map(jnp.asarray, arrays))


@pytrees.dataclass(static=("mod",))
class BoundMaskMod(BoundMod):
    """The mask_mod of a call: which queries see which keys.

    `block_types`, int8 [B | 1, N | 1, tiles, tiles], are the types of its blocks of `block_size`
    queries and keys, as in masks/block_types.py; None if they are not known yet.
    """

    block_types: Any = None
    block_size: int | None = None

    def slice_chunks(self, size: int, first) -> "BoundMaskMod":
        return dataclasses.replace(
            super().slice_chunks(size, first), block_types=None, block_size=None
        )

    def visible(self, b: IntLike, h: IntLike, position: IntLike, key: IntLike) -> jax.Array:
        """Whether the queries see the keys: bool, of the shape that the arguments broadcast to."""
        return vectorize(lambda *x: self.mod(self.arrays, *x), b, h, position, key)
