"""The backward of FlashAttention-3 (arXiv:2407.08608, algorithm 2), in one of two schemes; both compute P again from lse.

Deterministic: one kernel owns tiles of keys and sums dK and dV over the queries, one owns tiles of queries and sums dQ over the
keys; 7 products for a pair of blocks. Fused: the first of them also computes its part of dQ, and TMA adds it up in global memory,
in whatever order the tiles come; 5 products, and the last bits of dQ differ from run to run.
"""

import jax.numpy as jnp

from pallas_flash import online_softmax
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels import portable
from pallas_flash.kernels.hopper import backward_dkv, backward_dq, scored
from pallas_flash.kernels.hopper.tuning import AllTiles
from pallas_flash.kernels.portable import tables


def backward(problem: Problem, tiles: AllTiles, x: Operands, o, lse, do, delta):
    """dq, dk, dv in the operands' dtype and shape; no bias, so no dbias; with a score_mod the gradients of its tables, by kernels
    that XLA leaves out where nobody asks for them."""
    del o  # delta holds all that is needed of it
    p = problem
    of_score = () if x.score is None else (tables.gradients(p, portable.tiles(p).dq, x, do, lse, delta),)
    live, reached = x.visibility.live(jnp.arange(p.queries)), x.visibility.reached(jnp.arange(p.keys))
    q, do = (_where(live, a) for a in (x.query, do))
    k, v = (_where(reached, a) for a in (x.key, x.value))
    lse = lse * (online_softmax.LOG2E / p.unit) - (p.soft_cap or 0.0) * online_softmax.LOG2E
    arrays = x.seeds, scored.numbers(p, x.score), q, k, v, do, lse, delta
    if tiles.fused is not None:
        dq, dk, dv = backward_dkv.dkv(p, tiles.fused, x.visibility, *arrays, fused=True)
    else:
        dq = backward_dq.dq(p, tiles.dq, x.visibility, *arrays)
        dk, dv = backward_dkv.dkv(p, tiles.dkv, x.visibility, *arrays, fused=False)
    return dq, dk, dv, None, *of_score


def _where(rows, x):
    """x with zeros outside of `rows` [B, length]: what is not seen has p = ds = 0, and 0 * NaN is NaN."""
    return x if rows is None else jnp.where(rows[:, :, None, None], x, 0)
