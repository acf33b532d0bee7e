"""dQ, and delta: a program owns 128 queries of one head, and walks over the keys as the forward
does.

Warpgroups 0 and 1 compute dS, each for half of a block's keys; of warpgroup 2 one warp begins the
products, one loads by TMA. dS has columns of its own in tensor memory, and S of the next block is
computed as soon as that of this block is in registers. No product overwrites what another one,
which may still run, reads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import CONSUMERS, ROWS, GradientTiles
from pallas_flash.kernels.mosaic import block_info, scheduler, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.launch import barriers, launch, shared_matrix
from pallas_flash.kernels.mosaic.logits import Logits
from pallas_flash.kernels.mosaic.registers import load, opaque, per_row
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.online_softmax import DeltaTerms

# A block of keys is held for a step longer than one of values. Polynomials are as many as shorten a
# step on a B200 by a model of the waits: from 1494 clocks to 1238, and at 128 from 1599 to 1536.
_ROW = GradientTiles(64, 64, stages=3, exp2_columns=8, sums_delta=True)
TILES = (
    _ROW,
    _ROW._replace(width=64, value_width=128),
    _ROW._replace(width=128, value_width=64),
    _ROW._replace(width=128, value_width=128, exp2_columns=4),
    # where o would hold up the first block
    GradientTiles(192, 128, value_stages=1),
)


class DqMemory(NamedTuple):
    """The shared memory and mbarriers of a program."""

    q: Any  # [128, width], of dq in the end
    do: Any  # [128, value_width]
    k: Any  # [stages, 128, width]
    v: Any  # [value_stages, 128, value_width]; the last slot is at first of o
    delta: Any  # [128], or None where it is given
    q_full: Any
    do_full: Any
    o_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    s_full: Any  # products -> consumers
    s_free: Any  # consumers -> products
    dp_full: Any  # products -> consumers
    ds_full: Any  # consumers -> products
    delta_full: Any  # consumers -> each other
    dq_full: Any  # products -> consumers
    dq_written: Any  # the second consumer -> the first

    @classmethod
    def allocate(cls, p: Problem, t: GradientTiles) -> "DqMemory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        ordered = tile.ordered_barriers
        return cls(
            q=block(ROWS, t.width),
            do=block(ROWS, t.value_width),
            k=block(t.stages, ROWS, t.width),
            v=block(t.value_stages, ROWS, t.value_width),
            delta=plgpu.SMEM((ROWS,), jnp.float32) if t.sums_delta else None,
            q_full=barriers(1),
            do_full=barriers(1),
            o_full=barriers(1) if t.sums_delta else None,
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
            k_free=ordered(t.stages),
            v_free=ordered(t.value_stages),
            s_full=ordered(1),
            s_free=ordered(1, CONSUMERS),
            dp_full=ordered(1),
            ds_full=ordered(1, CONSUMERS),
            delta_full=barriers(1, CONSUMERS) if t.sums_delta else None,
            dq_full=ordered(1),
            dq_written=barriers(1),
        )


class TensorMemory(NamedTuple):
    """The tensor memory of a program."""

    s: Any  # float32 [128 queries, 128 keys]
    dp: Any
    ds: Any  # in 16 bits
    dq: Any  # float32 [128, width]

    @classmethod
    def allocate(cls, p: Problem, t: GradientTiles) -> "TensorMemory":
        scores = plgpu.TMEM((ROWS, ROWS), jnp.float32)
        return cls(
            scores, scores, tile.in_16_bits(p.dtype), plgpu.TMEM((ROWS, t.width), jnp.float32)
        )


def dq(p: Problem, t: GradientTiles, x: Operands, lse, do, delta):
    """dQ [B, T, N, H], and delta, which may be given as its terms and is then of whole tiles of
    rows."""
    t = t._replace(sums_delta=isinstance(delta, DeltaTerms))
    x = GradientInputs.by_tma(p, t, x, lse, do, delta.dlse if t.sums_delta else delta)
    q, _ = x.queries.arrays
    outputs = [q]
    if t.sums_delta:
        outputs.append(x.delta)
        x = x._replace(delta=DeltaTerms(tma.pad(delta.o, t.swizzle), x.delta))
    dq, *summed = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs],
        warpgroups=CONSUMERS + 1,
        scratch=(DqMemory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_dq",
    )
    return dq[:, : p.queries, :, : p.head_size], *(summed or [delta])


def _kernel(program, x: GradientInputs, *refs, problem: Problem, tiles: GradientTiles):
    dq_gmem, *delta_gmem, (m, tensor) = refs
    p, t = problem, tiles
    work = scheduler.query_tile(program, p, t)
    blocks = block_info.visited(x, work, p, t)
    count = opaque(blocks.last) - blocks.first
    k = tile.Ring(m.k, m.k_full, m.k_free, count)
    v = tile.Ring(m.v, m.v_full, m.v_free, count, is_lent=t.sums_delta)

    def produce():
        tile.load_owned(t, work, work.head, x.queries, (m.q, m.do), (m.q_full, m.do_full))
        if t.sums_delta:
            rows = pl.ds(work.tile * ROWS, ROWS)
            o = tma.head_rows(x.delta.o, work.batch, rows, work.head, t.value_width)
            plgpu.copy_gmem_to_smem(o, m.v.at[v.stages - 1], m.o_full)
        tile.load_keys(t, work, x.keys, blocks, k, v)

    def compute(number):
        consumer = DqConsumer.setup(p, t, x, m, tensor, work, number, v, *delta_gmem)

        def step(n, _, masked):
            consumer.add(blocks.index(n), masked)

        blocks.visit(step, None)
        consumer.finish(dq_gmem)

    tile.specialize(compute, Products(m, tensor, k, v).run, produce)


class Products(NamedTuple):
    """The warp that begins the products, for the blocks of keys in the rings."""

    memory: DqMemory
    tensor: TensorMemory
    k: tile.Ring
    v: tile.Ring

    def run(self):
        m, first = self.memory, jnp.int32(0)
        plgpu.barrier_wait(m.q_full)
        self.begin_s(first)
        plgpu.barrier_wait(m.do_full)
        self.begin_dp(first)
        self.begin_next_s(first)
        schedule.loop(0, self.k.count, self.step, None)
        plgpu.tcgen05_commit_arrive(m.dq_full)
        plgpu.barrier_wait(m.s_free)  # of the last block

    def step(self, n: IntLike, _):
        """dQ += dS K of block n, and the products of the next blocks."""
        tensor = self.tensor
        plgpu.barrier_wait(self.memory.ds_full)
        plgpu.tcgen05_mma(tensor.dq, tensor.ds, self.k.block(n), accumulate=n > 0)
        self.k.release(n)
        self.k.if_block(n + 1, self.begin_dp, self.begin_next_s)

    def begin_next_s(self, n: IntLike):
        """S of the block after block n, once that of block n is in registers."""
        await_read = lambda _: plgpu.barrier_wait(self.memory.s_free)
        self.k.if_block(n + 1, await_read, self.begin_s)

    def begin_s(self, n: IntLike):
        """S = Q K^T of block n."""
        self.k.wait(n)
        tile.dot_t(self.tensor.s, self.memory.q, self.k.block(n))
        plgpu.tcgen05_commit_arrive(self.memory.s_full)

    def begin_dp(self, n: IntLike):
        """dP = dO V^T of block n."""
        self.v.wait(n)
        tile.dot_t(self.tensor.dp, self.memory.do, self.v.block(n))
        plgpu.tcgen05_commit_arrive(self.memory.dp_full)
        self.v.release(n)


def _sum_delta(p: Problem, m: DqMemory, v: tile.Ring, number: int, dlse):
    """`DeltaTerms.sum` of all rows, of which each consumer sums half: 0 of an empty row, as o
    is."""
    rows = tile.half_slice(number)
    for full in m.do_full, m.o_full:
        plgpu.barrier_wait(full)
    read = lambda ref: plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    m.delta[rows] = jnp.sum(read(m.v.at[v.stages - 1, rows]) * read(m.do.at[rows]), axis=1)
    tma.fence()  # o has been read, and TMA may write there
    plgpu.barrier_arrive(m.delta_full)
    plgpu.barrier_wait(m.delta_full)
    if number == 0:
        v.give_back()
    delta = plgpu.load(m.delta, layout=tile.LAYOUTS.row)
    return (delta if p.kept == 1 else delta * p.kept) - dlse


class DqConsumer(NamedTuple):
    """A warpgroup that computes dS of all queries and half of the keys of each block."""

    problem: Problem
    tiles: GradientTiles
    memory: DqMemory
    tensor: TensorMemory
    work: scheduler.WorkTile
    number: int  # of the two consumers
    logits: Logits
    mask: TileMask
    lse: Any  # [128]
    delta: Any

    @classmethod
    def setup(
        cls,
        p: Problem,
        t: GradientTiles,
        x: GradientInputs,
        m,
        tensor,
        work,
        number: int,
        v: tile.Ring,
        delta_gmem=None,
    ) -> "DqConsumer":
        queries = pl.ds(work.tile * ROWS, ROWS)
        by_row = work.batch, work.head, queries
        row_delta = x.delta.dlse if t.sums_delta else x.delta
        lse, delta = (load(ref.at[by_row], tile.LAYOUTS.row) for ref in (x.lse, row_delta))
        if t.sums_delta:
            delta = _sum_delta(p, m, v, number, delta)
            if number == 0:
                tile.store_rows(delta_gmem.at[by_row], delta)
        logits = tile.head_logits(p, t, x.logits, work.batch, work.head)
        mask = logits.load_mask(work.batch, queries.start, ROWS)
        return cls(p, t, m, tensor, work, number, logits, mask, lse, delta)

    def add(self, block: IntLike, masked: bool):
        """Leaves dS of a block in tensor memory."""
        m, keys, size = self.memory, tile.half_slice(self.number), self.tiles.columns
        shape = ROWS, size
        plgpu.barrier_wait(m.s_full)
        s = tile.load_columns(self.tensor.s, keys, size)
        plgpu.barrier_arrive(m.s_free)
        at = self.logits.tile(self.work.tile * ROWS, block * ROWS + keys.start, (ROWS, keys.size))
        lse, mask = (lambda: per_row(self.lse, shape)), self.mask if masked else None
        weights = [
            self.logits.probabilities(piece, place, lse, mask)[1:]
            for piece, place in zip(s, at.split(size), strict=True)
        ]
        # whose commit follows dQ of the block before: that dS has been read
        plgpu.barrier_wait(m.dp_full)
        dp = tile.load_columns(self.tensor.dp, keys, size)
        ds = [
            self.logits.gradient(weight, back, piece, per_row(self.delta, shape))
            for (weight, back), piece in zip(weights, dp, strict=True)
        ]
        tile.store(self.tensor.ds, keys.start, ds)
        plgpu.barrier_arrive(m.ds_full)

    def finish(self, dq_gmem):
        """The epilogue: dQ leaves by way of the shared memory of q, each consumer's share of its
        columns."""
        m, t, work = self.memory, self.tiles, self.work
        plgpu.barrier_wait(m.dq_full)
        share = range(
            self.number * tile.SWIZZLED_COLUMNS, t.width, CONSUMERS * tile.SWIZZLED_COLUMNS
        )
        tile.write(m.q, self.tensor.dq, share, self.problem.scale)
        if self.number:
            plgpu.commit_smem()  # by who writes, though PTX lets who copies do it for both
            plgpu.barrier_arrive(m.dq_written)
            return
        plgpu.barrier_wait(m.dq_written)
        rows = pl.ds(work.tile * ROWS, ROWS)
        tma.copy_out((m.q, tma.head_rows(dq_gmem, work.batch, rows, work.head, t.width)))
