"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

from pallas_flash.kernels import decoding
from pallas_flash.kernels.mosaic.family import MosaicFamily, copies_for_tma
from pallas_flash.kernels.triton import TRITON
from pallas_flash.problem.arguments import Gradients

FEW = 64  # queries


class Hopper(MosaicFamily):
    """The implementation "hopper"."""

    name = "hopper"
    gpus = "a GPU of compute capability 9.0 (H100, H200)"
    multiplies_by = "wgmma"

    def is_for(self, capability):
        return capability == 9.0

    def import_kernels(self):
        from pallas_flash.kernels.hopper import (  # noqa: F401
            backward_dkv,
            backward_dq,
            forward,
            tangent,
        )
        from pallas_flash.kernels.mma import score_gradients  # noqa: F401

    def why_not_by_default(self, problem):
        return super().why_not_by_default(problem) or self._why_few_queries(problem)

    def _why_few_queries(self, problem) -> str | None:
        """Why few queries with a dense mask do not run by default: Triton's kernels, where jax has
        them, read the mask unpacked."""
        p = problem
        if p.mask is None or not isinstance(p.queries, int) or p.queries > FEW:
            return None
        if TRITON.why_no_import:
            return None
        return f"packing a dense mask does not pay off for only {p.queries} queries"

    def tiles(self, problem):
        from pallas_flash.kernels.hopper import tuning

        return tuning.tiles(problem)

    def for_same_kernels(self, tiles, problem):
        from pallas_flash.kernels.hopper import tuning

        return tuning.tiles(problem, fused=tiles.fused is not None)

    def forward(self, problem, tiles, x):
        from pallas_flash.kernels.hopper import forward

        return forward.forward(problem, tiles, x)

    def backward_by_kernels(self, problem, tiles, x, lse, do, delta):
        """The backward of FlashAttention-3 (arXiv:2407.08608, algorithm 2), in one of two schemes;
        both compute P again from lse.

        Deterministic: one kernel owns tiles of keys and sums dK and dV over the queries, one owns
        tiles of queries and sums dQ over the keys; 7 products for a pair of blocks. Where registers
        do not hold dK and dV together each has a kernel: 8 products. Fused: the first of them also
        computes its share of dQ, and TMA adds it up in global memory, in whatever order the tiles
        come. It has 5 products, and the last bits of dQ differ from run to run. Where heads share
        keys, several programs may divide these heads, and dK and dV are added up in the same way.
        """
        from pallas_flash.kernels.hopper import backward_dkv, backward_dq

        gradients = {}
        if tiles.dq is not None:
            gradients["dq"], delta = backward_dq.dq(problem, tiles.dq, x, lse, do, delta)
        for t in filter(None, (tiles.fused, tiles.dkv, tiles.dk, tiles.dv)):
            gradients |= backward_dkv.dkv(problem, t, x, lse, do, delta)
        return Gradients(gradients["dq"], gradients["dk"], gradients["dv"])

    def tangent_by_kernel(self, problem, tiles, x, dx, rows, o, dlse):
        from pallas_flash.kernels.hopper import tangent

        return tangent.tangent(problem, tiles, x, dx, rows, o, dlse)

    def sums_delta(self, tiles):
        return tiles.dq is not None and tiles.dq.sums_delta

    def copies(self, problem):
        t = self.tiles(problem)
        if t.decode:
            return decoding.copies(problem)
        return copies_for_tma(problem, t.forward.swizzle)


HOPPER = Hopper()
