"""FlashAttention-4 as Mosaic GPU kernels for Blackwell's datacenter GPUs: tcgen05, tensor memory,
TMA. What they do not compute, kernels/ampere does."""

import dataclasses

from pallas_flash.kernels import ampere
from pallas_flash.kernels.mosaic.family import MosaicFamily, copies_for_tma
from pallas_flash.problem.arguments import Gradients


class Blackwell(MosaicFamily):
    """The implementation "blackwell"."""

    name = "blackwell"
    gpus = "a GPU of compute capability 10.0 or 10.3 (B200, B300)"
    multiplies_by = "tcgen05"

    def is_for(self, capability):
        return capability in (10.0, 10.3)

    def import_kernels(self):
        from pallas_flash.kernels.ampere import tangent  # noqa: F401
        from pallas_flash.kernels.blackwell import backward_dkv, backward_dq, forward  # noqa: F401
        from pallas_flash.kernels.mma import score_gradients  # noqa: F401

    def tiles(self, problem):
        from pallas_flash.kernels.blackwell import tuning

        return tuning.tiles(problem)

    def variants(self, problem):
        yield from super().variants(problem)
        forward = self.tiles(self.converted(problem)).forward
        # as the self-check's larger problem has it
        if forward and forward._replace(row_tiles=2).relies_on_order:
            yield dataclasses.replace(problem, waits_for_reads=True)

    def forward(self, problem, tiles, x):
        from pallas_flash.kernels.blackwell import forward

        return forward.forward(problem, tiles, x)

    def backward_by_kernels(self, problem, tiles, x, lse, do, delta):
        """The backward of FlashAttention-4 in two kernels, deterministic. One owns tiles of queries
        and sums dQ over the keys, and delta; one owns tiles of keys and sums dK and dV over the
        queries. Both have 7 products for a pair of blocks."""
        from pallas_flash.kernels.ampere import backward
        from pallas_flash.kernels.blackwell import backward_dkv, backward_dq

        p, t = problem, tiles
        if t.dq:
            dq, delta = backward_dq.dq(p, t.dq, x, lse, do, delta)
        else:
            dq = backward.dq(p, t.by_mma.dq, x, lse, do, delta)
        if t.dkv:
            return Gradients(dq, *backward_dkv.dk_dv(p, t.dkv, x, lse, do, delta))
        return Gradients(dq, *backward.dk_dv(p, t.by_mma.dkv, x, lse, do, delta))

    def tangent_by_kernel(self, problem, tiles, x, dx, rows, o, dlse):
        from pallas_flash.kernels.ampere import tangent

        return tangent.tangent(problem, tiles, x, dx, rows, o, dlse)

    def sums_delta(self, tiles):
        return tiles.dq is not None and tiles.dq.sums_delta

    def copies(self, problem):
        t = self.tiles(problem)
        if t.forward is None:
            return ampere.copies(problem, t.by_mma)
        return copies_for_tma(problem, t.forward.swizzle)


BLACKWELL = Blackwell()
