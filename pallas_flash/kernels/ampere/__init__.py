"""FlashAttention-2 as Mosaic GPU kernels for GPUs from Ampere on: mma, ldmatrix, cp.async or TMA,
one warpgroup a program."""

from pallas_flash.arguments import Problem
from pallas_flash.kernels import device, joined, mma
from pallas_flash.kernels.ampere.tuning import tiles
from pallas_flash.kernels.mosaic import operations

__all__ = ["copies", "tiles", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    p, reasons = problem, [_why_not_here()]
    if p.dtype not in ("bfloat16", "float16"):
        reasons.append(f"its products are of bfloat16 and float16; got {p.dtype}")
    reasons.append(operations.why_not(p))
    if max(p.head_size, p.value_size) > 256:
        reasons.append(
            f"head sizes above 256 do not fit into registers; got H = {p.head_size}, Hv = "
            f"{p.value_size}"
        )
    if p.scale <= 0:
        reasons.append(
            "it takes the maximum before it multiplies by the scale, which must be above 0; "
            f"got {p.scale}"
        )
    return joined(*reasons)


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
