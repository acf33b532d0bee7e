"""What the kernels of the Hopper backward share: their arrays, and P of a pair of blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import online_softmax
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import biased, bits, ends, ruled, seen, tile
from pallas_flash.kernels.hopper.tuning import KeyTiles, Tiles
from pallas_flash.masks.resolved_mask import ResolvedMask


class Inputs(NamedTuple):
    """The kernels' arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles
    and blocks."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    do: jax.Array  # [B, T, N, Hv]
    last: ends.Blocks | None  # of k and v
    last_queries: ends.Blocks | None  # of q and do
    # [B, N, whole tiles of T]: in the problem's unit, less what `scores_apart` leaves out; +inf: p
    # = 0
    lse: jax.Array
    delta: jax.Array  # the same shape
    seeds: jax.Array | None  # uint32 [B, N, 2], of dropout
    bias: jax.Array | None  # of biased.whole
    score: ruled.Numbers | None  # of a score_mod
    where: bits.Words | ruled.Numbers | None  # of a dense mask, or of the mask's mask_mod
    blocks: jax.Array | seen.Lists | None  # of seen.by_query_tile, or by_key_tile
    resolved_mask: ResolvedMask  # its data by rows and keys only, without the mask_mod


def inputs(
    p: Problem,
    t: Tiles | KeyTiles,
    x: Operands,
    blocks: jax.Array | seen.Lists | None,
    do,
    lse,
    delta,
) -> Inputs:
    """`blocks` are those of seen.by_query_tile, or by_key_tile."""
    query_lengths, key_lengths = x.resolved_mask.lengths
    bias = biased.whole(x.bias, t)
    score = ruled.numbers(p, x.score, t.block_q, t.block_k)
    where = bits.inputs(p, x.mask, x.resolved_mask.mask_mod, t)
    resolved_mask, _ = seen.intervals(p, x.resolved_mask, t.block_q, t.block_k)
    tail = (0, 0), (0, 0), (0, -p.queries % t.block_q)
    lse, delta = jnp.pad(lse, tail, constant_values=jnp.inf), jnp.pad(delta, tail)
    q, k, v, do = (tile.padded(a, t.swizzle) for a in (x.query, x.key, x.value, do))
    return Inputs(
        q,
        k,
        v,
        do,
        ends.blocks(key_lengths, t.block_k, k, v),
        ends.blocks(query_lengths, t.block_q, q, do),
        lse,
        delta,
        x.seeds,
        bias,
        score,
        where,
        blocks,
        resolved_mask,
    )


def probabilities(
    problem: Problem,
    s,
    lse: Callable,
    sees: Callable | None,
    keeps: Callable | None,
    natural: Callable | None,
):
    """P as dropout leaves it, and the weight and the function that `dlogits` takes, from S = Q K^T.

    lse(shape), sees(shape), which query sees which key, and keeps(shape), which weights dropout
    keeps, have the shape of S; None: every query sees every key, and all weights are kept.
    natural(s) is scored.OfHead.vjp; None: there is no bias, and no score_mod.
    """
    if natural is None:
        apart, back = online_softmax.scores_apart(s, problem.scale, problem.soft_cap), None
        p, weight = online_softmax.gradients_apart(*apart, lse(s.shape), problem.soft_cap)
    else:
        logits, back = natural(s)
        rows = lse(s.shape)
        # of rows that are not there may be NaN
        p = jnp.where(rows == jnp.inf, 0.0, online_softmax.power(logits - rows, 1.0))
        weight = p
    if sees is not None:
        seen = sees(s.shape)
        p, weight = jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)
    if keeps is not None:
        kept = keeps(s.shape)
        p, weight = jnp.where(kept, p, 0.0), jnp.where(kept, weight, -weight)
    return p, weight, back


def dlogits(problem: Problem, weight, back: Callable | None, dp, delta):
    """|weight| (dP - delta), where dropout leaves dP if the weight, which is never below 0 without
    it, is above 0; and what `back` makes of it. Without delta (None) dp is dP - delta."""
    if problem.dropped:
        ds = jnp.maximum(weight, 0.0) * dp - jnp.abs(weight) * delta
    else:
        ds = weight * (dp if delta is None else dp - delta)
    return ds if back is None else back(ds)
