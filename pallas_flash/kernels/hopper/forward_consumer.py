"""A consumer of the forward: 64 queries, and the step over their blocks of keys; and a second one,
which computes half of the columns of a wide output."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, QueryTiles
from pallas_flash.kernels.mosaic import block_info, elements, logits, scheduler, statistics, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.launch import shared_matrix
from pallas_flash.kernels.mosaic.registers import per_row
from pallas_flash.kernels.mosaic.statistics import ForwardInputs
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.online_softmax import SoftmaxState


class Program(NamedTuple):
    """The tiles of queries that a program owns, and the blocks of keys that they visit."""

    problem: Problem
    tiles: QueryTiles
    x: ForwardInputs
    number: IntLike

    def work_tile(self, n: IntLike) -> scheduler.WorkTile:
        p, t = self.problem, self.tiles
        return scheduler.query_tile(self.number, p, t, t.tiles_per_program, n)

    def blocks(self, work: scheduler.WorkTile) -> schedule.Blocks:
        return self._blocks(self.x.blocks, work, work.tile, self.tiles.block_q)

    def blocks_in_order(self, work: scheduler.WorkTile) -> schedule.Blocks:
        return block_info.descend(self.x.blocks, self.blocks(work))

    def consumer_blocks(self, work: scheduler.WorkTile, wg: IntLike) -> schedule.Blocks:
        """The program's blocks that a consumer needs, at least one, in the order in which they
        come; it skips the others."""
        blocks = self.blocks(work)
        # an int: all rows see all keys
        same = isinstance(self.x.blocks, block_info.VisitedBlocks) or isinstance(blocks.last, int)
        if same or self.tiles.row_tiles == 1:
            return self.blocks_in_order(work)
        last_tile = schedule.ceil_div(self.problem.queries, ROWS) - 1
        number = jnp.minimum(work.tile * self.tiles.row_tiles + wg, last_tile)
        needed = self._blocks(self.x.consumer_blocks, work, number, ROWS)
        first = schedule.between(needed.first, blocks.first, blocks.last - 1)
        last = schedule.between(needed.last, first + 1, blocks.last)
        return needed._replace(first=first, last=last).clip().reverse(blocks.last)

    def _blocks(
        self, by_tile, work: scheduler.WorkTile, number: IntLike, rows: int
    ) -> schedule.Blocks:
        mask, queries = self.x.logits.resolved_mask, self.problem.queries
        return block_info.key_blocks(by_tile, mask, work, number, queries, rows, self.tiles.block_k)


class Handed(NamedTuple):
    """What the first consumer leaves in shared memory."""

    p: Any  # [64, block_k], in the dtype of V
    by_row: Any  # [64], alpha; after the last block l

    @classmethod
    def allocate(cls, p: Problem, t: QueryTiles) -> "Handed":
        # V's swizzle: the product wants no other
        swizzle = elements.swizzle_of_rows(p.dtype, t.block_k, t.swizzle)
        probabilities = shared_matrix(p.dtype, ROWS, t.block_k, swizzle=swizzle)
        return cls(probabilities, plgpu.SMEM((ROWS,), jnp.float32))


class ForwardConsumer(NamedTuple):
    """A warpgroup that computes: 64 queries of each of its program's tiles, or half of their o."""

    program: Program
    memory: Any  # forward.ForwardMemory
    o_gmem: Any
    stats_gmem: list
    k: sync.TmaRing
    v: sync.TmaRing
    turns: sync.PingPong
    wg: IntLike  # which 64 queries
    column_slice: int = 0
    handoff: sync.Handoff | None = None  # of `ForwardMemory.handed`

    @property
    def tiles(self) -> QueryTiles:
        return self.program.tiles

    @property
    def columns(self) -> pl.Slice:
        """The columns of values and output that the consumer owns."""
        size = self.tiles.value_width // self.tiles.column_slices
        return pl.ds(self.column_slice * size, size)

    def values(self, t: IntLike):
        """The consumer's columns of values of block t, in `tile.k_subtiles`."""
        return [rows.at[:, self.columns] for rows in self.v.block(t)]

    def run(self):
        for n in range(self.tiles.q_stages):
            self.load_q(n)
        self.turns.start()
        schedule.loop(0, self.tiles.tiles_per_program, self.attend, None)
        self.turns.finish()

    def first_row(self, work: scheduler.WorkTile) -> IntLike:
        return work.tile * self.tiles.block_q + self.wg * ROWS

    def rows(self, array, work: scheduler.WorkTile):
        """The consumer's rows of q or o in global memory."""
        rows, width = pl.ds(self.first_row(work), ROWS), self.memory.q.shape[2]
        return tma.head_rows(array, work.batch, rows, work.head, width)

    def slot(self, n: IntLike):
        """The slot of the n-th tile's q in shared memory."""
        return tma.slot(n, self.tiles.q_stages) * self.tiles.row_tiles + self.wg

    def load_q(self, n: IntLike):
        """Begins to load q of the program's n-th tile, if there is one."""

        def copy():
            source = self.rows(self.program.x.q, self.program.work_tile(n))
            plgpu.copy_gmem_to_smem(
                source, self.memory.q.at[self.slot(n)], self.memory.q_full.at[self.slot(n)]
            )

        pl.when(n < self.tiles.tiles_per_program)(copy)

    def attend(self, n: IntLike, _):
        """Attends to all blocks of keys for the program's n-th tile; then loads the next one's
        q."""
        rows = self.setup(n)
        schedule.loop(0, rows.blocks.first, self.skip_block, None)
        o, stats = rows.compute()
        schedule.loop(rows.blocks.last, rows.last_block, self.skip_block, None)
        self.finish(rows, o, stats)
        self.load_q(n + self.tiles.q_stages)

    def setup(self, n: IntLike) -> "QueryTile":
        """The queries of the program's n-th tile, once they are in shared memory."""
        x, problem, work = self.program.x, self.program.problem, self.program.work_tile(n)
        head = logits.for_head(problem, tile.LAYOUTS, x.logits, work.batch, work.head)
        mask = head.load_mask(work.batch, self.first_row(work), ROWS)
        needed = self.program.consumer_blocks(work, self.wg)
        smem = self.memory.q.at[self.slot(n)]
        plgpu.barrier_wait(self.memory.q_full.at[self.slot(n)])
        last_block = self.program.blocks_in_order(work).last
        return QueryTile(self, work, smem, needed, last_block, head, mask)

    def skip_block(self, t: IntLike, _):
        """Passes over a block that only other consumers need."""
        self.k.wait(t)
        self.turns.acquire()
        self.turns.yield_turn()
        self.k.release(t)
        self.v.wait(t)
        self.v.release(t)

    def finish(self, rows: "QueryTile", o, stats: SoftmaxState):
        """The epilogue: o and its statistics leave by way of shared memory, o by that of q."""
        work, smem = rows.work, rows.smem
        smem.at[:, self.columns][...] = o.astype(smem.dtype)
        stats_smem = [x.at[self.wg] for x in self.memory.stats]
        for x, value in zip(stats_smem, jax.tree.leaves(stats), strict=True):
            x[...] = value
        by_row = work.batch, work.head, pl.ds(self.first_row(work), ROWS)
        if self.handoff is not None:  # the other columns are there
            self.handoff.wait_for_release()
        tma.copy_out(
            (smem, self.rows(self.o_gmem, work)),
            *zip(stats_smem, (x.at[by_row] for x in self.stats_gmem), strict=True),
        )


