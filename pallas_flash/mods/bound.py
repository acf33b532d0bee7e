"""A traced mod bound to a call: with its arrays, and the indices of the batch rows, heads and
positions; the mask_mod of a call; and its score_mod, with the derivatives by jax's autodiff."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods import traced
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


SIGNATURE = "score_mod(score, b, h, q_idx, kv_idx)"


@pytrees.dataclass(static=("mod",))
class BoundScoreMod(BoundMod):
    """The score_mod of a call. The first of its `arrays` are its tables, which may have a
    derivative."""

    @classmethod
    def bind(
        cls, score_mod: Any, dtype, offset: IntLike = 0, batch: int | None = None
    ) -> "BoundScoreMod":
        """Traces a score_mod for scores of this dtype. One that `with_indices` has bound gets this
        offset and number of batch rows."""
        score = score_mod if isinstance(score_mod, cls) else trace(score_mod, dtype)
        rows = (
            score.batch if score.batch is None or batch is None else jnp.reshape(score.batch, batch)
        )
        return dataclasses.replace(score, offset=offset, batch=rows)

    @property
    def tables(self) -> tuple:
        return self.arrays[: self.mod.tables]

    def with_tables(self, tables) -> "BoundScoreMod":
        return dataclasses.replace(self, arrays=(*tables, *self.arrays[len(tables) :]))

    @property
    def primitives(self) -> set[str]:
        """The names of the primitives that a kernel needs, in the backward too."""
        dtype = self.mod.scalars[-1].aval.dtype
        score = jax.ShapeDtypeStruct((), dtype)
        read = lambda n, _: jnp.zeros((), self.mod.arrays[n].aval.dtype)
        backward = lambda s, ds, *indices: self.vjp(s, read, *indices)[1](ds)
        with traced.any_mesh():
            program = jax.make_jaxpr(backward)(score, score, *[traced.INDEX] * 4)
        return self.mod.primitives | traced.primitives(program.jaxpr) - {"reduce_sum"}

    def with_indices(self, batch: tuple[int, ...], heads: int) -> "BoundScoreMod":
        """This score_mod with the indices of batch rows and heads as arrays, if it uses them."""
        return dataclasses.replace(self, **self.mod.index_arrays(batch, heads))

    def pack_gqa(self, batch: int, heads: int, queries: int, group: int) -> "BoundScoreMod":
        """This score_mod for rows of `split_kv.pack_gqa`: row r of a key head is token r // group
        of its query head r % group. It reads the head and the position of a row as captured
        arrays."""
        b, h = (
            jnp.broadcast_to(x, n)
            for x, n in zip(self.indices(batch, heads), (batch, heads), strict=True)
        )
        row = jnp.arange(queries * group, dtype=jnp.int32)
        offset = jnp.broadcast_to(jnp.asarray(self.offset, jnp.int32), batch)
        position = offset[:, None] + row[None] // group
        return self._with_rows(b, position, h.reshape(-1, group)[:, row % group])

    def with_positions(self, positions) -> "BoundScoreMod":
        """This score_mod for rows with these q_idx, int32 [B, T], which become a captured array."""
        batch = self.indices(positions.shape[0], 1)[0]
        mod = self._with_rows(jnp.broadcast_to(batch, positions.shape[:1]), positions)
        return dataclasses.replace(mod, head=self.head)

    def _with_rows(self, *indices) -> "BoundScoreMod":
        mod = self.mod.with_rows(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in indices))
        return BoundScoreMod(mod, (*self.arrays, *indices))

    def captured_by_head(self, batch: int, heads: int) -> list[tuple[tuple, jax.Array]]:
        """The reads of these batch rows and heads, [B | 1, N | 1], at the first position and
        key."""
        b, h = self.indices(batch, heads)
        read = lambda array, index: self.arrays[array][index]
        return self.read_captured(read, b[:, None], h, 0, 0)

    def apply(self, s, read: Callable, *indices: IntLike):
        """The new scores for the logits s; `indices` are b, h, q_idx and kv_idx, which broadcast
        against s."""
        values = [value for _, value in self.read_captured(read, *indices)]
        return self.evaluate(values, *indices, s)

    def vjp(self, s, read: Callable, *indices: IntLike):
        """As `apply`, with the backward, which maps the cotangent of the new scores to that of s
        and to the (array, index, cotangent) of each read of a table.

        Where the cotangent is 0, as for a pair that a mask hides, all results are 0: the score_mod
        may have no derivative there.
        """
        captured, reads = self.read_captured(read, *indices), self.mod.reads
        tables = {
            n: jnp.broadcast_to(value, s.shape)
            for n, (_, value) in enumerate(captured)
            if reads[n].array < self.mod.tables
        }

        def evaluate(s, tables):
            values = [tables.get(n, value) for n, (_, value) in enumerate(captured)]
            return self.evaluate(values, *indices, s)

        new, pull = jax.vjp(evaluate, s, tables)

        def backward(d_new):
            where_used = lambda d: jnp.where(d_new == 0, jnp.zeros_like(d), d)
            ds, d_tables = pull(d_new)
            return where_used(ds), [
                (reads[n].array, index, _summed(where_used(d_tables[n]), value))
                for n, (index, value) in enumerate(captured)
                if n in tables
            ]

        return new, backward


def _summed(x, like):
    """x in the precision of sums, summed to a shape that broadcasts to that of `like`."""
    x = x.astype(np.promote_types(x.dtype, np.float32))  # jax's raises where promotion is strict
    lead = jnp.ndim(x) - jnp.ndim(like)
    axes = tuple(
        axis for axis, n in enumerate(jnp.shape(like), lead) if n == 1 and x.shape[axis] != 1
    )
    x = jnp.sum(x, axes, keepdims=True) if axes else x
    return jnp.sum(x, tuple(range(lead))) if lead else x


def trace(score_mod: Any, dtype) -> BoundScoreMod:
    """Traces a score_mod for scores of this dtype."""
    if not callable(score_mod):
        raise TypeError(
            f"score_mod must be a function {SIGNATURE} that returns the new score; got "
            f"{checks.description(score_mod)}."
        )
    scalar = jax.ShapeDtypeStruct((), dtype)
    last = lambda b, h, q, k, score: score_mod(score, b, h, q, k)
    shapes = *[traced.INDEX] * 4, scalar
    jaxpr, arrays, tables, out = traced.trace_function(SIGNATURE, last, *shapes)
    if getattr(out, "shape", None) != () or out.dtype != scalar.dtype:
        hint = (
            " To hide keys, pass a mask, masks.MaskMod, or return jnp.where(rule, score, -jnp.inf)."
        )
        hint *= traced.describe(out) == "bool[]"
        raise TypeError(
            f"{SIGNATURE} must return one scalar of the score's dtype, {scalar.dtype}[]; got "
            f"{traced.describe(out)}.{hint}"
        )
    name = getattr(score_mod, "__name__", type(score_mod).__name__)
    mod = traced.TracedMod(jaxpr, len(arrays), name, tables)
    if any(4 in at.depends_on for at in mod.reads):
        raise TypeError(
            f"{SIGNATURE} may index arrays by b, h, q_idx and kv_idx; got an index that depends on "
            "the score."
        )
    wide = lambda x: x.astype(scalar.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return BoundScoreMod(mod, tuple(wide(jnp.asarray(x)) for x in arrays))
