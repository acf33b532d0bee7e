"""A consumer that owns keys: what a block of queries adds to its part of dK and dV, and in the
fused scheme to dQ."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import bits, kept, ruled, scored, seen, sync, tile
from pallas_flash.kernels.hopper.gradients import Inputs, dlogits, probabilities
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles
from pallas_flash.pytrees import IntLike


class Block(NamedTuple):
    """A block of queries of one head."""

    number: IntLike  # in the order of the rings
    head: IntLike
    first_row: IntLike
    dropout: kept.Dropout | None
    score: scored.OfHead | None
    rule: bits.OfHead | ruled.OfHead | None  # of the mask


class Owner(NamedTuple):
    """A consumer that owns keys: a part of its program's dK and dV. Scores are transposed, [keys,
    queries]."""

    problem: Problem
    tiles: KeyTiles
    x: Inputs
    memory: Any  # of backward_dkv.py
    queries: sync.Ring  # q, lse, do, delta
    number: IntLike
    batch: IntLike
    first_key: IntLike
    is_first: bool | None  # of two consumers that split the columns; None where each owns keys
    dq_gmem: Any = None  # in the fused scheme

    def cut(self, size: int, parts: int) -> pl.Slice:
        """The consumer's part of an axis that is cut into so many parts, one or one for each
        consumer."""
        own = self.number if parts > 1 else sync.opaque(0)
        return pl.ds(pl.multiple_of(own * (size // parts), size // parts), size // parts)

    @property
    def keys(self) -> pl.Slice:
        return self.cut(self.tiles.block_k, self.tiles.block_k // ROWS)

    def columns(self, width: int) -> pl.Slice:
        """The consumer's columns of dK or dV: the first ones, or the last."""
        size = self.tiles.columns(width)
        first = pl.multiple_of(self.number * (width - size), self.tiles.swizzle // 2)
        return pl.ds(first if size < width else 0, size)

    def meet(self):
        sync.meet(
            sync.Numbers(self.tiles.warpgroups, self.tiles.stages).meeting, self.tiles.warpgroups
        )

    def after_s(self, operation: str):
        """The second consumer's product comes behind the first one's."""
        number = sync.Numbers(self.tiles.warpgroups, self.tiles.stages).order
        sync.named_barrier(operation, number, self.tiles.warpgroups * sync.WARPGROUP)

    def add(self, block: Block, masked: bool, dk, dv):
        """dK += dS^T Q and dV += P^T dO with a block of queries, by 64 of them at a time."""
        if self.is_first is not None:
            return self.add_columns(block, masked, dk, dv)
        q, _, do, _ = self.queries.block(block.number)
        parts = [pl.ds(first, ROWS) for first in range(0, self.tiles.block_q, ROWS)]
        shared = (
            None if self.dq_gmem is None else self.memory.ds.at[lax.rem(block.number, jnp.int32(2))]
        )

        def products(dk_acc, dv_acc):
            def add_dk():
                for rows, ds in zip(parts, all_ds, strict=True):
                    tile.dot(dk_acc, ds, q.at[rows])  # dK += dS^T Q

            all_ds = []
            for rows in parts:
                p, ds = self.p_and_ds(block, rows, masked)
                all_ds.append(ds)
                if shared is not None:
                    shared.at[self.keys, rows][...] = ds
                tile.dot(dv_acc, p, do.at[rows])  # dV += P^T dO
            if shared is None:
                sync.fence()  # lse and delta have been read, and TMA may write there
                add_dk()
            else:
                self.meet()
                self.add_dq(block, shared, add_dk)

        sums = tile.products_add(products, dk, dv)
        self.queries.release(block.number)
        return sums

    def add_columns(self, block: Block, masked: bool, dk, dv):
        """The same for the consumer's columns, by way of shared memory: the first consumer computes
        P and dS, the second dP."""
        (q, _, do, delta), shape, rows = (
            self.queries.block(block.number),
            (ROWS, ROWS),
            pl.ds(0, ROWS),
        )
        k, v, dp, ds = (
            x.at[self.keys] for x in (self.memory.k, self.memory.v, self.memory.dp, self.memory.ds)
        )
        p, wait = (
            self.memory.p.at[lax.rem(block.number, jnp.int32(2))],
            functools.partial(self.queries.wait, block.number),
        )
        if self.is_first:
            wait(array=0)
            s = tile.product(lambda acc: (tile.dot_t(acc, k, q), self.after_s("arrive")), shape)
            p[...], weight, back = self.probabilities(block, rows, masked, s)
            wait(array=2)
            if self.problem.dropped:
                wait(array=3)
        else:
            wait(array=2)
            self.after_s("sync")  # so that dP runs under the exponentials
            x = tile.product(lambda acc: tile.dot_t(acc, v, do), shape)
            wait(array=3)
            dp[...] = (x - self.per_query(delta, rows)(shape)).astype(dp.dtype)
            wait(array=0)
        self.meet()  # p and dp are there

        def products(dk_acc, dv_acc):
            tile.dot(dv_acc, p, do.at[:, self.columns(self.tiles.value_width)])  # dV += P^T dO
            if self.is_first:
                x, less = plgpu.layout_cast(dp[...], tile.TILE).astype(jnp.float32), None
                if self.problem.dropped:  # which leaves -delta of it
                    less = self.per_query(delta, rows)(shape)
                    x = x + less
                ds[...] = dlogits(self.problem, weight, back, x, less).astype(ds.dtype)
            self.meet()  # ds is there
            tile.dot(dk_acc, ds, q.at[:, self.columns(self.tiles.width)])  # dK += dS^T Q

        sums = tile.products_add(products, dk, dv)
        self.queries.release(block.number)
        return sums

    def p_and_ds(self, block: Block, rows: pl.Slice, masked: bool):
        """P and dS, 16 bits, of 64 of the block's queries."""
        q, _, do, delta = self.queries.block(block.number)
        shape, has_data = (
            (ROWS, ROWS),
            self.x.resolved_mask.has_data or isinstance(block.rule, ruled.OfHead),
        )

        def wait(array):
            if rows.start == 0:
                self.queries.wait(block.number, array)

        def begin_s(acc):
            wait(array=0)
            tile.dot_t(acc, self.memory.k.at[self.keys], q.at[rows])

        def begin_dp(acc):
            wait(array=2)
            tile.dot_t(acc, self.memory.v.at[self.keys], do.at[rows])

        def finish_s(s):
            p, weight, back = self.probabilities(block, rows, masked, s)
            # ptxas moves no wait for a product before this one, and no exponential behind it
            wait(array=3)
            return p, weight, back

        def both(s_acc, dp_acc):
            begin_s(s_acc)
            begin_dp(dp_acc)
            p, weight, _ = finish_s(tile.finished(s_acc, running=1))
            return p, weight, tile.finished(dp_acc)

        many = self.problem.soft_cap is not None or self.problem.score is not None
        if many or (masked and has_data):  # there are no registers for both products
            p, weight, back = finish_s(tile.product(begin_s, shape))
            dp = tile.product(begin_dp, shape)
        else:
            p, weight, dp = tile.products(both, shape, shape)
            back = None
        return p, dlogits(
            self.problem, weight, back, dp, self.per_query(delta, rows)(shape)
        ).astype(q.dtype)

    def probabilities(self, block: Block, rows: pl.Slice, masked: bool, s):
        """P, 16 bits, of 64 of the block's queries, and what `dlogits` takes."""
        q, lse, _, _ = self.queries.block(block.number)
        sees = keeps = natural = None
        first_row, first_key = block.first_row + rows.start, self.first_key + self.keys.start
        if masked:
            view = seen.view(
                self.x.resolved_mask,
                sync.opaque(self.batch),
                first_row,
                block.rule,
                transposed=True,
            )
            sees = functools.partial(view.sees, first_key)
        if block.dropout is not None:
            keeps = functools.partial(block.dropout.keeps_transposed, first_row, first_key)
        if block.score is not None:
            natural = lambda s: block.score.vjp(s, first_row, first_key, transposed=True)
        p, weight, back = probabilities(
            self.problem, s, self.per_query(lse, rows), sees, keeps, natural
        )
        return (*lax.optimization_barrier((p.astype(q.dtype), weight)), back)

    def per_query(self, ref, rows: pl.Slice):
        """What the ref has of some queries, for each of the columns of a tile of this shape."""
        return lambda shape: tile.down(plgpu.load(ref.at[rows], layout=tile.COLUMN), shape)

    def add_dq(self, block: Block, ds, begin_more):
        """dQ += dS K in global memory, of which a consumer adds its part; ds is of all consumers,
        [block_k, block_q]."""
        rows = self.cut(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self.cut(self.tiles.width, self.tiles.dq_column_parts)
        more = self.tiles.block_q // ROWS  # products

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            begin_more()
            return tile.finished(dq_acc, running=more)

        dq = tile.products(product, (rows.size, columns.size))
        rows = pl.ds(block.first_row + rows.start, rows.size)
        tile.add_out(
            dq,
            self.memory.dq.at[self.number],
            self.dq_gmem.at[self.batch, rows, block.head, columns],
        )
