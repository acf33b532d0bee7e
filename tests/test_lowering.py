"""The Triton kernels lower for NVIDIA GPUs on a machine without one, and put nothing of size T x
S into memory."""

import math
import os
import pathlib
import re
import subprocess
import sys

import gpu_interpreter
import jax
import jax.numpy as jnp
import pytest
from features.calls import FEATURES
from selection import whole_but
from test_gpu_lowering import EACH, biased, lower, outputs, read

from pallas_flash import accounting, paged_attention, scores
from scripts.bench.gpu_code import as_if_on

GPUS = {"sm_80": accounting.GPUS["A100-80GB"], "sm_90": accounting.GPUS["H200"]}
KNOWN = FEATURES | EACH
KNOWN |= {
    "a bias of numbers": biased("1111"),
    "T5's buckets": read("NW", scores.T5Bias),
    "a square and constants by head": read(
        "N", lambda x: lambda s, b, h, q, k: jnp.square(s) - jax.lax.stop_gradient(x[h])
    ),
}
CASES = {  # features, and sizes that are not those of LONG
    "full": ("nothing",),
    "causal, odd head sizes": ("`is_causal`", dict(H=40, V=72)),
    "head size 256": ("`is_causal`", dict(H=256, V=256)),
    "one query": ("`is_causal`,`query_offset` by row,`key_value_seq_lengths`", dict(T=1)),
    "key lengths": ("`key_value_seq_lengths`",),
    "window and lengths": (
        "`local_window_size`,`query_offset` by row,`key_value_seq_lengths`,`query_seq_lengths`",
    ),
    "documents": ("`is_causal`,segment ids",),
    "key bias, soft cap": ("`mask`: an array,`logits_soft_cap`,a bias by key",),
    "query bias": ("a bias by query",),
    "sinks, dropout": ("`is_causal`,`sinks`,dropout",),
    "scalar bias": ("a bias of numbers",),
    "a rule": ("`is_causal`,a constant rule",),
    "a score": ("`is_causal`,`query_offset` by row,T5's buckets",),
    "one query, a score": ("`query_offset` by row,T5's buckets", dict(T=1)),
    "a score by head": ("a square and constants by head",),
    "dense bias and mask": ("a bias by pair,`mask`: an array",),
}
LONG = dict(T=300, S=333, H=64, V=64)


def gradients(features, implementation, floats, rest):
    total = lambda x: sum(map(jnp.sum, outputs(features, implementation, x, rest)))
    return jax.grad(total)(floats)


def lowered(gpu, dtype, implementation, names, sizes=()):
    """Forward and backward for a GPU that is not there."""
    features = [KNOWN[name] for name in names.split(",")]
    if implementation == "flash1":
        features = [x for x in features if "bias" not in x.arrays]
    with as_if_on(GPUS[gpu]):
        return lower(features, implementation, gradients, dtype, **LONG | dict(sizes))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", whole_but(CASES, *(CASES.keys() - {"full", "key lengths", "query bias", "scalar bias"}))
)
def test_every_kernel_lowers_for_a_gpu_and_only_the_users_own_arrays_of_size_t_x_s_are_in_memory(
    gpu, dtype, name
):
    found = lowered(gpu, dtype, "triton", *CASES[name])
    # that of few queries
    text = found.as_text().replace("flash_attention_decode", "flash_attention_forward")
    kernels = set(re.findall(r"flash_attention_(\w+)", text))
    floats, _ = found.args_info[0]
    expected = {"forward", "dkv", "dq", *["dbias"] * ("bias" in floats)}
    expected |= {"dtable"} if "table" in floats else set()
    assert expected <= kernels, f"{expected - kernels} of {kernels} are missing"
    size = lambda shape: math.prod(map(int, shape.split("x")))
    largest = max(size(shape) for shape in re.findall(r"tensor<((?:\d+x)*\d+)x\w+>", text))
    own = [math.prod(x.shape) for x in jax.tree.leaves(found.args_info)]
    (B, T, N, H), (S, _, V) = floats["query"].shape, floats["value"].shape[1:]
    linear = max(B * N * max(T, S) * max(H, V), *own)
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
    text = lowered("sm_80", dtype, implementation, *CASES[name]).as_text()
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
    text = lowered("sm_90", "bfloat16", implementation, "`is_causal`").as_text(debug_info=True)
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
from test_lowering import lowered
lowered("sm_90", "bfloat16", "triton", "nothing")
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
