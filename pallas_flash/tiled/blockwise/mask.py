"""The mask of a slice of the heads: the keys that the rows of a query block see, and the key blocks
that it visits, where these are static."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.jax_support.pytrees import IntLike, smaller
from pallas_flash.masks import block_types
from pallas_flash.masks.resolved_mask import ResolvedLists, ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, each_row, for_heads, pairs


class TileMask(NamedTuple):
    """The masks of a slice of the heads, B, K and G as in `heads.HeadSlice`."""

    group: int
    resolved: ResolvedMask
    start: IntLike  # [B | 1, T], the interval of keys of each row; a mask_mod may hide some of them
    stop: IntLike
    dense: jax.Array | None  # [B | 1, K | 1, G | 1, T | 1, S | 1]
    lists: ResolvedLists | None
    # whether the lists of a query block's rows name the keys, [B | 1, K | 1, G | 1, rows, S]
    named: jax.Array | None = None

    @classmethod
    def take(cls, p: Problem, heads: HeadRange, x: Operands) -> "TileMask":
        resolved = x.resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda a: heads.take(a)[:, None])
        resolved = resolved.narrow(ResolvedMask.BY_QUERY + ResolvedMask.BY_KEY, heads.take)
        mod = for_heads(resolved.mask_mod, p, heads)
        if mod is not None and mod.block_types is not None:
            types = block_types.merge(heads.take(mod.block_types, 1), (0, 1))
            mod = dataclasses.replace(mod, block_types=schedule.visited_blocks(types))
        resolved = dataclasses.replace(resolved, mask_mod=mod)
        start, stop = resolved.interval(jnp.arange(p.queries, dtype=jnp.int32)[None])
        lists = resolved.lists
        if lists is not None:
            lists = dataclasses.replace(lists, entries=heads.take(lists.entries, 1))
        resolved = dataclasses.replace(resolved, lists=None)
        return cls(p.group, resolved, start, stop, dense_tiles(x.mask, heads), lists)

    @property
    def has_data(self) -> bool:
        """Whether the intervals are data, whatever the mask_mod."""
        return dataclasses.replace(self.resolved, mask_mod=None).has_data

    @property
    def hides_pairs(self) -> bool:
        """Whether it may hide any pair, whatever the interval, document and mask_mod."""
        return self.dense is not None or self.lists is not None

    def zero_blind_rows(self, x):
        """x [B, K, G, T, n] with 0 for rows that see nothing, where there may be NaN."""
        if not self.has_data:
            return x
        return jnp.where((self.start < self.stop)[:, None, None, :, None], x, 0)

    def zero_hidden_keys(self, x, keys: Block | None = None):
        """x [B, K, S, n], or a block of its keys, with 0 for keys beyond every row's interval, and
        keys that no list names, where there may be NaN."""
        if self.lists is not None:
            is_named = self._by_head(self.lists.any_names()[:, :, None], x.shape[1]).any((2, 3))
            is_named = is_named if keys is None else keys.take(is_named, 2)
            x = jnp.where(is_named[..., None], x, 0)
        if not self.has_data:
            return x
        last = jnp.max(jnp.where(self.start < self.stop, self.stop, 0), axis=1, keepdims=True)
        index = jnp.arange(x.shape[2], dtype=jnp.int32) if keys is None else keys.index
        is_before = index[None] < last
        return jnp.where(is_before[:, None, :, None], x, 0)

    def interval(self, rows: Block):
        """The interval of keys of each row, ints or [B | 1, rows]."""
        if not self.has_data:
            return self.resolved.interval(rows.index[None])
        return tuple(a if isinstance(a, int) else rows.take(a, 1) for a in (self.start, self.stop))

    def for_rows(self, rows: Block, kv_heads: int) -> "TileMask":
        """This mask with the keys that the lists of a block's rows name."""
        if self.lists is None:
            return self
        named = self.lists.by_key(self.lists.table(rows.index))
        return self._replace(named=self._by_head(named, kv_heads))

    def _by_head(self, x, kv_heads: int):
        """[B | 1, L, rows, S] -> [B | 1, K | 1, G | 1, rows, S], where the heads have L lists."""
        lists = (kv_heads, -1) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *lists, *x.shape[2:])

    def visible(self, rows: Block, keys: Block, needs_mask: bool):
        """Whether the rows see the keys, to broadcast against [B, K, rows, keys]; None where they
        see all. Without `needs_mask` only a dense mask and lists hide keys."""
        dense = None if self.dense is None else dense_tile(self.dense, rows, keys, self.group)
        if self.named is not None:
            named = _each_pair(keys.take(self.named, 4), rows, self.group)
            dense = named if dense is None else dense & named
        if not needs_mask:
            return dense
        sparse = self._inside(rows, keys)
        return sparse if dense is None else dense & sparse

    def _inside(self, rows: Block, keys: Block):
        mask, index, ids = self.resolved, keys.index[None, None, None], ()
        if mask.query_ids is not None:
            query_ids = each_row(rows.take(mask.query_ids, 1), self.group)
            ids = query_ids, keys.take(mask.key_ids, 1)[:, None, None]
        ends = (a if isinstance(a, int) else each_row(a, self.group) for a in self.interval(rows))
        inside = mask.visible(*ends, index, *ids)
        if keys.first_new is not None:
            inside = inside & (index >= keys.first_new)
        if mask.mask_mod is not None:
            inside = inside & mask.mask_mod.visible(*pairs(mask.mask_mod, rows, keys, self.group))
        return inside

    def key_blocks(self, rows: Block, size: int):
        """The key blocks that the rows visit, for a loop over them."""
        mask = self.resolved
        if mask.mask_mod is not None and mask.mask_mod.block_types is not None:
            index = schedule.ceil_div(rows.start, rows.size)
            return schedule.Blocks.from_row(mask.mask_mod.block_types, index)
        if mask.has_data:
            contiguous = None if mask.contiguous is None else rows.take(mask.contiguous, 1)
            blocks = schedule.key_blocks(*self.interval(rows), contiguous, size)
        else:
            blocks = schedule.known_blocks(mask, rows.start, rows.start + rows.size - 1, size)
            # one loop compiles in half the time of two, and most blocks of a narrow band need its
            # mask
            if mask.left is not None:
                blocks = blocks._replace(full_first=blocks.last, full_last=blocks.last)
        if mask.mask_mod is not None:
            blocks = schedule.Blocks(blocks.first, blocks.last, blocks.last, blocks.last)
        return blocks


