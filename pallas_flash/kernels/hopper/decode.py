"""Decoding on Hopper: a program owns a part of the keys of one key/value head, and the rows of all
new tokens that see them.

The time is that of reading keys and values, so that the softmax need not hide: one consumer, and as
many blocks in flight as shared memory holds.
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
from pallas_flash.kernels.hopper import seen, sync, tile
from pallas_flash.kernels.hopper.tuning import COLUMNS, ROWS, DecodeTiles
from pallas_flash.masks.resolved_mask import ResolvedMask


class Inputs(NamedTuple):
    q: jax.Array  # [B, rows, K, H]
    k: jax.Array  # [B, S, K, H], or pages [P, page, K, H]
    v: jax.Array
    blocks: jax.Array  # int32 [B, 1, 4], schedule.Blocks
    reach: jax.Array  # int32 [B, 2], the keys that any row sees
    table: jax.Array | None  # int32 [B, pages], numbers of pages that are there
    resolved_mask: ResolvedMask  # its data by 64 rows, and by keys


class Memory(NamedTuple):
    """The shared memory of a program."""

    q: Any
    k: Any
    v: Any
    o: Any  # float32, some of its columns
    stats: Any  # for each number of the SoftmaxState [64]
    q_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def of(cls, t: DecodeTiles, dtype, numbers: int) -> "Memory":
        full = plgpu.Barrier(num_barriers=t.stages, num_arrivals=t.copies)
        block = functools.partial(tile.block, swizzle=t.swizzle)
        return cls(
            q=block(dtype, ROWS, t.width),
            k=block(dtype, t.stages, t.block_k, t.width),
            v=block(dtype, t.stages, t.block_k, t.value_width),
            o=tile.block(jnp.float32, ROWS, COLUMNS),
            stats=(plgpu.SMEM((ROWS,), jnp.float32),) * numbers,
            q_full=plgpu.Barrier(),
            k_full=full,
            v_full=full,
        )


def forward(problem: Problem, tiles: DecodeTiles, x: Operands, table=None):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` int32
    [B, pages] of page numbers, key and value are pages [P, page, K, n]."""
    (p, rows), t = decode.as_rows(problem, x), tiles
    inputs = _inputs(p, t, rows, table)
    R, numbers = inputs.q.shape[1], 1 + p.max_logits
    o, *stats = tile.launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=p.batch * p.heads * t.parts,
        out_type=[
            jax.ShapeDtypeStruct((p.batch, t.parts, p.heads, R, t.value_width), jnp.float32),
            *[jax.ShapeDtypeStruct((p.batch, t.parts, p.heads, ROWS), jnp.float32)] * numbers,
        ],
        tiles=t,
        scratch=Memory.of(t, x.query.dtype, numbers),
        name="flash_attention_decode",
    )
    left_out = (p.soft_cap or 0.0) * online_softmax.LOG2E  # by `scores_apart`
    lse, top = (*(a[..., : p.queries] + left_out for a in stats), None)[:2]
    stats = online_softmax.SoftmaxState(lse, None, top)
    return decode.merged(problem, x, o[..., : p.queries, : p.value_size], stats, problem.unit)


def _inputs(p: Problem, t: DecodeTiles, x: Operands, table) -> Inputs:
    resolved_mask, blocks = schedule.by_query_tile(x.resolved_mask, p.queries, ROWS, t.block_k)
    reach = jnp.stack(decode.reach(resolved_mask.start, resolved_mask.stop, p.keys), 1)
    q, k, v = (tile.padded(a, t.swizzle) for a in (x.query, x.key, x.value))
    return Inputs(q, k, v, blocks, reach, table, resolved_mask)


