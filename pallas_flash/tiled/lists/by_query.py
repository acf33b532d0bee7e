"""The walk by query: a few lists at a time, whose keys are gathered for their rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import checks
from pallas_flash.problem.arguments import Gradients, Operands
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.derivatives import Slices
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.list_heads import ListHead, Sums
from pallas_flash.tiled.lists.tile import RowCotangents, Tile
from pallas_flash.tiled.online_softmax import RowScale


class Entries(NamedTuple):
    """The entries of a few lists, int32 [l, n]."""

    index: jax.Array
    in_order: bool

    def keys(self, block: int):
        """The keys that they name, int32 [l, n * block]."""
        keys = self.index[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        return keys.reshape(keys.shape[0], -1)

    def gather(self, x):
        """[blocks + 1, block, h] -> [l, n * block, h]"""
        x = x.at[self.index].get(mode="promise_in_bounds")
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def slices(self, tile: Tile, x: Slices, query) -> Slices:
        """The differentiable arrays of a tile: those of its list head, and its rows of the
        query."""
        key, value = (None if a is None else self.gather(a) for a in (x.key, x.value))
        return Slices(query, key, value, tile.of_pairs(x.bias), x.captured)

    def add(self, tile: Tile, sums: Sums, dk, dv, dbias, captured) -> Sums:
        """The sums with a tile's gradients of keys, values and bias added."""
        return Sums(
            self.scatter_add(sums.key, dk),
            self.scatter_add(sums.value, dv),
            tile.add_bias_gradient(sums.bias, dbias),
            captured,
        )

    def scatter_add(self, x, new):
        """x [blocks, block, h] with new [l, n * block, h] added."""
        new = new.reshape(*self.index.shape, *x.shape[1:])
        if not self.in_order:
            return x.at[self.index].add(new, mode="drop")
        # the entries of one list are distinct
        add = lambda i, x: x.at[self.index[i]].add(new[i], mode="drop", unique_indices=True)
        return schedule.loop(0, new.shape[0], add, x)


def each_chunk(head: ListHead, tiles: Tiles, step: Callable, sums, *by_row):
    """Runs sums, of_rows = step(sums, tile, entries, *by_row) for all chunks of lists, where arrays
    [T, ..] are [l, r, ..]. Returns the sums, and of_rows [T, ..]."""
    lists, chunk = head.problem.resolved_mask.lists, tiles.lists.chunk
    total = head.entries.shape[0]
    count = 1 if total == chunk else schedule.ceil_div(total, chunk)  # 1 for symbols of jax.export
    missing = count * chunk - total
    entries = jnp.pad(head.entries, ((0, missing), (0, 0)), constant_values=lists.blocks)

    def split(x):
        more = count * chunk * lists.query_block - x.shape[0]
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


def forward(head: ListHead, tiles: Tiles, x: Operands, sums: Sums):
    """o [T, G, Hv] and the SoftmaxState [T, G, 1]."""
    key, value = head.keys_and_values(x, tiles.dtype)

    def read(tile: Tile, entries: Entries):
        k = entries.gather(key)
        return k, k[..., : head.problem.value_size] if value is None else entries.gather(value)

    return attend(head, tiles, x, read, sums)


def attend(head: ListHead, tiles: Tiles, x: Operands, read: Callable, sums: Sums):
    """`forward`, where read(tile, entries) returns the keys and the values of a tile."""
    p, query = head.problem, head.queries(x.query, tiles.dtype)

    def step(sums, tile: Tile, entries: Entries, q):
        k, v = read(tile, entries)
        o, _, state = tile.forward(q, k, v, tile.start(q))
        o = online_softmax.finish(o, state.l, p.kept)
        state = state._replace(m=softmax.scaled_maximum(state.m, head.logits.exponent_scale))
        return sums, (o, jax.tree.map(lambda a: a[..., None], state))

    return each_chunk(head, tiles, step, sums, query)


def backward(head: ListHead, tiles: Tiles, x: Operands, row_scale: RowScale, do, delta, sums: Sums):
    """dq [T, G, H], and the sums with the gradients of keys, values, bias and captured arrays
    added."""
    p = head.problem
    key, value = head.keys_and_values(x, tiles.dtype)
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, row_scale.dlse)
    by_row = head.queries(x.query, tiles.dtype), head.by_row(do, tiles.dtype)

    def step(sums, tile: Tile, entries: Entries, q, do, row):
        k = entries.gather(key)
        v = k[..., : p.value_size] if value is None else entries.gather(value)
        dq, dk, dv, ds, captured = tile.backward(q, k, v, do, row, sums.captured)
        return entries.add(tile, sums, dk, dv, ds, captured), dq

    return each_chunk(head, tiles, step, sums, *by_row, jax.tree.map(head.each_row, row))


def tangent(
    head: ListHead,
    tiles: Tiles,
    x: Operands,
    dx: Gradients,
    row_scale: RowScale,
    o,
    dlse,
    sums: Sums,
):
    """The tangents of o [T, G, Hv] and lse [T, G, 1]."""
    p, wide = head.problem, checks.sums(tiles.dtype)
    arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
    row = map(head.each_row, (row_scale.m, row_scale.inverse_sum, dlse))
    # where dlse o nearly cancels do, an o rounded to 16 bits would leave few digits
    is_wide = o.dtype == wide

    def step(sums, tile: Tile, entries: Entries, q, dq, m, inverse_sum, of_sinks, o):
        of_tile, along = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
        do, dlse, o_wide = tile.tangent(of_tile, along, m, inverse_sum)
        dlse = of_sinks + dlse
        return sums, (do / p.kept - dlse * (o if is_wide else o_wide / p.kept), dlse)

    by_row = arrays.query, tangents.query, *row, head.by_row(o, o.dtype)
    return each_chunk(head, tiles, step, sums, *by_row)


def second(
    head: ListHead, tiles: Tiles, x: Operands, dx: Gradients, row_scale, do, delta, dlse, sums: Sums
):
    """The gradients of the query [T, G, H] and of row_scale.inverse_sum [T, G, 1], and the sums
    with those of keys, values, bias and captured arrays added."""
    wide = checks.sums(tiles.dtype)
    arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, dlse)

    def step(sums, tile: Tile, entries: Entries, q, dq, do, row):
        of_tile, along = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
        new, of_sum = tile.second(of_tile, along, do, row)
        captured = jax.tree.map(jnp.add, sums.captured, new.captured)
        sums = entries.add(tile, sums, new.key, new.value, new.bias, captured)
        return sums, (new.query, of_sum)

    by_row = arrays.query, tangents.query, head.by_row(do, wide), jax.tree.map(head.each_row, row)
    return each_chunk(head, tiles, step, sums, *by_row)
