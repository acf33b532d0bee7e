"""Hopper's kernels as an implementation."""

from pallas_flash.kernels.mma import decoding
from pallas_flash.kernels.mosaic.family import MosaicFamily, copies_for_tma
from pallas_flash.kernels.triton.family import TRITON

FEW = 64  # queries


class Hopper(MosaicFamily):
    """FlashAttention-3 as Mosaic GPU kernels: wgmma, TMA, warpgroups with roles."""

    name = "hopper"
    gpus = "a GPU of compute capability 9.0 (H100, H200)"
    multiplies_by = "wgmma"

    def is_for(self, capability):
        return capability == 9.0

    def import_kernels(self):
        from pallas_flash.kernels.hopper import backward, forward, tangent  # noqa: F401
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
        from pallas_flash.kernels.hopper import backward

        return backward.backward(problem, tiles, x, lse, do, delta)

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
