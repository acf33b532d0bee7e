"""What some heads' operands are, which of their blocks are visited, and what the rows of a block
see."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import dropout, online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.blockwise import parts
from pallas_flash.blockwise.parts import Block, Heads
from pallas_flash.blockwise.tuning import Tiles, scaled_last
from pallas_flash.blockwise.visits import alike, known_keys, neighbours
from pallas_flash.checks import sums
from pallas_flash.masks import block_types
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.bound import BoundMod
from pallas_flash.mods.score_mod import BoundScoreMod
from pallas_flash.pytrees import IntLike


class View(NamedTuple):
    """The operands of some heads, and what their rows see. B, K and G, T, S are those of the
    part."""

    problem: Problem
    tiles: Tiles
    fold: float  # what the queries are multiplied by
    unit: float  # of the scores: natural, or that of q k^T, whose scale comes last
    is_product: bool  # whether they are q k^T alone
    query: jax.Array  # [B, K, G, T, H]
    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, Hv]
    bias: jax.Array | None  # [B | 1, K | 1, G | 1, T | 1, S | 1]
    mask: jax.Array | None  # the same
    resolved_mask: ResolvedMask
    start: IntLike  # [B | 1, T], the keys that each row sees
    stop: IntLike
    sinks: jax.Array | None  # [K, G]
    seeds: jax.Array | None  # [B, K, G, 2]
    score: BoundScoreMod | None  # with numbers as the resolved_mask's where

    @classmethod
    def of(cls, p: Problem, tiles: Tiles, part: Heads, x: Operands) -> "View":
        resolved_mask = x.resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda a: part.of(a)[:, None])
        resolved_mask = resolved_mask.narrow(ResolvedMask.BY_QUERY + ResolvedMask.BY_KEY, part.of)
        where, score = (_of_heads(asked, p, part) for asked in (resolved_mask.mask_mod, x.score))
        if where is not None and where.block_types is not None:
            where = dataclasses.replace(
                where,
                block_types=schedule.lists(
                    block_types.merge(part.of(where.block_types, 1), (0, 1))
                ),
            )
        resolved_mask = dataclasses.replace(resolved_mask, mask_mod=where)
        start, stop = resolved_mask.interval(jnp.arange(p.queries, dtype=jnp.int32)[None])
        plain = x.bias is None and p.soft_cap is None and score is None
        last = scaled_last(p) and not tiles.is_wide
        fold, unit = p.scale or 1.0 if tiles.is_wide else 1.0, 1 / p.scale if last else 1.0
        is_product = last or (plain and fold == p.scale)
        q, k, v = (
            by_head(part.of(a, 2), part.heads).astype(tiles.dtype)
            for a in (x.query, x.key, x.value)
        )
        bias, mask = (
            None if a is None else _tiled(part.of(a, 1), part.heads) for a in (x.bias, x.mask)
        )
        sinks = None if x.sinks is None else part.of(x.sinks[None], 1).reshape(part.heads, -1)
        seeds = (
            None if x.seeds is None else part.of(x.seeds, 1).reshape(part.batch, part.heads, -1, 2)
        )
        q, k, v = q * fold, k[:, :, 0], v[:, :, 0]
        view = cls(
            p,
            tiles,
            fold,
            unit,
            is_product,
            q,
            k,
            v,
            bias,
            mask,
            resolved_mask,
            start,
            stop,
            sinks,
            seeds,
            score,
        )
        return view._replace(
            query=view.filled(view.query),
            key=view.reached(view.key),
            value=view.reached(view.value),
        )

    @property
    def has_data(self) -> bool:
        return dataclasses.replace(self.resolved_mask, mask_mod=None).has_data

    def filled(self, x):
        """x [B, K, G, T, n] with 0 for the rows that see nothing: there may be NaN."""
        return (
            jnp.where((self.start < self.stop)[:, None, None, :, None], x, 0)
            if self.has_data
            else x
        )

    def reached(self, x):
        """x [B, K, S, n] with 0 for the keys beyond every row's interval: there may be NaN."""
        if not self.has_data:
            return x
        last = jnp.max(jnp.where(self.start < self.stop, self.stop, 0), axis=1, keepdims=True)
        return jnp.where(
            (jnp.arange(x.shape[2], dtype=jnp.int32)[None] < last)[:, None, :, None], x, 0
        )

    def each_query_block(self, query_block, outputs):
        """outputs = query_block(row, keys, outputs) for all of them; `keys` is what `visit`
        takes."""
        size, length = self.tiles.block_q, self.problem.queries
        ranges = known_keys(self.problem, self.tiles)
        if ranges is None:
            one = alike(self.problem, size, self.tiles.block_k)

            def numbered(i, outputs):
                row = parts.numbered(i, size, length)
                keys = one and [
                    (neighbours(self.problem.resolved_mask, row, one.width), one.masked, one.some)
                ]
                return query_block(row, keys, outputs)

            return schedule.loop(0, schedule.ceil_div(length, size), numbered, outputs)
        for i, keys in enumerate(ranges):
            outputs = query_block(
                Block(i * size, size if size == length else min(size, length - i * size)),
                keys,
                outputs,
            )
        return outputs

    @staticmethod
    def is_all(keys: list | None) -> bool:
        """Whether rows see no other keys than those of one block."""
        return keys is not None and len(keys) == 1

    def visit(self, row: Block, keys: list | None, step, first, start):
        """carry = step(key block, what is seen of it, carry), from `first` on over the keys known
        while tracing, and then with whether each row has a score above -inf; else from `start` on
        in loops."""
        if keys:
            for key, masked, some in keys:
                finite = some and self.is_product and self.mask is None
                first = step(key, self.sees(row, key, masked), first, finite)
            return first
        if keys is not None:
            return start
        size, length, where = self.tiles.block_k, self.problem.keys, self.resolved_mask.mask_mod
        if self.resolved_mask.has_data:
            contiguous = self.resolved_mask.contiguous
            blocks = schedule.key_blocks(
                *self.interval(row), None if contiguous is None else row.of(contiguous, 1), size
            )
        else:
            v, last = self.resolved_mask, row.start + row.size - 1
            blocks = schedule.known_blocks(v, row.start, last, size)
            # one loop compiles in half the time of two, and most blocks of a narrow band need its
            # mask
            if v.left is not None:
                blocks = blocks._replace(full_first=blocks.last, full_last=blocks.last)
        if where is not None:
            all_masked = schedule.Blocks(blocks.first, blocks.last, blocks.last, blocks.last)
            number = schedule.ceil_div(row.start, row.size)
            blocks = (
                all_masked
                if where.block_types is None
                else schedule.Listed.of(where.block_types, number)
            )

        def numbered(j, carry, masked):
            key = parts.numbered(j, size, length)
            return step(key, self.sees(row, key, masked), carry)

        return blocks.visit(numbered, start)

    def sees(self, row: Block, key: Block, masked: bool):
        """Whether the rows see the keys, to broadcast against [B, K, rows, keys], or None where
        they see all."""
        seen = None if self.mask is None else self.scored(row, key, self.mask)
        if masked:
            of_rows = lambda a: a if isinstance(a, int) else self.of_rows(a)
            v, index = self.resolved_mask, key.index[None, None, None]
            ids = (
                ()
                if v.query_ids is None
                else (of_rows(row.of(v.query_ids, 1)), key.of(v.key_ids, 1)[:, None, None])
            )
            inside = v.visible(*map(of_rows, self.interval(row)), index, *ids)
            inside = inside if key.own is None else inside & (index >= key.own)
            inside = inside if v.mask_mod is None else inside & self.allowed(row, key)
            seen = inside if seen is None else seen & inside
        return seen

    def interval(self, row: Block):
        """The keys that each of the rows sees, ints or [B | 1, rows]."""
        if not self.has_data:
            return self.resolved_mask.interval(row.index[None])
        return tuple(a if isinstance(a, int) else row.of(a, 1) for a in (self.start, self.stop))

    def allowed(self, row: Block, key: Block):
        """Whether the mask's mask_mod lets the rows see the keys, to broadcast against [B, K,
        rows, keys]."""
        where = self.resolved_mask.mask_mod
        return where.visible(*self.numbers(where, row, key))

    def numbers(self, asked: BoundMod, row: Block, key: Block):
        """Batch row, head, position and key of each pair, to broadcast against [B, K, rows,
        keys]."""
        position, heads = self.of_rows(row.index[None] + asked.offset), asked.head
        if asked.mod.uses_head:
            heads = jnp.broadcast_to(heads, (*heads.shape[:3], row.size)).reshape(
                1, heads.shape[1], -1, 1
            )
        return asked.batch[:, None, None, None], heads, position, key.index

    def scores(self, q, row: Block, key: Block):
        """[B, K, rows, keys]"""
        s = self.logits(q, row, key, 1.0)
        return (
            s
            if self.score is None
            else self.score.apply(s, self.read, *self.numbers(self.score, row, key))
        )

    def scores_vjp(self, q, row: Block, key: Block):
        """The same, the tanh of a soft cap on them (else None), and with a score_mod (else None)
        what makes of their cotangent that of what q k^T was made, and adds to the gradients of the
        tables."""
        s, tanh = online_softmax.with_tanh(
            functools.partial(self.logits, q, row, key), self.problem.soft_cap, 1.0
        )
        if self.score is None:
            return s, tanh, None
        s, pull = self.score.vjp(s, self.read, *self.numbers(self.score, row, key))

        def back(ds, dtables):
            ds, of_tables = pull(ds)
            dtables = list(dtables)
            for array, index, d in of_tables:
                dtables[array] = dtables[array].at[index].add(d.astype(dtables[array].dtype))
            return online_softmax.capped(ds, tanh), tuple(dtables)

        return s, None, back

    def read(self, array: int, index: tuple):
        return self.score.arrays[array].at[index].get(mode="promise_in_bounds")

    def logits(self, q, row: Block, key: Block, unit: float):
        """[B, K, rows, keys]: scale q k^T, with bias and soft cap, in this unit; or q k^T, where
        the scale comes last."""
        p, qk = self.problem, dot_t(q, key.of(self.key, 2))
        if self.is_product:
            return qk
        bias = None if self.bias is None else self.scored(row, key, self.bias).astype(qk.dtype)
        return online_softmax.scores(qk, bias, p.scale / self.fold, p.soft_cap, unit)

    def rows(self, row: Block, x):
        """[B, K, G, T, n] -> [B, K, rows, n]"""
        x = row.of(x, 3)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def columns(self, row: Block, x):
        """[B, K, n, G, T] -> [B, K, n, rows], None of None"""
        return x if x is None else row.of(x, 4).reshape(*x.shape[:3], -1)

    def by_query(self, x):
        """[B, K, rows, n] -> [B, K, G, block_q, n]"""
        return x.reshape(*x.shape[:2], self.problem.group, -1, x.shape[-1])

    def of_rows(self, x):
        """[B | 1, block_q | 1] -> [B | 1, 1, rows | 1, 1]"""
        return jnp.tile(
            x[:, None, :, None], (1, 1, self.problem.group if x.shape[1] != 1 else 1, 1)
        )

    def sinks_of(self, row: Block):
        """The sink of each row's head, [1, K, rows]."""
        return None if self.sinks is None else jnp.repeat(self.sinks, row.size, axis=1)[None]

    def dropped(self, x, row: Block, key: Block):
        """x [B, K, rows, keys] with 0 where dropout drops the weight."""
        if self.seeds is None:
            return x
        first, second = (self.seeds[:, :, :, i, None, None] for i in range(2))  # [B, K, G, 1, 1]
        index, key_index = row.index[None, None, None, :, None], key.index[None, None, None, None]
        # [B, K, G, block_q, keys]
        kept = dropout.keeps(self.problem.dropped, first, second, index, key_index)
        return jnp.where(kept.reshape(x.shape), x, 0)

    def scored(self, row: Block, key: Block, x):
        """The tile of a bias or mask: [B | 1, K | 1, G | 1, T | 1, S | 1] -> [B | 1, K | 1, rows |
        1, keys | 1]"""
        tile = key.of(row.of(x, 3), 4)
        if tile.shape[2:4] != (1, 1):
            tile = jnp.broadcast_to(
                tile, (*tile.shape[:2], self.problem.group, row.size, tile.shape[4])
            )
        return tile.reshape(*tile.shape[:2], -1, tile.shape[4])

    def add_tile(self, dbias, ds, row: Block, key: Block):
        """Adds ds [B, K, rows, keys] to its place in dbias, summed over the axes that the bias
        broadcasts."""
        ds = self.by_query(ds)
        old = row.of(dbias, 3)
        tile = jnp.sum(
            ds, axis=[axis for axis, n in enumerate(dbias.shape) if n == 1], keepdims=True
        )
        return row.put(dbias, key.add(old, tile, 4), 3)


