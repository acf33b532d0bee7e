"""The forward of FlashAttention-4: two tiles of 128 queries a program, whose softmaxes run under
each other's products; S, P and O lie in tensor memory.

Warpgroups 0 and 1 have the softmax of a tile each. Warpgroup 2 rescales O where a maximum has grown
by more than the threshold, each warp by itself, and writes O in the end. Of warpgroup 3 one warp
begins the products, one loads by TMA.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import HALVES, ROWS, AllTiles, Tiles
from pallas_flash.kernels.mma import forward as mma
from pallas_flash.kernels.mosaic import (
    block_info,
    logits,
    scheduler,
    shared_memory,
    statistics,
    tma,
)
from pallas_flash.kernels.mosaic.launch import Role, launch, specialize
from pallas_flash.kernels.mosaic.ragged_tail import RaggedRows
from pallas_flash.kernels.mosaic.registers import opaque, per_row, some_below_one
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule

ROW_TILES = 2
TILES = (
    Tiles(64, 64, row_tiles=ROW_TILES, stages=4, value_stages=4),
    Tiles(128, 128, row_tiles=ROW_TILES),
)


class Inputs(NamedTuple):
    """The kernel's arrays, of sizes that TMA can take, and what the mask comes to."""

    q: jax.Array  # [B, T, N, H]
    keys: RaggedRows  # k [B, S, K, H], v [B, S, K, Hv]
    blocks: jax.Array | block_info.BlockLists | None  # of block_info.by_query_tile
    sinks: jax.Array | None  # [N], less what the logits omit
    logits: logits.Arrays


class Memory(NamedTuple):
    """The shared memory, tensor memory and mbarriers of a program."""

    q: Any  # [row_tiles, 128, the larger width], of the output in the end
    k: Any  # [stages, 128, width]
    v: Any  # [value_stages, 128, value_width]
    rows: Any  # [row_tiles, 128]: alpha, l in the end
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    s_full: Any  # products -> softmax
    p_full: Any  # softmax -> products, for each half of the columns
    o_scaled: Any  # correction -> products
    o_done: Any  # products -> correction
    row_full: Any  # softmax -> correction
    row_free: Any  # correction -> softmax

    @classmethod
    def allocate(cls, p: Problem, t: Tiles) -> "Memory":
        block = functools.partial(shared_memory.matrix, p.dtype, swizzle=t.swizzle)
        barriers = lambda n, **kw: plgpu.Barrier(num_barriers=n, **kw)
        ordered = functools.partial(barriers, orders_tensor_core=True)
        n = t.row_tiles
        return cls(
            q=block(n, ROWS, max(t.width, t.value_width)),
            k=block(t.stages, t.block_k, t.width),
            v=block(t.value_stages, t.block_k, t.value_width),
            rows=plgpu.SMEM((n, ROWS), jnp.float32),
            q_full=barriers(n),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
            k_free=ordered(t.stages),
            v_free=ordered(t.value_stages),
            s_full=ordered(n),
            p_full=ordered(n * HALVES),
            o_scaled=ordered(n),
            o_done=ordered(n),
            row_full=barriers(n),
            row_free=barriers(n),
        )


class TensorMemory(NamedTuple):
    """The tensor memory of a program, for each of its tiles of queries."""

    s_and_p: tuple  # float32 [128, 128], and P over it in halves
    o: tuple  # float32 [128, value_width]

    @classmethod
    def allocate(cls, p: Problem, t: Tiles) -> "TensorMemory":
        return cls(
            (tile.scores_and_weights(t.block_k, p.dtype),) * t.row_tiles,
            (plgpu.TMEM((ROWS, t.value_width), jnp.float32),) * t.row_tiles,
        )


