"""From S = Q K^T to logits and weights, and back: scale, bias, soft cap, score_mod, mask, dropout.

Logits are in base 2 and factored (`online_softmax.factored_scores`). With a bias or a score_mod,
which may bring them to the ends of float32, they are in base e, and so is all that is made of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import block_info, dropout, mods
from pallas_flash.kernels.mosaic.block_info import HeadBits, PackedMask, TileMask, load_mask, pack
from pallas_flash.kernels.mosaic.elements import Tiling
from pallas_flash.kernels.mosaic.registers import (
    Layouts,
    ScoreTile,
    load,
    load_rows,
    opaque,
    per_column,
    per_row,
)
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LN2, LOG2E, LogBase
from pallas_flash.tiled import online_softmax


def soft_cap_constant(p: Problem) -> float:
    """The constant of a soft cap that factored logits omit."""
    return 0.0 if p.log_base is LogBase.E or p.soft_cap is None else p.soft_cap * LOG2E


def pad_bias(bias: jax.Array | None, t: Tiling) -> jax.Array | None:
    """A bias [B or 1, N or 1, T or 1, S or 1] as the scores' rows and columns have it, whole tiles
    of them. None without one."""
    if bias is None:
        return None
    pads = (
        (0, 0 if n == 1 else -n % size)
        for n, size in zip(bias.shape[2:], (t.block_q, t.block_k), strict=True)
    )
    x = jnp.pad(bias, ((0, 0), (0, 0), *pads))
    return x.swapaxes(2, 3) if t.transposed else x


class HeadBias(NamedTuple):
    """The bias of one batch row and head, a ref."""

    array: jax.Array
    batch: IntLike
    head: IntLike

    def load(self, tile: ScoreTile):
        """The bias of a tile of scores, float32."""
        _, _, rows, columns = self.array.shape
        part = [
            0 if size == 1 else pl.ds(start, n)
            for size, start, n in zip((rows, columns), tile.first, tile.shape, strict=True)
        ]
        at = self.batch, self.head, *part
        if rows == columns == 1:
            return self.array[at].astype(jnp.float32)
        ref, layouts = self.array.at[at], tile.layouts
        if rows == 1:
            return per_column(load(ref, layouts.column).astype(jnp.float32), tile.shape)
        if columns == 1:
            return per_row(load(ref, layouts.row).astype(jnp.float32), tile.shape)
        x = load_rows(ref) if layouts.row_in_thread else load(ref, layouts.tile)
        return x.astype(jnp.float32)


def head_bias(x, batch: IntLike, head: IntLike) -> HeadBias | None:
    """The bias of a head, from a ref of what `pad_bias` made; None without one."""
    return None if x is None else HeadBias(x, *block_info.broadcast_index(x, batch, head))


class Arrays(NamedTuple):
    """The arrays that kernels read for logits in global memory."""

    seeds: jax.Array | None  # uint32 [B, N, 2], of dropout
    bias: jax.Array | None  # of pad_bias
    score_mod: mods.Arrays | None
    mask: PackedMask | mods.Arrays | None  # a dense mask, or a mask_mod
    resolved_mask: ResolvedMask  # its data by rows and keys only, without the mask_mod


def arrays(p: Problem, x: Operands, t: Tiling) -> Arrays:
    if x.mask is None:
        mask = mods.arrays(p, x.resolved_mask.mask_mod, t)
    else:
        mask = pack(x.mask, t)
    resolved_mask, _ = block_info.intervals(p, x.resolved_mask, t.block_q, t.block_k)
    score_mod = mods.arrays(p, x.score, t)
    return Arrays(x.seeds, pad_bias(x.bias, t), score_mod, mask, resolved_mask)


class WeightedTangent(NamedTuple):
    """P times the tangent of the logits of a tile."""

    before_dropout: Any
    after_dropout: Any


class Logits(NamedTuple):
    """The logits of a batch row and head."""

    problem: Problem
    layouts: Layouts
    resolved_mask: ResolvedMask
    mask: HeadBits | mods.HeadMod | None
    bias: HeadBias | None
    score_mod: mods.HeadMod | None
    dropout: dropout.Dropout | None
    exp2: Callable = jnp.exp2  # of `probabilities`, where logits are in base 2
    # the number of what the score_mod reads whose cotangent `gradient` gives in place of dS
    read: int | None = None

    def tile(self, first_query: IntLike, first_key: IntLike, shape, transposed: bool = False):
        return ScoreTile(self.layouts, first_query, first_key, shape, transposed)

    def load_mask(
        self, batch: IntLike, first_query: IntLike, size: int, transposed=False
    ) -> TileMask:
        """The mask of `size` queries; transposed: they are the columns."""
        return load_mask(
            self.layouts, self.resolved_mask, batch, first_query, size, self.mask, transposed
        )

    @property
    def mask_has_data(self) -> bool:
        return self.resolved_mask.has_data or isinstance(self.mask, mods.HeadMod)

    def modify(self, s, tile: ScoreTile):
        """The logits, and a factor that they omit (None: 1)."""
        if self.problem.log_base is LogBase.E:
            return self._vjp(s, tile)[0], None
        return online_softmax.factored_scores(s, self.problem.scale, self.problem.soft_cap)

    def drop(self, p, tile: ScoreTile):
        """P with 0 where dropout drops a weight."""
        return p if self.dropout is None else self.dropout.drop(p, tile)

    def probabilities(self, s, tile: ScoreTile, lse: Callable, mask: TileMask | None):
        """P as dropout leaves it, and what `gradient` takes: the weight, and the function `back`.

        lse() has the shape of S: in the problem's log base, less the `soft_cap_constant`; +inf: P
        = 0.
        """
        p, soft_cap, back = self.problem, self.problem.soft_cap, None
        if p.log_base is LogBase.E:
            logits, back = self._vjp(s, tile)
            rows = lse()
            # of rows that are not there may be NaN
            weight = jnp.where(rows == jnp.inf, 0.0, p.log_base.power(logits - rows))
            prob = weight
        else:
            factored = online_softmax.factored_scores(s, p.scale, soft_cap)
            prob, weight = online_softmax.factored_gradients(*factored, lse(), soft_cap, self.exp2)
        if mask is not None:
            select = mask.select(tile)
            prob, weight = select(prob, 0.0), select(weight, 0.0)
        if self.dropout is not None:
            prob, weight = self.dropout.mark(prob, weight, tile)
        return prob, weight, back

    def gradient(self, weight, back: Callable | None, dp, delta):
        """dS: `back` of |weight| (dP - delta), where dropout leaves dP if the weight, which is
        never below 0 without it, is above 0. Without delta (None) dp is dP - delta."""
        if self.problem.dropped:
            ds = dropout.gradient(weight, dp, delta)
        else:
            ds = weight * (dp if delta is None else dp - delta)
        return ds if back is None else back(ds)

    def tangent(self, weight, back: Callable | None, ds, bias) -> "WeightedTangent":
        """P times the tangent of the logits, from the tangents of Q K^T and the bias (None: 0)."""
        ds = None if ds is None else ds * self.problem.scale
        if bias is not None:
            ds = bias if ds is None else ds + bias
        x = (jnp.abs(weight) if self.problem.dropped else weight) * ds
        x = x if back is None else back(x)
        return WeightedTangent(x, jnp.where(weight > 0, x, 0.0) if self.problem.dropped else x)

    def _vjp(self, s, tile: ScoreTile):
        """The logits in base e, and the function from their cotangent to that of scale * S + bias;
        None: both cotangents are equal."""
        x, cap = s * self.problem.scale, self.problem.soft_cap
        if self.bias is not None:
            x = x + self.bias.load(tile)
        if cap is None:
            return (x, None) if self.score_mod is None else self._modified(x, tile)
        factored, times = online_softmax.factored_scores(x, 1.0, cap)
        x = factored * (times * LN2) + cap
        through_cap = lambda ds: online_softmax.factored_soft_cap_vjp(ds, factored, cap)
        if self.score_mod is None:
            return x, through_cap
        x, back = self._modified(x, tile)
        if self.read is not None:
            return x, back
        return x, lambda ds: through_cap(back(ds))

    def _modified(self, logits, tile: ScoreTile):
        """The logits that the score_mod returns, and the function from their cotangent to that of
        the logits it takes, or of the value that read number `read` has for each pair.

        Where the cotangent is 0, as of a pair that a mask hides, the result is 0: the score_mod may
        have no derivative there.
        """
        evaluate, given, n = self.score_mod.bound.evaluate, [], self.read

        def both(values, b, h, query, key, s, ds):
            if n is None:
                f, x = lambda s: evaluate(values, b, h, query, key, s), s
            else:
                f = lambda x: evaluate([*values[:n], x, *values[n + 1 :]], b, h, query, key, s)
                x = jnp.broadcast_to(values[n], s.shape)
            new, pull = jax.vjp(f, x)
            return new, *pull(ds)

        steps = self.score_mod.steps(both, tile, lambda: logits, lambda: given[0])

        def back(ds):
            given.append(ds)
            cotangent = steps.output(1)
            return cotangent if cotangent is ds else jnp.where(ds == 0, 0.0, cotangent)

        return steps.output(0), back


def for_head(p: Problem, layouts: Layouts, x: Arrays, batch: IntLike, head: IntLike) -> Logits:
    """Loads one head's part of the arrays, which are refs."""
    if isinstance(x.mask, PackedMask):
        mask: Any = HeadBits.load(x.mask, batch, head)
    else:
        mask = mods.for_head(p.resolved_mask.mask_mod, x.mask, batch, head)
    return Logits(
        p,
        layouts,
        x.resolved_mask,
        mask,
        head_bias(x.bias, batch, head),
        mods.for_head(p.score, x.score_mod, batch, head),
        dropout.for_head(p.dropped, x.seeds, batch, head),
    )


class QueryBlock(NamedTuple):
    """A block of queries of one head, as a kernel that owns keys visits it. Scores are transposed,
    [keys, queries]."""

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
