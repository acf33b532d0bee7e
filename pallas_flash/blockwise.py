"""FlashAttention-2 in plain JAX: query blocks outside, key blocks inside, O(T + S) memory, on any device.

On a CPU a few heads go at a time, so that what passes between two products stays in the caches, and where the blocks are few and
known while tracing they are no loop. Scores stand as [keys, rows]: then each of the backward's products, but that of the keys
with ds, takes its operands as they lie, and a row's statistics lie along the vector. Rows are those of all query heads that
share a key/value head.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import online_softmax, parts, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.parts import Block, Heads
from pallas_flash.visibility import Ints, Visibility


class Tiles(NamedTuple):
    block_q: int
    block_k: int
    heads: int | None  # key/value heads at a time, of all B * K; None: all, which a partitioner can spread over devices
    dtype: str  # of the products' operands

    def __str__(self):
        heads = "all" if self.heads is None else self.heads
        return f"{self.block_q} queries of {heads} key/value heads by {self.block_k} keys, multiplied in {self.dtype}"


UNROLLED = 40  # blocks; more of them are loops, which compile in the same time at any length
SCORES = 2**20  # that are in flight at a time on a CPU: what its caches hold, with what is made of them


def tiles(problem: Problem) -> Tiles:
    p = problem
    if jax.default_backend() != "cpu":
        return Tiles(_at_most(512, p.queries), _at_most(256, p.keys), None, p.dtype)
    block_q, block_k = _at_most(max(128 // p.group, 16), p.queries), _at_most(2048, p.keys)
    dtype = "float64" if p.dtype == "float64" else "float32"  # its products of 16 bits are slow
    if not all(isinstance(n, int) for n in (p.batch, p.queries, p.keys)):
        return Tiles(block_q, block_k, None, dtype)
    return Tiles(block_q, block_k, max(SCORES // (p.group * block_q * block_k), 1), dtype)


def _at_most(size: int, length: int) -> int:
    """A symbol of jax.export is one block."""
    return min(size, length) if isinstance(length, int) else length


def _is_one_cpu() -> bool:
    """Whether a loop over heads is no loop over devices: that would gather what a partitioner has spread."""
    types = jax.sharding.get_abstract_mesh().axis_types
    alone = jax.device_count() == 1 or (types and all(t == jax.sharding.AxisType.Manual for t in types))
    return jax.default_backend() == "cpu" and bool(alone)


def forward(problem: Problem, tiles: Tiles, x: Operands):
    p, wide = problem, _wide(tiles)

    def some_heads(part: Heads, outputs):
        view = _View.of(p, tiles, part, x)
        v_t = _transposed(view.value)
        zeros = lambda *shape: _zeros(x, wide, part.batch, part.heads, *shape)

        def query_block(row: Block, keys, outputs):
            q = view.rows(row, view.query)

            def step(key: Block, seen, carry):
                o, m, l = carry
                s = view.scores(q, row, key)
                s = s if seen is None else jnp.where(seen, s, -jnp.inf)
                prob, alpha, m, l = online_softmax.step_by_key(s, m, l)
                pv = _dot(key.of(v_t, 3), prob.astype(v_t.dtype))
                return pv if alpha is None else o * alpha[:, :, None] + pv, m, l

            l = zeros(q.shape[2])
            start = zeros(p.value_size, q.shape[2]), l + online_softmax.LOWEST, l
            o, m, l = view.visit(row, keys, step, (None, None, None), start)
            o = online_softmax.finish(_transposed(o), l)
            new = (view.by_query(a) for a in (o, m[..., None], l[..., None]))
            return tuple(row.put(out, a, 3) for out, a in zip(outputs, new, strict=True))

        rows = p.group, p.queries
        o, *stats = view.each_query_block(query_block, (zeros(*rows, p.value_size), zeros(*rows, 1), zeros(*rows, 1)))
        new = _from_heads(o), *(a.reshape(part.batch, -1, p.queries) for a in stats)
        return tuple(part.put(out, a, axis) for out, a, axis in zip(outputs, new, (2, 1, 1), strict=True))

    stats = [_zeros(x, wide, p.batch, p.heads, p.queries)] * 2
    o, *stats = _each_part(p, tiles, some_heads, (_zeros(x, p.dtype, p.batch, p.queries, p.heads, p.value_size), *stats))
    return o, online_softmax.Statistics(*stats)


def backward(problem: Problem, tiles: Tiles, x: Operands, o, lse, do, delta):
    p, wide = problem, _wide(tiles)

    def some_heads(part: Heads, outputs):
        view = _View.of(p, tiles, part, x)
        k_t = _transposed(view.key)
        do_ = view.filled(_by_head(part.of(do, 2), part.heads).astype(tiles.dtype))
        by_row = [part.of(a, 1).reshape(*do_.shape[:-1], 1) for a in (lse, delta)]

        def query_block(row: Block, keys, gradients):
            q, do_i = view.rows(row, view.query), view.rows(row, do_)
            lse_i, delta_i = (view.rows(row, a)[:, :, None, :, 0] for a in by_row)
            if row.own is not None:
                lse_i = jnp.where(view.of_rows(row.index[None] >= row.own), lse_i, jnp.inf)

            def step(key: Block, seen, carry):
                dq, dk, dv, dbias = carry
                s, dp = view.scores(q, row, key), _dot_t(key.of(view.value, 2), do_i)
                if seen is not None and p.soft_cap is None:
                    s, seen = jnp.where(seen, s, -jnp.inf), None
                prob, ds = online_softmax.gradients(s, seen, lse_i, dp, delta_i, p.soft_cap)
                low = ds.astype(q.dtype)
                dk = key.add(dk, _dot(low, q), 2)
                dv = key.add(dv, _dot(prob.astype(q.dtype), do_i), 2)
                return dq + _dot(key.of(k_t, 3), low), dk, dv, dbias if dbias is None else view.add_tile(dbias, ds, row, key)

            dq, *gradients = gradients
            start = _zeros(x, wide, *q.shape[:2], p.head_size, q.shape[2]), *gradients
            dq_i, *gradients = view.visit(row, keys, step, start, start)
            return row.add(dq, view.by_query(_transposed(dq_i)), 3), *gradients  # what is not its own is zero

        like = view.query, view.key, view.value, view.bias
        zeros = tuple(None if a is None else _zeros(x, wide, *a.shape) for a in like)
        dq, dk, dv, dbias = view.each_query_block(query_block, zeros)
        new = _from_heads(dq * p.scale), *(_from_heads(d[:, :, None]) for d in (dk * (p.scale / view.fold), dv))
        new = [part.put(out, a, 2) for out, a in zip(outputs, new, strict=False)]
        return *new, dbias if dbias is None else part.add(outputs[3], dbias.reshape(part.of(outputs[3], 1).shape), 1)

    bias = None if x.bias is None else _zeros(x, wide, *x.bias.shape)
    start = *(jnp.zeros_like(a) for a in (x.query, x.key, x.value)), bias
    dq, dk, dv, dbias = _each_part(p, tiles, some_heads, start)
    return dq, dk, dv, dbias if dbias is None else dbias.astype(x.bias.dtype)


def _each_part(p: Problem, tiles: Tiles, some_heads: Callable, outputs):
    """outputs = some_heads(part, outputs) for all batch rows and heads, tiles.heads of them at a time."""
    B, K = p.batch, p.kv_heads
    batch, heads = B, K
    if tiles.heads is not None:
        heads = _divisor(K, tiles.heads)
        batch = _divisor(B, tiles.heads // K) if heads == K else 1
    across = K // heads

    def step(n, outputs):
        return some_heads(Heads(n // across * batch, batch, n % across * heads, heads, K), outputs)

    if (batch, heads) == (B, K):
        return step(0, outputs)
    return schedule.loop(0, B // batch * across, step, outputs)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(most, 1))


class _View(NamedTuple):
    """The operands of some heads, and what their rows see. B, K and G, T, S are those of the part."""

    problem: Problem
    tiles: Tiles
    fold: float  # what the queries are multiplied by
    query: jax.Array  # [B, K, G, T, H]
    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, Hv]
    bias: jax.Array | None  # [B | 1, K | 1, G | 1, T | 1, S | 1]
    mask: jax.Array | None  # the same
    visibility: Visibility
    start: Ints  # [B | 1, T], the keys that each row sees
    stop: Ints

    @classmethod
    def of(cls, p: Problem, tiles: Tiles, part: Heads, x: Operands) -> "_View":
        visibility = x.visibility.narrow(Visibility.BY_BATCH, lambda a: part.of(a)[:, None])
        visibility = visibility.narrow(Visibility.BY_QUERY + Visibility.BY_KEY, part.of)
        start, stop = visibility.interval(jnp.arange(p.queries, dtype=jnp.int32)[None])
        plain = x.bias is None and p.soft_cap is None and tiles.dtype in ("float32", "float64")
        fold = p.scale * online_softmax.LOG2E or 1.0 if plain else 1.0
        q, k, v = (_by_head(part.of(a, 2), part.heads).astype(tiles.dtype) for a in (x.query, x.key, x.value))
        bias, mask = (None if a is None else _tiled(part.of(a, 1), part.heads) for a in (x.bias, x.mask))
        view = cls(p, tiles, fold, q * fold, k[:, :, 0], v[:, :, 0], bias, mask, visibility, start, stop)
        return view._replace(query=view.filled(view.query), key=view.reached(view.key), value=view.reached(view.value))

    @property
    def is_data(self) -> bool:
        return bool(jax.tree.leaves(self.visibility))

    def filled(self, x):
        """x [B, K, G, T, n] with 0 for the rows that see nothing: there may be NaN."""
        return jnp.where((self.start < self.stop)[:, None, None, :, None], x, 0) if self.is_data else x

    def reached(self, x):
        """x [B, K, S, n] with 0 for the keys beyond every row's interval: there may be NaN."""
        if not self.is_data:
            return x
        last = jnp.max(jnp.where(self.start < self.stop, self.stop, 0), axis=1, keepdims=True)
        return jnp.where((jnp.arange(x.shape[2], dtype=jnp.int32)[None] < last)[:, None, :, None], x, 0)

    def each_query_block(self, query_block, outputs):
        """outputs = query_block(row, keys, outputs) for all of them; `keys` is what `visit` takes."""
        size, length = self.tiles.block_q, self.problem.queries
        ranges = _ranges(self.problem, self.tiles)
        if ranges is None:
            last = schedule.ceil_div(length, size)
            return schedule.loop(0, last, lambda i, out: query_block(parts.numbered(i, size, length), None, out), outputs)
        for i, keys in enumerate(ranges):
            outputs = query_block(Block(i * size, size if size == length else min(size, length - i * size)), keys, outputs)
        return outputs

    def visit(self, row: Block, keys: list | None, step, first, start):
        """carry = step(key block, what is seen of it, carry), from `first` on over the keys known while tracing, else from
        `start` on in loops."""
        if keys:
            for key, masked in keys:
                first = step(key, self.sees(row, key, masked), first)
            return first
        if keys is not None:
            return start
        of = lambda a: a if a is None or isinstance(a, int) else row.of(a, 1)
        size, length = self.tiles.block_k, self.problem.keys
        blocks = schedule.key_blocks(of(self.start), of(self.stop), of(self.visibility.solid), size)

        def numbered(j, carry, masked):
            key = parts.numbered(j, size, length)
            return step(key, self.sees(row, key, masked), carry)

        return blocks.visit(numbered, start)

    def sees(self, row: Block, key: Block, masked: bool):
        """Whether the rows see the keys, to broadcast against [B, K, keys, rows], or None where they see all."""
        seen = None if self.mask is None else self.scored(row, key, self.mask)
        if masked:
            of = lambda a: a if isinstance(a, int) else self.of_rows(row.of(a, 1))
            v, index = self.visibility, key.index[None, None, :, None]
            ids = () if v.query_ids is None else (of(v.query_ids), key.of(v.key_ids, 1)[:, None, :, None])
            inside = v.sees(of(self.start), of(self.stop), index, *ids)
            inside = inside if key.own is None else inside & (index >= key.own)
            seen = inside if seen is None else seen & inside
        return seen

    def scores(self, q, row: Block, key: Block):
        """[B, K, keys, rows]"""
        qk = _dot_t(key.of(self.key, 2), q)
        if self.fold != 1.0:
            return qk
        bias = None if self.bias is None else self.scored(row, key, self.bias).astype(qk.dtype)
        return online_softmax.scores(qk, bias, self.problem.scale, self.problem.soft_cap)

    def rows(self, row: Block, x):
        """[B, K, G, T, n] -> [B, K, rows, n]"""
        x = row.of(x, 3)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def by_query(self, x):
        """[B, K, rows, n] -> [B, K, G, block_q, n]"""
        return x.reshape(*x.shape[:2], self.problem.group, -1, x.shape[-1])

    def of_rows(self, x):
        """[B | 1, block_q | 1] -> [B | 1, 1, 1, rows | 1]"""
        return jnp.tile(x[:, None, None], (1, 1, 1, self.problem.group if x.shape[1] > 1 else 1))

    def scored(self, row: Block, key: Block, x):
        """The tile of a bias or mask: [B | 1, K | 1, G | 1, T | 1, S | 1] -> [B | 1, K | 1, keys | 1, rows | 1]"""
        tile = jnp.moveaxis(key.of(row.of(x, 3), 4), 4, 2)
        if tile.shape[3:] != (1, 1):
            tile = jnp.broadcast_to(tile, (*tile.shape[:3], self.problem.group, row.size))
        return tile.reshape(*tile.shape[:3], -1)

    def add_tile(self, dbias, ds, row: Block, key: Block):
        """Adds ds [B, K, keys, rows] to its place in dbias, summed over the axes that the bias broadcasts."""
        ds = jnp.moveaxis(ds.reshape(*ds.shape[:3], self.problem.group, row.size), 2, 4)
        old = row.of(dbias, 3)
        tile = jnp.sum(ds, axis=[axis for axis, n in enumerate(dbias.shape) if n == 1], keepdims=True)
        return row.put(dbias, key.add(old, tile, 4), 3)


