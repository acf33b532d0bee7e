"""Which blocks of queries and keys are empty, partial or full, for masks that are no intervals. In
the functions `v` is a ResolvedMask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EMPTY, PARTIAL, FULL = 0, 1, 2


def visible_pairs(v, batch, heads, row, key) -> jax.Array:
    """Whether each query of `row`, which must exist, sees each key: bool [B | 1, N | 1, rows,
    keys]."""
    at, (start, stop) = _intervals(v, row)
    ids = (
        (None, None) if at.query_ids is None else (at.query_ids[:, :, None], at.key_ids[:, None, :])
    )
    inside = at.visible(start, stop, key[None, None], *ids)
    inside = jnp.broadcast_to(
        inside, (inside.shape[0] if inside.ndim == 3 else 1, row.size, key.size)
    )[:, None]
    if v.lists is not None:
        inside = inside & v.lists.visible_pairs(heads, row, key)
    return (
        inside
        if v.mask_mod is None
        else inside & v.mask_mod.visible(*v.mask_mod.pairs(batch, heads, row, key))
    )


def _intervals(v, row):
    """The mask of the rows, and the keys that they may see, [start, stop): [B | 1, rows, 1]."""
    at = v.narrow(v.BY_BATCH, lambda x: x[:, None]).narrow(v.BY_QUERY, lambda x: x[:, row])
    return at, [end if isinstance(end, int) else end[..., None] for end in at.interval(row[None])]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def compute(v, batch, heads, queries: int, block_q: int, block_k: int) -> jax.Array:
    """The types of all blocks, int8 [B | 1, N | 1, query blocks, key blocks], from block_q rows at
    a time. A block that hangs over an end is not full."""
    key = jnp.arange(v.keys, dtype=jnp.int32)
    are_intervals = v.shows_intervals and v.query_ids is None

    def types_of_rows(i):
        row = i * block_q + jnp.arange(block_q, dtype=jnp.int32)
        exists, at = (row < queries)[None, None, :, None], jnp.minimum(row, queries - 1)
        if are_intervals:
            x = jnp.where(exists, _seen(v, at, block_k)[:, None], 0)
            return (x > 0).any(2).astype(jnp.int8) + (x == block_k).all(2).astype(jnp.int8)
        x = visible_pairs(v, batch, heads, at, key) & exists
        return _block_types(x, block_q, block_k)[:, :, 0]

    types = lax.map(types_of_rows, jnp.arange(-(-queries // block_q), dtype=jnp.int32))
    return jnp.moveaxis(types, 0, 2)


def _seen(v, row, block: int) -> jax.Array:
    """How many keys of each block the intervals of the rows hold: int32 [B | 1, rows, blocks]."""
    _, (start, stop) = _intervals(v, row)
    first = jnp.arange(0, v.keys, block, dtype=jnp.int32)
    stop = jnp.minimum(jnp.minimum(stop, v.keys), first + block)
    seen = jnp.maximum(stop - jnp.maximum(start, first), 0)
    return jnp.broadcast_to(seen, (*(seen.shape[:-2] or (1,)), row.size, first.size))


def from_array(mask, queries: int, keys: int, block_q: int, block_k: int) -> jax.Array:
    """The types of the blocks of a mask array, bool [B | 1, N | 1, T | 1, S | 1]."""
    return _block_types(jnp.broadcast_to(mask, (*mask.shape[:2], queries, keys)), block_q, block_k)


def _block_types(x, block_q: int, block_k: int) -> jax.Array:
    """The types of the blocks of bool [.., queries, keys], True where a query sees a key."""
    B, N, T, S = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -T % block_q), (0, -S % block_k)))
    x = x.reshape(B, N, -1, block_q, -(-S // block_k), block_k)
    return x.any((3, 5)).astype(jnp.int8) + x.all((3, 5)).astype(jnp.int8)


def merge(types, axis):
    """The type of a block that is made of several along `axis`."""
    return (types.max(axis) > 0).astype(np.int8) + (types.min(axis) == FULL).astype(np.int8)


def resize(types, block: int, queries: int, keys: int, block_q: int, block_k: int):
    """Converts types of blocks of `block` queries and keys to types of blocks of block_q by
    block_k: partial where the given types do not tell."""
    for axis, length, size in ((2, queries, block_q), (3, keys, block_k)):
        types = resize_axis(types, axis, block, -(-length // size), size)
    return types


def resize_axis(types, axis: int, block: int, count: int, size: int):
    """Converts types of blocks of `block` rows or columns along an axis to `count` types of blocks
    of `size`."""
    if size == block:
        return types
    first = np.arange(count)[:, None] * size // block
    number = first + np.arange((size - 1) // block + 2)
    within = number * block < (np.arange(count)[:, None] + 1) * size
    number = np.where(within, number, first)
    exists = number < types.shape[axis]
    parts = jnp.take(types, jnp.asarray(np.where(exists, number, 0), jnp.int32), axis)
    parts = jnp.where(exists.reshape(*exists.shape, *(1,) * (types.ndim - 1 - axis)), parts, EMPTY)
    return merge(parts, axis + 1)
