"""How the warpgroups of a Hopper kernel wait for each other: named barriers, turns with the tensor cores, rings of TMA slots.

Slots are released on named barriers: unlike an mbarrier's, their arrive does not make ptxas wait for the products in flight.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.kernels.hopper.tuning import Tiles
from pallas_flash.masks import Ints

WARPGROUP = 128  # threads


def named_barrier(operation: str, barrier: Ints, num_threads: int):
    # jax's GPU interpreter knows an inline function by this name and by the names that it closes over.
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def bar_op(_, barrier_id):
        mgpu.utils.inline_ptx(f"bar.{operation} $0, {num_threads};", barrier_id.registers[()])

    bar_op(jnp.asarray(barrier, jnp.int32))


class Numbers(NamedTuple):
    """The numbers of the named barriers. Mosaic keeps 0, and one more for each warpgroup."""

    tiles: Tiles

    @property
    def turns(self) -> int:
        return self.tiles.warpgroups + 2

    @property
    def keys(self) -> int:
        return self.turns + self.tiles.warpgroups

    @property
    def values(self) -> int:
        return self.keys + self.tiles.stages


class Turns(NamedTuple):
    """Consumers take turns with the tensor cores: while one's products run, the others compute their softmax."""

    first: int  # named barrier of the first consumer
    warpgroups: int
    own: Ints

    def open(self):
        """The last consumer gives the first its first turn."""
        pl.when(self.own == self.warpgroups - 1)(self.pass_on)

    def take(self):
        named_barrier("sync", self.first + self.own, 2 * WARPGROUP)

    def pass_on(self):
        own = lax.optimization_barrier(self.own)  # computed each time: there is no register to keep it in
        named_barrier("arrive", self.first + jnp.where(own < self.warpgroups - 1, own + 1, 0), 2 * WARPGROUP)

    def close(self):
        """The first takes the turn that the last has passed on in the end."""
        pl.when(self.own == 0)(self.take)


class Ring(NamedTuple):
    """Slots of shared memory that the producer fills with blocks; all consumers read each block in order, and release it."""

    slots: Any  # [stages, keys, width]
    full: Any  # one mbarrier a slot
    released: int  # the first of a named barrier a slot
    consumers: int

    def _slot(self, t: Ints):
        unsigned = jnp.asarray(t, jnp.uint32)  # the remainder of a signed number takes more instructions
        return lax.rem(unsigned, jnp.uint32(self.slots.shape[0])).astype(jnp.int32)

    def _release_barrier(self, operation, t):
        named_barrier(operation, self.released + self._slot(t), (self.consumers + 1) * WARPGROUP)

    def block(self, t: Ints):
        return self.slots.at[self._slot(t)]

    def wait(self, t: Ints):
        plgpu.barrier_wait(self.full.at[self._slot(t)])

    def release(self, t: Ints):
        self._release_barrier("arrive", t)

    def fill(self, t: Ints, source, first: Ints):
        """The producer's: block t, from `source`, once its slot has been released; `first` is the first block of all."""
        pl.when(t - first >= self.slots.shape[0])(lambda: self._release_barrier("sync", t))
        plgpu.copy_gmem_to_smem(source, self.block(t), self.full.at[self._slot(t)])

    def drain(self, first: Ints, last: Ints):
        """The producer's: meets the releases that no block waits for."""
        schedule.loop(jnp.maximum(first, last - self.slots.shape[0]), last, lambda t, _: self._release_barrier("sync", t), None)
