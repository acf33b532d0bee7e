"""Decoding in plain JAX: on a CPU one batch row after the other, by blocks of keys; blocks that no
row sees are not read.

Only the keys and values of one block at a time are copied, into the order of the heads, and these
copies fit into the CPU's caches.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_flash.checks import sums
from pallas_flash.jax_support import xla_cpu
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import online_softmax, schedule, split_kv
from pallas_flash.tiled.blockwise import softmax
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, block_at
from pallas_flash.tiled.blockwise.tuning import DecodeTiles
from pallas_flash.tiled.quantised import weights


def forward(
    problem: Problem,
    tiles: DecodeTiles,
    x: Operands,
    table: PageTable | None = None,
    scales=(None, None),
):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` keys
    and values are pages, which have `scales` where they are in 8 bits."""
    p, wide = problem, sums(tiles.dtype)
    rows, x_rows = split_kv.pack_gqa(p, x)
    x_rows = x_rows._replace(resolved_mask=_mask_by_row(p, x.resolved_mask))
    q = jnp.swapaxes(x_rows.query, 1, 2).astype(wide)
    q = q * p.scale if p.soft_cap is None else q  # as Logits.query_factor
    zeros = lambda *shape: jnp.zeros_like(q, shape=shape)
    batch = p.batch if tiles.batch is None else tiles.batch
    heads = p.batch, p.kv_heads, rows.queries
    start = zeros(*heads, p.value_size), zeros(*heads), zeros(*heads)

    def step(n, outputs):
        part = HeadRange(n * batch, batch, 0, p.kv_heads, p.kv_heads)
        score = None if x.score is None else functools.partial(_modify, p, x.score, part)
        new = _attend(rows, tiles, part, part.take(q), x_rows, table, scales, score)
        return tuple(part.put(out, a, 1) for out, a in zip(outputs, new, strict=True))

    o, m, l = schedule.loop(0, p.batch // batch, step, start) if batch < p.batch else step(0, start)
    o, m, l = (a[:, None] for a in (o, m, l))
    return split_kv.merge_splits(p, x, o, online_softmax.SoftmaxState(m, l), LogBase.E)


def _mask_by_row(p: Problem, mask: ResolvedMask) -> ResolvedMask:
    """The mask with the interval of keys of each row [B, rows] as data."""
    by_row = lambda x: jnp.broadcast_to(
        jnp.repeat(x, p.group, axis=1), (p.batch, p.queries * p.group)
    )
    start, stop = split_kv.intervals(p, mask)
    mask = ResolvedMask(
        p.keys,
        start=start,
        stop=stop,
        contiguous=mask.contiguous,
        query_ids=mask.query_ids,
        key_ids=mask.key_ids,
    )
    return mask.narrow(ResolvedMask.BY_QUERY, by_row)


def _attend(p: Problem, tiles: DecodeTiles, part: HeadRange, q, x: Operands, table, scales, score):
    """o [B, K, rows, Hv], m and l of a part of the batch. Scores are [B, K, keys, rows]."""
    mask = x.resolved_mask.narrow(ResolvedMask.BY_QUERY + ResolvedMask.BY_KEY, part.take)
    column = lambda a: a[:, None, None]

    def step(j, carry, masked):
        o, stats = carry
        key = block_at(j, tiles.block_k, p.keys)
        # [B, keys, K, n]
        k, v = (xla_cpu.widen(_block(a, table, part, key), tiles.dtype) for a in (x.key, x.value))
        k_scale, v_scale = (
            None if a is None else _block(a, table, part, key).swapaxes(1, 2)[..., None]
            for a in scales
        )
        qk = jnp.einsum(
            "bkrh,bskh->bksr", q, k, precision="highest", preferred_element_type=q.dtype
        )
        # no multiply-add with -m
        qk = qk if k_scale is None else jnp.maximum(qk * k_scale, online_softmax.LOWEST)
        if p.soft_cap is None:
            s = qk
        else:
            s, _ = online_softmax.scores(qk, None, p.scale, p.soft_cap, LogBase.E)
        s = s if score is None else score(s, key)
        if masked:
            visible = _visible(mask, key, column)
            s = jnp.where(visible, s, -jnp.inf)
            by_any = visible.any(3, keepdims=True)
            v = jnp.where(by_any[:, 0, :, :, None], v, 0)  # there may be NaN
            v_scale = None if v_scale is None else jnp.where(by_any, v_scale, 0)
        prob, alpha, stats = softmax.step(2, s, stats)
        if v_scale is not None:
            prob, v = prob * v_scale, v.astype(weights(v.dtype))
        pv = jnp.einsum(
            "bksr,bskh->bkrh",
            prob.astype(v.dtype),
            v,
            precision="highest",
            preferred_element_type=q.dtype,
        )
        return o * alpha[..., None] + pv, stats

    zeros = jnp.zeros_like(q[..., 0])
    o = jnp.zeros_like(q, shape=(*q.shape[:-1], p.value_size))
    carry = o, online_softmax.start(zeros, LogBase.E)
    blocks = schedule.key_blocks(mask.start, mask.stop, mask.contiguous, tiles.block_k)
    o, (m, l, _) = blocks.visit(step, carry)
    return online_softmax.finish(o, l), m, l


def _modify(p: Problem, score: BoundScoreMod, part: HeadRange, s, key: Block):
    """The logits s [B, K, keys, rows] after the score_mod."""
    batch, heads = score.indices(p.batch, p.heads)
    b = part.take(batch) if score.mod.uses_batch else batch
    h = (
        jnp.tile(heads.reshape(1, p.kv_heads, 1, -1), p.queries)
        if score.mod.uses_head
        else heads[None, None, None]
    )
    first = (
        score.offset
        if isinstance(score.offset, int)
        else part.take(score.offset)[:, None, None, None]
    )
    position = first + jnp.repeat(jnp.arange(p.queries, dtype=jnp.int32), p.group)[None, None, None]
    read = lambda array, index: score.arrays[array].at[index].get(mode="promise_in_bounds")
    return score.apply(s, read, b[:, None, None, None], h, position, key.index[None, None, :, None])


def _visible(mask: ResolvedMask, key: Block, column):
    """Whether the rows see the keys of a block, [B | 1, 1, keys, rows]."""
    index = key.index[None, None, :, None]
    ids = (
        ()
        if mask.query_ids is None
        else (column(mask.query_ids), key.take(mask.key_ids, 1)[:, None, :, None])
    )
    visible = mask.visible(column(mask.start), column(mask.stop), index, *ids)
    return visible if key.first_new is None else visible & (index >= key.first_new)


def _block(x, table: PageTable | None, part: HeadRange, key: Block):
    """The keys or values of a block, [B, keys, K, n], or their scales."""
    at = lambda *starts: [jnp.asarray(start, jnp.int32) for start in starts]
    if table is None:
        starts = at(part.row, key.start, 0, 0)
        return xla_cpu.dynamic_slice(x, starts, [part.batch, key.size, *x.shape[2:]])
    starts = at(part.row, key.start // table.page)
    numbers = lax.dynamic_slice(table.numbers, starts, [part.batch, key.size // table.page])
    return table.layout.join(xla_cpu.gather(x, numbers))
