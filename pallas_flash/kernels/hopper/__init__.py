"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

import jax

from pallas_flash.arguments import Problem
from pallas_flash.kernels import device
from pallas_flash.kernels.hopper.tuning import decode_tiles, tiles

__all__ = ["decode_tiles", "tiles", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    p = problem
    if p.dtype not in ("bfloat16", "float16"):
        return f"wgmma multiplies bfloat16 and float16; got {p.dtype}"
    if p.bias is not None or p.mask is not None:
        return "it takes no bias and no dense mask"
    if p.visibility.where is not None:
        return "its loops go over intervals of blocks, which masks.Where has none of"
    if p.score is not None:
        return "its loops have no place for a score_mod"
    if max(p.head_size, p.value_size) > 256:
        return f"head sizes above 256 do not fit into registers; got H = {p.head_size}, Hv = {p.value_size}"
    if p.scale <= 0:
        return f"it takes the maximum before it multiplies by the scale, which must be above 0; got {p.scale}"
    return _why_not_here()


def _why_not_here() -> str | None:
    if device.interpret:
        return None
    if jax.__version_info__ < (0, 11, 2):
        return f"it needs jax 0.11.2 or newer; this is {jax.__version__}"
    capability = device.compute_capability()
    if capability != 9.0:
        there = f"this one has {capability}" if capability else "there is none"
        return f"it needs a GPU of compute capability 9.0 (H100, H200); {there}"
    return None
