"""FlashAttention-4 as Mosaic GPU kernels for Blackwell's datacenter GPUs: tcgen05, tensor memory,
TMA. What they do not compute, kernels/mma does."""

from pallas_flash.kernels import joined, mma
from pallas_flash.kernels.blackwell.tile_sizes import AllTiles
from pallas_flash.kernels.mosaic import elements, operations
from pallas_flash.problem.arguments import Problem

__all__ = ["copies", "tiles", "why_not"]

CAPABILITIES = 10.0, 10.3


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    no_gpu = operations.why_no_gpu(
        "a GPU of compute capability 10.0 or 10.3 (B200, B300)", CAPABILITIES.__contains__
    )
    return joined(no_gpu, mma.why_not_with_decoding(problem, "tcgen05", mma.WIDEST))


def tiles(problem: Problem) -> AllTiles:
    """`tuning.tiles`, which asks the kernels, and with them a Mosaic that a jax may lack."""
    from pallas_flash.kernels.blackwell import tuning

    return tuning.tiles(problem)


def copies(problem: Problem) -> str | None:
    """What XLA pads for the kernels in each call, since TMA cannot read it where it lies, or
    None."""
    p, t = problem, tiles(problem)
    if t.forward is None:
        return mma.copies(p)
    length = lambda n: (n, elements.round_up(n, elements.TILE_ROWS))
    width = lambda n: (n, elements.padded_size(p.dtype, n, t.forward.swizzle))
    return operations.copies(
        T=length(p.queries), S=length(p.keys), H=width(p.head_size), Hv=width(p.value_size)
    )
