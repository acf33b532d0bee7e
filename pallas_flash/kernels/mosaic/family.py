"""What the families of Mosaic GPU kernels share as implementations: where they run, decoding, and
the gradients of scores."""

import abc

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import Family, decoding, joined, why_no_tiles
from pallas_flash.kernels.mosaic import elements, operations
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import PageReader
from pallas_flash.tiled.blockwise.implementation import blockwise_backward


class MosaicFamily(Family, PageReader):
    """A family of kernels in Mosaic GPU. Decoding, pages, lists of keys and the gradients of a bias
    and of arrays that a score_mod reads are kernels by mma, which all of them share."""

    is_interpretable = False
    gpus: str  # what it needs, in words
    multiplies_by: str  # the instruction

    # ---- whether it runs a problem ----

    @abc.abstractmethod
    def is_for(self, capability: float) -> bool:
        """Whether it runs on a GPU of this compute capability."""

    def is_for_this_gpu(self) -> bool:
        """Whether it runs on the GPU that a call is for."""
        capability = hardware.compute_capability()
        return capability is not None and self.is_for(capability)

    def why_not(self, problem):
        lacking = joined(
            operations.why_no_gpu(self.gpus, self.is_for),
            decoding.why_not_with_decoding(problem, self.multiplies_by),
            why_no_tiles(problem),
        )
        return lacking or self.why_no_import

    def takes_lists(self, problem):
        return decoding.takes_lists(problem)

    # ---- gradients ----

    @abc.abstractmethod
    def backward_by_kernels(
        self, problem: Problem, tiles, x: Operands, lse, do, delta
    ) -> Gradients:
        """The gradients of q, k and v."""

    def has_backward(self, tiles):
        return tiles.has_backward

    def backward(self, problem, tiles, x, lse, do, delta):
        p, rows = problem, (lse, do, delta)
        if not self.has_backward(tiles):
            return blockwise_backward(p.log_base, p, x, *rows)
        gradients = self.backward_by_kernels(p, tiles, x, *rows)
        if p.bias is None and (p.score is None or not p.score.tables):
            return gradients
        from pallas_flash.kernels.mma import score_gradients

        # XLA drops the results that nobody uses
        if (score_tiles := score_gradients.score_tiles(p)) is None:
            by_blockwise = blockwise_backward(p.log_base, p, x, *rows)
            bias, captured = by_blockwise.bias, by_blockwise.captured
        else:
            bias, captured = score_gradients.score_gradients(p, score_tiles, x, *rows)
        return gradients._replace(bias=bias, captured=captured)

    # ---- pages ----

    def why_no_pages(self, problem, pages):
        return decoding.why_no_pages(problem, pages)

    def page_tiles(self, problem, pages):
        from pallas_flash.kernels.decoding import tuning

        return tuning.decode_tiles(problem, pages.page, pages.stored)

    def forward_from_pages(self, problem, tiles, x, table, scales):
        return decoding.decode(problem, tiles, x, table, scales)

    def takes_lists_of_pages(self, problem):
        return True


def copies_for_tma(problem: Problem, swizzle: int) -> str | None:
    """What XLA pads in each call for kernels with this swizzle, since TMA cannot read it where it
    lies, or None."""
    p = problem
    length = lambda n: (n, elements.round_up(n, elements.TILE_ROWS))
    width = lambda n: (n, elements.padded_size(p.dtype, n, swizzle))
    return operations.copies(
        T=length(p.queries), S=length(p.keys), H=width(p.head_size), Hv=width(p.value_size)
    )
