"""The walk by key: lists are inverted, and a tile is one entry and a few of the lists that name it.

The entry's keys are read where they lie, and the rows of its lists are gathered. A row has its keys
in several tiles, so each of these reads its running sums and writes them back. A list names an
entry once: the rows of a tile are distinct, and tiles go in order, so results have the same bits in
every run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.checks import sums as dtype_of_sums
from pallas_flash.problem.arguments import Operands
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.list_heads import ListHead, Rows
from pallas_flash.tiled.lists.tile import RowCotangents, Tile


class InvertedLists(NamedTuple):
    """The lists that name each entry."""

    lists: jax.Array  # int32 [pairs], those of entry 0, then of entry 1 ..; `count` for a repeat
    first: jax.Array  # int32 [blocks + 1], where those of each entry begin
    count: int  # of lists

    @classmethod
    def of(cls, entries, blocks: int) -> "InvertedLists":
        """Inverts lists [lists, n], in which entries from `blocks` on name nothing."""
        index = lax.broadcasted_iota(jnp.int32, entries.shape, 0)
        # XLA sorts constants while it compiles, in a loop
        pairs = lax.optimization_barrier((entries.reshape(-1), index.reshape(-1)))
        entry, lists = lax.sort(pairs, num_keys=1, is_stable=True)
        repeats = (entry[1:] == entry[:-1]) & (lists[1:] == lists[:-1])
        lists = jnp.where(jnp.pad(repeats, (1, 0)), len(entries), lists)
        first = jnp.searchsorted(entry, jnp.arange(blocks + 1, dtype=jnp.int32))
        return cls(lists, first.astype(jnp.int32), len(entries))

    def tiles(self, entry, size: int):
        """The number of tiles of `size` lists that name an entry."""
        return schedule.ceil_div(self.first[entry + 1] - self.first[entry], size)

    def tile(self, entry, number, size: int):
        """The lists of a tile, int32 [size], distinct; from `count` on in place of what is none."""
        place = jnp.arange(size, dtype=jnp.int32)
        at = self.first[entry] + number * size + place
        lists = self.lists.at[at].get(mode="clip")
        is_list = (at < self.first[entry + 1]) & (lists < self.count)
        return jnp.where(is_list, lists, self.count + place)


def each_tile(head: ListHead, tiles: Tiles, step: Callable, by_row, of_rows, sums):
    """Runs of_rows, sums = step(tile, entry, by_row, of_rows, sums) for all tiles. Arrays of rows,
    [T, ..], are those of a tile's rows in a step, [1, r, ..]. Returns of_rows and the sums."""
    lists, size = head.problem.resolved_mask.lists, tiles.lists.chunk
    inverted = InvertedLists.of(_visible_entries(head), lists.blocks)
    by_list = lambda x: _split(x, inverted.count + size, lists.query_block)
    constant = jax.tree.map(by_list, (head.rows, by_row))

    def one_entry(entry, carry):
        keys = entry * lists.block + jnp.arange(lists.block, dtype=jnp.int32)

        def one_tile(number, carry):
            of_rows, sums = carry
            at = inverted.tile(entry, number, size)
            rows, by_row, old = jax.tree.map(lambda x: _gather(x, at), (*constant, of_rows))
            new, sums = step(Tile.take(head, rows, keys[None]), entry, by_row, old, sums)
            return jax.tree.map(lambda x, new: _put(x, at, new), of_rows, new), sums

        return schedule.loop(0, inverted.tiles(entry, size), one_tile, carry)

    start = jax.tree.map(by_list, of_rows), sums
    of_rows, sums = schedule.loop(0, lists.blocks, one_entry, start)
    join = lambda x: x.reshape(-1, *x.shape[2:])[: head.problem.queries]
    return jax.tree.map(join, of_rows), sums


