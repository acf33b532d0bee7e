"""A score_mod: what it makes of each logit, and its derivative by jax's autodiff."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods import traced
from pallas_flash.mods.bound import BoundMod

SIGNATURE = "score_mod(score, b, h, q_idx, kv_idx)"


@pytrees.dataclass(static=("mod",))
class BoundScoreMod(BoundMod):
    """The score_mod of a call. Its `arrays` are the tables, floats, and then the others."""

    @classmethod
    def bind(
        cls, score_mod: Any, dtype, offset: IntLike = 0, batch: int | None = None
    ) -> "BoundScoreMod":
        """That of a score_mod of scores of this dtype. One that `with_indices` has made already
        gets this offset and number of batch rows."""
        score = score_mod if isinstance(score_mod, cls) else trace(score_mod, dtype)
        rows = (
            score.batch if score.batch is None or batch is None else jnp.reshape(score.batch, batch)
        )
        return dataclasses.replace(score, offset=offset, batch=rows)

    @property
    def tables(self) -> tuple:
        return self.arrays[: sum(self._is_table(n) for n in range(len(self.arrays)))]

    def with_tables(self, tables) -> "BoundScoreMod":
        return dataclasses.replace(self, arrays=(*tables, *self.arrays[len(tables) :]))

    def _is_table(self, number: int) -> bool:
        return jnp.issubdtype(self.mod.arrays[number].aval.dtype, jnp.floating)

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
        """The same with the indices of batch rows and heads as arrays, where it uses them."""
        return dataclasses.replace(self, **self.mod.index_arrays(batch, heads))

    def pack_gqa(self, batch: int, heads: int, queries: int, group: int) -> "BoundScoreMod":
        """The same for rows of `decode.pack_gqa`: row r of a key head is token r // group of its
        query head r % group. It reads the head and the position of a row, as any captured array."""
        b, h = (
            jnp.broadcast_to(x, n)
            for x, n in zip(self.indices(batch, heads), (batch, heads), strict=True)
        )
        row = jnp.arange(queries * group, dtype=jnp.int32)
        offset = jnp.broadcast_to(jnp.asarray(self.offset, jnp.int32), batch)
        position = offset[:, None] + row[None] // group
        return self._with_rows(b, position, h.reshape(-1, group)[:, row % group])

    def with_positions(self, positions) -> "BoundScoreMod":
        """The same for rows with these q_idx, int32 [B, T], which it reads as any captured
        array."""
        batch = self.indices(positions.shape[0], 1)[0]
        found = self._with_rows(jnp.broadcast_to(batch, positions.shape[:1]), positions)
        return dataclasses.replace(found, head=self.head)

    def _with_rows(self, *of_row) -> "BoundScoreMod":
        mod = self.mod.with_rows(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of_row))
        return BoundScoreMod(mod, (*self.arrays, *of_row))

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
        """As `apply`, with the backward: it takes the cotangent of the new scores, and returns that
        of s and the (array, index, cotangent) of each read of a table.

        Where the cotangent is 0, as of a pair that a mask hides, so are the others: the score_mod
        may have no derivative there.
        """
        found = self.read_captured(read, *indices)
        is_table = [self._is_table(at.array) for at in self.mod.reads]
        tables = [
            jnp.broadcast_to(value, s.shape)
            for (_, value), t in zip(found, is_table, strict=True)
            if t
        ]

        def evaluate(s, tables):
            tables = iter(tables)
            values = [
                next(tables) if t else value for (_, value), t in zip(found, is_table, strict=True)
            ]
            return self.evaluate(values, *indices, s)

        new, pull = jax.vjp(evaluate, s, tables)

        def backward(d_new):
            where_used = lambda d: jnp.where(d_new == 0, jnp.zeros_like(d), d)
            ds, d_tables = pull(d_new)
            reads = [
                (at.array, index, value)
                for at, (index, value), t in zip(self.mod.reads, found, is_table, strict=True)
                if t
            ]
            return where_used(ds), [
                (array, index, _summed(where_used(d), value))
                for (array, index, value), d in zip(reads, d_tables, strict=True)
            ]

        return new, backward


def _summed(x, like):
    """x, in its sum's precision, summed to a shape that broadcasts to its own."""
    x = x.astype(np.promote_types(x.dtype, np.float32))  # jax's raises where promotion is strict
    more = jnp.ndim(x) - jnp.ndim(like)
    axes = tuple(
        axis for axis, n in enumerate(jnp.shape(like), more) if n == 1 and x.shape[axis] != 1
    )
    x = jnp.sum(x, axes, keepdims=True) if axes else x
    return jnp.sum(x, tuple(range(more))) if more else x


def trace(score_mod: Any, dtype) -> BoundScoreMod:
    """The BoundScoreMod of a score_mod of scores of this dtype."""
    if not callable(score_mod):
        raise TypeError(
            f"score_mod must be a function {SIGNATURE} that returns the new score; got "
            f"{type(score_mod).__name__}."
        )
    scalar = jax.ShapeDtypeStruct((), dtype)
    last = lambda b, h, q, k, score: score_mod(score, b, h, q, k)
    jaxpr, arrays, out = traced.trace_function(SIGNATURE, last, *[traced.INDEX] * 4, scalar)
    if getattr(out, "shape", None) != () or out.dtype != scalar.dtype:
        hint = (
            " To hide keys, pass a mask, masks.MaskMod, or return jnp.where(rule, score, -jnp.inf)."
        )
        hint *= traced.describe(out) == "bool[]"
        raise TypeError(
            f"{SIGNATURE} must return one scalar of the score's dtype, {scalar.dtype}[]; got "
            f"{traced.describe(out)}.{hint}"
        )
    found = traced.TracedMod(
        jaxpr, len(arrays), getattr(score_mod, "__name__", type(score_mod).__name__)
    )
    if any(4 in at.depends_on for at in found.reads):
        raise TypeError(
            f"{SIGNATURE} may index arrays by b, h, q_idx and kv_idx; got an index that depends on "
            "the score."
        )
    wide = lambda x: x.astype(scalar.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return BoundScoreMod(found, tuple(wide(jnp.asarray(x)) for x in arrays))
