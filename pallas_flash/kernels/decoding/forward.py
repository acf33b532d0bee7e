"""Split-KV decoding by mma (Flash-Decoding): a program owns one split of the keys of one key/value
head, and 64 rows of the new tokens that see them: 16 for each warp, which reads all keys. Where
there are no more than 16 rows all warps have the same, and each reads a quarter of the keys
(`sliced_k`).

The time is that of reading keys and values, on Hopper too, where wgmma gained 3% at most
(results.md#an-h100): as many blocks are on their way as shared memory holds. Blocks of 8 bits
are copied as they are stored, and widened to 16 bits in shared memory. Values that are the keys'
first columns (MLA) are read out of the block of keys. Keys that a list names are gathered
(`gather`): a list is a batch row (`listed_keys`).

O of more than 256 columns takes the registers of two warpgroups. Each owns half of the columns of O
and of V, and adds up S over half of the columns of Q and K. They exchange these sums by shared
memory, and then both have S, and compute the same P.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.decoding import sliced_k
from pallas_flash.kernels.decoding.gather import KeySource
from pallas_flash.kernels.decoding.listed_keys import ListedKeys
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.memory import flat, pad
from pallas_flash.kernels.mma.tile_sizes import (
    OUTPUT_COLUMNS,
    ROWS,
    WARP_ROWS,
    WIDE_BLOCK,
    DecodeTiles,
    Gpu,
    swizzle_of,
    widths,
)
from pallas_flash.kernels.mosaic import logits, mods, statistics
from pallas_flash.kernels.mosaic.block_info import TileMask, broadcast_index
from pallas_flash.kernels.mosaic.elements import Tiling, round_up
from pallas_flash.kernels.mosaic.launch import LANE, launch, shared_matrix
from pallas_flash.kernels.mosaic.registers import iota, load, per_row
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import online_softmax, schedule, split_kv
from pallas_flash.tiled.quantised import weights


def candidates(p: Problem, gpu: Gpu, page: int | None, stored: str | None) -> Iterator[DecodeTiles]:
    """Tiles whose O registers hold, the best first: as many stages as may be, of blocks so large
    that shared memory holds three, or else two. page: None where lists name the keys."""
    width, value_width = widths(p)
    gathers = page is None
    count = schedule.ceil_div(value_width, OUTPUT_COLUMNS)  # of warpgroups
    slices = width // count, value_width // count
    # registers hold O beside a block, and what is made of 8 bits
    is_wide = width > 128 or (stored and width + value_width > 128)
    most = 32 if count > 1 else WIDE_BLOCK if value_width > 128 else 32 if is_wide else ROWS
    blocks = [(n, False) for n in (ROWS, 32, WIDE_BLOCK) if n <= most and count <= 2]
    if count == 1 and p.queries * p.group <= WARP_ROWS:  # 16 keys for each warp
        blocks.insert(0, (ROWS, True))
    sizes = [(n, *block) for each in ((6, 5, 4, 3), (2,)) for block in blocks for n in each]
    for stages, block_k, is_sliced in sizes:
        rows = ROWS if gpu.has_tma or gathers else min(page, block_k)
        in_slots = swizzle_of(stored or p.dtype, slices, rows * count)
        yield DecodeTiles(
            width,
            value_width,
            block_k,
            stages,
            copies=1 if gathers else max(block_k // page, 1),
            swizzle=swizzle_of(p.dtype, slices, block_k) if stored else in_slots,
            swizzle_in_slots=in_slots,
            tma=gpu.has_tma,
            stored=stored,
            sliced_k=is_sliced,
            gathers=gathers,
        )


class DecodeInputs(NamedTuple):
    q: jax.Array  # [B, tiles of block_q rows, K width]
    # keys [B, S, K width], or pages as matrices; and values, unless these are keys' columns
    kv: tuple
    # the keys that tokens see, int32 [B, 4], schedule.Blocks of one key; None: the kernel computes
    # them
    keys: jax.Array | None
    table: PageTable | ListedKeys | None
    # float32 [B, K, S], factors of the 8-bit numbers of keys, and of values, in shared memory
    scales: tuple
    # float32 [B | 1, K, rows], less what the logits omit; None: none, or the merge adds them
    sinks: jax.Array | None
    resolved_mask: ResolvedMask  # of the tokens, with its data by query repeated for tiles
    score_mod: mods.Arrays | None


class DecodeMemory(NamedTuple):
    """The shared memory of a program, and with TMA its mbarriers."""

    q: Any  # [block_q, width]; None where queries are copied straight to registers
    # [stages, block_k, width] of keys, and of values unless these are keys' columns; sliced_k: with
    # a Merge that takes their place at the end
    kv: Any
    in_use: tuple  # a block of keys and one of values, or of both, widened from 8 bits to 16
    sums: Any  # of tile.SumOfParts; None with one warpgroup
    q_full: Any
    kv_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: DecodeTiles) -> "DecodeMemory":
        widths, dtypes = (t.width, t.value_width), (p.dtype, weights(jnp.dtype(p.dtype)))
        count = 1 if p.values_are_keys else 2
        matrix = functools.partial(shared_matrix, swizzle=t.swizzle)
        slots = functools.partial(
            shared_matrix,
            "int8" if t.stored else p.dtype,
            t.stages,
            t.block_k,
            swizzle=t.swizzle_in_slots,
        )
        wide = [matrix(dtype, t.block_k, n) for dtype, n in zip(dtypes, widths, strict=True)]
        # one serves as keys and values, unless they have two dtypes
        wide_count = 0 if not t.stored else count if dtypes[0] == dtypes[1] else 2
        full = plgpu.Barrier(num_arrivals=count * t.copies, num_barriers=t.stages)
        kv = tuple(map(slots, widths[:count]))
        q = functools.partial(shared_matrix, p.dtype, t.block_q, t.width)
        return cls(
            q=q(swizzle=t.swizzle_of_q(p.dtype)) if t.copies_q else None,
            kv=plgpu.RefUnion(kv, sliced_k.Merge.allocate(t.value_width)) if t.sliced_k else kv,
            in_use=tuple(wide[:wide_count]),
            sums=tile.parts_of_sum(ROWS, t.block_k) if t.warpgroups > 1 else None,
            q_full=plgpu.Barrier() if t.tma and t.copies_q else None,
            kv_full=full if t.tma and not t.gathers else None,
        )


def forward(
    problem: Problem,
    tiles: DecodeTiles,
    x: Operands,
    table: PageTable | ListedKeys | None,
    scales: tuple,
):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` keys
    and values are pages, or keys that lists name, which have `scales` where they are in 8 bits."""
    (p, rows), t = split_kv.pack_gqa(problem, x, score_mod=True), tiles
    resolved_mask, keys = _mask(problem, x.resolved_mask, t)
    rows = rows._replace(resolved_mask=resolved_mask)
    inputs = _inputs(p, t, rows, keys, table, scales)
    count = schedule.ceil_div(p.queries, t.block_q)
    splits = p.batch, t.num_splits, p.heads, count * t.block_q
    is_merged = t.num_splits > 1 or problem.with_top  # and so multiplied by a share
    if not is_merged:
        inputs, x = inputs._replace(sinks=_sinks(problem, x, count)), x._replace(sinks=None)
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tokens=problem.queries, tiles=t),
        inputs,
        programs=p.batch * p.heads * t.num_splits * count,
        out_type=[
            jax.ShapeDtypeStruct((*splits, t.value_width), jnp.float32 if is_merged else p.dtype),
            *[jax.ShapeDtypeStruct(splits, jnp.float32)] * 2,
        ],
        warpgroups=t.warpgroups,
        scratch=DecodeMemory.allocate(p, t),
        name="flash_attention_decode",
        semantics=LANE,
    )
    m, l = (a[..., : p.queries] for a in stats)
    stats = online_softmax.SoftmaxState(m + logits.soft_cap_constant(p), l)
    return split_kv.merge_splits(problem, x, o[..., : p.queries, : p.value_size], stats, p.log_base)


