"""What a tile of queries or keys sees: which key each query does, and which blocks to visit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import tile
from pallas_flash.kernels.hopper.order import Place
from pallas_flash.kernels.hopper.tuning import ROWS
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.pytrees import IntLike


class View(NamedTuple):
    """What a tile of queries sees. Scores have a row for each query; where they are transposed, a
    row for each key."""

    resolved_mask: ResolvedMask  # its data by row are in registers, those by key are refs
    batch: IntLike
    start: IntLike  # [queries]
    stop: IntLike
    # what array or mask_mod allow: of the first key, the shape, and whether that is transposed
    where: Callable | None = None
    transposed: bool = False

    def sees(self, first_key: IntLike, shape):
        """Whether each query sees each key of a block, in the shape of the scores."""
        (_, spread_query), _ = _axes(self.transposed)
        v, ids = self.resolved_mask, ()
        allowed = None if self.where is None else self.where(first_key, shape, self.transposed)
        if v.query_ids is not None:
            key_ids = for_keys(
                lambda keys: v.key_ids.at[self.batch, keys], first_key, shape, self.transposed
            )
            ids = spread_query(v.query_ids, shape), key_ids
        keys = of_keys(first_key, shape, self.transposed)
        inside = v.visible(
            spread_query(self.start, shape), spread_query(self.stop, shape), keys, *ids
        )
        return inside if allowed is None else inside & allowed


def _axes(transposed: bool):
    """Layout and spreading of a value for each query, and of a value for each key."""
    row, column = (tile.ROW, tile.across), (tile.COLUMN, tile.down)
    return (column, row) if transposed else (row, column)


def of_queries(first_query: IntLike, shape, transposed: bool = False):
    """The number of the query of each score."""
    (layout, spread), _ = _axes(transposed)
    return spread(first_query + tile.count(shape[1 if transposed else 0], layout), shape)


def of_keys(first_key: IntLike, shape, transposed: bool = False):
    """The number of the key of each score."""
    _, (layout, spread) = _axes(transposed)
    return spread(first_key + tile.count(shape[0 if transposed else 1], layout), shape)


def for_queries(part: Callable, first_query: IntLike, shape, transposed: bool):
    """What the ref part(slice of queries) has for the query of each score."""
    (layout, spread), _ = _axes(transposed)
    return spread(tile.load(part(pl.ds(first_query, shape[1 if transposed else 0])), layout), shape)


def for_keys(part: Callable, first_key: IntLike, shape, transposed: bool):
    """What the ref part(slice of keys) has for the key of each score."""
    _, (layout, spread) = _axes(transposed)
    return spread(tile.load(part(pl.ds(first_key, shape[0 if transposed else 1])), layout), shape)


def view(
    resolved_mask: ResolvedMask,
    batch: IntLike,
    first_query: IntLike,
    rule=None,
    size: int = ROWS,
    transposed: bool = False,
) -> View:
    """The view of `size` queries from `first_query` on; `rule` is what bits.of has of the mask."""
    queries, ((layout, _), _) = pl.ds(first_query, size), _axes(transposed)
    at = resolved_mask.narrow(
        ("start", "stop", "query_ids"), lambda ref: tile.load(ref.at[batch, queries], layout)
    )
    # A row number that nothing reads would be in the way of Mosaic's layout inference.
    row = 0 if at.left is None and at.right is None else first_query + tile.count(size, layout)
    where = None if rule is None else functools.partial(rule.allowed, first_query)
    return View(at, batch, *at.interval(row), where, transposed)


class Lists(NamedTuple):
    """The blocks that each tile visits, of a mask with an array or a mask_mod."""

    numbers: Any  # int32 [B or 1, N or 1, tiles, 2 + blocks]: schedule.lists
    # int32 [B or 1, N, tiles], of tiles of keys: how many there are of the heads before that share
    # the keys
    before: Any = None

    def of(self, batch: IntLike, head: IntLike, number: IntLike) -> schedule.Listed:
        """Those of tile `number` of a head, from refs."""
        return schedule.Listed.of(self.numbers, *entry(self.numbers, batch, head), number)


def intervals(
    p: Problem, resolved_mask: ResolvedMask, block_q: int, block_k: int
) -> tuple[ResolvedMask, jax.Array | None]:
    """The mask without its mask_mod, and the blocks of each tile of queries, as
    schedule.by_query_tile has both."""
    return schedule.by_query_tile(
        dataclasses.replace(resolved_mask, mask_mod=None), p.queries, block_q, block_k
    )


def by_query_tile(
    p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int
) -> jax.Array | Lists | None:
    """The blocks of keys that each tile of queries visits, a table as of schedule.by_query_tile, or
    lists of at least one; None where the kernel computes them."""
    if mask is None and resolved_mask.mask_mod is None:
        return intervals(p, resolved_mask, block_q, block_k)[1]
    return Lists(schedule.lists(_kinds(p, resolved_mask, mask, block_q, block_k), least=1))


def by_key_tile(
    p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int
) -> jax.Array | Lists | None:
    """The same from the keys' side: the blocks of queries that see each tile of keys, perhaps
    none."""
    if mask is None and resolved_mask.mask_mod is None:
        has_data = resolved_mask.has_data
        return (
            schedule.query_blocks(resolved_mask, p.queries, block_q, block_k) if has_data else None
        )
    numbers = schedule.lists(_kinds(p, resolved_mask, mask, block_q, block_k).swapaxes(2, 3))
    B, _, tiles, _ = numbers.shape
    count = jnp.broadcast_to(numbers[..., 1], (B, p.heads, tiles)).reshape(
        B, p.kv_heads, p.group, tiles
    )
    return Lists(
        numbers, (jnp.cumsum(count, 2, dtype=jnp.int32) - count).reshape(B, p.heads, tiles)
    )


def _kinds(p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int):
    return schedule.block_kinds(resolved_mask, p.batch, p.heads, p.queries, block_q, block_k, mask)


def entry(ref, *numbers: IntLike) -> tuple[IntLike, ...]:
    """That of a batch row, or of a batch row and a head, in data for each of them, or for all."""
    return tuple(n if size > 1 else 0 for n, size in zip(numbers, ref.shape, strict=False))


def _from_table(ref, batch: IntLike, number: IntLike) -> schedule.Blocks:
    """The Blocks of a tile, from int32 [B or 1, tiles, 4]."""
    return schedule.Blocks(*(ref[(*entry(ref, batch), number, i)] for i in range(4)))


def key_blocks(
    found,
    resolved_mask: ResolvedMask,
    at: Place,
    number: IntLike,
    queries: int,
    size: int,
    block_k: int,
) -> schedule.Blocks | schedule.Listed:
    """The blocks of keys that tile `number` of `size` queries visits, from what by_query_tile
    found; at least one: where no row sees a key it is masked."""
    if isinstance(found, Lists):
        return found.of(at.batch, at.head, number)
    if found is None:
        rows = number * size, jnp.minimum((number + 1) * size, queries) - 1
        blocks = schedule.known_blocks(resolved_mask, *rows, block_k)
    else:
        blocks = _from_table(found, at.batch, number)
    return (
        blocks
        if isinstance(blocks.last, int)
        else blocks._replace(last=jnp.maximum(blocks.last, blocks.first + 1))
    )


class Queries(NamedTuple):
    """The blocks of queries of one head that see a tile of keys, by their places in the order in
    which they come."""

    blocks: schedule.Blocks
    number: Callable  # of the block at a place
    # how many blocks come before it, those of the heads before too that share the keys
    before: Callable


def query_blocks(
    found, resolved_mask: ResolvedMask, at: Place, queries: int, block_q: int, size: int
) -> Callable:
    """The Queries of the g-th head that shares the tile's `size` keys, from what by_key_tile found;
    no block is full where the tile hangs over the last key."""
    if isinstance(found, Lists):

        def listed(g):
            start = found.before[(*entry(found.before, at.batch), at.head + g, at.tile)]
            return Queries(*found.of(at.batch, at.head + g, at.tile).walk(), lambda t: start + t)

        return listed
    if found is None:
        blocks = _known_queries(resolved_mask, at.tile, queries, block_q, size)
    else:
        blocks = _from_table(found, at.batch, at.tile)
    return lambda g: Queries(blocks, lambda t: t, lambda t: g * blocks.count + t - blocks.first)


def _known_queries(
    resolved_mask: ResolvedMask, number: IntLike, queries: int, block_q: int, size: int
) -> schedule.Blocks:
    keys, stop, rows = (
        resolved_mask.keys,
        (number + 1) * size,
        schedule.ceil_div(queries, block_q) * block_q,
    )
    found = schedule.known_blocks(
        resolved_mask.transposed(rows), number * size, jnp.minimum(stop, keys) - 1, block_q
    )
    if keys % size == 0:
        return found
    return found._replace(full_last=jnp.where(stop > keys, found.full_first, found.full_last))
