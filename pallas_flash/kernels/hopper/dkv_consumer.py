"""A consumer that owns keys: what a block of queries adds to its share of dK and dV, and in the
fused scheme to dQ."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, KeyTiles
from pallas_flash.kernels.mosaic import elements, tma
from pallas_flash.kernels.mosaic.logits import QueryBlock
from pallas_flash.kernels.mosaic.registers import opaque
from pallas_flash.problem.arguments import Problem


class Q(NamedTuple):
    """The ring of q and lse: arrays, their slots, or their barriers."""

    q: Any
    lse: Any


class Do(NamedTuple):
    """The ring of dO and delta."""

    do: Any
    delta: Any  # None where there is no dK


class DkvConsumer(NamedTuple):
    """A warpgroup that owns a share of its program's dK and dV. Scores are transposed, [keys,
    queries]."""

    problem: Problem
    tiles: KeyTiles
    memory: Any  # backward_dkv.DkvMemory
    q: sync.TmaRing  # of Q
    do: sync.TmaRing  # of Do
    wg: IntLike
    first_key: IntLike
    dq_gmem: Any = None  # in the fused scheme
    dq_store: Any = None  # backward_dkv.DqStore, where its producer adds dq

    def add(self, block: QueryBlock, masked: bool, sums: dict) -> dict:
        """dK += dS^T Q and dV += P^T dO with a block of queries."""
        raise NotImplementedError

    def in_turn(self, write: Callable[[], None]):
        """Calls write(), which writes the consumer's sums to shared memory."""
        write()

    def share(self, size: int, count: int) -> pl.Slice:
        """The consumer's slice of an axis in `count` slices, one or one for each consumer."""
        wg = self.wg if count > 1 else opaque(0)
        return pl.ds(pl.multiple_of(wg * (size // count), size // count), size // count)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the scores that are computed at once."""
        return ROWS, self.tiles.tiling.columns

    @property
    def keys(self) -> pl.Slice:
        return self.share(self.tiles.block_k, self.tiles.block_k // ROWS)

    def columns(self, width: int) -> pl.Slice:
        """The consumer's columns of a sum so wide: the first ones, or the last."""
        dtype, t = self.problem.dtype, self.tiles
        size = t.owned_columns(dtype, width)
        first = pl.multiple_of(self.wg * (width - size), elements.columns(dtype, t.swizzle))
        return pl.ds(first if size < width else 0, size)

    @property
    def ids(self) -> sync.BarrierIds:
        return sync.BarrierIds.make(self.tiles)

    def barrier(self):
        """Waits for all consumers."""
        sync.consumer_barrier(self.ids.consumers, self.tiles.warpgroups)

    def wait(self, block: QueryBlock, array: str):
        """Waits for one of q, do and delta of a block."""
        (self.q if array == "q" else self.do).wait(block.position, array)

    def probabilities(self, block: QueryBlock, rows: pl.Slice, masked: bool, s):
        """P, in the dtype of q, of a slice of the block's queries, and what `Logits.gradient`
        takes."""
        q, lse = self.q.block(block.position)
        first_row, first_key = block.first_row + rows.start, self.first_key + self.keys.start
        at = block.logits.tile(first_row, first_key, self.shape, transposed=True)
        p, weight, back = block.probabilities(s, at, lse.at[rows], masked)
        return (*lax.optimization_barrier((p.astype(q.dtype), weight)), back)


class KeyConsumer(DkvConsumer):
    """A consumer that owns 64 keys, and all columns of their dK and dV."""

    def add(self, block: QueryBlock, masked: bool, sums: dict) -> dict:
        """Adds 64 queries at a time."""
        q, do = self.q.block(block.position).q, self.do.block(block.position).do
        slices = [pl.ds(first, ROWS) for first in range(0, self.tiles.block_q, ROWS)]
        shared_ds = None
        if self.dq_gmem is not None:
            shared_ds = self.memory.ds.at[lax.rem(block.position, jnp.int32(2))]

        def products(dk_acc, dv_acc):
            def add_dk():
                for rows, ds in zip(slices, all_ds, strict=True):
                    tile.dot(dk_acc, ds, q.at[rows])  # dK += dS^T Q

            all_ds = []
            for rows in slices:
                add_dv = lambda p, rows=rows: tile.dot(dv_acc, p, do.at[rows])  # dV += P^T dO
                if self.tiles.s_before_dp:
                    all_ds.append(self.ds_after_dv(block, rows, masked, add_dv))
                    continue
                p, ds = self.p_and_ds(block, rows, masked)
                all_ds.append(ds)
                if shared_ds is not None:
                    shared_ds.at[self.keys, rows][...] = ds
                add_dv(p)
            if shared_ds is None:
                tma.fence()  # lse and delta have been read, and TMA may write there
                add_dk()
            else:
                self.barrier()
                self.add_dq(block, shared_ds, add_dk)

        dk, dv = tile.accumulate(products, sums["dk"], sums["dv"])
        self.q.release(block.position)
        self.do.release(block.position)
        return dict(dk=dk, dv=dv)

    def p_and_ds(self, block: QueryBlock, rows: pl.Slice, masked: bool):
        """P and dS, in the dtype of q, of 64 of the block's queries."""
        q, (do, delta) = self.q.block(block.position).q, self.do.block(block.position)
        logits, shape = block.logits, self.shape

        def wait(array):
            if rows.start == 0:
                self.wait(block, array)

        def begin_s(acc):
            wait("q")
            tile.dot_t(acc, self.memory.k.at[self.keys], q.at[rows])

        def begin_dp(acc):
            wait("do")
            tile.dot_t(acc, self.memory.v.at[self.keys], do.at[rows])

        def finish_s(s):
            weights = self.probabilities(block, rows, masked, s)
            # ptxas moves no wait for a product before this one, and no exponential behind it
            wait("delta")
            return weights

        def both(s_acc, dp_acc):
            begin_s(s_acc)
            begin_dp(dp_acc)
            p, weight, _ = finish_s(tile.await_sum(s_acc, running=1))
            return p, weight, tile.await_sum(dp_acc)

        crowded = self.problem.soft_cap is not None or self.problem.score is not None
        if crowded or (masked and logits.mask_has_data):  # no registers for both products
            p, weight, back = finish_s(tile.product(begin_s, shape))
            dp = tile.product(begin_dp, shape)
        else:
            p, weight, dp = tile.with_accumulators(both, shape, shape)
            back = None
        ds = logits.gradient(weight, back, dp, block.per_query(delta.at[rows], self.shape))
        return p, ds.astype(q.dtype)

    def ds_after_dv(self, block: QueryBlock, rows: pl.Slice, masked: bool, add_dv: Callable):
        """dS, in the dtype of q, of 64 of the block's queries, where registers hold S or dP.
        add_dv(P) comes between the two, and P, the weight of dS, is held in that dtype until dP is
        there."""
        q, (do, delta) = self.q.block(block.position).q, self.do.block(block.position)
        k, v = self.memory.k.at[self.keys], self.memory.v.at[self.keys]
        self.wait(block, "q")
        s = tile.product(lambda acc: tile.dot_t(acc, k, q.at[rows]), self.shape)
        p, weight, back = self.probabilities(block, rows, masked, s)
        assert back is None and self.problem.soft_cap is None, "the weight is P but for its sign"
        if self.problem.dropped:  # its sign says of what P is 0
            weight = weight.astype(q.dtype)
            p = jnp.maximum(weight, jnp.zeros((), q.dtype))
        else:
            weight = p
        self.wait(block, "do")
        add_dv(p)
        dp = tile.product(lambda acc: tile.dot_t(acc, v, do.at[rows]), self.shape)
        self.wait(block, "delta")
        weight = tile.as_float32(weight)
        ds = block.logits.gradient(weight, None, dp, block.per_query(delta.at[rows], self.shape))
        return ds.astype(q.dtype)

    def add_dq(self, block: QueryBlock, ds, begin_next: Callable):
        """Adds the consumer's share of dQ += dS K to global memory; ds is that of all consumers,
        [block_k, block_q]. begin_next() begins a product for each 64 queries meanwhile."""
        rows = self.share(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self.share(self.tiles.width, self.tiles.dq_column_slices)
        running = self.tiles.block_q // ROWS  # products

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            begin_next()
            return tile.await_sum(dq_acc, running=running)

        dq = tile.with_accumulators(product, (rows.size, columns.size))
        if self.dq_store is not None:
            return self.dq_store.handoff(self.wg).put(dq=dq)
        rows = pl.ds(block.first_row + rows.start, rows.size)
        target = self.dq_gmem.at[block.batch, rows, block.head, columns]
        tile.add_out(dq, self.memory.dq.at[self.wg], target)


class ColumnConsumer(DkvConsumer):
    """One of two consumers that own the same keys, where registers of one do not hold the sums
    beside the scores. The first computes P and dS, the second dP, and each adds to half of the
    columns of dK and dV, by way of shared memory. A kernel may sum dK or dV alone."""

    def compute(self, block: QueryBlock, masked: bool, p):
        """Leaves P in p, or dP - delta, in shared memory. Returns what `write_ds` takes."""
        raise NotImplementedError

    def write_ds(self, block: QueryBlock, weights):
        """Leaves dS in shared memory."""

    def add(self, block: QueryBlock, masked: bool, sums: dict) -> dict:
        q, do = self.q.block(block.position).q, self.do.block(block.position).do
        has_dk, has_dv = self.tiles.has_dk, self.tiles.has_dv
        # two slots: none waits until the other consumer has read the P before
        p = self.memory.p.at[lax.rem(block.position, jnp.int32(2))] if has_dv else None
        weights = self.compute(block, masked, p)
        self.barrier()  # P and dP are there
        if not has_dk:
            self.q.release(block.position)

        def products(*accumulators):
            acc = dict(zip(sums, accumulators, strict=True))
            if has_dv:  # dV += P^T dO
                columns = self.columns(self.tiles.value_width)
                tile.dot(acc["dv"], p, do.at[:, columns])
            if has_dk:
                self.write_ds(block, weights)
                self.barrier()  # dS is there
                if not has_dv:
                    self.do.release(block.position)
                columns = self.columns(self.tiles.width)
                tile.dot(acc["dk"], self.memory.ds, q.at[:, columns])  # dK += dS^T Q

        added = tile.accumulate(products, *sums.values())
        if has_dk:
            self.q.release(block.position)
        if has_dv:
            self.do.release(block.position)
        return dict(zip(sums, added, strict=True))

    def order(self, operation: str):
        """Puts the second consumer's product after the first one's."""
        sync.named_barrier(operation, self.ids.order, self.tiles.warpgroups)

    @property
    def queries(self) -> pl.Slice:
        """All queries of a block."""
        return pl.ds(0, self.tiles.block_q)


class FirstConsumer(ColumnConsumer):
    """The consumer that computes P and dS."""

    def compute(self, block: QueryBlock, masked: bool, p):
        """Returns once dO, where dV is summed, and delta for dropout are there."""
        k, q = self.memory.k.at[self.keys], self.q.block(block.position).q
        has_dk, has_dv = self.tiles.has_dk, self.tiles.has_dv

        def begin(acc):
            tile.dot_t(acc, k, q)
            if has_dk and has_dv:
                self.order("arrive")

        self.wait(block, "q")
        s = tile.product(begin, self.shape)
        prob, *weights = self.probabilities(block, self.queries, masked, s)
        if has_dv:
            self.wait(block, "do")
        if has_dk and self.problem.dropped:
            self.wait(block, "delta")
        if has_dv:
            p[...] = prob
        return weights

    def write_ds(self, block: QueryBlock, weights):
        ds = self.memory.ds
        ds[...] = block.logits.gradient(*weights, *self.load_dp(block)).astype(ds.dtype)

    def load_dp(self, block: QueryBlock):
        """The second consumer's dP, and delta, as `Logits.gradient` takes them."""
        dp, delta = plgpu.layout_cast(self.memory.dp[...], tile.LAYOUTS.tile), None
        dp = dp.astype(jnp.float32)
        if self.problem.dropped:  # which leaves -delta of it
            delta = block.per_query(
                self.do.block(block.position).delta.at[self.queries], self.shape
            )
            dp = dp + delta
        return dp, delta

    def in_turn(self, write: Callable[[], None]):
        """Writes first: some columns may be both consumers'."""
        write()
        self.barrier()


class SecondConsumer(ColumnConsumer):
    """The consumer that computes dP."""

    def compute(self, block: QueryBlock, masked: bool, p):
        """Returns once Q is there, where dK is summed."""
        if not self.tiles.has_dk:
            return self.wait(block, "do")
        v, (do, delta) = self.memory.v.at[self.keys], self.do.block(block.position)
        self.wait(block, "do")
        if self.tiles.has_dv:
            self.order("sync")  # so that dP runs under the exponentials
        dp = tile.product(lambda acc: tile.dot_t(acc, v, do), self.shape)
        self.wait(block, "delta")
        dp = dp - block.per_query(delta.at[self.queries], self.shape)
        self.wait(block, "q")
        self.memory.dp[...] = dp.astype(self.memory.dp.dtype)

    def in_turn(self, write: Callable[[], None]):
        self.barrier()
        write()