def _ranges(p: Problem, tiles: Tiles) -> list | None:
    """For each query block the key blocks known while tracing, and whether they need a mask; None: loops find them."""
    one_q, one_k = tiles.block_q == p.queries, tiles.block_k == p.keys
    is_data = bool(jax.tree.leaves(p.visibility))
    if (is_data and not one_k) or (not one_q and schedule.ceil_div(p.queries, tiles.block_q) > UNROLLED):
        return None
    if not isinstance(p.keys, int) or not isinstance(p.queries, int):
        return [[(Block(0, p.keys), True)]] if one_q and one_k else None
    size, blocks = tiles.block_k, []
    for first, last, whole in schedule.key_ranges(p.visibility, p.queries, tiles.block_q):
        blocks.append([(Block(i, min(size, last - i)), is_data or not whole) for i in range(first, last, size)])
    return blocks if sum(map(len, blocks)) <= UNROLLED else None


def _wide(tiles: Tiles):
    return jnp.promote_types(tiles.dtype, jnp.float32)


def _zeros(x: Operands, dtype, *shape):
    """Zeros that vary over the same devices as the operands do."""
    return jnp.zeros_like(x.query, shape=shape, dtype=dtype)


def _by_head(x, heads: int):
    """[B, T, N, H] -> [B, K, G, T, H]"""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1, x.shape[-1]), 1, 3)


def _from_heads(x):
    """[B, K, G, T, H] -> [B, T, K * G, H]"""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _tiled(x, heads: int):
    """[B | 1, N | 1, T | 1, S | 1] -> [B | 1, K | 1, G | 1, T | 1, S | 1]"""
    return x.reshape(x.shape[0], *((heads, -1) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])


def _transposed(x):
    """x^T for itself: XLA would make it part of a product, and with the first operand transposed a CPU's products are slow."""
    return jnp.swapaxes(lax.optimization_barrier(x), 2, 3) if False else lax.optimization_barrier(jnp.swapaxes(lax.optimization_barrier(x), 2, 3))


def _dot(a, b):
    """[B, K, m, n] [B, K, n, h] -> [B, K, m, h]"""
    return _product(a, b, 2)


def _dot_t(a, b):
    """[B, K, m, h] [B, K, n, h] -> [B, K, m, n]"""
    return _product(a, b, 3)


def _product(a, b, axis: int):
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, dims, precision="highest", preferred_element_type=dtype)
