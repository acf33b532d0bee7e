"""The primitives of the Blackwell kernels: values in registers, tensor memory, roles of warps."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.blackwell.tile_sizes import HALVES, ROWS
from pallas_flash.kernels.mosaic.registers import Layouts

NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread holds a row
LAYOUTS = Layouts(tile=NATIVE, row=NATIVE.reduce(1), column=NATIVE.reduce(0))
# whose stores to shared memory meet no bank conflicts
EPILOGUE = Layouts(
    tile=plgpu.Layout.TCGEN05,
    row=plgpu.Layout.TCGEN05.reduce(1),
    column=plgpu.Layout.TCGEN05.reduce(0),
)


def rows(value: float):
    """A float32 value of each row of a warpgroup, the same for all."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), LAYOUTS.row)


# Tensor memory


def scores_and_weights(columns: int, dtype):
    """S in float32 and, over it, P in 16 bits, in halves of its columns."""
    half = plgpu.TMEM((ROWS, columns // HALVES), dtype, packed=True)
    return plgpu.RefUnion(plgpu.TMEM((ROWS, columns), jnp.float32), (half,) * HALVES)


def await_loads():
    """Waits, as a warp by itself, for its loads from tensor memory."""

    @plgpu.inline_mgpu()
    def tcgen05_wait_ld(_):  # a name that jax's interpreter knows
        mgpu.utils.inline_ptx("tcgen05.wait::ld.sync.aligned;")

    tcgen05_wait_ld()


def await_stores():
    """Waits, as a warp by itself, for its stores to tensor memory."""

    @plgpu.inline_mgpu()
    def tcgen05_wait_st(_):  # a name that jax's interpreter knows
        mgpu.utils.inline_ptx("tcgen05.wait::st.sync.aligned;")

    tcgen05_wait_st()


# Roles


def warps(*tasks: Callable[[], None]) -> Callable:
    """What a warpgroup runs whose warps have a task each; those without one end."""

    def run(_):
        @plgpu.warp_map
        def _(warp):
            for number, task in enumerate(tasks):
                pl.when(warp == number)(task)

    return run
