"""The forward of FlashAttention-4 (arXiv:2603.05451): two tiles of 128 queries a program, whose
softmaxes run under each other's products; S, P and O lie in tensor memory.

Warpgroups 0 and 1 have the softmax of a tile each. Warpgroup 2 corrects O, and of warpgroup 3 one
warp begins the products, and one loads (forward_roles.py).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.ampere import forward as mma
from pallas_flash.kernels.blackwell import forward_roles, tile
from pallas_flash.kernels.blackwell.tile_sizes import ROWS, AllTiles, ForwardTiles
from pallas_flash.kernels.mosaic import (
    block_info,
    logits,
    scheduler,
    statistics,
    tma,
)
from pallas_flash.kernels.mosaic.launch import Role, launch, shared_matrix, specialize
from pallas_flash.kernels.mosaic.registers import opaque
from pallas_flash.kernels.mosaic.tma import RaggedRows
from pallas_flash.problem.arguments import Operands, Problem

# Rows for head sizes, with as many stages as shared memory holds. A step, both tiles by 128 keys,
# takes a B200 8 clocks of products for each column of width and value_width, 2064 of exponentials
# (16 a clock) and some 1170 of instructions. Where exponentials bind, 8 columns of 32 are
# polynomials: 1552 of exponentials, 1474 of instructions.
TILES = (
    ForwardTiles(64, 64, stages=4, value_stages=4, exp2_columns=8),
    ForwardTiles(64, 128, stages=3, value_stages=3, exp2_columns=8),
    ForwardTiles(128, 64, stages=3, value_stages=3, exp2_columns=8),
    ForwardTiles(128, 128),
    ForwardTiles(192, 128, value_stages=1),
)


class ForwardInputs(NamedTuple):
    """The kernel's arrays, of sizes that TMA can take, and what the mask comes to."""

    q: jax.Array  # [B, T, N, H]
    keys: RaggedRows  # k [B, S, K, H], v [B, S, K, Hv]
    blocks: jax.Array | block_info.VisitedBlocks | None  # of block_info.by_query_tile
    sinks: jax.Array | None  # [N], less what the logits omit
    logits: logits.Arrays


class ForwardMemory(NamedTuple):
    """The shared memory and mbarriers of a program."""

    q: Any  # [row_tiles, 128, the larger width], of the output in the end
    k: Any  # [stages, 128, width]
    v: Any  # [value_stages, 128, value_width]
    alpha: Any  # [row_tiles, 128]
    l: Any
    # for each tile of queries or slot: who arrives -> who waits
    q_full: Any  # loads -> products
    k_full: Any
    v_full: Any
    k_free: Any  # products -> loads
    v_free: Any
    s_full: Any  # products -> softmax
    alpha_full: Any  # softmax -> correction
    p_full: tuple  # for each part of P: softmax, and at the first the correction -> products
    p_read: Any  # products -> products
    o_full: Any  # products, and the softmax as to l -> correction, in the end

    @classmethod
    def allocate(cls, p: Problem, t: ForwardTiles) -> "ForwardMemory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        barriers, ordered = tile.barriers, tile.ordered_barriers
        n = t.row_tiles
        by_row = plgpu.SMEM((n, ROWS), jnp.float32)
        return cls(
            q=block(n, ROWS, max(t.width, t.value_width)),
            k=block(t.stages, t.block_k, t.width),
            v=block(t.value_stages, t.block_k, t.value_width),
            alpha=by_row,
            l=by_row,
            q_full=barriers(n),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
            k_free=ordered(t.stages),
            v_free=ordered(t.value_stages),
            s_full=ordered(n),
            alpha_full=ordered(n),
            p_full=(ordered(n, arrivals=2), ordered(n)),
            p_read=ordered(n),
            o_full=ordered(n, arrivals=2),
        )


class TensorMemory(NamedTuple):
    """The tensor memory of a program, for each of its tiles of queries."""

    scores: tuple  # S, float32 [128, 128], and the parts of P, of 64 columns each
    o: tuple  # float32 [128, value_width]

    @classmethod
    def allocate(cls, p: Problem, t: ForwardTiles) -> "TensorMemory":
        scores = plgpu.TMEM((ROWS, ROWS), jnp.float32), tile.p_in_parts(p.dtype)
        if t.p_over_s:
            scores = plgpu.RefUnion(*scores)
        o = plgpu.TMEM((ROWS, t.value_width), jnp.float32)
        return cls((scores,) * t.row_tiles, (o,) * t.row_tiles)

    def s(self, i: int):
        s, _ = self.scores[i]
        return s

    def p(self, i: int) -> tuple:
        _, parts = self.scores[i]
        return parts


def forward(problem: Problem, tiles: AllTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    logits are in base e."""
    if tiles.forward is None:
        return mma.forward(problem, tiles.by_mma, x)
    p, t = problem, tiles.forward
    _, key_lengths = x.resolved_mask.lengths
    inputs = ForwardInputs(
        tma.pad(x.query, t.swizzle),
        tma.padded_rows([x.key, x.value], t.block_k, key_lengths, t.swizzle),
        block_info.by_query_tile(p, x.resolved_mask, x.mask, t.block_q, t.block_k),
        statistics.sinks(p, x),
        logits.arrays(p, x, t.tiling),
    )
    o_type = jax.ShapeDtypeStruct(
        (*inputs.q.shape[:3], inputs.keys.arrays[1].shape[3]), x.query.dtype
    )
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[o_type, *jax.tree.leaves(statistics.types(p, t.block_q))],
        warpgroups=t.row_tiles + 2,
        scratch=(ForwardMemory.allocate(p, t), TensorMemory.allocate(p, t)),
        name="flash_attention_forward",
    )
    return o[:, : p.queries, :, : p.value_size], statistics.results(p, stats)


def _kernel(number, x: ForwardInputs, o_gmem, *outputs, problem: Problem, tiles: ForwardTiles):
    *stats_gmem, (memory, tensor) = outputs
    p, t = problem, tiles
    work = scheduler.query_tile(number, p, t.block_q, t.row_bytes(p.dtype))
    blocks = block_info.visited(x, work, p, t)
    count = opaque(blocks.last) - blocks.first
    program = forward_roles.Program(
        p, t, x, o_gmem, stats_gmem, memory, tensor, work, blocks, count
    )
    softmax = lambda i: lambda _: forward_roles.Softmax.of_tile(program, i).run()
    specialize(
        *(Role(softmax(i), registers=192) for i in range(t.row_tiles)),
        Role(lambda _: forward_roles.Correction(program).run(), registers=88),
        Role(
            tile.warps(
                lambda: forward_roles.Products(program).run(),
                lambda: forward_roles.produce(program),
            ),
            registers=40,
        ),
    )
