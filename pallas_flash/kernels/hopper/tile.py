"""The words that the Hopper kernels are written in: values in registers, copies, products, the
launch.

A program is a few warpgroups: one loads blocks by TMA (the producer), the others compute (the
consumers). Sections 3 and 4 of FlashAttention-3 (arXiv:2407.08608) say why.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.kernels import device
from pallas_flash.kernels.hopper import ends, sync
from pallas_flash.kernels.hopper.tuning import ROWS, stored, stored_rows
from pallas_flash.pytrees import IntLike

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
    """A value of each column, repeated along it; what all columns share stays as it is."""
    return lax.broadcast_in_dim(column, shape, [1]) if jnp.ndim(column) else column


def rescaled(o, alpha):
    """o [64, n] times alpha [64], at most 1, of each row; each warp multiplies only if one of its
    rows asks for it."""

    @plgpu.inline_mgpu(
        arg_types=(ROW,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def some_below_one(_, alpha):  # a name that the interpreter in tests/ knows
        i32 = mgpu.utils.ir.IntegerType.get_signless(32)
        rows = [mgpu.utils.bitcast(x, i32) for x in alpha.registers.flat]
        compare = "".join(
            f"setp.lt.or.f32 p, ${i}, 0f3F800000, p; " for i in range(1, 1 + len(rows))
        )
        vote = (
            f"{{ .reg .pred p; setp.ne.u32 p, 0, 0; {compare}vote.sync.any.pred p, p, -1; "
            f"selp.s32 $0, 1, 0, p; }}"
        )
        some = mgpu.utils.inline_ptx(vote, *rows, result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(some, (), is_signed=True)

    return lax.cond(some_below_one(alpha) > 0, lambda: o * across(alpha, o.shape), lambda: o)


def load(ref, layout):
    """A vector or a tile from global memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


# Copies


def feed(x, at, walk: schedule.Walk, k: sync.Ring, v: sync.Ring, tiles, used: IntLike = 0):
    """The producer's: fills the rings with the blocks of keys, and of values in `parts`, that a
    program visits."""
    count, read = sync.opaque(walk.blocks.last), ends.reader(x.last, at.batch, tiles.block_k)

    def load(t, _):
        def fill(first, k_gmem, v_gmem):
            rows = lambda x, start, size, width: rows_of(
                x, at.batch, pl.ds(first + start, size), at.kv_head, width
            )
            k.fill(t, rows(k_gmem, 0, tiles.block_k, tiles.width), used)
            v.fill(
                t,
                tuple(
                    rows(v_gmem, part.start, part.size, tiles.value_width)
                    for part in parts(tiles.block_k)
                ),
                used,
            )

        read(walk.number(t), fill, x.k, x.v)

    schedule.loop(sync.opaque(0), count, load, None)
    return jnp.maximum(used, count)


def block(dtype, *shape: int, swizzle: int = 128):
    """Shared memory for matrices in the order that TMA, wgmma and the registers' stores meet
    without bank conflicts."""
    row = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(swizzle))
    )


def parts(rows: int) -> list[pl.Slice]:
    """A block's rows as Mosaic's products sum over them: whole 64, and the 16 or 32 that are left,
    in a narrower swizzle."""
    whole = rows // ROWS * ROWS
    return [part for part in (pl.ds(0, whole), pl.ds(whole, rows - whole)) if part.size]


def block_in_parts(dtype, stages: int, rows: int, width: int, swizzle: int):
    """`block`s of 16 bits for `stages` x rows x width, one for each of the `parts` of the rows."""
    return tuple(
        block(dtype, stages, part.size, width, swizzle=min(2 * part.size, swizzle))
        for part in parts(rows)
    )


def rows_of(array, batch, rows: pl.Slice, head, width: int):
    """Rows of a head, of a global array [B, length, heads, n]: `width` columns, of which TMA reads
    those from n on as zeros and writes nothing there."""
    whole = array.shape[3] == width
    # jax 0.12 refuses to know that it hangs over
    columns = pl.ds(0 if whole else pl.multiple_of(sync.opaque(0), ROWS), width)
    return array.at[batch, rows, head, columns]


