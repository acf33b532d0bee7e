"""Operations that are linear in some of their arrays, in every mode of differentiation: each is one
equation of a jaxpr, which has a transpose, and derivatives with respect to the other arrays, of its
own. vmap makes another such equation of it.

JAX transposes a jaxpr equation by equation, and a loop of unknown length not at all; here a whole
loop is transposed at once, by a formula.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_THIRD = (
    'flash_attention with implementation="blockwise" has first and second derivatives in every '
    'mode, and higher ones forward over them; implementation="reference" has all of them.'
)


class LinearMap:
    """apply(residuals, x), linear in x. Both are trees of arrays; the map itself is static and
    hashable."""

    def apply(self, residuals, x):
        raise NotImplementedError

    def results_like(self, residuals, x):
        """Arrays of the shapes and dtypes of what `apply` returns, at no cost."""
        raise NotImplementedError

    def transpose(self, x) -> "LinearMap":
        """The transposed map, with the same residuals: of cotangents of the results, to those of
        the arrays that x has."""
        raise NotImplementedError

    def pull(self, residuals, x, cotangents) -> list:
        """The gradient of <cotangents, apply(residuals, x)> with respect to the float arrays among
        the leaves of `residuals`."""
        raise NotImplementedError(NO_THIRD)

    def __call__(self, residuals, x):
        return _bind(self, (), residuals, x)


@dataclasses.dataclass(frozen=True)
class Derivative(LinearMap):
    """The derivative of a map with respect to its residuals: of the tangents of their floats."""

    of: LinearMap

    def apply(self, residuals, x):
        inner, arg = residuals
        function = lambda new: self.of.apply(_with_floats(inner, new), arg)
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

linear_p = Primitive("flash_attention_linear")
linear_p.multiple_results = True


def _bind(map_: LinearMap, maps: tuple, residuals, x):
    leaves, tree = jax.tree.flatten((residuals, x))
    like = _mapped(map_.results_like, maps, tree)
    jaxpr, out = jax.make_jaxpr(like, return_shape=True)(*leaves)
    trees = dict(tree=tree, out_tree=jax.tree.structure(out))
    results = linear_p.bind(*leaves, of=map_, maps=maps, avals=tuple(jaxpr.out_avals), **trees)
    return jax.tree.unflatten(trees["out_tree"], results)


def _mapped(function: Callable, maps: tuple, tree) -> Callable:
    """function(residuals, x) of the leaves of these trees, under the vmaps."""
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


def _jvp(primals, tangents, **static):
    map_, maps, tree = (static[name] for name in ("of", "maps", "tree"))
    count = tree.children()[0].num_leaves
    residuals, _ = arrays = jax.tree.unflatten(tree, primals)
    is_float = [_is_float(r) for r in jax.tree.leaves(residuals)]
    of_residuals = [t for t, f in zip(tangents[:count], is_float, strict=True) if f]
    parts = []
    if not all(map(_is_zero, tangents[count:])):
        of_x = map(ad.instantiate_zeros, tangents[count:])
        parts.append(linear_p.bind(*primals[:count], *of_x, **static))
    if not all(map(_is_zero, of_residuals)):
        along = lambda in_axes: tuple(a for a, f in zip(in_axes, is_float, strict=False) if f)
        more = tuple((*in_axes, *along(in_axes)) for in_axes in maps)
        of_residuals = list(map(ad.instantiate_zeros, of_residuals))
        parts.append(jax.tree.leaves(_bind(Derivative(map_), more, arrays, of_residuals)))
    results = linear_p.bind(*primals, **static)
    if not parts:
        return results, list(map(ad.Zero.from_primal_value, results))
    return results, [functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)]


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero


def _transpose(cotangents, *leaves, of, maps, tree, out_tree, **_):
    count = tree.children()[0].num_leaves
    of_residuals, of_x = tree.children()
    residuals = jax.tree.unflatten(of_residuals, leaves[:count])
    transposed = of.transpose(jax.tree.unflatten(of_x, [True] * of_x.num_leaves))
    cotangents = jax.tree.unflatten(out_tree, [ad.instantiate_zeros(c) for c in cotangents])
    # all results are mapped by all vmaps
    mapped = (0,) * out_tree.num_leaves
    transposed_maps = tuple((*in_axes[:count], *mapped) for in_axes in maps)
    found = jax.tree.leaves(_bind(transposed, transposed_maps, residuals, cotangents))

    def summed(n, leaf, cotangent):
        """What several calls of a vmap share gets the sum of their cotangents."""
        if not ad.is_undefined_primal(leaf):
            return None
        shared = [len(maps) - 1 - i for i, in_axes in enumerate(maps) if in_axes[n] is None]
        return jnp.sum(cotangent, shared) if shared else cotangent

    each = enumerate(zip(leaves[count:], found, strict=True), count)
    return [None] * count + [summed(n, *pair) for n, pair in each]


def _batch(leaves, axes, *, of, maps, tree, avals, **_):
    leaves = [
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(leaves, axes, strict=True)
    ]
    in_axes = tuple(None if axis is None else 0 for axis in axes)
    if 0 in (a.shape[0] for a, axis in zip(leaves, in_axes, strict=True) if axis == 0):
        return [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals], [0] * len(avals)
    results = _bind(of, (*maps, in_axes), *jax.tree.unflatten(tree, leaves))
    return jax.tree.leaves(results), [0] * len(avals)


linear_p.def_impl(lambda *leaves, **static: _compiled(**static)(*leaves))
linear_p.def_effectful_abstract_eval(lambda *_, avals, **__: (list(avals), frozenset()))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(run, multiple_results=True))
