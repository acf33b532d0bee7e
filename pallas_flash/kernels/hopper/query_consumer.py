"""A consumer that owns queries, of dQ and of forward mode."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, Tiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.mask import TileMask
from pallas_flash.kernels.mosaic.registers import opaque
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

    @property
    def row_tile(self) -> IntLike:
        """Which of the program's tiles of 64 queries the consumer owns."""
        return opaque(0) if self.tiles.split else self.wg

    @property
    def first_row(self) -> IntLike:
        return self.work.tile * self.tiles.block_q + self.row_tile * ROWS

    @property
    def by_row(self) -> tuple:
        """The index of the consumer's queries in arrays [B, N, rows]."""
        return self.work.batch, self.work.head, pl.ds(self.first_row, ROWS)

    def blocks(self) -> schedule.Blocks:
        return visited(self.x, self.work, self.problem, self.tiles)

    def logits_and_mask(self) -> tuple[logits.Logits, TileMask]:
        batch, head = self.work.batch, self.work.head
        of_head = logits.for_head(self.problem, tile.LAYOUTS, self.x.logits, batch, head)
        return of_head, of_head.load_mask(batch, self.first_row, ROWS)
