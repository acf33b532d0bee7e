"""The deterministic backward: dQ, and dK and dV, each by tcgen05 or by mma."""

from pallas_flash.kernels.blackwell.tile_sizes import AllTiles
from pallas_flash.kernels.mma import backward as mma
from pallas_flash.problem.arguments import Gradients, Operands, Problem


def backward(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k and v; those of a bias and of what a score_mod reads have kernels of
    their own."""
    p, rows = problem, (x, lse, do, delta)
    return Gradients(mma.dq(p, tiles.by_mma.dq, *rows), *mma.dk_dv(p, tiles.by_mma.dkv, *rows))
