"""A traced mod bound to a call: with its arrays, and the indices of the batch rows, heads and
positions; and the mask_mod of a call."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import checks
from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods.traced import INDEX, TracedMod, describe, trace_function, vectorize


@dataclasses.dataclass(frozen=True)
class BoundMod:
    """A traced mod with its captured arrays and the indices of a call.

    `offset`, an int or [B], is added to a row for its q_idx. `batch` [B] and `head` [N] are the
    indices of the batch rows and heads, None: from 0 on.
    """

    mod: TracedMod
    arrays: tuple
    offset: IntLike = 0
    batch: Any = None
    head: Any = None

    def indices(self, batch: IntLike, heads: IntLike) -> tuple[IntLike, IntLike]:
        """The indices b [B] and h [N] of so many batch rows and heads; [0] if the mod does not use
        them."""

        def one(is_used, known, n):
            if not is_used:
                return jnp.zeros(1, jnp.int32)
            return jnp.arange(n, dtype=jnp.int32) if known is None else known

        b = one(self.mod.uses_batch, self.batch, batch)
        return b, one(self.mod.uses_head, self.head, heads)

    def pairs(self, batch: IntLike, heads: IntLike, row, key) -> tuple[jax.Array, ...]:
        """b, h, q_idx and kv_idx of all pairs of `row` and `key`, which broadcast against [B, N,
        rows, keys]."""
        b, h = self.indices(batch, heads)
        position = row[None] + (
            self.offset if isinstance(self.offset, int) else self.offset[:, None]
        )
        return b[:, None, None, None], h[:, None, None], position[:, None, :, None], key

    def slice_chunks(self, size: int, first):
        """The mod for chunks of `size` batch rows. They begin at the rows `first` [C] and become
        batch rows: [B * C]."""
        offset = (jnp.broadcast_to(self.offset, size)[:, None] + first.reshape(1, -1)).reshape(-1)
        batch = jnp.repeat(self.indices(size, 1)[0], first.size) if self.mod.uses_batch else None
        return dataclasses.replace(self, offset=offset, batch=batch)

    def take_rows(self, pick: Callable):
        """The mod for the batch rows that `pick` takes from an array [B]."""
        return dataclasses.replace(self, offset=pick(self.offset), batch=pick(self.batch))

    def slice_keys(self, first):
        """The mod with kv_idx counted from key `first`, which becomes a captured array."""
        return dataclasses.replace(
            self, mod=self.mod.with_first_key, arrays=(*self.arrays, jnp.asarray(first, jnp.int32))
        )

    @property
    def primitives(self) -> set[str]:
        """The names of the primitives that a kernel needs."""
        return self.mod.primitives

    @property
    def why_not_flat(self) -> str | None:
        """Why the arrays cannot be indexed as flat vectors, or None."""
        shapes = [self.mod.arrays[read.array].aval.shape for read in self.mod.reads]
        large = next((shape for shape in shapes if math.prod(shape) >= 2**31), None)
        return large and (
            f"{self.mod} reads an array of 2^31 elements or more, which int32 cannot index; got "
            f"{large}"
        )

    def read_captured(self, read: Callable, *indices: IntLike) -> list[tuple[tuple, jax.Array]]:
        """The index and the values `read(array, index)` of each read. They have the shape of
        the `indices`, of b, h, q_idx and kv_idx, that the index depends on."""
        captured = []
        for at in self.mod.reads:
            used = [x if n in at.depends_on else 0 for n, x in enumerate(indices)]
            values = [value for _, value in captured]
            index = vectorize(self.mod.index, *used, *values) if at.by_axis else ()
            dtype = self.mod.arrays[at.array].aval.dtype
            captured.append((index, read(at.array, index).astype(dtype)))
        return captured

    def evaluate(self, values, *scalars) -> jax.Array:
        """The mod's result for the `values` of its reads, and arrays of its scalars, which
        broadcast."""
        count = len(scalars)
        return vectorize(lambda *x: self.mod.result(x[:count], x[count:]), *scalars, *values)


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
