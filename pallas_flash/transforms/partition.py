"""jit over a mesh with Auto axes: tells XLA's partitioner, which cannot look into a kernel, what
each device computes.

Batch rows and heads may be sharded; every other axis is whole on each device. The partitioner says
which axes of the mesh they lie on. Each device then runs the Problem of its rows and heads, and the
gradients of an array that several devices hold are summed.

jax.custom_partitioning names a function that the partitioner calls back by its address in memory.
The name is in the program, so no compilation cache would find what another process compiled: it
becomes the same each time that the program is made.
"""

import contextlib
import copyreg
import functools
import hashlib
import itertools
import math
import re
import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash.devices.sharding import axis_names, device_count
from pallas_flash.devices.shared_arrays import row_axes, with_indices
from pallas_flash.jax_support import jax_internals
from pallas_flash.jax_support.jax_internals import mlir
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.transforms import equation
from pallas_flash.transforms.equation import Rules

custom_partitioning, requires_devices = jax_internals.custom_partitioning()

primitive = equation.primitive("flash_attention_partitioned")
requires_devices.add(primitive)

# A compiled program holds the callbacks of its compilation, which it needs no more, and
# jax.experimental.serialize_executable would have to pickle them.
with contextlib.suppress(ImportError):
    copyreg.pickle(jax_internals.partitioning_callbacks()[1], lambda _: (object, ()))


def may_spread(ctx) -> bool:
    """Whether the program is for several devices, and may hold callbacks, as no exported one
    may."""
    target = jax_internals.target(ctx)
    return not target.is_export and target.mesh is not None and target.mesh.size > 1


def lower(kernel_pass: Rules, ctx, *leaves, jaxpr, in_tree, out_tree):
    """Lowers a KernelPass to an operation that XLA's partitioner may spread over a mesh."""
    spread = Partition.make(kernel_pass, ctx.avals_in, jaxpr.out_avals, in_tree)
    # the shapes of its results are all that is used
    call = custom_partitioning(lambda *_: [jnp.zeros(y.shape, y.dtype) for y in jaxpr.out_avals])
    call.def_partition(spread.partition, sharding_rule=spread.sharding_rule())
    results = mlir.lower_fun(call, multiple_results=True)(ctx, *leaves)
    problem = kernel_pass.problem
    bound_mods = problem.resolved_mask.mask_mod, problem.score
    mods = [bound.mod.fingerprint for bound in bound_mods if bound is not None]
    if None not in mods:  # else jax's own name, by its address, stays
        computed = problem, kernel_pass.tiles, mods, spread.axes, kernel_pass.maps, jaxpr
        _rename_callback(ctx, results, *computed)
    return results


def _rename_callback(ctx, results, *computed):
    """Renames the callback of the operation with these results to a digest of the text of what it
    computes, and where. A jax that does not allow it keeps its name, and caches miss."""
    with contextlib.suppress(ImportError, AttributeError, LookupError, TypeError):
        known, _, string_attr = jax_internals.partitioning_callbacks()
        call = results[0].owner
        callback = known[call.attributes["backend_config"].value.encode()]
        devices = [device.id for device in callback.mesh.devices.flat]
        platforms = jax_internals.target(ctx).platforms
        text = str((*computed, callback.mesh, devices, platforms))
        digest = hashlib.sha256(re.sub("0x[0-9a-f]+", "", text).encode()).hexdigest()
        name = f"flash_attention {digest}"
        attribute = string_attr.get(name)
        ctx.module_context.add_keepalive(known.setdefault(name.encode(), callback))
        call.attributes["backend_config"] = attribute


