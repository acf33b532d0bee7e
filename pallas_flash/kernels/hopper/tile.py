"""The primitives of the Hopper kernels: values in registers, copies, products, roles.

A program is a few warpgroups: one loads blocks by TMA (the producer), the others compute (the
consumers). Sections 3 and 4 of FlashAttention-3 (arXiv:2407.08608) say why.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync
from pallas_flash.kernels.hopper.tile_sizes import ROWS, QueryTiles
from pallas_flash.kernels.mosaic import block_info, elements, launch, logits, scheduler, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.launch import Role
from pallas_flash.kernels.mosaic.registers import (
    Layouts,
    opaque,
    per_row,
    some_below_one,
)
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

WGMMA = plgpu.Layout.WGMMA
LAYOUTS = Layouts(tile=WGMMA, row=WGMMA.reduce(1), column=WGMMA.reduce(0))


# Values in registers


def zeros(*shape: int):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUTS.tile)


def rows(value: float):
    """A float32 value of each row of a warpgroup, the same for all."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUTS.row)


def rescale(o, alpha):
    """o [64, n] times alpha [64], at most 1, of each row; each warp multiplies only if one of its
    rows asks for it."""
    return lax.cond(
        some_below_one(alpha, LAYOUTS.row) > 0, lambda: o * per_row(alpha, o.shape), lambda: o
    )


def as_float32(x):
    """A tile of 16 bits in float32: bfloat16 by integer operations on pairs of numbers, since for a
    conversion ptxas would hold both halves of each pair in registers from when x is computed."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(LAYOUTS.tile,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUTS.tile),
    )
    def shift_into_float32(_, x):  # a name that the interpreter knows
        i32, f32 = mgpu.utils.ir.IntegerType.get_signless(32), mgpu.utils.ir.F32Type.get()
        pair = mgpu.utils.ir.VectorType.get((2,), f32)

        def shift(two):
            halves = mgpu.utils.inline_ptx(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
                mgpu.utils.bitcast(two, i32),
                result_types=[f32, f32],
            )
            return mgpu.utils.vector.from_elements(pair, halves)

        registers = np.vectorize(shift, otypes=[object])(x.registers)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return shift_into_float32(x)


# Copies


def load_kv(
    x, work, blocks: schedule.Blocks, k: sync.TmaRing, v: sync.TmaRing, tiles, used: IntLike = 0
):
    """Fills the rings, as the producer, with the blocks of keys, and of values in `k_subtiles`,
    that a program visits. Returns how many slots have then been used, of which `used` were
    before."""
    count = opaque(blocks.last)
    read = x.keys.reader(work.batch, tiles.block_k)

    def load(t, _):
        def fill(first, k_gmem, v_gmem):
            def rows(arrays, start, size, width):
                rows = pl.ds(first + start, size)
                head_rows = lambda x: tma.head_rows(x, work.batch, rows, work.kv_head, width)
                return jax.tree.map(head_rows, arrays)

            k.fill(t, rows(k_gmem, 0, tiles.block_k, tiles.width), used)
            subtiles = tuple(
                rows(v_gmem, subtile.start, subtile.size, tiles.value_width)
                for subtile in k_subtiles(jax.tree.leaves(v_gmem)[0].dtype, tiles.block_k)
            )
            v.fill(t, subtiles, used)

        read(blocks.index(t), fill)

    schedule.loop(opaque(0), count, load, None)
    return jnp.maximum(used, count)


def k_subtiles(dtype, rows: int) -> list[pl.Slice]:
    """The slices of a block's rows that Mosaic's products sum over: as many as the widest tile has
    columns or a multiple, and the few that are left, in a narrower swizzle."""
    columns = elements.columns(dtype, elements.SWIZZLES[0])
    whole = rows // columns * columns
    return [x for x in (pl.ds(0, whole), pl.ds(whole, rows - whole)) if x.size]


def subtile_blocks(dtype, stages: int, rows: int, width: int, swizzle: int):
    """Matrices in shared memory for `stages` x rows x width, one for each of the `k_subtiles`."""
    swizzle_of = lambda rows: elements.swizzle_of_rows(dtype, rows, swizzle)
    return tuple(
        launch.shared_matrix(dtype, stages, x.size, width, swizzle=swizzle_of(x.size))
        for x in k_subtiles(dtype, rows)
    )


def add_out(x, smem, target):
    """Adds x to global memory by way of `smem`, in whatever order, asynchronously. A copy takes all
    of `smem`: columns beyond x hang over the end of the array."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy before has left smem
    columns = smem if x.shape == smem.shape else smem.at[:, : x.shape[1]]
    columns[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, target, reduction_op="add")


