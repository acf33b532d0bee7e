"""Split-KV decoding by mma (Flash-Decoding): a program owns one split of the keys of one key/value
head, and 64 rows of the new tokens that see them.

The time is that of reading keys and values, on Hopper too, where wgmma gained 3% at most
(results.md#an-h100): as many blocks are on their way as shared memory holds. Blocks of 8 bits
are copied as they are stored, and widened to 16 bits in shared memory. Values that are the keys'
first columns (MLA) are read out of the block of keys.

O of more than 256 columns takes the registers of two warpgroups. Each owns half of the columns of O
and of V, and adds up S over half of the columns of Q and K. They exchange these sums by shared
memory, and then both have S, and compute the same P.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.padded_rows import flat, pad
from pallas_flash.kernels.mma.tuning import ROWS, DecodeTiles
from pallas_flash.kernels.mosaic import logits, mods
from pallas_flash.kernels.mosaic.launch import LANE, launch
from pallas_flash.kernels.mosaic.mask import TileMask
from pallas_flash.kernels.mosaic.registers import BITCAST_SCALE, iota, load, per_row
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.kernels.mosaic.tiling import Tiling
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule, split_kv
from pallas_flash.tiled.quantised import weights


class Inputs(NamedTuple):
    q: jax.Array  # [B, tiles of 64 rows, K width]
    kv: tuple  # keys [B, S, K width], or pages [P, page, K width]; and values if they are apart
    # int32 [B, 4], what the tokens see, schedule.Blocks of one key; None: the kernel computes it
    keys: jax.Array | None
    table: jax.Array | None  # int32 [B, pages], indices of existing pages
    # of keys and values of 8 bits: what their numbers in shared memory are multiplied by
    scales: tuple  # float32 [B, K, S]
    resolved_mask: ResolvedMask  # that of the tokens; its data by query by 64 rows
    score_mod: mods.Arrays | None


class Memory(NamedTuple):
    """The shared memory of a program, and with TMA its mbarriers."""

    q: Any  # [64, width]
    kv: tuple  # [stages, block_k, width] of keys, and of values if they are apart
    in_use: tuple  # of keys and values of 8 bits, a block of each in 16; of both where one serves
    sums: Any  # of tile.SumOfParts; None with one warpgroup
    q_full: Any
    kv_full: Any

    @classmethod
    def allocate(cls, t: DecodeTiles, x: Inputs) -> "Memory":
        block = functools.partial(tile.block, swizzle=t.swizzle)
        slots = functools.partial(
            tile.block, x.kv[0].dtype, t.stages, t.block_k, swizzle=t.swizzle_in_slots
        )
        dtypes, widths = (x.q.dtype, weights(x.q.dtype)), (t.width, t.value_width)
        count = 1 if t.values_are_keys else 2
        wide = [block(dtype, t.block_k, n) for dtype, n in zip(dtypes, widths, strict=True)]
        full = plgpu.Barrier(num_arrivals=count * t.copies, num_barriers=t.stages)
        return cls(
            q=block(x.q.dtype, ROWS, t.width),
            kv=tuple(map(slots, widths[:count])),
            in_use=tuple(wide[: -(-t.widened // t.width)]),
            sums=tile.parts_of_sum(ROWS, t.block_k) if t.warpgroups > 1 else None,
            q_full=plgpu.Barrier() if t.tma else None,
            kv_full=full if t.tma else None,
        )


def forward(problem: Problem, tiles: DecodeTiles, x: Operands, table=None, scales=()):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` int32
    [B, pages] of page indices, key and value are pages [P, page, K, n]; where these are of 8 bits,
    both have `scales` [P, page, K]."""
    (p, rows), t = split_kv.pack_gqa(problem, x, score_mod=True), tiles
    resolved_mask, keys = _mask(problem, x.resolved_mask, t.block_k)
    rows = rows._replace(resolved_mask=resolved_mask)
    inputs, count = _inputs(p, t, rows, keys, table, scales), schedule.ceil_div(p.queries, ROWS)
    splits = p.batch, t.num_splits, p.heads, count * ROWS
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tokens=problem.queries, tiles=t),
        inputs,
        programs=p.batch * p.heads * t.num_splits * count,
        out_type=[
            jax.ShapeDtypeStruct((*splits, t.value_width), jnp.float32),
            *[jax.ShapeDtypeStruct(splits, jnp.float32)] * 2,
        ],
        warpgroups=t.warpgroups,
        scratch=Memory.allocate(t, inputs),
        name="flash_attention_decode",
        semantics=LANE,
    )
    m, l = (a[..., : p.queries] for a in stats)
    stats = online_softmax.SoftmaxState(m + logits.soft_cap_constant(p), l)
    return split_kv.merge_splits(problem, x, o[..., : p.queries, : p.value_size], stats, p.log_base)