def copy_out(*pairs):
    """From shared to global memory, what was just written there, and waits until it has left: a
    program may end then."""
    plgpu.commit_smem()
    for smem, target in pairs:
        plgpu.copy_smem_to_gmem(smem, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def add_out(x, smem, target):
    """Adds x to global memory by way of `smem`, in whatever order; begun only."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was begun before has left smem
    smem[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, target, reduction_op="add")


def padded(x, swizzle: int):
    """[B, length, heads, size] with zeros up to what TMA's tiles divide."""
    more = (
        (0, stored_rows(x.shape[1]) - x.shape[1]),
        (0, 0),
        (0, stored(x.shape[3], swizzle) - x.shape[3]),
    )
    return jnp.pad(x, ((0, 0), *more)) if any(high for _, high in more) else x


# Products


def dot_t(acc, a, b):
    """acc += a b^T, begun only."""
    plgpu.wgmma(acc, a, b.transpose((1, 0)))


def dot(acc, a, b):
    """acc += a b, begun only."""
    plgpu.wgmma(acc, a, b)


def dot_in_parts(acc, a, b):
    """acc += a b, begun only, a product for each of the `parts` of b's rows."""
    for part, rows in zip(parts(a.shape[1]), b, strict=True):
        dot(acc, a[:, part.start : part.start + part.size], rows)


def finished(acc, running: int = 0):
    """What acc holds, once no more than the last `running` products are still running."""
    return plgpu.wgmma_accumulator_load(acc, wait_n=running)


def wait(running: int):
    """Until no more than the last `running` products are still running."""
    plgpu.wgmma_wait(running)


def products(body, *shapes):
    """body(accumulator, ...) with an accumulator of zeros for each shape."""
    return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def product(begin, shape, running: int = 0):
    """The product that begin(acc) begins, before `running` others that go on."""

    def body(acc):
        begin(acc)
        return finished(acc, running)

    return products(body, shape)


def products_add(begin, *sums):
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


# Launch


def by_role(tiles, consume, produce):
    """consume(number) in each consumer and produce() in the producer, which gives its registers to
    several others."""
    number = lax.axis_index("warpgroup")
    few, many = (24, 240) if tiles.warpgroups == 2 else (32, 160)
    several = tiles.warpgroups > 1  # one has 255 from the start

    @pl.when(number < tiles.warpgroups)
    def _():
        if several:
            plgpu.set_max_registers(many, action="increase")
        consume(number)

    @pl.when(number == tiles.warpgroups)
    def _():
        if several:
            plgpu.set_max_registers(few, action="decrease")
        produce()


def launch(kernel, args, *, programs: int, out_type, tiles, scratch, name: str):
    """kernel(program, args, *outputs, scratch) for each program, where `args` is a pytree and its
    leaves come as refs.

    An array in `out_type` is what the output holds before the programs add to it.
    """
    leaves, tree = jax.tree.flatten(args)
    memory, memory_tree = jax.tree.flatten(scratch)
    is_type = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    adds = not all(map(is_type, out_type))

    def entry(*refs):
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]
        body = functools.partial(kernel, lax.axis_index("program"), inputs, *outputs)
        pl.run_scoped(
            lambda *memory: body(jax.tree.unflatten(memory_tree, memory)),
            *memory,
            collective_axes="warpgroup",
        )

    entry.__name__ = name
    call = plgpu.kernel(
        entry,
        out_type=() if adds else out_type,
        grid=(programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        interpret=device.interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # a row is in the registers of a quarter of a warp
            unsafe_no_auto_barriers=True,  # the kernels have their own, where they are needed
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    if adds:
        before = tuple(lax.empty(x.shape, x.dtype) if is_type(x) else x for x in out_type)
        adding = lambda *arrays: pl.run_state(lambda refs: call(*arrays[len(before) :], *refs))(
            arrays[: len(before)]
        )
        # jax cannot batch run_state
        results = jax.custom_batching.sequential_vmap(adding)(*before, *leaves)
    else:
        results = call(*leaves)
    # Inside of shard_map the results vary over the axes of the mesh that the operands vary over,
    # which the call does not see.
    axes = tuple(jax.typeof(leaves[0]).manual_axis_type.varying)
    return [lax.pcast(x, axes, to="varying") for x in results] if axes else results
