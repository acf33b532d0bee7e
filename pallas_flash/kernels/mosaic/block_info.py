"""Which blocks a tile of queries, or of keys, visits; and what its queries see of a block of keys:
their interval, their document, and a dense mask, as bits, or a mask_mod."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.elements import Tiling
from pallas_flash.kernels.mosaic.registers import (
    Layouts,
    ScoreTile,
    iota,
    load,
    opaque,
    per_column,
    per_row,
)
from pallas_flash.kernels.mosaic.row_mask import WORD, RowMask
from pallas_flash.kernels.mosaic.scheduler import WorkTile
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule


class VisitedBlocks(NamedTuple):
    """The blocks that each tile visits, of a mask with an array or a mask_mod."""

    visited: Any  # int32 [B or 1, N or 1, tiles, 2 + blocks]: schedule.visited_blocks
    # int32 [B or 1, N, tiles], of tiles of keys: how many blocks the heads before, which share the
    # keys, visit
    before: Any = None

    def blocks(self, batch: IntLike, head: IntLike, tile: IntLike) -> schedule.Blocks:
        """The blocks of a tile of a head, from refs."""
        return schedule.Blocks.from_row(
            self.visited, *broadcast_index(self.visited, batch, head), tile
        )


def intervals(
    p: Problem, resolved_mask: ResolvedMask, block_q: int, block_k: int
) -> tuple[ResolvedMask, jax.Array | None]:
    """The mask without its mask_mod, and the blocks of each tile of queries, as
    schedule.by_query_tile has both."""
    return schedule.by_query_tile(
        dataclasses.replace(resolved_mask, mask_mod=None), p.queries, block_q, block_k
    )


def by_query_tile(
    p: Problem, x: Operands, block_q: int, block_k: int
) -> jax.Array | VisitedBlocks | None:
    """The blocks of keys that each tile of queries visits, a table as of schedule.by_query_tile, or
    lists of at least one; None where the kernel computes them."""
    if _has_intervals(x):
        return intervals(p, x.resolved_mask, block_q, block_k)[1]
    return VisitedBlocks(schedule.visited_blocks(_block_types(p, x, block_q, block_k), least=1))


def by_key_tile(
    p: Problem, x: Operands, block_q: int, block_k: int
) -> jax.Array | VisitedBlocks | None:
    """The blocks of queries that see each tile of keys, perhaps none, as `by_query_tile` has blocks
    of keys."""
    if _has_intervals(x):
        mask = x.resolved_mask
        return schedule.query_blocks(mask, p.queries, block_q, block_k) if mask.has_data else None
    visited = schedule.visited_blocks(_block_types(p, x, block_q, block_k).swapaxes(2, 3))
    B, _, tiles, _ = visited.shape
    count = jnp.broadcast_to(visited[..., 1], (B, p.heads, tiles)).reshape(
        B, p.kv_heads, p.group, tiles
    )
    before = jnp.cumsum(count, 2, dtype=jnp.int32) - count
    return VisitedBlocks(visited, before.reshape(B, p.heads, tiles))


def block_types(p: Problem, x: Operands, block_q: int, block_k: int) -> jax.Array:
    """Whether each tile of queries sees each block of keys in part or in full, or it is empty:
    int32 [B or 1, N or 1, tiles, blocks]."""
    return jnp.asarray(_block_types(p, x, block_q, block_k), jnp.int32)


def _block_types(p: Problem, x: Operands, block_q: int, block_k: int):
    sizes = p.batch, p.heads, p.queries, block_q, block_k
    return schedule.block_types(x.resolved_mask, *sizes, x.mask)


def _has_intervals(x: Operands) -> bool:
    """Whether the mask is one of intervals alone."""
    return x.mask is None and x.resolved_mask.mask_mod is None


def broadcast_index(ref, *indices: IntLike) -> tuple[IntLike, ...]:
    """The index of a batch row, or of a batch row and a head, in data for each of them, or for
    all."""
    return tuple(n if size > 1 else 0 for n, size in zip(indices, ref.shape, strict=False))


def key_blocks(
    by_tile,
    resolved_mask: ResolvedMask,
    work: WorkTile,
    tile: IntLike,
    queries: int,
    size: int,
    block_k: int,
) -> schedule.Blocks:
    """The blocks of keys that a tile of `size` queries visits, by what `by_query_tile` returned; at
    least one: where no row sees a key it is masked."""
    if isinstance(by_tile, VisitedBlocks):
        return by_tile.blocks(work.batch, work.head, tile)
    if by_tile is None:
        rows = tile * size, jnp.minimum((tile + 1) * size, queries) - 1
        blocks = schedule.known_blocks(resolved_mask, *rows, block_k)
    else:
        blocks = schedule.Blocks.from_table(by_tile, *broadcast_index(by_tile, work.batch), tile)
    if isinstance(blocks.last, int):
        return blocks
    return blocks._replace(last=jnp.maximum(blocks.last, blocks.first + 1))


def visited(x, work: WorkTile, p: Problem, t) -> schedule.Blocks:
    """The blocks of keys that a program's tile of queries visits; x: a kernel's inputs, t: its
    tiles."""
    mask = x.logits.resolved_mask
    return key_blocks(x.blocks, mask, work, work.tile, p.queries, t.block_q, t.block_k)


def descend(by_tile, blocks: schedule.Blocks) -> schedule.Blocks:
    """The blocks from the last to the first; a list stays as it is."""
    return blocks if isinstance(by_tile, VisitedBlocks) else blocks.reverse()


def query_blocks(x, work: WorkTile, p: Problem, t) -> Callable:
    """A function of g: the blocks of queries of the g-th head that see a program's tile of keys.
    With them a function of t: how many blocks come before position t, with the blocks of earlier
    heads. No block is full where the tile hangs over the last key. x and t: as in `visited`."""
    by_tile = x.blocks
    if isinstance(by_tile, VisitedBlocks):

        def listed(g):
            head = work.head + g
            before = lambda head: by_tile.before[
                (*broadcast_index(by_tile.before, work.batch), head, work.tile)
            ]
            start = before(head) - before(work.head)
            return by_tile.blocks(work.batch, head, work.tile), lambda t: start + t

        return listed
    if by_tile is None:
        blocks = _known_query_blocks(
            x.logits.resolved_mask, work.tile, p.queries, t.block_q, t.block_k
        )
    else:
        blocks = schedule.Blocks.from_table(
            by_tile, *broadcast_index(by_tile, work.batch), work.tile
        )
    return lambda g: (blocks, lambda t: g * blocks.count + t - blocks.first)


def _known_query_blocks(
    resolved_mask: ResolvedMask, tile: IntLike, queries: int, block_q: int, size: int
) -> schedule.Blocks:
    keys, stop = resolved_mask.keys, (tile + 1) * size
    by_key = resolved_mask.transposed(schedule.ceil_div(queries, block_q) * block_q)
    blocks = schedule.known_blocks(by_key, tile * size, jnp.minimum(stop, keys) - 1, block_q)
    if keys % size == 0:
        return blocks
    return blocks._replace(full_last=jnp.where(stop > keys, blocks.full_first, blocks.full_last))


class TileMask(NamedTuple):
    """The mask of some queries, whose intervals are in registers, which a loop over blocks
    keeps."""

    resolved_mask: ResolvedMask  # its data by row are in registers, data by key are refs
    batch: IntLike
    start: IntLike  # [queries]
    stop: IntLike
    by_pair: Any  # HeadBits, mods.HeadMod or None

    def visible(self, tile: ScoreTile):
        """Whether each query sees each key."""
        allowed = None if self.by_pair is None else self.by_pair.visible(tile)
        seen, ids = self._in_interval(tile), self.resolved_mask.query_ids
        if ids is not None:
            key_ids = tile.load_per_key(
                lambda keys: self.resolved_mask.key_ids.at[self.batch, keys]
            )
            seen = seen & (tile.per_query(ids) == key_ids)
        return seen if allowed is None else seen & allowed

    def select(self, tile: ScoreTile) -> Callable:
        """A function of x and `other`: x where each query sees each key, and `other` elsewhere."""
        visible = self.visible(tile)
        return lambda x, other: jnp.where(visible, x, other)

    def _in_interval(self, tile: ScoreTile):
        visible = self.resolved_mask.visible
        # where all rows see all keys, what follows would spill beside a mask_mod
        if tile.transposed or isinstance(self.stop, int):
            return visible(tile.per_query(self.start), tile.per_query(self.stop), tile.key_index())
        # `columns` keys at a time: relative to the first of them the ends of an interval are
        # compared with a number that the program knows
        columns = tile.layouts.columns
        shape, layout = (tile.shape[0], columns), tile.layouts.broadcast
        key = per_column(tile.first_key + iota(columns, tile.layouts.column), shape, layout)
        relative = lambda end: per_row(end, shape, layout) - key
        start = 0 if isinstance(self.start, int) and self.start == 0 else relative(self.start)
        stop = relative(self.stop)
        seen = lambda first: visible(start, stop, jnp.full(shape, first, jnp.int32))
        return jnp.concatenate([seen(n) for n in range(0, tile.shape[1], columns)], axis=1)


def load_mask(
    layouts: Layouts,
    resolved_mask: ResolvedMask,
    batch: IntLike,
    first_query: IntLike,
    size: int,
    by_pair,
    transposed: bool = False,
) -> TileMask | RowMask:
    """The mask of `size` queries from `first_query` on; transposed: they are the columns."""
    if layouts.row_in_thread:
        by = (by_pair, None) if isinstance(by_pair, HeadBits) else (None, by_pair)
        return RowMask.load(resolved_mask, batch, first_query, size, *by, transposed)
    queries = pl.ds(first_query, size)
    layout = layouts.column if transposed else layouts.row
    at = resolved_mask.narrow(
        ("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, queries], layout)
    )
    return TileMask(at, batch, *at.interval(first_query + iota(size, layout)), by_pair)


# A dense mask, a bit for each pair of a query and a key, 32 of a row to a word


class PackedMask(NamedTuple):
    """The bits of a mask, as the rows and columns of the scores have it: bit n % 32 of word n // 32
    is that of the n-th column of a block. Where all rows or all blocks have the same bits there is
    one."""

    words: jax.Array  # int32 [B or 1, N or 1, blocks or 1, words, whole tiles of rows or 1]


def pack(mask, t: Tiling) -> PackedMask:
    """A mask bool [B or 1, N or 1, T or 1, S or 1], packed in blocks of the columns of scores that
    are computed at once."""
    if t.transposed:
        x, rows, whole = mask.swapaxes(2, 3), t.block_k, t.block_q
    else:
        x, rows, whole = mask, t.block_q, t.block_k
    missing = lambda n, size: 0 if n == 1 else -n % size
    x = jnp.pad(
        x, ((0, 0), (0, 0), (0, missing(x.shape[2], rows)), (0, missing(x.shape[3], whole)))
    )
    x = jnp.broadcast_to(x, (*x.shape[:3], max(x.shape[3], t.columns))).reshape(
        *x.shape[:3], -1, t.columns
    )
    x = jnp.pad(x, ((0, 0),) * 4 + ((0, -t.columns % WORD),))
    bytes_ = jnp.packbits(x, axis=-1, bitorder="little").reshape(*x.shape[:4], -1, WORD // 8)
    return PackedMask(jnp.moveaxis(lax.bitcast_convert_type(bytes_, jnp.int32), 2, 4))


class HeadBits(NamedTuple):
    """The words of one batch row and head, a ref."""

    words: jax.Array
    batch: IntLike
    head: IntLike

    @classmethod
    def load(cls, x: PackedMask, batch: IntLike, head: IntLike) -> "HeadBits":
        return cls(x.words, *broadcast_index(x.words, batch, head))

    def visible(self, tile: ScoreTile):
        """Whether the mask lets each query see each key."""
        columns, shape = tile.layouts.columns, tile.shape
        part = shape[0], columns
        column = per_column(iota(columns, tile.layouts.column), part)

        def bits(n, word):
            word = per_row(word, part) if jnp.ndim(word) else jnp.broadcast_to(word, part)
            word = lax.shift_right_logical(word, column)
            return [
                word & (1 << bit) != 0 for bit in range(0, min(WORD, shape[1] - n * WORD), columns)
            ]

        words = self.words_of_rows(tile)
        return jnp.concatenate([x for at in enumerate(words) for x in bits(*at)], axis=1)

    def words_of_rows(self, tile: ScoreTile) -> Iterator:
        """The words of 32 columns each, a vector by row; a scalar if all rows have the same one."""
        first_row, first_column = tile.first
        _, _, blocks, count, rows = self.words.shape
        block = lax.div(first_column, jnp.int32(tile.shape[1])) if blocks > 1 else 0
        for n in range(count):
            at = self.batch, self.head, block, n
            if rows == 1:
                yield self.words[(*at, 0)]
            else:
                at = (i if isinstance(i, int) else opaque(i) for i in at)
                ref = self.words.at[(*at, pl.ds(first_row, tile.shape[0]))]
                yield load(ref, tile.layouts.row)
