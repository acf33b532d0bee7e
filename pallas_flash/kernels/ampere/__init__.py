"""FlashAttention-2 as Mosaic GPU kernels for GPUs from Ampere on: mma, ldmatrix, cp.async or TMA,
one warpgroup a program."""

from pallas_flash.arguments import Problem
from pallas_flash.kernels import device, joined, mma
from pallas_flash.kernels.ampere.tuning import tiles
from pallas_flash.kernels.mosaic import operations

__all__ = ["copies", "tiles", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return joined(_why_not_here(), operations.why_not(problem, "mma"))


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, or None."""
    return mma.copies(problem, is_decoding=tiles(problem).decode is not None)


def _why_not_here() -> str | None:
    if device.interpret:
        return None
    capability, lacking = device.compute_capability(), []
    if capability is None or capability < 8.0:
        there = f"this one has {capability}" if capability else "there is none"
        lacking.append(f"it needs an NVIDIA GPU of compute capability 8.0 or more; {there}")
    elif capability != (lowered := device.mosaic_capability()):
        lacking.append(
            f"Mosaic would lower it for compute capability {lowered}; this GPU has {capability}"
        )
    return joined(*lacking, operations.why_not_jax())
