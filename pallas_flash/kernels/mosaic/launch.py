"""A kernel over a one-dimensional grid of programs."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support import hardware
from pallas_flash.jax_support.jax_internals import traced_lines

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
    leaves come as refs. `reduction_scratch`: of shared memory the bytes in which warps reduce what
    lies in the registers of several of them.

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
    axes = tuple(jax.typeof(leaves[0]).manual_axis_type.varying)
    return [lax.pcast(x, axes, to="varying") for x in results] if axes else results
