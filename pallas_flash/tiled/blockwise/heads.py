"""A slice of the heads: its operands in the order that products take, and the loops over its query
blocks and key blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.logits import Logits
from pallas_flash.tiled.blockwise.mask import KeyBlock, TileMask, find_band, static_key_blocks
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, block_at
from pallas_flash.tiled.blockwise.tuning import Tiles, serialize, unrolled


class HeadSlice(NamedTuple):
    """The operands of `B` batch rows, and of them K key/value heads with G query heads each."""

    problem: Problem
    tiles: Tiles
    heads: HeadRange
    query: jax.Array  # [B, K, G, T, H], times `logits.query_factor`
    key: jax.Array  # [B, K, S, H]; where tiles.in_place as it is stored, for `key_block`
    value: jax.Array  # [B, K, S, Hv], as the key
    sinks: jax.Array | None  # [K, G]
    mask: TileMask
    logits: Logits
    key_blocks: list[list[KeyBlock]] | None  # of each query block, where they are static

    @classmethod
    def take(cls, p: Problem, tiles: Tiles, heads: HeadRange, x: Operands) -> "HeadSlice":
        mask, logits = TileMask.take(p, heads, x), Logits.take(p, tiles, heads, x)
        q = by_head(x.query, heads).astype(tiles.dtype)
        query = mask.zero_blind_rows(q * logits.query_factor)
        key, value = x.key, x.value
        if not tiles.in_place:
            k, v = (by_head(a, heads).astype(tiles.dtype) for a in (key, value))
            key, value = (mask.zero_hidden_keys(a[:, :, 0]) for a in (k, v))
        sinks = x.sinks
        if sinks is not None:
            sinks = heads.take(sinks[None], 1).reshape(heads.heads, -1)
        blocks = static_key_blocks(p, tiles)
        return cls(p, tiles, heads, query, key, value, sinks, mask, logits, blocks)

    def key_block(self, x, keys: Block):
        """The keys or values [B, K, keys, n] of a block."""
        if not self.tiles.in_place:
            return keys.take(x, 2)
        x = by_head(keys.take(x, 1), self.heads)[:, :, 0].astype(self.tiles.dtype)
        return self.mask.zero_hidden_keys(x, keys)

    @property
    def blocks_have_whole_rows(self) -> bool:
        """Whether each query block has at most one key block, of all keys that its rows see."""
        if self.key_blocks is None:
            return find_band(self.problem, self.tiles.block_q, self.tiles.block_k) is not None
        return all(len(row) <= 1 for row in self.key_blocks)

    def each_query_block(self, query_block: Callable, by_row: tuple, put: Callable, start, carry):
        """Runs results, carry = query_block(rows, key_blocks, row_inputs, carry) for all query
        blocks, and returns the results [B, K, G, T, n] of all rows, and the carry. `row_inputs` are
        the rows of the arrays by_row [B, K, G, T, n], and `key_blocks` is None where a loop goes
        over them. A loop puts results into the arrays of `start` by put(rows, start, results, 3).
        """
        size, length, tiles = self.tiles.block_q, self.problem.queries, self.tiles

        def run(rows: Block, key_blocks, carry, before=None):
            row_inputs = [None if a is None else take_rows(rows, a) for a in by_row]
            if before is not None:
                (before, carry), *row_inputs = xla_cpu.after((before, carry), *row_inputs)
            results, carry = query_block(rows, key_blocks, row_inputs, carry)
            return before, tuple(map(self._by_query, results)), carry

        if self.key_blocks is not None:
            done, results = [], None
            in_turn = serialize(tiles, self.query.shape[:3], self.key_blocks)
            for i, key_blocks in enumerate(self.key_blocks):
                rows = Block(i * size, size if size == length else min(size, length - i * size))
                before, results, carry = run(rows, key_blocks, carry, results if in_turn else None)
                done[-1:] = done[-1:] if before is None else [before]
                done.append(results)
            join = lambda *blocks: blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 3)
            return tuple(map(join, *done)), carry
        band = find_band(self.problem, size, tiles.block_k)

        def step(i, state):
            rows, (outputs, carry) = block_at(i, size, length), state
            key_blocks = band and [band.key_block(self.problem.resolved_mask, rows)]
            _, results, carry = run(rows, key_blocks, carry)
            return tuple(put(rows, *x, 3) for x in zip(outputs, results, strict=True)), carry

        count = schedule.ceil_div(length, size)
        if band:
            at_a_time = unrolled(tiles, self.query.shape[:3])
            return lax.fori_loop(0, count, step, (start, carry), unroll=at_a_time)
        return schedule.loop(0, count, step, (start, carry))

    def each_key_block(self, rows: Block, key_blocks, step: Callable, first, start):
        """Runs carry = step(keys, visible, rows_are_finite, carry) for all key blocks. The carry
        begins as `first` where they are static, and as `start` where loops go over them."""
        mask = self.mask.for_rows(rows, self.query.shape[1])
        if key_blocks is None:
            size, length = self.tiles.block_k, self.problem.keys
            blocks = mask.key_blocks(rows, size)

            def visit(t, carry, masked):
                keys = block_at(blocks.index(t), size, length)
                return step(keys, mask.visible(rows, keys, masked), False, carry)

            # XLA computes the scores of a last block that is alone before the loop
            return blocks.visit(visit, start, masked_first=True)
        if not key_blocks:
            return start
        can_be_finite, carry = self.logits.are_products and not mask.hides_pairs, first
        for keys, needs_mask, rows_see_one in key_blocks:
            visible = mask.visible(rows, keys, needs_mask)
            carry = step(keys, visible, rows_see_one and can_be_finite, carry)
        return carry

    def sink_of_rows(self, rows: Block):
        """The sinks [1, K, rows] of a block's rows."""
        return None if self.sinks is None else jnp.repeat(self.sinks, rows.size, axis=1)[None]

    def _by_query(self, x):
        """[B, K, rows, n] -> [B, K, G, block_q, n]"""
        return x.reshape(*x.shape[:2], self.problem.group, -1, x.shape[-1])


def take_rows(rows: Block, x):
    """[B, K, G, T, n] -> [B, K, rows, n], with the rows of all query heads of a group"""
    x = rows.take(x, 3)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def take_columns(rows: Block, x):
    """[B, K, n, G, T] -> [B, K, n, rows]; None -> None"""
    return x if x is None else rows.take(x, 4).reshape(*x.shape[:3], -1)


def by_head(x, heads: HeadRange):
    """[B, T, N, n] -> [B, K, G, T, n] of a range of heads"""
    x = heads.take(x, 2)
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads.heads, -1, x.shape[-1]), 1, 3)


def from_heads(x):
    """[B, K, G, T, n] -> [B, T, K * G, n]"""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def each_heads(p: Problem, at_a_time: int | None, one_range: Callable, outputs):
    """Runs outputs = one_range(heads, outputs) for all batch rows and heads, `at_a_time` key/value
    heads at a time (None: all at once)."""
    B, K = p.batch, p.kv_heads
    batch, heads = B, K
    if at_a_time is not None:
        heads = schedule.divisor(K, at_a_time)
        batch = schedule.divisor(B, at_a_time // K) if heads == K else 1
    across = K // heads

    def step(n, outputs):
        range_ = HeadRange(n // across * batch, batch, n % across * heads, heads, K)
        return one_range(range_, outputs)

    if (batch, heads) == (B, K):
        return step(0, outputs)
    return schedule.loop(0, B // batch * across, step, outputs)
