"""The shared memory of a program that owns a tile of rows and walks over blocks of others."""

import functools
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mma.tile_sizes import Tiles
from pallas_flash.kernels.mosaic.launch import shared_matrix
from pallas_flash.problem.arguments import Problem


class Memory(NamedTuple):
    """The matrices, and with TMA their mbarriers."""

    owned: tuple  # each [rows, width]
    ring: tuple  # each [stages, rows, width]
    owned_full: Any
    ring_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: Tiles, owned=None, ring=None) -> "Memory":
        """Two matrices of the owned tile and two of each block, q and do, or k and v; or others, of
        these widths."""
        matrix = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        rows, ring_rows = (t.block_k, t.block_q) if t.owns_keys else (t.block_q, t.block_k)
        owned, ring = owned or (t.width, t.value_width), ring or (t.width, t.value_width)
        full = lambda widths, n: (
            plgpu.Barrier(num_arrivals=len(widths), num_barriers=n) if t.tma else None
        )
        return cls(
            tuple(matrix(rows, width) for width in owned),
            tuple(matrix(t.stages, ring_rows, width) for width in ring),
            full(owned, 1),
            full(ring, t.stages),
        )
