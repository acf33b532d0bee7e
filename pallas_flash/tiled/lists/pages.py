"""Attention by lists of keys that lie in pages, of which it reads no others."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import by_query
from pallas_flash.tiled.lists.distinct import distinct
from pallas_flash.tiled.lists.entries import Entries
from pallas_flash.tiled.lists.list_heads import (
    ListHead,
    Sums,
    by_head,
    each_list_head,
    from_list_heads,
)
from pallas_flash.tiled.lists.passes import attend
from pallas_flash.tiled.lists.tile import Tile


def forward(problem: Problem, tiles: Tiles, x: Operands, table: PageTable, scales: tuple):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]. Keys and values are
    pages, which have `scales` where they are in 8 bits."""
    p, mask = problem, x.resolved_mask
    x = x._replace(resolved_mask=dataclasses.replace(mask, lists=distinct(mask.lists)))
    keys, values = (InPages(*a) for a in zip((x.key, x.value), scales, strict=True))

    def one_head(number, sums: Sums):
        head = ListHead.take(p, tiles, x, number)

        def read(tile: Tile, entries: Entries):
            index = table.index(head.key_head.row, tile.key, head.key_head.head)
            is_visible = tile.visible.any((1, 2))[..., None]  # elsewhere there may be NaN
            gather = lambda a: jnp.where(is_visible, a.gather(index, tiles.dtype), 0)
            k = gather(keys)
            return k, k[..., : p.value_size] if p.values_are_keys else gather(values)

        return attend(by_query.WALK, head, tiles, x, read, sums)

    (o, state), _ = each_list_head(p, tiles.lists.at_once, one_head, Sums())
    return from_list_heads(o).astype(x.query.dtype), jax.tree.map(by_head, state)


class InPages(NamedTuple):
    """Keys or values in pages."""

    x: jax.Array
    scales: jax.Array | None

    def gather(self, index: tuple, dtype):
        """Keys or values at an index, [l, n, h], times their scales."""
        x = xla_cpu.gather(self.x, index)
        if self.scales is None:
            return x.astype(dtype)
        scales = xla_cpu.gather(self.scales, index)[..., None]
        return (xla_cpu.widen(x, jnp.float32) * scales).astype(dtype)
