"""A function of trees as one equation of a jaxpr: the one place that flattens, batches,
differentiates and lowers such equations."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True)
class Rules:
    """What vmap and lowering make of an equation: the same as of the jaxpr in it, where a subclass
    does not say otherwise. Hashable, and a parameter of the equation beside its `jaxpr`, `in_tree`
    and `out_tree`."""

    primitive: ClassVar[Primitive]

    def batch(self, size: int, leaves, in_axes, *, jaxpr, **trees) -> list:
        """The results of `size` calls, which lie on the first axis of each result and of each leaf
        whose in_axes is 0; a leaf whose in_axes is None is shared."""
        return jax.vmap(jaxpr_as_fun(jaxpr), in_axes)(*leaves)

    def jvp(self, primals, tangents, *, jaxpr, **trees):
        """The derivatives of plain JAX; a tangent may be an `ad.Zero`."""
        return jax.jvp(jaxpr_as_fun(jaxpr), primals, tuple(map(ad.instantiate_zeros, tangents)))

    def lower(self, ctx, *leaves, jaxpr, **trees):
        return mlir.core_call_lowering(ctx, *leaves, name=ctx.primitive.name, call_jaxpr=jaxpr)


@dataclasses.dataclass(frozen=True)
class KeptUnderVmap(Rules):
    """Rules of an equation that vmap makes another of the same primitive."""

    maps: tuple[tuple[int | None, ...], ...] = dataclasses.field(default=(), kw_only=True)

    def batch(self, size, leaves, in_axes, *, jaxpr, **trees):
        rules = dataclasses.replace(self, maps=(*self.maps, in_axes))
        jaxpr = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes))(*leaves)
        return self.primitive.bind(*leaves, jaxpr=jaxpr, rules=rules, **trees)

    def vmap(self, f: Callable) -> Callable:
        """f under the vmaps around the equation, the innermost first."""
        for in_axes in self.maps:
            f = jax.vmap(f, in_axes)
        return f


def bind(function: Callable, rules: Rules, *args):
    """function(*args), of trees of arrays, as one equation with these rules."""
    leaves, in_tree = jax.tree.flatten(args)
    flat = lambda *leaves: function(*jax.tree.unflatten(in_tree, leaves))
    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    out_tree = jax.tree.structure(out)
    trees = dict(in_tree=in_tree, out_tree=out_tree)
    results = rules.primitive.bind(*leaves, jaxpr=jaxpr, rules=rules, **trees)
    return jax.tree.unflatten(out_tree, results)


def primitive(name: str) -> Primitive:
    """A primitive for `bind`."""
    new = Primitive(name)
    new.multiple_results = True
    new.def_impl(lambda *leaves, jaxpr, **_: jaxpr_as_fun(jaxpr)(*leaves))
    new.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
    batching.primitive_batchers[new] = _batch
    ad.primitive_jvps[new] = _jvp
    mlir.register_lowering(new, lower)
    return new


def lower(ctx, *leaves, rules: Rules, **parameters):
    return rules.lower(ctx, *leaves, **parameters)


def _batch(leaves, axes, *, jaxpr, rules: Rules, **trees):
    leaves = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    in_axes = tuple(None if axis is None else 0 for axis in axes)
    size = next(x.shape[0] for x, axis in zip(leaves, in_axes, strict=True) if axis == 0)
    if size == 0:
        results = [jnp.zeros((0, *y.shape), y.dtype) for y in jaxpr.out_avals]
    else:
        results = rules.batch(size, leaves, in_axes, jaxpr=jaxpr, **trees)
    return results, [0] * len(results)


def _jvp(primals, tangents, *, rules: Rules, **parameters):
    return rules.jvp(primals, tangents, **parameters)
