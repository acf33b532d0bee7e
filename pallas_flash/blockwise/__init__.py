"""FlashAttention-2 in plain JAX: query blocks outside, key blocks inside, O(T + S) memory, on any
device.

On a CPU a few heads go at a time, so that what passes between two products stays in the caches.
Query blocks that see equally many neighbouring keys, in a long narrow band, are one loop without
loops over keys; other blocks are none, if they are few and known while tracing. Scores are [rows,
keys]: then the forward's products take their operands as they lie, and XLA gives q k^T and its
softmax to its CPU library in one call. In the backward q and do are transposed, and dk and dv come
out transposed; where p and ds are smaller, they are transposed instead. With the first operand left
transposed a CPU's products are slow. The rows are those of all query heads that share a key/value
head.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import online_softmax, schedule
from pallas_flash.arguments import Gradients, Operands, Problem
from pallas_flash.blockwise import decode
from pallas_flash.blockwise.parts import Block, Heads
from pallas_flash.blockwise.tuning import (
    Tiles,
    backward_goes_in_turn,
    decode_tiles,
    forward_goes_in_turn,
    tiles,
)
from pallas_flash.blockwise.view import View, by_head, dot, dot_t, over_rows, with_lists
from pallas_flash.blockwise.visits import known_keys
from pallas_flash.checks import sums

__all__ = ["Tiles", "backward", "decode_tiles", "forward", "tiles"]


def forward(problem: Problem, tiles: Tiles, x: Operands):
    if tiles.decode:
        return decode.forward(problem, tiles.decode, x)
    p, wide, x = (
        problem,
        sums(tiles.dtype),
        x._replace(resolved_mask=with_lists(problem, tiles, x.resolved_mask)),
    )

    def some_heads(part: Heads, outputs):
        view = View.of(p, tiles, part, x)
        zeros = lambda *shape: _zeros(x, wide, part.batch, part.heads, *shape)
        in_turn = forward_goes_in_turn(tiles, view.query.shape[:3], known_keys(p, tiles))

        def query_block(row: Block, keys, outputs):
            q = view.rows(row, view.query)
            if in_turn and row.start:
                q, outputs = lax.optimization_barrier((q, outputs))
            # it is rounded there anyway
            p_first = view.is_all(keys) and x.sinks is None and not tiles.is_wide

            def step(key: Block, seen, carry, finite=False):
                o, stats = carry
                s = view.scores(q, row, key)
                s = s if seen is None else jnp.where(seen, s, -jnp.inf)
                prob, alpha, stats = online_softmax.step_along(3, s, stats, view.unit, finite)
                prob = online_softmax.finish(prob, stats.l, p.kept) if p_first else prob
                pv = _weighted(view.dropped(prob, row, key), key.of(view.value, 2), p_first)
                return pv if alpha is None else o * alpha[..., None] + pv, stats

            first = online_softmax.start
            start = (
                zeros(q.shape[2], p.value_size),
                first(zeros(q.shape[2]), view.sinks_of(row), 1.0, p.with_top),
            )
            o, stats = view.visit(
                row, keys, step, (None, None) if x.sinks is None else start, start
            )
            o = o if p_first else online_softmax.finish(o, stats.l, p.kept)
            stats = stats._replace(m=online_softmax.natural_maximum(stats.m, view.unit))
            new = (view.by_query(a) for a in (o, *(a[..., None] for a in jax.tree.leaves(stats))))
            return tuple(row.put(out, a, 3) for out, a in zip(outputs, new, strict=True))

        rows = p.group, p.queries
        start = zeros(*rows, p.value_size), *(zeros(*rows, 1) for _ in range(p.statistics))
        o, *stats = view.each_query_block(query_block, start)
        new = _from_heads(o), *(a.reshape(part.batch, -1, p.queries) for a in stats)
        return tuple(
            part.put(out, a, axis)
            for out, a, axis in zip(outputs, new, (2, *[1] * len(stats)), strict=True)
        )

    stats = [_zeros(x, wide, p.batch, p.heads, p.queries)] * p.statistics
    o = _zeros(x, p.dtype, p.batch, p.queries, p.heads, p.value_size)
    o, *stats = _each_part(p, tiles.heads_alone, some_heads, (o, *stats))
    return o, online_softmax.SoftmaxState(*stats)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _weighted(p, v, is_all: bool):
    """p v [B, K, m, h] of weights p [B, K, m, n], rounded to the dtype of v [B, K, n, h]; so is the
    product, if it is all."""
    return dot(p.astype(v.dtype), v, v.dtype if is_all else None)


@_weighted.defjvp
def _(is_all, primals, tangents):
    """The tangents of weights are not rounded: less o dl / l little of what they sum to may be
    left."""
    (p, v), (dp, dv) = primals, tangents
    o = _weighted(p, v, is_all)
    return o, (dot(dp, v.astype(dp.dtype)) + dot(p.astype(v.dtype), dv)).astype(o.dtype)


def backward(
    problem: Problem, tiles: Tiles, x: Operands, rows: online_softmax.Apart, do, delta
) -> Gradients:
    p, wide, x = (
        problem,
        sums(tiles.dtype),
        x._replace(resolved_mask=with_lists(problem, tiles, x.resolved_mask)),
    )

    def some_heads(part: Heads, outputs):
        view = View.of(p, tiles, part, x)
        do_ = view.filled(by_head(part.of(do, 2), part.heads).astype(tiles.dtype))
        # p and ds are smaller than q, do
        few = tiles.is_wide and isinstance(tiles.block_k, int) and tiles.block_k < p.head_size
        both = [(a, None if few else jnp.moveaxis(_transposed(a), 3, 2)) for a in (view.query, do_)]
        in_turn = backward_goes_in_turn(tiles, view.query.shape[:3], known_keys(p, tiles))
        by_row = [
            a if a is None else part.of(a, 1).reshape(*do_.shape[:-1], 1) for a in (*rows, delta)
        ]

        def query_block(row: Block, keys, gradients):
            (q, q_t), (do_i, do_t) = (
                (view.rows(row, a), view.columns(row, a_t)) for a, a_t in both
            )
            if in_turn and row.start:
                q, do_i, gradients = lax.optimization_barrier((q, do_i, gradients))
            m, inverse, dlse_i, delta_i = (a if a is None else view.rows(row, a) for a in by_row)
            is_all = view.is_all(keys) and rows.dlse is not None
            if row.own is not None:
                m = jnp.where(view.of_rows(row.index[None] >= row.own), m, jnp.inf)

            def step(key: Block, seen, carry, finite=False):
                dq, dk, dv, dbias, dtables = carry
                dp = view.dropped(dot_t(do_i, key.of(view.value, 2)), row, key)
                s, tanh, back = view.scores_vjp(q, row, key)
                if seen is not None and p.soft_cap is None:
                    s, seen = jnp.where(seen, s, -jnp.inf), None
                has_sum = is_all and row.own is None  # m tells which rows are not its own
                prob = online_softmax.probabilities(s, m, inverse, view.unit, finite, has_sum)
                row_delta = online_softmax.delta(prob, dp, seen) - dlse_i if is_all else delta_i
                prob, ds = online_softmax.gradients(prob, dp, row_delta, seen, tanh)
                ds, dtables = back(ds, dtables) if back else (ds, dtables)
                low = ds.astype(q.dtype)
                dk = key.add(dk, over_rows(q, q_t, low), 3)
                dv = key.add(
                    dv, over_rows(do_i, do_t, view.dropped(prob, row, key).astype(q.dtype)), 3
                )
                dbias = dbias if dbias is None else view.add_tile(dbias, ds, row, key)
                return dq + dot(low, key.of(view.key, 2)), dk, dv, dbias, dtables

            dq, *gradients = gradients
            start = _zeros(x, wide, *q.shape), *gradients
            dq_i, *gradients = view.visit(row, keys, step, start, start)
            return row.add(dq, view.by_query(dq_i), 3), *gradients  # what is not its own is zero

        like = view.query, *(jnp.swapaxes(a, 2, 3) for a in (view.key, view.value)), view.bias
        zeros = tuple(None if a is None else _zeros(x, wide, *a.shape) for a in like)
        dq, dk, dv, dbias, dtables = view.each_query_block(query_block, (*zeros, outputs.captured))
        dk, dv = ((jnp.swapaxes(d, 2, 3) if few else _transposed(d))[:, :, None] for d in (dk, dv))
        put = lambda whole, new: part.put(whole, _from_heads(new), 2)
        if dbias is not None:
            dbias = part.add(outputs.bias, dbias.reshape(part.of(outputs.bias, 1).shape), 1)
        return Gradients(
            put(outputs.query, dq * p.scale),
            put(outputs.key, dk * (p.scale / view.fold)),
            put(outputs.value, dv),
            dbias,
            captured=dtables,
        )

    start = Gradients(
        *(jnp.zeros_like(a) for a in (x.query, x.key, x.value)),
        None if x.bias is None else _zeros(x, wide, *x.bias.shape),
        captured=tuple(_zeros(x, wide, *a.shape) for a in x.differentiable.captured),
    )
    gradients = _each_part(p, tiles.heads, some_heads, start)
    if x.bias is None:
        return gradients
    return gradients._replace(bias=gradients.bias.astype(x.bias.dtype))


def _each_part(p: Problem, at_a_time: int | None, some_heads: Callable, outputs):
    """outputs = some_heads(part, outputs) for all batch rows and heads, so many of them at a
    time."""
    B, K = p.batch, p.kv_heads
    batch, heads = B, K
    if at_a_time is not None:
        heads = schedule.divisor(K, at_a_time)
        batch = schedule.divisor(B, at_a_time // K) if heads == K else 1
    across = K // heads

    def step(n, outputs):
        return some_heads(Heads(n // across * batch, batch, n % across * heads, heads, K), outputs)

    if (batch, heads) == (B, K):
        return step(0, outputs)
    return schedule.loop(0, B // batch * across, step, outputs)


def _zeros(x: Operands, dtype, *shape):
    """Zeros that vary over the same devices as the operands do."""
    return jnp.zeros_like(x.query, shape=shape, dtype=dtype)


def _from_heads(x):
    """[B, K, G, T, H] -> [B, T, K * G, H]"""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _transposed(x):
    """[.., m, n] -> [.., n, m] of x that is made first: else XLA makes both in one loop, which
    reads far apart and is slow."""
    return jnp.swapaxes(lax.optimization_barrier(x), -1, -2)
