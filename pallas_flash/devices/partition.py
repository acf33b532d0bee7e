"""jit over a mesh with Auto axes: tells XLA's partitioner, which cannot look into a kernel, what
each device computes of it.

Batch rows and heads may lie on axes of the mesh, and all else is whole on each device. The
partitioner says where they lie. Each device then has a Problem of its own, and the shares that
devices have in one gradient are summed.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# where jax's own attention has them from: there is no public place
from jax._src import custom_partitioning, dispatch
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash.arguments import Operands, Problem, shapes
from pallas_flash.backends import Choice, Half
from pallas_flash.devices.call import operand_letters, row_letters
from pallas_flash.devices.sharding import count, names


class Spread(Half):
    """A half on a mesh."""

    __slots__ = ()

    def __call__(self, problem: Problem, tiles, operands: Operands, *rest):
        letters = operand_letters(problem, operands)
        inputs = *jax.tree.leaves(letters), *map(row_letters, jax.tree.leaves(rest))
        leaves, tree = jax.tree.flatten((operands, *rest))
        run = lambda *leaves: self.run(problem, tiles, *jax.tree.unflatten(tree, leaves))
        traced, out = jax.make_jaxpr(run, return_shape=True)(*leaves)
        found, out_tree = jax.tree.flatten(shapes(out))
        gradients = letters.differentiable._replace(sinks=None)
        results = map(row_letters, found) if self.is_forward else jax.tree.leaves(gradients)
        rules = [
            asked and asked.mod.text for asked in (problem.resolved_mask.mask_mod, problem.score)
        ]
        digest = _digest(re.sub("0x[0-9a-f]+", "", f"{problem!r} {tiles} {rules} {traced}"))
        part = Part(self, problem, tiles, tree, inputs, tuple(results), tuple(found), digest)
        return jax.tree.unflatten(out_tree, attention_p.bind(*leaves, part=part))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Part(NamedTuple):
    """A Spread of a problem, without its arrays: hashable, the parameter of the primitive."""

    half: Spread
    problem: Problem
    tiles: Any
    tree: Any  # of the arrays
    letters: tuple[str, ...]  # of each array's axes, "." where one is broadcast
    results: tuple[str, ...]  # the same of what comes out
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of what comes out
    digest: str  # of what is computed
    # in_axes of the vmaps around, the innermost first
    maps: tuple[tuple[int | None, ...], ...] = ()

    def run(self, *leaves):
        operands, *rest = jax.tree.unflatten(self.tree, leaves)
        return jax.tree.leaves(self.half.run(self.problem, self.tiles, operands, *rest))

    def run_apart(self, axes: dict[str, Any], mesh, *leaves):
        """`run` on one device: the batch rows B and the heads N lie on these axes of the mesh."""
        operands, *rest = jax.tree.unflatten(self.tree, leaves)
        batch, heads = operands.query.shape[0], operands.query.shape[2]
        whole = self.problem.kv_heads == operands.key.shape[2] and count(axes.get("N"), mesh) > 1
        local = _numbered(operands, axes, batch, heads)
        if whole:
            mine = _own_keys(self.problem, heads, axes["N"])
            local = local._replace(key=local.key[:, :, mine], value=local.value[:, :, mine])
        problem = self.problem.of_part(local)
        tiles = self.half.backend.tiles_like(self.tiles, problem)
        results = self.half.run(problem, tiles, local, *rest)
        if self.half.is_forward:
            return jax.tree.leaves(results)
        if whole:  # of all key heads, the gradient of its own
            placed = lambda x, dx: jnp.zeros_like(x).at[:, :, mine].add(dx)
            results = results._replace(
                key=placed(operands.key, results.key), value=placed(operands.value, results.value)
            )
        return [
            _summed(x, letters, axes, whole)
            for x, letters in zip(jax.tree.leaves(results), self.results, strict=True)
        ]

    def mapped(self, f):
        for in_axes in self.maps:
            f = jax.vmap(f, in_axes)
        return f


def _own_keys(problem: Problem, heads: int, axis):
    """The key heads of this device's query heads, each for as many of them as share it on every
    device."""
    step = math.gcd(heads, problem.group)
    return (lax.axis_index(names(axis)) * heads + jnp.arange(0, heads, step)) // problem.group


def _numbered(operands: Operands, axes, batch: int, heads: int) -> Operands:
    """The operands with this device's numbers of batch rows and heads, where a rule of the mask or
    a score asks for them."""

    def number(known, asked, letter, n):
        axis = names(axes.get(letter))
        return (
            lax.axis_index(axis) * n + jnp.arange(n, dtype=jnp.int32)
            if asked and axis and known is None
            else known
        )

    def numbered(asked):
        if asked is None:
            return None
        b = number(asked.batch, asked.mod.uses_batch, "B", batch)
        return dataclasses.replace(
            asked, batch=b, head=number(asked.head, asked.mod.uses_head, "N", heads)
        )

    resolved_mask = dataclasses.replace(
        operands.resolved_mask, mask_mod=numbered(operands.resolved_mask.mask_mod)
    )
    return operands._replace(resolved_mask=resolved_mask, score=numbered(operands.score))


def _summed(x, letters: str, axes, whole_keys: bool):
    """A gradient, added up over the devices that hold the same array."""
    letters = letters if whole_keys else letters.replace("K", "N")
    over = [name for letter in "BN" if letter not in letters for name in names(axes.get(letter))]
    return lax.psum(x, tuple(over)) if over else x


def under_jit(choice: Choice) -> Choice:
    backend = choice.backend
    return choice._replace(
        backend=backend._replace(forward=Spread(backend, True), backward=Spread(backend, False))
    )


attention_p = Primitive("flash_attention")
attention_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(attention_p)


@attention_p.def_impl
def _whole(*leaves, part: Part):
    return part.mapped(part.run)(*leaves)


@attention_p.def_abstract_eval
def _abstract(*leaves, part: Part):
    mesh = next(
        (x.sharding.mesh for x in leaves if not x.sharding.mesh.empty), leaves[0].sharding.mesh
    )
    placed = lambda x: NamedSharding(mesh, P(*[None] * len(x.shape)))
    return [
        leaves[0].update(shape=x.shape, dtype=x.dtype, sharding=placed(x), weak_type=False)
        for x in part.shapes
    ]


def _batch(leaves, axes, *, part: Part):
    is_mapped = [axis is not None for axis in axes]
    leaves = [
        jnp.moveaxis(x, axis, 0) if m else x
        for x, axis, m in zip(leaves, axes, is_mapped, strict=True)
    ]
    size = next(x.shape[0] for x, m in zip(leaves, is_mapped, strict=True) if m)
    letter = chr(ord("a") + len(part.maps))
    part = part._replace(
        letters=tuple(
            letter * m + letters for m, letters in zip(is_mapped, part.letters, strict=True)
        ),
        results=tuple(letter + letters for letters in part.results),
        shapes=tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in part.shapes),
        maps=(*part.maps, tuple(0 if m else None for m in is_mapped)),
    )
    return attention_p.bind(*leaves, part=part), [0] * len(part.shapes)


batching.primitive_batchers[attention_p] = _batch


def _jvp(primals, tangents, *, part: Part):
    """Second derivatives, which plain JAX has: into that the partitioner can look."""
    return jax.jvp(
        functools.partial(_whole, part=part), primals, tuple(map(ad.instantiate_zeros, tangents))
    )


ad.primitive_jvps[attention_p] = _jvp


def _lower(ctx, *leaves, part: Part):
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)
    is_whole = mesh is None or mesh.size == 1
    # what is exported may not call back
    if is_whole or ctx.module_context.lowering_parameters.for_export:
        return mlir.lower_fun(lambda *leaves: _whole(*leaves, part=part), multiple_results=True)(
            ctx, *leaves
        )
    # asked for its shapes alone
    like = lambda *leaves: [jnp.zeros(x.shape, x.dtype) for x in part.shapes]
    call = custom_partitioning.custom_partitioning(like)
    call.def_partition(lambda *args: _partition(part, *args), sharding_rule=_rule(part))
    results = mlir.lower_fun(call, multiple_results=True)(ctx, *leaves)
    _rename(ctx, results[0].owner, part)
    return results


def _rename(ctx, call, part: Part):
    """Names what XLA calls back by what it computes: jax names it by an address, and no cache would
    know the program again."""
    known = custom_partitioning._sharding_callbacks
    found = known[call.attributes["backend_config"].value.encode()]
    devices = [device.id for device in found.mesh.devices.flat]
    unique = part.digest, part.letters, part.maps, found.mesh, devices, ctx.module_context.platforms
    name = f"flash_attention {_digest(repr(unique))}"
    ctx.module_context.add_keepalive(known.setdefault(name.encode(), found))
    call.attributes["backend_config"] = ir.StringAttr.get(name)


mlir.register_lowering(attention_p, _lower)


def _may_spread(letter: str) -> bool:
    """Batch rows, heads, and the axes of vmaps."""
    return letter in "BNK" or letter.islower()


def _rule(part: Part) -> str:
    """Shardy's rule: an axis of a letter that may be spread lies where all of that letter lie."""
    same_heads = part.problem.kv_heads == part.problem.heads
    number = itertools.count()

    def factors(letters):
        letters = letters.replace("K", "N") if same_heads else letters
        return " ".join(c if _may_spread(c) else f"whole{next(number)}" for c in letters)

    return ", ".join(map(factors, part.letters)) + " -> " + ", ".join(map(factors, part.results))


def _partition(part: Part, mesh, arrays, results):
    axes = _axes(part, mesh, arrays, results)
    keys_fit = part.problem.kv_heads % count(axes.get("N"), mesh) == 0
    axis_of = lambda c: axes.get("N" if c == "K" and keys_fit else c)
    placed = lambda letters: NamedSharding(mesh, P(*map(axis_of, letters)))
    run = part.mapped(lambda *leaves: part.run_apart(axes, mesh, *leaves))
    return mesh, run, list(map(placed, part.results)), tuple(map(placed, part.letters))


def _axes(part: Part, mesh, arrays, results) -> dict[str, Any]:
    """The axes of the mesh that each letter lies on: the query's, else those of another array."""
    axes = {}
    for x, letters in zip((*arrays, *results), (*part.letters, *part.results), strict=True):
        for letter, n, axis in zip(
            letters.replace("K", "N"), x.shape, x.sharding.spec, strict=False
        ):
            taken = {name for axis in axes.values() for name in names(axis)}
            is_free = names(axis) and n % count(axis, mesh) == 0 and not taken & set(names(axis))
            if _may_spread(letter) and letter not in axes and is_free:
                axes[letter] = axis
    return axes
