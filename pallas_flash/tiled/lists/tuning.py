"""Tiles of attention by lists of keys."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled.lists import costs
from pallas_flash.tiled.lists.costs import BY_KEY, BY_QUERY, DENSE

# of the keys and values that a chunk of lists names, and its scores: a CPU's caches hold them
CHUNK_BYTES, CHUNK_SCORES = 2**22, 2**17
GPU_CHUNK_BYTES = 2**28  # of keys and values of all heads


class ListTiles(NamedTuple):
    """Tiles of a walk over lists of keys."""

    names: str  # what the lists name, in words
    walk: str  # a name in costs.py
    chunk: int  # lists at a time
    query_block: int
    at_once: bool  # whether all heads go at once; else one list head after the other
    # whether a step of a sum by keys adds the rows of one list, which are distinct: else two of its
    # additions may change places
    in_order: bool

    def __str__(self):
        if self.walk == DENSE:
            return f"{self.names}, as a mask"
        queries = self.chunk * self.query_block
        at_a_time = "1 query" if queries == 1 else f"{queries} queries"
        how = "gathered" if self.walk == BY_QUERY else "a block after the other"
        return f"{self.names}, {how}, {at_a_time} at a time"


def list_tiles(p: Problem, dtype: str, one_at_a_time: bool, walk: str | None = None) -> ListTiles:
    """Tiles of products in this dtype, of one list head at a time or of all; by default of the walk
    that takes the least time."""
    lists, on_cpu = p.resolved_mask.lists, xla_cpu.on_cpu()
    walk = choose_walk(p, one_at_a_time) if walk is None else walk
    by_key = walk == BY_KEY
    return ListTiles(
        str(lists),
        walk=walk,
        chunk=costs.lists_of_tile(p) if by_key else _chunk(p, dtype, one_at_a_time),
        query_block=lists.query_block,
        at_once=not one_at_a_time,
        in_order=not on_cpu,
    )


def choose_walk(p: Problem, one_at_a_time: bool) -> str:
    """The walk that takes the least time on a CPU. On a GPU, where tiles by key would be a loop of
    small kernels, lists of keys are gathered, and others are a mask of blocks."""
    if one_at_a_time and p.is_static:
        each = costs.costs(p)
        return min(each, key=each.get)
    return DENSE if p.resolved_mask.lists.has_table else BY_QUERY


def _chunk(p: Problem, dtype: str, one_at_a_time: bool) -> int:
    """How many lists have their keys gathered at a time."""
    lists = p.resolved_mask.lists
    columns = p.head_size if p.values_are_keys else p.head_size + p.value_size
    list_bytes = lists.entries.shape[-1] * lists.block * columns * jnp.dtype(dtype).itemsize
    if not p.is_static:  # all at once: symbols of jax.export cannot be compared
        return lists.entries.shape[2]
    if one_at_a_time:
        scores = costs.list_rows(p) * lists.entries.shape[-1] * lists.block
        most = min(CHUNK_BYTES // max(list_bytes, 1), CHUNK_SCORES // max(scores, 1))
    else:
        most = GPU_CHUNK_BYTES // max(list_bytes * p.batch * p.kv_heads, 1)
    return min(max(most, 1), lists.entries.shape[2])
