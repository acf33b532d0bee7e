"""FlashAttention-2 as Pallas kernels for every GPU that jax's Triton lowering compiles for."""

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import Family, pallas_call, why_no_tiles
from pallas_flash.kernels.triton import tuning
from pallas_flash.problem.implementation import PageReader
from pallas_flash.tiled import split_kv


class Triton(Family, PageReader):
    """The implementation "triton"."""

    name = "triton"

    def why_not(self, problem):
        return why_no_tiles(problem) or pallas_call.why_not(problem) or self.why_no_import

    def import_kernels(self):
        from pallas_flash.kernels.pallas_call import by_triton  # noqa: F401
        from pallas_flash.kernels.triton import backward, forward  # noqa: F401

    def tiles(self, problem):
        return tuning.tiles(problem)

    def forward(self, problem, tiles, x):
        from pallas_flash.kernels.triton import forward

        return forward.forward(problem, tiles, x)

    def backward(self, problem, tiles, x, lse, do, delta):
        from pallas_flash.kernels.triton import backward

        return backward.backward(problem, tiles, x, lse, do, delta)

    def tangent_by_kernel(self, problem, tiles, x, dx, rows, o, dlse):
        from pallas_flash.kernels.triton import forward

        return forward.tangent(problem, tiles, x, dx, rows, o, dlse)

    # ---- pages ----

    def why_no_pages(self, problem, pages):
        capability, dtype = hardware.compute_capability(), pages.stored
        if dtype == "float8_e4m3fn" and capability and capability < 8.9:
            return (
                "float8_e4m3fn needs an NVIDIA GPU of compute capability 8.9 or higher; this one "
                f"has {capability}: int8 does not"
            )
        why_no_index = lambda shape: pallas_call.why_no_index(f"pages in {dtype}", shape)
        unread = filter(None, map(why_no_index, pages.shapes if dtype else ()))
        return next(unread, None) or split_kv.why_not(problem)

    def page_tiles(self, problem, pages):
        return tuning.decode_tiles(problem)

    def forward_from_pages(self, problem, tiles, x, table, scales):
        from pallas_flash.kernels.triton import forward

        return forward.decode(problem, tiles, x, table, scales)


TRITON = Triton()
