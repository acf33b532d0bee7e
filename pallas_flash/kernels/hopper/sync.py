"""How the warpgroups of a Hopper kernel wait for each other: named barriers, ping-pong on the
tensor cores, rings of TMA slots.

Slots are released on named barriers: unlike an mbarrier's, their arrive does not make ptxas wait
for the products in flight.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import tma
from pallas_flash.kernels.mosaic.launch import named_barrier
from pallas_flash.kernels.mosaic.registers import opaque
from pallas_flash.tiled import schedule


class BarrierIds(NamedTuple):
    """The named barriers of a kernel: the first id of each kind. Mosaic keeps 0, and one more for
    each warpgroup."""

    consumers: int  # as many as there are consumers, of ping-pong, or those of `order` or `handoff`
    first_ring: int  # one for each slot
    second_ring: int
    single: int  # one for each consumer
    dq_free: int

    @classmethod
    def make(cls, t) -> "BarrierIds":
        """The ids in a kernel with tiles t."""
        reserved = t.warpgroups + 2
        return cls(
            *itertools.accumulate((reserved, t.warpgroups, t.stages, t.stages, t.warpgroups))
        )

    @property
    def order(self) -> int:
        return self.consumers + 1

    @property
    def handoff(self) -> tuple[int, int]:
        return self.consumers, self.order

    @property
    def dq_filled(self) -> int:
        return self.single


def consumer_barrier(barrier: int, warpgroups: int):
    """Waits for all consumers; TMA and wgmma may then read what they wrote to shared memory."""
    tma.fence()
    named_barrier("sync", barrier, warpgroups)


class PingPong(NamedTuple):
    """Consumers take turns with the tensor cores: while one's products run, the others compute
    their softmax. One alone waits for nobody."""

    first: int  # named barrier of the first consumer
    single: int  # the same, for its own warps
    warpgroups: int
    wg: IntLike

    def start(self):
        """Gives the first consumer its first turn, as the last one."""
        pl.when(self.wg == self.warpgroups - 1)(self.yield_turn)

    def acquire(self):
        if self.warpgroups > 1:
            named_barrier("sync", self.first + self.wg, 2)

    def yield_turn(self):
        if self.warpgroups == 1:
            return
        # computed each time: there is no register to keep it in
        wg = lax.optimization_barrier(self.wg)
        after = jnp.where(wg < self.warpgroups - 1, wg + 1, 0)
        named_barrier("arrive", self.first + after, 2)

    def sync_self(self):
        """Waits for the consumer's own warps."""
        named_barrier("sync", self.single + self.wg, 1)

    def finish(self):
        """Takes the turn that the last consumer has yielded in the end, as the first one."""
        pl.when(self.wg == 0)(self.acquire)


class Handoff(NamedTuple):
    """Shared memory in which a consumer leaves arrays for another one, again and again."""

    slots: Any  # a NamedTuple of arrays
    filled: int  # named barriers
    free: int

    def put(self, **values):
        """Leaves arrays for the other one, once it has released what was there."""
        self.wait_for_release()
        for name, x in values.items():
            getattr(self.slots, name)[...] = x
        tma.fence()
        named_barrier("arrive", self.filled, 2)

    def wait_for_release(self):
        named_barrier("sync", self.free, 2)

    def wait(self):
        """Waits, as the other one, until the arrays are there."""
        named_barrier("sync", self.filled, 2)

    def release(self):
        """Lets the first one `put`, as the other one."""
        named_barrier("arrive", self.free, 2)


class TmaRing(NamedTuple):
    """Slots of shared memory that the producer fills with blocks; all consumers read each block in
    order, and release it."""

    slots: Any  # [stages, ...], or a pytree of such arrays
    full: Any  # one mbarrier a slot, for each of the arrays
    released: int  # the first of a named barrier a slot
    consumers: int

    @property
    def stages(self) -> int:
        return jax.tree.leaves(self.slots)[0].shape[0]

    def _slot(self, t: IntLike):
        return opaque(0) if self.stages == 1 else tma.slot(t, self.stages)

    def _release_barrier(self, operation, t):
        named_barrier(operation, self.released + self._slot(t), self.consumers + 1)

    def block(self, t: IntLike):
        return jax.tree.map(lambda slots: slots.at[self._slot(t)], self.slots)

    def wait(self, t: IntLike, array: str | None = None):
        """Waits until block t is there, of a named array if there are several."""
        full = self.full if array is None else getattr(self.full, array)
        plgpu.barrier_wait(jax.tree.leaves(full)[0].at[self._slot(t)])

    def release(self, t: IntLike):
        self._release_barrier("arrive", t)

    def fill(self, t: IntLike, source, used: IntLike = 0):
        """Begins to copy block t, counted from 0, from `source`, as the producer, once its slot has
        been released; at least `used` slots have been used before block 0."""
        pl.when((t >= self.stages) | (t < used))(lambda: self._release_barrier("sync", t))
        slot = self._slot(t)
        copy = lambda slots, full, x: plgpu.copy_gmem_to_smem(x, slots.at[slot], full.at[slot])
        jax.tree.map(copy, self.slots, self.full, source)

    def drain(self, count: IntLike):
        """Waits, as the producer, for the releases of `count` blocks that no later block waits
        for."""
        schedule.loop(
            jnp.maximum(0, count - self.stages),
            count,
            lambda t, _: self._release_barrier("sync", t),
            None,
        )