def _mask(p: Problem, mask: ResolvedMask, block_k: int):
    """The mask with its data by query for each of 64 rows, and by key for whole blocks; and the
    `keys` of Inputs."""
    if mask.start is None:
        return mask, None
    rows = schedule.ceil_div(p.queries * p.group, ROWS) * ROWS
    token = np.minimum(np.arange(rows, dtype=np.int32) // p.group, p.queries - 1)
    keys = schedule.key_blocks(*split_kv.intervals(p, mask), mask.contiguous, 1, axis=1)
    mask = dataclasses.replace(mask, contiguous=None)
    mask = mask.narrow(ResolvedMask.BY_QUERY, lambda x: x[:, token])
    whole_blocks = lambda x: jnp.pad(x, ((0, 0), (0, -p.keys % block_k)))
    return mask.narrow(ResolvedMask.BY_KEY, whole_blocks), jnp.stack(keys.ends, 1)


def _inputs(p: Problem, t: DecodeTiles, x: Operands, keys, table, scales) -> Inputs:
    kv = [x.key] if t.values_are_keys else [x.key, x.value]
    rows = schedule.ceil_div(p.queries, ROWS) * ROWS, *(a.shape[1] for a in kv)
    if t.stored:
        kv = [lax.bitcast_convert_type(a, jnp.int8) for a in kv]
    arrays = map(pad, [x.query, *kv], rows, (t.width, t.width, t.value_width)[: len(rows)])
    q, *kv = map(flat, arrays)
    in_order = lambda a: BITCAST_SCALE[t.stored] * _in_order(a, table, t.block_k)
    scales = tuple(map(in_order, scales[: len(kv)]))
    score_mod = mods.arrays(p, x.score, Tiling(ROWS, t.block_k, t.block_k))
    return Inputs(q, tuple(kv), keys, table, scales, x.resolved_mask, score_mod)


def _in_order(scales, table, block_k: int):
    """The scales [P, page, K] of whole blocks of keys, [B, K, S]."""
    x = jnp.moveaxis(scales[table], 3, 1)
    x = x.reshape(*x.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block_k)))


