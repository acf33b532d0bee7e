"""The statistics of rows that the kernels of forward mode share, before and after the sums."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import logits
from pallas_flash.kernels.mosaic.registers import load, per_row
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled.online_softmax import RowLse


class TangentRows(NamedTuple):
    """Statistics of rows [B, N, whole tiles of T], or of the rows of a tile."""

    lse: Any  # in the problem's log base, less what the logits omit; +inf: P = 0
    factor: Any  # P = factor b^(s - lse); None: 1
    dlse: Any  # the sinks' part of the tangent of lse

    @classmethod
    def make(cls, p: Problem, block_q: int, rows: RowLse, dlse) -> "TangentRows":
        pads = (0, 0), (0, 0), (0, -p.queries % block_q)
        return cls(
            jnp.pad(rows.lse - logits.soft_cap_constant(p), pads, constant_values=jnp.inf),
            None if rows.factor is None else jnp.pad(rows.factor, pads),
            jnp.pad(dlse, pads),
        )

    def load(self, batch: IntLike, head: IntLike, rows: pl.Slice, layout) -> "TangentRows":
        """The statistics of the rows of a tile, from refs."""
        at = lambda ref: None if ref is None else load(ref.at[batch, head, rows], layout)
        return TangentRows(*map(at, self))

    def finish(self, p: Problem, do, dlse, o):
        """The tangents of o and lse, from the sums of a tile and its o; 0 for rows that see
        nothing, of which all may be NaN."""
        sees = self.lse < jnp.inf
        if self.factor is not None:
            do, dlse = do * per_row(self.factor, do.shape), dlse * self.factor
        dlse = jnp.where(sees, dlse + self.dlse, 0.0)
        do = (do if p.kept == 1.0 else do * (1.0 / p.kept)) - per_row(dlse, o.shape) * o
        return jnp.where(per_row(sees, do.shape), do, 0.0), dlse
