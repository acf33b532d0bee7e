"""The backward of FlashAttention-3 (arXiv:2407.08608, algorithm 2), in one of two schemes; both
compute P again from lse.

Deterministic: one kernel owns tiles of keys and sums dK and dV over the queries, one owns tiles of
queries and sums dQ over the keys; 7 products for a pair of blocks. Where registers do not hold dK
and dV together each has a kernel: 8 products. Fused: the first of them also computes its share of
dQ, and TMA adds it up in global memory, in whatever order the tiles come; 5 products, and the last
bits of dQ differ from run to run. Where heads share keys, several programs may divide
these heads, and dK and dV are added up in the same way.
"""

from pallas_flash.kernels.hopper import backward_dkv, backward_dq
from pallas_flash.kernels.hopper.tile_sizes import AllTiles
from pallas_flash.problem.arguments import Gradients, Operands, Problem


def backward(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k and v; a bias and what a score_mod reads have kernels of their own."""
    gradients = {}
    if tiles.dq is not None:
        gradients["dq"], delta = backward_dq.dq(problem, tiles.dq, x, lse, do, delta)
    for t in filter(None, (tiles.fused, tiles.dkv, tiles.dk, tiles.dv)):
        gradients |= backward_dkv.dkv(problem, t, x, lse, do, delta)
    return Gradients(gradients["dq"], gradients["dk"], gradients["dv"])
