"""The walks over the tiles of a list head: by query, a few lists at a time; and by key. For that
lists are inverted, and a tile is one entry and a few of the lists that name it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.tile import Entries, ListHead, Tile, list_heads
from pallas_flash.tiled.lists.tuning import BY_KEY, BY_QUERY


class Walk(NamedTuple):
    """A way over the tiles of a list head.

    each_tile(head, tiles, step, sums, start, *by_row) runs sums, results = step(sums, results,
    tile, entries, *by_row) for all tiles, and returns the last sums and results. In a step
    arrays by row, [T, ..], have the tile's rows, [l, r, ..]. Results by row begin as `start`; if
    tiles have whole rows, a step gets None in their place.
    """

    each_tile: Callable
    has_whole_rows: bool  # whether a tile has all keys of its rows


# ---- by query ----


def each_chunk(head: ListHead, tiles: Tiles, step: Callable, sums, _, *by_row):
    """As `Walk.each_tile`, for all chunks of lists: the keys of a few are gathered at a time."""
    lists, chunk = head.problem.resolved_mask.lists, tiles.lists.chunk
    total = head.entries.shape[0]
    count = 1 if total == chunk else schedule.ceil_div(total, chunk)  # 1 for symbols of jax.export
    missing = count * chunk - total
    entries = jnp.pad(head.entries, ((0, missing), (0, 0)), constant_values=lists.blocks)

    def split(x):
        more = count * chunk * lists.query_block - x.shape[0]
        x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(count, chunk, lists.query_block, *x.shape[1:])

    def one(sums, a_chunk):
        entries, rows, *by_row = a_chunk
        entries = Entries(entries, tiles.lists.in_order)
        tile = Tile.take(head, rows, entries.keys(lists.block))
        return step(sums, None, tile, entries, *by_row)

    chunks = entries.reshape(count, chunk, -1), *jax.tree.map(split, (head.rows, *by_row))
    sums, results = lax.scan(one, sums, chunks)
    join = lambda x: x.reshape(-1, *x.shape[3:])[: head.problem.queries]
    return sums, jax.tree.map(join, results)


# ---- by key ----


class InvertedLists(NamedTuple):
    """The lists that name each entry."""

    lists: jax.Array  # int32 [pairs], of entry 0, then of entry 1 ..; `count` for a repeat
    first: jax.Array  # int32 [blocks + 1], where each entry's lists begin
    count: int  # of lists

    @classmethod
    def invert(cls, entries, blocks: int) -> "InvertedLists":
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
        """The lists of a tile, int32 [size]. Places without a list get distinct numbers from
        `count` on."""
        place = jnp.arange(size, dtype=jnp.int32)
        at = self.first[entry] + number * size + place
        lists = self.lists.at[at].get(mode="clip")
        is_list = (at < self.first[entry + 1]) & (lists < self.count)
        return jnp.where(is_list, lists, self.count + place)


def each_entry(head: ListHead, tiles: Tiles, step: Callable, sums, start, *by_row):
    """As `Walk.each_tile`, for all entries and the lists that name them.

    An entry's keys are read where they lie, and the rows of its lists are gathered. A row has its
    keys in several tiles, so each of these reads its running sums and writes them back. A list
    names an entry once: the rows of a tile are distinct, and tiles go in order, so results have the
    same bits in every run.
    """
    p, size = head.problem, tiles.lists.chunk
    lists, group = p.resolved_mask.lists, p.heads // list_heads(p)
    inverted = InvertedLists.invert(_visible_entries(head), lists.blocks)
    by_list = lambda x: _split(x, inverted.count + size, lists.query_block)
    all_rows, by_row, start = jax.tree.map(by_list, (head.rows, by_row, start))

    def one_entry(index, carry):
        entries = Entries(jnp.reshape(index, (1, 1)), False)
        keys = entries.keys(lists.block)

        def one_tile(number, carry):
            sums, results = carry
            at = inverted.tile(index, number, size)
            tile = Tile.take(head, jax.tree.map(lambda x: _gather(x, at), all_rows), keys)
            old, tile_rows = jax.tree.map(lambda x: _gather(x, at, group), (results, by_row))
            sums, new = step(sums, old, tile, entries, *tile_rows)
            return sums, jax.tree.map(lambda x, new: _put(x, at, new), results, new)

        return schedule.loop(0, inverted.tiles(index, size), one_tile, carry)

    sums, results = schedule.loop(0, lists.blocks, one_entry, (sums, start))
    join = lambda x: x.reshape(-1, group, *x.shape[2:])[: p.queries]
    return sums, jax.tree.map(join, results)


def _visible_entries(head: ListHead):
    """The entries of each list, the number of blocks where none of its rows sees a key of one."""
    lists = head.problem.resolved_mask.lists
    # XLA would reduce constants while it compiles
    start, stop = lax.optimization_barrier((head.rows.start, head.rows.stop))
    by_list = lambda x: _split(x, len(head.entries), lists.query_block)
    # a row beyond the last, or one that sees nothing, has 0
    ends = (jnp.where(start < stop, x, 0) for x in (start - lists.keys, stop))
    before_end, stop = map(by_list, ends)
    start, stop = before_end.min(1) + lists.keys, stop.max(1)
    first = head.entries * lists.block
    is_visible = (first < stop[:, None]) & (start[:, None] < first + lists.block)
    return jnp.where(is_visible, head.entries, lists.blocks)


def _split(x, lists: int, query_block: int):
    """[T, ..] or [T, G, ..] -> [lists, r, ..], with the r rows of each list and 0 beyond T"""
    more = lists * query_block - len(x)
    x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(lists, -1, *x.shape[2:])  # XLA would copy it for an axis G of its own


def _gather(x, lists, *group: int):
    """[lists, r, ..] -> [1, queries, ..] or [1, queries, G, ..], the rows of these lists"""
    x = x.at[lists].get(mode="promise_in_bounds", unique_indices=True)
    return x.reshape(1, -1, *group, *x.shape[2:])


def _put(x, lists, new):
    """x [lists, r, ..] with new [1, queries, G, ..] in place of the rows of these lists."""
    new = new.reshape(len(lists), *x.shape[1:]).astype(x.dtype)
    return x.at[lists].set(new, mode="promise_in_bounds", unique_indices=True)


WALKS = {
    BY_QUERY: Walk(each_chunk, has_whole_rows=True),
    BY_KEY: Walk(each_entry, has_whole_rows=False),
}
