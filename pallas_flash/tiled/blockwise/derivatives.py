"""Forward mode and second derivatives of blockwise, in O(T + S) memory: the tangent of its forward,
and the gradient of that tangent.

With the log-sum-exp of its row known, each block of scores adds to a sum:

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,

where dS is jax's own tangent of a block's logits. For cotangents dO' and dlse' of both, with
dP = dO' V^T and delta = rowsum(O dO') - dlse', these are also one number,

    <dO', dO> + <dlse', dlse> = sum_ij P dS (dP - delta) + P (dO' dV^T),

which changes by a constant if a constant of each row is subtracted from dS. The constant here is
dlse: so little cancels, and O and delta need no derivative. JAX differentiates the rest one block
at a time. The number is also the product of a gradient with tangents, so its gradient serves as the
transpose of all second derivatives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.heads import HeadSlice, by_head, each_heads, from_heads, take_rows
from pallas_flash.tiled.blockwise.logits import dot, dot_t
from pallas_flash.tiled.blockwise.mask import dense_tiles, with_block_mask
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, each_row
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.online_softmax import RowScale


class Slices(NamedTuple):
    """The differentiable arrays of a slice of the heads, or of a block of its rows and keys; or
    their tangents, where None is zero."""

    query: jax.Array | None  # [B, K, G, T, H], or in a block [B, K, rows, H]; times query_factor
    key: jax.Array | None  # [B, K, S, H]
    value: jax.Array | None  # [B, K, S, Hv]
    bias: jax.Array | None  # [B | 1, K | 1, G | 1, T | 1, S | 1]
    captured: tuple

    @classmethod
    def take(cls, local: HeadSlice, heads: HeadRange, x: Gradients, dtype) -> "Slices":
        by_key = lambda a: local.mask.zero_hidden_keys(by_head(a, heads)[:, :, 0].astype(dtype))
        query = x.query
        if query is not None:
            query = by_head(query, heads).astype(dtype) * local.logits.query_factor
            query = local.mask.zero_blind_rows(query)
        key, value = (None if a is None else by_key(a) for a in (x.key, x.value))
        bias = None if x.bias is None else dense_tiles(x.bias, heads).astype(dtype)
        return cls(query, key, value, bias, x.captured)

    def block(self, rows: Block, keys: Block) -> "Slices":
        key, value = (None if a is None else keys.take(a, 2) for a in (self.key, self.value))
        query = None if self.query is None else take_rows(rows, self.query)
        bias = None if self.bias is None else keys.take(rows.take(self.bias, 3), 4)
        return Slices(query, key, value, bias, self.captured)

    @property
    def logit_operands(self) -> list:
        return [self.query, self.key, self.bias, *self.captured]


def _by_row(p: Problem, heads: HeadRange, *arrays) -> list:
    """[B, N, T] -> [B, K, G, T, 1] of a range of heads"""
    shape = heads.batch, heads.heads, -1, p.queries, 1
    return [heads.take(a, 1).reshape(shape) for a in arrays]


class BlockTerms(NamedTuple):
    """The terms that a block of scores adds to sums over its rows."""

    local: HeadSlice
    rows: Block
    keys: Block
    visible: jax.Array | None
    rows_are_finite: bool

    def probabilities(self, x: Slices, dx: Slices, m, inverse_sum):
        """P, and P times the tangent of the logits, None where that is zero."""

        def scores(query, key, bias, *captured):
            logits = self.local.logits.with_arrays(bias, captured)
            s = logits.forward(query, key, self.rows, self.keys, self.visible)
            return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

        scale, is_finite = self.local.logits.exponent_scale, self.rows_are_finite
        logit_operands = x.logit_operands, dx.logit_operands
        return softmax.with_tangent(scores, *logit_operands, m, inverse_sum, scale, is_finite)

    def drop(self, weights):
        return self.local.logits.drop(weights, self.rows, self.keys)


def tangent(
    problem: Problem, tiles: Tiles, x: Operands, dx: Gradients, row_scale: RowScale, o, dlse
):
    """The tangents of o [B, T, N, Hv] and lse [B, N, T] along the tangents dx (None: zero); `dlse`
    is the sinks' part of that of lse."""
    p, wide, x = problem.without_lists, sums(tiles.dtype), with_block_mask(problem, tiles, x)
    # where dlse o nearly cancels do, an o rounded to 16 bits would leave few digits
    is_wide = o.dtype == wide

    def one_range(heads: HeadRange, outputs):
        local = HeadSlice.take(p, tiles, heads, x)
        arrays, tangents = (Slices.take(local, heads, a, wide) for a in (x.differentiable, dx))
        row = _by_row(p, heads, row_scale.m, row_scale.inverse_sum, dlse)
        by_row = *row, by_head(o, heads)

        def query_block(rows: Block, key_blocks, row_values, _):
            m, inverse_sum, dlse_i, o_i = row_values

            def step(keys: Block, visible, rows_are_finite, carry):
                do, dlse, o = carry
                terms = BlockTerms(local, rows, keys, visible, rows_are_finite)
                block, along = arrays.block(rows, keys), tangents.block(rows, keys)
                prob, weights = terms.probabilities(block, along, m, inverse_sum)
                if weights is not None:
                    dlse = dlse + jnp.sum(weights, -1, keepdims=True)
                    do = do + dot(terms.drop(weights), block.value)
                prob = terms.drop(prob)
                if along.value is not None:
                    do = do + dot(prob, along.value)
                return do, dlse, o if is_wide else o + dot(prob, block.value)

            zeros = jnp.zeros_like(o_i, dtype=wide)
            start = zeros, dlse_i, o_i if is_wide else zeros
            do, dlse, o = local.each_key_block(rows, key_blocks, step, start, start)
            o = o if is_wide else o / p.kept
            return (do / p.kept - dlse * o, dlse), ()

        start = tuple(jnp.zeros_like(a, dtype=wide) for a in (by_row[3], by_row[2]))
        (do, dlse_), _ = local.each_query_block(query_block, by_row, Block.put, start, ())
        dlse_ = dlse_.reshape(heads.batch, -1, p.queries)
        return heads.put(outputs[0], from_heads(do), 2), heads.put(outputs[1], dlse_, 1)

    start = jnp.zeros_like(o), jnp.zeros_like(dlse)
    return each_heads(p, tiles.heads, one_range, start)


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
    """The gradient of sum P (dS - dlse) (dP - delta) + P (do dV^T) with respect to the operands and
    to row_scale.inverse_sum. dS and dV come of the tangents dx (None: zero); do is divided by the
    probability that dropout keeps a weight."""
    p, wide, x = problem.without_lists, sums(tiles.dtype), with_block_mask(problem, tiles, x)

    def one_range(heads: HeadRange, outputs):
        local = HeadSlice.take(p, tiles, heads, x)
        arrays, tangents = (Slices.take(local, heads, a, wide) for a in (x.differentiable, dx))
        row = _by_row(p, heads, row_scale.m, row_scale.inverse_sum, delta, dlse)
        by_row = *row, local.mask.zero_blind_rows(by_head(do, heads).astype(wide))

        def query_block(rows: Block, key_blocks, row_values, whole):
            m, inverse_sum, delta_i, dlse_i, do_i = row_values
            if rows.first_new is not None:
                is_new = each_row(rows.index[None] >= rows.first_new, p.group)
                m = jnp.where(is_new, m, jnp.inf)

            def step(keys: Block, visible, rows_are_finite, carry):
                dq, d_inverse_sum, dk, dv, dbias, captured = carry
                terms = BlockTerms(local, rows, keys, visible, rows_are_finite)
                along = tangents.block(rows, keys)

                def product(block: Slices, inverse_sum):
                    prob, weights = terms.probabilities(block, along, m, inverse_sum)
                    # a tangent of the sinks alone is one of lse, but none of the logits
                    weights = (0.0 if weights is None else weights) - prob * dlse_i
                    dp = terms.drop(dot_t(do_i, block.value))
                    total = jnp.sum(weights * (dp - delta_i))
                    if along.value is not None:
                        total += jnp.sum(terms.drop(prob) * dot_t(do_i, along.value))
                    return total

                block = arrays.block(rows, keys)
                dblock, by_sum = jax.grad(product, argnums=(0, 1))(block, inverse_sum)
                if dbias is not None:
                    tile = keys.add(rows.take(dbias, 3), dblock.bias, 4)
                    dbias = rows.put(dbias, tile, 3)
                return (
                    dq + dblock.query,
                    d_inverse_sum + by_sum,
                    keys.add(dk, dblock.key, 2),
                    keys.add(dv, dblock.value, 2),
                    dbias,
                    tuple(a + b for a, b in zip(captured, dblock.captured, strict=True)),
                )

            like = take_rows(rows, arrays.query), m
            start = *(jnp.zeros_like(a, dtype=wide) for a in like), *whole
            dq, d_inverse_sum, *whole = local.each_key_block(rows, key_blocks, step, start, start)
            return (dq, d_inverse_sum), whole

        gradients, d_inverse_sums = outputs
        like = arrays.query, row[1], arrays.key, arrays.value, arrays.bias
        dq, d_inverse_sum, *zeros = (None if a is None else jnp.zeros_like(a) for a in like)
        # rows that are not new have zero
        (dq, d_inverse_sum), (dk, dv, dbias, captured) = local.each_query_block(
            query_block, by_row, Block.add, (dq, d_inverse_sum), [*zeros, gradients.captured]
        )
        if dbias is not None:
            shape = heads.take(gradients.bias, 1).shape
            dbias = heads.add(gradients.bias, dbias.reshape(shape), 1)
        put = lambda whole, part: heads.put(whole, from_heads(part), 2)
        gradients = Gradients(
            put(gradients.query, dq * local.logits.query_factor),
            put(gradients.key, dk[:, :, None]),
            put(gradients.value, dv[:, :, None]),
            dbias,
            captured=captured,
        )
        return gradients, heads.put(
            d_inverse_sums, d_inverse_sum.reshape(heads.batch, -1, p.queries), 1
        )

    gradients = jax.tree.map(
        lambda a: jnp.zeros_like(a, dtype=wide), x.differentiable._replace(sinks=None)
    )
    return each_heads(p, tiles.heads, one_range, (gradients, jnp.zeros_like(delta)))
