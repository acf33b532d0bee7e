"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

from pallas_flash.arguments import Problem
from pallas_flash.decode import why_not as why_no_single_tile
from pallas_flash.kernels import device, joined
from pallas_flash.kernels.hopper.tuning import decode_tiles, padded_length, padded_size, tiles
from pallas_flash.kernels.mosaic import operations

__all__ = ["copies", "decode_tiles", "tiles", "why_no_pages", "why_not"]


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


def why_no_pages(problem: Problem, shapes: tuple, dtype: str | None) -> str | None:
    """Why the kernels cannot read pages of these shapes where they lie, or None; `dtype` is that of
    pages of 8 bits."""
    page = shapes[0][1]
    if dtype:
        return (
            f"wgmma multiplies pages as they lie, in {problem.dtype}; got {dtype}: ampere, "
            "triton and blockwise take them"
        )
    if page % 64 and 64 % page:
        return f"it takes pages of 8, 16, 32 or a multiple of 64 keys; got {page}"
    if problem.value_size > 128:
        return f"pages of values wider than 128 leave no registers; got {problem.value_size}"
    return why_no_single_tile(problem)


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, since TMA cannot read it where it lies, or
    None."""
    p, t = problem, tiles(problem)
    # the rows of decoding are few
    lengths = dict(S=p.keys) if t.decode else dict(T=p.queries, S=p.keys)
    whole = {name: (n, padded_length(n)) for name, n in lengths.items()}
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