class QueryTile(NamedTuple):
    """A consumer's queries of one tile: the step over blocks of keys, which come by position."""

    consumer: ForwardConsumer
    work: scheduler.WorkTile
    smem: Any  # [64, the larger width], of q and in the end of the output
    blocks: schedule.Blocks  # that the consumer needs
    last_block: IntLike  # of all blocks that the program visits
    logits: logits.Logits
    mask: TileMask

    @property
    def q(self):
        return self.smem.at[:, : self.consumer.tiles.width]

    def compute(self):
        """o [64, value_width] and the SoftmaxState [64], with an l where logits are in base e, else
        without and less the `soft_cap_constant`."""
        problem, x = self.consumer.program.problem, self.consumer.program.x
        sink = None if x.sinks is None else x.sinks[self.work.head]
        start = online_softmax.start(tile.rows(0.0), problem.log_base, sink, problem.max_logits)
        k, v, turns = self.consumer.k, self.consumer.v, self.consumer.turns
        first, last = self.blocks.first, self.blocks.last - 1
        k.wait(first)
        turns.acquire()

        def begin(acc):
            tile.dot_t(acc, self.q, k.block(first))
            turns.yield_turn()

        s = tile.product(begin, self.shape)  # [bq, bk]
        k.release(first)
        full = isinstance(last, int) and self.blocks.full_first <= first
        p, _, stats = self.softmax(s, first, start, masked=not full)
        self.await_next_k(first + 1)
        p = self.narrow(p, tile.rows(1.0))
        carry = tile.zeros(ROWS, self.consumer.columns.size), stats, p
        o, stats, p = self.blocks.without_first().visit(self.step, carry)
        turns.acquire()
        v.wait(last)

        def finish(acc):
            tile.dot_subtiles(acc, p, self.consumer.values(last))
            turns.yield_turn()

        (o,) = tile.accumulate(finish, o)
        v.release(last)
        if self.consumer.handoff is not None:
            self.consumer.handoff.put(by_row=stats.l)
        o = online_softmax.finish(o, stats.l, problem.kept)
        return o, statistics.finish(problem, stats)

    def step(self, t: IntLike, carry, masked: bool):
        """O += P V of the block before, under which S = Q K^T of block t becomes its P."""
        (o, stats, p), c = carry, self.consumer
        self.await_k(t)
        c.turns.acquire()

        def under_the_products(o_acc, s_acc):
            tile.dot_t(s_acc, self.q, c.k.block(t))
            c.v.wait(t - 1)
            tile.dot_subtiles(o_acc, p, c.values(t - 1))
            c.turns.yield_turn()
            s = tile.await_sum(s_acc, running=len(c.memory.v))  # [bq, bk]
            c.k.release(t)
            p_new, alpha, new = self.softmax(s, t, stats, masked)
            self.await_next_k(t + 1, masked)
            return p_new, alpha, *jax.tree.leaves(new)

        zeros = tile.zeros(*self.shape)
        like = zeros, tile.rows(1.0), *jax.tree.leaves(stats)
        o, _, p, alpha, *stats = tile.overlap(under_the_products, (o, zeros), like)
        c.v.release(t - 1)
        o = tile.rescale(o, alpha) if c.tiles.rescale_threshold else o * per_row(alpha, o.shape)
        # narrow only now: the product before it read the old p
        return o, SoftmaxState(*stats), self.narrow(p, alpha)

    def narrow(self, p, alpha):
        """P in the dtype of q, which the second consumer gets too, if it shares the output."""
        p = p.astype(self.q.dtype)
        if self.consumer.handoff is not None:
            self.consumer.handoff.put(p=p, by_row=alpha)
        return p

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.consumer.tiles.block_k

    def softmax(self, s, t: IntLike, stats: SoftmaxState, masked: bool):
        """P of block t as dropout leaves it, alpha, and the SoftmaxState."""
        tiles, problem = self.consumer.tiles, self.consumer.program.problem
        at = self.logits.tile(
            self.consumer.first_row(self.work), self.blocks.index(t) * tiles.block_k, self.shape
        )
        s, scale = self.logits.modify(s, at)
        if masked:
            s = jnp.where(self.mask.visible(at), s, -jnp.inf)
        p, alpha, stats = online_softmax.step(
            s, stats, problem.log_base, scale, tiles.rescale_threshold
        )
        return self.logits.drop(p, at), alpha, stats

    # ptxas moves the wait for the products up over the exponentials, but neither over an early wait
    # for K nor, in steps with a mask, over a barrier.

    def await_k(self, t: IntLike):
        """Waits for K before its use."""
        if self.consumer.tiles.k_wait == "at use":
            self.consumer.k.wait(t)

    def await_next_k(self, t: IntLike, masked: bool = False):
        """Waits for K at the end of the step before."""
        if self.consumer.tiles.k_wait == "early":
            pl.when(t <= self.blocks.last - 1)(lambda: self.consumer.k.wait(t))
        elif masked:
            self.consumer.turns.sync_self()


def attend_second(consumer: ForwardConsumer):
    """The second of two consumers that own the same queries, where o of more than 256 columns would
    not fit into the registers of one. The first computes S and P once, and each O += P V for half
    of the columns. This one leaves the output in the shared memory of q."""
    c, handoff = consumer, consumer.handoff
    blocks = c.program.blocks_in_order(c.program.work_tile(0))
    by_row = lambda: plgpu.load(handoff.slots.by_row, layout=tile.LAYOUTS.row)

    def step(t, o):
        c.v.wait(t)
        handoff.wait()
        o = o * per_row(by_row(), o.shape)
        (o,) = tile.accumulate(lambda o: tile.dot_subtiles(o, handoff.slots.p, c.values(t)), o)
        handoff.release()
        c.v.release(t)
        return o

    handoff.release()
    o = schedule.loop(blocks.first, blocks.last, step, tile.zeros(ROWS, c.columns.size))
    handoff.wait()
    o = online_softmax.finish(o, by_row(), c.program.problem.kept)
    smem = c.memory.q.at[c.slot(0), :, c.columns]  # the first multiplies by q no more
    smem[...] = o.astype(smem.dtype)
    tma.fence()  # the first copies it out
    handoff.release()
