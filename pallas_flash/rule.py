"""A mask as a function of batch, head, query and key: traced once, compared by what it computes, evaluated anywhere."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_flash.visibility import Ints, register

INDEX = jax.ShapeDtypeStruct((), jnp.int32)


class Rule:
    """The program of a mask_mod(b, h, q_idx, kv_idx), of int32 numbers, without the arrays that it closes over."""

    def __init__(self, jaxpr, name: str):
        self.jaxpr, self.name, self.text = jaxpr, name, str(jaxpr)
        used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
        self.reads_batch, self.reads_head, *_ = (id(x) in used for x in jaxpr.invars)

    def __eq__(self, other):
        return isinstance(other, Rule) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    def __repr__(self):
        return self.name

    def __call__(self, arrays, b: Ints, h: Ints, query: Ints, key: Ints) -> jax.Array:
        """One number each; `vmap` and `jnp.vectorize` make it that of many."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(arrays)))(*(jnp.asarray(x, jnp.int32) for x in (b, h, query, key)))[0]

    @property
    def operations(self) -> set[str]:
        """The names of the primitives it is made of."""
        return set(_operations(self.jaxpr))


def _operations(jaxpr):
    for eqn in jaxpr.eqns:
        inner = [x for x in eqn.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        yield from [eqn.primitive.name] if not inner else ()
        for x in inner:
            yield from _operations(getattr(x, "jaxpr", x))


def trace(mask_mod: Callable, name: str | None = None) -> tuple[Rule, tuple]:
    """The rule of a mask_mod, and the arrays that it closes over."""
    if not callable(mask_mod):
        raise TypeError(f"Where takes a function mask_mod(b, h, q_idx, kv_idx) -> bool; got {type(mask_mod).__name__}.")
    traced, out = jax.make_jaxpr(mask_mod, return_shape=True)(INDEX, INDEX, INDEX, INDEX)
    if getattr(out, "shape", None) != () or out.dtype != bool:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"mask_mod(b, h, q_idx, kv_idx) must return one bool for four numbers; got {got}.")
    return Rule(traced.jaxpr, name or getattr(mask_mod, "__name__", type(mask_mod).__name__)), tuple(traced.consts)


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A rule with all that it is asked about: which of a block's queries and keys it lets see each other.

    `offset` is what makes a row a position, an int or [B]. `batch` [B] and `head` [N] number the batch rows and the heads, None
    from 0 on. `kinds` int8 [B | 1, N | 1, tiles, tiles] says of the blocks of `block` queries and keys whether they are empty,
    partial or full (kinds.py), None: not known yet.
    """

    rule: Rule
    arrays: tuple
    offset: Ints = 0
    batch: Any = None
    head: Any = None
    kinds: Any = None
    block: int | None = None

    def numbers(self, batch: Ints, heads: Ints) -> tuple[Ints, Ints]:
        """The numbers of `batch` batch rows [B] and `heads` heads [N]; 0 where the rule does not ask."""
        of = lambda known, n: jnp.arange(n, dtype=jnp.int32) if known is None else known
        b = of(self.batch, batch) if self.rule.reads_batch else jnp.zeros(1, jnp.int32)
        return b, of(self.head, heads) if self.rule.reads_head else jnp.zeros(1, jnp.int32)

    def sees(self, b: Ints, h: Ints, position: Ints, key: Ints) -> jax.Array:
        """bool, of the shape that the arguments broadcast to."""
        return jnp.vectorize(lambda *x: self.rule(self.arrays, *x))(b, h, position, key)

    def sees_tile(self, b: Ints, h: Ints, position: jax.Array, key: jax.Array) -> jax.Array:
        """[positions, keys] of one batch row and head, for kernels."""
        by_key = jax.vmap(lambda q, k: self.rule(self.arrays, b, h, q, k), (None, 0))
        return jax.vmap(by_key, (0, None))(position, key)


register(Predicate, "rule")
