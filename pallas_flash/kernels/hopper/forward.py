"""The forward of FlashAttention-3 (arXiv:2407.08608): softmax of a block under the product of the
block before it.

A program owns 64 queries of one head for each of its consumers, and walks over the keys; the
consumers take turns. It may go on with other queries of the head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import (
    biased,
    bits,
    decode,
    ends,
    kept,
    order,
    ruled,
    scored,
    seen,
    sync,
    tile,
)
from pallas_flash.kernels.hopper.tuning import ROWS, AllTiles, Tiles
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.pytrees import IntLike


class Inputs(NamedTuple):
    """The kernel's arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles
    and blocks."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    last: ends.Blocks | None  # of k and v
    blocks: jax.Array | seen.Lists | None  # of seen.by_query_tile
    # the same for the rows of each consumer; None too where they are lists
    own_blocks: jax.Array | None
    sinks: jax.Array | None  # [N], less what `scores_apart` leaves out
    seeds: jax.Array | None  # uint32 [B, N, 2], of dropout
    bias: jax.Array | None  # of biased.whole
    score: ruled.Numbers | None  # of a score_mod
    where: bits.Words | ruled.Numbers | None  # of a dense mask, or of the mask's mask_mod
    resolved_mask: ResolvedMask  # its data by rows and keys only, without the mask_mod


