"""jit over a mesh with Auto axes: tells XLA's partitioner, which cannot look into a kernel, what
each device computes.

Batch rows and heads may be sharded; every other axis is whole on each device. The partitioner says
which axes of the mesh they lie on. Each device then runs the Problem of its rows and heads, and the
gradients of an array that several devices hold are summed.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import equation, jax_internals
from pallas_flash.arguments import Gradients, Operands, Problem
from pallas_flash.backends import Pass
from pallas_flash.devices import callback_names
from pallas_flash.devices.call import operand_axes, row_axes, rows_axes
from pallas_flash.devices.sharding import axis_names, device_count
from pallas_flash.jax_internals import mlir

custom_partitioning, requires_devices = jax_internals.custom_partitioning()


@dataclasses.dataclass(frozen=True)
class PartitionedPass(Pass):
    """A pass that XLA's partitioner may spread over a mesh."""

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        axes = operand_axes(problem, operands)
        arrays = tuple(jax.tree.leaves((axes, *rows_axes(axes, rows))))
        gradients = None
        if self.name == "backward":
            gradients = tuple(jax.tree.leaves(axes.differentiable._replace(sinks=None)))
        rules = Partition(self, problem, tiles, arrays, gradients)
        run = functools.partial(self.inner, problem, tiles)
        return equation.bind(run, rules, operands, *rows)


@dataclasses.dataclass(frozen=True)
class Partition(equation.KeptUnderVmap):
    """The rules of a PartitionedPass of a problem. Axes are of a call without the vmaps around."""

    primitive = equation.primitive("flash_attention")
    pass_: PartitionedPass
    problem: Problem
    tiles: Any
    axes: tuple[str, ...]  # of each array, "." where one is broadcast
    gradients: tuple[str, ...] | None  # axes of what a backward returns

    def lower(self, ctx, *leaves, jaxpr, in_tree, out_tree):
        parameters = dict(jaxpr=jaxpr, in_tree=in_tree, out_tree=out_tree)
        target = jax_internals.target(ctx)
        is_whole = target.mesh is None or target.mesh.size == 1
        # what is exported may not call back
        if is_whole or target.is_export:
            return super().lower(ctx, *leaves, **parameters)
        axes = self._mapped_axes(jaxpr.out_avals)
        # only its shapes are used
        like = lambda *_: [jnp.zeros(y.shape, y.dtype) for y in jaxpr.out_avals]
        call = custom_partitioning(like)
        partition = functools.partial(self._partition, in_tree, axes)
        call.def_partition(partition, sharding_rule=_sharding_rule(self.problem, *axes))
        results = mlir.lower_fun(call, multiple_results=True)(ctx, *leaves)
        bound_mods = self.problem.resolved_mask.mask_mod, self.problem.score
        mods = [bound.mod.fingerprint for bound in bound_mods if bound is not None]
        if None not in mods:  # else jax's own name, by its address, stays
            computed = self.problem, self.tiles, mods, axes, self.maps, jaxpr
            callback_names.rename(ctx, results, *computed)
        return results

    def _mapped_axes(self, results) -> tuple[list[str], list[str]]:
        """The axes of each array and of each result, with a small letter for each vmap around."""
        letters = [chr(ord("a") + n) for n in range(len(self.maps))]
        mapped = lambda n: "".join(
            letter
            for letter, in_axes in zip(letters[::-1], self.maps[::-1], strict=True)
            if n is None or in_axes[n] is not None
        )
        plain = self.gradients or [row_axes(y.ndim - len(letters)) for y in results]
        return (
            [mapped(n) + axes for n, axes in enumerate(self.axes)],
            [mapped(None) + axes for axes in plain],
        )

    def _partition(self, in_tree, axes, mesh, arrays, results):
        arrays_axes, results_axes = axes
        mesh_axes = _mesh_axes(
            zip((*arrays, *results), (*arrays_axes, *results_axes), strict=True), mesh
        )
        keys_fit = self.problem.kv_heads % device_count(mesh_axes.get("N"), mesh) == 0
        axis_of = lambda c: mesh_axes.get("N" if c == "K" and keys_fit else c)
        placed = lambda axes: NamedSharding(mesh, P(*map(axis_of, axes)))
        run = self.vmap(functools.partial(self._run_on_device, in_tree, mesh_axes, mesh))
        return mesh, run, list(map(placed, results_axes)), tuple(map(placed, arrays_axes))

    def _run_on_device(self, in_tree, mesh_axes: dict[str, Any], mesh, *leaves):
        """What one device computes of its batch rows and heads, which lie on these axes of the
        mesh."""
        operands, *rows = jax.tree.unflatten(in_tree, leaves)
        heads = operands.query.shape[2]
        # each device has all key heads, and the query heads of some of them
        keys = None
        if (
            self.problem.kv_heads == operands.key.shape[2]
            and device_count(mesh_axes.get("N"), mesh) > 1
        ):
            keys = _key_heads(self.problem, heads, mesh_axes["N"])
        local = _with_indices(operands, mesh_axes)
        if keys is not None:
            local, *rows = (_with_key_heads(x, keys) for x in (local, *rows))
        problem = self.problem.of_part(local)
        tiles = self.pass_.backend.tiles_like(self.tiles, problem)
        results = self.pass_.inner(problem, tiles, local, *rows)
        if self.pass_.name != "backward":
            return jax.tree.leaves(results)
        if keys is not None:
            whole = lambda x, dx: jnp.zeros_like(x).at[:, :, keys].add(dx)
            results = results._replace(
                key=whole(operands.key, results.key), value=whole(operands.value, results.value)
            )
        return [
            _summed(x, axes if keys is not None else axes.replace("K", "N"), mesh_axes)
            for x, axes in zip(jax.tree.leaves(results), self.gradients, strict=True)
        ]


