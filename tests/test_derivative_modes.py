"""Forward mode, and second derivatives, of every implementation."""

import functools
import re

import check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, RULES, bias, normal, qkv
from selection import whole_but
from test_transforms import Z, attend, equal

from pallas_flash import flash_attention, flash_attention_jvp, scores
from pallas_flash.accounting import GPUS
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_tiles")


def test_forward_mode_is_a_function_of_its_own_in_o_of_t_memory(rng):
    q, k, v = qkv(rng, Z)
    x, dx = (q, k, v, bias(rng, "1N1S", Z)), (*qkv(rng, Z), bias(rng, "1N1S", Z))
    options = dict(is_causal=True, query_offset=2, logits_soft_cap=3.0, return_residual=True)
    jvp = lambda name: jax.jit(
        functools.partial(flash_attention_jvp, implementation=name, **options)
    )
    equal(jvp("blockwise")(x, dx), jvp("reference")(x, dx))
    step = 1e-2
    shifted = [[a + sign * step * da for a, da in zip(x, dx, strict=True)] for sign in (1, -1)]
    above, below = (flash_attention(*x, implementation="reference", **options) for x in shifted)
    equal(
        jvp("blockwise")(x, dx)[1],
        jax.tree.map(lambda a, b: (a - b) / (2 * step), above, below),
        tolerance=2e-3,
    )
    long = [jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)] * 3
    text = check.program(lambda *x: flash_attention_jvp(x, x, is_causal=True), *long)
    assert check.largest_array(text) < 4096**2 / 8


MASKED = MASKS | {
    name: lambda rng, z, rule=rule, more=more: more | dict(rule=rule)
    for name, (rule, more) in RULES.items()
}


@pytest.mark.parametrize("name", whole_but(MASKED, "everything", "holes by head"))
def test_tangents_of_the_triton_kernels_are_those_of_dense_attention(name, rng):
    check.tangents(rng, *qkv(rng, Z), "triton", **MASKED[name](rng, Z))


MORE = {
    "a bias": lambda rng: dict(bias=bias(rng, "1N1S", Z), logits_soft_cap=2.0),
    "dropout, sinks": lambda rng: dict(
        dropout_rate=0.25,
        dropout_rng=jax.random.key(3),
        sinks=normal(rng, Z.N),
    ),
    "alibi": lambda rng: dict(score_mod=scores.Alibi(np.float32([0.5, 0.25])), is_causal=True),
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("without", [(), ("key",), ("query", "value"), ("query", "key")])
def test_so_are_those_of_what_else_changes_scores_along_some_of_the_arrays(name, without, rng):
    check.tangents(rng, *qkv(rng, Z), "triton", without=without, **MORE[name](rng))


def test_a_gradient_runs_no_kernel_of_forward_mode_and_a_stopped_tangent_no_other(rng):
    """MeanFlow's loss: no gradient goes through the tangent."""
    x = qkv(rng, Z)
    loss = lambda *x: jnp.sum(attend("triton")(*x))

    def mean_flow(*x):
        o, do = jax.jvp(attend("triton"), x, x)
        return jnp.sum((o - jax.lax.stop_gradient(do)) ** 2)

    def kernels(f):
        with as_if_on(GPUS["A100-80GB"]):
            program = jax.jit(jax.grad(f, argnums=(0, 1, 2))).trace(*x)
            code = program.lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall("flash_attention_(?:forward|tangent|dkv|dq)", code))

    found = {f"flash_attention_{name}" for name in ("forward", "dkv", "dq")}
    assert kernels(loss) == found
    assert kernels(mean_flow) == found | {"flash_attention_tangent"}


def test_second_derivatives_of_bfloat16_err_as_its_rounding_does(rng):
    """Tangents of a scale: of what they add to those of P, most is taken off again in those of
    o."""
    (q, k, v), do = qkv(rng, Z, "bfloat16"), rng.normal(size=(Z.B, Z.T, Z.N, Z.Hv))
    x, dx = (3 * q, k, v), (3 * q, 0 * k, 0 * v)

    @functools.partial(jax.jit, static_argnums=0)
    def hvp(name, x, dx):
        loss = lambda *x: jnp.sum(attend(name)(*x) * jnp.asarray(do, jnp.float32))
        return jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), x, dx)[1]

    expected = hvp("reference", *([a.astype(np.float32) for a in y] for y in (x, dx)))
    norm = lambda x: np.linalg.norm(np.float32(x))
    for mine, wanted in zip(hvp("blockwise", x, dx), expected, strict=True):
        assert norm(mine - wanted) <= 0.01 * norm(wanted)
