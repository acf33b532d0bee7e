"""The forward of FlashAttention-4 (arXiv:2603.05451): two tiles of 128 queries a program, whose
softmaxes run under each other's products, or one; S, P and O lie in tensor memory.

The first warpgroups have the softmax of a tile each. The next corrects O, and of the last one warp
begins the products, and one loads.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.ampere import forward as mma
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import ROWS, BlackwellTiles, ForwardTiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler, statistics, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.launch import Role, barriers, launch, shared_matrix, specialize
from pallas_flash.kernels.mosaic.registers import ScoreTile, opaque
from pallas_flash.kernels.mosaic.statistics import ForwardInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.online_softmax import SoftmaxState

# Rows for head sizes, with as many stages as shared memory holds. A step, both tiles by 128 keys,
# takes a B200 8 clocks of products for each column of width and value_width, and 2064 of
# exponentials (16 a clock), which are in the chain from S to P whatever binds: 8 columns of 32 are
# polynomials, 1552 of exponentials for some 290 more of instructions.
TILES = (
    ForwardTiles(64, 64, stages=4, value_stages=4),
    ForwardTiles(64, 128, stages=3, value_stages=3),
    ForwardTiles(128, 64, stages=3, value_stages=3),
    ForwardTiles(128, 128),
    ForwardTiles(192, 128, value_stages=1),
)


class ForwardMemory(NamedTuple):
    """The shared memory and mbarriers of a program."""

    q: Any  # [row_tiles, 128, the larger width], of the output in the end
    k: Any  # [stages, 128, width]
    v: Any  # [value_stages, 128, value_width]
    alpha: Any  # [row_tiles, 128]
    l: Any
    # for each tile of queries or slot: who arrives -> who waits
    q_full: Any  # loads -> products
    k_full: Any
    v_full: Any
    k_free: Any  # products -> loads
    v_free: Any
    s_full: Any  # products -> softmax
    s_free: Any  # softmax -> products, where P has columns of its own; else None
    p_free: Any  # products -> softmax
    alpha_full: Any  # softmax -> correction
    p_full: tuple  # for each part of P: softmax, and at the first the correction -> products
    p_read: Any  # products -> products
    o_full: Any  # products, and the softmax as to l -> correction, in the end

    @classmethod
    def allocate(cls, p: Problem, t: ForwardTiles) -> "ForwardMemory":
        block = functools.partial(shared_matrix, p.dtype)
        ordered = tile.ordered_barriers
        n = t.row_tiles
        by_row = plgpu.SMEM((n, ROWS), jnp.float32)
        return cls(
            q=block(n, ROWS, max(t.width, t.value_width), swizzle=t.swizzle),
            k=block(t.stages, t.block_k, t.width, swizzle=t.swizzle),
            v=block(t.value_stages, t.block_k, t.value_width, swizzle=t.value_swizzle(p.dtype)),
            alpha=by_row,
            l=by_row,
            q_full=barriers(n),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
            k_free=ordered(t.stages),
            v_free=ordered(t.value_stages),
            s_full=ordered(n),
            s_free=None if t.p_over_s else ordered(n),
            p_free=ordered(n),
            alpha_full=ordered(n),
            p_full=(ordered(n, arrivals=2), ordered(n)),
            p_read=ordered(n),
            o_full=ordered(n, arrivals=2),
        )


class TensorMemory(NamedTuple):
    """The tensor memory of a program, for each of its tiles of queries."""

    scores: tuple  # S, float32 [128, 128], and the parts of P
    o: tuple  # float32 [128, value_width]

    @classmethod
    def allocate(cls, p: Problem, t: ForwardTiles) -> "TensorMemory":
        scores = plgpu.TMEM((ROWS, ROWS), jnp.float32), tile.left_operands(p.dtype, *t.p_columns)
        if t.p_over_s:
            scores = plgpu.RefUnion(*scores)
        o = plgpu.TMEM((ROWS, t.value_width), jnp.float32)
        return cls((scores,) * t.row_tiles, (o,) * t.row_tiles)

    def s(self, i: int):
        s, _ = self.scores[i]
        return s

    def p(self, i: int) -> tuple:
        _, parts = self.scores[i]
        return parts


def forward(problem: Problem, tiles: BlackwellTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    logits are in base e."""
    if tiles.forward is None:
        return mma.forward(problem, tiles.by_mma, x)
    p, t = problem, tiles.forward
    inputs = ForwardInputs.by_tma(p, t, x)
    o_type = jax.ShapeDtypeStruct(
        (*inputs.q.shape[:3], inputs.keys.arrays[1].shape[3]), x.query.dtype
    )
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[o_type, *jax.tree.leaves(statistics.types(p, t.block_q))],
        warpgroups=t.row_tiles + 2,
        scratch=(ForwardMemory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_forward",
    )
    return o[:, : p.queries, :, : p.value_size], statistics.results(p, stats)


