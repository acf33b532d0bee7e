"""What the kernels of the Hopper backward share: their arrays, and P of a pair of blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import online_softmax
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import ends, ruled, seen, tile
from pallas_flash.kernels.hopper.tuning import KeyTiles, Tiles
from pallas_flash.masks import Visibility


class Inputs(NamedTuple):
    """The kernels' arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles and blocks."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    do: jax.Array  # [B, T, N, Hv]
    last: ends.Blocks | None  # of k and v
    last_queries: ends.Blocks | None  # of q and do
    lse: jax.Array  # [B, N, whole tiles of T]: in units of log 2, less what `scores_apart` leaves out; +inf: p = 0
    delta: jax.Array  # the same shape
    seeds: jax.Array | None  # uint32 [B, N, 2], of dropout
    score: ruled.Numbers | None  # of a score_mod
    where: ruled.Numbers | None  # of the mask's Predicate
    blocks: jax.Array | seen.Lists | None  # of seen.by_query_tile, or by_key_tile
    visibility: Visibility  # its data by rows and keys only, without the Predicate


def inputs(p: Problem, t: Tiles | KeyTiles, visibility: Visibility, blocks, seeds, score, q, k, v, do, lse, delta) -> Inputs:
    lengths, rules = visibility.lengths, (ruled.numbers(p, asked, t.block_q, t.block_k) for asked in (score, visibility.where))
    visibility, _ = seen.intervals(p, visibility, t.block_q, t.block_k)
    more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
    lse, delta = jnp.pad(lse, more, constant_values=jnp.inf), jnp.pad(delta, more)
    q, k, v, do = (tile.padded(x, t.swizzle) for x in (q, k, v, do))
    last, last_queries = ends.blocks(lengths[1], t.block_k, k, v), ends.blocks(lengths[0], t.block_q, q, do)
    return Inputs(q, k, v, do, last, last_queries, lse, delta, seeds, *rules, blocks, visibility)


def probabilities(problem: Problem, s, lse: Callable, sees: Callable | None, keeps: Callable | None, modify: Callable | None):
    """P as dropout leaves it, and the weight and the function that `dlogits` takes, from S = Q K^T.

    lse(shape), sees(shape), which query sees which key, and keeps(shape), which weights dropout keeps, have the shape of S; None:
    every query sees every key, and all weights are kept. modify(s, scale) is scored.OfHead.vjp of both of `scores_apart`; None:
    there is no score_mod.
    """
    s, scale = online_softmax.scores_apart(s, problem.scale, problem.soft_cap)
    if modify is None:
        (p, weight), back = online_softmax.gradients_apart(s, scale, lse(s.shape), problem.soft_cap), None
    else:
        (new, unit), of_score = modify(s, scale)
        rows = lse(s.shape)
        p = jnp.where(rows == jnp.inf, 0.0, jnp.exp2(new * unit - rows))  # of rows that are not there `new` may be NaN
        weight, back = p, lambda ds: online_softmax.capped_apart(of_score(ds), s, problem.soft_cap)
    if sees is not None:
        seen = sees(s.shape)
        p, weight = jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)
    if keeps is not None:
        kept = keeps(s.shape)
        p, weight = jnp.where(kept, p, 0.0), jnp.where(kept, weight, -weight)
    return p, weight, back


def dlogits(problem: Problem, weight, back: Callable | None, dp, delta):
    """|weight| (dP - delta), where dropout leaves dP if the weight, which is never below 0 without it, is above 0; and what
    `back` makes of it. Without delta (None) dp is dP - delta."""
    if problem.dropped:
        ds = jnp.maximum(weight, 0.0) * dp - jnp.abs(weight) * delta
    else:
        ds = weight * (dp if delta is None else dp - delta)
    return ds if back is None else back(ds)
