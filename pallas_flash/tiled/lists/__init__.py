"""Attention by lists of keys in plain JAX: O(T n) work for lists of n keys, and beside copies of
the operands the memory of a chunk of lists.

The query heads that share a list and a key/value head are a list head. On a CPU one goes after the
other, else all go at once. A pass goes over the tiles of a list head by one of the walks
(`walks.py`); attention to keys in pages, and the softmax weights of the keys that lists name, go by
query alone.
"""

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
from pallas_flash.tiled.blockwise.logits import ScalePlacement
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists.tile import (
    Entries,
    ListHead,
    RowCotangents,
    Sums,
    Tile,
    by_head,
    from_blocks,
    from_list_heads,
    list_heads,
)
from pallas_flash.tiled.lists.tuning import BY_QUERY
from pallas_flash.tiled.lists.walks import WALKS, Walk
from pallas_flash.tiled.online_softmax import RowScale


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]."""

    def reader(head: ListHead):
        key, value = head.keys_and_values(x, tiles.dtype)
        return lambda tile, entries: entries.keys_and_values(tile, key, value)

    return _attend(problem, tiles, x, reader)


def forward_from_pages(
    problem: Problem, tiles: Tiles, x: Operands, table: PageTable, scales: tuple
):
    """As `forward`. Keys and values are pages, which have `scales` where they are in 8 bits."""
    keys, values = (InPages(*a) for a in zip((x.key, x.value), scales, strict=True))

    def reader(head: ListHead):
        def read(tile: Tile, entries: Entries):
            index = table.index(head.key_head.row, tile.key, head.key_head.head)
            is_visible = tile.visible.any((1, 2))[..., None]  # elsewhere there may be NaN
            gather = lambda a: jnp.where(is_visible, a.gather(index, tiles.dtype), 0)
            k = gather(keys)
            return k, k[..., : problem.value_size] if problem.values_are_keys else gather(values)

        return read

    return _attend(problem, tiles, x, reader)


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


def _attend(problem: Problem, tiles: Tiles, x: Operands, reader: Callable):
    """`forward`, where reader(head) returns read(tile, entries), the keys and values of a tile."""
    p, wide = problem, checks.sums(tiles.dtype)

    def one_head(walk: Walk, head: ListHead, sums: Sums):
        query, read = head.queries(x.query, tiles.dtype), reader(head)

        def start(q):
            zeros = jnp.zeros_like(q[..., 0], dtype=wide)
            sinks = None if head.sinks is None else jnp.broadcast_to(head.sinks, zeros.shape)
            return online_softmax.start(zeros, LogBase.E, sinks, p.with_top)

        def step(sums, earlier, tile: Tile, entries: Entries, q):
            first = None if head.sinks is None else start(q)
            o, state = (None, first) if earlier is None else earlier
            k, v = read(tile, entries)
            pv, alpha, state = tile.forward(q, k, v, state)
            return sums, (pv if o is None else o * alpha[..., None] + pv, state)

        o = _zeros(query, p.value_size, wide)
        sums, (o, state) = walk.each_tile(head, tiles, step, sums, (o, start(query)), query)
        o = online_softmax.finish(o, state.l, p.kept)
        state = state._replace(m=softmax.scaled_maximum(state.m, head.logits.exponent_scale))
        return sums, (o, jax.tree.map(lambda a: a[..., None], state))

    (o, state), _ = each_list_head(p, tiles, x, one_head, Sums())
    return from_list_heads(o).astype(x.query.dtype), jax.tree.map(by_head, state)


def backward(
    problem: Problem, tiles: Tiles, x: Operands, row_scale: RowScale, do, delta
) -> Gradients:
    """Gradients of the operands, given the RowScale and delta of each row."""
    p, factor = problem, ScalePlacement.choose(problem, tiles).query_factor(problem)

    def one_head(walk: Walk, head: ListHead, sums: Sums):
        query = head.queries(x.query, tiles.dtype)
        key, value = head.keys_and_values(x, tiles.dtype)
        dlse = row_scale.dlse if walk.has_whole_rows else None
        row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, dlse)

        def step(sums, dq, tile: Tile, entries: Entries, q, do, row):
            k, v = entries.keys_and_values(tile, key, value)
            new, dk, dv, ds, captured = tile.backward(q, k, v, do, row, sums.captured)
            return entries.add(tile, sums, dk, dv, ds, captured), _added(dq, new)

        by_row = query, head.by_row(do, tiles.dtype), jax.tree.map(head.each_row, row)
        start = _zeros(query, p.head_size, checks.sums(tiles.dtype))
        return walk.each_tile(head, tiles, step, sums, start, *by_row)

    dq, new = _gradients(p, tiles, x, one_head)
    dq, dk = from_list_heads(dq) * p.scale, new.key * (p.scale / factor)
    like = x.differentiable._replace(sinks=None)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), new._replace(query=dq, key=dk), like)


def tangent(
    problem: Problem, tiles: Tiles, x: Operands, dx: Gradients, row_scale: RowScale, o, dlse
):
    """The tangents of o [B, T, N, Hv] and lse [B, N, T], as `derivatives.tangent`."""
    p, wide = problem, checks.sums(tiles.dtype)
    # where dlse o nearly cancels do, an o rounded to 16 bits would leave few digits
    is_wide = o.dtype == wide

    def one_head(walk: Walk, head: ListHead, sums: Sums):
        arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
        m, inverse_sum, sink_dlse = map(head.each_row, (row_scale.m, row_scale.inverse_sum, dlse))

        def step(sums, earlier, tile: Tile, entries: Entries, q, dq, m, inverse_sum):
            each = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
            do, dlse, o = tile.tangent(*each, m, inverse_sum)
            return sums, _added(earlier, (do, dlse) if is_wide else (do, dlse, o))

        zeros = (_zeros(arrays.query, n, wide) for n in (p.value_size, 1, p.value_size))
        start = tuple(zeros)[: 2 if is_wide else 3]
        by_row = arrays.query, tangents.query, m, inverse_sum
        sums, (do, key_dlse, *sum_o) = walk.each_tile(head, tiles, step, sums, start, *by_row)
        o_, dlse_ = head.by_row(o, wide) if is_wide else sum_o[0] / p.kept, sink_dlse + key_dlse
        return sums, (do / p.kept - dlse_ * o_, dlse_)

    (do, dlse), _ = each_list_head(p, tiles, x, one_head, Sums())
    return from_list_heads(do), by_head(dlse)


def second(
    problem: Problem,
    tiles: Tiles,
    x: Operands,
    dx: Gradients,
    row_scale: RowScale,
    do,
    delta,
    dlse,
):
    """The gradients of the operands and of row_scale.inverse_sum, as `derivatives.second`."""
    p, wide = problem, checks.sums(tiles.dtype)
    row = RowCotangents(row_scale.m, row_scale.inverse_sum, delta, dlse)

    def one_head(walk: Walk, head: ListHead, sums: Sums):
        arrays, tangents = (head.slices(a, wide) for a in (x.differentiable, dx))
        rows = head.by_row(do, wide), jax.tree.map(head.each_row, row)

        def step(sums, earlier, tile: Tile, entries: Entries, q, dq, do, row):
            each = (entries.slices(tile, *a) for a in ((arrays, q), (tangents, dq)))
            new, dsum = tile.second(*each, do, row)
            captured = jax.tree.map(jnp.add, sums.captured, new.captured)
            sums = entries.add(tile, sums, new.key, new.value, new.bias, captured)
            return sums, _added(earlier, (new.query, dsum))

        start = jax.tree.map(jnp.zeros_like, (arrays.query, rows[1].m))
        by_row = arrays.query, tangents.query, *rows
        return walk.each_tile(head, tiles, step, sums, start, *by_row)

    (dq, dsum), new = _gradients(p, tiles, x, one_head)
    factor = ScalePlacement.choose(p, tiles).query_factor(p)
    return new._replace(query=from_list_heads(dq) * factor), by_head(dsum)


def entry_weights(problem: Problem, tiles: Tiles, x: Operands, lse):
    """exp(s - lse), [B, L, T, n * block], in the order of the entries of the lists: 0 for what a
    query does not see. lse is [B, N, T]."""
    p, lists = problem, problem.resolved_mask.lists.entries.shape[1]
    sharing = list_heads(p) // lists  # with one list, each of another key head

    def one_list_head(number):
        """The weights of a list head, [T, n * block]."""
        head = ListHead.take(p, tiles, x, number)
        query, key = head.queries(x.query, tiles.dtype), head.by_block(x.key, tiles.dtype)

        def step(nothing, _, tile: Tile, entries: Entries, q, lse):
            s = head.logits.from_products(*tile.products(q, entries.gather(tile, key)))
            # lse may be -inf where a bias hides all keys
            seen = tile.visible & (s != -jnp.inf)
            p = jnp.where(seen, jnp.exp(s * head.logits.exponent_scale - lse), 0)
            return nothing, jnp.sum(p, 2)

        return WALKS[BY_QUERY].each_tile(head, tiles, step, (), None, query, head.each_row(lse))[1]

    def one_list(number):
        first = number * sharing
        add = lambda total, i: (total + one_list_head(first + i), None)
        rest = jnp.arange(1, sharing, dtype=jnp.int32)
        return lax.scan(add, one_list_head(first), rest)[0]

    each = jnp.arange(p.batch * lists, dtype=jnp.int32)
    weights = jax.vmap(one_list)(each) if tiles.lists.at_once else lax.map(one_list, each)
    return weights.reshape(p.batch, lists, *weights.shape[1:])


def _gradients(p: Problem, tiles: Tiles, x: Operands, one_head: Callable):
    """What `each_list_head` returns of a pass that sums gradients, these as Gradients."""
    zeros = lambda *shape: jnp.zeros_like(x.query, shape=shape, dtype=checks.sums(tiles.dtype))
    lists = p.resolved_mask.lists
    kv = (zeros(lists.blocks, lists.block, n) for n in (p.head_size, p.value_size))
    bias = None if x.bias is None else zeros(*x.bias.shape)
    captured = tuple(zeros(*a.shape) for a in x.differentiable.captured)
    by_row, new = each_list_head(p, tiles, x, one_head, Sums(*kv, bias, captured))
    kv = (from_blocks(p, a) for a in (new.key, new.value))
    return by_row, Gradients(None, *kv, new.bias, captured=new.captured)


def each_list_head(p: Problem, tiles: Tiles, x: Operands, one_head: Callable, start: Sums):
    """Runs sums, results = one_head(walk, head, sums) for all list heads. Returns the results by
    row, [B, list heads, T, ..], and the sums, of keys and values [B, K, ..].

    Where all list heads add to an array they go one after the other: each would need its own.
    """
    walk, mask = WALKS[tiles.lists.walk], x.resolved_mask
    if walk.has_whole_rows:  # the other finds repeats where it sorts all lists together
        x = x._replace(resolved_mask=dataclasses.replace(mask, lists=mask.lists.distinct()))
    sharing = list_heads(p) // p.kv_heads

    def one_list_head(sums: Sums, number):
        head, whole = ListHead.take(p, tiles, x, number), sums.bias
        sums, results = one_head(walk, head, sums._replace(bias=head.dense(whole)))
        return sums._replace(bias=head.put_dense(whole, sums.bias)), results

    def one_key_head(shared, number):
        numbers = number * sharing + jnp.arange(sharing, dtype=jnp.int32)
        sums, results = lax.scan(one_list_head, start._replace(**shared), numbers)
        return sums.shared, (results, sums.key, sums.value)

    numbers, shared = jnp.arange(p.batch * p.kv_heads, dtype=jnp.int32), start.shared
    if tiles.lists.at_once and not jax.tree.leaves(shared):
        _, each = jax.vmap(lambda number: one_key_head(shared, number))(numbers)
    else:
        shared, each = lax.scan(one_key_head, shared, numbers)
    by_batch = lambda a, axes: a.reshape(p.batch, -1, *a.shape[axes:])
    results, *kv = each
    results = jax.tree.map(lambda a: by_batch(a, 2), results)
    return results, Sums(*(a if a is None else by_batch(a, 1) for a in kv), **shared)


def _zeros(query, n: int, dtype):
    """Zeros [T, G, n]."""
    return jnp.zeros_like(query, shape=(*query.shape[:2], n), dtype=dtype)


def _added(earlier, new):
    return new if earlier is None else jax.tree.map(jnp.add, earlier, new)
