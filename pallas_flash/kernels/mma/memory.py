"""The shared memory of a program that owns a tile of rows and walks over blocks of others, and the
cheapest tiles that it holds."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support import gpus
from pallas_flash.kernels.mma.tile_sizes import Gpu, Tiles, swizzle_of, widths
from pallas_flash.kernels.mosaic.elements import cheapest
from pallas_flash.kernels.mosaic.launch import shared_bytes, shared_matrix
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


def cheapest_that_fits(
    table: Iterable[Tiles],
    p: Problem,
    gpu: Gpu,
    scratch: Callable,
    programs: int = 1,
    beside: int = 0,
) -> Tiles | None:
    """The cheapest row that holds the problem's heads, as narrow as they are, and whose scratch(p,
    row) a multiprocessor's shared memory holds for so many programs, with as many bytes `beside`
    it."""
    width, value_width = widths(p)

    def narrow(row: Tiles) -> Tiles:
        slices = width // row.warpgroups, value_width // row.warpgroups
        swizzle = min(swizzle_of(p.dtype, slices, min(row.block_q, row.block_k)), row.swizzle)
        return row._replace(width=width, value_width=value_width, swizzle=swizzle, tma=gpu.has_tma)

    has_room = lambda row: fits(shared_bytes(scratch(p, row)) + beside, gpu, programs)
    return cheapest(table, p, has_room, narrow)


def fits(size: int, gpu: Gpu, programs: int = 1) -> bool:
    """Whether a multiprocessor's shared memory holds so many programs of this size: it has
    gpus.RESERVED bytes more than one of them can have."""
    return programs * (size + gpus.RESERVED) <= gpu.shared_memory + gpus.RESERVED