def _mask(p: Problem, mask: ResolvedMask, t: DecodeTiles):
    """The mask, with its data by query repeated for whole tiles and its data by key padded to whole
    blocks; and DecodeInputs.keys."""
    if mask.start is None:
        return mask, None
    rows = round_up(p.queries * p.group, t.block_q)
    token = np.minimum(np.arange(rows, dtype=np.int32) // p.group, p.queries - 1)
    keys = schedule.key_blocks(*split_kv.intervals(p, mask), mask.contiguous, 1, axis=1)
    mask = dataclasses.replace(mask, contiguous=None)
    mask = mask.narrow(ResolvedMask.BY_QUERY, lambda x: x[:, token])
    whole_blocks = lambda x: jnp.pad(x, ((0, 0), (0, -p.keys % t.block_k)))
    return mask.narrow(ResolvedMask.BY_KEY, whole_blocks), jnp.stack(keys.ends, 1)


def _inputs(p: Problem, t: DecodeTiles, x: Operands, keys, table, scales) -> DecodeInputs:
    count = 1 if p.values_are_keys else 2
    kv = [x.key, x.value][:count]
    if t.stored:
        kv = [lax.bitcast_convert_type(a, jnp.int8) for a in kv]
    matrices = lambda a, n: flat(pad(a, a.shape[1], n))
    matrices = matrices if table is None else table.layout.matrices
    kv = tuple(map(matrices, kv, (t.width, t.value_width)))
    q = flat(pad(x.query, round_up(p.queries, t.block_q), t.width))
    in_order = lambda a: _in_order(a, table, t.block_k)
    scales = tuple(map(in_order, scales[:count] if t.stored else ()))
    score_mod = mods.arrays(p, x.score, Tiling(t.block_q, t.block_k, t.block_k))
    return DecodeInputs(q, kv, keys, table, scales, None, x.resolved_mask, score_mod)


def _sinks(p: Problem, x: Operands, tiles: int) -> jax.Array | None:
    """The sinks of the rows of tiles in registers, [B | 1, K, tiles * ROWS]; -inf: none."""
    if x.sinks is None:
        return None
    sinks = statistics.sinks(p, x).reshape(-1, p.kv_heads, p.group)
    rows = jnp.tile(sinks, p.queries)
    missing = tiles * ROWS - rows.shape[2]
    return jnp.pad(rows, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)


def _in_order(scales, table: PageTable | ListedKeys, block_k: int):
    """Gathers the scales [B, K, S] of whole blocks of keys."""
    if isinstance(table, ListedKeys):
        x = table.in_order(scales)
    else:
        x = jnp.swapaxes(table.layout.join(scales[table.numbers]), 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block_k)))