def dense_tiles(x, heads: HeadRange):
    """[B | 1, N | 1, T | 1, S | 1] -> [B | 1, K | 1, G | 1, T | 1, S | 1] of a range of heads"""
    if x is None:
        return None
    x = heads.take(x, 1)
    return x.reshape(x.shape[0], *((heads.heads, -1) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])


def dense_tile(x, rows: Block, keys: Block, group: int):
    """[B | 1, K | 1, G | 1, T | 1, S | 1] -> [B | 1, K | 1, rows | 1, keys | 1]"""
    return _each_pair(keys.take(rows.take(x, 3), 4), rows, group)


def _each_pair(tile, rows: Block, group: int):
    """[B | 1, K | 1, G | 1, rows | 1, keys | 1] -> [B | 1, K | 1, rows | 1, keys | 1]"""
    if tile.shape[2:4] != (1, 1):
        tile = jnp.broadcast_to(tile, (*tile.shape[:2], group, rows.size, tile.shape[4]))
    return tile.reshape(*tile.shape[:2], -1, tile.shape[4])


def with_block_mask(p: Problem, tiles, x: Operands) -> Operands:
    """The operands, with block types in the mask_mod where loops go over blocks of these tiles."""
    mask = x.resolved_mask
    p, others = p.without_lists, dataclasses.replace(mask, lists=None)
    if mask.mask_mod is None or not p.is_static or static_key_blocks(p, tiles) is not None:
        return x
    types = schedule.block_types(others, p.batch, p.heads, p.queries, tiles.block_q, tiles.block_k)
    if p.queries % tiles.block_q:  # the last block is moved back over the one before it
        xp = np if isinstance(types, np.ndarray) else jnp
        last = block_types.merge(types[:, :, -2:], 2)[:, :, None]
        types = xp.concatenate([types[:, :, :-1], last], 2)
    mod = dataclasses.replace(mask.mask_mod, block_types=types)
    return x._replace(resolved_mask=dataclasses.replace(mask, mask_mod=mod))


UNROLLED = 8  # blocks at most; more are loops, which compile in the same time at any length
EXTRA = 5 / 4  # most scores that one loop over query blocks may compute, in visible scores


class KeyBlock(NamedTuple):
    """A block of keys, and what is known of the mask between it and a query block."""

    block: Block
    needs_mask: bool
    rows_see_one: bool  # whether each row is known to see one of its keys