def _kernel(number, x: ForwardInputs, o_gmem, *outputs, problem: Problem, tiles: ForwardTiles):
    *stats_gmem, (memory, tensor) = outputs
    p, t = problem, tiles
    work = scheduler.query_tile(number, p, t, section_mb=t.section_mb)
    blocks = block_info.visited(x, work, p, t)
    count = opaque(blocks.last) - blocks.first
    program = Program(p, t, x, o_gmem, stats_gmem, memory, tensor, work, blocks, count)
    softmax = lambda i: lambda _: Softmax.load(program, i).run()
    specialize(
        *(Role(softmax(i), registers=192) for i in range(t.row_tiles)),
        Role(lambda _: Correction(program).run(), registers=88),
        Role(
            tile.warps(
                lambda: Products(program).run(),
                lambda: produce(program),
            ),
            registers=40,
        ),
    )


# ---- the roles of the warpgroups ----


class Program(NamedTuple):
    """The tiles of queries of a program, and what its roles share."""

    problem: Problem
    tiles: ForwardTiles
    x: ForwardInputs
    o_gmem: Any
    stats_gmem: list
    memory: ForwardMemory
    tensor: TensorMemory
    work: scheduler.WorkTile
    blocks: schedule.Blocks  # of keys, at least one
    count: IntLike  # of them

    @property
    def row_tiles(self) -> range:
        return range(self.tiles.row_tiles)

    @property
    def k(self) -> tile.Ring:
        m = self.memory
        return tile.Ring(m.k, m.k_full, m.k_free, self.count)

    @property
    def v(self) -> tile.Ring:
        m = self.memory
        return tile.Ring(m.v, m.v_full, m.v_free, self.count)

    def first_row(self, i: int) -> IntLike:
        return self.work.tile * self.tiles.block_q + i * ROWS

    def head_rows(self, array, i: int):
        """The rows of tile i of q or o in global memory."""
        rows, width = pl.ds(self.first_row(i), ROWS), self.memory.q.shape[2]
        return tma.head_rows(array, self.work.batch, rows, self.work.head, width)

    def rows_of_head(self, array, i: int):
        """The rows of tile i of an array [B, N, T] in global memory."""
        return array.at[self.work.batch, self.work.head, pl.ds(self.first_row(i), ROWS)]


def produce(program: Program):
    """Loads Q, and K and V block by block."""
    m, t, work = program.memory, program.tiles, program.work
    for i in program.row_tiles:
        plgpu.copy_gmem_to_smem(program.head_rows(program.x.q, i), m.q.at[i], m.q_full.at[i])
    tile.load_keys(t, work, program.x.keys, program.blocks, program.k, program.v)


