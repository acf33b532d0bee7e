"""Slots of shared memory that one warp fills by TMA, and the warp of the products releases."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import tma


class Ring(NamedTuple):
    """The slots of `count` blocks, by the position t of a block."""

    slots: Any  # a tuple of arrays [stages, ...]
    full: Any  # mbarriers [stages]
    free: Any
    stages: int
    count: IntLike

    def block(self, t: IntLike) -> tuple:
        """The arrays of block t."""
        return tuple(array.at[tma.slot(t, self.stages)] for array in self.slots)

    def fill(self, t: IntLike, *sources):
        """Begins the copy of block t, once its slot is free."""
        at = tma.slot(t, self.stages)
        pl.when(t >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[at]))
        for source, array in zip(sources, self.slots, strict=True):
            plgpu.copy_gmem_to_smem(source, array.at[at], self.full.at[at])

    def wait(self, t: IntLike):
        """Waits until block t is there."""
        plgpu.barrier_wait(self.full.at[tma.slot(t, self.stages)])

    def release(self, t: IntLike):
        """Lets TMA overwrite block t when all products begun so far have ended. Nobody waits for
        the slots of the last blocks."""
        commit = lambda: plgpu.tcgen05_commit_arrive(self.free.at[tma.slot(t, self.stages)])
        pl.when(t + self.stages < self.count)(commit)
