"""What has a value for each row.

The forward of every family returns statistics beside o, a SoftmaxState with an l where the logits
are in base e. Kernels of gradients and of forward mode read them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import block_info, logits, tma
from pallas_flash.kernels.mosaic.registers import load, per_row
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import schedule
from pallas_flash.tiled.online_softmax import DeltaTerms, RowLse, SoftmaxState


def types(p: Problem, block_q: int) -> SoftmaxState:
    """The types of what the kernel writes: [B, N, rows of whole tiles], since where a vector ends
    Mosaic clips its store by the end of the array, not of the row."""
    length = schedule.ceil_div(p.queries, block_q) * block_q
    rows = jax.ShapeDtypeStruct((p.batch, p.heads, length), jnp.float32)
    return SoftmaxState(
        rows, rows if p.log_base is LogBase.E else None, rows if p.max_logits else None
    )


def finish(p: Problem, stats: SoftmaxState) -> SoftmaxState:
    """The statistics that a kernel writes, from the running state of a tile."""
    if p.log_base is LogBase.E:
        return stats
    m, l, top = stats
    return SoftmaxState(jnp.where(l == 0, -jnp.inf, m + jnp.log2(l)), None, top)


def results(p: Problem, written: list[jax.Array]) -> SoftmaxState:
    """The statistics of all rows, from the arrays that the kernel has written."""
    tree = jax.tree.structure(types(p, 1))
    stats = jax.tree.unflatten(tree, [x[:, :, : p.queries] for x in written])
    constant = logits.soft_cap_constant(p)
    top = None if stats.top is None else stats.top + constant
    return stats._replace(m=stats.m + constant, top=top)


def sinks(p: Problem, x: Operands) -> jax.Array | None:
    """The sinks [N], minus the constant that factored logits omit."""
    return None if x.sinks is None else x.sinks - p.log_base.to_e(logits.soft_cap_constant(p))


class ForwardInputs(NamedTuple):
    """The arrays of a forward, and what the mask comes to for rows, tiles and blocks."""

    q: Any  # as the family's kernel reads it
    keys: tma.RaggedRows  # k, v
    blocks: jax.Array | block_info.VisitedBlocks | None  # of block_info.by_query_tile
    # the same for the rows of each consumer of Hopper's; None too where they are lists
    consumer_blocks: jax.Array | None
    sinks: jax.Array | None  # [N], less what the logits omit
    logits: logits.Arrays

    @classmethod
    def make(cls, p: Problem, t, x: Operands, q, keys: tma.RaggedRows) -> "ForwardInputs":
        blocks = block_info.by_query_tile(p, x, t.block_q, t.block_k)
        return cls(q, keys, blocks, None, sinks(p, x), logits.arrays(p, x, t.tiling))

    @classmethod
    def by_tma(cls, p: Problem, t, x: Operands) -> "ForwardInputs":
        """`make`, with arrays that TMA can read."""
        _, key_lengths = x.resolved_mask.lengths
        keys = tma.padded_rows([x.key, x.value], t.block_k, key_lengths, t.swizzle)
        return cls.make(p, t, x, tma.pad(x.query, t.swizzle), keys)


class GradientInputs(NamedTuple):
    """The arrays of a kernel, and what the mask comes to for rows, tiles and blocks."""

    queries: tma.RaggedRows  # q, do
    keys: tma.RaggedRows  # k, v
    # [B, N, whole tiles of T]: in the problem's log base, less what the logits omit; +inf: P = 0
    lse: jax.Array
    delta: jax.Array | DeltaTerms  # the same; the terms where the kernel sums delta
    # of block_info.by_query_tile, or by_key_tile
    blocks: jax.Array | block_info.VisitedBlocks | None
    logits: logits.Arrays

    @classmethod
    def make(
        cls, rows: Callable, p: Problem, t, x: Operands, lse, do, delta, blocks=None
    ) -> "GradientInputs":
        """rows(arrays, widths, block size, lengths or None): a family's RaggedRows. `blocks`: the
        function of block_info, by default for the tiles that a program owns."""
        by_tile = block_info.by_key_tile if t.tiling.transposed else block_info.by_query_tile
        blocks = (blocks or by_tile)(p, x, t.block_q, t.block_k)
        pad = lambda x, value: jnp.pad(
            x, ((0, 0), (0, 0), (0, -x.shape[2] % t.block_q)), constant_values=value
        )
        widths, (query_lengths, key_lengths) = (t.width, t.value_width), x.resolved_mask.lengths
        return cls(
            rows([x.query, do], widths, t.block_q, query_lengths),
            rows([x.key, x.value], widths, t.block_k, key_lengths),
            pad(lse - logits.soft_cap_constant(p), jnp.inf),
            pad(delta, 0.0),
            blocks,
            logits.arrays(p, x, t.tiling),
        )

    @classmethod
    def by_tma(cls, p: Problem, t, *args) -> "GradientInputs":
        """`make`, with arrays that TMA can read."""
        rows = lambda arrays, widths, *of: tma.padded_rows(arrays, *of, t.swizzle)
        return cls.make(rows, p, t, *args)


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
