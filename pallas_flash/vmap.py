"""jax.vmap of a call is one call of more batch rows: an implementation sees all of them, and cuts
and orders them as its own."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import equation, lowering
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Pass
from pallas_flash.devices.call import operand_axes, rows_axes


@dataclasses.dataclass(frozen=True)
class BatchedPass(Pass):
    """A pass whose calls under vmap are one call of more batch rows."""

    is_blind: bool  # chosen by default for a call that was not traced for a GPU

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        axes = operand_axes(problem, operands)
        arrays = jax.tree.leaves((axes, *rows_axes(axes, rows)))
        rules = MergedRows(self, problem, tiles, tuple(arrays))
        run = functools.partial(self.inner, problem, tiles)
        return equation.bind(run, rules, operands, *rows)


@dataclasses.dataclass(frozen=True)
class MergedRows(equation.Rules):
    """The rules of a BatchedPass of a problem."""

    primitive = equation.primitive("flash_attention_call")
    pass_: BatchedPass
    problem: Problem
    tiles: Any
    axes: tuple[str, ...]  # of each array

    def batch(self, size, leaves, in_axes, *, in_tree, **parameters):
        merged = self._merge(size, leaves, in_axes, in_tree)
        if merged is None:
            return self._side_by_side(size, leaves, in_axes, in_tree, **parameters)
        x, *rows = jax.tree.unflatten(in_tree, merged)
        x, backend = _with_batch_indices(x, size, self.problem.batch), self.pass_.backend
        problem = self.problem.of_part(x)
        if backend.why_not(problem):
            return self._side_by_side(size, leaves, in_axes, in_tree, **parameters)
        results = self.pass_(problem, backend.tiles_like(self.tiles, problem), x, *rows)
        split = lambda y: y.reshape(size, self.problem.batch, *y.shape[1:])
        return list(map(split, jax.tree.leaves(results)))

    def _side_by_side(self, size: int, leaves, in_axes, in_tree, **parameters):
        """The results of `size` calls that are not one."""
        tiles = self.pass_.backend.of_calls(self.tiles, self.problem, size)
        if tiles == self.tiles:
            return super().batch(size, leaves, in_axes, **parameters)
        run = lambda *x: jax.tree.leaves(
            self.pass_.inner(self.problem, tiles, *jax.tree.unflatten(in_tree, x))
        )
        return jax.vmap(run, in_axes)(*leaves)

    def _merge(self, size: int, leaves, in_axes, in_tree) -> list | None:
        """The arrays of one call that does what `size` calls do; None if that would copy what they
        share of query, key and value, or of a bias or mask of several batch rows; or if each call
        has an array, or the gradient of one, that belongs to none of its batch rows: sinks, what a
        rule reads. Many tangents at one place are worth the copies."""
        is_mapped = [axis == 0 for axis in in_axes]
        (x, *_), (axes, *row_axes), (differs, *rows_differ) = (
            jax.tree.unflatten(in_tree, each) for each in (leaves, self.axes, is_mapped)
        )
        name = self.pass_.name
        if not (differs.query and differs.key and differs.value) and name != "tangent":
            return None
        if name == "backward":  # each call has its own gradient of what all share
            gradients = jax.tree.map(lambda _: True, differs.differentiable)
            differs = differs.with_differentiable(gradients._replace(sinks=differs.sinks))
        for name in ("bias", "mask"):
            dense = getattr(x, name)
            if dense is not None and not getattr(differs, name):
                if dense.shape[0] != 1:  # which may be a symbol
                    return None
                axes = axes._replace(**{name: ""})  # one row serves all
        has_rows = [letters.startswith("B") for letters in jax.tree.leaves((axes, *row_axes))]
        differs = jax.tree.leaves((differs, *rows_differ))
        if any(d and not has for d, has in zip(differs, has_rows, strict=True)):
            return None

        def merge(a, mapped):
            a = a if mapped else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(size * self.problem.batch, *a.shape[2:])

        return [
            merge(a, mapped) if has else a
            for a, mapped, has in zip(leaves, is_mapped, has_rows, strict=True)
        ]

    def lower(self, ctx, *leaves, jaxpr, **trees):
        lowering.warn(ctx, self.pass_.backend.name, self.pass_.is_blind, jaxpr)
        return super().lower(ctx, *leaves, jaxpr=jaxpr, **trees)


def _with_batch_indices(x: Operands, size: int, batch: int) -> Operands:
    """The operands of `size` calls, in which rules count the batch rows of each call from 0."""

    def indexed(bound):
        if bound is None or bound.batch is not None or not bound.mod.uses_batch:
            return bound
        return dataclasses.replace(bound, batch=jnp.tile(jnp.arange(batch, dtype=jnp.int32), size))

    resolved_mask = dataclasses.replace(x.resolved_mask, mask_mod=indexed(x.resolved_mask.mask_mod))
    return x._replace(resolved_mask=resolved_mask, score=indexed(x.score))
