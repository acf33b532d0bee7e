"""A consumer that owns queries, of dQ and of forward mode."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, Tiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.mask import TileMask
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule


def visited(x, work: scheduler.WorkTile, p: Problem, t: Tiles) -> schedule.Blocks:
    """The blocks of keys that a program visits, the last one first; x: the kernel's Inputs."""
    return block_info.descend(x.blocks, block_info.visited(x, work, p, t))


class QueryConsumer(NamedTuple):
    """A warpgroup that computes for 64 queries of its program's tile."""

    problem: Problem
    tiles: Tiles
    x: Any  # the kernel's Inputs
    memory: Any  # its Memory
    k: sync.TmaRing
    v: sync.TmaRing
    work: scheduler.WorkTile
    wg: IntLike

    def blocks(self) -> schedule.Blocks:
        return visited(self.x, self.work, self.problem, self.tiles)

    def by_row(self, first_row: IntLike) -> tuple:
        """The index of 64 queries in arrays [B, N, rows]."""
        return self.work.batch, self.work.head, pl.ds(first_row, ROWS)

    def load_logits(self, first_row: IntLike) -> tuple[logits.Logits, TileMask]:
        """The logits of the program's head, and the mask of 64 queries."""
        batch, head = self.work.batch, self.work.head
        of_head = logits.for_head(self.problem, tile.LAYOUTS, self.x.logits, batch, head)
        return of_head, of_head.load_mask(batch, first_row, ROWS)
