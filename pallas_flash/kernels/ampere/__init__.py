"""FlashAttention-2 as Mosaic GPU kernels by mma, for GPUs from Ampere on."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import decoding
from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, padded_length
from pallas_flash.kernels.mosaic import operations
from pallas_flash.kernels.mosaic.family import MosaicFamily
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv

# by compute capability: what multiplies by tcgen05 there
BY_TCGEN05 = dict.fromkeys((10.0, 10.3), "those of implementation='blackwell'")
BY_TCGEN05[11.0] = "cuDNN's, by jax.nn.dot_product_attention(implementation='cudnn'),"


class Ampere(MosaicFamily):
    """The implementation "ampere"; `others` are the families that are each made for one generation
    of GPUs."""

    name = "ampere"
    gpus = "an NVIDIA GPU of compute capability 8.0 or more"
    multiplies_by = "mma"

    def __init__(self, *others: MosaicFamily):
        self.others = others

    def is_for(self, capability):
        return capability >= 8.0

    def why_not_by_default(self, problem):
        if reason := super().why_not_by_default(problem):
            return reason
        own = next((family.name for family in self.others if family.is_for_this_gpu()), None)
        return own and f"this GPU has kernels of its own, {own}'s: ask for it by name"

    def import_kernels(self):
        from pallas_flash.kernels.ampere import backward, forward, tangent  # noqa: F401
        from pallas_flash.kernels.mma import score_gradients  # noqa: F401

    def tiles(self, problem):
        from pallas_flash.kernels.ampere import tuning

        return tuning.tiles(problem)

    def forward(self, problem, tiles, x):
        from pallas_flash.kernels.ampere import forward

        return forward.forward(problem, tiles, x)

    def backward_by_kernels(self, problem, tiles, x, lse, do, delta):
        from pallas_flash.kernels.ampere import backward

        return backward.backward(problem, tiles, x, lse, do, delta)

    def tangent_by_kernel(self, problem, tiles, x, dx, rows, o, dlse):
        from pallas_flash.kernels.ampere import tangent

        return tangent.tangent(problem, tiles, x, dx, rows, o, dlse)

    def copies(self, problem):
        return copies(problem, self.tiles(problem))

    def remark(self):
        faster = BY_TCGEN05.get(hardware.compute_capability())
        return faster and (
            "this GPU's tensor cores are fast by tcgen05, and these kernels multiply by mma; "
            f"{faster} use tcgen05"
        )


def copies(problem: Problem, tiles: AmpereTiles) -> str | None:
    """What XLA pads for the kernels in each call, or None."""
    p, t = problem, tiles
    if t.decode is not None:
        return decoding.copies(p)
    block_q = 1 if t.forward.copies_q else t.forward.block_q
    padded_rows = p.queries, padded_length(p.queries, block_q)
    padded = operations.copies(T=padded_rows, **decoding.padded(p))
    reason = decoding.why_not(p) if split_kv.is_decoding(p) else None
    return f"{padded}, for the forward: {reason}" if padded and reason else padded