requires_devices.add(Partition.primitive)


def _key_heads(problem: Problem, heads: int, axis):
    """The key heads of this device's query heads, each for as many of them as share it on every
    device."""
    step = math.gcd(heads, problem.group)
    return (lax.axis_index(axis_names(axis)) * heads + jnp.arange(0, heads, step)) // problem.group


def _with_key_heads(x, keys):
    """The operands, or tangents of them, with these key heads alone."""
    if not isinstance(x, Operands | Gradients):
        return x
    some = lambda a: None if a is None else a[:, :, keys]
    return x._replace(key=some(x.key), value=some(x.value))


def _with_indices(operands: Operands, mesh_axes) -> Operands:
    """The operands with the indices of this device's batch rows and heads, where a rule of the mask
    or a score uses them."""
    B, _, N, _ = operands.query.shape

    def index(known, is_read, letter, n):
        axis = axis_names(mesh_axes.get(letter))
        if known is not None or not is_read or not axis:
            return known
        return lax.axis_index(axis) * n + jnp.arange(n, dtype=jnp.int32)

    def indexed(bound):
        if bound is None:
            return None
        batch = index(bound.batch, bound.mod.uses_batch, "B", B)
        head = index(bound.head, bound.mod.uses_head, "N", N)
        return dataclasses.replace(bound, batch=batch, head=head)

    mask_mod = indexed(operands.resolved_mask.mask_mod)
    resolved_mask = dataclasses.replace(operands.resolved_mask, mask_mod=mask_mod)
    return operands._replace(resolved_mask=resolved_mask, score=indexed(operands.score))


def _summed(x, axes: str, mesh_axes):
    """A gradient, added up over the devices that hold the same array."""
    over = [
        name for letter in "BN" if letter not in axes for name in axis_names(mesh_axes.get(letter))
    ]
    return lax.psum(x, tuple(over)) if over else x


def _may_spread(letter: str) -> bool:
    """Batch rows, heads, and the axes of vmaps."""
    return letter in "BNK" or letter.islower()


def _sharding_rule(problem: Problem, arrays: list[str], results: list[str]) -> str:
    """Shardy's rule: an axis of a letter that may be spread lies where all of that letter lie."""
    number = itertools.count()

    def factors(axes):
        axes = axes.replace("K", "N") if problem.kv_heads == problem.heads else axes
        return " ".join(c if _may_spread(c) else f"whole{next(number)}" for c in axes)

    return ", ".join(map(factors, arrays)) + " -> " + ", ".join(map(factors, results))


def _mesh_axes(arrays, mesh) -> dict[str, Any]:
    """The axes of the mesh that each letter of (array, axes) lies on: the query's, else those of
    another array."""
    found = {}
    for x, axes in arrays:
        for letter, n, axis in zip(axes.replace("K", "N"), x.shape, x.sharding.spec, strict=False):
            taken = {name for axis in found.values() for name in axis_names(axis)}
            is_free = (
                axis_names(axis)
                and n % device_count(axis, mesh) == 0
                and not taken & set(axis_names(axis))
            )
            if _may_spread(letter) and letter not in found and is_free:
                found[letter] = axis
    return found
