"""The operands of a list head, which is what query heads with one list and one key/value head are,
and the loop over all list heads."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.problem.arguments import Operands, Problem
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
        mask = TileMask.take(p, heads, x)
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
        of_values = None if self.problem.values_are_keys else self.by_block(x.value, dtype)
        return self.by_block(x.key, dtype), of_values

    def dense(self, x):
        """[B | 1, N | 1, T | 1, S | 1] -> [1, 1, G | 1, T | 1, S | 1]"""
        return dense_tiles(x, self.heads)

    def put_dense(self, whole, x):
        """The inverse of `dense`."""
        return self.heads.put(whole, x.reshape(1, -1, *x.shape[3:]), 1)

    def by_block(self, x, dtype):
        """[B, S, K, n] -> [blocks + 1, block, n], with 0 in the last block, which entries that name
        nothing read"""
        x = jnp.swapaxes(self.key_head.take(x, 2), 1, 2).astype(dtype)
        x, lists = self.mask.zero_hidden_keys(x)[0, 0], self.problem.resolved_mask.lists
        more = (lists.blocks + 1) * lists.block - lists.keys
        return jnp.pad(x, ((0, more), (0, 0))).reshape(-1, lists.block, x.shape[-1])


def list_heads(p: Problem) -> int:
    """The number of list heads of a batch row."""
    return max(p.resolved_mask.lists.entries.shape[1], p.kv_heads)


def each_list_head(p: Problem, at_once: bool, one_head: Callable, like_keys, shared):
    """Runs (of_keys, shared), of_rows = one_head(number, (of_keys, shared)) for all list heads.

    `of_keys` are sums over the list heads of a key/value head, and begin as `like_keys`; `shared`
    are sums over all. Returns of_rows [B, list heads, ..], of_keys [B, K, ..] and shared. Sums over
    all go through one list head after the other, since each would need an array of its own.
    """
    of_each = list_heads(p) // p.kv_heads

    def one_key_head(shared, number):
        step = lambda sums, i: one_head(number * of_each + i, sums)
        sums, of_rows = lax.scan(step, (like_keys, shared), jnp.arange(of_each, dtype=jnp.int32))
        return sums[1], (of_rows, sums[0])

    numbers = jnp.arange(p.batch * p.kv_heads, dtype=jnp.int32)
    if at_once and not jax.tree.leaves(shared):
        _, (of_rows, of_keys) = jax.vmap(lambda n: one_key_head(shared, n))(numbers)
    else:
        shared, (of_rows, of_keys) = lax.scan(one_key_head, shared, numbers)
    of_rows = jax.tree.map(lambda a: a.reshape(p.batch, -1, *a.shape[2:]), of_rows)
    of_keys = jax.tree.map(lambda a: a.reshape(p.batch, -1, *a.shape[1:]), of_keys)
    return of_rows, of_keys, shared


def from_list_heads(x):
    """[B, list heads, T, G, n] -> [B, T, N, n]"""
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _rows(p: Problem, mask: TileMask) -> Rows:
    index = jnp.arange(p.queries, dtype=jnp.int32)
    each = lambda end: jnp.broadcast_to(jnp.asarray(end, jnp.int32), (1, p.queries))[0]
    ids = mask.resolved.query_ids
    return Rows(index, each(mask.start), each(mask.stop), None if ids is None else ids[0])
