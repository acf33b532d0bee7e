"""What the kernels of gradients by mma read, and the shared memory of their programs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.padded_rows import PaddedRows
from pallas_flash.kernels.mma.tuning import Tiles
from pallas_flash.kernels.mosaic import block_info, logits


class Inputs(NamedTuple):
    """The arrays of a kernel, and what the mask comes to for rows, tiles and blocks."""

    queries: PaddedRows  # q, do
    keys: PaddedRows  # k, v
    # [B, N, whole tiles of T]: in the problem's log base, less what the logits omit; +inf: P = 0
    lse: jax.Array
    delta: jax.Array  # the same shape
    # of block_info.by_query_tile, or by_key_tile
    blocks: jax.Array | block_info.BlockLists | None
    logits: logits.Arrays

    @classmethod
    def make(cls, p: Problem, t: Tiles, blocks, x: Operands, lse, do, delta) -> "Inputs":
        more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
        widths, (query_lengths, key_lengths) = (t.width, t.value_width), x.resolved_mask.lengths
        return cls(
            PaddedRows.make([x.query, do], widths, t.block_q, query_lengths),
            PaddedRows.make([x.key, x.value], widths, t.block_k, key_lengths),
            jnp.pad(lse - logits.soft_cap_constant(p), more, constant_values=jnp.inf),
            jnp.pad(delta, more),
            blocks,
            logits.arrays(p, x, t.tiling),
        )


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
