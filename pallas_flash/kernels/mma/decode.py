"""Split-KV decoding by mma (Flash-Decoding): a program owns one split of the keys of one key/value
head, and the rows of all new tokens that see them.

The time is that of reading keys and values, on Hopper too, where wgmma gained 3% at most
(results.md#an-h100): as many blocks are on their way as shared memory holds. Blocks of 8 bits
are copied as they are stored, and widened to 16 bits in shared memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import decode, online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.padded_rows import flat, pad
from pallas_flash.kernels.mma.tuning import ROWS, DecodeTiles
from pallas_flash.kernels.mosaic import logits, mods
from pallas_flash.kernels.mosaic.launch import LANE, launch
from pallas_flash.kernels.mosaic.mask import load_mask
from pallas_flash.kernels.mosaic.registers import BITCAST_SCALE, per_row
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.kernels.mosaic.tiling import Tiling
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.pytrees import IntLike
from pallas_flash.quantised import weights


class Inputs(NamedTuple):
    q: jax.Array  # [B, 64, K width]
    k: jax.Array  # [B, S, K width], or pages [P, page, K width]
    v: jax.Array
    blocks: jax.Array  # int32 [B, 1, 4], schedule.Blocks
    reach: jax.Array  # int32 [B, 2], the keys that any row sees
    table: jax.Array | None  # int32 [B, pages], indices of existing pages
    # of keys and values of 8 bits: what their numbers in shared memory are multiplied by
    scales: tuple  # float32 [B, K, S]
    resolved_mask: ResolvedMask  # its data by 64 rows, and by keys
    score_mod: mods.Arrays | None


class Memory(NamedTuple):
    """The shared memory of a program, and with TMA its mbarriers."""

    q: Any  # [64, width]
    k: Any  # [stages, block_k, width]
    v: Any
    in_use: tuple  # of keys and values of 8 bits, a block of each in 16
    q_full: Any
    kv_full: Any

    @classmethod
    def allocate(cls, t: DecodeTiles, x: Inputs) -> "Memory":
        block = functools.partial(tile.block, swizzle=t.swizzle)
        slots = functools.partial(
            tile.block, x.k.dtype, t.stages, t.block_k, swizzle=t.swizzle_in_slots
        )
        dtype = x.q.dtype
        kv = block(dtype, t.block_k, t.width), block(weights(dtype), t.block_k, t.value_width)
        full = plgpu.Barrier(num_arrivals=2 * t.copies, num_barriers=t.stages)
        return cls(
            q=block(dtype, ROWS, t.width),
            k=slots(t.width),
            v=slots(t.value_width),
            in_use=kv if t.stored else (),
            q_full=plgpu.Barrier() if t.tma else None,
            kv_full=full if t.tma else None,
        )


def forward(problem: Problem, tiles: DecodeTiles, x: Operands, table=None, scales=()):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` int32
    [B, pages] of page indices, key and value are pages [P, page, K, n]; where these are of 8 bits,
    both have `scales` [P, page, K]."""
    (p, rows), t = decode.pack_gqa(problem, x, score_mod=True), tiles
    splits, inputs = (p.batch, t.num_splits, p.heads, ROWS), _inputs(p, t, rows, table, scales)
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=p.batch * p.heads * t.num_splits,
        out_type=[
            jax.ShapeDtypeStruct((*splits, t.value_width), jnp.float32),
            *[jax.ShapeDtypeStruct(splits, jnp.float32)] * 2,
        ],
        warpgroups=1,
        scratch=Memory.allocate(t, inputs),
        name="flash_attention_decode",
        semantics=LANE,
    )
    m, l = (a[..., : p.queries] for a in stats)
    stats = online_softmax.SoftmaxState(m + logits.soft_cap_constant(p), l)
    return decode.merge_splits(problem, x, o[..., : p.queries, : p.value_size], stats, p.log_base)


def _inputs(p: Problem, t: DecodeTiles, x: Operands, table, scales) -> Inputs:
    resolved_mask, blocks = schedule.by_query_tile(x.resolved_mask, p.queries, ROWS, t.block_k)
    reach = jnp.stack(decode.reach(resolved_mask.start, resolved_mask.stop, p.keys), 1)
    rows = ROWS, x.key.shape[1], x.value.shape[1]
    arrays = x.query, x.key, x.value
    if t.stored:
        arrays = x.query, *(lax.bitcast_convert_type(a, jnp.int8) for a in arrays[1:])
    arrays = map(pad, arrays, rows, (t.width, t.width, t.value_width))
    scales = tuple(BITCAST_SCALE[t.stored] * _in_order(a, table, t.block_k) for a in scales)
    score_mod = mods.arrays(p, x.score, Tiling(ROWS, t.block_k, t.block_k))
    return Inputs(*map(flat, arrays), blocks, reach, table, scales, resolved_mask, score_mod)


