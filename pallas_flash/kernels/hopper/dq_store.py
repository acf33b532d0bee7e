"""dQ added to global memory by the producer, while the consumers go on."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync
from pallas_flash.kernels.hopper.tile_sizes import ROWS, KeyTiles


class Dq(NamedTuple):
    """The array that a consumer hands over."""

    dq: Any  # its share of a block, [64, a slice of the columns] float32


class Rows(NamedTuple):
    """The rows and the head to which a block's dQ is added."""

    first: IntLike
    head: IntLike


class DqStore(NamedTuple):
    """Shared memory in which each consumer leaves its share of a block's dQ, and from which the
    producer adds it, before the block's slots are filled again."""

    tiles: KeyTiles
    smem: Any  # [warpgroups, 64, a slice of the columns]
    gmem: Any
    batch: IntLike

    def handoff(self, wg: IntLike) -> sync.Handoff:
        ids = sync.BarrierIds(self.tiles.warpgroups, self.tiles.stages)
        return sync.Handoff(Dq(self.smem.at[wg]), ids.dq_filled + wg, ids.dq_free + wg)

    def start(self) -> tuple[Rows, ...]:
        """The blocks whose dQ is to be added, the oldest first: at first none of these."""
        self._release()
        return (Rows(jnp.int32(0), jnp.int32(0)),) * self.tiles.stages

    def add_under(self, load: Callable, blocks: tuple[Rows, ...], exists: IntLike):
        """Adds the dQ of the oldest block, if it exists, under what `load` does."""
        pl.when(exists)(functools.partial(self._begin, blocks[0]))
        load()
        pl.when(exists)(self._release)

    def drain(self, blocks: tuple[Rows, ...], count: IntLike):
        """Adds the dQ of the last of `count` blocks."""
        for n in range(len(blocks)):
            self.add_under(lambda: None, blocks[n:], count >= len(blocks) - n)

    def _begin(self, block: Rows):
        size = self.tiles.width // self.tiles.dq_column_slices
        for wg in range(self.tiles.warpgroups):
            self.handoff(wg).wait()
            row, column = (wg * ROWS, 0) if self.tiles.block_q > ROWS else (0, wg * size)
            rows = pl.ds(pl.multiple_of(block.first + row, ROWS), ROWS)
            target = self.gmem.at[self.batch, rows, block.head, pl.ds(column, size)]
            plgpu.copy_smem_to_gmem(self.smem.at[wg], target, reduction_op="add")

    def _release(self):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for wg in range(self.tiles.warpgroups):
            self.handoff(wg).release()
