"""A call on a mesh with explicit axes: each device computes its batch rows and heads, and without a
context all of their rows."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash.devices.shared_arrays import array_axes, collect_arrays, with_arrays
from pallas_flash.problem.call import AXES, Call


def find_mesh(call: Call) -> AbstractMesh | None:
    """The mesh with Explicit axes that an array of the call is on, or else that of jax.set_mesh; or
    a mesh with the Auto axes that the call's context names; else None."""
    meshes = collect_meshes(collect_arrays(call).values())
    explicit = find_explicit(meshes)
    if explicit is not None or call.context is None:
        return explicit
    axes = set(axis_names(call.context.axis))
    return next((m for m in meshes if axes <= {*m.auto_axes}), None)


def collect_meshes(arrays) -> list[AbstractMesh]:
    """The meshes that arrays are on, and the one of jax.set_mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]
    return [*meshes, jax.sharding.get_abstract_mesh()]


def find_explicit(meshes: list[AbstractMesh]) -> AbstractMesh | None:
    return next((m for m in meshes if m.explicit_axes), None)


def map_call(attend: Callable, call: Call, mesh: AbstractMesh):
    """The result of attend(call), (o, lse, largest logits or None), by jax.shard_map over the axes
    of the mesh that the batch, the heads, and with a context the rows lie on. The call is in
    canonical form."""
    arrays, context, lead = collect_arrays(call), call.context, call.query.ndim - 3
    # a shard_map around maps its axes already
    is_outside = context is None or set(context.names) <= {*mesh.manual_axes}
    rows = None if is_outside else context.axis
    for name in ("query", "key", "value"):
        if (name,) in arrays:
            _check(name, arrays[name,], rows, mesh)
    axes = _find_mesh_axes(arrays, call, mesh, rows)
    if context is not None:  # it names axes that types do not tell
        axes[-1] = axes[-1] or context.heads
        if lead:
            axes[0] = axes[0] or context.batch
    return _shard_map(attend, call, arrays, [*axes, rows], mesh)


def map_paged_call(attend: Callable, call: Call, mesh: AbstractMesh):
    """`map_call` for paged_attention: each device has all pages of its key/value heads, and nothing
    is gathered."""
    arrays = collect_arrays(call)
    axes = [*_find_mesh_axes(arrays, call, mesh, None), None]
    for path, x in arrays.items():
        spec = jax.typeof(x).sharding.spec
        allowed = _spec(array_axes(path, call), x.shape, axes, mesh)
        if any(axis not in (None, other) for axis, other in zip(spec, allowed, strict=True)):
            raise ValueError(
                f"{path[0]} may be sharded as {allowed} here: the batch of all arrays alike, their "
                "heads alike, and pages by heads "
                f"alone; got {spec}. jax.reshard moves it."
            )
    return _shard_map(attend, call, arrays, axes, mesh)


def _shard_map(
    attend: Callable, call: Call, arrays: dict[tuple, Any], axes: list, mesh: AbstractMesh
):
    """The result of attend(call) by jax.shard_map, with each leading axis, the heads and the rows
    on these axes."""
    specs = tuple(_spec(array_axes(path, call), x.shape, axes, mesh) for path, x in arrays.items())
    shape = arrays["query",].shape
    outs = _spec("BTNH", shape, axes, mesh), *[_spec("BTN", shape[:-1], axes, mesh)] * 2
    rest = with_arrays(call, dict.fromkeys(arrays))
    static = attend, mesh, tuple(arrays), specs, outs, rest
    try:
        program = _program_once(*static)
    except TypeError:  # not hashable
        program = _program(*static)
    return program(tuple(arrays.values()))


def map_cache(f: Callable, cache, arrays: dict[str, Any], *static):
    """The results of f(cache, *static, **arrays): an output [B, T, N, H] or None, and the new
    cache. On a mesh with explicit axes each device updates the batch rows and heads of the cache
    that lie on it, or all rows of a cache in pages. The arrays are resharded to match, and the new
    cache lies where the old one does. `cache.axes` has a letter for each axis of a field that is no
    argument of a call."""
    mesh = find_explicit(collect_meshes(jax.tree.leaves((cache, arrays))))
    if mesh is None:
        return f(cache, *static, **arrays)
    return _map_cache(f, mesh, static, cache, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _map_cache(f, mesh, static, cache, arrays):
    fields = {name: x for name, x in cache._asdict().items() if x is not None}
    letters = AXES | dict(count="B", cu_seqlens="C") | cache.axes
    key_axes = zip(letters[cache._fields[0]], jax.typeof(cache[0]).sharding.spec, strict=True)
    axes = {letter: axis for letter, axis in key_axes if letter in "BK"}
    axes["N"] = axes["K"]
    spec = lambda name, ndim: P(*map(axes.get, letters[name][-ndim:]))
    specs = lambda arrays: {name: spec(name, x.ndim) for name, x in arrays.items()}
    in_specs = specs(fields), specs(arrays)
    placed = lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec))

    def run(fields, arrays):
        o, new = f(cache._replace(**fields), *static, **arrays)
        return o, {name: getattr(new, name) for name in fields}

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(spec("query", 4), in_specs[0]),
        check_vma=False,
    )
    o, new = mapped(*jax.tree.map(placed, (fields, arrays), in_specs))
    return o, cache._replace(
        **{name: placed(x, jax.typeof(fields[name]).sharding.spec) for name, x in new.items()}
    )


def _program(attend, mesh, paths, specs, outs, rest):
    local = lambda arrays: attend(with_arrays(rest, dict(zip(paths, arrays, strict=True))))
    explicit = lambda axis: (
        tuple(name for name in axis_names(axis) if name in mesh.explicit_axes) or None
    )
    placed = lambda x, spec: jax.reshard(x, NamedSharding(mesh, P(*map(explicit, spec))))

    # a new shard_map each time: it caches its first trace, and a vmap over an axis of the mesh is
    # another; unchecked, since Pallas' interpreter has no rules for varying types
    def run(arrays):
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=outs, check_vma=False)
        return mapped(tuple(map(placed, arrays, specs)))

    return jax.jit(run)


_program_once = functools.lru_cache(_program)  # else a call outside of jit compiles each time


def has_explicit_axes(x) -> bool:
    """Whether an array inside of `map_call` still is on a mesh with Explicit axes: axes that a
    vmap outside maps."""
    return bool(jax.typeof(x).sharding.mesh.explicit_axes)


def find_row_axes(call: Call):
    """The axes of the mesh that rows or keys lie on, and no other axis of the query; None if they
    are whole."""
    specs = [
        jax.typeof(x).sharding.spec
        for name in ("query", "key", "value")
        if isinstance(x := getattr(call, name), jax.Array)
    ]
    along = [spec[-3] for spec in specs if len(spec) > 2 and spec[-3]]
    if not along:
        return None
    taken = {name for axis in (*specs[0][:-3], *specs[0][-2:]) for name in axis_names(axis)}
    return next((axis for axis in along if taken.isdisjoint(axis_names(axis))), None)


def _check(name, x, rows, mesh):
    if jax.typeof(x).sharding.spec[-1] is not None:
        raise ValueError(
            f"{name} must not be sharded along its last axis, the head size; got "
            f"{jax.typeof(x).sharding.spec}."
        )
    if lacking := set(axis_names(rows)) - set(mesh.shape):
        raise ValueError(
            f"context names the axis {', '.join(lacking)}; the arrays are on a mesh with "
            f"{', '.join(mesh.shape)}."
        )
    if x.shape[-3] % (devices := device_count(rows, mesh)):
        raise ValueError(
            f"the {devices} devices that rows or keys lie on must divide the length of {name}; got "
            f"{x.shape[-3]}."
        )


def _find_mesh_axes(arrays, call, mesh, rows) -> list:
    """The axes of the mesh that each leading axis and, last, the heads lie on: the query's, else
    another array's."""
    lead = arrays["query",].ndim - 3
    axes, taken = [None] * (lead + 1), {*axis_names(rows)}
    K = arrays["key",] if ("key",) in arrays else arrays["k_pages",]

    def is_free(i, axis):
        is_whole = i is not None and i <= lead and axes[i] is None
        return is_whole and taken.isdisjoint(axis_names(axis))

    for path, x in arrays.items():
        indices = _axis_indices(array_axes(path, call), x.ndim, lead)
        for i, axis in zip(indices, jax.typeof(x).sharding.spec, strict=True):
            fits = path == ("query",) or i != lead or _fits(K.shape[-2], axis, mesh)
            if axis is not None and fits and is_free(i, axis):
                axes[i] = axis
                taken.update(axis_names(axis))
    return axes