# Products


def dot_t(acc, a, b):
    """acc += a b^T, asynchronously."""
    plgpu.wgmma(acc, a, b.transpose((1, 0)))


def dot(acc, a, b):
    """acc += a b, asynchronously."""
    plgpu.wgmma(acc, a, b)


def dot_subtiles(acc, a, b):
    """acc += a b, asynchronously, a product for each of the `k_subtiles` of b's rows; a in
    registers or, with one of them, in shared memory."""
    for x, rows in zip(k_subtiles(a.dtype, a.shape[1]), b, strict=True):
        dot(acc, a if x.size == a.shape[1] else a[:, x.start : x.start + x.size], rows)


def await_sum(acc, running: int = 0):
    """The sum in acc, once no more than the last `running` products are still running."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=running)


def with_accumulators(body, *shapes):
    """Returns body(accumulator, ...), with an accumulator of zeros for each shape."""
    return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def product(begin, shape, running: int = 0):
    """The product that begin(acc) begins; `running` later ones go on."""

    def body(acc):
        begin(acc)
        return await_sum(acc, running)

    return with_accumulators(body, shape)


def accumulate(begin, *sums):
    """The sums, each plus the products that begin(accumulator, ...) begins."""

    def body(accumulators):
        begin(*accumulators)

    return pl.run_state(body)(tuple(map(plgpu.ACC.init, sums)))


def overlap(body, sums, like):
    """The sums and values like `like`, from body(*accumulators), which begins to add to the sums
    and returns the values.

    What it computes runs under the products it has begun, and these have ended when this returns.
    """

    def stateful(refs):
        values = body(*refs[: len(sums)])
        for ref, value in zip(
            refs[len(sums) :], lax.optimization_barrier(tuple(values)), strict=True
        ):
            ref[...] = value

    return pl.run_state(stateful)((*map(plgpu.ACC.init, sums), *like))


# Consumers that own queries


def visited(x, work: scheduler.WorkTile, p: Problem, t: QueryTiles) -> schedule.Blocks:
    """The blocks of keys that a program visits, the last one first; x: the kernel's Inputs."""
    return block_info.descend(x.blocks, block_info.visited(x, work, p, t))


class QueryConsumer(NamedTuple):
    """A warpgroup that computes for 64 queries of its program's tile, in the kernels of dQ and of
    forward mode."""

    problem: Problem
    tiles: QueryTiles
    x: Any  # the kernel's Inputs
    memory: Any  # its Memory
    k: sync.TmaRing
    v: sync.TmaRing
    work: scheduler.WorkTile
    wg: IntLike

    def blocks(self) -> schedule.Blocks:
        return visited(self.x, self.work, self.problem, self.tiles)

    def by_row(self, first_row: IntLike) -> tuple:
        """The index of 64 queries in arrays [B, N, rows]."""
        return self.work.batch, self.work.head, pl.ds(first_row, ROWS)

    def load_logits(self, first_row: IntLike) -> tuple[logits.Logits, TileMask]:
        """The logits of the program's head, and the mask of 64 queries."""
        batch, head = self.work.batch, self.work.head
        head_logits = logits.for_head(self.problem, LAYOUTS, self.x.logits, batch, head)
        return head_logits, head_logits.load_mask(batch, first_row, ROWS)


# Roles


def specialize(tiles, consume, produce):
    """Runs consume(wg) in each consumer warpgroup and produce() in the producer, which gives its
    registers to several others; one has as many as there are from the start."""
    many, few = {1: (None, None), 2: (240, 24), 3: (160, 32)}[tiles.warpgroups]
    launch.specialize(
        Role(consume, tiles.warpgroups, many), Role(lambda _: produce(), registers=few)
    )
