"""dQ: a program owns 64 queries of one head for each of its consumers, and walks over the keys (FlashAttention-2's loop)."""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import order, sync, tile
from pallas_flash.kernels.hopper.gradients import Inputs, Rows, inputs, p_and_ds
from pallas_flash.kernels.hopper.tuning import ROWS, Tiles
from pallas_flash.masks import Visibility


class Memory(NamedTuple):
    """The shared memory of a program that owns queries."""

    q: Any  # [warpgroups, 64, width], of dq in the end
    do: Any  # [warpgroups, 64, value_width]
    k: Any  # [stages, block_k, width]
    v: Any  # [value_stages, block_k, value_width]
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def of(cls, t: Tiles, dtype) -> "Memory":
        barriers = lambda n: plgpu.Barrier(num_barriers=n)
        return cls(
            q=tile.block(dtype, t.warpgroups, ROWS, t.width),
            do=tile.block(dtype, t.warpgroups, ROWS, t.value_width),
            k=tile.block(dtype, t.stages, t.block_k, t.width),
            v=tile.block(dtype, t.value_stages, t.block_k, t.value_width),
            q_full=barriers(t.warpgroups),
            do_full=barriers(t.warpgroups),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
        )


def dq(p: Problem, t: Tiles, visibility: Visibility, *arrays):
    visibility, blocks = schedule.by_query_tile(visibility, p.queries, t.block_q, t.block_k)
    x = inputs(p, t, blocks, visibility, *arrays)
    (dq,) = tile.launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=order.query_tiles(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)],
        tiles=t,
        scratch=Memory.of(t, x.q.dtype),
        name="flash_attention_dq",
    )
    return dq[:, : p.queries, :, : p.head_size]


def _kernel(program, x: Inputs, dq_gmem, memory: Memory, *, problem: Problem, tiles: Tiles):
    at = order.query_tile(program, problem, tiles.block_q, tiles.key_bytes)
    known = schedule.key_blocks(0, problem.keys, None, tiles.block_k)
    blocks = known if x.blocks is None else tile.blocks(x.blocks, at.batch, at.tile)
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    k = sync.Ring(memory.k, memory.k_full, number_of.first_ring, tiles.warpgroups)
    v = sync.Ring(memory.v, memory.v_full, number_of.second_ring, tiles.warpgroups)

    def produce():
        def load(j, _):
            source = at.batch, pl.ds(j * tiles.block_k, tiles.block_k), at.kv_head
            k.fill(j, x.k.at[source], blocks.first)
            v.fill(j, x.v.at[source], blocks.first)

        schedule.loop(tile.opaque(blocks.first), tile.opaque(blocks.last), load, None)
        k.drain(blocks.first, blocks.last)
        v.drain(blocks.first, blocks.last)

    def consume(own):
        first_row = at.tile * tiles.block_q + own * ROWS
        by_row, by_head = (at.batch, pl.ds(first_row, ROWS), at.head), (at.batch, at.head, pl.ds(first_row, ROWS))
        q, do = memory.q.at[own], memory.do.at[own]
        plgpu.copy_gmem_to_smem(x.do.at[by_row], do, memory.do_full.at[own])
        tile.copy_in(x.q.at[by_row], q, memory.q_full.at[own])
        plgpu.barrier_wait(memory.do_full.at[own])
        per_row = lambda ref: functools.partial(tile.across, tile.load(ref.at[by_head], tile.ROW))
        lse, delta = per_row(x.lse), per_row(x.delta)
        view = tile.view(x.visibility, at.batch, first_row)

        def step(j, dq, masked):
            again = tile.opaque(own)  # or the addresses of all parts of q and do would take registers
            q, do, k_j, v_j = memory.q.at[again], memory.do.at[again], k.block(j), v.block(j)

            def begin_s(acc):
                k.wait(j)
                tile.dot_t(acc, q, k_j)

            def begin_dp(acc):
                v.wait(j)
                tile.dot_t(acc, do, v_j)

            def product(dq_acc):
                rows = Rows(lse, delta, functools.partial(view.sees, j * tiles.block_k) if masked else None)
                _, ds = p_and_ds(problem, begin_s, begin_dp, (ROWS, tiles.block_k), rows)
                v.release(j)
                tile.dot(dq_acc, ds, k_j)  # dQ += dS K

            (dq,) = tile.products_add(product, dq)
            k.release(j)
            return dq

        dq = blocks.visit(step, tile.zeros(ROWS, tiles.width))
        q[...] = (dq * problem.scale).astype(q.dtype)
        tile.copy_out((q, dq_gmem.at[by_row]))

    tile.by_role(tiles, consume, produce)
