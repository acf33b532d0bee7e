"""A block of queries, as a kernel that owns keys visits it. Scores are transposed, [keys,
queries]."""

from typing import NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.logits import Logits
from pallas_flash.kernels.mosaic.registers import ScoreTile, opaque, per_column


class QueryBlock(NamedTuple):
    """A block of queries of one head."""

    position: IntLike  # in the rings
    batch: IntLike
    head: IntLike
    first_row: IntLike
    logits: Logits

    def probabilities(self, s, at: ScoreTile, lse, masked: bool):
        """P of a tile of scores, and what `Logits.gradient` takes; lse: a ref, of its queries."""
        mask = None
        if masked:
            batch, size = opaque(self.batch), at.shape[1]
            mask = self.logits.load_mask(batch, at.first_query, size, transposed=True)
        return self.logits.probabilities(s, at, lambda: self.per_query(lse, at.shape), mask)

    def per_query(self, ref, shape: tuple[int, int]):
        """The ref's values of queries, for each score."""
        return per_column(plgpu.load(ref, layout=self.logits.layouts.column), shape)
