"""A mesh of devices: each attends for its own batch rows and heads, without communication."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash.masks import Mask

LETTERS = {  # of the arrays of a call but bias and mask, whose axes may be 1
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKH",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_offset": "B",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
    "scale": "N",
}


def is_explicit(query) -> bool:
    """Whether the type of `query` says that it is spread over devices: its mesh has axes of type Explicit."""
    if not hasattr(query, "shape"):
        return False
    sharding = jax.typeof(query).sharding
    return any(axis is not None for axis in sharding.spec) and AxisType.Explicit in sharding.mesh.axis_types


def by_device(attend: Callable, call: dict[str, Any]):
    """attend(**call), (o, lse), by jax.shard_map over the axes of the mesh that the query's batch and heads lie on."""
    sharding = jax.typeof(call["query"]).sharding
    *lead, rows, heads, features = sharding.spec
    if rows is not None or features is not None:
        raise ValueError(
            f"query may be sharded along batch and heads, since a row sees all keys; got {sharding.spec}. "
            "Use jax.reshard, or jax.shard_map around a ring of your own."
        )
    kv_heads = _kv_heads(call["key"].shape[-2], heads, sharding.mesh)
    axes = dict(N=heads, K=kv_heads)
    spec = lambda letters: P(*(axis for c in letters for axis in (lead if c == "B" else [axes.get(c)])))

    def dense(x):  # [*B | 1, N | 1, T | 1, S | 1], or the last of these axes
        full = (*(lead or [None]), heads, None, None)[-x.ndim :]
        return P(*(None if n == 1 else axis for n, axis in zip(x.shape, full, strict=True)))

    specs = {}
    for name, x in call.items():
        if isinstance(x, Mask):
            specs[name] = _mask_specs(x, spec)
        elif hasattr(x, "shape") and len(x.shape):
            specs[name] = spec(LETTERS[name]) if name in LETTERS else dense(x)
    arrays = {name: call[name] for name in specs}
    rest = {name: x for name, x in call.items() if name not in specs}
    # unchecked, since Pallas' interpreter cannot be checked
    mapped = jax.shard_map(
        lambda arrays: attend(**arrays, **rest),
        mesh=sharding.mesh,
        in_specs=(specs,),
        out_specs=(spec("BTNH"), spec("BTN")),
        check_vma=False,
    )
    placed = lambda x, spec: jax.reshard(x, NamedSharding(sharding.mesh, spec))
    return jax.jit(lambda arrays: mapped(jax.tree.map(placed, arrays, specs)))(arrays)


def _kv_heads(K: int, heads, mesh):
    names = () if heads is None else heads if isinstance(heads, tuple) else (heads,)
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    if K % parts == 0:
        return heads
    if K == 1:
        return None
    raise ValueError(f"the {K} key/value heads must be a multiple of the {parts} devices that the query heads lie on.")


def _mask_specs(mask: Mask, spec):
    """The mask with a PartitionSpec for each of its arrays."""
    changed = {}
    for field in dataclasses.fields(mask):
        x = getattr(mask, field.name)
        if isinstance(x, Mask):
            changed[field.name] = _mask_specs(x, spec)
        elif hasattr(x, "shape"):
            changed[field.name] = spec(mask.ARRAYS[field.name])
    return dataclasses.replace(mask, **changed)
