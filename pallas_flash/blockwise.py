"""FlashAttention-2 in plain JAX: query blocks outside, key blocks inside, O(T + S) memory, on any device.

Arrays go by head here: q, o [B, K, G, T, H] and k, v [B, K, 1, S, H], G query heads to a key/value head. The last block of a
ragged length is moved back until it ends with the array, so nothing is padded; what it shares with the block before counts once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.masks import Visibility


class Tiles(NamedTuple):
    block_q: int
    block_k: int


def tiles(problem: Problem) -> Tiles:
    return Tiles(min(512, problem.queries), min(256, problem.keys))


def forward(problem: Problem, tiles: Tiles, x: Operands):
    p, x = problem, _by_head(problem, x)
    rows = (p.batch, p.kv_heads, p.group, p.queries)

    def query_block(i, outputs):
        row, view = _query_block(p, tiles, x, i)
        q = row.of(x.query)

        def step(j, carry, masked):
            o, m, l = carry
            key = _block(j, tiles.block_k, p.keys)
            seen = view.sees(key, masked)
            s = _scores(p, x, q, row, key)
            s = s if seen is None else jnp.where(seen, s, -jnp.inf)
            prob, alpha, m, l = online_softmax.step(s, m, l)
            v = view.hide(key, key.of(x.value), masked)
            return o * alpha[..., None] + _dot(prob.astype(v.dtype), v), m, l

        l = _zeros(x, *rows[:3], tiles.block_q)
        start = _zeros(x, *l.shape, p.value_size), l + online_softmax.LOWEST, l
        o, *stats = view.blocks.visit(step, start)
        rows_of = (online_softmax.finish(o, stats[1]), *(x[..., None] for x in stats))
        return tuple(row.put(output, block) for output, block in zip(outputs, rows_of, strict=True))

    outputs = _zeros(x, *rows, p.value_size).astype(x.query.dtype), _zeros(x, *rows, 1), _zeros(x, *rows, 1)
    o, *stats = schedule.loop(0, schedule.ceil_div(p.queries, tiles.block_q), query_block, outputs)
    return _from_heads(o), online_softmax.Statistics(*(x.reshape(p.batch, p.heads, p.queries) for x in stats))


def backward(problem: Problem, tiles: Tiles, x: Operands, o, lse, do, delta):
    p, bias_dtype = problem, x.bias is not None and x.bias.dtype
    x, do = _by_head(p, x), _group(p, do)
    lse, delta = (r.reshape(p.batch, p.kv_heads, p.group, p.queries) for r in (lse, delta))

    def query_block(i, gradients):
        row, view = _query_block(p, tiles, x, i)
        q, do_, lse_, delta_ = view.filled(row.of(x.query)), view.filled(row.of(do)), row.of(lse, 3), row.of(delta, 3)
        lse_ = jnp.where(row.own, lse_, jnp.inf)

        def step(j, carry, masked):
            dq, dk, dv, dbias = carry
            key = _block(j, tiles.block_k, p.keys)
            seen = view.sees(key, masked)
            k, v = (view.hide(key, key.of(kv), masked) for kv in (x.key, x.value))
            s = _scores(p, x, q, row, key)
            prob, ds = online_softmax.gradients(s, seen, lse_, _dot_t(do_, v), delta_, p.soft_cap)
            ds16 = ds.astype(q.dtype)
            dq = dq + _dot(ds16, k)
            dk = key.add(dk, _t_dot(ds16, q))
            dv = key.add(dv, _t_dot(prob.astype(do_.dtype), do_))
            return dq, dk, dv, dbias if dbias is None else _add_tile(dbias, ds, row, key)

        dq, *gradients = gradients
        dq_, *gradients = view.blocks.visit(step, (_zeros(x, *q.shape), *gradients))
        return row.add(dq, dq_ * p.scale), *gradients  # what is not its own is zero

    zeros = lambda a: None if a is None else _zeros(x, *a.shape)
    start = jnp.zeros_like(x.query), zeros(x.key), zeros(x.value), zeros(x.bias)
    dq, dk, dv, dbias = schedule.loop(0, schedule.ceil_div(p.queries, tiles.block_q), query_block, start)
    dk, dv = (_from_heads(d.astype(q.dtype)) for d, q in ((dk * p.scale, x.key), (dv, x.value)))
    if dbias is not None:
        dbias = dbias.reshape(p.bias).astype(bias_dtype)
    return _from_heads(dq), dk, dv, dbias


class _Block(NamedTuple):
    """`size` neighbouring rows or keys; those that the block before it has too are not its `own`."""

    start: jax.Array
    index: jax.Array  # [size]
    own: jax.Array  # [size], bool

    def of(self, x, axis=-2):
        """The block of x, or all of an axis that broadcasts."""
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, self.start, self.index.size, axis)

    def put(self, x, block, axis=-2):
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.start, axis % x.ndim)

    def add(self, x, block):
        return self.put(x, self.of(x) + block)


def _block(number, size, length) -> _Block:
    start = jnp.minimum(number * size, length - size)
    index = start + jnp.arange(size, dtype=jnp.int32)
    return _Block(start, index, index >= number * size)


class _View(NamedTuple):
    """What the rows of a query block see."""

    visibility: Visibility
    start: jax.Array  # [B or 1, 1, 1, block_q, 1], as everything that follows the rows
    stop: jax.Array
    blocks: schedule.Blocks
    mask: jax.Array | None  # the rows of the dense mask

    def sees(self, key: _Block, masked: bool):
        """Whether the rows see the keys, or None where they see all."""
        seen = None if self.mask is None else key.of(self.mask, -1)
        if masked:
            v = self.visibility
            ids = () if v.query_ids is None else (_rows(v.query_ids), key.of(v.key_ids, 1)[:, None, None, None, :])
            inside = v.sees(self.start, self.stop, key.index, *ids) & key.own[(None,) * 4]
            seen = inside if seen is None else seen & inside
        return seen

    def hide(self, key: _Block, x, masked: bool):
        """x [.., keys, H] with 0 for the keys beyond every row's interval: there may be NaN."""
        limit = jnp.max(self.stop, axis=-2, keepdims=True)
        return jnp.where(key.index[(None,) * 3][..., None] < limit, x, 0) if masked else x

    def filled(self, x):
        """x [.., rows, H] with 0 for the rows that see nothing."""
        return jnp.where(self.start < self.stop, x, 0)


