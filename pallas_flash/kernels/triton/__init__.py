"""FlashAttention-2 as Pallas kernels for every GPU that jax's Triton lowering compiles for."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels.pallas_call import why_no_index, why_not
from pallas_flash.kernels.triton.tuning import decode_tiles, tiles
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled.split_kv import why_not as why_no_single_tile

__all__ = ["decode_tiles", "tiles", "why_no_pages", "why_not"]


def why_no_pages(problem: Problem, pages: Pages) -> str | None:
    """Why the kernels cannot read pages in place, or None."""
    capability, dtype = hardware.compute_capability(), pages.stored
    if dtype == "float8_e4m3fn" and capability and capability < 8.9:
        return (
            "float8_e4m3fn needs an NVIDIA GPU of compute capability 8.9 or higher; this one has "
            f"{capability}: int8 does not"
        )
    unread = (why_no_index(f"pages in {dtype}", shape) for shape in pages.shapes if dtype)
    return next(filter(None, unread), None) or why_no_single_tile(problem)