class Products(NamedTuple):
    """The warp that begins all products."""

    program: Program

    def run(self):
        """S of the first block; O += P V of each block and S of the next; O of the last."""
        program, m, last = self.program, self.program.memory, self.program.count - 1
        program.k.wait(0)
        for i in program.row_tiles:
            plgpu.barrier_wait(m.q_full.at[i])
            self.scores(i, 0)
            plgpu.tcgen05_commit_arrive(m.p_free.at[i])
        program.k.release(0)
        schedule.loop(0, last, self.step, None)
        program.v.wait(last)
        for i in program.row_tiles:
            self.accumulate(i, last)
            plgpu.tcgen05_commit_arrive(m.o_full.at[i])
            self.await_s_free(i)

    def step(self, n: IntLike, _):
        """S of a tile is next to its P V: were all P V first, both tiles would have their softmax
        at a time, and none under the other's products. Where P has columns of its own, S is before
        P V, as soon as the S before is in registers."""
        program = self.program
        program.v.wait(n)
        program.k.wait(n + 1)
        for i in program.row_tiles:
            if program.tiles.p_over_s:
                self.accumulate(i, n)
                self.await_p_read(i)
                self.scores(i, n + 1)
            else:
                self.await_s_free(i)
                self.scores(i, n + 1)
                self.accumulate(i, n)
            plgpu.tcgen05_commit_arrive(program.memory.p_free.at[i])
        program.v.release(n)
        program.k.release(n + 1)

    def scores(self, i: int, n: IntLike):
        """Begins S = Q K^T of block n."""
        program, m = self.program, self.program.memory
        q, k = m.q.at[i, :, : program.tiles.width], program.k.block(n)
        tile.dot_t(program.tensor.s(i), q, k)
        plgpu.tcgen05_commit_arrive(m.s_full.at[i])

    def accumulate(self, i: int, n: IntLike):
        """Begins O += P V of block n, by the parts of P."""
        program, o = self.program, self.program.tensor.o[i]
        v, first = program.v.block(n), 0
        for p, p_full in zip(program.tensor.p(i), program.memory.p_full, strict=True):
            plgpu.barrier_wait(p_full.at[i])
            keys = pl.ds(first, p.shape[1])
            plgpu.tcgen05_mma(o, p, v.at[keys], accumulate=True if first else n > 0)
            first += p.shape[1]

    def await_s_free(self, i: int):
        """Waits, where the next S does not overwrite P, until this S is in registers."""
        if not self.program.tiles.p_over_s:
            plgpu.barrier_wait(self.program.memory.s_free.at[i])

    def await_p_read(self, i: int):
        """Waits until P V has read the P that the next S overwrites, unless the order in which one
        thread begins products is relied on. cuDNN and FlashAttention-4 rely on it; the PTX ISA
        promises it to products that add to the same sums (section 9.7.16.6.2)."""
        m = self.program.memory
        if not self.program.tiles.relies_on_order:
            plgpu.tcgen05_commit_arrive(m.p_read.at[i])
            plgpu.barrier_wait(m.p_read.at[i])