def _rows(x):
    """[B or 1, block_q] or an int, to broadcast against [B, K, G, block_q, keys]."""
    return jnp.asarray(x)[..., None, None, :, None] if jnp.ndim(x) else jnp.full((1,) * 5, x)


def _query_block(p: Problem, tiles: Tiles, x: Operands, i) -> tuple[_Block, _View]:
    row = _block(i, tiles.block_q, p.queries)
    visibility = x.visibility.narrow(Visibility.BY_BATCH, lambda a: a[:, None])
    visibility = visibility.narrow(Visibility.BY_QUERY, lambda a: row.of(a, 1))
    start, stop = visibility.interval(row.index[None])
    blocks = schedule.key_blocks(start, stop, visibility.solid, tiles.block_k)
    return row, _View(visibility, _rows(start), _rows(stop), blocks, None if x.mask is None else row.of(x.mask))


def _scores(p: Problem, x: Operands, q, row: _Block, key: _Block):
    bias = None if x.bias is None else key.of(row.of(x.bias), -1).astype(jnp.float32)
    return online_softmax.scores(_dot_t(q, key.of(x.key)), bias, p.scale, p.soft_cap)


def _add_tile(dbias, ds, row: _Block, key: _Block):
    """Adds ds to its place in dbias, summed over the axes that the bias broadcasts."""
    tile = key.of(row.of(dbias), -1)
    broadcast = [axis for axis, n in enumerate(tile.shape) if n == 1]
    tile = tile + jnp.sum(ds, axis=broadcast, keepdims=True)
    zero = jnp.int32(0)
    at = [zero, zero, zero, row.start if dbias.shape[3] > 1 else zero, key.start if dbias.shape[4] > 1 else zero]
    return lax.dynamic_update_slice(dbias, tile, at)


def _zeros(x: Operands, *shape):
    """float32 zeros that vary over the same devices as the operands do."""
    return jnp.zeros_like(x.query, shape=shape, dtype=jnp.float32)


def _group(p: Problem, x):
    """[B, T, N, H] -> [B, K, G, T, H]"""
    return jnp.moveaxis(x.reshape(p.batch, -1, p.kv_heads, p.group, x.shape[-1]), 1, 3)


def _from_heads(x):
    """[B, K, G, T, H] -> [B, T, K * G, H]"""
    B, K, G, T, H = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(B, T, K * G, H)


def _by_head(p: Problem, x: Operands) -> Operands:
    def tiled(a):  # [B | 1, N | 1, T | 1, S | 1] -> [B | 1, K | 1, G | 1, T | 1, S | 1]
        heads = (p.kv_heads, p.group) if a.shape[1] > 1 else (1, 1)
        return a.reshape(a.shape[0], *heads, *a.shape[2:])

    k, v = (jnp.swapaxes(a, 1, 2)[:, :, None] for a in (x.key, x.value))
    bias, mask = (None if a is None else tiled(a) for a in (x.bias, x.mask))
    return Operands(_group(p, x.query), k, v, bias, mask, x.visibility)


def _dot(a, b):
    """[.., q, k] [.., k, h] -> [.., q, h]"""
    return _folded("bkqs,bksh->bkqh", a, b)


def _dot_t(a, b):
    """[.., q, h] [.., k, h] -> [.., q, k]"""
    return _folded("bkqh,bksh->bkqs", a, b)


def _folded(spec, a, b):
    B, K, G, m, n = a.shape
    out = jnp.einsum(spec, a.reshape(B, K, G * m, n), b[:, :, 0], **_EXACT)
    return out.reshape(B, K, G, m, -1)


def _t_dot(a, b):
    """Sums over heads: [.., G, q, k] [.., G, q, h] -> [.., 1, k, h]"""
    return jnp.einsum("bkgqs,bkgqh->bksh", a, b, **_EXACT)[:, :, None]


_EXACT = dict(precision="highest", preferred_element_type=jnp.float32)
