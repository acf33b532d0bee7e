"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined, mma
from pallas_flash.kernels.hopper.tile_sizes import AllTiles
from pallas_flash.kernels.mosaic import elements, operations
from pallas_flash.problem.arguments import Problem

__all__ = ["copies", "tiles", "tiles_like", "why_not"]

WIDEST = 512  # head size


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    return joined(_why_not_here(), mma.why_not_with_decoding(problem, "wgmma", WIDEST))


def tiles(problem: Problem, fused: bool | None = None) -> AllTiles:
    """`tuning.tiles`, which asks the kernels, and with them a Mosaic that a jax may lack."""
    from pallas_flash.kernels.hopper import tuning

    return tuning.tiles(problem, fused)


def tiles_like(like: AllTiles, problem: Problem) -> AllTiles:
    """The tiles of a problem, of the same kernels as these."""
    return tiles(problem, fused=like.fused is not None)


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, since TMA cannot read it where it lies, or
    None."""
    p, t = problem, tiles(problem)
    if t.decode:
        return mma.copies_for_decoding(p)
    length = lambda n: (n, elements.round_up(n, elements.TILE_ROWS))
    width = lambda n: (n, elements.padded_size(p.dtype, n, t.forward.swizzle))
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
