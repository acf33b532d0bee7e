"""A consumer that owns keys: what a block of queries adds to its share of dK and dV, and in the
fused scheme to dQ."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles
from pallas_flash.kernels.mosaic.logits import Logits
from pallas_flash.kernels.mosaic.registers import opaque, per_column
from pallas_flash.pytrees import IntLike

SHAPE = ROWS, ROWS  # of the scores that are computed at once
FIRST = pl.ds(0, ROWS)


class Queries(NamedTuple):
    """What comes in a ring of blocks of queries: arrays, their slots, their barriers."""

    q: Any
    lse: Any
    do: Any
    delta: Any


class Block(NamedTuple):
    """A block of queries of one head."""

    position: IntLike  # in the ring
    head: IntLike
    first_row: IntLike
    logits: Logits


class DkvConsumer(NamedTuple):
    """A warpgroup that owns a share of its program's dK and dV. Scores are transposed, [keys,
    queries]."""

    problem: Problem
    tiles: KeyTiles
    memory: Any  # of backward_dkv.py
    queries: sync.TmaRing  # of Queries
    wg: IntLike
    batch: IntLike
    first_key: IntLike
    is_first: bool | None  # of two consumers that split the columns; None where each owns keys
    dq_gmem: Any = None  # in the fused scheme

    def share(self, size: int, count: int) -> pl.Slice:
        """The consumer's slice of an axis in `count` slices, one or one for each consumer."""
        wg = self.wg if count > 1 else opaque(0)
        return pl.ds(pl.multiple_of(wg * (size // count), size // count), size // count)

    @property
    def keys(self) -> pl.Slice:
        return self.share(self.tiles.block_k, self.tiles.block_k // ROWS)

    def columns(self, width: int) -> pl.Slice:
        """The consumer's columns of dK or dV: the first ones, or the last."""
        size = self.tiles.owned_columns(width)
        first = pl.multiple_of(self.wg * (width - size), self.tiles.swizzle // 2)
        return pl.ds(first if size < width else 0, size)

    @property
    def ids(self) -> sync.BarrierIds:
        return sync.BarrierIds(self.tiles.warpgroups, self.tiles.stages)

    def barrier(self):
        """Of all consumers."""
        sync.consumer_barrier(self.ids.consumers, self.tiles.warpgroups)

    def order(self, operation: str):
        """The second consumer's product comes after the first one's."""
        sync.named_barrier(operation, self.ids.order, self.tiles.warpgroups * sync.WARPGROUP)

    def add(self, block: Block, masked: bool, dk, dv):
        """dK += dS^T Q and dV += P^T dO with a block of queries, by 64 of them at a time."""
        if self.is_first is not None:
            return self.add_columns(block, masked, dk, dv)
        queries = self.queries.block(block.position)
        slices = [pl.ds(first, ROWS) for first in range(0, self.tiles.block_q, ROWS)]
        shared_ds = None
        if self.dq_gmem is not None:
            shared_ds = self.memory.ds.at[lax.rem(block.position, jnp.int32(2))]

        def products(dk_acc, dv_acc):
            def add_dk():
                for rows, ds in zip(slices, all_ds, strict=True):
                    tile.dot(dk_acc, ds, queries.q.at[rows])  # dK += dS^T Q

            all_ds = []
            for rows in slices:
                p, ds = self.p_and_ds(block, rows, masked)
                all_ds.append(ds)
                if shared_ds is not None:
                    shared_ds.at[self.keys, rows][...] = ds
                tile.dot(dv_acc, p, queries.do.at[rows])  # dV += P^T dO
            if shared_ds is None:
                sync.fence()  # lse and delta have been read, and TMA may write there
                add_dk()
            else:
                self.barrier()
                self.add_dq(block, shared_ds, add_dk)

        sums = tile.accumulate(products, dk, dv)
        self.queries.release(block.position)
        return sums

    def add_columns(self, block: Block, masked: bool, dk, dv):
        """The same for the consumer's columns, by way of shared memory: the first consumer computes
        P and dS, the second dP."""
        queries, memory = self.queries.block(block.position), self.memory
        p = memory.p.at[lax.rem(block.position, jnp.int32(2))]
        dp, ds = memory.dp.at[self.keys], memory.ds.at[self.keys]
        if self.is_first:
            p[...], weight, back = self.first_p(block, masked, queries.q)
        else:
            dp[...] = self.second_dp(block, queries).astype(dp.dtype)
        self.barrier()  # p and dp are there

        def products(dk_acc, dv_acc):
            # dV += P^T dO
            tile.dot(dv_acc, p, queries.do.at[:, self.columns(self.tiles.value_width)])
            if self.is_first:
                x, delta = plgpu.layout_cast(dp[...], tile.LAYOUTS.tile).astype(jnp.float32), None
                if self.problem.dropped:  # which leaves -delta of it
                    delta = self.per_query(queries.delta)
                    x = x + delta
                ds[...] = block.logits.gradient(weight, back, x, delta).astype(ds.dtype)
            self.barrier()  # ds is there
            tile.dot(dk_acc, ds, queries.q.at[:, self.columns(self.tiles.width)])  # dK += dS^T Q

        sums = tile.accumulate(products, dk, dv)
        self.queries.release(block.position)
        return sums

    def first_p(self, block: Block, masked: bool, q):
        """What `probabilities` has of the block; dO, and delta for dropout, are there then."""
        k = self.memory.k.at[self.keys]

        def begin(acc):
            tile.dot_t(acc, k, q)
            self.order("arrive")

        self.wait(block, "q")
        found = self.probabilities(block, FIRST, masked, tile.product(begin, SHAPE))
        self.wait(block, "do")
        if self.problem.dropped:
            self.wait(block, "delta")
        return found

    def second_dp(self, block: Block, queries: Queries):
        """dP - delta; Q is there then."""
        v = self.memory.v.at[self.keys]
        self.wait(block, "do")
        self.order("sync")  # so that dP runs under the exponentials
        dp = tile.product(lambda acc: tile.dot_t(acc, v, queries.do), SHAPE)
        self.wait(block, "delta")
        dp = dp - self.per_query(queries.delta)
        self.wait(block, "q")
        return dp

    def wait(self, block: Block, array: str):
        self.queries.wait(block.position, array)

    def p_and_ds(self, block: Block, rows: pl.Slice, masked: bool):
        """P and dS, 16 bits, of 64 of the block's queries."""
        queries, logits = self.queries.block(block.position), block.logits

        def wait(array):
            if rows.start == 0:
                self.wait(block, array)

        def begin_s(acc):
            wait("q")
            tile.dot_t(acc, self.memory.k.at[self.keys], queries.q.at[rows])

        def begin_dp(acc):
            wait("do")
            tile.dot_t(acc, self.memory.v.at[self.keys], queries.do.at[rows])

        def finish_s(s):
            found = self.probabilities(block, rows, masked, s)
            # ptxas moves no wait for a product before this one, and no exponential behind it
            wait("delta")
            return found

        def both(s_acc, dp_acc):
            begin_s(s_acc)
            begin_dp(dp_acc)
            p, weight, _ = finish_s(tile.await_sum(s_acc, running=1))
            return p, weight, tile.await_sum(dp_acc)

        many = self.problem.soft_cap is not None or self.problem.score is not None
        if many or (masked and logits.mask_has_data):  # no registers for both products
            p, weight, back = finish_s(tile.product(begin_s, SHAPE))
            dp = tile.product(begin_dp, SHAPE)
        else:
            p, weight, dp = tile.with_accumulators(both, SHAPE, SHAPE)
            back = None
        ds = logits.gradient(weight, back, dp, self.per_query(queries.delta, rows))
        return p, ds.astype(queries.q.dtype)

    def probabilities(self, block: Block, rows: pl.Slice, masked: bool, s):
        """P, 16 bits, of 64 of the block's queries, and what `Logits.gradient` takes."""
        queries, mask = self.queries.block(block.position), None
        first_row, first_key = block.first_row + rows.start, self.first_key + self.keys.start
        if masked:
            mask = block.logits.load_mask(opaque(self.batch), first_row, ROWS, transposed=True)
        at = block.logits.tile(first_row, first_key, SHAPE, transposed=True)
        p, weight, back = block.logits.probabilities(
            s, at, lambda: self.per_query(queries.lse, rows), mask
        )
        return (*lax.optimization_barrier((p.astype(queries.q.dtype), weight)), back)

    def per_query(self, ref, rows: pl.Slice = FIRST):
        """What the ref has of 64 queries, for each score."""
        return per_column(plgpu.load(ref.at[rows], layout=tile.LAYOUTS.column), SHAPE)

    def add_dq(self, block: Block, ds, begin_more):
        """dQ += dS K in global memory, of which a consumer adds its share; ds is of all consumers,
        [block_k, block_q]."""
        rows = self.share(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self.share(self.tiles.width, self.tiles.dq_column_slices)
        more = self.tiles.block_q // ROWS  # products

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            begin_more()
            return tile.await_sum(dq_acc, running=more)

        dq = tile.with_accumulators(product, (rows.size, columns.size))
        rows = pl.ds(block.first_row + rows.start, rows.size)
        target = self.dq_gmem.at[self.batch, rows, block.head, columns]
        tile.add_out(dq, self.memory.dq.at[self.wg], target)
