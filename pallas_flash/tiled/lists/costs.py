"""What the walks over lists of keys cost on a CPU, in units of the time that blockwise takes for a
pair of a query and a key under a mask. Measurements: results.md#lists."""

from typing import NamedTuple

from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

# walks in lists.WALKS, and blockwise with the lists as a mask of its blocks, or as a table
BY_QUERY, BY_KEY, DENSE = "by query", "by key", "dense"

# Of a tile by key: its scores and what it reads and writes of its rows stay in caches.
ROWS = 256
SCORES = 2**16

TILE = 2  # a pair by key: one core multiplies a tile, where all share those of blockwise
STEP = 1500  # a step of the loop by key, beside its pairs
ROW = 30  # reading and writing the sums of a row, once for the keys of a block
KEY = 30  # gathering a key, once for the rows of a list, and adding to its gradient
GATHERED = 1.6  # a pair by query: products of a few rows
COPY = 100  # copying a key by heads, which blockwise does where it visits blocks
LIST_HEAD = 0.2  # a pair of blockwise, if no other query head shares its mask


class Pairs(NamedTuple):
    """Pairs of a query and a key, of one head."""

    visible: int  # those that the static part of the mask leaves
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
    _, L, count, n = lists.entries.shape
    rows = list_rows(p)
    visited = p.heads * pairs.visible * (1 + LIST_HEAD * L / p.heads)
    gathered = p.queries * n * lists.block  # hidden pairs too
    steps = p.heads * lists.query_block // rows * (count * n // lists_of_tile(p) + lists.blocks)
    return {
        DENSE: visited + p.kv_heads * p.keys * COPY,
        BY_QUERY: p.heads * gathered * (GATHERED + KEY / rows),
        BY_KEY: TILE * (p.heads * pairs.named * (1 + ROW / lists.block) + STEP * steps),
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