def _kernel(program, x: Inputs, o_gmem, *outputs, problem: Problem, tiles: DecodeTiles):
    (*stats_gmem, memory), p, t = outputs, problem, tiles
    div = lambda a, n: (lax.div(a, jnp.int32(n)), lax.rem(a, jnp.int32(n)))
    pair, part = div(program, t.parts)
    b, h = div(pair, p.heads)
    whole = schedule.Blocks(*(x.blocks[b, 0, i] for i in range(4))).part(part, t.parts)
    first = whole.first
    blocks = schedule.Blocks(*(n - first for n in whole))
    number_of = sync.Numbers(t.warpgroups, t.stages)
    k = Ring(memory.k, memory.k_full, number_of.first_ring, t.warpgroups)
    v = Ring(memory.v, memory.v_full, number_of.second_ring, t.warpgroups)
    # opaque: jax 0.12 refuses a known slice that hangs over
    top = pl.ds(pl.multiple_of(sync.opaque(0), 8), ROWS)

    def produce():
        def load(n, _):
            k.fill(n, *_sources(x.k, x.table, b, h, first + n, t, t.width))
            v.fill(n, *_sources(x.v, x.table, b, h, first + n, t, t.value_width))

        count = sync.opaque(blocks.last)
        schedule.loop(sync.opaque(0), count, load, None)
        k.drain(count)
        v.drain(count)

    def consume(_):
        plgpu.copy_gmem_to_smem(tile.rows_of(x.q, b, top, h, t.width), memory.q, memory.q_full)
        view, shape = seen.view(x.resolved_mask, b, 0), (ROWS, t.block_k)
        plgpu.barrier_wait(memory.q_full)

        def step(n, carry, masked):
            o, stats = carry
            first_key = (first + n) * t.block_k
            if masked:  # here, where no scores are in registers
                v.wait(n)
                _clear(
                    v.block(n),
                    x.reach[b, 0] - first_key,
                    x.reach[b, 1] - first_key,
                    number_of.meeting,
                )
            k.wait(n)
            s = tile.product(lambda acc: tile.dot_t(acc, memory.q, k.block(n)), shape)  # [bq, bk]
            k.release(n)
            s, scale = online_softmax.scores_apart(s, p.scale, p.soft_cap)
            s = jnp.where(view.sees(first_key, shape), s, -jnp.inf) if masked else s
            prob, alpha, stats = online_softmax.step(s, stats, scale)
            if not masked:
                v.wait(n)
            o = o * tile.across(alpha, o.shape)
            (o,) = tile.products_add(
                lambda acc: tile.dot(acc, prob.astype(x.q.dtype), v.block(n)), o
            )
            v.release(n)
            return o, stats

        start = tile.zeros(ROWS, t.value_width), online_softmax.start(tile.rows(0.0))
        o, stats = blocks.visit(step, start)
        m, l, _ = stats
        o, lse = online_softmax.finish(o, l), jnp.where(l == 0, -jnp.inf, m + jnp.log2(l))
        for smem, number in zip(
            memory.stats, (lse, *([stats.largest] if p.max_logits else [])), strict=True
        ):
            smem[...] = number
        tile.copy_out(*zip(memory.stats, (gmem.at[b, part, h] for gmem in stats_gmem), strict=True))
        for column in range(0, t.value_width, COLUMNS):
            memory.o[...] = o[:, column : column + COLUMNS]
            tile.copy_out((memory.o, o_gmem.at[b, part, h, top, pl.ds(column, COLUMNS)]))

    tile.by_role(t, consume, produce)


class Ring(sync.Ring):
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
        return [tile.rows_of(ref, b, pl.ds(j * t.block_k, t.block_k), h, width)]
    page, last = ref.shape[1], table.shape[1] - 1
    entry = lambda n: table[b, jnp.minimum(n, last)]
    if page >= t.block_k:
        number, within = (
            lax.div(j, jnp.int32(page // t.block_k)),
            lax.rem(j, jnp.int32(page // t.block_k)),
        )
        return [tile.rows_of(ref, entry(number), pl.ds(within * t.block_k, t.block_k), h, width)]
    return [
        tile.rows_of(ref, entry(j * t.copies + i), pl.ds(0, page), h, width)
        for i in range(t.copies)
    ]


def _clear(v_smem, first, last, barrier: int):
    """Zeros in the rows of V before `first` and from `last` on, which nobody sees: there may be
    NaN."""

    @pl.when((first > 0) | (last < v_smem.shape[0]))
    def _():
        row = tile.count(ROWS, tile.ROW)
        for column in range(0, v_smem.shape[1], COLUMNS):  # few at a time: o is in registers
            part = v_smem.at[:, pl.ds(column, COLUMNS)]
            v = plgpu.layout_cast(part[...], tile.TILE)
            part[...] = jnp.where(
                tile.across((row >= first) & (row < last), v.shape), v, jnp.zeros_like(v)
            )
        sync.meet(barrier, 1)