def _kernel(
    program, x: Inputs, o_gmem, *outputs, problem: Problem, tokens: int, tiles: DecodeTiles
):
    (*stats_gmem, memory), p, t = outputs, problem, tiles
    own, count = Slice.of(t), schedule.ceil_div(p.queries, ROWS)
    program, number = divmod_(program, count)  # neighbours read the same keys
    pair, split = divmod_(program, t.num_splits)
    b, h = divmod_(pair, p.heads)
    first_row = number * ROWS
    rows = pl.ds(first_row, ROWS)
    at_batch = x.resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda ref: ref[b])
    if x.keys is None:
        keys = schedule.known_keys(at_batch, 0, tokens - 1)
    else:
        keys = schedule.Blocks.from_table(x.keys, b)
    blocks = keys.of_size(t.block_k).split(split, t.num_splits)
    kv = tile.CopyRing(memory.kv, memory.kv_full, t.copies, warpgroups=t.warpgroups)

    def load(n):
        @pl.when((n < blocks.last) & own.is_first)
        def _():
            for ref, slot in zip(x.kv, kv.at(n), strict=True):
                for source, part in _copies(ref, slot, x.table, b, h, n, t):
                    tile.copy(source, part, kv.full_at(n))

    q_gmem = x.q.at[b, rows, pl.ds(h * t.width, t.width)]
    pl.when(own.is_first)(lambda: tile.copy(q_gmem, memory.q, memory.q_full))
    for n in range(t.stages - 1):
        load(blocks.first + n)
    mask = _load_mask(at_batch, b, first_row, tokens, p.queries // tokens)
    score_mod = mods.for_head(p.score, x.score_mod, b, h)
    head = logits.Logits(p, tile.LAYOUTS, x.resolved_mask, None, None, score_mod, None)
    kv.wait_before(memory.q_full, blocks.count)
    q = tile.load(own.columns(memory.q)) if t.keeps_q else None

    def step(n, carry, masked):
        o, stats = carry
        at = head.tile(first_row, _first_key(x.kv[0], x.table, n, t), (ROWS, t.block_k))
        load_scale = lambda ref: at.load_per_key(lambda keys: ref.at[b, h, keys])
        scales = [*map(load_scale, x.scales)] or [None]
        k_scale, v_scale = scales[0], scales[-1]
        block = kv.wait(n, blocks.last - 1 - n)
        load(n + t.stages - 1)
        if t.stored:
            for ref, wide in zip((block[0], block[-1]), memory.in_use, strict=False):
                some = own.columns(ref, wide.shape[1])
                tile.widen(some, t.stored, own.columns(wide), t.swizzle)
            tile.release(tma=False)
            block = memory.in_use
        k, v = own.columns(block[0]), own.columns(block[-1], t.value_width)
        s = tile.dot_t(tile.load(own.columns(memory.q)) if q is None else q, k)
        s = tile.SumOfParts(memory.sums, own.number)(n, s)  # [bq, bk]
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
        start = jnp.maximum(keys.first, unseen)
        return tile.dot_of_rows(o, prob, v, start - first, keys.last - first), stats

    start = online_softmax.start(tile.rows(ROWS, 0.0), p.log_base)
    o, stats = blocks.visit(step, (tile.zeros(ROWS, t.value_width // t.warpgroups), start))
    o = online_softmax.finish(o, stats.l)
    tile.store_rows(own.columns(o_gmem.at[b, split, h, rows]), o, p.queries - first_row)
    for gmem, value in zip(stats_gmem, (stats.m, stats.l), strict=True):
        store = functools.partial(tile.store, gmem.at[b, split, h, rows], value)
        pl.when(own.is_first)(store)


def _load_mask(mask: ResolvedMask, b, first_row: IntLike, tokens: int, group: int) -> TileMask:
    """Of 64 rows, from the mask of batch row b; a row beyond the last counts as the last."""
    rows, layout = pl.ds(first_row, ROWS), tile.LAYOUTS.row
    mask = mask.narrow(ResolvedMask.BY_QUERY, lambda ref: load(ref.at[b, rows], layout))
    token = 0
    if tokens > 1:
        token = lax.div(first_row + iota(ROWS, layout), jnp.int32(group))
        token = jnp.minimum(token, tokens - 1)
        if mask.stop is None:
            # a choice between two numbers would be unsigned: Mosaic takes this from the condition
            mask = dataclasses.replace(mask, start=0, stop=0 * token + mask.keys)
    return TileMask(mask, b, *mask.interval(token), None)


class Slice(NamedTuple):
    """What a warpgroup has of the columns of each matrix: one of `count` slices."""

    number: IntLike
    count: int

    @classmethod
    def of(cls, t: DecodeTiles) -> "Slice":
        return cls(lax.axis_index("warpgroup") if t.warpgroups > 1 else 0, t.warpgroups)

    @property
    def is_first(self):
        return self.number == 0

    def columns(self, ref, width: int | None = None):
        """Of the first `width` columns of a matrix, or of all."""
        size = (ref.shape[1] if width is None else width) // self.count
        return ref.at[:, pl.ds(self.number * size, size)]


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
