"""A function of trees of arrays as one equation of a jaxpr: the one place that flattens, batches,
differentiates, transposes and lowers such equations."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.jax_support.jax_internals import (
    Primitive,
    ad,
    batching,
    jaxpr_as_fun,
    jet_rules,
    mlir,
)

NOT_LINEAR = (
    "flash_attention is linear in value alone, and has a jax.linear_transpose by that alone; that "
    "of its derivative, by query, key and others too, is jax.vjp."
)
NO_JET = (
    'jax.experimental.jet takes flash_attention with implementation="reference" alone; with the '
    "others nest jax.jvp."
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """run(*args) of trees of arrays, and its rules for vmap, jvp and lowering. By default they act
    on the jaxpr of `run`; subclasses override. Rules are hashable: a parameter of the equation
    beside its `in_tree`, `out_tree`, and `jaxpr`, which is None where it is traced only when
    lowered."""

    primitive: ClassVar[Primitive]
    has_kernels: ClassVar[bool] = True
    # the in_axes of the leaves in each vmap around it, the innermost first. The results begin with
    # an axis for each vmap, the outermost first
    maps: tuple[tuple[int | None, ...], ...] = dataclasses.field(default=(), kw_only=True)

    def run(self, *args):
        raise NotImplementedError

    def results_like(self, *args):
        """Arrays of the shapes and dtypes of run's results, without tracing it; `run` is then
        traced when it is lowered. None: unknown."""

    def bind(self, *args):
        """run(*args) as one equation."""
        leaves, in_tree = jax.tree.flatten(args)
        like, results = jax.make_jaxpr(self.results_like, return_shape=True)(*args)
        jaxpr = None
        if results is None:
            like, results = jax.make_jaxpr(self.run, return_shape=True)(*args)
            jaxpr = like
        trees = dict(in_tree=in_tree, out_tree=jax.tree.structure(results))
        results = self._bind(leaves, jaxpr, like.out_avals, **trees)
        return jax.tree.unflatten(trees["out_tree"], results)

    __call__ = bind

    def _bind(self, leaves, jaxpr, avals, **trees) -> list:
        if jaxpr is not None:
            effects = frozenset(jaxpr.effects)
        else:  # those of jax's GPU interpreter
            effects = hardware.interpret_effects if self.has_kernels else frozenset()
        known = dict(jaxpr=jaxpr, avals=tuple(avals), eqn_effects=effects)
        return self.primitive.bind(*leaves, rules=self, **known, **trees)

    def within(self, in_axes):
        """The rules under one more vmap."""
        return dataclasses.replace(self, maps=(*self.maps, in_axes))

    def vmap(self, f: Callable, *other_axes: tuple) -> Callable:
        """f(*leaves, *others) of one call under the vmaps around the equation, each of which has
        in_axes of the others in `other_axes`."""
        for in_axes, others in zip(self.maps, other_axes or [()] * len(self.maps), strict=True):
            f = jax.vmap(f, (*in_axes, *others))
        return f

    def flat(self, function: Callable | None = None, *, in_tree, **_) -> Callable:
        """`run`, or another function of its args, as a function of leaves under the vmaps."""
        f = self.run if function is None else function
        return self.vmap(lambda *leaves: jax.tree.leaves(f(*jax.tree.unflatten(in_tree, leaves))))

    def batch(self, size: int, leaves, in_axes, *, jaxpr, **trees) -> list:
        """The results of `size` calls, which lie on the first axis of each result and of each leaf
        whose in_axes is 0; a leaf whose in_axes is None is shared."""
        rules = self.within(in_axes)
        if jaxpr is None:
            like = jax.make_jaxpr(rules.flat(self.results_like, **trees))(*leaves)
        else:
            like = jaxpr = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes))(*leaves)
        return rules._bind(leaves, jaxpr, like.out_avals, **trees)

    def jvp(self, primals, tangents, **parameters):
        """The results and their tangents, flat; a tangent may be an `ad.Zero`."""
        function = as_function(rules=self, **parameters)
        return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))

    @property
    def no_jet(self) -> str:
        """The reason why jax.experimental.jet refuses it."""
        return NO_JET

    def lower(self, ctx, *leaves, **parameters):
        function = as_function(rules=self, **parameters)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)


@dataclasses.dataclass(frozen=True)
class Equation(Rules):
    """Rules with derivatives, which subclasses write for one call: jax maps them."""

    def push(self, args: tuple, tangents: tuple):
        """The results and their tangents; `tangents` are trees like `args`, where None is zero."""
        raise NotImplementedError

    def pull(self, args: tuple, cotangents) -> tuple:
        """The cotangents of the args in which it is linear, by those of the results; None for the
        other args. The linear ones are zeros in `args`."""
        raise NotImplementedError

    def jvp(self, primals, tangents, *, in_tree, **_):
        one = dataclasses.replace(self, maps=())
        is_zero = [type(tangent) is ad.Zero for tangent in tangents]
        varies = [is_float(x) and not zero for x, zero in zip(primals, is_zero, strict=True)]
        varying = lambda each: tuple(itertools.compress(each, varies))

        def push(*leaves):
            new = iter(leaves[len(varies) :])
            tangents = [next(new) if is_varying else None for is_varying in varies]
            args = jax.tree.unflatten(in_tree, leaves[: len(varies)])
            results = one.push(args, jax.tree.unflatten(in_tree, tangents))
            return tuple(map(jax.tree.leaves, results))

        return self.vmap(push, *map(varying, self.maps))(*primals, *varying(tangents))

    def transpose(self, cotangents, leaves, *, in_tree, out_tree):
        one = dataclasses.replace(self, maps=())
        is_linear = list(map(ad.is_undefined_primal, leaves))
        zero = lambda x: ad.instantiate_zeros(ad.Zero(x.aval)) if ad.is_undefined_primal(x) else x

        def pull(*leaves):
            args = jax.tree.unflatten(in_tree, leaves[: len(is_linear)])
            pulled = one.pull(args, jax.tree.unflatten(out_tree, leaves[len(is_linear) :]))
            pulled = list(itertools.compress(in_tree.flatten_up_to(pulled), is_linear))
            if any(a is None for a in pulled):
                raise NotImplementedError(NOT_LINEAR)
            return pulled

        result_axes = [(0,) * len(cotangents)] * len(self.maps)
        cotangents = map(ad.instantiate_zeros, cotangents)
        new = iter(self.vmap(pull, *result_axes)(*map(zero, leaves), *cotangents))

        def summed(n):
            """Sums the cotangents of a leaf over the vmaps that share it."""
            shared = [len(self.maps) - 1 - i for i, axes in enumerate(self.maps) if axes[n] is None]
            return jnp.sum(next(new), shared) if shared else next(new)

        return [summed(n) if is_ else None for n, is_ in enumerate(is_linear)]


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# ---- primitives ----


def primitive(name: str, has_transpose: bool = False) -> Primitive:
    """A new primitive, whose equations have Rules."""
    new = Primitive(name)
    new.multiple_results = True
    new.def_impl(_run)
    new.def_effectful_abstract_eval(lambda *_, avals, eqn_effects, **__: (list(avals), eqn_effects))
    batching.primitive_batchers[new] = _batch
    ad.primitive_jvps[new] = _jvp
    if has_transpose:
        ad.primitive_transposes[new] = _transpose
    jet_rules[new] = _jet
    mlir.register_lowering(new, lower)
    # equations of jax's own that are not lowered yet may stay in the jaxpr: `lower` lowers them
    new.is_high = lambda *_, **__: False
    return new


def as_function(*, rules: Rules, jaxpr, **parameters) -> Callable:
    """The function of leaves that an equation with these parameters computes."""
    return rules.flat(**parameters) if jaxpr is None else jaxpr_as_fun(jaxpr)


def _run(*leaves, **parameters) -> list:
    run = as_function if parameters["jaxpr"] is not None else _compiled
    return run(**parameters)(*leaves)


@functools.lru_cache(256)
def _compiled(**parameters) -> Callable:
    return jax.jit(as_function(**parameters))


def _batch(leaves, axes, *, rules: Rules, avals, eqn_effects, **parameters):
    leaves = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    in_axes = tuple(None if axis is None else 0 for axis in axes)
    size = next(x.shape[0] for x, axis in zip(leaves, in_axes, strict=True) if axis == 0)
    if size == 0:
        results = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
    else:
        results = rules.batch(size, leaves, in_axes, **parameters)
    return results, [0] * len(results)


# the parameters of an equation, of which its rules take some
def _jvp(primals, tangents, *, rules: Rules, avals, eqn_effects, **parameters):
    return rules.jvp(primals, tangents, **parameters)


def _jet(primals, series, *, rules: Rules, **_):
    raise NotImplementedError(rules.no_jet)


def _transpose(cotangents, *leaves, rules: Equation, in_tree, out_tree, **_):
    return rules.transpose(cotangents, leaves, in_tree=in_tree, out_tree=out_tree)


def lower(ctx, *leaves, rules: Rules, avals, eqn_effects, method="lower", **parameters):
    return getattr(rules, method)(ctx, *leaves, **parameters)


NO_THIRD = (
    "flash_attention has first and second derivatives in every mode, third and higher ones only by "
    'further jax.jvp; implementation="reference" has all of them.'
)


@dataclasses.dataclass(frozen=True)
class LinearMap(Equation):
    """run(residuals, x), linear in x, in every mode of differentiation. Both are trees of arrays;
    the map itself is static and hashable.

    JAX transposes a jaxpr equation by equation, and cannot transpose a loop of unknown length; here
    a formula transposes a whole loop at once.
    """

    primitive = primitive("flash_attention_linear", has_transpose=True)

    def transposed(self, x) -> "LinearMap":
        """The transposed map, with the same residuals: maps cotangents of the results to cotangents
        of x."""
        raise NotImplementedError

    def differentiable(self, residuals) -> tuple["LinearMap", Any]:
        """A map that JAX can differentiate, and its residuals."""
        return self, residuals

    def vjp_of_residuals(self, residuals, x, cotangents) -> list:
        """The gradient of <cotangents, run(residuals, x)> with respect to the float arrays among
        the leaves of `residuals`."""
        raise NotImplementedError(NO_THIRD)

    def push(self, args, tangents):
        (residuals, x), (d_residuals, dx) = args, tangents
        results, parts = self(residuals, x), []
        if jax.tree.leaves(dx):
            dx = jax.tree.map(lambda a, da: jnp.zeros_like(a) if da is None else da, x, dx)
            parts.append(self(residuals, dx))
        if jax.tree.leaves(d_residuals):
            pairs = zip(
                *map(jax.tree.structure(residuals).flatten_up_to, (residuals, d_residuals)),
                strict=True,
            )
            along = [jnp.zeros_like(a) if da is None else da for a, da in pairs if is_float(a)]
            parts.append(Derivative(self)((residuals, x), along))
        parts = parts or [jax.tree.map(jnp.zeros_like, results)]
        return results, functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)

    def pull(self, args, cotangents):
        residuals, x = args
        return jax.tree.map(lambda _: None, residuals), self.transposed(x)(residuals, cotangents)


@dataclasses.dataclass(frozen=True)
class Derivative(LinearMap):
    """The derivative of a map by its residuals: maps tangents of their floats to those of
    results."""

    linear: LinearMap

    def run(self, residuals, x):
        inner, arg = residuals

        def function(floats):
            linear, new = self.linear.differentiable(_with_floats(inner, floats))
            return linear.run(new, arg)

        return jax.jvp(function, (floats(inner),), (x,))[1]

    def results_like(self, residuals, x):
        return self.linear.results_like(*residuals)

    def transposed(self, x):
        return Pullback(self.linear)


@dataclasses.dataclass(frozen=True)
class Pullback(LinearMap):
    """The transpose of `Derivative`."""

    linear: LinearMap

    def run(self, residuals, x):
        return self.linear.vjp_of_residuals(*residuals, x)

    def results_like(self, residuals, x):
        return floats(residuals[0])

    def transposed(self, x):
        return Derivative(self.linear)


def floats(tree) -> list:
    """The float arrays among the leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if is_float(x)]


def _with_floats(tree, floats: list):
    """The tree with `floats` in place of its float arrays."""
    new = iter(floats)
    return jax.tree.map(lambda x: next(new) if is_float(x) else x, tree)
