"""The costs on a CPU of the walks over lists of keys. The unit is the time that blockwise takes for
a pair of a query and a key under a mask. Measurements: results.md#lists."""

from typing import NamedTuple

from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

# The first two are the walks in lists.WALKS. DENSE is blockwise with the lists as a mask of its
# blocks, or as a table.
BY_QUERY, BY_KEY, DENSE = "by query", "by key", "dense"

# Of a tile by key, at most: fewer keep one core busy, more leave the caches.
ROWS = 2048
SCORES = 2**18

PAIR = 1.15  # a pair by key
ROW = 30  # reading and writing the sums of a row, once for the keys of a block
STEP = 22_000  # a tile by key, beside its pairs and rows
KEY = 30  # gathering a key, once for the rows of a list, and adding to its gradient
GATHERED = 1.6  # a pair by query: products of a few rows
COPY = 100  # copying a key by heads, which blockwise does where it visits blocks
LIST_HEAD = 0.2  # a pair of blockwise, if no other query head shares its mask


class Pairs(NamedTuple):
    """Pairs of a query and a key, of one head."""

    visible: int  # left by the static part of the mask
    named: int  # at most so many of them are named by lists

    @classmethod
    def count(cls, p: Problem) -> "Pairs":
        lists, visible, named = p.resolved_mask.lists, 0, 0
        longest, size = lists.entries.shape[-1] * lists.block, 128
        whole_blocks = lambda n: schedule.ceil_div(n, lists.block) * lists.block
        ranges = schedule.key_ranges(p.resolved_mask, p.queries, size)
        for i, keys in enumerate(ranges):
            rows, width = min(size, p.queries - i * size), keys.last - keys.first
            visible += rows * width
            named += rows * min(longest, whole_blocks(width))
        return cls(visible, named)


def costs(p: Problem) -> dict[str, float]:
    """The cost of each walk, by its name."""
    lists, pairs = p.resolved_mask.lists, Pairs.count(p)
    _, L, _, n = lists.entries.shape
    rows, of_tile = list_rows(p), lists_of_tile(p)
    visited = p.heads * pairs.visible * (1 + LIST_HEAD * L / p.heads)
    gathered = p.queries * n * lists.block  # hidden pairs too
    list_heads = p.heads * lists.query_block // rows
    entries = pairs.named / (lists.block * lists.query_block)  # of the lists of a list head
    tiles = list_heads * (entries / of_tile + lists.blocks / 2)
    return {
        DENSE: visited + p.kv_heads * p.keys * COPY,
        BY_QUERY: p.heads * gathered * (GATHERED + KEY / rows),
        BY_KEY: tiles * (of_tile * rows * (PAIR * lists.block + ROW) + STEP),
    }


def list_rows(p: Problem) -> int:
    """The rows of a list: its queries, times the query heads that share it and a key/value head."""
    lists = p.resolved_mask.lists
    return p.heads // max(lists.entries.shape[1], p.kv_heads) * lists.query_block


def lists_of_tile(p: Problem) -> int:
    """The lists of a tile by key, of which the last one of an entry is half empty."""
    lists = p.resolved_mask.lists
    _, _, count, n = lists.entries.shape
    rows = min(ROWS, SCORES // lists.block)
    return max(min(rows // list_rows(p), count * n // lists.blocks // 4), 1)
