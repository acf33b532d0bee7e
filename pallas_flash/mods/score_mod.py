"""A programmable score: what a user's score_mod makes of each logit, and the derivative of that, by
jax's own autodiff."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import pytrees
from pallas_flash.mods import traced
from pallas_flash.mods.bound import BoundMod
from pallas_flash.pytrees import IntLike

SIGNATURE = "score_mod(score, b, h, q_idx, kv_idx)"


@pytrees.dataclass(static=("mod",))
class BoundScoreMod(BoundMod):
    """The rule of a score. Its `arrays` are the tables, floats, and then the others."""

    @classmethod
    def bind(
        cls, score_mod: Any, dtype, offset: IntLike = 0, batch: int | None = None
    ) -> "BoundScoreMod":
        """That of a score_mod of scores of this dtype, or of what `numbered` made of one: then of
        so many batch rows."""
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
        number = lambda dtype: jax.ShapeDtypeStruct((), dtype)
        back = lambda s, ds, *at: self.vjp(
            s, lambda n, _: jnp.zeros((), self.mod.arrays[n].aval.dtype), *at
        )[1](ds)
        with traced.any_mesh():
            program = jax.make_jaxpr(back)(number(dtype), number(dtype), *[number(jnp.int32)] * 4)
        return self.mod.primitives | traced.primitives(program.jaxpr) - {"reduce_sum"}

    def with_indices(self, batch: tuple[int, ...], heads: int) -> "BoundScoreMod":
        """The same with the batch rows' and heads' numbers as arrays, where it asks for them."""
        return dataclasses.replace(self, **self.mod.index_arrays(batch, heads))

    def captured_by_head(self, batch: int, heads: int) -> list[tuple[tuple, jax.Array]]:
        """The reads of each of so many batch rows and heads, [B | 1, N | 1], at the first position
        and key."""
        b, h = self.indices(batch, heads)
        return self.read_captured(
            lambda array, index: self.arrays[array][index], b[:, None], h, 0, 0
        )

    def apply(self, s, read: Callable, *numbers: IntLike):
        """What the rule makes of the logits s, for the numbers b, h, position and key, which
        broadcast against s."""
        return self.evaluate(
            [value for _, value in self.read_captured(read, *numbers)], *numbers, s
        )

    def vjp(self, s, read: Callable, *numbers: IntLike):
        """The same, and the function from its cotangent to that of s, and the (array, index,
        cotangent) of each read of a table.

        Where the cotangent is 0, as of a pair that a mask hides, so are the others: there the rule
        may have no derivative.
        """
        found, is_table = (
            self.read_captured(read, *numbers),
            [self._is_table(at.array) for at in self.mod.reads],
        )
        whole = [
            jnp.broadcast_to(value, s.shape) if table else value
            for (_, value), table in zip(found, is_table, strict=True)
        ]

        def evaluate(s, tables):
            tables = iter(tables)
            return self.evaluate(
                [next(tables) if t else x for x, t in zip(whole, is_table, strict=True)],
                *numbers,
                s,
            )

        new, pull = jax.vjp(evaluate, s, [x for x, t in zip(whole, is_table, strict=True) if t])

        def back(ds):
            live = lambda d: jnp.where(ds == 0, jnp.zeros_like(d), d)
            of_s, of_tables = pull(ds)
            tables = [
                (at.array, *what)
                for at, what, t in zip(self.mod.reads, found, is_table, strict=True)
                if t
            ]
            given = [
                (n, i, _summed(live(d), value))
                for (n, i, value), d in zip(tables, of_tables, strict=True)
            ]
            return live(of_s), given

        return new, back


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
    number = jax.ShapeDtypeStruct((), dtype)
    last = lambda b, h, q, k, score: score_mod(score, b, h, q, k)
    jaxpr, arrays, out = traced.trace_function(SIGNATURE, last, *[traced.INDEX] * 4, number)
    if getattr(out, "shape", None) != () or out.dtype != number.dtype:
        hint = (
            " To hide keys, pass a mask, masks.MaskMod, or return jnp.where(rule, score, -jnp.inf)."
        )
        hint *= traced.describe(out) == "bool[]"
        raise TypeError(
            f"{SIGNATURE} must return one number of the score's dtype, {number.dtype}[]; got "
            f"{traced.describe(out)}.{hint}"
        )
    found = traced.TracedMod(
        jaxpr, len(arrays), getattr(score_mod, "__name__", type(score_mod).__name__), score_mod
    )
    if any(4 in at.depends_on for at in found.reads):
        raise TypeError(
            f"{SIGNATURE} may read arrays at an index made of b, h, q_idx and kv_idx; got one made "
            "of the score."
        )
    wide = lambda x: x.astype(number.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return BoundScoreMod(found, tuple(wide(jnp.asarray(x)) for x in arrays))
