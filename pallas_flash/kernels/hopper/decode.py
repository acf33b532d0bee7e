"""Split-KV decoding on Hopper (Flash-Decoding): a program owns one split of the keys of one
key/value head, and the rows of all new tokens that see them.

The time is that of reading keys and values, so that the softmax need not hide: one consumer, and as
many blocks in flight as shared memory holds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import decode, online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tuning import COLUMNS, ROWS, DecodeTiles
from pallas_flash.kernels.mosaic import logits, mods
from pallas_flash.kernels.mosaic.launch import launch
from pallas_flash.kernels.mosaic.mask import load_mask
from pallas_flash.kernels.mosaic.registers import iota, opaque, per_row
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.kernels.mosaic.tiling import Tiling
from pallas_flash.masks.resolved_mask import ResolvedMask


class Inputs(NamedTuple):
    q: jax.Array  # [B, rows, K, H]
    k: jax.Array  # [B, S, K, H], or pages [P, page, K, H]
    v: jax.Array
    blocks: jax.Array  # int32 [B, 1, 4], schedule.Blocks
    reach: jax.Array  # int32 [B, 2], the keys that any row sees
    table: jax.Array | None  # int32 [B, pages], indices of existing pages
    resolved_mask: ResolvedMask  # its data by 64 rows, and by keys
    score_mod: mods.Arrays | None


class Memory(NamedTuple):
    """The shared memory of a program."""

    q: Any
    k: Any
    v: Any
    o: Any  # float32, a slice of its columns
    stats: Any  # m and l [64]
    q_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def allocate(cls, t: DecodeTiles, dtype) -> "Memory":
        full = plgpu.Barrier(num_barriers=t.stages, num_arrivals=t.copies)
        block = functools.partial(tile.block, swizzle=t.swizzle)
        return cls(
            q=block(dtype, ROWS, t.width),
            k=block(dtype, t.stages, t.block_k, t.width),
            v=block(dtype, t.stages, t.block_k, t.value_width),
            o=tile.block(jnp.float32, ROWS, COLUMNS),
            stats=(plgpu.SMEM((ROWS,), jnp.float32),) * 2,
            q_full=plgpu.Barrier(),
            k_full=full,
            v_full=full,
        )


def forward(problem: Problem, tiles: DecodeTiles, x: Operands, table=None):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` int32
    [B, pages] of page indices, key and value are pages [P, page, K, n]."""
    (p, rows), t = decode.pack_gqa(problem, x, score_mod=True), tiles
    inputs = _inputs(p, t, rows, table)
    R, splits = inputs.q.shape[1], (p.batch, t.num_splits, p.heads)
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=p.batch * p.heads * t.num_splits,
        out_type=[
            jax.ShapeDtypeStruct((*splits, R, t.value_width), jnp.float32),
            *[jax.ShapeDtypeStruct((*splits, ROWS), jnp.float32)] * 2,
        ],
        warpgroups=t.warpgroups + 1,
        scratch=Memory.allocate(t, x.query.dtype),
        name="flash_attention_decode",
    )
    m, l = (a[..., : p.queries] for a in stats)
    stats = online_softmax.SoftmaxState(m + logits.soft_cap_constant(p), l)
    return decode.merge_splits(problem, x, o[..., : p.queries, : p.value_size], stats, p.log_base)


def _inputs(p: Problem, t: DecodeTiles, x: Operands, table) -> Inputs:
    resolved_mask, blocks = schedule.by_query_tile(x.resolved_mask, p.queries, ROWS, t.block_k)
    reach = jnp.stack(decode.reach(resolved_mask.start, resolved_mask.stop, p.keys), 1)
    q, k, v = (tile.pad(a, t.swizzle) for a in (x.query, x.key, x.value))
    score_mod = mods.arrays(p, x.score, Tiling(ROWS, t.block_k, t.block_k))
    return Inputs(q, k, v, blocks, reach, table, resolved_mask, score_mod)


