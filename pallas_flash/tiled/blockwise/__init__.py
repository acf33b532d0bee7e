"""FlashAttention-2 in plain JAX: query blocks outside, key blocks inside, O(T + S) memory, on any
device.

A sliding window is one loop over query blocks, each with the keys that it sees. Otherwise up to
eight static blocks are unrolled; more are loops. On a CPU a few heads go at a time, so that the
scores between two products stay in the caches. A forward of few queries behind a long cache copies
the keys of one block at a time.

A block has the rows of all query heads that share a key/value head, and its scores are [rows,
keys]. The forward's products then take their operands as they lie, and XLA gives q k^T and its
softmax to its CPU library in one call. A CPU multiplies slowly by a transposed first operand. So
the backward transposes q and do, and dk and dv come out transposed; where p and ds are smaller it
transposes these instead.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import lists, online_softmax
from pallas_flash.tiled.blockwise import decode, derivatives, softmax
from pallas_flash.tiled.blockwise.heads import (
    HeadSlice,
    by_head,
    each_heads,
    from_heads,
    take_columns,
)
from pallas_flash.tiled.blockwise.logits import dot, dot_over_rows, dot_t, transpose
from pallas_flash.tiled.blockwise.mask import with_block_mask
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, each_row
from pallas_flash.tiled.blockwise.tuning import (
    Tiles,
    decode_tiles,
    for_calls,
    tiles,
)

__all__ = [
    "Tiles",
    "backward",
    "decode_tiles",
    "for_calls",
    "forward",
    "second",
    "tangent",
    "tiles",
]


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]."""
    if tiles.walks_lists:
        return lists.forward(problem, tiles, x)
    if tiles.decode:
        return decode.forward(problem, tiles.decode, x)
    tiles = tiles.chunk or tiles
    p, wide, x = problem.without_lists, sums(tiles.dtype), with_block_mask(problem, tiles, x)

    def one_range(heads: HeadRange, outputs):
        local = HeadSlice.take(p, tiles, heads, x)
        zeros = lambda *shape: _zeros(x, wide, heads.batch, heads.heads, *shape)
        scale = local.logits.exponent_scale
        # P is rounded to 16 bits anyway, so it may as well be divided by l first
        normalise_first = local.blocks_have_whole_rows and x.sinks is None and not tiles.is_wide

        def query_block(rows: Block, key_blocks, row_inputs, _):
            (q,) = row_inputs

            def step(keys: Block, visible, rows_are_finite, carry):
                o, state = carry
                s = local.logits.forward(q, local.key_block(local.key, keys), rows, keys)
                s = s if visible is None else jnp.where(visible, s, -jnp.inf)
                prob, alpha, state = softmax.step(3, s, state, scale, rows_are_finite)
                if normalise_first:
                    prob = online_softmax.finish(prob, state.l, p.kept)
                prob = local.logits.drop(prob, rows, keys)
                pv = _weighted_sum(prob, local.key_block(local.value, keys), normalise_first)
                return pv if alpha is None else o * alpha[..., None] + pv, state

            o, sinks = zeros(q.shape[2], p.value_size), local.sink_of_rows(rows)
            start = o, online_softmax.start(zeros(q.shape[2]), LogBase.E, sinks, p.with_top)
            first = (None, None) if x.sinks is None else start
            o, state = local.each_key_block(rows, key_blocks, step, first, start)
            state = state._replace(m=softmax.scaled_maximum(state.m, scale))
            return (o, *(a[..., None] for a in jax.tree.leaves(state))), ()

        shape = p.group, p.queries
        start = zeros(*shape, p.value_size), *(zeros(*shape, 1) for _ in range(p.statistics))
        (o, *state), _ = local.each_query_block(query_block, (local.query,), Block.put, start, ())
        o = o if normalise_first else online_softmax.finish(o, state[1][..., 0], p.kept)
        state = (a.reshape(heads.batch, -1, p.queries) for a in state)
        return (
            heads.put(outputs[0], from_heads(o), 2),
            *(heads.put(out, a, 1) for out, a in zip(outputs[1:], state, strict=True)),
        )

    o, state = results_like(p, x)
    o, *state = each_heads(p, tiles.forward_heads, one_range, (o, *jax.tree.leaves(state)))
    return o, online_softmax.SoftmaxState(*state)


def results_like(p: Problem, x: Operands):
    """Zeros of the shapes and dtypes that `forward` returns."""
    rows = _zeros(x, sums(p.dtype), p.batch, p.heads, p.queries)
    o = _zeros(x, p.dtype, p.batch, p.queries, p.heads, p.value_size)
    return o, online_softmax.SoftmaxState(*[rows] * p.statistics)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _weighted_sum(p, v, is_normalised: bool):
    """p v [B, K, m, h], with the weights p [B, K, m, n] rounded to the dtype of v [B, K, n, h]. The
    product is rounded to it too, if the weights are normalised."""
    return dot(p.astype(v.dtype), v, v.dtype if is_normalised else None)


@_weighted_sum.defjvp
def _(is_normalised, primals, tangents):
    """The tangent. Tangents of weights are not rounded: the difference of their sum and o dl / l
    may be small."""
    (p, v), (dp, dv) = primals, tangents
    o = _weighted_sum(p, v, is_normalised)
    return o, (dot(dp, v.astype(dp.dtype)) + dot(p.astype(v.dtype), dv)).astype(o.dtype)


