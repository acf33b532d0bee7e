"""All-to-all context parallelism (DeepSpeed's Ulysses): the caller holds a part of the rows of all
heads, and the implementation computes all rows of a part of the heads.

context_parallel.py exchanges Q, K and V beforehand. The forward exchanges o back, so that its
residual is this device's rows of o, which the caller keeps anyway. delta is computed from these
rows and exchanged, one scalar for each row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import checks
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.implementation import Pass


@dataclasses.dataclass(frozen=True)
class UlyssesPass(Pass):
    """A pass that takes the operands of `localize_rows`, and takes and returns o, the softmax
    state, lse, do and delta of this device's rows of all heads."""

    axis: tuple[str, ...]

    def __call__(self, problem: Problem, tiles, x: Operands, *rest):
        x = _localize_heads(self.axis, problem, x)
        swapped = lambda y, whole, cut: lax.all_to_all(y, self.axis, cut, whole, tiled=True)
        if self.name == "forward":
            o, stats = self.inner(problem, tiles, x)
            rows, tree = jax.tree.flatten(stats)
            return swapped(o, 2, 1), jax.tree.unflatten(tree, swapped(jnp.stack(rows), 2, 3))
        lse, do, delta = rest
        rows, tree = jax.tree.flatten((lse, delta))
        lse, delta = jax.tree.unflatten(tree, swapped(jnp.stack(rows), 3, 2))
        return self.inner(problem, tiles, x, lse, swapped(do, 1, 2), delta)


def localize_rows(axis: tuple[str, ...], problem: Problem, x: Operands, sinks) -> Operands:
    """The operands of this device's heads with what autodiff.py combines with o and do: the sinks
    of all heads, and which of this device's rows are within their lengths."""
    if sinks is not None:
        sinks = checks.sinks(sinks, problem.heads * lax.axis_size(axis)).astype(x.sinks.dtype)
    return x._replace(
        sinks=sinks, resolved_mask=x.resolved_mask.shift_rows(_first_row(axis, problem))
    )


def _localize_heads(axis: tuple[str, ...], problem: Problem, x: Operands) -> Operands:
    """The inverse of `localize_rows`."""
    sinks, N = x.sinks, problem.heads
    sinks = None if sinks is None else lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * N, N)
    return x._replace(
        sinks=sinks, resolved_mask=x.resolved_mask.shift_rows(-_first_row(axis, problem))
    )


def _first_row(axis: tuple[str, ...], problem: Problem):
    return lax.axis_index(axis) * (problem.queries // lax.axis_size(axis))
