"""Tiles of attention by lists of keys, and the walk over them that costs the least."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

# The first two are the walks in lists.WALKS. DENSE is blockwise with the lists as a mask of its
# blocks, or as a table.
BY_QUERY, BY_KEY, DENSE = "by query", "by key", "dense"

# Of a tile by key, at most: fewer keep one core busy, more leave the caches.
ROWS = 2048
SCORES = 2**18

# Costs on a CPU. The unit is the time that blockwise takes for a pair of a query and a key under a
# mask: results.md#lists.
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
    """The cost of each walk on a CPU, by its name."""
    lists, pairs = p.resolved_mask.lists, Pairs.count(p)
    _, L, _, n = lists.entries.shape
    rows, per_tile = list_rows(p), lists_of_tile(p)
    visited = p.heads * pairs.visible * (1 + LIST_HEAD * L / p.heads)
    gathered = p.queries * n * lists.block  # hidden pairs too
    list_heads = p.heads * lists.query_block // rows
    entries = pairs.named / (lists.block * lists.query_block)  # of the lists of a list head
    tiles = list_heads * (entries / per_tile + lists.blocks / 2)
    return {
        DENSE: visited + p.kv_heads * p.keys * COPY,
        BY_QUERY: p.heads * gathered * (GATHERED + KEY / rows),
        BY_KEY: tiles * (per_tile * rows * (PAIR * lists.block + ROW) + STEP),
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


# of the keys and values that a chunk of lists names, and its scores: a CPU's caches hold them
CHUNK_BYTES, CHUNK_SCORES = 2**22, 2**17
GPU_CHUNK_BYTES = 2**28  # of keys and values of all heads


class ListTiles(NamedTuple):
    """Tiles of a walk over lists of keys."""

    names: str  # what the lists name, in words
    walk: str  # BY_QUERY, BY_KEY or DENSE
    chunk: int  # lists at a time
    query_block: int
    at_once: bool  # whether all heads go at once; else one list head after the other
    # whether a step of a sum by keys adds the rows of one list, which are distinct: else two of its
    # additions may change places
    in_order: bool
    why: str = ""  # the walk: what it costs beside others, where these were estimated

    def __str__(self):
        if self.walk == DENSE:
            return f"{self.names}, as a mask{self.why}"
        queries = self.chunk * self.query_block
        at_a_time = "1 query" if queries == 1 else f"{queries} queries"
        how = "gathered" if self.walk == BY_QUERY else "a block after the other"
        return f"{self.names}, {how}, {at_a_time} at a time{self.why}"


def list_tiles(p: Problem, dtype: str, one_at_a_time: bool, walk: str | None = None) -> ListTiles:
    """Tiles of products in this dtype, of one list head at a time or of all; by default of the walk
    that takes the least time."""
    lists, on_cpu = p.resolved_mask.lists, xla_cpu.on_cpu()
    walk, why = choose_walk(p, one_at_a_time) if walk is None else (walk, "")
    by_key = walk == BY_KEY
    return ListTiles(
        str(lists),
        walk=walk,
        chunk=lists_of_tile(p) if by_key else _chunk(p, dtype, one_at_a_time),
        query_block=lists.query_block,
        at_once=not one_at_a_time,
        in_order=not on_cpu,
        why=why,
    )


def choose_walk(p: Problem, one_at_a_time: bool) -> tuple[str, str]:
    """The walk that takes the least time on a CPU, and its cost beside others, in words. On a GPU,
    where tiles by key would be a loop of small kernels, lists of keys are gathered, and others are
    a mask of blocks."""
    if one_at_a_time and p.is_static:
        each = costs(p)
        walk = min(each, key=each.get)
        ratios = [f"{each[walk] / cost:.2g} of {x}" for x, cost in each.items() if x != walk]
        return walk, f" ({walk}: estimated at {' and '.join(ratios)})"
    return (DENSE if p.resolved_mask.lists.has_table else BY_QUERY), ""


def _chunk(p: Problem, dtype: str, one_at_a_time: bool) -> int:
    """How many lists have their keys gathered at a time."""
    lists = p.resolved_mask.lists
    columns = p.head_size if p.values_are_keys else p.head_size + p.value_size
    list_bytes = lists.entries.shape[-1] * lists.block * columns * jnp.dtype(dtype).itemsize
    if not p.is_static:  # all at once: symbols of jax.export cannot be compared
        return lists.entries.shape[2]
    if one_at_a_time:
        scores = list_rows(p) * lists.entries.shape[-1] * lists.block
        most = min(CHUNK_BYTES // max(list_bytes, 1), CHUNK_SCORES // max(scores, 1))
    else:
        most = GPU_CHUNK_BYTES // max(list_bytes * p.batch * p.kv_heads, 1)
    return min(max(most, 1), lists.entries.shape[2])
