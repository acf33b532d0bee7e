"""`deterministic`: what None takes from XLA's own flags, by which names Flax's modules pass it on,
and what explain says of it."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from selection import whole_but

from pallas_flash import explain, flash_attention
from pallas_flash.choose import implementations
from pallas_flash.flax import FlashAttention, attention_fn
from pallas_flash.jax_support import options
from pallas_flash.problem import arguments

OPS, NO_OTHERS = (f"--{flag}" for flag in options.DETERMINISM)
READ = {  # XLA_FLAGS, and the flag that asks for determinism
    "": None,
    "--xla_gpu_autotune_level=0": None,
    OPS: OPS,
    f"{NO_OTHERS}=true": NO_OTHERS,
    f"  --xla_gpu_autotune_level=0\n{OPS}=1 ": OPS,
    f"{OPS}=TRUE": OPS,
    f'{NO_OTHERS}="true"': NO_OTHERS,
    f"{OPS}=false": None,
    f"{OPS}=0 {NO_OTHERS}=1": NO_OTHERS,
    f"{OPS} {OPS}=false": None,  # the last one counts
    f"{OPS}=False {OPS}": OPS,
    f"--xla_dump_hlo_pass_re='a b' {OPS}": OPS,
    f'--xla_dump_hlo_pass_re="a\\" b"{OPS}': OPS,
    f"--xla_dump_hlo_pass_re=it's {OPS}": OPS,
    f"--xla_dump_hlo_pass_re=a b {OPS}": None,  # b is no flag: the rest is not read
}


@pytest.mark.parametrize("text", READ)
def test_the_flags_may_be_in_the_environment_or_in_a_file(text, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", text)
    assert options.determinism() == READ[text]
    file = tmp_path / "flags"
    file.write_text(text)
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert options.determinism() == READ[text]


def test_a_file_of_flags_that_is_not_there_is_none(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "/no/such/file")
    assert options.determinism() is None


# ---- what a call is resolved to ----

X, Y = jnp.ones((1, 5, 2, 8)), jnp.ones((1, 5, 16))
hook = lambda value: functools.partial(attention_fn, deterministic_gradients=value)
layer = functools.partial(FlashAttention, 2, 16)
CALLS = {
    "the function": lambda value: flash_attention(X, X, X, deterministic=value),
    "nnx's module": lambda value: nnx.MultiHeadAttention(
        2, 16, decode=False, attention_fn=hook(value), rngs=nnx.Rngs(0)
    )(Y),
    "linen's module": lambda value: linen.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=hook(value)
    ).init(jax.random.key(0), Y),
    "the layer": lambda value: layer(deterministic_gradients=value, rngs=nnx.Rngs(0))(Y),
}


def resolved(value: bool | None) -> dict[str, bool]:
    """The `deterministic` of the problem that each call makes, the last: the constructor of the
    layer asks explain of another."""
    normalise, problems, found = arguments.normalise, [], {}

    def recorded(call):
        problem, operands = normalise(call)
        problems.append(problem)
        return problem, operands

    with mock.patch.object(arguments, "normalise", recorded):
        for name, call in CALLS.items():
            jax.eval_shape(functools.partial(call, value))
            found[name] = problems[-1].deterministic
    return found


FRESH = whole_but(READ, f"{NO_OTHERS}=true")


@pytest.mark.parametrize("text", FRESH)
def test_none_is_what_xla_was_told_in_the_function_the_hook_and_the_layer(text, tmp_path):
    code = "import jax, json, test_deterministic as t; print(json.dumps(t.resolved(None)))"
    code += "; jax.jit(lambda: 1)()"  # XLA writes the flags beside a program
    flags = f"--xla_dump_to={tmp_path} {text}"
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | dict(XLA_FLAGS=flags, PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=True,
    )
    dumped = next(tmp_path.glob("*.debug_options")).read_text()
    of_xla = [flag for flag in options.DETERMINISM if re.search(rf"^{flag}: true$", dumped, re.M)]
    assert [f"--{flag}" for flag in of_xla] == [READ[text]] * (READ[text] is not None)
    assert json.loads(run.stdout) == dict.fromkeys(CALLS, READ[text] is not None)


@pytest.mark.parametrize("value", [True, False])
def test_a_value_counts_more_than_a_flag(value, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{OPS}={str(not value).lower()}")
    assert resolved(value) == dict.fromkeys(CALLS, value)


def test_a_cache_in_8_bits_needs_no_gradient_and_takes_the_layer():
    def attend():
        made = layer(deterministic_gradients=True, rngs=nnx.Rngs(0))
        return made(Y, cache=made.init_cache(1, 5, dtype=jnp.int8))[0]

    assert jax.eval_shape(attend).shape == Y.shape


# ---- what runs ----


@pytest.fixture
def hopper(monkeypatch):
    """explain takes it, whatever jax and GPU there are."""
    able = lambda p: None
    fakes.replace(
        monkeypatch.setattr, implementations.HOPPER, why_not=able, why_not_by_default=able
    )


BACKWARDS = {  # XLA_FLAGS, deterministic, head size: what explain says
    ("", None, 128): "adds in any order: deterministic=None, and XLA_FLAGS has no flag",
    (OPS, None, 128): f"bitwise deterministic: deterministic=None, and XLA_FLAGS has {OPS}$",
    (NO_OTHERS, None, 64): f"bitwise deterministic: .*XLA_FLAGS has {NO_OTHERS}$",
    ("", True, 128): "bitwise deterministic: deterministic=True$",
    (OPS, False, 64): "adds in any order: deterministic=False$",
    ("", None, 256): "hopper has one for this call, whatever deterministic is$",
    (OPS, False, 256): "hopper has one for this call, whatever deterministic is$",
}


@pytest.mark.parametrize("case", BACKWARDS)
def test_explain_says_which_backward_runs_and_why(case, hopper, monkeypatch):
    text, value, size = case
    monkeypatch.setenv("XLA_FLAGS", text)
    x = jax.ShapeDtypeStruct((1, 2048, 2, size), jnp.bfloat16)
    found = explain(x, x, x, deterministic=value)
    assert re.match(BACKWARDS[case], found.backward)
    assert (found.tiles.fused is not None) == found.backward.startswith("adds in any order")
    assert f"\nbackward        {found.backward}\n" in str(found)


@pytest.mark.parametrize("name", ["ampere", "triton", "blockwise", "reference"])
def test_the_others_have_one_backward(name):
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)
    problem, found = explain(x, x, x, deterministic=False).problem, implementations.find(name)
    assert not problem.deterministic and not found.adds_in_any_order(problem)


@pytest.mark.parametrize("implementation", whole_but(["blockwise", "triton"], "blockwise"))
def test_of_the_others_gradients_are_the_same_bits_for_every_value(implementation, rng):
    x = rng.normal(size=(3, 1, 70, 2, 16)).astype(np.float32)

    def gradients(value):
        attend = functools.partial(
            flash_attention, is_causal=True, implementation=implementation, deterministic=value
        )
        return jax.jit(lambda *x: jax.vjp(attend, *x)[1](x[0]))(*x)

    jax.tree.map(np.testing.assert_array_equal, gradients(True), gradients(False))
