"""The backward of FlashAttention-3 (arXiv:2407.08608, algorithm 2), in one of two schemes; both
compute P again from lse.

Deterministic: one kernel owns tiles of keys and sums dK and dV over the queries, one owns tiles of
queries and sums dQ over the keys; 7 products for a pair of blocks. Fused: the first of them also
computes its part of dQ, and TMA adds it up in global memory, in whatever order the tiles come; 5
products, and the last bits of dQ differ from run to run.
"""

from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels import triton
from pallas_flash.kernels.hopper import backward_dkv, backward_dq, scored
from pallas_flash.kernels.hopper.tuning import AllTiles
from pallas_flash.kernels.triton import backward as portable_backward
from pallas_flash.kernels.triton import tables


def backward(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta):
    """dq, dk, dv in the operands' dtype and shape, dbias in the bias's (None without one), and with
    a score_mod the gradients of its tables; these and dbias by Triton kernels, which XLA leaves
    out where nobody asks for them."""
    p = problem
    more = lambda of: of(p, triton.tiles(p).dq, x, do, lse, delta)
    dbias = None if x.bias is None else more(portable_backward.dbias)
    of_score = () if x.score is None else (more(tables.gradients),)
    arrays = (
        x.resolved_mask,
        x.mask,
        x.seeds,
        x.bias,
        x.score,
        x.query,
        x.key,
        x.value,
        do,
        lse - scored.left_out(p),
        delta,
    )
    if tiles.fused is not None:
        dq, dk, dv = backward_dkv.dkv(p, tiles.fused, *arrays, fused=True)
    else:
        dq = backward_dq.dq(p, tiles.dq, *arrays)
        dk, dv = backward_dkv.dkv(p, tiles.dkv, *arrays, fused=False)
    return dq, dk, dv, dbias, *of_score
