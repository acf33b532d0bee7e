"""dK and dV: a program owns 128 keys, and walks over the queries of all heads that share them.

Scores are transposed, [keys, queries]. Warpgroups 0 and 1 compute P and dS, each for half of a
block's queries; of warpgroup 2 one warp begins the products, one loads by TMA. S of the next block
is computed as soon as that of this block is in registers, so that the exponentials run under three
products. Where tensor memory has no room for P and dS beside S, dP, dK and dV, they lie over dP.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.dkv_consumer import Consumer, Do
from pallas_flash.kernels.blackwell.tile_sizes import CONSUMERS, ROWS, GradientTiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.launch import launch, shared_matrix
from pallas_flash.kernels.mosaic.query_block import QueryBlock
from pallas_flash.kernels.mosaic.registers import opaque
from pallas_flash.kernels.mosaic.statistics import Inputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

# A block of queries is loaded a step earlier than its do.
_ROW = GradientTiles(64, 64, owns_keys=True, stages=3)
TILES = (
    _ROW,
    _ROW._replace(width=64, value_width=128),
    _ROW._replace(width=128, value_width=64),
    _ROW._replace(width=128, value_width=128),
)


class Memory(NamedTuple):
    """The shared memory and mbarriers of a program."""

    k: Any  # [128, width], of dk in the end
    v: Any  # [128, value_width], of dv in the end
    q: Any  # [stages, 128, width]
    do: Do  # [value_stages, 128, value_width], and [value_stages, 128] of rows
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any
    q_free: Any
    do_free: Any
    s_full: Any  # products -> consumers
    s_free: Any  # consumers -> products
    dp_full: Any  # products -> consumers
    dp_loaded: Any  # consumers -> each other
    p_full: Any  # consumers -> products
    ds_full: Any
    step_done: Any  # products -> the warp that begins them
    done: Any  # products -> consumers

    @classmethod
    def allocate(cls, p: Problem, t: GradientTiles) -> "Memory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        rows = plgpu.SMEM((t.value_stages, ROWS), jnp.float32)
        barriers, ordered = tile.barriers, tile.ordered_barriers
        return cls(
            k=block(ROWS, t.width),
            v=block(ROWS, t.value_width),
            q=block(t.stages, ROWS, t.width),
            do=Do(block(t.value_stages, ROWS, t.value_width), rows, rows),
            k_full=barriers(1),
            v_full=barriers(1),
            q_full=barriers(t.stages),
            do_full=barriers(t.value_stages, len(Do._fields)),
            q_free=ordered(t.stages),
            do_free=ordered(t.value_stages),
            s_full=ordered(1),
            s_free=ordered(1, CONSUMERS),
            dp_full=ordered(1),
            dp_loaded=ordered(1, CONSUMERS),
            p_full=ordered(1, CONSUMERS),
            ds_full=ordered(1, CONSUMERS),
            step_done=ordered(1),
            done=ordered(1),
        )


class TensorMemory(NamedTuple):
    """The tensor memory of a program."""

    s: Any  # float32 [128 keys, 128 queries]
    gradients: Any  # dP like S, and (P, dS) in 16 bits, beside it or over it
    dk: Any  # float32 [128, width]
    dv: Any  # float32 [128, value_width]

    @classmethod
    def allocate(cls, p: Problem, t: GradientTiles) -> "TensorMemory":
        matrix = lambda columns: plgpu.TMEM((ROWS, columns), jnp.float32)
        gradients = matrix(ROWS), (tile.in_16_bits(p.dtype), tile.in_16_bits(p.dtype))
        if t.p_over_dp:
            gradients = plgpu.RefUnion(*gradients)
        return cls(matrix(ROWS), gradients, matrix(t.width), matrix(t.value_width))


def dk_dv(p: Problem, t: GradientTiles, x: Operands, lse, do, delta) -> list[jax.Array]:
    """dK [B, S, K, H] and dV [B, S, K, Hv]."""
    blocks = block_info.by_key_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k)
    x = Inputs.by_tma(p, t, blocks, x, lse, do, delta)
    sums = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=scheduler.key_programs(p, t.block_k),
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in x.keys.arrays],
        warpgroups=CONSUMERS + 1,
        scratch=(Memory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_dk_dv",
    )
    sizes = p.head_size, p.value_size
    return [a[:, : p.keys, :, :size] for a, size in zip(sums, sizes, strict=True)]


def _kernel(program, x: Inputs, *refs, problem: Problem, tiles: GradientTiles):
    *outputs, (m, tensor) = refs
    p, t = problem, tiles
    work = scheduler.key_tile(program, p, t.block_k, t.row_bytes(p.dtype))
    query_blocks = block_info.query_blocks(
        x.blocks, x.logits.resolved_mask, work, p.queries, t.block_q, t.block_k
    )
    blocks, position = query_blocks(p.group - 1)
    count = opaque(position(blocks.last))
    q = tile.Ring(m.q, m.q_full, m.q_free, count)
    do = tile.Ring(m.do, m.do_full, m.do_free, count)

    def produce():
        tile.load_owned(t, work, work.kv_head, x.keys, (m.k, m.v), (m.k_full, m.v_full))
        read = x.queries.reader(work.batch, t.block_q)

        def load_head(g, _):
            blocks, position = query_blocks(g)
            head = work.head + g

            def load(n, _):
                by_row = work.batch, head, pl.ds(blocks.index(n) * ROWS, ROWS)

                def fill(first, *arrays):
                    q_rows, do_rows = tile.head_rows(t, work.batch, head, first, arrays)
                    q.fill(position(n), q_rows)
                    do.fill(position(n), Do(do_rows, x.lse.at[by_row], x.delta.at[by_row]))

                read(blocks.index(n), fill)

            schedule.loop(opaque(blocks.first), opaque(blocks.last), load, None)

        schedule.loop(0, opaque(p.group), load_head, None)

    def compute(number):
        consumer = Consumer(p, t, m, tensor, do, number, work)
        consumer.start()

        def add_head(g, _):
            blocks, position = query_blocks(g)
            head = work.head + g
            of_head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, head)

            def step(n, _, masked):
                first_row = blocks.index(n) * ROWS
                block = QueryBlock(position(n), work.batch, head, first_row, of_head)
                consumer.add(block, masked)

            blocks.visit(step, None)

        schedule.loop(0, opaque(p.group), add_head, None)
        consumer.finish(*outputs)

    tile.specialize(compute, Products(m, tensor, q, do, t.p_over_dp).run, produce)


class Products(NamedTuple):
    """The warp that begins the products, for the blocks of queries in the rings."""

    memory: Memory
    tensor: TensorMemory
    q: tile.Ring
    do: tile.Ring
    p_over_dp: bool

    def run(self):
        m, first = self.memory, jnp.int32(0)
        plgpu.barrier_wait(m.k_full)
        self.q.if_block(first, self.begin_s, self.finish_s)
        plgpu.barrier_wait(m.v_full)
        self.q.if_block(first, self.begin_dp)
        self.q.if_block(first + 1, self.begin_s, self.finish_s)
        schedule.loop(0, self.q.count, self.step, None)
        plgpu.tcgen05_commit_arrive(m.done)
        self.q.if_block(first, lambda _: plgpu.barrier_wait(m.s_free))  # of the last block

    def step(self, t: IntLike, _):
        """dV += P^T dO and dK += dS^T Q of block t, and the products of the next blocks."""
        m, tensor = self.memory, self.tensor
        _, (p, ds) = tensor.gradients
        plgpu.barrier_wait(m.p_full)
        plgpu.tcgen05_mma(tensor.dv, p, self.do.block(t).do)
        plgpu.barrier_wait(m.ds_full)
        plgpu.tcgen05_mma(tensor.dk, ds, self.q.block(t))
        self.q.release(t)
        self.do.release(t)
        if not self.p_over_dp:
            self.q.if_block(t + 1, self.begin_dp)
            self.q.if_block(t + 2, self.begin_s, self.finish_s)
            return
        # dP overwrites what these products read: part of S fills the time until they have ended,
        # the rest of S that in which the consumers take dP from there
        plgpu.tcgen05_commit_arrive(m.step_done)
        self.q.if_block(t + 2, self.begin_s)
        plgpu.barrier_wait(m.step_done)
        self.q.if_block(t + 1, self.begin_dp)
        self.q.if_block(t + 2, self.finish_s)

    def begin_s(self, t: IntLike):
        """The first part of S^T = K Q^T of block t, once S of the block before is in registers."""
        pl.when(t > 0)(lambda: plgpu.barrier_wait(self.memory.s_free))
        self.q.wait(t)
        self.add_to_s(t, 0)

    def finish_s(self, t: IntLike):
        k = self.memory.k
        for first in range(tile.SWIZZLED_COLUMNS, k.shape[1], tile.SWIZZLED_COLUMNS):
            self.add_to_s(t, first)
        plgpu.tcgen05_commit_arrive(self.memory.s_full)

    def add_to_s(self, t: IntLike, first: int):
        """S^T += K Q^T by the columns of K and Q that begin at `first`."""
        columns = pl.ds(first, tile.SWIZZLED_COLUMNS)
        k, q = (x.at[:, columns] for x in (self.memory.k, self.q.block(t)))
        tile.dot_t(self.tensor.s, k, q, accumulate=first > 0)

    def begin_dp(self, t: IntLike):
        """dP^T = V dO^T of block t."""
        self.do.wait(t)
        dp, _ = self.tensor.gradients
        tile.dot_t(dp, self.memory.v, self.do.block(t).do)
        plgpu.tcgen05_commit_arrive(self.memory.dp_full)
