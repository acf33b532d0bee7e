"""The logits of a block, q k^T with scale, bias, soft cap and score_mod, and their derivative;
dropout of the weights; and products in the orders that a CPU's library multiplies fast."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.checks import sums
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.blockwise.mask import dense_tile, dense_tiles
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, for_heads, pairs
from pallas_flash.tiled.blockwise.tuning import Tiles, scale_can_come_last


class ScalePlacement(enum.Enum):
    """Where the scale of q k^T is applied."""

    QUERY = enum.auto()  # to q, once: products of 32 bits
    LOGITS = enum.auto()  # to each product
    EXPONENT = enum.auto()  # to products less their maximum

    @classmethod
    def choose(cls, p: Problem, tiles: Tiles) -> "ScalePlacement":
        # a scale of 0 would leave nothing to take gradients of
        if tiles.is_wide:
            return cls.QUERY if p.scale else cls.LOGITS
        return cls.EXPONENT if scale_can_come_last(p) else cls.LOGITS

    def query_factor(self, p: Problem) -> float:
        """The factor of q before all products."""
        return p.scale if self is ScalePlacement.QUERY else 1.0


class Logits(NamedTuple):
    """The logits of a slice of the heads, B, K and G as in `heads.HeadSlice`."""

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
        return cls(p, placement, dense_tiles(x.bias, heads), for_heads(x.score, p, heads), seeds)

    def with_arrays(self, bias, captured: tuple) -> "Logits":
        """These logits with another bias and other float arrays that the score_mod reads."""
        score = None if self.score is None else self.score.with_tables(captured)
        return self._replace(bias=bias, score=score)

    @property
    def query_factor(self) -> float:
        return self.placement.query_factor(self.problem)

    @property
    def exponent_scale(self) -> float:
        """The factor of scores less their maximum."""
        return self.problem.scale if self.placement is ScalePlacement.EXPONENT else 1.0

    @property
    def are_products(self) -> bool:
        """Whether the logits are q k^T alone."""
        if self.placement is ScalePlacement.EXPONENT:
            return True
        is_plain = self.bias is None and self.problem.soft_cap is None and self.score is None
        return is_plain and self.query_factor == self.problem.scale

    def forward(self, q, key, rows: Block, keys: Block, visible=None):
        """The logits [B, K, rows, keys] of q [B, K, rows, H] and key [B, K, S, H], as
        `from_products`."""
        return self.from_products(*self._products(q, key, rows, keys), visible)

    def from_products(self, qk, bias, indices, visible=None):
        """The logits of products q k^T, with a bias that broadcasts and the indices of a score_mod,
        or None. In reverse mode logits that are not `visible` (None: all are) have no derivative,
        as a score_mod may have none there."""
        s, _ = self._before_score_mod(qk, bias)
        if self.score is None:
            return s
        where_visible = lambda a: (
            a if visible is None else jnp.where(visible, a, lax.stop_gradient(a))
        )
        read = lambda *at: where_visible(self._read(*at))
        return self.score.apply(where_visible(s), read, *indices)

    def vjp(self, q, key, rows: Block, keys: Block):
        """`vjp_from_products` of q [B, K, rows, H] and key [B, K, S, H]."""
        return self.vjp_from_products(*self._products(q, key, rows, keys))

    def vjp_from_products(self, qk, bias, indices):
        """The logits, as `from_products`; the tanh of their soft cap, or None; and with a
        score_mod, else None, a function. It maps the logits' cotangent to that of q k^T, and adds
        to the gradients of the arrays that the score_mod captured."""
        s, tanh = self._before_score_mod(qk, bias)
        if self.score is None:
            return s, tanh, None
        s, pull = self.score.vjp(s, self._read, *indices)

        def back(ds, captured):
            ds, reads = pull(ds)
            captured = list(captured)
            for array, index, d in reads:
                captured[array] = captured[array].at[index].add(d.astype(captured[array].dtype))
            return online_softmax.soft_cap_vjp(ds, tanh), tuple(captured)

        return s, None, back

    def _products(self, q, key, rows: Block, keys: Block):
        """q k^T, and of its pairs the bias and the indices of the score_mod, or None."""
        bias, indices, group = self.bias, None, self.problem.group
        if bias is not None:
            bias = dense_tile(bias, rows, keys, group)
        if self.score is not None:
            indices = pairs(self.score, rows, keys, group)
        return dot_t(q, keys.take(key, 2)), bias, indices

    def _before_score_mod(self, qk, bias):
        """The logits before the score_mod, and the tanh of the soft cap, or None."""
        if self.are_products:
            return qk, None
        bias = None if bias is None else bias.astype(qk.dtype)
        scale = self.problem.scale / self.query_factor
        return online_softmax.scores(qk, bias, scale, self.problem.soft_cap, LogBase.E)

    def _read(self, array: int, index: tuple):
        return self.score.arrays[array].at[index].get(mode="promise_in_bounds")

    def drop(self, weights, rows: Block, keys: Block):
        """The weights [B, K, rows, keys], 0 where dropout drops them."""
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


def dot(a, b, dtype=None):
    """[B, K, m, n] [B, K, n, h] -> [B, K, m, h], by default in the dtype of sums"""
    return _matmul(a, b, 2, dtype)


def dot_t(a, b):
    """[B, K, m, h] [B, K, n, h] -> [B, K, m, n]"""
    return _matmul(a, b, 3)


def dot_over_rows(x, x_t, weights):
    """The sums [B, K, h, keys] of rows x [B, K, rows, h] with weights [B, K, rows, keys]. They take
    x_t, which is x transposed; where it is None they transpose the weights."""
    if x_t is not None:
        return dot(x_t, weights)
    return jnp.swapaxes(dot(lax.optimization_barrier(jnp.swapaxes(weights, 2, 3)), x), 2, 3)


def transpose(x):
    """[.., m, n] -> [.., n, m], after x is in memory: else XLA computes both in one loop, whose
    reads lie far apart and are slow."""
    return jnp.swapaxes(lax.optimization_barrier(x), -1, -2)


def _matmul(a, b, axis: int, dtype=None):
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(
        a, b, dims, precision="highest", preferred_element_type=dtype or sums(a.dtype)
    )
