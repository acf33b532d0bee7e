"""The softmax of the forward: the 128 queries of a tile, of which each thread has one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.blackwell.tile_sizes import HALVES, ROWS
from pallas_flash.kernels.mosaic import logits, statistics
from pallas_flash.kernels.mosaic.mask import TileMask
from pallas_flash.kernels.mosaic.registers import ScoreTile
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.online_softmax import SoftmaxState


class Softmax(NamedTuple):
    """The warpgroup that makes P of S for one tile of queries."""

    program: Any  # forward_roles.Program
    i: int  # which tile
    logits: logits.Logits
    mask: TileMask

    @classmethod
    def of_tile(cls, program, i: int) -> "Softmax":
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
        pieces, (_, p_tmem) = self.pieces(n), self.program.tensor.s_and_p[self.i]
        s, scale = self.scores(pieces, masked)  # [128, columns] each
        stats, alpha = online_softmax.raise_maximum(
            jnp.concatenate(s, axis=1), stats, log_base, scale, t.rescale_threshold
        )
        # The correction has read the alpha before: it did so before P V, and S, for which this
        # warpgroup has waited since, was begun after that.
        m.alpha[self.i] = alpha
        plgpu.barrier_arrive(m.alpha_full.at[self.i])
        exp2 = functools.partial(tile.exp2_of_tile, columns=t.exp2_columns)
        count = len(pieces) // HALVES
        for half in range(HALVES):
            p = []
            for at, x in list(zip(pieces, s, strict=True))[half * count :][:count]:
                x, stats = online_softmax.weights(x, stats, log_base, scale, exp2)
                p.append(self.logits.drop(x, at).astype(self.program.problem.dtype))
            tile.store(p_tmem[half], 0, p)
            plgpu.barrier_arrive(m.p_full[half].at[self.i])
        return stats

    def pieces(self, n: IntLike) -> list[ScoreTile]:
        """The pieces of the tile's scores that are computed one after the other."""
        t, program = self.program.tiles, self.program
        first_key = program.blocks.index(n) * t.block_k
        whole = self.logits.tile(program.first_row(self.i), first_key, (ROWS, t.block_k))
        return whole.split(t.columns)

    def scores(self, pieces: list[ScoreTile], masked: bool):
        """The logits of each piece, once S is there, and a factor that they omit."""
        program, (s_tmem, _) = self.program, self.program.tensor.s_and_p[self.i]
        plgpu.barrier_wait(program.memory.s_full.at[self.i])
        loaded = tile.load(s_tmem, pl.ds(0, ROWS), program.tiles.columns)
        s, scales = zip(*map(self.logits.modify, loaded, pieces), strict=True)
        if masked:
            s = [self.mask.select(at)(x, -jnp.inf) for x, at in zip(s, pieces, strict=True)]
        return s, scales[0]
