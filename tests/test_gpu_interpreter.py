"""The support module gpu_interpreter: accumulators, operands in registers, named barriers; races
where a wait is missing."""

import contextlib

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import device
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.mosaic import registers

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)

M = 64
BLOCKS = 4
OMIT = ["nothing", "the wait for the release", "the wait for the product"]


def copy_in(source, smem, barrier):
    plgpu.copy_gmem_to_smem(source, smem, barrier)
    plgpu.barrier_wait(barrier)


def sum_of_products(interpret, a, b, omit="nothing"):
    """sum_i 2 a b[i] for a [M, M] and b [BLOCKS, M, M]: a producer fills one slot of shared memory,
    a consumer multiplies."""

    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, a_full, b_full):
        @pl.when(jax.lax.axis_index("warpgroup") == 1)
        def _():
            for i in range(BLOCKS):
                if i and omit != "the wait for the release":
                    sync.named_barrier("sync", 3, 2 * sync.WARPGROUP)
                plgpu.copy_gmem_to_smem(b_gmem.at[i], b_smem, b_full)

        @pl.when(jax.lax.axis_index("warpgroup") == 0)
        def _():
            copy_in(a_gmem, a_smem, a_full)
            a = a_smem[...]

            def add(i, total):
                plgpu.barrier_wait(b_full)

                def body(refs):
                    acc, twice = refs
                    tile.dot(acc, a, b_smem)
                    if omit == "the wait for the product":
                        sync.named_barrier("arrive", 3, 2 * sync.WARPGROUP)
                    twice[...] = 2 * tile.await_sum(acc)

                _, twice = pl.run_state(body)((plgpu.ACC.init(tile.zeros(M, M)), tile.zeros(M, M)))
                if omit != "the wait for the product":
                    pl.when(i < BLOCKS - 1)(
                        lambda: sync.named_barrier("arrive", 3, 2 * sync.WARPGROUP)
                    )
                return total + twice

            out_smem[...] = jax.lax.fori_loop(0, BLOCKS, add, tile.zeros(M, M))
            tile.copy_out((out_smem, out_gmem))

    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    square = plgpu.SMEM((M, M), jnp.bfloat16, transforms=swizzled)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, M), jnp.float32),
        scratch_types=[
            square,
            square,
            plgpu.SMEM((M, M), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
    )(a, b)


@pytest.mark.parametrize("length, leaves_its_row", [(M, False), (2 * M, False), (M + 8, True)])
def test_a_vector_that_is_stored_over_the_end_of_its_row_is_an_error(length, leaves_its_row):
    """On a GPU it goes to the start of the next row."""

    def kernel(out_gmem, smem):
        smem[...] = tile.rows(1.0)
        for row in range(2):
            for first in range(0, length, M):
                tile.copy_out((smem, out_gmem.at[row, pl.ds(registers.opaque(first), M)]))

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


@pytest.mark.parametrize("omit", OMIT)
def test_a_missing_wait_is_a_race_and_a_full_set_of_waits_is_none(omit, rng, monkeypatch):
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 20.0)
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((M, M), (BLOCKS, M, M)))
    # without a wait the interpreter may also give up: nobody has seen that a block was there
    may_fail = contextlib.suppress(*[jax.errors.JaxRuntimeError] * (omit != "nothing"))
    with may_fail, gpu_interpreter.parameters(detect_races=True) as (interpret, races):
        out = jax.jit(lambda a, b: sum_of_products(interpret, a, b, omit))(a, b)
        out.block_until_ready()
    assert races.found == (omit != "nothing")
    if omit == "nothing":
        wide = lambda x: np.asarray(x, np.float32)
        np.testing.assert_allclose(out, 2 * wide(a) @ wide(b).sum(0), rtol=1e-2, atol=1e-2)


def test_reductions_add_up_in_any_order_and_stop_at_the_end_of_the_array(rng):
    parts = jnp.asarray(rng.integers(-9, 9, (3, M, M)), jnp.float32)

    def kernel(parts_gmem, total_gmem, smem, full):
        copy_in(parts_gmem.at[jax.lax.axis_index("part")], smem, full)
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


@pytest.mark.parametrize("capability", [9.0, 8.0])
def test_on_a_gpu_the_kernels_run_for_real_or_the_test_is_skipped(capability, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    no_hopper = (
        pytest.raises(pytest.skip.Exception, match="a CPU alone")
        if capability < 9
        else contextlib.nullcontext()
    )
    with no_hopper, gpu_interpreter.hopper_kernels(detect_races=True):
        assert capability == 9.0 and device.interpret is None