def _kernel(
    program, x: DecodeInputs, o_gmem, *outputs, problem: Problem, tokens: int, tiles: DecodeTiles
):
    (*stats_gmem, memory), p, t = outputs, problem, tiles
    part, count = ColumnSlice.here(t), schedule.ceil_div(p.queries, t.block_q)
    ops = sliced_k if t.sliced_k else tile
    slots, merge = memory.kv if t.sliced_k else (memory.kv, None)
    program, number = divmod_(program, count)  # neighbours read the same keys
    pair, split = divmod_(program, t.num_splits)
    b, h = divmod_(pair, p.heads)
    first_row = number * t.block_q
    rows = pl.ds(first_row, t.block_q)
    at_batch = x.resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda ref: ref[b])
    if x.keys is None:
        keys = schedule.known_keys(at_batch, 0, tokens - 1)
    else:
        keys = schedule.Blocks.from_table(x.keys, b)
    blocks = keys.resize(t.block_k).split(split, t.num_splits)
    kv = tile.CopyRing(slots, memory.kv_full, t.copies, warpgroups=t.warpgroups)
    source = KeySource(x.kv, x.table, t, b, h)

    def load(n, rows):
        begin = lambda: source.copy(n, rows, kv.at(n), kv.full_at(n))
        pl.when((n < blocks.last) & part.is_first)(begin)

    q_gmem = x.q.at[b, rows, pl.ds(h * t.width, t.width)]
    if t.copies_q:
        pl.when(part.is_first)(lambda: tile.copy(q_gmem, memory.q, memory.q_full))
    ahead = t.stages - 1
    for n in range(ahead):
        load(blocks.first + n, source.look_up(blocks.first + n))
    mask = _load_mask(ops.LAYOUTS.row, at_batch, b, rows, tokens, p.queries // tokens)
    score_mod = mods.for_head(p.score, x.score_mod, b, h)
    head = logits.Logits(p, ops.LAYOUTS, x.resolved_mask, None, None, score_mod, None)
    if t.copies_q:
        kv.wait_before(memory.q_full, blocks.count)
        q = ops.load(part.take(memory.q)) if t.keeps_q else None
    else:
        q = ops.load_global(q_gmem)

    def step(n, carry, masked):
        o, stats, next_rows = carry
        at = head.tile(first_row, source.first_key(n), (t.block_q, t.block_k))
        load_scale = lambda ref: at.load_per_key(lambda keys: ref.at[b, h, keys])
        scales = [*map(load_scale, x.scales)] or [None]
        k_scale, v_scale = scales[0], scales[-1]
        block = kv.wait(n, blocks.last - 1 - n)
        load(n + ahead, next_rows)
        next_rows = source.look_up(n + 1 + ahead)  # which arrive under the products
        if t.stored:
            for ref, wide in zip((block[0], block[-1]), memory.in_use, strict=False):
                narrow = part.take(ref, wide.shape[1])
                tile.widen(narrow, t.stored, part.take(wide), t.swizzle)
            tile.release(tma=False)
            block = memory.in_use
        k, v = part.take(block[0]), part.take(block[-1], t.value_width)
        s = ops.dot_t(ops.load(part.take(memory.q)) if q is None else q, k)
        s = tile.SumOfParts(memory.sums, part.number)(n, s)  # [bq, bk]
        s = s if k_scale is None else s * k_scale
        s, scale = head.modify(s, at)
        if masked:  # the block before has the keys before `unseen`
            unseen, first = n * t.block_k, at.first_key
            visible = mask._replace(start=jnp.maximum(mask.start, unseen)).visible(at)
            s = jnp.where(visible, s, -jnp.inf)
            if v_scale is not None:  # which may be NaN at keys that no row sees
                v_scale = jnp.where(visible, v_scale, 0.0)
        prob, alpha, stats = online_softmax.step(ops.by_warp(s), stats, p.log_base, scale)
        o = o * per_row(alpha, o.shape)
        prob = prob if v_scale is None else prob * ops.by_warp(v_scale)
        prob = tile.as_left(prob.astype(v.dtype))
        if not masked:
            return ops.dot(o, prob, v), stats, next_rows
        start = jnp.maximum(keys.first, unseen)
        return ops.dot_of_rows(o, prob, v, start - first, keys.last - first), stats, next_rows

    start = online_softmax.start(
        tile.rows(ROWS, 0.0), p.log_base, _load_sinks(x.sinks, b, h, number)
    )
    zeros = tile.zeros(ROWS, t.value_width // t.warpgroups)
    o, stats, _ = blocks.visit(step, (zeros, start, source.look_up(blocks.first + ahead)))
    o_gmem = part.take(o_gmem.at[b, split, h, rows])
    if merge is None:
        o = online_softmax.finish(o, stats.l).astype(o_gmem.dtype)
        tile.store_rows(o_gmem, o, p.queries - first_row)
    else:
        o, stats = merge(o, stats, p.log_base)
        tile.store(o_gmem, o.astype(o_gmem.dtype))
    for gmem, value in zip(stats_gmem, (stats.m, stats.l), strict=True):
        store = functools.partial(tile.store, gmem.at[b, split, h, rows], value)
        pl.when(part.is_first)(store)


def _load_sinks(sinks, b, h, number: IntLike):
    """The sinks of the rows of a tile in registers, or None."""
    if sinks is None:
        return None
    rows = pl.ds(number * ROWS, ROWS)
    return load(sinks.at[(*broadcast_index(sinks, b, h), rows)], tile.LAYOUTS.row)


def _load_mask(layout, mask: ResolvedMask, b, rows, tokens: int, group: int) -> TileMask:
    """Loads the mask of a slice of rows of batch row b; a row beyond the last counts as the
    last."""
    mask = mask.narrow(ResolvedMask.BY_QUERY, lambda ref: load(ref.at[b, rows], layout))
    token = 0
    if tokens > 1:
        token = lax.div(rows.start + iota(rows.size, layout), jnp.int32(group))
        token = jnp.minimum(token, tokens - 1)
        if mask.stop is None:
            # a choice between two numbers would be unsigned: Mosaic takes this from the condition
            mask = dataclasses.replace(mask, start=0, stop=0 * token + mask.keys)
    return TileMask(mask, b, *mask.interval(token), None)


class ColumnSlice(NamedTuple):
    """The slice, one of `count`, that a warpgroup has of the columns of each matrix."""

    number: IntLike
    count: int

    @classmethod
    def here(cls, t: DecodeTiles) -> "ColumnSlice":
        return cls(lax.axis_index("warpgroup") if t.warpgroups > 1 else 0, t.warpgroups)

    @property
    def is_first(self):
        return self.number == 0

    def take(self, ref, width: int | None = None):
        """The slice of the first `width` columns of a matrix, or of all."""
        size = (ref.shape[1] if width is None else width) // self.count
        return ref.at[:, pl.ds(self.number * size, size)]
