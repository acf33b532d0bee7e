"""The support module gpu_interpreter: stores over the end of a row, reductions, deadlocks. That a
missing wait is a race, and a wait is none, test_kernels.py shows."""

import contextlib

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import flash_attention
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.hopper import tangent, tile
from pallas_flash.kernels.mosaic import registers, tma

pytestmark = gpu_interpreter.needs_interpreter

M = 64


@pytest.mark.parametrize("length, leaves_its_row", [(M, False), (2 * M, False), (M + 8, True)])
def test_a_vector_that_is_stored_over_the_end_of_its_row_is_an_error(length, leaves_its_row):
    """On a GPU it goes to the start of the next row."""

    def kernel(out_gmem, smem):
        smem[...] = tile.rows(1.0)
        for row in range(2):
            for first in range(0, length, M):
                tma.copy_out((smem, out_gmem.at[row, pl.ds(registers.opaque(first), M)]))

    refused = (
        pytest.raises(jax.errors.JaxRuntimeError, match="next row")
        if leaves_its_row
        else contextlib.nullcontext()
    )
    with refused, gpu_interpreter.parameters() as (interpret, _):
        out = plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((2, length), jnp.float32),
            scratch_types=[plgpu.SMEM((M,), jnp.float32)],
            interpret=interpret,
        )()
        np.testing.assert_array_equal(out, 1)


def test_reductions_add_up_in_any_order_and_stop_at_the_end_of_the_array(rng):
    parts = jnp.asarray(rng.integers(-9, 9, (3, M, M)), jnp.float32)

    def kernel(parts_gmem, total_gmem, smem, full):
        plgpu.copy_gmem_to_smem(parts_gmem.at[jax.lax.axis_index("part")], smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(
            smem, total_gmem.at[pl.ds(registers.opaque(M // 2), M)], reduction_op="add"
        )
        plgpu.wait_smem_to_gmem(0)

    with gpu_interpreter.parameters(detect_races=True) as (interpret, races):
        call = plgpu.kernel(
            kernel,
            scratch_types=[plgpu.SMEM((M, M), jnp.float32), plgpu.Barrier()],
            grid=(3,),
            grid_names=("part",),
            num_threads=1,
            thread_name="warpgroup",
            interpret=interpret,
        )
        total = jax.jit(lambda parts: pl.run_state(lambda ref: call(parts, ref))(jnp.ones((M, M))))(
            parts
        )
        total.block_until_ready()
    expected = np.ones((M, M), np.float32)
    expected[M // 2 :] += np.asarray(parts).sum(0)[: M // 2]
    np.testing.assert_array_equal(total, expected)
    assert not races.found


def test_waiting_in_vain_is_an_error(rng, monkeypatch):
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 0.5)

    def kernel(out_gmem, out_smem, barrier):
        plgpu.barrier_wait(barrier)

    with (
        pytest.raises(Exception, match="nothing arrived at a barrier"),
        gpu_interpreter.parameters() as (interpret, _),
    ):
        call = plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((M,), jnp.float32),
            scratch_types=[plgpu.SMEM((M,), jnp.float32), plgpu.Barrier()],
            num_threads=2,
            thread_name="warpgroup",
            interpret=interpret,
        )
        jax.jit(call)().block_until_ready()


def test_a_gradient_does_not_trace_the_kernel_of_forward_mode(monkeypatch):
    monkeypatch.delattr(tangent, "tangent")
    x = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    with gpu_interpreter.hopper_kernels():
        total = lambda q: flash_attention(q, x, x, implementation="hopper").sum()
        jax.make_jaxpr(jax.grad(total))(x)
        with pytest.raises(AttributeError):
            jax.jit(lambda q: jax.jvp(total, [q], [q])).lower(x)


@pytest.mark.parametrize("capability", [9.0, 8.0])
def test_on_a_gpu_the_kernels_run_for_real_or_the_test_is_skipped(capability, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(hardware, "compute_capability", lambda: capability)
    no_hopper = (
        pytest.raises(pytest.skip.Exception, match="a CPU alone")
        if capability < 9
        else contextlib.nullcontext()
    )
    with no_hopper, gpu_interpreter.hopper_kernels(detect_races=True):
        assert capability == 9.0 and hardware.interpret is None
