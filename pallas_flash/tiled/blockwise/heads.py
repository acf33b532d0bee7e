"""The operands of some heads in the order that their products take, and the loops over their query
blocks and key blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.key_blocks import KeyBlock, find_band, static_key_blocks
from pallas_flash.tiled.blockwise.logits import Logits
from pallas_flash.tiled.blockwise.mask import TileMask
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, block_at
from pallas_flash.tiled.blockwise.tuning import Tiles, unrolled


class SomeHeads(NamedTuple):
    """B, K and G, T, S are those of some heads."""

    problem: Problem
    tiles: Tiles
    query: jax.Array  # [B, K, G, T, H], times `logits.query_factor`
    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, Hv]
    sinks: jax.Array | None  # [K, G]
    mask: TileMask
    logits: Logits
    key_blocks: list[list[KeyBlock]] | None  # of each query block, where they are static

    @classmethod
    def take(cls, p: Problem, tiles: Tiles, heads: HeadRange, x: Operands) -> "SomeHeads":
        mask, logits = TileMask.take(p, heads, x), Logits.take(p, tiles, heads, x)
        q, k, v = (by_head(a, heads).astype(tiles.dtype) for a in (x.query, x.key, x.value))
        query = mask.zero_blind_rows(q * logits.query_factor)
        key, value = (mask.zero_hidden_keys(a[:, :, 0]) for a in (k, v))
        sinks = x.sinks
        if sinks is not None:
            sinks = heads.take(sinks[None], 1).reshape(heads.heads, -1)
        blocks = static_key_blocks(p, tiles)
        return cls(p, tiles, query, key, value, sinks, mask, logits, blocks)

    def each_query_block(self, query_block: Callable, outputs):
        """outputs = query_block(rows, key_blocks, outputs) for all of them; `key_blocks` is None
        where loops find them."""
        size, length = self.tiles.block_q, self.problem.queries
        if self.key_blocks is not None:
            for i, key_blocks in enumerate(self.key_blocks):
                rows = size if size == length else min(size, length - i * size)
                outputs = query_block(Block(i * size, rows), key_blocks, outputs)
            return outputs
        band = find_band(self.problem, size, self.tiles.block_k)

        def step(i, outputs):
            rows = block_at(i, size, length)
            keys = band and [band.key_block(self.problem.resolved_mask, rows)]
            return query_block(rows, keys, outputs)

        count = schedule.ceil_div(length, size)
        if band:
            at_a_time = unrolled(self.tiles, self.query.shape[:3])
            return lax.fori_loop(0, count, step, outputs, unroll=at_a_time)
        return schedule.loop(0, count, step, outputs)

    def each_key_block(self, rows: Block, key_blocks, step: Callable, first, start):
        """carry = step(keys, visible, rows_are_finite, carry) over the key blocks: from `first` on
        where they are static, else from `start` on, in loops."""
        if key_blocks is None:
            size, length = self.tiles.block_k, self.problem.keys
            blocks = self.mask.key_blocks(rows, size, length)

            def visit(t, carry, masked):
                keys = block_at(blocks.index(t), size, length)
                return step(keys, self.mask.visible(rows, keys, masked), False, carry)

            return blocks.visit(visit, start)
        if not key_blocks:
            return start
        can_be_finite, carry = self.logits.are_products and self.mask.dense is None, first
        for keys, needs_mask, rows_see_one in key_blocks:
            visible = self.mask.visible(rows, keys, needs_mask)
            carry = step(keys, visible, rows_see_one and can_be_finite, carry)
        return carry

    def sink_of_rows(self, rows: Block):
        """[1, K, rows]"""
        return None if self.sinks is None else jnp.repeat(self.sinks, rows.size, axis=1)[None]

    def by_query(self, x):
        """[B, K, rows, n] -> [B, K, G, block_q, n]"""
        return x.reshape(*x.shape[:2], self.problem.group, -1, x.shape[-1])


def take_rows(rows: Block, x):
    """[B, K, G, T, n] -> [B, K, rows, n], the rows of all query heads of a group"""
    x = rows.take(x, 3)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def take_columns(rows: Block, x):
    """[B, K, n, G, T] -> [B, K, n, rows], None of None"""
    return x if x is None else rows.take(x, 4).reshape(*x.shape[:3], -1)


def by_head(x, heads: HeadRange):
    """[B, T, N, n] -> [B, K, G, T, n] of some heads"""
    x = heads.take(x, 2)
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads.heads, -1, x.shape[-1]), 1, 3)


def from_heads(x):
    """[B, K, G, T, n] -> [B, T, K * G, n]"""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def each_heads(p: Problem, at_a_time: int | None, some_heads: Callable, outputs):
    """outputs = some_heads(heads, outputs) for all batch rows and heads, so many of them at a
    time; None: all at once."""
    B, K = p.batch, p.kv_heads
    batch, heads = B, K
    if at_a_time is not None:
        heads = schedule.divisor(K, at_a_time)
        batch = schedule.divisor(B, at_a_time // K) if heads == K else 1
    across = K // heads

    def step(n, outputs):
        range_ = HeadRange(n // across * batch, batch, n % across * heads, heads, K)
        return some_heads(range_, outputs)

    if (batch, heads) == (B, K):
        return step(0, outputs)
    return schedule.loop(0, B // batch * across, step, outputs)