def forward(problem: Problem, tiles: AllTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    scores are natural."""
    if tiles.decode is not None:
        return decode.forward(problem, tiles.decode, x)
    p, t = problem, tiles.forward
    inputs = _inputs(p, t, x)
    B, T, N, _ = inputs.q.shape
    # rows of whole tiles: where a vector ends, Mosaic clips its store by the end of the array, not
    # of the row
    rows = jax.ShapeDtypeStruct(
        (B, N, schedule.ceil_div(p.queries, t.block_q) * t.block_q), jnp.float32
    )
    like = online_softmax.SoftmaxState(
        rows, rows if scored.is_natural(p) else None, rows if p.max_logits else None
    )
    numbers, tree = jax.tree.flatten(like)
    o, *stats = tile.launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=order.query_tiles(p, t.block_q, t.rounds),
        out_type=[jax.ShapeDtypeStruct((B, T, N, inputs.v.shape[3]), x.query.dtype), *numbers],
        tiles=t,
        scratch=Memory.of(t, x.query.dtype, len(numbers)),
        name="flash_attention_forward",
    )
    stats, left_out = (
        jax.tree.unflatten(tree, [x[:, :, : p.queries] for x in stats]),
        scored.left_out(p),
    )
    stats = stats._replace(
        m=stats.m + left_out, top=None if stats.top is None else stats.top + left_out
    )
    return o[:, : p.queries, :, : p.value_size], stats


def _inputs(p: Problem, t: Tiles, x: Operands) -> Inputs:
    blocks = seen.by_query_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    own_blocks = (
        None
        if isinstance(blocks, seen.Lists)
        else seen.by_query_tile(p, x.resolved_mask, x.mask, ROWS, t.block_k)
    )
    resolved_mask, _ = seen.intervals(p, x.resolved_mask, t.block_q, t.block_k)
    q, k, v = (tile.padded(a, t.swizzle) for a in (x.query, x.key, x.value))
    last = ends.blocks(x.resolved_mask.lengths[1], t.block_k, k, v)
    sinks = None if x.sinks is None else x.sinks - scored.left_out(p) / p.unit
    score, where = (
        ruled.numbers(p, x.score, t.block_q, t.block_k),
        bits.inputs(p, x.mask, x.resolved_mask.mask_mod, t),
    )
    return Inputs(
        q,
        k,
        v,
        last,
        blocks,
        own_blocks,
        sinks,
        x.seeds,
        biased.whole(x.bias, t),
        score,
        where,
        resolved_mask,
    )


class Memory(NamedTuple):
    """The shared memory of a program."""

    q: Any  # [q_stages x warpgroups, 64, the larger width], of the output in the end
    k: Any  # [stages, block_k, width]
    v: Any  # [value_stages, block_k, value_width], in tile.parts
    stats: Any  # for each number of the SoftmaxState [warpgroups, 64]
    q_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def of(cls, t: Tiles, dtype, numbers: int) -> "Memory":
        barriers = lambda n: plgpu.Barrier(num_barriers=n)
        return cls(
            q=tile.block(
                dtype,
                t.q_stages * t.warpgroups,
                ROWS,
                max(t.width, t.value_width),
                swizzle=t.swizzle,
            ),
            k=tile.block(dtype, t.stages, t.block_k, t.width, swizzle=t.swizzle),
            v=tile.block_in_parts(dtype, t.value_stages, t.block_k, t.value_width, t.swizzle),
            stats=(plgpu.SMEM((t.warpgroups, ROWS), jnp.float32),) * numbers,
            q_full=barriers(t.q_stages * t.warpgroups),
            k_full=barriers(t.stages),
            v_full=plgpu.Barrier(
                num_arrivals=len(tile.parts(t.block_k)), num_barriers=t.value_stages
            ),
        )


def _kernel(program, x: Inputs, o_gmem, *outputs, problem: Problem, tiles: Tiles):
    *stats_gmem, memory = outputs
    place = functools.partial(
        order.query_tile, program, problem, tiles.block_q, tiles.key_bytes, tiles.rounds
    )
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    k = sync.Ring(memory.k, memory.k_full, number_of.first_ring, tiles.warpgroups)
    v = sync.Ring(
        memory.v, (memory.v_full,) * len(memory.v), number_of.second_ring, tiles.warpgroups
    )
    visited = lambda at: seen.key_blocks(
        x.blocks, x.resolved_mask, at, at.tile, problem.queries, tiles.block_q, tiles.block_k
    )

    def consume(own):
        turns = sync.Turns(number_of.turns, number_of.alone, tiles.warpgroups, own)
        first_row = lambda at: at.tile * tiles.block_q + own * ROWS
        rows = lambda x, at: tile.rows_of(
            x, at.batch, pl.ds(first_row(at), ROWS), at.head, memory.q.shape[2]
        )
        slot = lambda n: sync.slot(n, tiles.q_stages) * tiles.warpgroups + own

        def load_q(n):
            copy = lambda: plgpu.copy_gmem_to_smem(
                rows(x.q, place(n)), memory.q.at[slot(n)], memory.q_full.at[slot(n)]
            )
            pl.when(n < tiles.rounds)(copy)

        def attend(n, _):
            at = place(n)
            rule = bits.of(problem, x.where, at.batch, at.head)
            blocks, view = visited(at), seen.view(x.resolved_mask, at.batch, first_row(at), rule)
            walk, mine = blocks.walk(), _own_blocks(x, at, own, blocks, problem, tiles)
            wide, stats_smem = memory.q.at[slot(n)], [x.at[own] for x in memory.stats]
            q, o_smem = wide.at[:, : tiles.width], wide.at[:, : tiles.value_width]
            plgpu.barrier_wait(memory.q_full.at[slot(n)])
            shape, first_key = (ROWS, tiles.block_k), lambda t: walk.number(t) * tiles.block_k
            sees = lambda t: view.sees(first_key(t), shape)
            dropout = kept.of(problem.dropped, x.seeds, at.batch, at.head)
            score = scored.of(problem, x.bias, x.score, at.batch, at.head)
            natural = (
                None if score is None else lambda s, t: score.of(s, first_row(at), first_key(t))
            )
            drop = lambda p, t: (
                p
                if dropout is None
                else jnp.where(dropout.keeps(first_row(at), first_key(t), shape), p, 0.0)
            )
            zeros, sink = tile.rows(0.0), None if x.sinks is None else x.sinks[at.head]
            start = online_softmax.start(zeros, sink, problem.unit, problem.max_logits)
            pass_by = functools.partial(_pass_by, k, v, turns)
            schedule.loop(0, mine.first, pass_by, None)
            o, stats = _attend(q, k, v, turns, start, mine, sees, natural, drop, problem, tiles)
            schedule.loop(mine.last, walk.blocks.last, pass_by, None)
            o_smem[...] = o.astype(q.dtype)
            for smem, number in zip(stats_smem, jax.tree.leaves(stats), strict=True):
                smem[...] = number
            by_row = at.batch, at.head, pl.ds(first_row(at), ROWS)
            tile.copy_out(
                (wide, rows(o_gmem, at)),
                *zip(stats_smem, (x.at[by_row] for x in stats_gmem), strict=True),
            )
            load_q(n + tiles.q_stages)

        for n in range(tiles.q_stages):
            load_q(n)
        turns.open()
        schedule.loop(0, tiles.rounds, attend, None)
        turns.close()

    def produce():
        def load(n, used):
            at = place(n)
            return tile.feed(x, at, visited(at).walk(), k, v, tiles, used)

        used = schedule.loop(0, tiles.rounds, load, jnp.int32(0))
        k.drain(used)
        v.drain(used)

    tile.by_role(tiles, consume, produce)


def _pass_by(k: sync.Ring, v: sync.Ring, turns: sync.Turns, t, _):
    """A block that only other consumers need."""
    k.wait(t)
    turns.take()
    turns.pass_on()
    k.release(t)
    v.wait(t)
    v.release(t)


def _own_blocks(
    x: Inputs,
    at: order.Place,
    own: IntLike,
    blocks: schedule.Blocks | schedule.Listed,
    problem: Problem,
    tiles: Tiles,
) -> schedule.Blocks:
    """The places of those of a program's blocks that a consumer needs, at least one; it passes by
    the others."""
    # the latter: all rows see all keys
    if isinstance(blocks, schedule.Listed) or isinstance(blocks.last, int):
        return blocks.walk().blocks
    number = jnp.minimum(
        at.tile * tiles.warpgroups + own, schedule.ceil_div(problem.queries, ROWS) - 1
    )
    mine = seen.key_blocks(
        x.own_blocks, x.resolved_mask, at, number, problem.queries, ROWS, tiles.block_k
    )
    first = schedule.between(mine.first, blocks.first, blocks.last - 1)
    return (
        mine._replace(first=first, last=schedule.between(mine.last, first + 1, blocks.last))
        .clipped()
        .turned(blocks.last)
    )


def _attend(
    q,
    k: sync.Ring,
    v: sync.Ring,
    turns: sync.Turns,
    start: online_softmax.SoftmaxState,
    blocks: schedule.Blocks,
    sees,
    natural,
    drop,
    problem: Problem,
    tiles: Tiles,
):
    """o [64, value_width] of a consumer's queries, and their SoftmaxState [64]: with an l where
    scores are natural, else without and less what `scores_apart` leaves out.

    `start` has those before any key. `blocks` are numbered as they come; of the t-th sees(t) is
    which query sees which key, natural(s, t) the logits that a bias or a score_mod makes of S
    (None: there are neither), and drop(p, t) P with 0 where dropout drops a weight.
    """
    shape = ROWS, tiles.block_k

    def softmax(s, t, stats, masked):
        if natural is None:
            s, scale = online_softmax.scores_apart(s, problem.scale, problem.soft_cap)
        else:
            s, scale = natural(s, t), None
        if masked:
            s = jnp.where(sees(t), s, -jnp.inf)
        p, alpha, stats = online_softmax.step(s, stats, scale, tiles.slack, problem.unit)
        return drop(p, t), alpha, stats

    # early: ptxas moves the wait for the products up over the exponentials,
    def await_k(t, early: bool, masked: bool = False):
        # but neither over this wait nor, in steps with a mask, over the barrier
        if early == tiles.k_early:
            pl.when(t <= last)(lambda: k.wait(t)) if early else k.wait(t)
        elif early and masked:
            turns.stand()

    first, last = blocks.first, blocks.last - 1
    k.wait(first)
    turns.take()
    # [bq, bk]
    s = tile.product(lambda acc: (tile.dot_t(acc, q, k.block(first)), turns.pass_on()), shape)
    k.release(first)
    known_full = isinstance(last, int) and blocks.full_first <= first
    p, _, stats = softmax(s, first, start, not known_full)
    await_k(first + 1, early=True)

    def step(t, carry, masked):
        o, stats, p = carry
        await_k(t, early=False)
        turns.take()

        def under_the_products(o_acc, s_acc):
            tile.dot_t(s_acc, q, k.block(t))
            v.wait(t - 1)
            tile.dot_in_parts(o_acc, p, v.block(t - 1))
            turns.pass_on()
            s = tile.finished(s_acc, running=len(tile.parts(tiles.block_k)))  # [bq, bk]
            k.release(t)
            p_new, alpha, new = softmax(s, t, stats, masked)
            await_k(t + 1, early=True, masked=masked)
            return p_new, alpha, *jax.tree.leaves(new)

        like = tile.zeros(*shape), tile.rows(1.0), *jax.tree.leaves(stats)
        o, _, p, alpha, *stats = tile.overlap(under_the_products, (o, tile.zeros(*shape)), like)
        v.release(t - 1)
        o = tile.rescaled(o, alpha) if tiles.slack else o * tile.across(alpha, o.shape)
        # cast only now: the product before it read the old p
        return o, online_softmax.SoftmaxState(*stats), p.astype(q.dtype)

    carry = tile.zeros(ROWS, tiles.value_width), stats, p.astype(q.dtype)
    o, stats, p = blocks.rest().visit(step, carry)
    turns.take()
    v.wait(last)
    (o,) = tile.products_add(
        lambda acc: (tile.dot_in_parts(acc, p, v.block(last)), turns.pass_on()), o
    )
    v.release(last)
    m, l, top = stats
    stats = (
        stats
        if natural is not None
        else online_softmax.SoftmaxState(jnp.where(l == 0, -jnp.inf, m + jnp.log2(l)), None, top)
    )
    return online_softmax.finish(o, l, problem.kept), stats
