"""Attention of a tile: l lists of n keys, and the r query rows that each list belongs to.

Arrays of its pairs are [l, r, G, n], of its rows [l, r, G, ..] and of its keys [l, n, ..]. A walk
over tiles chooses the lists, the rows and the keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.checks import sums
from pallas_flash.mods.bound import BoundMod
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.derivatives import Slices
from pallas_flash.tiled.lists.list_heads import KeyBlocks, ListHead, Rows, Sums
from pallas_flash.tiled.online_softmax import SoftmaxState


class Tile(NamedTuple):
    head: ListHead
    rows: Rows  # [l, r]
    key: jax.Array  # int32 [l, n]
    visible: jax.Array | None  # [l, r, G | 1, n]

    @classmethod
    def take(cls, head: ListHead, rows: Rows, key) -> "Tile":
        """The tile of these rows and keys; there is no key from S on."""
        mask, tile = head.mask, cls(head, rows, jnp.minimum(key, head.problem.keys - 1), None)
        ids = ()
        if rows.ids is not None:
            ids = _column(rows.ids), mask.resolved.key_ids[0, tile.key][:, None, None]
        ends = _column(rows.start), _column(rows.stop)
        visible = mask.resolved.visible(*ends, key[:, None, None], *ids)
        if (mod := mask.resolved.mask_mod) is not None:
            visible = visible & mod.visible(*tile.indices(mod))
        if mask.dense is not None:
            visible = visible & tile.pairs(mask.dense)
        return tile._replace(visible=visible)

    @property
    def row_and_key(self):
        """The row and the key of each pair."""
        return _column(self.rows.index), self.key[:, None, None]

    def indices(self, mod: BoundMod):
        """The indices b, h, q_idx and kv_idx at which a mod is evaluated."""
        row, key = self.row_and_key
        return mod.batch[0], mod.head.reshape(-1, 1), row + jnp.reshape(mod.offset, ()), key

    def place(self, x) -> tuple:
        """The indices of the pairs in a dense x [1, 1, G | 1, T | 1, S | 1]."""
        head, zero = (
            jnp.arange(x.shape[2], dtype=jnp.int32)[:, None],
            jnp.zeros((1,) * 4, jnp.int32),
        )
        each = zip((head, *self.row_and_key), x.shape[2:], strict=True)
        return 0, 0, *(index if n > 1 else zero for index, n in each)

    def pairs(self, x):
        """The elements of a dense x, which broadcast to all pairs; None of None."""
        return None if x is None else x[self.place(x)]

    def products(self, q, k) -> tuple:
        """q k^T of the pairs, their bias and the indices of the score_mod, or None."""
        score, bias = self.head.logits.score, self.pairs(self.head.logits.bias)
        return dot_t(q, k), bias, None if score is None else self.indices(score)

    def drop(self, weights):
        """The weights, 0 where dropout drops them."""
        if (seeds := self.head.logits.seeds) is None:
            return weights
        first, second = seeds[..., :1], seeds[..., 1:]  # [1, 1, G, 1]
        keeps = dropout.keeps(self.head.problem.dropped, first, second, *self.row_and_key)
        return jnp.where(keeps, weights, 0)

    def forward(self, q, k, v, state: SoftmaxState | None):
        """Adds the keys to the rows' SoftmaxState; None: they are the first. Returns P V, the
        factor of earlier sums, or None, and the new state."""
        logits = self.head.logits
        s = jnp.where(self.visible, logits.of_products(*self.products(q, k)), -jnp.inf)
        p, alpha, state = softmax.step(-1, s, state, logits.exponent_scale)
        return dot(self.drop(p).astype(v.dtype), v), alpha, state

    def backward(self, q, k, v, do, row: "RowCotangents", captured):
        """The gradients of q, k and v, that of the logits before their soft cap, which is a bias's,
        and `captured` with the gradients of a score_mod's arrays added."""
        logits, soft_cap = self.head.logits, self.head.problem.soft_cap
        dp = self.drop(dot_t(do, v))
        s, tanh, back = logits.vjp_of_products(*self.products(q, k))
        s = jnp.where(self.visible, s, -jnp.inf)
        visible = None if soft_cap is None else self.visible  # else a tanh may be NaN
        scale, is_whole_row = logits.exponent_scale, row.dlse is not None
        p = softmax.probabilities(s, row.m, row.inverse_sum, scale, False, is_whole_row)
        delta = softmax.delta(p, dp, visible) - row.dlse if is_whole_row else row.delta
        p, ds = online_softmax.gradients(p, dp - delta, visible, tanh)
        ds, captured = back(ds, captured) if back else (ds, captured)
        low, weights = lax.optimization_barrier((ds.astype(q.dtype), self.drop(p).astype(q.dtype)))
        return dot(low, k), dot_over_rows(low, q), dot_over_rows(weights, do), ds, captured

    def with_tangent(self, x: Slices, dx: Slices, m, inverse_sum):
        """P, and P times the tangent of the logits, None where that is zero."""

        def scores(q, k, bias, *captured):
            (qk, _, indices), logits = self.products(q, k), self.head.logits
            s = logits.with_arrays(bias, captured).of_products(qk, bias, indices, self.visible)
            return jnp.where(self.visible, s, -jnp.inf)

        scale = self.head.logits.exponent_scale
        return softmax.with_tangent(scores, x.of_logits, dx.of_logits, m, inverse_sum, scale)

    def tangent(self, x: Slices, dx: Slices, m, inverse_sum):
        """The sums (P dS) V + P dV, P dS and P V over the tile's keys."""
        p, weights = self.with_tangent(x, dx, m, inverse_sum)
        kept = self.drop(p)
        o = dot(kept, x.value)
        do = jnp.zeros_like(o) if dx.value is None else dot(kept, dx.value)
        if weights is None:
            return do, jnp.zeros_like(o[..., :1]), o
        return do + dot(self.drop(weights), x.value), jnp.sum(weights, -1, keepdims=True), o

    def second(self, x: Slices, dx: Slices, do, row: "RowCotangents"):
        """The gradients of sum P (dS - dlse) (dP - delta) + P (do dV^T) with respect to x and to
        row.inverse_sum."""

        def product(x: Slices, inverse_sum):
            p, weights = self.with_tangent(x, dx, row.m, inverse_sum)
            # a tangent of the sinks alone is one of lse, but none of the logits
            weights = (0.0 if weights is None else weights) - p * row.dlse
            total = jnp.sum(weights * (self.drop(dot_t(do, x.value)) - row.delta))
            if dx.value is not None:
                total += jnp.sum(self.drop(p) * dot_t(do, dx.value))
            return total

        return jax.grad(product, argnums=(0, 1))(x, row.inverse_sum)

    def add_bias_gradient(self, dbias, ds):
        """dbias with ds added in its place, summed over the axes that the bias broadcasts; None of
        None."""
        if dbias is None:
            return None
        place = self.place(dbias)
        shape = jnp.broadcast_shapes(*(index.shape for index in place[2:]))
        new = jnp.sum(ds, [axis for axis, n in enumerate(shape) if n == 1], keepdims=True)
        return dbias.at[place].add(new.astype(dbias.dtype))


