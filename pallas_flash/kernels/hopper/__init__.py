"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined, mma
from pallas_flash.kernels.hopper.tile_sizes import AllTiles
from pallas_flash.kernels.hopper.tuning import WIDEST, padded_length, padded_size, tiles
from pallas_flash.kernels.mosaic import operations
from pallas_flash.problem.arguments import Problem

__all__ = ["copies", "tiles", "tiles_like", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return joined(_why_not_here(), mma.why_not(problem, "wgmma", WIDEST))


def tiles_like(like: AllTiles, problem: Problem) -> AllTiles:
    """The tiles of a problem, of the same kernels as these."""
    return tiles(problem, fused=like.fused is not None)


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, since TMA cannot read it where it lies, or
    None."""
    p, t = problem, tiles(problem)
    if t.decode:
        return mma.copies(p, by_decoding=True)
    length = lambda n: (n, padded_length(n))
    width = lambda n: (n, padded_size(n, t.forward.swizzle))
    return operations.copies(
        T=length(p.queries), S=length(p.keys), H=width(p.head_size), Hv=width(p.value_size)
    )


def _why_not_here() -> str | None:
    if hardware.interpret:
        return None
    capability, lacking = hardware.compute_capability(), []
    if capability != 9.0:
        there = f"this one has {capability}" if capability else "there is none"
        lacking.append(f"it needs a GPU of compute capability 9.0 (H100, H200); {there}")
    return joined(*lacking, operations.why_not_jax())
