"""What a tile of queries or keys sees: which key each query does, and which blocks to visit."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash import schedule
from pallas_flash.kernels.hopper import tile
from pallas_flash.kernels.hopper.tuning import ROWS
from pallas_flash.masks import Ints, Visibility


class View(NamedTuple):
    """What a tile of queries sees. Scores have a row for each query; where they are transposed, a row for each key."""

    visibility: Visibility  # its data by row are in registers, those by key are refs
    batch: Ints
    start: Ints  # [queries]
    stop: Ints
    transposed: bool = False

    def sees(self, first_key: Ints, shape):
        """Whether each query sees each key of a block, in the shape of the scores."""
        (_, spread_query), (key_layout, spread_key) = _axes(self.transposed)
        size, v, ids = shape[0 if self.transposed else 1], self.visibility, ()
        if v.query_ids is not None:
            key_ids = tile.load(v.key_ids.at[self.batch, pl.ds(first_key, size)], key_layout)
            ids = spread_query(v.query_ids, shape), spread_key(key_ids, shape)
        keys = of_keys(first_key, shape, self.transposed)
        return v.sees(spread_query(self.start, shape), spread_query(self.stop, shape), keys, *ids)


def _axes(transposed: bool):
    """Layout and spreading of a value for each query, and of a value for each key."""
    row, column = (tile.ROW, tile.across), (tile.COLUMN, tile.down)
    return (column, row) if transposed else (row, column)


def of_queries(first_query: Ints, shape, transposed: bool = False):
    """The number of the query of each score."""
    (layout, spread), _ = _axes(transposed)
    return spread(first_query + tile.count(shape[1 if transposed else 0], layout), shape)


def of_keys(first_key: Ints, shape, transposed: bool = False):
    """The number of the key of each score."""
    _, (layout, spread) = _axes(transposed)
    return spread(first_key + tile.count(shape[0 if transposed else 1], layout), shape)


def view(visibility: Visibility, batch: Ints, first_query: Ints, size: int = ROWS, transposed: bool = False) -> View:
    """The view of `size` queries from `first_query` on."""
    queries, ((layout, _), _) = pl.ds(first_query, size), _axes(transposed)
    at = visibility.narrow(("start", "stop", "query_ids"), lambda ref: tile.load(ref.at[batch, queries], layout))
    # A row number that nothing reads would be in the way of Mosaic's layout inference.
    row = 0 if at.left is None and at.right is None else first_query + tile.count(size, layout)
    return View(at, batch, *at.interval(row), transposed)


def _from_table(ref, batch: Ints, number: Ints) -> schedule.Blocks:
    """The Blocks of a tile, from int32 [B or 1, tiles, 4]."""
    return schedule.Blocks(*(ref[batch if ref.shape[0] > 1 else 0, number, i] for i in range(4)))


def key_blocks(ref, visibility: Visibility, batch: Ints, number: Ints, queries: int, size: int, block_k: int) -> schedule.Blocks:
    """The blocks of keys that tile `number` of `size` queries visits, at least one: where no row sees a key it is masked."""
    if ref is None:
        rows = number * size, jnp.minimum((number + 1) * size, queries) - 1
        found = schedule.known_blocks(visibility, *rows, block_k)
    else:
        found = _from_table(ref, batch, number)
    return found if isinstance(found.last, int) else found._replace(last=jnp.maximum(found.last, found.first + 1))


def query_blocks(ref, visibility: Visibility, batch: Ints, number: Ints, queries: int, block_q: int, size: int):
    """The blocks of queries that see tile `number` of `size` keys; none is full where it hangs over the last key."""
    if ref is not None:
        return _from_table(ref, batch, number)
    keys, stop, rows = visibility.keys, (number + 1) * size, schedule.ceil_div(queries, block_q) * block_q
    found = schedule.known_blocks(visibility.by_key(rows), number * size, jnp.minimum(stop, keys) - 1, block_q)
    if keys % size == 0:
        return found
    return found._replace(full_last=jnp.where(stop > keys, found.full_first, found.full_last))