class Entries(NamedTuple):
    """The entries of a few lists, int32 [l, n]."""

    index: jax.Array
    in_order: bool

    def keys(self, block: int):
        """The keys that they name, int32 [l, n * block]."""
        keys = self.index[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None]
        return keys.reshape(keys.shape[0], -1)

    def gather(self, tile: Tile, x: KeyBlocks):
        """Keys or values of a tile, [l, n * block, h]; keys that no query sees are 0 (they may
        hold NaN)."""
        return jnp.where(tile.visible.any((1, 2))[..., None], x.gather(self.index), 0)

    def keys_and_values(self, tile: Tile, key: KeyBlocks, value: KeyBlocks | None):
        """The keys and values of a tile; without blocks of values these are the keys' first
        columns."""
        k = self.gather(tile, key)
        size = tile.head.problem.value_size
        return k, k[..., :size] if value is None else self.gather(tile, value)

    def slices(self, tile: Tile, x: Slices, query) -> Slices:
        """The differentiable arrays of a tile: its list head's, and its rows of the query."""
        key, value = (None if a is None else self.gather(tile, a) for a in (x.key, x.value))
        return Slices(query, key, value, tile.pairs(x.bias), x.captured)

    def add(self, tile: Tile, sums: Sums, dk, dv, dbias, captured) -> Sums:
        """The sums with a tile's gradients of keys, values and bias added."""
        return Sums(
            self.scatter_add(sums.key, dk),
            self.scatter_add(sums.value, dv),
            tile.add_bias_gradient(sums.bias, dbias),
            captured,
        )

    def scatter_add(self, x, new):
        """x [blocks, block, h] with new [l, n * block, h] added."""
        new = new.reshape(*self.index.shape, *x.shape[1:])
        if not self.in_order:
            return x.at[self.index].add(new, mode="drop")
        # the entries of one list are distinct
        add = lambda i, x: x.at[self.index[i]].add(new[i], mode="drop", unique_indices=True)
        return schedule.loop(0, new.shape[0], add, x)


class RowCotangents(NamedTuple):
    """What a backward takes of each row, [T, G, 1] or [l, r, G, 1]."""

    m: jax.Array
    inverse_sum: jax.Array
    delta: jax.Array
    dlse: jax.Array | None  # in `backward`: the tile has all keys of its rows, and sums their delta


def dot_t(a, b):
    """[l, r, G, h] [l, n, h] -> [l, r, G, n]"""
    return _einsum("lrgh,lnh->lrgn", a, b)


def dot(a, b):
    """[l, r, G, n] [l, n, h] -> [l, r, G, h]"""
    return _einsum("lrgn,lnh->lrgh", a, b)


def dot_over_rows(a, b):
    """[l, r, G, n] [l, r, G, h] -> [l, n, h]"""
    _, rows, group, _ = a.shape
    if rows * group > b.shape[-1]:  # on a CPU XLA transposes the first operand, which is larger
        return _einsum("lrgh,lrgn->lhn", b, a).swapaxes(1, 2)
    return _einsum("lrgn,lrgh->lnh", a, b)


def _einsum(axes: str, a, b):
    return jnp.einsum(axes, a, b, precision="highest", preferred_element_type=sums(a.dtype))


def _column(x):
    """[l, r] -> [l, r, 1, 1]"""
    return x[..., None, None]
