"""Attention by lists of keys that lie in pages: of these no other is read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import quantised
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import by_query
from pallas_flash.tiled.lists.list_heads import ListHead
from pallas_flash.tiled.lists.tile import Tile


class InPages(NamedTuple):
    """Keys or values in pages."""

    bits: jax.Array
    dtype: str
    scales: jax.Array | None  # where they are in 8 bits

    @classmethod
    def of(cls, x, scales) -> "InPages":
        return cls(quantised.bits(x), str(x.dtype), scales)

    def gather(self, index: tuple, dtype):
        """Those of an index, whose arrays are [l, n]: [l, n, h]"""
        read = lambda a: a.at[index].get(mode="promise_in_bounds")
        x = quantised.from_bits(read(self.bits), jnp.dtype(self.dtype))
        if self.scales is not None:
            x = x.astype(jnp.float32) * read(self.scales)[..., None]
        return x.astype(dtype)


def forward(problem: Problem, tiles: Tiles, x: Operands, table: PageTable, scales: tuple):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]; keys and values are
    pages, which have `scales` where they are in 8 bits."""