class Softmax(NamedTuple):
    """The warpgroup that makes P of S for one tile of queries, of which each thread has one."""

    program: Program
    i: int  # which tile
    logits: logits.Logits
    mask: TileMask

    @classmethod
    def load(cls, program: Program, i: int) -> "Softmax":
        x, work = program.x, program.work
        head = logits.for_head(program.problem, tile.LAYOUTS, x.logits, work.batch, work.head)
        mask = head.load_mask(work.batch, program.first_row(i), ROWS)
        return cls(program, i, head, mask)

    def run(self):
        """P of all blocks; then l goes to the correction, and the statistics leave."""
        p, x, m = self.program.problem, self.program.x, self.program.memory
        sink = None if x.sinks is None else x.sinks[self.program.work.head]
        stats = online_softmax.start(tile.rows(0.0), p.log_base, sink, p.max_logits)
        stats = self.program.blocks.visit(self.step, stats)
        m.l[self.i] = stats.l
        plgpu.barrier_arrive(m.o_full.at[self.i])
        written = jax.tree.leaves(statistics.finish(p, stats))
        for gmem, value in zip(self.program.stats_gmem, written, strict=True):
            tile.store_rows(self.program.rows_of_head(gmem, self.i), value)

    def step(self, n: IntLike, stats: SoftmaxState, masked: bool):
        """P of the block at position n, and alpha, by which the correction scales O."""
        t, m, log_base = self.program.tiles, self.program.memory, self.program.problem.log_base
        pieces, p_tmem = self.pieces(n), self.program.tensor.p(self.i)
        s, scale = self.scores(pieces, masked)  # [128, columns] each
        stats, alpha = online_softmax.raise_maximum(
            jnp.concatenate(s, axis=1), stats, log_base, scale, t.rescale_threshold
        )
        # P V of the block before has ended, and before it the correction has read alpha
        plgpu.barrier_wait(m.p_free.at[self.i])
        m.alpha[self.i] = alpha
        plgpu.barrier_arrive(m.alpha_full.at[self.i])
        exp2 = functools.partial(tile.exp2_of_tile, columns=t.exp2_columns)
        scores = iter(zip(pieces, s, strict=True))
        for part_tmem, p_full in zip(p_tmem, m.p_full, strict=True):
            p = []
            for at, x in itertools.islice(scores, part_tmem.shape[1] // t.columns):
                x, stats = online_softmax.weights(x, stats, log_base, scale, exp2)
                p.append(self.logits.drop(x, at).astype(self.program.problem.dtype))
            tile.store(part_tmem, 0, p)
            plgpu.barrier_arrive(p_full.at[self.i])
        return stats

    def pieces(self, n: IntLike) -> list[ScoreTile]:
        """The pieces of the tile's scores that are computed one after the other."""
        t, program = self.program.tiles, self.program
        first_key = program.blocks.index(n) * t.block_k
        whole = self.logits.tile(program.first_row(self.i), first_key, (ROWS, t.block_k))
        return whole.split(t.columns)

    def scores(self, pieces: list[ScoreTile], masked: bool):
        """The logits of each piece, once S is there, and a factor that they omit."""
        program = self.program
        plgpu.barrier_wait(program.memory.s_full.at[self.i])
        loaded = tile.load_columns(program.tensor.s(self.i), pl.ds(0, ROWS), program.tiles.columns)
        if not program.tiles.p_over_s:
            plgpu.barrier_arrive(program.memory.s_free.at[self.i])
        s, scales = zip(*map(self.logits.modify, loaded, pieces), strict=True)
        if masked:
            s = [self.mask.select(at)(x, -jnp.inf) for x, at in zip(s, pieces, strict=True)]
        return s, scales[0]


class Correction(NamedTuple):
    """The warpgroup that scales O where a maximum has grown by more than the threshold, off the
    path from S to P, and writes it in the end."""

    program: Program

    def run(self):
        """O of the first block needs no scaling."""
        for i in self.program.row_tiles:
            plgpu.barrier_wait(self.program.memory.alpha_full.at[i])
            self.arrive(i)
        schedule.loop(1, self.program.count, self.step, None)
        for i in self.program.row_tiles:
            self.write(i)
        plgpu.wait_smem_to_gmem(0)

    def step(self, n: IntLike, _):
        """O *= alpha. P V of the block before has ended: the softmax has waited for it."""
        m = self.program.memory
        for i in self.program.row_tiles:
            plgpu.barrier_wait(m.alpha_full.at[i])
            alpha = plgpu.load(m.alpha.at[i], layout=tile.LAYOUTS.row)
            tile.rescale(self.program.tensor.o[i], alpha)
            self.arrive(i)

    def arrive(self, i: int):
        plgpu.barrier_arrive(self.program.memory.p_full[0].at[i])

    def write(self, i: int):
        """The epilogue: O / l, by way of the shared memory of q."""
        program, m, t = self.program, self.program.memory, self.program.tiles
        plgpu.barrier_wait(m.o_full.at[i])
        l = plgpu.load(m.l.at[i], layout=tile.EPILOGUE.row)
        for columns in tile.column_slices(t.value_width, 64):
            o = plgpu.async_load_tmem(program.tensor.o[i].at[:, columns], layout=tile.EPILOGUE.tile)
            plgpu.wait_load_tmem()
            o = online_softmax.finish(o, l, program.problem.kept)
            m.q[i, :, columns] = o.astype(m.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(m.q.at[i], program.head_rows(program.o_gmem, i))
