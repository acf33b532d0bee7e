"""A consumer that owns keys: P and dS of a block of queries, for the products that sum dK and dV,
and in the end these sums."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import ROWS, GradientTiles
from pallas_flash.kernels.mosaic import scheduler, tma
from pallas_flash.kernels.mosaic.query_block import QueryBlock
from pallas_flash.kernels.mosaic.registers import ScoreTile
from pallas_flash.problem.arguments import Problem


class Do(NamedTuple):
    """dO, lse and delta of queries: arrays, or their slots."""

    do: Any
    lse: Any
    delta: Any


class Consumer(NamedTuple):
    """A warpgroup that computes P and dS of all keys and half of the queries of each block; in the
    end one has dV, the other dK."""

    problem: Problem
    tiles: GradientTiles
    memory: Any  # backward_dkv.Memory
    tensor: Any  # backward_dkv.TensorMemory
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
        dp_tmem, (p_tmem, ds_tmem) = self.tensor.gradients
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
            self.probabilities(block, piece, place, lse.at[of_piece], masked)
            for piece, place, of_piece in zip(s, places, rows, strict=True)
        ]
        # whose commit follows dV and dK of the block before: that P and dS have been read
        plgpu.barrier_wait(m.dp_full)
        dp = tile.load_columns(dp_tmem, queries, size)
        if self.tiles.p_over_dp:
            plgpu.barrier_arrive(m.dp_loaded)
            plgpu.barrier_wait(m.dp_loaded)
        tile.store(p_tmem, queries.start, [p for p, *_ in weights])
        plgpu.barrier_arrive(m.p_full)
        ds = [
            block.logits.gradient(
                weight, back, piece, block.per_query(delta.at[of_piece], piece.shape)
            )
            for (_, weight, back), piece, of_piece in zip(weights, dp, rows, strict=True)
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
        """The epilogue: the sum leaves by way of the shared memory of k or v."""
        m, t, work = self.memory, self.tiles, self.work
        smem, gmem, width, factor = (
            (m.k, dk_gmem, t.width, self.problem.scale)
            if self.number
            else (m.v, dv_gmem, t.value_width, 1.0)
        )
        plgpu.barrier_wait(m.done)
        tile.write(smem, self.sum, range(0, width, tile.SWIZZLED_COLUMNS), factor)
        rows = pl.ds(work.tile * ROWS, ROWS)
        tma.copy_out((smem, tma.head_rows(gmem, work.batch, rows, work.kv_head, width)))
