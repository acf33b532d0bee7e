"""A list head: the query heads that share a list and a key/value head; its operands, and what a
walk over its tiles sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.blockwise.derivatives import Slices
from pallas_flash.tiled.blockwise.logits import Logits
from pallas_flash.tiled.blockwise.mask import TileMask, dense_tiles
from pallas_flash.tiled.blockwise.slices import HeadRange
from pallas_flash.tiled.blockwise.tuning import Tiles


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
