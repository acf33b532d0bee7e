"""The logits of a block: q k^T with its scale, bias, soft cap and score_mod; dropout of the weights
made of them; and the way back."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.mods.score_mod import BoundScoreMod
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.blockwise.mask import dense_tile, dense_tiles
from pallas_flash.tiled.blockwise.matmul import dot_t
from pallas_flash.tiled.blockwise.mods import of_heads, pairs
from pallas_flash.tiled.blockwise.slices import Block, HeadRange
from pallas_flash.tiled.blockwise.tuning import Tiles, scale_can_come_last


class ScalePlacement(enum.Enum):
    """Where the scale of q k^T is multiplied."""

    QUERY = enum.auto()  # into q, once: products of 32 bits
    LOGITS = enum.auto()  # into each product, with all that follows
    EXPONENT = enum.auto()  # after the maximum is off: plain products until then

    @classmethod
    def choose(cls, p: Problem, tiles: Tiles) -> "ScalePlacement":
        # a scale of 0 would leave nothing to take gradients of
        if tiles.is_wide:
            return cls.QUERY if p.scale else cls.LOGITS
        return cls.EXPONENT if scale_can_come_last(p) else cls.LOGITS


class Logits(NamedTuple):
    """B, K and G, T, S are those of some heads."""

    problem: Problem
    placement: ScalePlacement
    bias: jax.Array | None  # [B | 1, K | 1, G | 1, T | 1, S | 1]
    score: BoundScoreMod | None  # with the heads' indices
    seeds: jax.Array | None  # [B, K, G, 2]

    @classmethod
    def take(cls, p: Problem, tiles: Tiles, heads: HeadRange, x: Operands) -> "Logits":
        seeds = x.seeds
        if seeds is not None:
            seeds = heads.take(seeds, 1).reshape(heads.batch, heads.heads, -1, 2)
        placement = ScalePlacement.choose(p, tiles)
        return cls(p, placement, dense_tiles(x.bias, heads), of_heads(x.score, p, heads), seeds)

    @property
    def query_factor(self) -> float:
        """What q is multiplied by before all products."""
        return self.problem.scale if self.placement is ScalePlacement.QUERY else 1.0

    @property
    def exponent_scale(self) -> float:
        """What the scores are multiplied by where they meet their maximum."""
        return self.problem.scale if self.placement is ScalePlacement.EXPONENT else 1.0

    @property
    def are_products(self) -> bool:
        """Whether they are q k^T alone."""
        if self.placement is ScalePlacement.EXPONENT:
            return True
        is_plain = self.bias is None and self.problem.soft_cap is None and self.score is None
        return is_plain and self.query_factor == self.problem.scale

    def forward(self, q, key, rows: Block, keys: Block, visible=None):
        """[B, K, rows, keys] of q [B, K, rows, H] and key [B, K, S, H]; those that are not
        `visible` (None: all are) have no derivative in reverse, where a score_mod may have none."""
        s, _ = self._before_score_mod(q, key, rows, keys)
        if self.score is None:
            return s
        where_visible = lambda a: (
            a if visible is None else jnp.where(visible, a, lax.stop_gradient(a))
        )
        read = lambda *at: where_visible(self._read(*at))
        return self.score.apply(where_visible(s), read, *self._pairs(rows, keys))

    def vjp(self, q, key, rows: Block, keys: Block):
        """The same, the tanh of a soft cap on them (else None), and with a score_mod (else None)
        what makes of their cotangent that of what q k^T was made, and adds to the gradients of the
        arrays it captured."""
        s, tanh = self._before_score_mod(q, key, rows, keys)
        if self.score is None:
            return s, tanh, None
        s, pull = self.score.vjp(s, self._read, *self._pairs(rows, keys))

        def back(ds, captured):
            ds, reads = pull(ds)
            captured = list(captured)
            for array, index, d in reads:
                captured[array] = captured[array].at[index].add(d.astype(captured[array].dtype))
            return online_softmax.soft_cap_vjp(ds, tanh), tuple(captured)

        return s, None, back

    def _before_score_mod(self, q, key, rows: Block, keys: Block):
        """The logits, and the tanh of a soft cap (else None)."""
        p, qk = self.problem, dot_t(q, keys.take(key, 2))
        if self.are_products:
            return qk, None
        bias = self.bias
        if bias is not None:
            bias = dense_tile(bias, rows, keys, p.group).astype(qk.dtype)
        scale = p.scale / self.query_factor
        return online_softmax.scores(qk, bias, scale, p.soft_cap, LogBase.E)

    def _pairs(self, rows: Block, keys: Block):
        return pairs(self.score, rows, keys, self.problem.group)

    def _read(self, array: int, index: tuple):
        return self.score.arrays[array].at[index].get(mode="promise_in_bounds")

    def drop(self, weights, rows: Block, keys: Block):
        """weights [B, K, rows, keys] with 0 where dropout drops them."""
        if self.seeds is None:
            return weights
        first, second = (self.seeds[:, :, :, i, None, None] for i in range(2))  # [B, K, G, 1, 1]
        row, key = rows.index[None, None, None, :, None], keys.index[None, None, None, None]
        keeps = dropout.keeps(self.problem.dropped, first, second, row, key)
        return jnp.where(keeps.reshape(weights.shape), weights, 0)

    def add_bias_gradient(self, dbias, ds, rows: Block, keys: Block):
        """dbias with ds [B, K, rows, keys] added in its place, summed over the axes that the bias
        broadcasts."""
        ds = ds.reshape(*ds.shape[:2], self.problem.group, -1, ds.shape[-1])
        broadcast = [axis for axis, n in enumerate(dbias.shape) if n == 1]
        tile = jnp.sum(ds, axis=broadcast, keepdims=True)
        return rows.put(dbias, keys.add(rows.take(dbias, 3), tile, 4), 3)