class Partition(NamedTuple):
    """The answers to XLA's partitioner about a KernelPass."""

    kernel_pass: Rules
    in_tree: Any
    # a string for each array and each result: a letter for each axis, "." for one of size 1, and a
    # small letter for each vmap
    axes: tuple[list[str], list[str]]
    gradients: list[str]  # the axes of each result of one call's backward

    @classmethod
    def make(cls, kernel_pass: Rules, arrays, results, in_tree) -> "Partition":
        maps = kernel_pass.maps[::-1]  # the outermost vmap first
        vmaps = string.ascii_lowercase[: len(maps)]
        mapped = lambda n: "".join(
            vmap for vmap, in_axes in zip(vmaps, maps, strict=True) if in_axes[n] is not None
        )
        axes = kernel_pass.axes(arrays, in_tree)
        gradients = []
        if kernel_pass.name == "backward":
            gradients = jax.tree.leaves(axes[0].differentiable._replace(sinks=None))
        arrays_axes = [mapped(n) + letters for n, letters in enumerate(jax.tree.leaves(axes))]
        results_axes = gradients or [row_axes(y.ndim - len(maps)) for y in results]
        results_axes = [vmaps + letters for letters in results_axes]
        return cls(kernel_pass, in_tree, (arrays_axes, results_axes), gradients)

    def partition(self, mesh, arrays, results):
        """The function that each device of the mesh runs, and the shardings of results and
        arrays."""
        problem, (arrays_axes, results_axes) = self.kernel_pass.problem, self.axes
        mesh_axes = _mesh_axes(
            zip((*arrays, *results), (*arrays_axes, *results_axes), strict=True), mesh
        )
        keys_fit = problem.kv_heads % device_count(mesh_axes.get("N"), mesh) == 0
        axis_of = lambda c: mesh_axes.get("N" if c == "K" and keys_fit else c)
        placed = lambda axes: NamedSharding(mesh, P(*map(axis_of, axes)))
        run = self.kernel_pass.vmap(functools.partial(self._run_on_device, mesh_axes, mesh))
        return mesh, run, list(map(placed, results_axes)), tuple(map(placed, arrays_axes))

    def _run_on_device(self, mesh_axes: dict[str, Any], mesh, *leaves):
        """Runs the pass on one device's batch rows and heads, which lie on these axes of the
        mesh."""
        on_device, whole = self.kernel_pass.on_device, self.kernel_pass.problem
        operands, *rows = jax.tree.unflatten(self.in_tree, leaves)
        heads = operands.query.shape[2]
        # where each device has all key heads, but not all query heads
        keys = None
        if whole.kv_heads == operands.key.shape[2] and device_count(mesh_axes.get("N"), mesh) > 1:
            keys = _key_heads(whole, heads, mesh_axes["N"])
        local = with_indices(operands, **_indices(operands, mesh_axes))
        if keys is not None:
            local, *rows = (_with_key_heads(x, keys) for x in (local, *rows))
        problem = whole.for_part(local)
        tiles = on_device.implementation.tiles_like(on_device.tiles, problem)
        results = on_device(problem, tiles, local, *rows)
        if on_device.name != "backward":
            return jax.tree.leaves(results)
        if keys is not None:
            scatter = lambda x, dx: jnp.zeros_like(x).at[:, :, keys].add(dx)
            results = results._replace(
                key=scatter(operands.key, results.key), value=scatter(operands.value, results.value)
            )
        return [
            _summed(x, axes if keys is not None else axes.replace("K", "N"), mesh_axes)
            for x, axes in zip(jax.tree.leaves(results), self.gradients, strict=True)
        ]

    def sharding_rule(self) -> str:
        """Shardy's rule: axes of one letter that may be spread have one sharding."""
        number, problem = itertools.count(), self.kernel_pass.problem

        def factors(axes):
            axes = axes.replace("K", "N") if problem.kv_heads == problem.heads else axes
            return " ".join(c if _may_spread(c) else f"whole{next(number)}" for c in axes)

        return " -> ".join(", ".join(map(factors, each)) for each in self.axes)


def _key_heads(problem: Problem, heads: int, axis):
    """The key heads of this device's query heads: one for each run of query heads that shares a key
    head on every device."""
    step = math.gcd(heads, problem.group)
    return (lax.axis_index(axis_names(axis)) * heads + jnp.arange(0, heads, step)) // problem.group


def _with_key_heads(x, keys):
    """The operands, or their tangents, with these key heads alone."""
    if not isinstance(x, Operands | Gradients):
        return x
    take = lambda a: None if a is None else a[:, :, keys]
    if isinstance(x, Operands):
        x = x._replace(resolved_mask=x.resolved_mask.for_key_heads(keys, x.query.shape[2]))
    return x._replace(key=take(x.key), value=take(x.value))


def _indices(operands: Operands, mesh_axes) -> dict[str, jax.Array]:
    """The indices of this device's batch rows and heads in the whole call."""
    B, _, N, _ = operands.query.shape
    return {
        name: lax.axis_index(axis_names(mesh_axes[letter])) * n + jnp.arange(n, dtype=jnp.int32)
        for name, letter, n in (("batch", "B", B), ("head", "N", N))
        if letter in mesh_axes
    }


def _summed(x, axes: str, mesh_axes):
    """A gradient, summed over the devices that hold the same array."""
    over = [
        name for letter in "BN" if letter not in axes for name in axis_names(mesh_axes.get(letter))
    ]
    return lax.psum(x, tuple(over)) if over else x


def _may_spread(letter: str) -> bool:
    """Whether a letter's axis may be sharded: batch rows, heads, and the axes of vmaps."""
    return letter in "BNK" or letter.islower()


def _mesh_axes(arrays, mesh) -> dict[str, Any]:
    """The axes of the mesh that each letter lies on: the query's, else another array's."""
    mesh_axes = {}
    for x, axes in arrays:
        for letter, n, axis in zip(axes.replace("K", "N"), x.shape, x.sharding.spec, strict=False):
            taken = {name for axis in mesh_axes.values() for name in axis_names(axis)}
            is_free = (
                axis_names(axis)
                and n % device_count(axis, mesh) == 0
                and not taken & set(axis_names(axis))
            )
            if _may_spread(letter) and letter not in mesh_axes and is_free:
                mesh_axes[letter] = axis
    return mesh_axes
