"""The walk by query: a few lists at a time, whose keys are gathered for their rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.entries import Entries
from pallas_flash.tiled.lists.list_heads import ListHead
from pallas_flash.tiled.lists.tile import Tile
from pallas_flash.tiled.lists.walk import Walk


def each_tile(head: ListHead, tiles: Tiles, step: Callable, sums, _, *by_row):
    """As `Walk.each_tile`, for all chunks of lists."""
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
        tile = Tile.take(head, rows, entries.keys(lists.block))
        return step(sums, None, tile, entries, *by_row)

    chunks = entries.reshape(count, chunk, -1), *jax.tree.map(split, (head.rows, *by_row))
    sums, of_rows = lax.scan(one, sums, chunks)
    join = lambda x: x.reshape(-1, *x.shape[3:])[: head.problem.queries]
    return sums, jax.tree.map(join, of_rows)


WALK = Walk(each_tile, has_whole_rows=True)
