"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

from pallas_flash.arguments import Problem
from pallas_flash.kernels import device, joined, mma
from pallas_flash.kernels.hopper.tuning import padded_length, padded_size, tiles
from pallas_flash.kernels.mosaic import operations

__all__ = ["copies", "tiles", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    p, reasons = problem, [_why_not_here()]
    if p.dtype not in ("bfloat16", "float16"):
        reasons.append(f"wgmma multiplies bfloat16 and float16; got {p.dtype}")
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
    """What XLA pads for the kernels in each call, since TMA cannot read it where it lies, or
    None."""
    p, t = problem, tiles(problem)
    if t.decode:
        return mma.copies(p, is_decoding=True)
    whole = {name: (n, padded_length(n)) for name, n in dict(T=p.queries, S=p.keys).items()}
    whole |= {
        name: (n, padded_size(n, t.forward.swizzle))
        for name, n in dict(H=p.head_size, Hv=p.value_size).items()
    }
    padded = [f"{name} from {n} to {to}" for name, (n, to) in whole.items() if n != to]
    return (
        f"XLA pads arrays in each call, {', '.join(padded)}, and cuts the results"
        if padded
        else None
    )


def _why_not_here() -> str | None:
    if device.interpret:
        return None
    capability, lacking = device.compute_capability(), []
    if capability != 9.0:
        there = f"this one has {capability}" if capability else "there is none"
        lacking.append(f"it needs a GPU of compute capability 9.0 (H100, H200); {there}")
    return joined(*lacking, operations.why_not_jax())
