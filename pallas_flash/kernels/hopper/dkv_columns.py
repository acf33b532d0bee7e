"""Two consumers that own the same keys, where registers of one do not hold the sums beside the
scores: the first computes P and dS, the second dP, and each adds to half of the columns of dK and
dV, by way of shared memory."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.dkv_consumer import DkvConsumer
from pallas_flash.kernels.mosaic.query_block import QueryBlock


class ColumnConsumer(DkvConsumer):
    """One of the two consumers. A kernel may sum dK or dV alone."""

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