def backward(
    problem: Problem, tiles: Tiles, x: Operands, row_scale: online_softmax.RowScale, do, delta
) -> Gradients:
    """Gradients of the operands, given the RowScale and delta of each row."""
    if tiles.walks_lists:
        return lists.backward(problem, tiles, x, row_scale, do, delta)
    p, wide, x = problem.without_lists, sums(tiles.dtype), with_block_mask(problem, tiles, x)

    def one_range(heads: HeadRange, outputs):
        local = HeadSlice.take(p, tiles, heads, x)
        do_ = local.mask.zero_blind_rows(by_head(do, heads).astype(tiles.dtype))
        m, inverse_sum, dlse, delta_ = (
            a if a is None else heads.take(a, 1).reshape(*do_.shape[:-1], 1)
            for a in (*row_scale, delta)
        )
        # (P / l)^T dO = P^T (dO / l): l divides no scores. jax 0.10 would divide in slow transposes
        divides_do = tiles.is_wide and not xla_cpu.JAX_0_10
        if divides_do:
            do_, delta_ = do_ * inverse_sum, delta_ * inverse_sum
        # p and ds are smaller than q and do
        few_keys = tiles.is_wide and isinstance(tiles.block_k, int) and tiles.block_k < p.head_size
        q_t, do_t = (
            None if few_keys else jnp.moveaxis(transpose(a), 3, 2) for a in (local.query, do_)
        )
        by_row = local.query, do_, m, inverse_sum, dlse, delta_

        def query_block(rows: Block, key_blocks, row_inputs, gradients):
            q, do_i, m, inverse_sum, dlse_i, delta_i = row_inputs
            q_ti, do_ti = take_columns(rows, q_t), take_columns(rows, do_t)
            is_whole_row = local.blocks_have_whole_rows and dlse is not None
            divided = inverse_sum if divides_do else 1.0
            if rows.first_new is not None:
                is_new = each_row(rows.index[None] >= rows.first_new, p.group)
                m = jnp.where(is_new, m, jnp.inf)

            def step(keys: Block, visible, rows_are_finite, carry):
                dq, dk, dv, dbias, captured = carry
                dp = local.logits.drop(dot_t(do_i, keys.take(local.value, 2)), rows, keys)
                s, tanh, back = local.logits.vjp(q, local.key, rows, keys)
                if visible is not None and p.soft_cap is None:
                    s, visible = jnp.where(visible, s, -jnp.inf), None
                prob = softmax.probabilities(
                    s,
                    m,
                    None if divides_do else inverse_sum,
                    local.logits.exponent_scale,
                    rows_are_finite,
                    is_whole_row and rows.first_new is None,  # else m says which rows are new
                )
                delta_s = delta_i
                if is_whole_row:
                    delta_s = (softmax.delta(prob, dp, visible) - dlse_i) * divided
                prob, ds = online_softmax.gradients(prob, dp - delta_s, visible, tanh)
                ds, captured = back(ds, captured) if back else (ds, captured)
                low = ds.astype(q.dtype)
                dk = keys.add(dk, dot_over_rows(q, q_ti, low), 3)
                weights = local.logits.drop(prob, rows, keys).astype(q.dtype)
                dv = keys.add(dv, dot_over_rows(do_i, do_ti, weights), 3)
                if dbias is not None:
                    dbias = local.logits.add_bias_gradient(dbias, ds, rows, keys)
                return dq + dot(low, keys.take(local.key, 2)), dk, dv, dbias, captured

            start = _zeros(x, wide, *q.shape), *gradients
            dq, *gradients = local.each_key_block(rows, key_blocks, step, start, start)
            return (dq,), gradients

        key_t, value_t = (jnp.swapaxes(a, 2, 3) for a in (local.key, local.value))
        like = local.query, key_t, value_t, local.logits.bias
        dq, *start = (None if a is None else _zeros(x, wide, *a.shape) for a in like)
        # rows that are not new have zero
        (dq,), (dk, dv, dbias, captured) = local.each_query_block(
            query_block, by_row, Block.add, (dq,), [*start, outputs.captured]
        )
        dk, dv = (
            (jnp.swapaxes(d, 2, 3) if few_keys else transpose(d))[:, :, None] for d in (dk, dv)
        )
        put = lambda whole, new: heads.put(whole, from_heads(new), 2)
        if dbias is not None:
            shape = heads.take(outputs.bias, 1).shape
            dbias = heads.add(outputs.bias, dbias.reshape(shape), 1)
        return Gradients(
            put(outputs.query, dq * p.scale),
            put(outputs.key, dk * (p.scale / local.logits.query_factor)),
            put(outputs.value, dv),
            dbias,
            captured=captured,
        )

    start = Gradients(
        *(jnp.zeros_like(a) for a in (x.query, x.key, x.value)),
        None if x.bias is None else _zeros(x, wide, *x.bias.shape),
        captured=tuple(_zeros(x, wide, *a.shape) for a in x.differentiable.captured),
    )
    gradients = each_heads(p, tiles.heads, one_range, start)
    if x.bias is None:
        return gradients
    return gradients._replace(bias=gradients.bias.astype(x.bias.dtype))


def tangent(problem: Problem, tiles: Tiles, *args):
    """`derivatives.tangent`."""
    return (lists if tiles.walks_lists else derivatives).tangent(problem, tiles, *args)


def second(problem: Problem, tiles: Tiles, *args):
    """`derivatives.second`."""
    return (lists if tiles.walks_lists else derivatives).second(problem, tiles, *args)


def _zeros(x: Operands, dtype, *shape):
    """Zeros that vary over the same devices as the operands do."""
    return jnp.zeros_like(x.query, shape=shape, dtype=dtype)
