"""dQ: a program owns 64 queries of one head for each of its consumers, and walks over the keys as
the forward does."""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import bits, ends, kept, order, scored, seen, sync, tile
from pallas_flash.kernels.hopper.gradients import Inputs, dlogits, inputs, probabilities
from pallas_flash.kernels.hopper.tuning import ROWS, Tiles


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
        barriers, block = (
            lambda n: plgpu.Barrier(num_barriers=n),
            functools.partial(tile.block, swizzle=t.swizzle),
        )
        return cls(
            q=block(dtype, t.warpgroups, ROWS, t.width),
            do=block(dtype, t.warpgroups, ROWS, t.value_width),
            k=block(dtype, t.stages, t.block_k, t.width),
            v=block(dtype, t.value_stages, t.block_k, t.value_width),
            q_full=barriers(t.warpgroups),
            do_full=barriers(t.warpgroups),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
        )


def dq(p: Problem, t: Tiles, x: Operands, do, lse, delta):
    blocks = seen.by_query_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    x = inputs(p, t, x, blocks, do, lse, delta)
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
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    k = sync.Ring(memory.k, memory.k_full, number_of.first_ring, tiles.warpgroups)
    v = sync.Ring((memory.v,), (memory.v_full,), number_of.second_ring, tiles.warpgroups)

    visited = lambda: seen.key_blocks(
        x.blocks, x.resolved_mask, at, at.tile, problem.queries, tiles.block_q, tiles.block_k
    ).walk()

    def consume(own):
        rows = lambda x, first, width: tile.rows_of(
            x, at.batch, pl.ds(first + own * ROWS, ROWS), at.head, width
        )
        q, do = memory.q.at[own], memory.do.at[own]

        def copy(first, q_gmem, do_gmem):
            plgpu.copy_gmem_to_smem(
                rows(do_gmem, first, tiles.value_width), do, memory.do_full.at[own]
            )
            plgpu.copy_gmem_to_smem(rows(q_gmem, first, tiles.width), q, memory.q_full.at[own])

        ends.reader(x.last_queries, at.batch, tiles.block_q)(at.tile, copy, x.q, x.do)
        first_row = at.tile * tiles.block_q + own * ROWS
        dq = _sum(x, at, first_row, own, memory, k, v, visited(), problem, tiles)
        q[...] = (dq * problem.scale).astype(q.dtype)
        tile.copy_out((q, rows(dq_gmem, at.tile * tiles.block_q, tiles.width)))

    def produce():
        count = tile.feed(x, at, visited(), k, v, tiles)
        k.drain(count)
        v.drain(count)

    tile.by_role(tiles, consume, produce)


def _sum(
    x: Inputs,
    at,
    first_row,
    own,
    memory: Memory,
    k: sync.Ring,
    v: sync.Ring,
    walk,
    problem: Problem,
    tiles: Tiles,
):
    """dQ [64, width] of a consumer's queries, but for the scale."""
    shape, by_head = (ROWS, tiles.block_k), (at.batch, at.head, pl.ds(first_row, ROWS))
    lse, delta = (tile.load(ref.at[by_head], tile.ROW) for ref in (x.lse, x.delta))
    rule = bits.of(problem, x.where, at.batch, at.head)
    view, blocks = seen.view(x.resolved_mask, at.batch, first_row, rule), walk.blocks
    dropout = kept.of(problem.dropped, x.seeds, at.batch, at.head)
    score = scored.of(problem, x.bias, x.score, at.batch, at.head)
    for full in memory.q_full, memory.do_full:
        plgpu.barrier_wait(full.at[own])

    def gradient(t, masked, before=None):
        """dS of block t. Its exponentials run under dQ += dS K of `before`, the accumulator and the
        dS of the block before."""
        again = sync.opaque(own)  # or the addresses of all parts of q and do would take registers
        q, do = memory.q.at[again], memory.do.at[again]

        def begin_s(acc):
            k.wait(t)
            tile.dot_t(acc, q, k.block(t))
            if before is not None:
                dq_acc, ds = before
                tile.dot(dq_acc, ds, k.block(t - 1))

        def begin_dp(acc):
            v.wait(t)
            tile.dot_t(acc, do, *v.block(t))
            if before is not None:
                tile.wait(running=1)
                k.release(t - 1)

        s = tile.product(begin_s, shape, running=0 if before is None else 1)
        first_key = walk.number(t) * tiles.block_k
        sees = functools.partial(view.sees, first_key) if masked else None
        keeps = functools.partial(dropout.keeps, first_row, first_key) if problem.dropped else None
        natural = None if score is None else lambda s: score.vjp(s, first_row, first_key)
        _, weight, back = probabilities(
            problem, s, functools.partial(tile.across, lse), sees, keeps, natural
        )
        dp = tile.product(begin_dp, shape)
        v.release(t)
        return dlogits(problem, weight, back, dp, tile.across(delta, shape))

    def step(t, carry, masked):
        dq, ds = carry
        dq, ds = tile.overlap(
            lambda dq_acc: (gradient(t, masked, (dq_acc, ds)),), (dq,), (tile.zeros(*shape),)
        )
        return dq, ds.astype(x.q.dtype)

    last = blocks.last - 1
    known_full = isinstance(blocks.last, int) and blocks.full_first == 0
    ds = gradient(0, not known_full)
    carry = tile.zeros(ROWS, tiles.width), ds.astype(x.q.dtype)
    dq, ds = blocks.rest().visit(step, carry)
    (dq,) = tile.products_add(lambda acc: tile.dot(acc, ds, k.block(last)), dq)
    k.release(last)
    return dq
