"""The words that the Hopper kernels are written in: values in registers, what rows see, copies, products, the launch.

A program is a few warpgroups: one loads blocks by TMA (the producer), the others compute (the consumers). Sections 3 and 4 of
FlashAttention-3 (arXiv:2407.08608) say why.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.hopper.tuning import ROWS, Tiles
from pallas_flash.masks import Ints, Visibility

interpret: Any = None  # tests put the parameters of jax's GPU interpreter here

TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


# Values in registers


def zeros(*shape: int):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def rows(value: float):
    """The same float32 for each row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)


def count(size: int, layout):
    """0 to size - 1 as int32."""
    return plgpu.layout_cast(lax.iota(jnp.int32, size), layout)


def across(row, shape):
    """A value of each row, repeated along it; what all rows share stays as it is."""
    return lax.broadcast_in_dim(row, shape, [0]) if jnp.ndim(row) else row


def down(column, shape):
    """A value of each column, repeated along it."""
    return lax.broadcast_in_dim(column, shape, [1])


def load(ref, layout):
    """A vector from global memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


class View(NamedTuple):
    """What a consumer's 64 rows see."""

    visibility: Visibility  # its data by row are in registers, those by key are refs
    batch: Ints
    start: Ints  # [64]
    stop: Ints

    def sees(self, j: Ints, shape):
        """Whether each row sees each key of block j, [64, keys]."""
        size, v = shape[1], self.visibility
        ids = ()
        if v.query_ids is not None:
            key_ids = load(v.key_ids.at[self.batch, pl.ds(j * size, size)], COLUMN)
            ids = across(v.query_ids, shape), down(key_ids, shape)
        return v.sees(across(self.start, shape), across(self.stop, shape), down(j * size + count(size, COLUMN), shape), *ids)


def view(visibility: Visibility, batch: Ints, first_row: Ints) -> View:
    """The view of the 64 rows from `first_row` on."""
    at = visibility.narrow(("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, pl.ds(first_row, ROWS)], ROW))
    # A row number that nothing reads would be in the way of Mosaic's layout inference.
    row = 0 if at.start is not None else first_row + count(ROWS, ROW)
    return View(at, batch, *at.interval(row))


# Copies


def columns(width: int):
    """The first `width` columns of a global array that may have fewer: TMA reads zeros there, and writes nothing."""
    return pl.ds(pl.multiple_of(opaque(0), 64), width)


def copy_in(source, smem, barrier):
    """From global to shared memory, and waits."""
    plgpu.copy_gmem_to_smem(source, smem, barrier)
    plgpu.barrier_wait(barrier)


def copy_out(*pairs):
    """From shared to global memory, what was just written there, and waits."""
    plgpu.commit_smem()
    for smem, target in pairs:
        plgpu.copy_smem_to_gmem(smem, target)
    plgpu.wait_smem_to_gmem(0)


def opaque(n: Ints):
    """n, unknown to the compiler: it would unroll a long loop of loads, for which the producer has no registers."""
    return lax.optimization_barrier(jnp.asarray(n, jnp.int32))


# Products


def dot_t(acc, a, b):
    """acc += a b^T, begun only."""
    plgpu.wgmma(acc, a, b.transpose((1, 0)))


def dot(acc, a, b):
    """acc += a b, begun only."""
    plgpu.wgmma(acc, a, b)


def finished(acc, running: int = 0):
    """What acc holds, once no more than the last `running` products are still running."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=running)


def product(begin, shape):
    """The product that begin(acc) begins."""

    def body(acc):
        begin(acc)
        return finished(acc)

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def product_add(begin, o):
    """o + the product that begin(acc) begins."""

    def body(acc):
        begin(acc)

    return pl.run_state(body)(plgpu.ACC.init(o))


def overlap(body, o, scores_shape, m, l):
    """o', p, alpha, m', l': body(o_acc, s_acc) adds to o_acc, which holds o, and returns the others.

    What it computes runs under the products it has begun, and these have ended when this returns.
    """

    def stateful(refs):
        o_acc, s_acc, *results = refs
        for ref, value in zip(results, lax.optimization_barrier(body(o_acc, s_acc)), strict=True):
            ref[...] = value

    accumulators = plgpu.ACC.init(o), plgpu.ACC.init(zeros(*scores_shape))
    o, _, *results = pl.run_state(stateful)((*accumulators, zeros(*scores_shape), rows(1.0), m, l))
    return o, *results


# Launch


class Scratch(NamedTuple):
    """The shared memory of a program."""

    q: Any  # [warpgroups, 64, the larger width], of the output in the end
    k: Any  # [stages, block_k, width]
    v: Any  # [stages, block_k, value_width]
    lse: Any  # [warpgroups, 64]
    q_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def of(cls, t: Tiles, dtype) -> "Scratch":
        swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        block = lambda *shape: plgpu.SMEM(shape, dtype, transforms=swizzled)
        barriers = lambda n: plgpu.Barrier(num_barriers=n)
        return cls(
            q=block(t.warpgroups, ROWS, max(t.width, t.value_width)),
            k=block(t.stages, t.block_k, t.width),
            v=block(t.stages, t.block_k, t.value_width),
            lse=plgpu.SMEM((t.warpgroups, ROWS), jnp.float32),
            q_full=barriers(t.warpgroups),
            k_full=barriers(t.stages),
            v_full=barriers(t.stages),
        )


def by_role(tiles: Tiles, consume, produce):
    """consume(number) in each consumer and produce() in the producer, which gives its registers to the others."""
    number = lax.axis_index("warpgroup")
    few, many = (24, 240) if tiles.warpgroups == 2 else (32, 160)

    @pl.when(number < tiles.warpgroups)
    def _():
        plgpu.set_max_registers(many, action="increase")
        consume(number)

    @pl.when(number == tiles.warpgroups)
    def _():
        plgpu.set_max_registers(few, action="decrease")
        produce()


def launch(kernel, args, *, programs: int, out_type, tiles: Tiles, scratch: Scratch, name: str):
    """kernel(program, args, *outputs, scratch) for each program, where `args` is a pytree and its leaves come as refs."""
    leaves, tree = jax.tree.flatten(args)
    devices = jax.typeof(leaves[0]).manual_axis_type  # over which axes of a mesh the operands vary, and so the results
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=devices) for x in out_type]

    def entry(*refs):
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]
        body = functools.partial(kernel, lax.axis_index("program"), inputs, *outputs)
        pl.run_scoped(lambda *memory: body(Scratch(*memory)), *scratch, collective_axes="warpgroup")

    entry.__name__ = name
    return plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the kernels have their own, where they are needed
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*leaves)
