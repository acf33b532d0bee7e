"""The Triton kernels lower for NVIDIA GPUs on a machine without one, and put nothing of size T x
S into memory."""

import inspect
import math
import os
import pathlib
import re
import subprocess
import sys

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, broadcast_shape
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from selection import whole_but

from pallas_flash import accounting, flash_attention, masks, paged_attention, scores

Z = Sizes(B=2, T=300, S=333, N=4, K=2, H=64, Hv=64)
SLOPES = jnp.arange(Z.N, dtype=jnp.float32)
GPUS = {"sm_80": accounting.GPUS["A100-80GB"], "sm_90": accounting.GPUS["H200"]}
ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
floats = lambda letters: jax.ShapeDtypeStruct(broadcast_shape(letters, Z), jnp.bfloat16)
bools = lambda letters: jax.ShapeDtypeStruct(broadcast_shape(letters, Z), jnp.bool_)

CASES = {
    "full": (Z, {}),
    "causal, odd head sizes": (Z._replace(H=40, Hv=72), dict(is_causal=True)),
    "head size 256": (Z._replace(H=256, Hv=256), dict(is_causal=True)),
    "one query": (
        Z._replace(T=1),
        dict(query_offset=ints(2), is_causal=True, key_value_seq_lengths=ints(2)),
    ),
    "key lengths": (Z, dict(key_value_seq_lengths=ints(2))),
    "window and lengths": (
        Z,
        dict(
            local_window_size=(5, 3),
            query_offset=ints(2),
            key_value_seq_lengths=ints(2),
            query_seq_lengths=ints(2),
        ),
    ),
    "documents": (
        Z,
        dict(query_segment_ids=ints(2, Z.T), key_value_segment_ids=ints(2, Z.S), is_causal=True),
    ),
    "key bias, soft cap": (Z, dict(bias=floats("BN1S"), mask=bools("B11S"), logits_soft_cap=3.0)),
    "query bias": (Z, dict(bias=floats(".NT1"))),
    "sinks, dropout": (
        Z,
        dict(
            sinks=jax.ShapeDtypeStruct((Z.N,), jnp.float32),
            dropout_rate=0.1,
            dropout_rng=jax.ShapeDtypeStruct((2,), jnp.uint32),
            is_causal=True,
        ),
    ),
    "scalar bias": (Z, dict(bias=floats("1111"))),
    "a rule": (
        Z,
        dict(
            mask=masks.MaskMod(lambda b, h, q, k: ((q // 64 + k // 64 + h) % 3 > 0) | (k < 4)),
            is_causal=True,
        ),
    ),
    "a score": (
        Z,
        dict(score_mod=scores.T5Bias(np.zeros((Z.N, 32))), is_causal=True, query_offset=ints(2)),
    ),
    "one query, a score": (
        Z._replace(T=1),
        dict(score_mod=scores.T5Bias(np.zeros((Z.N, 32))), query_offset=ints(2)),
    ),
    "a score by head": (
        Z,
        dict(score_mod=lambda s, b, h, q, k: jnp.square(s) - jax.lax.stop_gradient(SLOPES[h])),
    ),
    "dense bias and mask": (Z, dict(bias=floats("1NTS"), mask=bools("B1TS"))),
}


def lower(gpu, z, kw, dtype, implementation="triton", debug_info=False):
    """The StableHLO of forward and backward for a GPU that is not there."""
    platform = (
        dict(platform="gpu") if "platform" in inspect.signature(AbstractDevice).parameters else {}
    )
    device = AbstractDevice(device_kind=GPUS[gpu].kind, num_cores=GPUS[gpu].cores, **platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    shapes = (z.B, z.T, z.N, z.H), (z.B, z.S, z.K, z.H), (z.B, z.S, z.K, z.Hv)
    arrays = {name: x for name, x in kw.items() if hasattr(x, "shape")}
    static = {name: x for name, x in kw.items() if name not in arrays}

    def gradients(q, k, v, arrays):
        def loss(q, k, v, bias):
            given = {**arrays, **static}
            o, lse = flash_attention(
                *(q, k, v, bias), implementation=implementation, return_residual=True, **given
            )
            return o.astype(jnp.float32).sum() + lse.sum()

        arrays = dict(arrays)
        return jax.grad(loss, argnums=(0, 1, 2) + (3,) * ("bias" in arrays))(
            q, k, v, arrays.pop("bias", None)
        )

    with jax.sharding.use_abstract_mesh(mesh):
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        lowered = jax.jit(gradients).trace(*args, arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text(debug_info=debug_info)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", whole_but(CASES, *(CASES.keys() - {"full", "key lengths", "query bias", "scalar bias"}))
)
def test_every_kernel_lowers_for_a_gpu_and_only_the_users_own_arrays_of_size_t_x_s_are_in_memory(
    gpu, dtype, name
):
    z, kw = CASES[name]
    # that of few queries
    text = lower(gpu, z, kw, dtype).replace("flash_attention_decode", "flash_attention_forward")
    kernels = set(re.findall(r"flash_attention_\w+", text))
    expected = {
        f"flash_attention_{name}"
        for name in (
            "forward",
            "dkv",
            "dq",
            *["dbias"] * ("bias" in kw),
            *["dtable"] * ("score_mod" in kw),
        )
    }
    assert expected <= kernels, f"{expected - kernels} of {kernels} are missing"
    size = lambda shape: math.prod(map(int, shape.split("x")))
    largest = max(size(shape) for shape in re.findall(r"tensor<((?:\d+x)*\d+)x\w+>", text))
    own = [math.prod(x.shape) for x in kw.values() if hasattr(x, "shape")]
    linear = max(z.B * z.N * max(z.T, z.S) * max(z.H, z.Hv), *own, 0)
    assert largest <= linear, (
        f"an array of {largest} elements; q, k, v and the user's own need {linear}"
    )


STANDARD = "scores", "softmax", "values", "dp", "softmax_backward", "dq", "dk", "dv"
FEW = "causal, odd head sizes", "head size 256", "one query", "documents", "dense bias and mask"
CLASSIC = {
    "standard": [f"standard_attention_{name}" for name in STANDARD],
    "flash1": ["flash1_attention_forward", "flash1_attention_backward"],
}


@pytest.mark.parametrize("implementation", CLASSIC)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", whole_but(FEW, "one query", "documents", "dense bias and mask"))
def test_the_earlier_algorithms_lower_for_a_gpu(implementation, dtype, name):
    z, kw = CASES[name]
    kw = {name: x for name, x in kw.items() if implementation == "standard" or name != "bias"}
    text = lower("sm_80", z, kw, dtype, implementation)
    missing = set(CLASSIC[implementation]) - set(re.findall(r"\w+_attention_\w+", text))
    assert not missing, f"{missing} are missing"


BACKWARD = {
    "triton": ("flash_attention_dkv", "triton/backward.py"),
    "flash1": ("flash1_attention_backward", "classic/flash1.py"),
    "hopper": ("flash_attention_dk_dv", "hopper/dkv_consumer.py"),
}


@pytest.mark.parametrize("implementation", BACKWARD)
def test_a_profile_says_which_call_a_backward_kernel_belongs_to_and_which_lines_it_runs(
    implementation,
):
    if implementation == "hopper" and gpu_interpreter.MISSING:
        pytest.skip(str(gpu_interpreter.MISSING))
    kernel, file = BACKWARD[implementation]
    text = lower("sm_90", Z, dict(is_causal=True), "bfloat16", implementation, debug_info=True)
    assert re.search(rf'"flash_attention causal T=300 S=333 H=64/[^"]*{kernel}/', text)
    code = re.sub(r"(?m)^#loc.*", "", text)
    assert file in code and "equation.py" not in code


def test_a_profile_names_a_paged_call_too():
    pages, rows = jnp.ones((3, 16, 1, 8)), jnp.ones((1, 1, 1, 8))
    table, lengths = jnp.array([[0, 2]]), jnp.array([20])
    text = jax.jit(paged_attention).lower(rows, pages, pages, table, lengths)
    assert '"flash_attention causal' in text.as_text(debug_info=True)


def test_a_user_meets_no_deprecation_warning_and_keeps_the_filters_of_warnings():
    code = """
import warnings
import jax, jax.experimental.pallas.triton, jax.numpy as jnp, pytest
before = [*warnings.filters]
from pallas_flash import flash_attention
from test_lowering import CASES, lower
lower("sm_90", *CASES["full"], "bfloat16")
flash_attention(*[jnp.ones((1, 8, 1, 16))] * 3, implementation="triton")
assert warnings.filters == before, warnings.filters
"""
    tests = pathlib.Path(__file__).parent
    paths = dict(cwd=tests, env={**os.environ, "PYTHONPATH": str(tests.parent)})
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        **paths,
    )
    assert "deprecated" not in done.stderr, done.stderr
