"""What reads lists in its own way: attention to keys in pages, and the softmax weights of the keys
that lists name."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.list_heads import (
    ListHead,
    Sums,
    by_head,
    each_list_head,
    from_list_heads,
    list_heads,
)
from pallas_flash.tiled.lists.passes import attend
from pallas_flash.tiled.lists.tile import Entries, Tile
from pallas_flash.tiled.lists.tuning import BY_QUERY
from pallas_flash.tiled.lists.walks import WALKS


def forward_from_pages(
    problem: Problem, tiles: Tiles, x: Operands, table: PageTable, scales: tuple
):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]. Keys and values are
    pages, which have `scales` where they are in 8 bits."""
    p, mask = problem, x.resolved_mask
    x = x._replace(resolved_mask=dataclasses.replace(mask, lists=mask.lists.distinct()))
    keys, values = (InPages(*a) for a in zip((x.key, x.value), scales, strict=True))

    def one_head(number, sums: Sums):
        head = ListHead.take(p, tiles, x, number)

        def read(tile: Tile, entries: Entries):
            index = table.index(head.key_head.row, tile.key, head.key_head.head)
            is_visible = tile.visible.any((1, 2))[..., None]  # elsewhere there may be NaN
            gather = lambda a: jnp.where(is_visible, a.gather(index, tiles.dtype), 0)
            k = gather(keys)
            return k, k[..., : p.value_size] if p.values_are_keys else gather(values)

        return attend(WALKS[BY_QUERY], head, tiles, x, read, sums)

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


def listed_weights(problem: Problem, tiles: Tiles, x: Operands, lse):
    """exp(s - lse), [B, L, T, n * block], in the order of the entries of the lists: 0 for what a
    query does not see. lse is [B, N, T]."""
    p, lists = problem, problem.resolved_mask.lists.entries.shape[1]
    sharing = list_heads(p) // lists  # with one list, each of another key head

    def one_list(number):
        of_head = lambda i: _of_head(
            ListHead.take(p, tiles, x, number * sharing + i), tiles, x, lse
        )
        add = lambda total, i: (total + of_head(i), None)
        total, _ = lax.scan(add, of_head(0), jnp.arange(1, sharing, dtype=jnp.int32))
        return total

    each = jnp.arange(p.batch * lists, dtype=jnp.int32)
    weights = jax.vmap(one_list)(each) if tiles.lists.at_once else lax.map(one_list, each)
    return weights.reshape(p.batch, lists, *weights.shape[1:])


def _of_head(head: ListHead, tiles: Tiles, x: Operands, lse):
    """The weights of a list head, [T, n * block]."""
    logits = head.logits
    query = head.queries(x.query, tiles.dtype)
    key = head.by_block(x.key, tiles.dtype)

    def step(nothing, _, tile: Tile, entries: Entries, q, lse):
        s = logits.of_products(*tile.products(q, entries.gather(tile, key)))
        # lse may be -inf where a bias hides all keys
        seen = tile.visible & (s != -jnp.inf)
        p = jnp.where(seen, jnp.exp(s * logits.exponent_scale - lse), 0)
        return nothing, jnp.sum(p, 2)

    return WALKS[BY_QUERY].each_tile(head, tiles, step, (), None, query, head.each_row(lse))[1]
