"""dQ, and delta: a program owns 64 queries of one head for each of its consumers, or of wide heads
for both, and walks over the keys as the forward does."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, QueryTiles
from pallas_flash.kernels.mosaic import logits, scheduler, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.elements import SWIZZLES
from pallas_flash.kernels.mosaic.launch import barriers, launch, shared_matrix
from pallas_flash.kernels.mosaic.registers import load, opaque, per_row
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.online_softmax import DeltaTerms

_WIDE = QueryTiles(512, 512, value_stages=1, swizzle=SWIZZLES[1], split=True)
# Rows for head sizes, decided as forward.TILES were. A block of keys is held for a step longer than
# one of values.
_TILES = (
    # 128 keys leave no registers beside three warpgroups, nor at 128
    QueryTiles(64, 64, warpgroups=3, stages=3),
    QueryTiles(128, 128, stages=3),
    QueryTiles(192, 128, stages=3),
    QueryTiles(192, 192, stages=3),
    # there is room for two blocks of keys and one of values
    QueryTiles(256, 256, value_stages=1),
    # both warpgroups compute dS of the same 64 queries: there is no room to hand it over; no
    # swizzle may be wider than the 32 keys that dS K sums over
    _WIDE,
    _WIDE._replace(block_k=32),
)
# the kernel sums delta too where there is room for o beside q and do
TILES = (*(row._replace(sums_delta=True) for row in _TILES if not row.split), *_TILES)


class DqMemory(NamedTuple):
    """The shared memory of a program that owns queries."""

    q: Any  # [row_tiles, 64, width], of dq in the end
    do: Any  # [row_tiles, 64, value_width]
    o: Any  # the same; None where delta is given
    delta: Any  # [row_tiles, 64], or None
    k: Any  # [stages, block_k, width]
    v: Any  # [value_stages, block_k, value_width]
    q_full: Any
    do_full: Any  # of do and o
    k_full: Any
    v_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: QueryTiles) -> "DqMemory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        count, do = t.row_tiles, block(t.row_tiles, ROWS, t.value_width)
        return cls(
            q=block(count, ROWS, t.width),
            do=do,
            o=do if t.sums_delta else None,
            delta=plgpu.SMEM((count, ROWS), jnp.float32) if t.sums_delta else None,
            k=block(t.stages, t.block_k, t.width),
            v=block(t.value_stages, t.block_k, t.value_width),
            q_full=barriers(count, t.column_slices),
            do_full=barriers(count, t.column_slices + t.sums_delta),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
        )


def dq(p: Problem, t: QueryTiles, x: Operands, lse, do, delta):
    """dQ, and delta, which may be given as its terms and is then of whole tiles of rows."""
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
        warpgroups=t.warpgroups + 1,
        scratch=DqMemory.allocate(p, t),
        name="flash_attention_dq",
    )
    return dq[:, : p.queries, :, : p.head_size], *(summed or [delta])


def _kernel(program, x: GradientInputs, *refs, problem: Problem, tiles: QueryTiles):
    *outputs, memory = refs
    work = scheduler.query_tile(program, problem, tiles)
    ids = sync.BarrierIds.make(tiles)
    k = sync.TmaRing(memory.k, memory.k_full, ids.first_ring, tiles.warpgroups)
    v = sync.TmaRing((memory.v,), (memory.v_full,), ids.second_ring, tiles.warpgroups)

    def consume(wg):
        consumer = DqConsumer(problem, tiles, x, memory, k, v, work, wg)
        consumer.finish(consumer.setup().compute(), *outputs)

    def produce():
        count = tile.load_kv(x, work, tile.visited(x, work, problem, tiles), k, v, tiles)
        k.drain(count)
        v.drain(count)

    tile.specialize(tiles, consume, produce)


class DqConsumer(tile.QueryConsumer):
    """A consumer that owns 64 queries, and a slice of the columns of their dQ."""

    @property
    def row_tile(self) -> IntLike:
        """Which of the program's tiles of 64 queries the consumer owns."""
        return opaque(0) if self.tiles.split else self.wg

    def share(self, size: int) -> pl.Slice:
        """The consumer's slice of an axis that consumers of the same queries divide."""
        size //= self.tiles.column_slices
        return pl.ds(pl.multiple_of(self.wg * size, size) if self.tiles.split else 0, size)

    @property
    def columns(self) -> pl.Slice:
        """The columns of dQ that the consumer owns."""
        return self.share(self.tiles.width)

    @property
    def copied(self) -> pl.Slice:
        """The slice of the 64 queries that the consumer copies."""
        return self.share(ROWS)

    def rows(self, array, first: IntLike, width: int):
        """The rows of q, do, o or dq that the consumer copies, where the tile begins at `first`."""
        rows = pl.ds(first + self.row_tile * ROWS + self.copied.start, self.copied.size)
        return tma.head_rows(array, self.work.batch, rows, self.work.head, width)

    def setup(self) -> "QueryTile":
        """The consumer's queries, once their q and do are in shared memory."""
        x, t, memory, work = self.x, self.tiles, self.memory, self.work
        row_tile = self.row_tile

        def copy(first, q_gmem, do_gmem):
            for smem, gmem, full in (
                (memory.do, self.rows(do_gmem, first, t.value_width), memory.do_full),
                (memory.q, self.rows(q_gmem, first, t.width), memory.q_full),
            ):
                plgpu.copy_gmem_to_smem(gmem, smem.at[row_tile, self.copied], full.at[row_tile])

        row_delta = x.delta
        if memory.o is not None:
            o, row_delta = x.delta
            o = self.rows(o, work.tile * t.block_q, t.value_width)
            plgpu.copy_gmem_to_smem(o, memory.o.at[row_tile], memory.do_full.at[row_tile])
        x.queries.reader(work.batch, t.block_q)(work.tile, copy)
        blocks, first_row = self.blocks(), work.tile * t.block_q + row_tile * ROWS
        by_row = self.by_row(first_row)
        lse, delta = (load(ref.at[by_row], tile.LAYOUTS.row) for ref in (x.lse, row_delta))
        head, mask = self.load_logits(first_row)
        for full in memory.q_full, memory.do_full:
            plgpu.barrier_wait(full.at[row_tile])
        if memory.o is not None:
            delta = self.sum_delta(delta)
        return QueryTile(self, blocks, first_row, lse, delta, head, mask)

    def sum_delta(self, dlse):
        """`DeltaTerms.sum` of the consumer's rows, left in shared memory too: 0 of an empty row, as
        o is."""
        memory, kept = self.memory, self.problem.kept
        read = lambda x: plgpu.layout_cast(x.at[self.row_tile][...], tile.LAYOUTS.tile)
        o, do = (read(x).astype(jnp.float32) for x in (memory.o, memory.do))
        delta = jnp.sum(o * do, axis=1)
        delta = (delta if kept == 1 else delta * kept) - dlse
        memory.delta.at[self.row_tile][...] = delta
        return delta

    def sync_owners(self):
        """Waits for the others that own the same queries."""
        if self.tiles.split:
            ids = sync.BarrierIds.make(self.tiles)
            sync.consumer_barrier(ids.consumers, self.tiles.warpgroups)

    def finish(self, dq, dq_gmem, delta_gmem=None):
        """The epilogue: dQ leaves by way of the shared memory of q."""
        t, work, memory = self.tiles, self.work, self.memory
        q, first_row = memory.q.at[self.row_tile], work.tile * t.block_q
        self.sync_owners()  # all have read q
        q.at[:, self.columns][...] = (dq * self.problem.scale).astype(q.dtype)
        self.sync_owners()
        copies = [(q.at[self.copied], self.rows(dq_gmem, first_row, t.width))]
        if delta_gmem is not None:
            by_row = self.by_row(first_row + self.row_tile * ROWS)
            copies.append((memory.delta.at[self.row_tile], delta_gmem.at[by_row]))
        tma.copy_out(*copies)


