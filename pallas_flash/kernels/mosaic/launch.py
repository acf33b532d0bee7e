"""A kernel over a one-dimensional grid of programs, the shared memory of a program, as arrays and
mbarriers, and the roles of its warpgroups (warp specialization)."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support import hardware
from pallas_flash.jax_support.jax_internals import traced_lines, unvarying
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.elements import TILE_ROWS, columns, round_up

# how Mosaic lowers values: whole tiles whose layouts it infers, or the registers of each lane in
# the layouts that the kernel names
WARPGROUP, LANE = plgpu.LoweringSemantics.Warpgroup, plgpu.LoweringSemantics.Lane


@traced_lines()
def launch(
    kernel,
    args,
    *,
    programs: int,
    out_type,
    warpgroups: int,
    scratch,
    name: str,
    semantics=WARPGROUP,
    reduction_scratch: int = 0,
):
    """kernel(program, args, *outputs, scratch) for each program, where `args` is a pytree and its
    leaves come as refs. `reduction_scratch`: bytes of shared memory in which warps reduce what lies
    in the registers of several of them.

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
    axes = tuple(jax.typeof(leaves[0]).manual_axis_type.varying)
    leaves = unvarying(leaves) if axes else leaves
    call = plgpu.kernel(
        entry,
        out_type=() if adds else out_type,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        interpret=hardware.interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # none for a row, which is in the registers of a quarter of a warp
            reduction_scratch_bytes=reduction_scratch,
            unsafe_no_auto_barriers=True,  # the kernels have their own, where they are needed
            lowering_semantics=semantics,
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
    return [lax.pcast(x, axes, to="varying") for x in results] if axes else results


# ---- shared memory ----

_ALIGNMENT, _MBARRIER = 1024, 8  # bytes: where Mosaic lets an array begin, and of one mbarrier


def shared_matrix(dtype, *shape: int, swizzle: int):
    """An array of matrices, in the order in which copies, products and stores from registers meet
    without bank conflicts."""
    tiling = plgpu.TilingTransform((TILE_ROWS, columns(dtype, swizzle)))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def barriers(count: int, arrivals: int = 1) -> plgpu.Barrier:
    """mbarriers of TMA, or of values in registers and shared memory."""
    return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)


def shared_bytes(scratch) -> int:
    """Bytes that a pytree of arrays and mbarriers takes."""
    return sum(map(_size, jax.tree.leaves(scratch)))


def _size(x) -> int:
    if isinstance(x, plgpu.Barrier):
        return _MBARRIER * math.prod(x.num_barriers)
    return round_up(math.prod(x.shape) * np.dtype(x.dtype).itemsize, _ALIGNMENT)


# ---- roles of warpgroups ----

REGISTERS = 512  # of a processor, for one thread of each warpgroup


def named_barrier(operation: str, barrier: IntLike, warpgroups: int):
    """Waits ("sync") or only arrives ("arrive") at a named barrier of so many warpgroups."""
    num_threads = 128 * warpgroups

    # jax's GPU interpreter knows an inline function by this name and by the names that it closes
    # over.
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def bar_op(_, barrier_id):
        mgpu.utils.inline_ptx(f"bar.{operation} $0, {num_threads};", barrier_id.registers[()])

    bar_op(jnp.asarray(barrier, jnp.int32))


class Role(NamedTuple):
    """A task of neighbouring warpgroups."""

    run: Callable[[IntLike], None]  # in each, by its number in the program
    warpgroups: int = 1
    registers: int | None = None  # of each thread; None: as many as it starts with


def specialize(*roles: Role):
    """Runs all roles of a program, each in warpgroups of its own, in this order."""
    number, first = lax.axis_index("warpgroup"), 0
    at_start = REGISTERS // sum(role.warpgroups for role in roles)
    for role in roles:
        end = first + role.warpgroups
        inside = (number >= first) & (number < end) if first else number < end
        pl.when(inside)(functools.partial(_run, role, number, at_start))
        first = end


def _run(role: Role, number: IntLike, at_start: int):
    if role.registers is not None:
        action = "increase" if role.registers > at_start else "decrease"
        plgpu.set_max_registers(role.registers, action=action)
    role.run(number)
