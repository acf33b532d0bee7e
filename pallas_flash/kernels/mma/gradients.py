"""What the kernels of gradients by mma read, and the shared memory of their programs."""

import functools
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.padded_rows import PaddedRows
from pallas_flash.kernels.mma.tuning import Tiles
from pallas_flash.kernels.mosaic.gradients import Inputs

inputs = functools.partial(Inputs.make, PaddedRows.make)


class Memory(NamedTuple):
    """The shared memory of a program, and with TMA its mbarriers: the two matrices of the tile that
    it owns, and those of the blocks that pass by."""

    owned: tuple  # each [rows, width]
    ring: tuple  # each [stages, rows, width]
    owned_full: Any
    ring_full: Any

    @classmethod
    def allocate(cls, t: Tiles, dtype) -> "Memory":
        block = functools.partial(tile.block, dtype, swizzle=t.swizzle)
        owned, passing = (t.block_k, t.block_q) if t.owns_keys else (t.block_q, t.block_k)
        widths = t.width, t.value_width
        return cls(
            owned=tuple(block(owned, width) for width in widths),
            ring=tuple(block(t.stages, passing, width) for width in widths),
            owned_full=plgpu.Barrier(num_arrivals=2) if t.tma else None,
            ring_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages) if t.tma else None,
        )
