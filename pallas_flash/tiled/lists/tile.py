"""A list head, the query heads that share a list and a key/value head, and attention of its tiles.
A tile has l lists of n keys, and the r query rows that each list belongs to.

Arrays of its pairs are [l, r, G, n], of its rows [l, r, G, ..] and of its keys [l, n, ..]. A walk
over tiles chooses the lists, the rows and the keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.checks import sums
from pallas_flash.mods.bound import BoundMod
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.derivatives import Slices
from pallas_flash.tiled.blockwise.logits import Logits
from pallas_flash.tiled.blockwise.mask import TileMask, dense_tiles
from pallas_flash.tiled.blockwise.slices import HeadRange
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.online_softmax import SoftmaxState


class Rows(NamedTuple):
    """What the mask says of each query row of a batch row: arrays [T], or [l, r] in a tile."""

    index: jax.Array
    start: jax.Array  # the interval of keys that it may see
    stop: jax.Array
    ids: jax.Array | None


class ListHead(NamedTuple):
    """The operands of the G query heads of a list head."""

    problem: Problem
    heads: HeadRange  # its query heads
    key_head: HeadRange
    entries: jax.Array  # int32 [lists, n], distinct; the number of blocks where they name nothing
    rows: Rows
    mask: TileMask
    logits: Logits
    sinks: jax.Array | None  # [G]

    @classmethod
    def take(cls, p: Problem, tiles: Tiles, x: Operands, number) -> "ListHead":
        """List head `number` of all batch rows'."""
        per_row, lists = list_heads(p), x.resolved_mask.lists.entries
        row, head = number // per_row, number % per_row
        heads = HeadRange(row, 1, head, 1, per_row)
        key_head = HeadRange(row, 1, head * p.kv_heads // per_row, 1, p.kv_heads)
        entries = (heads if lists.shape[1] == per_row else key_head).take(lists, 1)[0, 0]
        entries = jnp.minimum(entries, p.resolved_mask.lists.blocks)
        mask = TileMask.take(p, heads, x)._replace(lists=None)
        sinks = None if x.sinks is None else heads.take(x.sinks[None], 1)[0]
        logits = Logits.take(p, tiles, heads, x)
        return cls(p, heads, key_head, entries, _rows(p, mask), mask, logits, sinks)

    def by_row(self, x, dtype):
        """[B, T, N, n] -> [T, G, n], with 0 for rows that see nothing, where there may be NaN"""
        x = self.heads.take(x, 2)[0].astype(dtype)
        if not self.mask.has_data:
            return x
        return jnp.where((self.rows.start < self.rows.stop)[:, None, None], x, 0)

    def each_row(self, x):
        """[B, N, T] -> [T, G, 1]; None -> None"""
        return x if x is None else jnp.swapaxes(self.heads.take(x, 1)[0], 0, 1)[..., None]

    def keys_and_values(self, x: Operands, dtype):
        """Keys and values, as `by_block`; no values where these are the keys' first columns."""
        values = None if self.problem.values_are_keys else self.by_block(x.value, dtype)
        return self.by_block(x.key, dtype), values

    def slices(self, x: Gradients, dtype) -> Slices:
        """Operands or their tangents, None where zero: `queries`, keys and values `by_block`, and
        the bias `dense`."""
        query = None if x.query is None else self.queries(x.query, dtype)
        key, value = (None if a is None else self.by_block(a, dtype) for a in (x.key, x.value))
        bias = None if x.bias is None else self.dense(x.bias).astype(dtype)
        return Slices(query, key, value, bias, x.captured)

    def queries(self, query, dtype):
        """q [T, G, H], times `logits.query_factor`."""
        return self.by_row(query, dtype) * self.logits.query_factor

    def dense(self, x):
        """[B | 1, N | 1, T | 1, S | 1] -> [1, 1, G | 1, T | 1, S | 1]; None -> None"""
        return dense_tiles(x, self.heads)

    def put_dense(self, whole, x):
        """whole [B | 1, N | 1, T | 1, S | 1] with x in place of `dense(whole)`; None -> None"""
        return x if x is None else self.heads.put(whole, x.reshape(1, -1, *x.shape[3:]), 1)

    def by_block(self, x, dtype) -> "KeyBlocks":
        """Keys or values [B, S, K, n], of which products take this dtype."""
        lists = self.problem.resolved_mask.lists
        if more := lists.blocks * lists.block - lists.keys:
            x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
        x = x.reshape(x.shape[0], lists.blocks, lists.block, *x.shape[2:])
        return KeyBlocks(x, self.key_head, dtype)


class KeyBlocks(NamedTuple):
    """The keys or the values of a key/value head by block, where they lie."""

    array: jax.Array  # [B, blocks, block, K, n]
    head: HeadRange
    dtype: Any

    def gather(self, index):
        """The blocks with these indices [l, n], [l, n * block, h]; clipped to the last one."""
        index = jnp.minimum(index, self.array.shape[1] - 1)
        place = self.head.row, index, slice(None), self.head.head
        x = self.array.at[place].get(mode="promise_in_bounds")
        return x.reshape(x.shape[0], -1, x.shape[-1]).astype(self.dtype)


def list_heads(p: Problem) -> int:
    """The number of list heads of a batch row."""
    return max(p.resolved_mask.lists.entries.shape[1], p.kv_heads)


class Sums(NamedTuple):
    """The gradients that a walk sums: of a key/value head's keys and values, [blocks, block, n], of
    the bias, which is `dense` in a walk, and of the arrays that a score_mod captured."""

    key: jax.Array | None = None
    value: jax.Array | None = None
    bias: jax.Array | None = None
    captured: tuple = ()

    @property
    def shared(self) -> dict:
        """The gradients that all list heads add to."""
        return dict(bias=self.bias, captured=self.captured)


def from_list_heads(x):
    """[B, list heads, T, G, n] -> [B, T, N, n]"""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1, x.shape[-1])


def by_head(x):
    """[B, list heads, T, G, 1] -> [B, N, T]"""
    return jnp.swapaxes(x[..., 0], 2, 3).reshape(x.shape[0], -1, x.shape[2])


def from_blocks(p: Problem, x):
    """[B, K, blocks, block, n] -> [B, S, K, n]"""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, : p.keys], 1, 2)


def _rows(p: Problem, mask: TileMask) -> Rows:
    index = jnp.arange(p.queries, dtype=jnp.int32)
    each = lambda end: jnp.broadcast_to(jnp.asarray(end, jnp.int32), (1, p.queries))[0]
    ids = mask.resolved.query_ids
    return Rows(index, each(mask.start), each(mask.stop), None if ids is None else ids[0])


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
        s = jnp.where(self.visible, logits.from_products(*self.products(q, k)), -jnp.inf)
        p, alpha, state = softmax.step(-1, s, state, logits.exponent_scale)
        return dot(self.drop(p).astype(v.dtype), v), alpha, state

    def backward(self, q, k, v, do, row: "RowCotangents", captured):
        """The gradients of q, k and v, that of the logits before their soft cap, which is a bias's,
        and `captured` with the gradients of a score_mod's arrays added."""
        logits, soft_cap = self.head.logits, self.head.problem.soft_cap
        dp = self.drop(dot_t(do, v))
        s, tanh, back = logits.vjp_from_products(*self.products(q, k))
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
            s = logits.with_arrays(bias, captured).from_products(qk, bias, indices, self.visible)
            return jnp.where(self.visible, s, -jnp.inf)

        scale = self.head.logits.exponent_scale
        return softmax.with_tangent(
            scores, x.logit_operands, dx.logit_operands, m, inverse_sum, scale
        )

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