def with_lists(p: Problem, tiles: Tiles, resolved_mask: ResolvedMask) -> ResolvedMask:
    """The mask with the kinds of these tiles' blocks, if it has a mask_mod and there are loops to
    go over them."""
    where, known = (
        resolved_mask.mask_mod,
        all(isinstance(n, int) for n in (p.batch, p.queries, p.keys)),
    )
    if where is None or not known or known_keys(p, tiles) is not None:
        return resolved_mask
    found = schedule.block_kinds(
        resolved_mask, p.batch, p.heads, p.queries, tiles.block_q, tiles.block_k
    )
    if p.queries % tiles.block_q:  # the last block is moved back over the one before it
        xp = np if isinstance(found, np.ndarray) else jnp
        found = xp.concatenate(
            [found[:, :, :-1], block_types.merge(found[:, :, -2:], 2)[:, :, None]], 2
        )
    return dataclasses.replace(
        resolved_mask, mask_mod=dataclasses.replace(where, block_types=found)
    )


def _of_heads(asked: BoundMod | None, p: Problem, part: Heads) -> BoundMod | None:
    """A rule with the numbers of some heads [1, K, G, 1] and batch rows."""
    if asked is None:
        return None
    batch, heads = asked.indices(p.batch, p.heads)
    batch, heads = part.of(batch) if asked.mod.uses_batch else batch, part.of(heads[None], 1)
    heads = (
        heads.reshape(1, part.heads, -1, 1) if asked.mod.uses_head else heads.reshape(1, 1, 1, 1)
    )
    offset = asked.offset if isinstance(asked.offset, int) else part.of(asked.offset)[:, None]
    return dataclasses.replace(asked, batch=batch, head=heads, offset=offset)


