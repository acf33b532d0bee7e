"""Tiles of attention by lists of keys."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.problem.arguments import Problem

# of the keys and values that a chunk of lists names: a CPU's caches hold them
CHUNK_BYTES = 2**22
GPU_CHUNK_BYTES = 2**28  # of those of all heads


DENSE = "dense"


class ListTiles(NamedTuple):
    """Tiles of a walk over lists of keys."""

    names: str  # what the lists name, in words
    walk: (
        str  # a name in lists.WALKS; DENSE: blockwise visits blocks, of which the lists are a mask
    )
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
        return f"{self.names}, gathered, {at_a_time} at a time"

    def for_calls(self, calls: int) -> "ListTiles":
        """The tiles of so many calls side by side."""
        return self._replace(chunk=max(self.chunk // calls, 1))


def list_tiles(p: Problem, dtype: str, one_at_a_time: bool) -> ListTiles:
    """Tiles of products in this dtype, of one list head at a time or of all."""
    lists, on_cpu = p.resolved_mask.lists, hardware.here().platform == "cpu"
    columns = p.head_size if p.values_are_keys else p.head_size + p.value_size
    list_bytes = lists.entries.shape[-1] * lists.block * columns * jnp.dtype(dtype).itemsize
    most = CHUNK_BYTES
    if not one_at_a_time:
        most, list_bytes = GPU_CHUNK_BYTES, list_bytes * p.batch * p.kv_heads
    chunk = lists.entries.shape[2]
    if p.is_static:  # else all at once: symbols of jax.export cannot be compared
        chunk = min(max(most // max(list_bytes, 1), 1), chunk)
    return ListTiles(
        str(lists),
        walk="by query",
        chunk=chunk,
        query_block=lists.query_block,
        at_once=not one_at_a_time,
        in_order=p.deterministic and not on_cpu,
    )
