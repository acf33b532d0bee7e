"""The backward of FlashAttention-4 in two kernels, deterministic: one owns tiles of queries and
sums dQ over the keys, one owns tiles of keys and sums dK and dV over the queries; 7 products for a
pair of blocks. What they do not know, kernels/mma computes."""

from pallas_flash.kernels.blackwell import backward_dkv, backward_dq
from pallas_flash.kernels.blackwell.tile_sizes import AllTiles
from pallas_flash.kernels.mma import backward as mma
from pallas_flash.problem.arguments import Gradients, Operands, Problem


def backward(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k and v; those of a bias and of what a score_mod reads have kernels of
    their own."""
    p, t, rows = problem, tiles, (x, lse, do, delta)
    dq = backward_dq.dq(p, t.dq, *rows) if t.dq else mma.dq(p, t.by_mma.dq, *rows)
    sums = backward_dkv.dk_dv(p, t.dkv, *rows) if t.dkv else mma.dk_dv(p, t.by_mma.dkv, *rows)
    return Gradients(dq, *sums)
