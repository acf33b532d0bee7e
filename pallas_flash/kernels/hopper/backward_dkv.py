"""dK and dV, and in the fused scheme dQ: a program owns keys, and walks over the queries of all
heads that share them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.dkv_consumer import Block, DkvConsumer, Queries
from pallas_flash.kernels.hopper.tile import inputs
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles, padded_size
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.gradients import Inputs
from pallas_flash.kernels.mosaic.launch import launch
from pallas_flash.kernels.mosaic.registers import opaque


class Memory(NamedTuple):
    """The shared memory of a program that owns keys."""

    k: Any  # [block_k, width], of dk in the end
    v: Any  # [block_k, value_width], of dv in the end
    q: Any  # [stages, block_q, width]
    do: Any  # [stages, block_q, value_width]
    lse: Any  # [stages, block_q]
    delta: Any
    # [2, block_k, block_q], transposed, as dp and ds; None but where the consumers split the
    # columns
    p: Any
    dp: Any  # [block_k, block_q], dP - delta; None but there
    ds: Any  # the same there, and in the fused scheme [2, block_k, block_q]; else None
    dq: Any  # [warpgroups, 64, a slice of the columns] float32, or None
    kv_full: Any
    q_full: Any  # of q and lse
    do_full: Any
    delta_full: Any

    @classmethod
    def allocate(cls, t: KeyTiles, dtype, fused: bool) -> "Memory":
        rows = plgpu.SMEM((t.stages, t.block_q), jnp.float32)
        block = functools.partial(tile.block, swizzle=t.swizzle)
        return cls(
            k=block(dtype, t.block_k, t.width),
            v=block(dtype, t.block_k, t.value_width),
            q=block(dtype, t.stages, t.block_q, t.width),
            do=block(dtype, t.stages, t.block_q, t.value_width),
            lse=rows,
            delta=rows,
            p=block(dtype, 2, t.block_k, t.block_q) if t.split else None,
            dp=block(dtype, t.block_k, t.block_q) if t.split else None,
            ds=block(dtype, *[2] * fused, t.block_k, t.block_q) if fused or t.split else None,
            dq=block(jnp.float32, t.warpgroups, ROWS, t.width // t.dq_column_slices)
            if fused
            else None,
            kv_full=plgpu.Barrier(num_arrivals=2),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            do_full=plgpu.Barrier(num_barriers=t.stages),
            delta_full=plgpu.Barrier(num_barriers=t.stages),
        )


def dkv(p: Problem, t: KeyTiles, x: Operands, lse, do, delta, fused: bool):
    """dk, dv; before them dq, if fused."""
    blocks = block_info.by_key_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    x = inputs(p, t, blocks, x, lse, do, delta)
    q, (k, v) = x.queries.arrays[0], x.keys.arrays
    zeros = lambda: jnp.zeros((*q.shape[:3], padded_size(p.head_size, t.swizzle, 4)), jnp.float32)
    *dq, dk, dv = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=scheduler.key_programs(p, t.block_k),
        out_type=[
            *([zeros()] if fused else []),
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (k, v)),
        ],
        warpgroups=t.warpgroups + 1,
        scratch=Memory.allocate(t, k.dtype, fused),
        name="flash_attention_dq_dk_dv" if fused else "flash_attention_dk_dv",
    )
    dq = [(a[:, : p.queries, :, : p.head_size] * p.scale).astype(q.dtype) for a in dq]
    return *dq, dk[:, : p.keys, :, : p.head_size], dv[:, : p.keys, :, : p.value_size]


def _kernel(program, x: Inputs, *outputs, problem: Problem, tiles: KeyTiles):
    *dq_gmem, dk_gmem, dv_gmem, memory = outputs
    work = scheduler.key_tile(program, problem, tiles.block_k, tiles.query_bytes)
    query_blocks = block_info.query_blocks(
        x.blocks, x.logits.resolved_mask, work, problem.queries, tiles.block_q, tiles.block_k
    )
    queries = sync.TmaRing(
        Queries(memory.q, memory.lse, memory.do, memory.delta),
        Queries(memory.q_full, memory.q_full, memory.do_full, memory.delta_full),
        sync.BarrierIds(tiles.warpgroups, tiles.stages).first_ring,
        tiles.warpgroups,
    )
    first_key = work.tile * tiles.block_k

    def produce():
        _load_keys(x, work, memory, tiles)
        read = x.queries.reader(work.batch, tiles.block_q)

        def head(g, _):
            blocks, position = query_blocks(g)

            def load(t, _):
                i = blocks.index(t)

                def fill(first, q_gmem, do_gmem):
                    rows = lambda x, width: tile.head_rows(
                        x, work.batch, pl.ds(first, tiles.block_q), work.head + g, width
                    )
                    by_row = work.batch, work.head + g, pl.ds(i * tiles.block_q, tiles.block_q)
                    q, do = rows(q_gmem, tiles.width), rows(do_gmem, tiles.value_width)
                    source = Queries(q, x.lse.at[by_row], do, x.delta.at[by_row])
                    queries.fill(position(t), source)

                read(i, fill)

            schedule.loop(opaque(blocks.first), opaque(blocks.last), load, None)

        schedule.loop(0, opaque(problem.group), head, None)
        blocks, position = query_blocks(problem.group - 1)
        queries.drain(position(blocks.last))

    def consume(wg):
        if not tiles.split:
            return compute(wg)
        for is_first in (True, False):  # each has its own loop
            pl.when((wg == 0) == is_first)(functools.partial(compute, wg, is_first))

    def compute(wg, is_first=None):
        plgpu.barrier_wait(memory.kv_full)
        consumer_at = lambda wg: DkvConsumer(
            problem, tiles, memory, queries, wg, work.batch, first_key, is_first, *dq_gmem
        )

        def head(g, sums):
            blocks, position = query_blocks(g)
            of_head = logits.for_head(problem, tile.LAYOUTS, x.logits, work.batch, work.head + g)

            def step(t, sums, masked):
                first_row = blocks.index(t) * tiles.block_q
                block = Block(position(t), work.head + g, first_row, of_head)
                return consumer_at(opaque(wg)).add(block, masked, *sums)

            return blocks.visit(step, sums)

        consumer = consumer_at(wg)
        widths = consumer.columns(tiles.width).size, consumer.columns(tiles.value_width).size
        zeros = tuple(tile.zeros(ROWS, width) for width in widths)
        _finish(work, consumer, *schedule.loop(0, problem.group, head, zeros), dk_gmem, dv_gmem)

    tile.specialize(tiles, consume, produce)


def _load_keys(x: Inputs, work: scheduler.WorkTile, memory: Memory, tiles: KeyTiles):
    def copy(first, k_gmem, v_gmem):
        rows = lambda x, width: tile.head_rows(
            x, work.batch, pl.ds(first, tiles.block_k), work.kv_head, width
        )
        plgpu.copy_gmem_to_smem(rows(k_gmem, tiles.width), memory.k, memory.kv_full)
        plgpu.copy_gmem_to_smem(rows(v_gmem, tiles.value_width), memory.v, memory.kv_full)

    x.keys.reader(work.batch, tiles.block_k)(work.tile, copy)


def _finish(work: scheduler.WorkTile, consumer: DkvConsumer, dk, dv, dk_gmem, dv_gmem):
    """The epilogue, by way of the shared memory of k and v."""
    tiles, memory = consumer.tiles, consumer.memory
    columns, value_columns = consumer.columns(tiles.width), consumer.columns(tiles.value_width)
    consumer.barrier()  # all have read k and v
    k, v = memory.k.at[consumer.keys, columns], memory.v.at[consumer.keys, value_columns]
    if consumer.is_first is False:  # some columns may be both's: one after the other
        consumer.barrier()
    dk, dv = (dk * consumer.problem.scale).astype(k.dtype), dv.astype(v.dtype)
    k[...] = dk
    v[...] = dv
    if consumer.is_first:
        consumer.barrier()
    consumer.barrier()
    share = consumer.share(tiles.block_k, tiles.warpgroups)
    rows = lambda x, width: tile.head_rows(
        x, work.batch, pl.ds(consumer.first_key + share.start, share.size), work.kv_head, width
    )
    tile.copy_out(
        (memory.k.at[share], rows(dk_gmem, tiles.width)),
        (memory.v.at[share], rows(dv_gmem, tiles.value_width)),
    )
