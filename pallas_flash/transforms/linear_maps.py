"""Operations that are linear in some of their arrays, in every mode of differentiation. Each is one
equation of a jaxpr with a transpose, and with derivatives by its other arrays.

JAX transposes a jaxpr equation by equation, and cannot transpose a loop of unknown length; here a
formula transposes a whole loop at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.transforms.equation import Equation, is_float, primitive

NO_THIRD = (
    "flash_attention has first and second derivatives in every mode, third and higher ones only by "
    'further jax.jvp; implementation="reference" has all of them.'
)


@dataclasses.dataclass(frozen=True)
class LinearMap(Equation):
    """run(residuals, x), linear in x. Both are trees of arrays; the map itself is static and
    hashable."""

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

    of: LinearMap

    def run(self, residuals, x):
        inner, arg = residuals

        def function(floats):
            of, of_inner = self.of.differentiable(_with_floats(inner, floats))
            return of.run(of_inner, arg)

        return jax.jvp(function, (floats(inner),), (x,))[1]

    def results_like(self, residuals, x):
        return self.of.results_like(*residuals)

    def transposed(self, x):
        return Pullback(self.of)


@dataclasses.dataclass(frozen=True)
class Pullback(LinearMap):
    """The transpose of `Derivative`."""

    of: LinearMap

    def run(self, residuals, x):
        return self.of.vjp_of_residuals(*residuals, x)

    def results_like(self, residuals, x):
        return floats(residuals[0])

    def transposed(self, x):
        return Derivative(self.of)


def floats(tree) -> list:
    """The float arrays among the leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if is_float(x)]


def _with_floats(tree, floats: list):
    """The tree with `floats` in place of its float arrays."""
    new = iter(floats)
    return jax.tree.map(lambda x: next(new) if is_float(x) else x, tree)