def forward(problem: Problem, tiles: AllTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    logits are in base e."""
    if tiles.forward is None:
        return mma.forward(problem, tiles.by_mma, x)
    p, t = problem, tiles.forward
    _, key_lengths = x.resolved_mask.lengths
    inputs = Inputs(
        tma.pad(x.query, t.swizzle),
        tma.padded_rows([x.key, x.value], t.block_k, key_lengths, t.swizzle),
        block_info.by_query_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k),
        statistics.sinks(p, x),
        logits.arrays(p, x, t.tiling),
    )
    o_type = jax.ShapeDtypeStruct(
        (*inputs.q.shape[:3], inputs.keys.arrays[1].shape[3]), x.query.dtype
    )
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[o_type, *jax.tree.leaves(statistics.types(p, t.block_q))],
        warpgroups=t.row_tiles + 2,
        scratch=(Memory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_forward",
    )
    return o[:, : p.queries, :, : p.value_size], statistics.results(p, stats)


def _kernel(program, x: Inputs, o_gmem, *outputs, problem: Problem, tiles: Tiles):
    *stats_gmem, (m, tensor) = outputs
    p, t = problem, tiles
    work = scheduler.query_tile(program, p, t.block_q, t.row_bytes(p.dtype))
    blocks = block_info.visited(x, work, p, t)
    first, last = blocks.first, opaque(blocks.last)
    count = last - first
    first_row = lambda i: work.tile * t.block_q + i * ROWS
    k_slot = lambda n: tma.slot(n - first, t.stages)
    v_slot = lambda n: tma.slot(n - first, t.value_stages)

    def q_rows(array, i, width):
        return tma.head_rows(array, work.batch, pl.ds(first_row(i), ROWS), work.head, width)

    def produce():
        for i in range(t.row_tiles):
            plgpu.copy_gmem_to_smem(q_rows(x.q, i, m.q.shape[2]), m.q.at[i], m.q_full.at[i])
        read = x.keys.reader(work.batch, t.block_k)

        def fetch(n, _):
            def copy(row, k_gmem, v_gmem):
                rows = pl.ds(row, t.block_k)
                for array, width, to, full, free, at, stages in (
                    (k_gmem, t.width, m.k, m.k_full, m.k_free, k_slot(n), t.stages),
                    (v_gmem, t.value_width, m.v, m.v_full, m.v_free, v_slot(n), t.value_stages),
                ):
                    pl.when(n - first >= stages)(functools.partial(plgpu.barrier_wait, free.at[at]))
                    source = tma.head_rows(array, work.batch, rows, work.kv_head, width)
                    plgpu.copy_gmem_to_smem(source, to.at[at], full.at[at])

            read(blocks.index(n), copy)

        schedule.loop(first, last, fetch, None)

    def multiply():
        def scores(i, n):
            s, _ = tensor.s_and_p[i]
            k = m.k.at[k_slot(n)].transpose((1, 0))
            plgpu.tcgen05_mma(s, m.q.at[i, :, : t.width], k, accumulate=False)
            plgpu.tcgen05_commit_arrive(m.s_full.at[i])

        def release(free, at, n, stages):
            # only where another block waits for the slot
            pl.when(n - first + stages < count)(lambda: plgpu.tcgen05_commit_arrive(free.at[at]))

        plgpu.barrier_wait(m.k_full.at[k_slot(first)])
        for i in range(t.row_tiles):
            plgpu.barrier_wait(m.q_full.at[i])
            scores(i, first)
        release(m.k_free, k_slot(first), first, t.stages)

        def step(n, _):
            at = v_slot(n)
            plgpu.barrier_wait(m.v_full.at[at])
            more = n + 1 < last
            pl.when(more)(lambda: plgpu.barrier_wait(m.k_full.at[k_slot(n + 1)]))
            next_scores = lambda i: pl.when(more)(functools.partial(scores, i, n + 1))
            for i in range(t.row_tiles):
                _, p_halves = tensor.s_and_p[i]
                plgpu.barrier_wait(m.o_scaled.at[i])
                for half, weights in enumerate(p_halves):
                    plgpu.barrier_wait(m.p_full.at[i * HALVES + half])
                    keys = pl.ds(half * (t.block_k // HALVES), t.block_k // HALVES)
                    accumulate = n > first if half == 0 else True
                    plgpu.tcgen05_mma(tensor.o[i], weights, m.v.at[at, keys], accumulate=accumulate)
                plgpu.tcgen05_commit_arrive(m.o_done.at[i])
                if t.in_order:  # the scores overwrite P, which the product before them reads
                    next_scores(i)
            for i in () if t.in_order else range(t.row_tiles):
                plgpu.barrier_wait(m.o_done.at[i])
                next_scores(i)
            release(m.v_free, at, n, t.value_stages)
            release(m.k_free, k_slot(n + 1), n + 1, t.stages)

        schedule.loop(first, last, step, None)

    def softmax(i):
        head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, work.head)
        mask = head.load_mask(work.batch, first_row(i), ROWS)
        s_tmem, p_tmem = tensor.s_and_p[i]
        half_size = t.block_k // HALVES

        def step(n, stats, masked):
            plgpu.barrier_wait(m.s_full.at[i])
            s = [
                plgpu.async_load_tmem(s_tmem.at[:, pl.ds(d, t.columns)], layout=tile.LAYOUTS.tile)
                for d in range(0, t.block_k, t.columns)
            ]
            plgpu.wait_load_tmem()
            whole = head.tile(first_row(i), blocks.index(n) * t.block_k, (ROWS, t.block_k))
            places, pieces = whole.split(t.columns), []
            for piece, place in zip(s, places, strict=True):
                piece, scale = head.modify(piece, place)
                pieces.append(mask.select(place)(piece, -jnp.inf) if masked else piece)
            stats, alpha = online_softmax.raise_maximum(
                jnp.concatenate(pieces, axis=1), stats, p.log_base, scale, t.rescale_threshold
            )
            pl.when(n > first)(lambda: plgpu.barrier_wait(m.row_free.at[i]))
            m.rows[i] = alpha
            plgpu.barrier_arrive(m.row_full.at[i])
            for half, weights in enumerate(p_tmem):
                for d in range(0, half_size, t.columns):
                    number = (half * half_size + d) // t.columns
                    prob, stats = online_softmax.weights(pieces[number], stats, p.log_base, scale)
                    prob = head.drop(prob, places[number]).astype(o_gmem.dtype)
                    plgpu.async_store_tmem(weights.at[:, pl.ds(d, t.columns)], prob)
                plgpu.commit_tmem()
                plgpu.barrier_arrive(m.p_full.at[i * HALVES + half])
            return stats

        sink = None if x.sinks is None else x.sinks[work.head]
        stats = online_softmax.start(tile.rows(0.0), p.log_base, sink, p.max_logits)
        stats = blocks.visit(step, stats)
        plgpu.barrier_wait(m.row_free.at[i])
        m.rows[i] = stats.l
        plgpu.barrier_arrive(m.row_full.at[i])
        for gmem, value in zip(
            stats_gmem, jax.tree.leaves(statistics.finish(p, stats)), strict=True
        ):
            rows = gmem.at[work.batch, work.head, pl.ds(first_row(i), ROWS)]
            if hasattr(plgpu, "store"):
                plgpu.store(rows, value, optimized=False)
            else:
                rows[...] = value

    def correct():
        width = 32

        def step(n, _):
            for i in range(t.row_tiles):
                plgpu.barrier_wait(m.row_full.at[i])
                alpha = plgpu.load(m.rows.at[i], layout=tile.LAYOUTS.row)
                plgpu.barrier_arrive(m.row_free.at[i])

                @pl.when(n > first)
                def _(i=i, alpha=alpha):
                    plgpu.barrier_wait(m.o_done.at[i])

                    @pl.when(some_below_one(alpha, tile.LAYOUTS.row) > 0)  # each warp by itself
                    def _():
                        for d in range(0, t.value_width, width):
                            part = tensor.o[i].at[:, pl.ds(d, width)]
                            o = plgpu.async_load_tmem(part, layout=tile.LAYOUTS.tile)
                            tile.await_loads()
                            plgpu.async_store_tmem(part, o * per_row(alpha, o.shape))
                        tile.await_stores()

                plgpu.barrier_arrive(m.o_scaled.at[i])

        schedule.loop(first, last, step, None)
        for i in range(t.row_tiles):
            plgpu.barrier_wait(m.row_full.at[i])
            plgpu.barrier_wait(m.o_done.at[i])
            l = plgpu.load(m.rows.at[i], layout=tile.EPILOGUE.row)
            for d in range(0, t.value_width, 64):
                o = plgpu.async_load_tmem(
                    tensor.o[i].at[:, pl.ds(d, 64)], layout=tile.EPILOGUE.tile
                )
                o = online_softmax.finish(o, l, p.kept).astype(o_gmem.dtype)
                m.q[i, :, pl.ds(d, 64)] = o
            plgpu.wait_load_tmem()
            plgpu.commit_smem()
            o_rows = q_rows(o_gmem, i, t.value_width)
            plgpu.copy_smem_to_gmem(m.q.at[i, :, : t.value_width], o_rows)
        plgpu.wait_smem_to_gmem(0)

    specialize(
        *(Role(lambda _, i=i: softmax(i), registers=192) for i in range(t.row_tiles)),
        Role(lambda _: correct(), registers=88),
        Role(tile.warps(multiply, produce), registers=40),
    )