def forward(head: ListHead, tiles: Tiles, x: Operands, sums):
    """o [T, G, Hv] and the SoftmaxState [T, G]."""
    p, wide = head.problem, dtype_of_sums(tiles.dtype)
    query = head.by_row(x.query, tiles.dtype) * head.logits.query_factor
    key, value = head.keys_and_values(x, tiles.dtype)

    def step(tile: Tile, entry, q, of_rows, sums):
        o, state = of_rows
        k = key[entry][None]
        v = k[..., : p.value_size] if value is None else value[entry][None]
        pv, alpha, state = tile.forward(q, k, v, state)
        return (o * alpha[..., None] + pv, state), sums

    zeros = jnp.zeros_like(query[..., 0], dtype=wide)
    start = online_softmax.start(zeros, LogBase.E, head.sinks, p.with_top)
    o = jnp.zeros_like(query, shape=(*query.shape[:2], p.value_size), dtype=wide)
    (o, state), sums = each_tile(head, tiles, step, query, (o, start), sums)
    o = online_softmax.finish(o, state.l, p.kept)
    m = softmax.scaled_maximum(state.m, head.logits.exponent_scale)
    return sums, (o.astype(p.dtype), state._replace(m=m))


def backward(head: ListHead, tiles: Tiles, x: Operands, row_scale, do, delta, sums):
    """dq [T, G, H], and the sums with the gradients of keys, values, bias and captured arrays
    added."""
    p, logits = head.problem, head.logits
    query = head.by_row(x.query, tiles.dtype) * logits.query_factor
    key, value = head.keys_and_values(x, tiles.dtype)
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, None)
    by_row = query, head.by_row(do, tiles.dtype), jax.tree.map(head.each_row, row)

    def step(tile: Tile, entry, by_row, dq, sums):
        (dk, dv), (dbias, captured) = sums
        q, do, row = by_row
        k = key[entry][None]
        v = k[..., : p.value_size] if value is None else value[entry][None]
        dq_new, dk_new, dv_new, ds, captured = tile.backward(q, k, v, do, row, captured)
        dk, dv = dk.at[entry].add(dk_new[0]), dv.at[entry].add(dv_new[0])
        if dbias is not None:
            dbias = tile.add_bias_gradient(dbias, ds)
        return dq + dq_new, ((dk, dv), (dbias, captured))

    of_keys, (dbias, captured) = sums
    whole = dbias
    sums = of_keys, (None if dbias is None else head.dense(dbias), captured)
    dq = jnp.zeros_like(query, dtype=dtype_of_sums(tiles.dtype))
    dq, (of_keys, (dbias, captured)) = each_tile(head, tiles, step, by_row, dq, sums)
    dbias = None if dbias is None else head.put_dense(whole, dbias)
    return (of_keys, (dbias, captured)), dq


def _visible_entries(head: ListHead):
    """The entries of each list, the number of blocks where none of its rows sees a key of one."""
    lists, rows = head.problem.resolved_mask.lists, head.rows
    sees_keys = rows.start < rows.stop
    by_list = lambda x: _split(x, len(head.entries), lists.query_block)
    start = by_list(jnp.where(sees_keys, rows.start - lists.keys, 0)).min(1) + lists.keys
    stop = by_list(jnp.where(sees_keys, rows.stop, 0)).max(1)
    first = head.entries * lists.block
    is_visible = (first < stop[:, None]) & (start[:, None] < first + lists.block)
    return jnp.where(is_visible, head.entries, lists.blocks)


def _split(x, lists: int, query_block: int):
    """[T, ..] -> [lists, query_block, ..], with 0 in rows from T on"""
    more = lists * query_block - len(x)
    x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(lists, query_block, *x.shape[1:])


def _gather(x, lists):
    """[lists, query_block, ..] -> [1, r, ..], the rows of these lists"""
    x = x.at[lists].get(mode="promise_in_bounds", unique_indices=True)
    return x.reshape(1, -1, *x.shape[2:])


def _put(x, lists, new):
    """x [lists, query_block, ..] with `new` [1, r, ..] in place of the rows of these lists."""
    new = new.reshape(len(lists), *x.shape[1:]).astype(x.dtype)
    return x.at[lists].set(new, mode="promise_in_bounds", unique_indices=True)
