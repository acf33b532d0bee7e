"""What the walks over lists of keys cost on a CPU, in the time that blockwise takes for a pair of a
query and a key which it multiplies without a list. Measurements: results.md#lists."""

from typing import NamedTuple

from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

# walks in lists.WALKS, and blockwise with the lists as a mask of its blocks
BY_QUERY, BY_KEY, DENSE = "by query", "by key", "dense"

ROWS = 256  # of a tile by key; its scores, and what it reads and writes of its rows, stay in caches
SCORES = 2**16  # of a tile by key
TILE = 4000  # a step of the loop by key, beside its pairs
ROW = 25  # reading and writing the sums of a row, which a tile by key does for `block` keys
GATHERED_KEY = 20  # gathering a key for the rows of a list, and adding its gradient


class Pairs(NamedTuple):
    """Pairs of a query and a key, of one head."""

    visible: int  # those that the static part of the mask leaves
    named: int  # at most so many of them are named by lists

    @classmethod
    def count(cls, p: Problem) -> "Pairs":
        lists, visible, named = p.resolved_mask.lists, 0, 0
        longest, size = lists.entries.shape[-1] * lists.block, 128
        ranges = schedule.key_ranges(p.resolved_mask, p.queries, size)
        for i, keys in enumerate(ranges):
            rows, width = min(size, p.queries - i * size), keys.last - keys.first
            visible, named = visible + rows * width, named + rows * min(longest, width)
        return cls(visible, named)


def costs(p: Problem) -> dict[str, float]:
    """The cost of each walk, by its name."""
    lists, pairs = p.resolved_mask.lists, Pairs.count(p)
    _, L, count, n = lists.entries.shape
    rows = list_rows(p)
    tiles = p.heads * lists.query_block // rows * (count * n // lists_of_tile(p) + lists.blocks)
    return {
        # the mask of a pair is evaluated once for the heads that share a list
        DENSE: p.heads * pairs.visible * (1 + 0.5 * L / p.heads),
        BY_QUERY: p.heads * pairs.named * (1.25 + GATHERED_KEY / rows),
        BY_KEY: p.heads * pairs.named * (1 + ROW / lists.block) + TILE * tiles,
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
