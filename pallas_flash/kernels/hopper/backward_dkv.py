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
from pallas_flash.kernels.hopper import bits, ends, kept, order, scored, seen, sync, tile
from pallas_flash.kernels.hopper.gradients import Inputs, inputs
from pallas_flash.kernels.hopper.owner import Block, Owner
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles, stored


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
    dq: Any  # [warpgroups, 64, part of the columns] float32, or None
    kv_full: Any
    q_full: Any  # of q and lse
    do_full: Any
    delta_full: Any

    @classmethod
    def of(cls, t: KeyTiles, dtype, fused: bool) -> "Memory":
        rows, block = (
            plgpu.SMEM((t.stages, t.block_q), jnp.float32),
            functools.partial(tile.block, swizzle=t.swizzle),
        )
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
            dq=block(jnp.float32, t.warpgroups, ROWS, t.width // t.dq_column_parts)
            if fused
            else None,
            kv_full=plgpu.Barrier(num_arrivals=2),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            do_full=plgpu.Barrier(num_barriers=t.stages),
            delta_full=plgpu.Barrier(num_barriers=t.stages),
        )


def dkv(p: Problem, t: KeyTiles, x: Operands, do, lse, delta, *, fused: bool):
    """dk, dv; before them dq, if fused."""
    blocks = seen.by_key_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    x = inputs(p, t, x, blocks, do, lse, delta)
    sums = (
        [jnp.zeros((*x.q.shape[:3], stored(p.head_size, t.swizzle, 4)), jnp.float32)]
        if fused
        else []
    )
    *dq, dk, dv = tile.launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=order.key_tiles(p, t.block_k),
        out_type=[*sums, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.k, x.v))],
        tiles=t,
        scratch=Memory.of(t, x.k.dtype, fused),
        name="flash_attention_dq_dk_dv" if fused else "flash_attention_dk_dv",
    )
    dq = [(a[:, : p.queries, :, : p.head_size] * p.scale).astype(x.q.dtype) for a in dq]
    return *dq, dk[:, : p.keys, :, : p.head_size], dv[:, : p.keys, :, : p.value_size]


def _kernel(program, x: Inputs, *outputs, problem: Problem, tiles: KeyTiles):
    *dq_gmem, dk_gmem, dv_gmem, memory = outputs
    at = order.key_tile(program, problem, tiles.block_k, tiles.query_bytes)
    of_head = seen.query_blocks(
        x.blocks, x.resolved_mask, at, problem.queries, tiles.block_q, tiles.block_k
    )
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    slots = memory.q, memory.lse, memory.do, memory.delta
    full = memory.q_full, memory.q_full, memory.do_full, memory.delta_full
    queries = sync.Ring(slots, full, number_of.first_ring, tiles.warpgroups)
    first_key = at.tile * tiles.block_k

    def produce():
        def keys(first, k_gmem, v_gmem):
            rows = lambda x, width: tile.rows_of(
                x, at.batch, pl.ds(first, tiles.block_k), at.kv_head, width
            )
            plgpu.copy_gmem_to_smem(rows(k_gmem, tiles.width), memory.k, memory.kv_full)
            plgpu.copy_gmem_to_smem(rows(v_gmem, tiles.value_width), memory.v, memory.kv_full)

        ends.reader(x.last, at.batch, tiles.block_k)(at.tile, keys, x.k, x.v)
        read = ends.reader(x.last_queries, at.batch, tiles.block_q)

        def head(g, _):
            blocks, number, before = of_head(g)

            def load(t, _):
                i = number(t)

                def fill(first, q_gmem, do_gmem):
                    rows = lambda x, width: tile.rows_of(
                        x, at.batch, pl.ds(first, tiles.block_q), at.head + g, width
                    )
                    by_row = at.batch, at.head + g, pl.ds(i * tiles.block_q, tiles.block_q)
                    q, do = rows(q_gmem, tiles.width), rows(do_gmem, tiles.value_width)
                    queries.fill(before(t), (q, x.lse.at[by_row], do, x.delta.at[by_row]))

                read(i, fill, x.q, x.do)

            schedule.loop(sync.opaque(blocks.first), sync.opaque(blocks.last), load, None)

        schedule.loop(0, sync.opaque(problem.group), head, None)
        blocks, _, before = of_head(problem.group - 1)
        queries.drain(before(blocks.last))

    def consume(own):
        if not tiles.split:
            return own_keys(own)
        for is_first in (True, False):  # each has a loop of its own
            pl.when((own == 0) == is_first)(functools.partial(own_keys, own, is_first))

    def own_keys(own, is_first=None):
        plgpu.barrier_wait(memory.kv_full)

        def head(g, sums):
            blocks, number, before = of_head(g)
            dropout = kept.of(problem.dropped, x.seeds, at.batch, at.head + g)
            score = scored.of(problem, x.bias, x.score, at.batch, at.head + g)
            rule = bits.of(problem, x.where, at.batch, at.head + g)

            def step(t, sums, masked):
                block = Block(
                    before(t), at.head + g, number(t) * tiles.block_q, dropout, score, rule
                )
                return owner_of(sync.opaque(own)).add(block, masked, *sums)

            return blocks.visit(step, sums)

        owner_of = lambda own: Owner(
            problem, tiles, x, memory, queries, own, at.batch, first_key, is_first, *dq_gmem
        )
        owner = owner_of(own)
        columns, value_columns = owner.columns(tiles.width), owner.columns(tiles.value_width)
        zeros = tile.zeros(ROWS, columns.size), tile.zeros(ROWS, value_columns.size)
        dk, dv = schedule.loop(0, problem.group, head, zeros)
        owner.meet()  # all have read k and v
        k, v = memory.k.at[owner.keys, columns], memory.v.at[owner.keys, value_columns]
        if is_first is False:  # some columns may be both's: one after the other
            owner.meet()
        k[...], v[...] = (dk * problem.scale).astype(k.dtype), dv.astype(v.dtype)
        if is_first:
            owner.meet()
        owner.meet()
        mine = owner.cut(tiles.block_k, tiles.warpgroups)
        keys = lambda x, width: tile.rows_of(
            x, at.batch, pl.ds(first_key + mine.start, mine.size), at.kv_head, width
        )
        dk_to, dv_to = keys(dk_gmem, tiles.width), keys(dv_gmem, tiles.value_width)
        tile.copy_out((memory.k.at[mine], dk_to), (memory.v.at[mine], dv_to))

    tile.by_role(tiles, consume, produce)
