"""The second of two consumers that own the same queries, where o of more than 256 columns would not
fit into the registers of one: the first computes S and P once, and each O += P V for half of the
columns."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.hopper import tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, Tiles
from pallas_flash.kernels.mosaic import elements, tma
from pallas_flash.kernels.mosaic.launch import shared_matrix
from pallas_flash.kernels.mosaic.registers import per_row
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import online_softmax, schedule


class Handed(NamedTuple):
    """What the first consumer leaves in shared memory."""

    p: Any  # [64, block_k], in the dtype of V
    by_row: Any  # [64], alpha; after the last block l

    @classmethod
    def allocate(cls, p: Problem, t: Tiles) -> "Handed":
        # V's swizzle: the product wants no other
        swizzle = elements.swizzle_of_rows(p.dtype, t.block_k, t.swizzle)
        probabilities = shared_matrix(p.dtype, ROWS, t.block_k, swizzle=swizzle)
        return cls(probabilities, plgpu.SMEM((ROWS,), jnp.float32))


def attend(consumer):
    """Attends as `consumer`, a forward_consumer.Consumer, does, and leaves the output in the shared
    memory of q."""
    c, handoff = consumer, consumer.handoff
    blocks = c.program.blocks_in_order(c.program.work_tile(0))
    by_row = lambda: plgpu.load(handoff.slots.by_row, layout=tile.LAYOUTS.row)

    def step(t, o):
        c.v.wait(t)
        handoff.wait()
        o = o * per_row(by_row(), o.shape)
        (o,) = tile.accumulate(lambda o: tile.dot_subtiles(o, handoff.slots.p, c.values(t)), o)
        handoff.release()
        c.v.release(t)
        return o

    handoff.release()
    o = schedule.loop(blocks.first, blocks.last, step, tile.zeros(ROWS, c.columns.size))
    handoff.wait()
    o = online_softmax.finish(o, by_row(), c.program.problem.kept)
    smem = c.memory.q.at[c.slot(0), :, c.columns]  # the first multiplies by q no more
    smem[...] = o.astype(smem.dtype)
    tma.fence()  # the first copies it out
    handoff.release()