def _axis_indices(letters: str, ndim: int, lead: int) -> list[int | None]:
    """For each axis of an array with these letters the index into the axes of `_shard_map`; None:
    it is whole on each device, as keys are in an array that has rows too. An array may lack axes on
    the left."""
    indices = {
        "B": list(range(lead)),
        "N": [lead],
        "K": [lead],
        "T": [lead + 1],
        "S": [lead + 1 if "NT" not in letters else None],
    }
    full = [None] * ndim + [index for letter in letters for index in indices.get(letter, [None])]
    return full[len(full) - ndim :]


def _spec(letters: str, shape, axes, mesh) -> P:
    lead = len(axes) - 2
    K = shape[letters.find("K") - len(letters)] if "K" in letters else 1
    if not _fits(K, axes[lead], mesh):
        devices = device_count(axes[lead], mesh)
        raise ValueError(
            f"the {K} key/value heads must be a multiple of the {devices} devices that the query "
            "heads lie on."
        )
    # an axis of 1 is broadcast
    axis_of = lambda i, n: None if i is None or n % device_count(axes[i], mesh) else axes[i]
    return P(*map(axis_of, _axis_indices(letters, len(shape), lead), shape))


def _fits(K: int, axis, mesh) -> bool:
    """Whether each device has the key/value heads of its query heads; one head may be on all."""
    return K == 1 or K % device_count(axis, mesh) == 0


def is_on_auto_mesh(operands) -> bool:
    """Whether the operands lie on a mesh of several devices with Auto axes alone, by their types or
    jax.set_mesh. A mesh that only jit's in_shardings name is unknown while tracing."""
    meshes = collect_meshes(jax.tree.leaves(operands))
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    return kinds == {AxisType.Auto} and any(mesh.size > 1 for mesh in meshes)


@functools.lru_cache
def device_count(axis, mesh) -> int:
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def axis_names(axis) -> tuple:
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)
