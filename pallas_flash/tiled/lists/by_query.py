"""The walk by query: a few lists at a time, whose keys are gathered for their rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.problem.arguments import Operands
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.list_heads import ListHead
from pallas_flash.tiled.lists.tile import RowCotangents, Tile


class Entries(NamedTuple):
    """The entries of a few lists, int32 [l, n]."""

    index: jax.Array
    in_order: bool

    def keys(self, block: int):
        """The keys that they name, int32 [l, n * block]."""
        keys = self.index[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        return keys.reshape(len(keys), -1)

    def gather(self, x):
        """[blocks + 1, block, h] -> [l, n * block, h]"""
        x = x.at[self.index].get(mode="promise_in_bounds")
        return x.reshape(len(x), -1, x.shape[-1])

    def scatter_add(self, x, new):
        """x [blocks, block, h] with new [l, n * block, h] added."""
        new = new.reshape(*self.index.shape, *x.shape[1:])
        if not self.in_order:
            return x.at[self.index].add(new, mode="drop")
        # the entries of one list are distinct
        add = lambda i, x: x.at[self.index[i]].add(new[i], mode="drop", unique_indices=True)
        return schedule.loop(0, len(new), add, x)


def each_chunk(head: ListHead, tiles: Tiles, step: Callable, sums, *by_row):
    """Runs sums, of_rows = step(sums, tile, entries, *by_row) for all chunks of lists, where arrays
    [T, ..] are [l, r, ..]. Returns the sums, and of_rows [T, ..]."""
    lists, chunk = head.problem.resolved_mask.lists, tiles.lists.chunk
    count = schedule.ceil_div(len(head.entries), chunk)
    missing = count * chunk - len(head.entries)
    entries = jnp.pad(head.entries, ((0, missing), (0, 0)), constant_values=lists.blocks)

    def split(x):
        more = count * chunk * lists.query_block - len(x)
        x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(count, chunk, lists.query_block, *x.shape[1:])

    def one(sums, of_chunk):
        entries, rows, *by_row = of_chunk
        entries = Entries(entries, tiles.lists.in_order)
        return step(sums, Tile.take(head, rows, entries.keys(lists.block)), entries, *by_row)

    chunks = entries.reshape(count, chunk, -1), *jax.tree.map(split, (head.rows, *by_row))
    sums, of_rows = lax.scan(one, sums, chunks)
    join = lambda x: x.reshape(-1, *x.shape[3:])[: head.problem.queries]
    return sums, jax.tree.map(join, of_rows)


def forward(head: ListHead, tiles: Tiles, x: Operands, sums):
    """o [T, G, Hv] and the SoftmaxState [T, G]."""
    p = head.problem
    query = head.by_row(x.query, tiles.dtype) * head.logits.query_factor
    key, value = head.keys_and_values(x, tiles.dtype)

    def step(sums, tile: Tile, entries: Entries, q):
        k = entries.gather(key)
        v = k[..., : p.value_size] if value is None else entries.gather(value)
        o, _, state = tile.forward(q, k, v, tile.start(q))
        o = online_softmax.finish(o, state.l, p.kept)
        m = softmax.scaled_maximum(state.m, head.logits.exponent_scale)
        return sums, (o.astype(p.dtype), state._replace(m=m))

    return each_chunk(head, tiles, step, sums, query)


def backward(head: ListHead, tiles: Tiles, x: Operands, row_scale, do, delta, sums):
    """dq [T, G, H], and the sums with the gradients of keys, values, bias and captured arrays
    added."""
    p, logits = head.problem, head.logits
    query = head.by_row(x.query, tiles.dtype) * logits.query_factor
    key, value = head.keys_and_values(x, tiles.dtype)
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, row_scale.dlse)
    by_row = query, head.by_row(do, tiles.dtype), jax.tree.map(head.each_row, row)

    def step(sums, tile: Tile, entries: Entries, q, do, row):
        (dk, dv), (dbias, captured) = sums
        k = entries.gather(key)
        v = k[..., : p.value_size] if value is None else entries.gather(value)
        dq, dk_new, dv_new, ds, captured = tile.backward(q, k, v, do, row, captured)
        dk, dv = entries.scatter_add(dk, dk_new), entries.scatter_add(dv, dv_new)
        if dbias is not None:
            dbias = tile.add_bias_gradient(dbias, ds)
        return ((dk, dv), (dbias, captured)), dq

    of_keys, (dbias, captured) = sums
    whole = dbias
    sums = of_keys, (None if dbias is None else head.dense(dbias), captured)
    (of_keys, (dbias, captured)), dq = each_chunk(head, tiles, step, sums, *by_row)
    dbias = None if dbias is None else head.put_dense(whole, dbias)
    return (of_keys, (dbias, captured)), dq
