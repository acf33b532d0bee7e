"""Operations that are linear in some of their arrays, in every mode of differentiation: each is one
equation of a jaxpr, which has a transpose, and derivatives with respect to the other arrays, of its
own. vmap makes another such equation of it.

JAX transposes a jaxpr equation by equation, and a loop of unknown length not at all; here a whole
loop is transposed at once, by a formula.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_THIRD = (
    "flash_attention has first and second derivatives in every mode, and higher ones forward over "
    'them; implementation="reference" has all of them.'
)


class LinearMap:
    """apply(residuals, x), linear in x. Both are trees of arrays; the map itself is static and
    hashable."""

    def apply(self, residuals, x):
        raise NotImplementedError

    def results_like(self, residuals, x):
        """Arrays of the shapes and dtypes of what `apply` returns, at no cost."""
        raise NotImplementedError

    has_effects = False  # whether `apply` has some

    def transpose(self, x) -> "LinearMap":
        """The transposed map, with the same residuals: of cotangents of the results, to those of
        the arrays that x has."""
        raise NotImplementedError

    def plain(self, residuals) -> tuple["LinearMap", Any]:
        """The map as JAX can differentiate it, and its residuals."""
        return self, residuals

    def pull(self, residuals, x, cotangents) -> list:
        """The gradient of <cotangents, apply(residuals, x)> with respect to the float arrays among
        the leaves of `residuals`."""
        raise NotImplementedError(NO_THIRD)

    def __call__(self, residuals, x):
        return self.mapped((), residuals, x)

    def mapped(self, maps: tuple, residuals, x):
        """The same under vmaps, of which `maps` are the in_axes of the leaves of both."""
        return _bind(self, maps, residuals, x)


@dataclasses.dataclass(frozen=True)
class Derivative(LinearMap):
    """The derivative of a map with respect to its residuals: of the tangents of their floats."""

    of: LinearMap

    def apply(self, residuals, x):
        inner, arg = residuals

        def function(floats):
            plain, of_plain = self.of.plain(_with_floats(inner, floats))
            return plain.apply(of_plain, arg)

        return jax.jvp(function, (floats(inner),), (x,))[1]

    def results_like(self, residuals, x):
        return self.of.results_like(*residuals)

    def transpose(self, x):
        return Pullback(self.of)


@dataclasses.dataclass(frozen=True)
class Pullback(LinearMap):
    """The transpose of `Derivative`."""

    of: LinearMap

    def apply(self, residuals, x):
        return self.of.pull(*residuals, x)

    def results_like(self, residuals, x):
        return floats(residuals[0])

    def transpose(self, x):
        return Derivative(self.of)


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats(tree) -> list:
    """The float arrays among the leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def _with_floats(tree, floats: list):
    """The tree with others in place of its float arrays."""
    new = iter(floats)
    return jax.tree.map(lambda x: next(new) if _is_float(x) else x, tree)


# ---- the equation ----
# Its arrays are the leaves of (residuals, x). `maps` are the in_axes of the vmaps around it, the
# innermost first: the axes of its results are those of the vmaps, the outermost first, and then
# those of `apply`.


def _bind(of: LinearMap, maps: tuple, residuals, x):
    leaves, tree = jax.tree.flatten((residuals, x))
    jaxpr, out = jax.make_jaxpr(_mapped(of.results_like, maps, tree), return_shape=True)(*leaves)
    out_tree, avals = jax.tree.structure(out), tuple(jaxpr.out_avals)
    effects = frozenset()
    if of.has_effects:
        effects = frozenset(jax.make_jaxpr(_mapped(of.apply, maps, tree))(*leaves).effects)
    # `does`: a parameter named effects would be in the way of jax's lowering
    static = dict(of=of, maps=maps, tree=tree, out_tree=out_tree, avals=avals, does=effects)
    return jax.tree.unflatten(out_tree, linear_p.bind(*leaves, **static))


def _mapped(function: Callable, maps: tuple, tree) -> Callable:
    """function(residuals, x) of the leaves of both, under the vmaps."""
    flat = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))
    for in_axes in maps:
        flat = jax.vmap(flat, in_axes)
    return flat


def run(*leaves, of: LinearMap, maps: tuple, tree, **_) -> list:
    """What an equation with these parameters computes."""
    return jax.tree.leaves(_mapped(of.apply, maps, tree)(*leaves))


@functools.lru_cache(256)
def _compiled(**static) -> Callable:
    return jax.jit(functools.partial(run, **static))


def _batch(leaves, axes, *, of, maps, tree, avals, **_):
    leaves = [
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(leaves, axes, strict=True)
    ]
    in_axes = tuple(None if axis is None else 0 for axis in axes)
    if 0 in (a.shape[0] for a, axis in zip(leaves, in_axes, strict=True) if axis == 0):
        results = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
    else:
        args = jax.tree.unflatten(tree, leaves)
        results = jax.tree.leaves(_bind(of, (*maps, in_axes), *args))
    return results, [0] * len(results)


def _jvp(primals, tangents, **static):
    of, maps, tree = (static[name] for name in ("of", "maps", "tree"))
    count = tree.children()[0].num_leaves
    results, parts = linear_p.bind(*primals, **static), []
    if not all(map(is_zero, tangents[count:])):
        of_x = map(ad.instantiate_zeros, tangents[count:])
        parts.append(linear_p.bind(*primals[:count], *of_x, **static))
    args = jax.tree.unflatten(tree, primals)
    are_floats = [_is_float(a) for a in primals[:count]]
    pick = lambda each: tuple(a for a, is_float in zip(each, are_floats, strict=False) if is_float)
    if not all(map(is_zero, pick(tangents))):
        of_residuals = list(map(ad.instantiate_zeros, pick(tangents)))
        maps = tuple((*in_axes, *pick(in_axes)) for in_axes in maps)
        parts.append(jax.tree.leaves(_bind(Derivative(of), maps, args, of_residuals)))
    if not parts:
        return results, list(map(ad.Zero.from_primal_value, results))
    return results, [functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)]


def is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero


def _transpose(cotangents, *leaves, of, maps, tree, out_tree, **_):
    of_residuals, of_x = tree.children()
    count = of_residuals.num_leaves
    residuals = jax.tree.unflatten(of_residuals, leaves[:count])
    transposed = of.transpose(jax.tree.unflatten(of_x, [True] * of_x.num_leaves))
    cotangents = jax.tree.unflatten(out_tree, map(ad.instantiate_zeros, cotangents))
    # all results are mapped by all vmaps
    new_maps = tuple((*in_axes[:count], *[0] * out_tree.num_leaves) for in_axes in maps)
    found = jax.tree.leaves(_bind(transposed, new_maps, residuals, cotangents))

    def summed(n, leaf, cotangent):
        """What several calls of a vmap share gets the sum of their cotangents."""
        if not ad.is_undefined_primal(leaf):
            return None
        shared = [len(maps) - 1 - i for i, in_axes in enumerate(maps) if in_axes[n] is None]
        return jnp.sum(cotangent, shared) if shared else cotangent

    each = enumerate(zip(leaves[count:], found, strict=True), count)
    return [None] * count + [summed(n, *pair) for n, pair in each]


linear_p = Primitive("flash_attention_linear")
linear_p.multiple_results = True
linear_p.def_impl(lambda *leaves, **static: _compiled(**static)(*leaves))
linear_p.def_effectful_abstract_eval(lambda *_, avals, does, **__: (list(avals), does))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(run, multiple_results=True))
