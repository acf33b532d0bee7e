"""dK and dV: a program owns 128 keys, and walks over the queries of the heads that share them, of
all or of one of several parts, whose sums XLA adds up.

Scores are transposed, [keys, queries]. Warpgroups 0 and 1 compute P and dS, each for half of a
block's queries; of warpgroup 2 one warp begins the products, one loads by TMA. S of the next block
is computed as soon as that of this block is in registers, so that the exponentials run under three
products. Where tensor memory has no room for P and dS beside S, dP, dK and dV, they lie over dP.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import CONSUMERS, ROWS, GradientTiles
from pallas_flash.kernels.mosaic import block_info, scheduler, tma
from pallas_flash.kernels.mosaic.launch import barriers, launch, shared_matrix
from pallas_flash.kernels.mosaic.logits import QueryBlock
from pallas_flash.kernels.mosaic.registers import ScoreTile, opaque
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

# A block of queries is loaded a step earlier than its do. Polynomials are as many as shorten a step
# on a B200 by a model of the waits: at 64 from 1594 clocks to 1338, at 128/64 from 1594 to 1536,
# where products bind.
_ROW = GradientTiles(64, 64, owns_keys=True, stages=3)
TILES = (
    _ROW._replace(exp2_columns=8),
    _ROW._replace(width=64, value_width=128),
    _ROW._replace(width=128, value_width=64, exp2_columns=4),
    _ROW._replace(width=128, value_width=128),
)


class Do(NamedTuple):
    """dO, lse and delta of queries: arrays, or their slots."""

    do: Any
    lse: Any
    delta: Any


class DkvMemory(NamedTuple):
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
    def allocate(cls, p: Problem, t: GradientTiles) -> "DkvMemory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        rows = plgpu.SMEM((t.value_stages, ROWS), jnp.float32)
        ordered = tile.ordered_barriers
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
    gradients: Any  # dP like S, and P and dS in 16 bits, beside it or over it
    dk: Any  # float32 [128, width]
    dv: Any  # float32 [128, value_width]

    @classmethod
    def allocate(cls, p: Problem, t: GradientTiles) -> "TensorMemory":
        matrix = lambda columns: plgpu.TMEM((ROWS, columns), jnp.float32)
        gradients = matrix(ROWS), (tile.in_16_bits(p.dtype), tile.in_16_bits(p.dtype))
        if t.p_over_dp:
            gradients = plgpu.RefUnion(*gradients)
        return cls(matrix(ROWS), gradients, matrix(t.width), matrix(t.value_width))

    @property
    def dp(self):
        dp, _ = self.gradients
        return dp

    @property
    def p_and_ds(self) -> tuple:
        _, p_and_ds = self.gradients
        return p_and_ds


def dk_dv(p: Problem, t: GradientTiles, x: Operands, lse, do, delta) -> list[jax.Array]:
    """dK [B, S, K, H] and dV [B, S, K, Hv]."""
    x = GradientInputs.by_tma(p, t, x, lse, do, delta)
    dtype, parts = x.keys.arrays[0].dtype, t.group_parts
    outputs = [jax.ShapeDtypeStruct(a.shape, dtype) for a in x.keys.arrays]
    if parts > 1:  # whole tiles, since no TMA clips them
        rows = schedule.ceil_div(p.keys, ROWS) * ROWS
        outputs = [
            jax.ShapeDtypeStruct((p.batch, rows, p.kv_heads * parts, width), jnp.float32)
            for width in (t.width, t.value_width)
        ]
    sums = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=scheduler.key_programs(p, t.block_k, parts),
        out_type=outputs,
        warpgroups=CONSUMERS + 1,
        scratch=(DkvMemory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_dk_dv",
    )
    if parts > 1:
        sums = [_add_parts(a, parts).astype(dtype) for a in sums]
    sizes = p.head_size, p.value_size
    return [a[:, : p.keys, :, :size] for a, size in zip(sums, sizes, strict=True)]


def _add_parts(sums, parts: int):
    """The sums [B, S, K, n] of whole groups, of those [B, S, K parts, n] of parts: one after the
    other, so that the order is the same in each run."""
    batch, length, heads, size = sums.shape
    by_part = sums.reshape(batch, length, heads // parts, parts, size)
    return functools.reduce(operator.add, (by_part[:, :, :, n] for n in range(parts)))


def _kernel(program, x: GradientInputs, *refs, problem: Problem, tiles: GradientTiles):
    *outputs, (m, tensor) = refs
    p, t = problem, tiles
    heads = p.group // t.group_parts
    work = scheduler.key_tile(program, p, t, t.group_parts)
    query_blocks = block_info.query_blocks(x, work, p, t)
    blocks, position = query_blocks(heads - 1)
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
                    q_rows, do_rows = tile.rows_of_pair(t, work.batch, head, first, arrays)
                    q.fill(position(n), q_rows)
                    do.fill(position(n), Do(do_rows, x.lse.at[by_row], x.delta.at[by_row]))

                read(blocks.index(n), fill)

            schedule.loop(opaque(blocks.first), opaque(blocks.last), load, None)

        schedule.loop(0, opaque(heads), load_head, None)

    def compute(number):
        consumer = DkvConsumer(p, t, m, tensor, do, number, work)
        consumer.start()

        def add_head(g, _):
            blocks, position = query_blocks(g)
            head = work.head + g
            head_logits = tile.head_logits(p, t, x.logits, work.batch, head)

            def step(n, _, masked):
                at = position(n), work.batch, head, blocks.index(n) * ROWS
                consumer.add(QueryBlock(*at, head_logits), masked)

            blocks.visit(step, None)

        schedule.loop(0, opaque(heads), add_head, None)
        consumer.finish(*outputs)

    tile.specialize(compute, Products(m, tensor, q, do, t.p_over_dp).run, produce)


class Products(NamedTuple):
    """The warp that begins the products, for the blocks of queries in the rings."""

    memory: DkvMemory
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
        p, ds = tensor.p_and_ds
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
        tile.dot_t(self.tensor.dp, self.memory.v, self.do.block(t).do)
        plgpu.tcgen05_commit_arrive(self.memory.dp_full)


class DkvConsumer(NamedTuple):
    """A warpgroup that computes P and dS of all keys and half of the queries of each block; in the
    end one has dV, the other dK."""

    problem: Problem
    tiles: GradientTiles
    memory: DkvMemory
    tensor: TensorMemory
    do: tile.Ring  # of Do
    number: int  # of the two consumers
    work: scheduler.WorkTile

    @property
    def sum(self):
        """The sum that the consumer has, in tensor memory."""
        return self.tensor.dk if self.number else self.tensor.dv

    def start(self):
        """Sets the sum to zero, before `add` lets products add to it."""
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.tiles.columns), jnp.float32), tile.NATIVE)
        count = self.sum.shape[1] // self.tiles.columns
        tile.store(self.sum, 0, [zeros] * count)

    def add(self, block: QueryBlock, masked: bool):
        """Leaves P and dS of a block in tensor memory."""
        m, queries, size = self.memory, tile.half_slice(self.number), self.tiles.columns
        p_tmem, ds_tmem = self.tensor.p_and_ds
        _, lse, delta = self.do.block(block.position)
        first_row, first_key = block.first_row + queries.start, self.work.tile * ROWS
        at = block.logits.tile(first_row, first_key, (ROWS, queries.size), transposed=True)
        places = at.split(size)
        rows = [pl.ds(queries.start + n, size) for n in range(0, queries.size, size)]

        self.do.wait(block.position)
        plgpu.barrier_wait(m.s_full)
        s = tile.load_columns(self.tensor.s, queries, size)
        plgpu.barrier_arrive(m.s_free)
        weights = [
            self.probabilities(block, piece, place, lse.at[piece_rows], masked)
            for piece, place, piece_rows in zip(s, places, rows, strict=True)
        ]
        # whose commit follows dV and dK of the block before: that P and dS have been read
        plgpu.barrier_wait(m.dp_full)
        dp = tile.load_columns(self.tensor.dp, queries, size)
        if self.tiles.p_over_dp:
            plgpu.barrier_arrive(m.dp_loaded)
            plgpu.barrier_wait(m.dp_loaded)
        tile.store(p_tmem, queries.start, [p for p, *_ in weights])
        plgpu.barrier_arrive(m.p_full)
        ds = [
            block.logits.gradient(
                weight, back, piece, block.per_query(delta.at[piece_rows], piece.shape)
            )
            for (_, weight, back), piece, piece_rows in zip(weights, dp, rows, strict=True)
        ]
        tma.fence()  # lse and delta have been read, and TMA may write there
        tile.store(ds_tmem, queries.start, ds)
        plgpu.barrier_arrive(m.ds_full)

    def probabilities(self, block: QueryBlock, s, at: ScoreTile, lse, masked: bool):
        """P of a piece of the scores, and what `Logits.gradient` takes."""
        p, weight, back = block.probabilities(s, at, lse, masked)
        if self.problem.dropped:  # registers do not hold P, which is not the weight then, as it is
            p = lax.optimization_barrier(p.astype(self.problem.dtype))
        return p, weight, back

    def finish(self, dk_gmem, dv_gmem):
        """The epilogue: the sum leaves by way of the shared memory of k or v, or of a part of the
        group as it is."""
        m, t, work = self.memory, self.tiles, self.work
        smem, gmem, width, factor = (
            (m.k, dk_gmem, t.width, self.problem.scale)
            if self.number
            else (m.v, dv_gmem, t.value_width, 1.0)
        )
        plgpu.barrier_wait(m.done)
        rows = pl.ds(work.tile * ROWS, ROWS)
        if t.group_parts > 1:
            part, _ = scheduler.divmod_(work.head, self.problem.group // t.group_parts)
            tile.write_out(gmem.at[work.batch, rows, part], self.sum, factor)
            return
        tile.write(smem, self.sum, range(0, width, tile.SWIZZLED_COLUMNS), factor)
        tma.copy_out((smem, tma.head_rows(gmem, work.batch, rows, work.kv_head, width)))