class QueryTile(NamedTuple):
    """A consumer's queries: the step over blocks of keys, which come by position."""

    consumer: DqConsumer
    blocks: schedule.Blocks
    first_row: IntLike
    lse: Any  # [64]
    delta: Any
    logits: logits.Logits
    mask: TileMask

    def compute(self):
        """The consumer's columns of dQ [64, width], but for the scale."""
        c, blocks = self.consumer, self.blocks
        last = blocks.last - 1
        full = isinstance(last, int) and blocks.full_first == 0
        ds = self.gradient(0, not full)
        carry = tile.zeros(ROWS, c.columns.size), ds.astype(c.memory.q.dtype)
        dq, ds = blocks.without_first().visit(self.step, carry)
        (dq,) = tile.accumulate(lambda acc: tile.dot(acc, ds, c.k.block(last).at[:, c.columns]), dq)
        c.k.release(last)
        return dq

    def step(self, t: IntLike, carry, masked: bool):
        """dQ += dS K of the block before, under which dS of block t is computed."""
        dq, ds = carry
        dq, ds = tile.overlap(
            lambda dq_acc: (self.gradient(t, masked, (dq_acc, ds)),),
            (dq,),
            (tile.zeros(*self.shape),),
        )
        return dq, ds.astype(self.consumer.memory.q.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.consumer.tiles.block_k

    def gradient(self, t: IntLike, masked: bool, before=None):
        """dS of block t. Its exponentials run under dQ += dS K of `before`, the accumulator and the
        dS of the block before."""
        c, shape = self.consumer, self.shape
        # or the addresses of all slices would take registers
        c = c._replace(wg=opaque(c.wg))
        k, v, q, do = c.k, c.v, c.memory.q.at[c.row_tile], c.memory.do.at[c.row_tile]

        def begin_s(acc):
            k.wait(t)
            tile.dot_t(acc, q, k.block(t))
            if before is not None:
                dq_acc, ds = before
                tile.dot(dq_acc, ds, k.block(t - 1).at[:, c.columns])

        def begin_dp(acc):
            v.wait(t)
            tile.dot_t(acc, do, *v.block(t))
            if before is not None:
                plgpu.wgmma_wait(1)
                k.release(t - 1)

        s = tile.product(begin_s, shape, running=0 if before is None else 1)
        at = self.logits.tile(self.first_row, self.blocks.index(t) * shape[1], shape)
        _, weight, back = self.logits.probabilities(
            s, at, lambda: per_row(self.lse, shape), self.mask if masked else None
        )
        dp = tile.product(begin_dp, shape)
        v.release(t)
        return self.logits.gradient(weight, back, dp, per_row(self.delta, shape))