def _in_order(scales, table, block_k: int):
    """The scales [P, page, K] of whole blocks of keys, [B, K, S]."""
    x = jnp.moveaxis(scales[table], 3, 1)
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block_k)))


def _kernel(program, x: Inputs, o_gmem, *outputs, problem: Problem, tiles: DecodeTiles):
    (*stats_gmem, memory), p, t = outputs, problem, tiles
    pair, split = divmod_(program, t.num_splits)
    b, h = divmod_(pair, p.heads)
    blocks = schedule.Blocks.from_table(x.blocks, b, 0).split(split, t.num_splits)
    kv = tile.CopyRing((memory.k, memory.v), memory.kv_full, t.copies)

    def load(n):
        @pl.when(n < blocks.last)
        def _():
            for ref, slot in zip((x.k, x.v), kv.at(n), strict=True):
                for source, part in _copies(ref, slot, x.table, b, h, n, t):
                    tile.copy(source, part, kv.full_at(n))

    tile.copy(x.q.at[b, :, pl.ds(h * t.width, t.width)], memory.q, memory.q_full)
    for n in range(t.stages - 1):
        load(blocks.first + n)
    mask = load_mask(tile.LAYOUTS, x.resolved_mask, b, 0, ROWS, None)
    score_mod = mods.for_head(p.score, x.score_mod, b, h)
    head = logits.Logits(p, tile.LAYOUTS, x.resolved_mask, None, None, score_mod, None)
    kv.wait_before(memory.q_full, blocks.count)
    q = tile.load(memory.q) if t.keeps_q else None

    def step(n, carry, masked):
        o, stats = carry
        at = head.tile(0, _first_key(x.k, x.table, n, t), (ROWS, t.block_k))
        load_scale = lambda ref: at.load_per_key(lambda keys: ref.at[b, h, keys])
        k_scale, v_scale = map(load_scale, x.scales) if t.stored else (None, None)
        k, v = kv.wait(n, blocks.last - 1 - n)
        load(n + t.stages - 1)
        if t.stored:
            for block, wide in zip((k, v), memory.in_use, strict=True):
                tile.widen(block, t.stored, wide, t.swizzle)
            tile.release(tma=False)
            k, v = memory.in_use
        s = tile.dot_t(tile.load(memory.q) if q is None else q, k)  # [bq, bk]
        s = s if k_scale is None else s * k_scale
        s, scale = head.modify(s, at)
        visible = None
        if masked:  # the keys before `unseen` are those of the block before
            unseen, first = n * t.block_k, at.first_key
            visible = mask._replace(start=jnp.maximum(mask.start, unseen)).visible(at)
            s = jnp.where(visible, s, -jnp.inf)
        prob, alpha, stats = online_softmax.step(s, stats, p.log_base, scale)
        o = o * per_row(alpha, o.shape)
        if v_scale is not None:  # it may be NaN where nobody sees
            prob = prob * v_scale
            prob = prob if visible is None else jnp.where(visible, prob, 0.0)
        prob = tile.as_left(prob.astype(v.dtype))
        if not masked:
            return tile.dot(o, prob, v), stats
        start, stop = jnp.maximum(x.reach[b, 0], unseen), x.reach[b, 1]
        return tile.dot_of_rows(o, prob, v, start - first, stop - first), stats

    start = online_softmax.start(tile.rows(ROWS, 0.0), p.log_base)
    o, stats = blocks.visit(step, (tile.zeros(ROWS, t.value_width), start))
    o = online_softmax.finish(o, stats.l)
    tile.store_rows(o_gmem.at[b, split, h], o, p.queries)
    for gmem, value in zip(stats_gmem, (stats.m, stats.l), strict=True):
        tile.store(gmem.at[b, split, h], value)


def _first_key(ref, table, n: IntLike, t: DecodeTiles):
    """Of block n: a last block that would hang over the end of the keys begins earlier."""
    first = n * t.block_k
    return first if table is not None else jnp.minimum(first, ref.shape[1] - t.block_k)


def _copies(ref, slot, table, b, h, n, t: DecodeTiles) -> list:
    """From where to where block n of a head's keys or values is copied, page by page."""
    width = slot.shape[1]
    columns = pl.ds(h * width, width)
    if table is None:
        rows = pl.ds(_first_key(ref, table, n, t), t.block_k)
        return [(ref.at[b, rows, columns], slot)]
    page, last = ref.shape[1], table.shape[1] - 1
    entry = lambda i: table[b, jnp.minimum(i, last)]
    if page >= t.block_k:
        index, within = divmod_(n, page // t.block_k)
        rows = pl.ds(within * t.block_k, t.block_k)
        return [(ref.at[entry(index), rows, columns], slot)]
    return [
        (ref.at[entry(n * t.copies + i), :, columns], slot.at[pl.ds(i * page, page)])
        for i in range(t.copies)
    ]