def _kernel(program, x: Inputs, o_gmem, *outputs, problem: Problem, tiles: DecodeTiles):
    (*stats_gmem, memory), p, t = outputs, problem, tiles
    pair, split = divmod_(program, t.num_splits)
    b, h = divmod_(pair, p.heads)
    visited = schedule.Blocks.from_table(x.blocks, b, 0).split(split, t.num_splits)
    first = visited.first
    blocks = schedule.Blocks(*(n - first for n in visited.ends), lambda n: first + n)
    ids = sync.BarrierIds(t.warpgroups, t.stages)
    k = Ring(memory.k, memory.k_full, ids.first_ring, t.warpgroups)
    v = Ring(memory.v, memory.v_full, ids.second_ring, t.warpgroups)
    # opaque: jax 0.12 refuses a known slice that hangs over
    top = pl.ds(pl.multiple_of(opaque(0), 8), ROWS)

    def produce():
        def load(n, _):
            k.fill(n, *_sources(x.k, x.table, b, h, blocks.index(n), t, t.width))
            v.fill(n, *_sources(x.v, x.table, b, h, blocks.index(n), t, t.value_width))

        count = opaque(blocks.last)
        schedule.loop(opaque(0), count, load, None)
        k.drain(count)
        v.drain(count)

    def consume(_):
        plgpu.copy_gmem_to_smem(tile.head_rows(x.q, b, top, h, t.width), memory.q, memory.q_full)
        mask = load_mask(tile.LAYOUTS, x.resolved_mask, b, 0, ROWS, None)
        score_mod = mods.for_head(p.score, x.score_mod, b, h)
        head = logits.Logits(p, tile.LAYOUTS, x.resolved_mask, None, None, score_mod, None)
        plgpu.barrier_wait(memory.q_full)

        def step(n, carry, masked):
            o, stats = carry
            first_key = blocks.index(n) * t.block_k
            if masked:  # here, where no scores are in registers
                v.wait(n)
                start, stop = (x.reach[b, i] - first_key for i in range(2))
                _clear(v.block(n), start, stop, ids.consumers)
            k.wait(n)
            at = head.tile(0, first_key, (ROWS, t.block_k))
            # [bq, bk]
            s = tile.product(lambda acc: tile.dot_t(acc, memory.q, k.block(n)), at.shape)
            k.release(n)
            s, scale = head.modify(s, at)
            if masked:
                s = jnp.where(mask.visible(at), s, -jnp.inf)
            prob, alpha, stats = online_softmax.step(s, stats, p.log_base, scale)
            if not masked:
                v.wait(n)
            o = o * per_row(alpha, o.shape)
            (o,) = tile.accumulate(lambda acc: tile.dot(acc, prob.astype(x.q.dtype), v.block(n)), o)
            v.release(n)
            return o, stats

        start = online_softmax.start(tile.rows(0.0), p.log_base)
        o, stats = blocks.visit(step, (tile.zeros(ROWS, t.value_width), start))
        o = online_softmax.finish(o, stats.l)
        for smem, value in zip(memory.stats, (stats.m, stats.l), strict=True):
            smem[...] = value
        stats_to = (gmem.at[b, split, h] for gmem in stats_gmem)
        tile.copy_out(*zip(memory.stats, stats_to, strict=True))
        for column in range(0, t.value_width, COLUMNS):
            memory.o[...] = o[:, column : column + COLUMNS]
            tile.copy_out((memory.o, o_gmem.at[b, split, h, top, pl.ds(column, COLUMNS)]))

    tile.specialize(t, consume, produce)


class Ring(sync.TmaRing):
    """A ring of blocks that come in several copies, one for each page."""

    def fill(self, t, *sources):
        pl.when(t >= self.stages)(lambda: self._release_barrier("sync", t))
        slot, size = self._slot(t), self.slots.shape[1] // len(sources)
        for i, source in enumerate(sources):
            part = self.slots.at[slot, pl.ds(i * size, size)]
            plgpu.copy_gmem_to_smem(source, part, self.full.at[slot])


def _sources(ref, table, b, h, j, t: DecodeTiles, width: int) -> list:
    """Where block j of the keys or values is, page by page."""
    if table is None:
        return [tile.head_rows(ref, b, pl.ds(j * t.block_k, t.block_k), h, width)]
    page, last = ref.shape[1], table.shape[1] - 1
    entry = lambda n: table[b, jnp.minimum(n, last)]
    if page >= t.block_k:
        index, within = divmod_(j, page // t.block_k)
        rows = pl.ds(within * t.block_k, t.block_k)
        return [tile.head_rows(ref, entry(index), rows, h, width)]
    return [
        tile.head_rows(ref, entry(j * t.copies + i), pl.ds(0, page), h, width)
        for i in range(t.copies)
    ]


def _clear(v_smem, first, last, barrier: int):
    """Zeros in the rows of V before `first` and from `last` on, which nobody sees: there may be
    NaN."""

    @pl.when((first > 0) | (last < v_smem.shape[0]))
    def _():
        row = iota(ROWS, tile.LAYOUTS.row)
        for column in range(0, v_smem.shape[1], COLUMNS):  # few at a time: o is in registers
            part = v_smem.at[:, pl.ds(column, COLUMNS)]
            v = plgpu.layout_cast(part[...], tile.LAYOUTS.tile)
            inside = per_row((row >= first) & (row < last), v.shape)
            part[...] = jnp.where(inside, v, jnp.zeros_like(v))
        sync.consumer_barrier(barrier, 1)
