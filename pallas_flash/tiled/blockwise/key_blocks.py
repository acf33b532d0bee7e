"""The key blocks that each query block visits, where these are static."""

import functools
from typing import NamedTuple

from pallas_flash.jax_support.pytrees import smaller
from pallas_flash.masks import block_types
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.slices import Block

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