class Band(NamedTuple):
    """Query blocks that see `width` neighbouring keys each: one loop, compiled once, goes over all
    of them."""

    width: int
    needs_mask: bool
    rows_see_one: bool

    def key_block(self, mask: ResolvedMask, rows: Block) -> KeyBlock:
        """The keys of a query block, which include all that its rows may see."""
        first, _ = schedule.without_data(mask).interval(rows.start)
        keys = Block(smaller(first, mask.keys - self.width), self.width)
        return KeyBlock(keys, self.needs_mask, self.rows_see_one)


@functools.lru_cache(256)
def find_band(p: Problem, block_q: int, block_k: int) -> Band | None:
    """The Band of a problem; None for few query blocks, for keys in several blocks, and where a
    mask hides much of what a Band would compute."""
    mask, has_data = p.resolved_mask, p.resolved_mask.has_data
    if not isinstance(p.queries, int) or not isinstance(p.keys, int) or mask.mask_mod is not None:
        return None
    if has_data and block_k < p.keys:
        return None
    # the last one ends with the rows
    starts = [min(i, p.queries - block_q) for i in range(0, p.queries, block_q)]
    ranges = [schedule.key_range(mask, i, i + block_q - 1) for i in starts]
    width = max(keys.last - keys.first for keys in ranges)
    if len(ranges) <= UNROLLED or not 0 < width <= block_k:
        return None
    if width * len(ranges) * block_q > EXTRA * count_scores(p, block_q):
        return None
    needs_mask = has_data or any(keys.ends != (0, 0, width, width) for keys in ranges)
    # rows between the first and the last see no fewer keys
    ends = [schedule.key_range(mask, i, i) for i in (0, p.queries - 1)]
    return Band(width, needs_mask, not has_data and all(keys.first < keys.last for keys in ends))


def count_scores(p: Problem, block_q: int) -> int:
    """How many scores a head has, where each query block visits all keys that one of its rows
    sees."""
    ranges = schedule.key_ranges(p.resolved_mask, p.queries, block_q)
    rows = (min(block_q, p.queries - i * block_q) for i in range(len(ranges)))
    return sum(n * (keys.last - keys.first) for n, keys in zip(rows, ranges, strict=True))


def static_key_blocks(p: Problem, tiles) -> list[list[KeyBlock]] | None:
    """The key blocks of each query block; None where loops go over them, or where they are a
    Band."""
    if tiles.in_place or find_band(p, tiles.block_q, tiles.block_k):
        return None
    one_q, one_k = tiles.block_q == p.queries, tiles.block_k == p.keys
    if p.resolved_mask.has_data and not one_k:
        return None
    if not one_q and schedule.ceil_div(p.queries, tiles.block_q) > UNROLLED:
        return None
    if not isinstance(p.keys, int) or not isinstance(p.queries, int):
        return [[KeyBlock(Block(0, p.keys), True, False)]] if one_q and one_k else None
    is_by_rule = p.resolved_mask.mask_mod is not None and not p.resolved_mask.has_data
    blocks = (_by_rule if is_by_rule else _by_interval)(p, tiles)
    return blocks if sum(map(len, blocks)) <= UNROLLED else None


def _by_rule(p: Problem, tiles) -> list[list[KeyBlock]]:
    size = tiles.block_k
    types = schedule.block_types(p.resolved_mask, p.batch, p.heads, p.queries, tiles.block_q, size)
    types = block_types.merge(types, (0, 1))

    def key_block(i, j):
        block = Block(int(j) * size, min(size, p.keys - int(j) * size))
        is_partial, is_full = (types[i, j] == t for t in (block_types.PARTIAL, block_types.FULL))
        return KeyBlock(block, bool(is_partial), bool(is_full))

    return [[key_block(i, j) for j in row.nonzero()[0]] for i, row in enumerate(types)]


def _by_interval(p: Problem, tiles) -> list[list[KeyBlock]]:
    size, has_data = tiles.block_k, p.resolved_mask.has_data

    def key_block(keys, start):
        end = min(start + size, keys.last)
        needs_mask = has_data or (keys.full_first, keys.full_last) != (keys.first, keys.last)
        rows_see_one = not has_data and keys.full_first < end and start < keys.full_last
        return KeyBlock(Block(start, end - start), needs_mask, rows_see_one)

    ranges = schedule.key_ranges(p.resolved_mask, p.queries, tiles.block_q)
    return [
        [key_block(keys, start) for start in range(keys.first, keys.last, size)] for keys in ranges
    ]
