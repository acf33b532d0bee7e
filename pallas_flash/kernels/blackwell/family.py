"""Blackwell's kernels as an implementation."""

from pallas_flash.kernels.mma import family as mma
from pallas_flash.kernels.mosaic.family import MosaicFamily, copies_for_tma


class Blackwell(MosaicFamily):
    """FlashAttention-4 as Mosaic GPU kernels for Blackwell's datacenter GPUs: tcgen05, tensor
    memory, TMA. What they do not compute, kernels/mma does."""

    name = "blackwell"
    gpus = "a GPU of compute capability 10.0 or 10.3 (B200, B300)"
    multiplies_by = "tcgen05"

    def is_for(self, capability):
        return capability in (10.0, 10.3)

    def import_kernels(self):
        from pallas_flash.kernels.blackwell import backward, forward  # noqa: F401
        from pallas_flash.kernels.mma import score_gradients, tangent  # noqa: F401

    def tiles(self, problem):
        from pallas_flash.kernels.blackwell import tuning

        return tuning.tiles(problem)

    def forward(self, problem, tiles, x):
        from pallas_flash.kernels.blackwell import forward

        return forward.forward(problem, tiles, x)

    def backward_by_kernels(self, problem, tiles, x, lse, do, delta):
        from pallas_flash.kernels.blackwell import backward

        return backward.backward(problem, tiles, x, lse, do, delta)

    def tangent_by_kernel(self, problem, tiles, x, dx, rows, o, dlse):
        from pallas_flash.kernels.mma import tangent

        return tangent.tangent(problem, tiles, x, dx, rows, o, dlse)

    def copies(self, problem):
        t = self.tiles(problem)
        if t.forward is None:
            return mma.copies(problem, t.by_mma)
        return copies_for_tma(problem, t.forward.swizzle)


BLACKWELL = Blackwell()
