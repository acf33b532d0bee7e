"""FlashAttention-2 as Mosaic GPU kernels for GPUs from Ampere on: mma, ldmatrix, cp.async or TMA,
one warpgroup a program."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined, mma
from pallas_flash.kernels.ampere.tuning import WIDEST, tiles
from pallas_flash.kernels.mosaic import operations
from pallas_flash.problem.arguments import Problem

__all__ = ["copies", "remark", "tiles", "why_not"]

TENSOR_MEMORY = 10.0, 10.3, 11.0  # compute capabilities


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return joined(_why_not_here(), mma.why_not(problem, "mma", WIDEST))


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, or None."""
    t = tiles(problem)
    if t.decode is not None:
        return mma.copies(problem, by_decoding=True)
    block_q = 1 if t.forward.copies_q else t.forward.block_q
    return mma.copies(problem, by_decoding=False, block_q=block_q)


def remark() -> str | None:
    """That the GPU that a call is for multiplies faster than by mma, or None."""
    if hardware.compute_capability() not in TENSOR_MEMORY:
        return None
    return (
        "this GPU's tensor cores are fast by tcgen05, and these kernels multiply by mma; cuDNN's, "
        "by jax.nn.dot_product_attention(implementation='cudnn'), use tcgen05"
    )


def _why_not_here() -> str | None:
    if hardware.interpret:
        return None
    capability, lacking = hardware.compute_capability(), []
    if capability is None or capability < 8.0:
        there = f"this one has {capability}" if capability else "there is none"
        lacking.append(f"it needs an NVIDIA GPU of compute capability 8.0 or more; {there}")
    elif capability != (lowered := hardware.mosaic_capability()):
        lacking.append(
            f"Mosaic would lower it for compute capability {lowered}; this GPU has {capability}"
        )
    return joined(*lacking, operations.why_not_jax())