def by_head(x, heads: int):
    """[B, T, N, H] -> [B, K, G, T, H]"""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1, x.shape[-1]), 1, 3)


def _tiled(x, heads: int):
    """[B | 1, N | 1, T | 1, S | 1] -> [B | 1, K | 1, G | 1, T | 1, S | 1]"""
    return x.reshape(x.shape[0], *((heads, -1) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])


def dot(a, b, dtype=None):
    """[B, K, m, n] [B, K, n, h] -> [B, K, m, h], in the dtype of sums if no other is given"""
    return _product(a, b, 2, dtype)


def dot_t(a, b):
    """[B, K, m, h] [B, K, n, h] -> [B, K, m, n]"""
    return _product(a, b, 3)


def over_rows(x, x_t, weights):
    """[B, K, h, keys], the sum of rows x [B, K, rows, h] by weights [B, K, rows, keys]: from x_t,
    which is x transposed, or, if that is None, from the weights transposed."""
    if x_t is not None:
        return dot(x_t, weights)
    return jnp.swapaxes(dot(lax.optimization_barrier(jnp.swapaxes(weights, 2, 3)), x), 2, 3)


def _product(a, b, axis: int, dtype=None):
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(
        a, b, dims, precision="highest", preferred_element_type=dtype or sums(a.dtype)
    )
