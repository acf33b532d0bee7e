"""dQ: a program owns 64 queries of one head for each of its consumers, and walks over the keys as
the forward does."""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile import inputs
from pallas_flash.kernels.hopper.tuning import ROWS, Tiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.gradients import Inputs
from pallas_flash.kernels.mosaic.launch import launch
from pallas_flash.kernels.mosaic.registers import load, opaque, per_row
from pallas_flash.pytrees import IntLike


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
    def allocate(cls, t: Tiles, dtype) -> "Memory":
        barriers = lambda n: plgpu.Barrier(num_barriers=n)
        block = functools.partial(tile.block, swizzle=t.swizzle)
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


def dq(p: Problem, t: Tiles, x: Operands, lse, do, delta):
    blocks = block_info.by_query_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    x = inputs(p, t, blocks, x, lse, do, delta)
    q, _ = x.queries.arrays
    (dq,) = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        warpgroups=t.warpgroups + 1,
        scratch=Memory.allocate(t, q.dtype),
        name="flash_attention_dq",
    )
    return dq[:, : p.queries, :, : p.head_size]


def _kernel(program, x: Inputs, dq_gmem, memory: Memory, *, problem: Problem, tiles: Tiles):
    work = scheduler.query_tile(program, problem, tiles.block_q, tiles.key_bytes)
    ids = sync.BarrierIds(tiles.warpgroups, tiles.stages)
    k = sync.TmaRing(memory.k, memory.k_full, ids.first_ring, tiles.warpgroups)
    v = sync.TmaRing((memory.v,), (memory.v_full,), ids.second_ring, tiles.warpgroups)

    def visited():
        mask, (block_q, block_k) = x.logits.resolved_mask, tiles.tiling[:2]
        blocks = block_info.key_blocks(
            x.blocks, mask, work, work.tile, problem.queries, block_q, block_k
        )
        return block_info.descend(x.blocks, blocks)

    def consume(wg):
        rows = lambda x, first, width: tile.head_rows(
            x, work.batch, pl.ds(first + wg * ROWS, ROWS), work.head, width
        )
        q, do = memory.q.at[wg], memory.do.at[wg]

        def copy(first, q_gmem, do_gmem):
            plgpu.copy_gmem_to_smem(
                rows(do_gmem, first, tiles.value_width), do, memory.do_full.at[wg]
            )
            plgpu.copy_gmem_to_smem(rows(q_gmem, first, tiles.width), q, memory.q_full.at[wg])

        x.queries.reader(work.batch, tiles.block_q)(work.tile, copy)
        consumer = Consumer(problem, tiles, x, memory, k, v, work, wg, visited())
        q[...] = (consumer.sum() * problem.scale).astype(q.dtype)
        tile.copy_out((q, rows(dq_gmem, work.tile * tiles.block_q, tiles.width)))

    def produce():
        count = tile.load_kv(x, work, visited(), k, v, tiles)
        k.drain(count)
        v.drain(count)

    tile.specialize(tiles, consume, produce)


class Consumer(NamedTuple):
    """A warpgroup that computes: 64 queries."""

    problem: Problem
    tiles: Tiles
    x: Inputs
    memory: Memory
    k: sync.TmaRing
    v: sync.TmaRing
    work: scheduler.WorkTile
    wg: IntLike
    blocks: schedule.Blocks

    def sum(self):
        """dQ [64, width], but for the scale."""
        x, work, k, v = self.x, self.work, self.k, self.v
        shape = ROWS, self.tiles.block_k
        first_row = work.tile * self.tiles.block_q + self.wg * ROWS
        by_head = work.batch, work.head, pl.ds(first_row, ROWS)
        lse, delta = (load(ref.at[by_head], tile.LAYOUTS.row) for ref in (x.lse, x.delta))
        head = logits.for_head(self.problem, tile.LAYOUTS, x.logits, work.batch, work.head)
        mask = head.load_mask(work.batch, first_row, ROWS)
        for full in self.memory.q_full, self.memory.do_full:
            plgpu.barrier_wait(full.at[self.wg])

        def gradient(t, masked, before=None):
            """dS of block t. Its exponentials run under dQ += dS K of `before`, the accumulator and
            the dS of the block before."""
            # or the addresses of all slices of q and do would take registers
            wg = opaque(self.wg)
            q, do = self.memory.q.at[wg], self.memory.do.at[wg]

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
                    plgpu.wgmma_wait(1)
                    k.release(t - 1)

            s = tile.product(begin_s, shape, running=0 if before is None else 1)
            at = head.tile(first_row, self.blocks.index(t) * self.tiles.block_k, shape)
            _, weight, back = head.probabilities(
                s, at, lambda: per_row(lse, shape), mask if masked else None
            )
            dp = tile.product(begin_dp, shape)
            v.release(t)
            return head.gradient(weight, back, dp, per_row(delta, shape))

        def step(t, carry, masked):
            dq, ds = carry
            dq, ds = tile.overlap(
                lambda dq_acc: (gradient(t, masked, (dq_acc, ds)),), (dq,), (tile.zeros(*shape),)
            )
            return dq, ds.astype(self.memory.q.dtype)

        last = self.blocks.last - 1
        full = isinstance(last, int) and self.blocks.full_first == 0
        ds = gradient(0, not full)
        carry = tile.zeros(ROWS, self.tiles.width), ds.astype(self.memory.q.dtype)
        dq, ds = self.blocks.without_first().visit(step, carry)
        (dq,) = tile.accumulate(lambda acc: tile.dot(acc, ds, k.block(last)), dq)
        k.release(last)
        return dq
