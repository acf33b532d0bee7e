"""The passes over the tiles of a list head: four by any walk; and by query alone, attention to keys
in pages, and the softmax weights of the keys that lists name."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import checks
from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.list_heads import (
    ListHead,
    Sums,
    by_head,
    each_list_head,
    from_list_heads,
    list_heads,
)
from pallas_flash.tiled.lists.tile import Entries, RowCotangents, Tile
from pallas_flash.tiled.lists.tuning import BY_QUERY
from pallas_flash.tiled.lists.walks import WALKS, Walk
from pallas_flash.tiled.online_softmax import RowScale


def forward(walk: Walk, head: ListHead, tiles: Tiles, x: Operands, sums: Sums):
    """o [T, G, Hv] and the SoftmaxState [T, G, 1]."""
    key, value = head.keys_and_values(x, tiles.dtype)

    def read(tile: Tile, entries: Entries):
        k = entries.gather(tile, key)
        return k, k[..., : head.problem.value_size] if value is None else entries.gather(
            tile, value
        )

    return attend(walk, head, tiles, x, read, sums)


def attend(walk: Walk, head: ListHead, tiles: Tiles, x: Operands, read: Callable, sums: Sums):
    """`forward`, where read(tile, entries) returns the keys and the values of a tile."""
    p, wide = head.problem, checks.sums(tiles.dtype)
    query = head.queries(x.query, tiles.dtype)

    def start(q):
        zeros = jnp.zeros_like(q[..., 0], dtype=wide)
        sinks = None if head.sinks is None else jnp.broadcast_to(head.sinks, zeros.shape)
        return online_softmax.start(zeros, LogBase.E, sinks, p.with_top)

    def step(sums, of_rows, tile: Tile, entries: Entries, q):
        first = None if head.sinks is None else start(q)
        o, state = (None, first) if of_rows is None else of_rows
        k, v = read(tile, entries)
        pv, alpha, state = tile.forward(q, k, v, state)
        return sums, (pv if o is None else o * alpha[..., None] + pv, state)

    o = _zeros(query, p.value_size, wide)
    sums, (o, state) = walk.each_tile(head, tiles, step, sums, (o, start(query)), query)
    o = online_softmax.finish(o, state.l, p.kept)
    state = state._replace(m=softmax.scaled_maximum(state.m, head.logits.exponent_scale))
    return sums, (o, jax.tree.map(lambda a: a[..., None], state))


def backward(
    walk: Walk,
    head: ListHead,
    tiles: Tiles,
    x: Operands,
    row_scale: RowScale,
    do,
    delta,
    sums: Sums,
):
    """dq [T, G, H], and the sums with the gradients of keys, values, bias and captured arrays
    added."""
    p = head.problem
    query = head.queries(x.query, tiles.dtype)
    key, value = head.keys_and_values(x, tiles.dtype)
    dlse = row_scale.dlse if walk.has_whole_rows else None
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, dlse)

    def step(sums, dq, tile: Tile, entries: Entries, q, do, row):
        k = entries.gather(tile, key)
        v = k[..., : p.value_size] if value is None else entries.gather(tile, value)
        new, dk, dv, ds, captured = tile.backward(q, k, v, do, row, sums.captured)
        return entries.add(tile, sums, dk, dv, ds, captured), _added(dq, new)

    by_row = query, head.by_row(do, tiles.dtype), jax.tree.map(head.each_row, row)
    start = _zeros(query, p.head_size, checks.sums(tiles.dtype))
    return walk.each_tile(head, tiles, step, sums, start, *by_row)


def tangent(
    walk: Walk,
    head: ListHead,
    tiles: Tiles,
    x: Operands,
    dx: Gradients,
    row_scale: RowScale,
    o,
    dlse,
    sums: Sums,
):
    """The tangents of o [T, G, Hv] and lse [T, G, 1]."""
    p, wide = head.problem, checks.sums(tiles.dtype)
    arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
    m, inverse_sum, of_sinks = map(head.each_row, (row_scale.m, row_scale.inverse_sum, dlse))
    # where dlse o nearly cancels do, an o rounded to 16 bits would leave few digits
    is_wide = o.dtype == wide

    def step(sums, of_rows, tile: Tile, entries: Entries, q, dq, m, inverse_sum):
        of_tile, along = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
        do, dlse, o = tile.tangent(of_tile, along, m, inverse_sum)
        return sums, _added(of_rows, (do, dlse) if is_wide else (do, dlse, o))

    zeros = (_zeros(arrays.query, n, wide) for n in (p.value_size, 1, p.value_size))
    start = tuple(zeros)[: 2 if is_wide else 3]
    by_row = arrays.query, tangents.query, m, inverse_sum
    sums, (do, dlse, *sum_o) = walk.each_tile(head, tiles, step, sums, start, *by_row)
    o, dlse = head.by_row(o, wide) if is_wide else sum_o[0] / p.kept, of_sinks + dlse
    return sums, (do / p.kept - dlse * o, dlse)


def second(
    walk: Walk,
    head: ListHead,
    tiles: Tiles,
    x: Operands,
    dx: Gradients,
    row_scale,
    do,
    delta,
    dlse,
    sums: Sums,
):
    """The gradients of the query [T, G, H] and of row_scale.inverse_sum [T, G, 1], and the sums
    with the gradients of keys, values, bias and captured arrays added."""
    wide = checks.sums(tiles.dtype)
    arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, dlse)

    def step(sums, of_rows, tile: Tile, entries: Entries, q, dq, do, row):
        of_tile, along = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
        new, of_sum = tile.second(of_tile, along, do, row)
        captured = jax.tree.map(jnp.add, sums.captured, new.captured)
        sums = entries.add(tile, sums, new.key, new.value, new.bias, captured)
        return sums, _added(of_rows, (new.query, of_sum))

    by_row = arrays.query, tangents.query, head.by_row(do, wide), jax.tree.map(head.each_row, row)
    start = jax.tree.map(jnp.zeros_like, (arrays.query, by_row[3].m))
    return walk.each_tile(head, tiles, step, sums, start, *by_row)


def _zeros(query, n: int, dtype):
    """Zeros [T, G, n]."""
    return jnp.zeros_like(query, shape=(*query.shape[:2], n), dtype=dtype)


def _added(of_rows, new):
    return new if of_rows is None else jax.tree.map(jnp.add, of_rows, new)


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
