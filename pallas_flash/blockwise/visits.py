"""Which keys each query block visits, as far as that is known while tracing."""

import functools
from typing import NamedTuple

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.blockwise.parts import Block
from pallas_flash.masks import block_types
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.pytrees import smaller

UNROLLED = 8  # blocks; more of them are loops, which compile in the same time at any length
ALIKE = 5 / 4  # times the scores that are seen, which one loop over query blocks may compute


class Alike(NamedTuple):
    """Query blocks of which each sees `width` neighbouring keys: one loop, which is compiled once,
    serves all of them."""

    width: int
    masked: bool  # whether some of these keys are hidden from some rows
    some: bool  # whether each row is known to see one


@functools.lru_cache(256)
def alike(p: Problem, block_q: int, block_k: int) -> Alike | None:
    """What is alike in the query blocks; None for few, for keys in several blocks, and where a mask
    hides much of them."""
    v, has_data = p.resolved_mask, p.resolved_mask.has_data
    if (
        not isinstance(p.queries, int)
        or not isinstance(p.keys, int)
        or v.mask_mod is not None
        or (has_data and block_k < p.keys)
    ):
        return None
    # the last one ends with the rows
    starts = [min(i, p.queries - block_q) for i in range(0, p.queries, block_q)]
    ranges = [schedule.key_range(v, i, i + block_q - 1) for i in starts]
    width = max(keys.last - keys.first for keys in ranges)
    if (
        len(ranges) <= UNROLLED
        or not 0 < width <= block_k
        or width * len(ranges) * block_q > ALIKE * scores(p, block_q)
    ):
        return None
    masked = has_data or any(keys != (0, 0, width, width) for keys in ranges)
    # of a band: rows between them see no fewer keys
    ends = [schedule.key_range(v, i, i) for i in (0, p.queries - 1)]
    return Alike(width, masked, not has_data and all(keys.first < keys.last for keys in ends))


def scores(p: Problem, block_q: int) -> int:
    """Of a head, in query blocks that see all keys which one of their rows may see."""
    ranges = schedule.key_ranges(p.resolved_mask, p.queries, block_q)
    rows = (min(block_q, p.queries - i * block_q) for i in range(len(ranges)))
    return sum(n * (keys.last - keys.first) for n, keys in zip(rows, ranges, strict=True))


def known_keys(p: Problem, tiles) -> list | None:
    """For each query block the key blocks known while tracing, whether they need a mask, and
    whether each row is known to see one of their keys; None: loops find them, or all are
    `alike`."""
    if alike(p, tiles.block_q, tiles.block_k):
        return None
    one_q, one_k = tiles.block_q == p.queries, tiles.block_k == p.keys
    has_data = p.resolved_mask.has_data
    if (has_data and not one_k) or (
        not one_q and schedule.ceil_div(p.queries, tiles.block_q) > UNROLLED
    ):
        return None
    if not isinstance(p.keys, int) or not isinstance(p.queries, int):
        return [[(Block(0, p.keys), True, False)]] if one_q and one_k else None
    size, blocks = tiles.block_k, []
    if p.resolved_mask.mask_mod is not None and not has_data:
        found = block_types.merge(
            schedule.block_kinds(p.resolved_mask, p.batch, p.heads, p.queries, tiles.block_q, size),
            (0, 1),
        )
        block = lambda j: Block(int(j) * size, min(size, p.keys - int(j) * size))
        kind_of = lambda kind, j: (
            bool(kind[j] == block_types.PARTIAL),
            bool(kind[j] == block_types.FULL),
        )
        blocks = [[(block(j), *kind_of(kind, j)) for j in kind.nonzero()[0]] for kind in found]
        return blocks if sum(map(len, blocks)) <= UNROLLED else None
    for seen in schedule.key_ranges(p.resolved_mask, p.queries, tiles.block_q):
        masked = has_data or (seen.full_first, seen.full_last) != (seen.first, seen.last)
        some = lambda i, end, seen=seen: (
            not has_data and seen.full_first < end and i < seen.full_last
        )
        ends = [(i, min(i + size, seen.last)) for i in range(seen.first, seen.last, size)]
        blocks.append([(Block(i, end - i), masked, some(i, end)) for i, end in ends])
    return blocks if sum(map(len, blocks)) <= UNROLLED else None


def neighbours(resolved_mask: ResolvedMask, row: Block, width: int) -> Block:
    """The keys of `alike` query blocks: so many, among them all that these rows may see."""
    first, _ = schedule.without_data(resolved_mask).interval(row.start)
    return Block(smaller(first, resolved_mask.keys - width), width)
