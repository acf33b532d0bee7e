"""The shared memory of a program that owns a tile of rows and walks over blocks of others, and the
cheapest tiles that it holds. Matrices in global memory are padded so that kernels may copy whole
blocks of rows."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support import gpus
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.tile_sizes import Gpu, MmaTiles, padded_length, swizzle_of, widths
from pallas_flash.kernels.mosaic.elements import cheapest
from pallas_flash.kernels.mosaic.launch import shared_bytes, shared_matrix
from pallas_flash.kernels.mosaic.tma import RaggedRows, copy_tails
from pallas_flash.problem.arguments import Problem


class TileMemory(NamedTuple):
    """The matrices, and with TMA their mbarriers."""

    owned: tuple  # each [rows, width]
    ring: tuple  # each [stages, rows, width]
    owned_full: Any
    ring_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: MmaTiles, owned=None, ring=None) -> "TileMemory":
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
    table: Iterable[MmaTiles],
    p: Problem,
    gpu: Gpu,
    scratch: Callable,
    programs: int = 1,
    beside: int = 0,
) -> MmaTiles | None:
    """The cheapest row that holds the problem's heads, as narrow as they are, and whose scratch(p,
    row) a multiprocessor's shared memory holds for so many programs, with as many bytes `beside`
    it."""
    width, value_width = widths(p)

    def narrow(row: MmaTiles) -> MmaTiles:
        slices = width // row.warpgroups, value_width // row.warpgroups
        swizzle = min(swizzle_of(p.dtype, slices, min(row.block_q, row.block_k)), row.swizzle)
        return row._replace(width=width, value_width=value_width, swizzle=swizzle, tma=gpu.has_tma)

    has_room = lambda row: fits(shared_bytes(scratch(p, row)) + beside, gpu, programs)
    return cheapest(table, p, has_room, narrow)


def fits(size: int, gpu: Gpu, programs: int = 1) -> bool:
    """Whether a multiprocessor's shared memory holds so many programs of this size: it has
    gpus.RESERVED bytes more than one of them can have."""
    return programs * (size + gpus.RESERVED) <= gpu.shared_memory + gpus.RESERVED


class PaddedRows(RaggedRows):
    """Arrays [B, length, heads * width]. cp.async cannot stop where an array ends: a block that
    hangs over is read from a copy with zeros behind the end."""

    @classmethod
    def make(cls, arrays, widths, size: int, lengths: jax.Array | None) -> "PaddedRows":
        """Pads arrays [B, length, heads, n] with zeros to these widths, for blocks of `size` rows,
        of which the kernel reads `lengths` in each batch row, int32 [B], or all."""
        B, length = arrays[0].shape[:2]
        if lengths is None and length % size and length > size:
            lengths = jnp.full((B,), length, jnp.int32)
        rows = max(length, size)  # at least one block
        arrays = [pad(x, rows, width) for x, width in zip(arrays, widths, strict=True)]
        tails = copy_tails(lengths, size, *arrays)
        if tails is not None:
            tails = tails._replace(arrays=tuple(map(flat, tails.arrays)))
        return cls(tuple(map(flat, arrays)), tails)

    @property
    def dtype(self):
        return self.arrays[0].dtype

    def copy(self, block: IntLike, batch: IntLike, head: IntLike, slots, full):
        """Begins to copy a block of rows of a head to each slot; `full` as in tile.copy."""
        size = slots[0].shape[0]

        def copy(first, *arrays):
            for x, slot in zip(arrays, slots, strict=True):
                width = slot.shape[1]
                tile.copy(x.at[batch, pl.ds(first, size), pl.ds(head * width, width)], slot, full)

        self.reader(batch, size)(block, copy)

    def loader(self, ring: tile.CopyRing, batch: IntLike, head: IntLike, blocks, position=None):
        """A function load(t) that begins to copy the t-th of a head's `blocks`, if there is one, to
        the ring, where it is the position(t)-th, by default the t-th."""

        def load(t):
            n = t if position is None else position(t)
            copy = lambda: self.copy(blocks.index(t), batch, head, ring.at(n), ring.full_at(n))
            pl.when(t < blocks.last)(copy)

        return load


def pad(x: jax.Array, rows: int, width: int) -> jax.Array:
    """Pads [B, length, heads, n] with zeros to so many rows, or the next number that TMA takes, and
    to this width."""
    rows = padded_length(rows)
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, width - x.shape[3])))


def flat(x: jax.Array) -> jax.Array:
    """Reshapes [B, length, heads, width] to [B, length, heads * width]: cp.async takes no axis
    between rows and columns."""
    return x.reshape(*x.shape[:2], -1)
