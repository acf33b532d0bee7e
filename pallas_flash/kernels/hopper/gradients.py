"""What the kernels of the Hopper backward share: their arrays, and P and dS of a pair of blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import online_softmax
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import tile
from pallas_flash.kernels.hopper.tuning import KeyTiles, Tiles
from pallas_flash.masks import Visibility


class Inputs(NamedTuple):
    """The kernels' arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles and blocks."""

    q: jax.Array  # [B, T, N, width]
    k: jax.Array  # [B, S, K, width]
    v: jax.Array  # [B, S, K, value_width]
    do: jax.Array  # [B, T, N, value_width]
    lse: jax.Array  # [B, N, whole tiles of T]: in units of log 2, less what `scores_apart` leaves out; +inf: p = 0
    delta: jax.Array  # the same shape
    blocks: jax.Array | None  # int32 [B or 1, tiles, 4]: schedule.Blocks; None where all are the same and known
    visibility: Visibility  # its data by rows and keys only


def inputs(p: Problem, t: Tiles | KeyTiles, blocks, visibility: Visibility, q, k, v, do, lse, delta) -> Inputs:
    more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
    lse, delta = jnp.pad(lse, more, constant_values=jnp.inf), jnp.pad(delta, more)
    q, k = (tile.padded(x, t.width) for x in (q, k))
    v, do = (tile.padded(x, t.value_width) for x in (v, do))
    return Inputs(q, k, v, do, lse, delta, blocks, visibility)


class Rows(NamedTuple):
    """What P and dS need to know of the queries: each a function of the shape of S."""

    lse: Callable
    delta: Callable
    sees: Callable | None  # which query sees which key; None: every query sees every key


def p_and_ds(problem: Problem, begin_s, begin_dp, shape, rows: Rows, few_registers: bool = False):
    """P and dS, 16 bits, where begin_s(acc) and begin_dp(acc) begin the products S = Q K^T and dP = dO V^T.

    dP runs under the exponentials, unless there are too few registers for both.
    """

    def probabilities(s):
        s, scale = online_softmax.scores_apart(s, problem.scale, problem.soft_cap)
        p, weight = online_softmax.gradients_apart(s, scale, rows.lse(shape), problem.soft_cap)
        if rows.sees is None:
            return p, weight
        seen = rows.sees(shape)
        return jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)

    def both(s_acc, dp_acc):
        begin_s(s_acc)
        begin_dp(dp_acc)
        p, weight = probabilities(tile.finished(s_acc, running=1))
        return p.astype(problem.dtype), weight, tile.finished(dp_acc)

    if few_registers or problem.soft_cap is not None:
        p, weight = probabilities(tile.product(begin_s, shape))
        p, dp = p.astype(problem.dtype), tile.product(begin_dp, shape)
    else:
        p, weight, dp = tile.products(both, shape, shape)
    return p, (weight * (dp - rows.delta(shape))).astype(problem.dtype)
