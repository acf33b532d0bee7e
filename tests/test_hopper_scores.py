"""Programmable scores in the Mosaic kernels, in jax's GPU interpreter: what the reference says,
with gradients."""

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close
from selection import whole_but

from pallas_flash import explain, flash_attention, scores
from pallas_flash.kernels import hopper

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


def curved(slopes):
    """Reads two numbers, asks for all indices, has a tanh, a derivative below 0, and none where the
    query is the last but one."""

    def score_mod(s, b, h, q, k):
        bent = jnp.tanh(s * slopes[0]) * 3 - jnp.maximum(s, 0.1 * s) / 2 + s**0
        far = slopes[h] * jnp.abs(q - k).astype(s.dtype) * (b + 1)
        # NaN beyond the query
        return bent - far + jnp.where((q - k) % 3 == h, 0.3, 0.0) + 0.01 * jnp.sqrt(1.0 * (q - k))

    return score_mod


def waved(slopes):
    """Reads a number for each key and head, and one for each query."""
    waves = jnp.sin(jnp.outer(slopes, jnp.arange(300.0)))
    return lambda s, b, h, q, k: s + waves[h, k] * waves[0, q]


def by_distance(slopes):
    """Reads T5's table, whose entries are made of the slopes."""
    return scores.T5Bias(jnp.sin(jnp.outer(slopes, jnp.arange(8.0)) * 30), max_distance=40)


EVERYTHING = dict(
    is_causal=True,
    query_offset=np.array([50, -4], np.int32),
    query_seq_lengths=np.array([100, 131], np.int32),
    key_value_seq_lengths=np.array([205, 150], np.int32),
    logits_soft_cap=3.0,
    sinks=np.array([0.5, -1.0], np.float32),
)
CASES = {  # head size, whether the same bits each time, the rule, and what else
    "all that changes logits": (64, True, curved, EVERYTHING),
    "dropout, one kernel": (
        128,
        False,
        curved,
        EVERYTHING | dict(dropout_rate=0.25, dropout_rng=jax.random.key(0)),
    ),
    "numbers by position": (64, True, waved, dict(is_causal=True, query_offset=74)),
    "a table by distance": (128, False, by_distance, EVERYTHING),
    "a table by distance, blocks of 80 keys": (
        256,
        True,
        by_distance,
        dict(is_causal=True, query_offset=74),
    ),
    "ALiBi, few queries": (64, False, scores.Alibi, dict(is_causal=True, query_offset=200)),
    "dropout, halves of dK and dV": (
        192,
        True,
        curved,
        dict(is_causal=True, dropout_rate=0.25, dropout_rng=jax.random.key(0)),
    ),
}
EACH = [("hopper", name) for name in CASES]
EACH += [("ampere", name) for name, (size, *_) in CASES.items() if size <= 128]
FAST = ("hopper", "all that changes logits"), ("ampere", "numbers by position")


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "name"), whole_but(EACH, *FAST))
def test_output_lse_and_all_gradients_are_the_references(implementation, name, rng):
    size, deterministic, rule, options = CASES[name]
    few = "few" in name
    q, k, v = qkv(
        rng,
        Sizes(B=2, T=3 if few else 131, S=300 if few else 205, N=2, K=1, H=size, Hv=size),
        jnp.bfloat16,
    )

    def attended(name, *x):
        def loss(q, k, v, slopes):
            more = dict(return_residual=True, implementation=name, deterministic=deterministic)
            o, lse = flash_attention(q, k, v, score_mod=rule(slopes), **more, **options)
            lse = jnp.where(lse == -jnp.inf, 0, lse)
            return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(lse)), (o, lse)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(
            *x, jnp.array([0.05, 0.02])
        )

    (_, (expected_o, expected_lse)), expected = attended(
        "reference", *(x.astype(np.float32) for x in (q, k, v))
    )
    for row, (queries, keys) in enumerate(
        zip(*(options.get(f"{n}_seq_lengths", ()) for n in ("query", "key_value")), strict=True)
    ):
        q[row, queries:], k[row, keys:], v[row, keys:] = np.nan, np.nan, np.nan
    with gpu_interpreter.kernels(implementation):
        (_, (o, lse)), found = attended(implementation, q, k, v)
    close(o, expected_o, TOLERANCE["bfloat16"], "output")
    close(lse, expected_lse, 1e-5, "lse")
    for name, x, y in zip(("dq", "dk", "dv", "dslopes"), found, expected, strict=True):
        close(x, y, TOLERANCE["bfloat16"], name)


def test_it_is_decoding_too():
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (1, 300))
    tiles = lambda **kw: hopper.tiles(explain(q, k, k, **kw).problem)
    assert tiles().decode == tiles(score_mod=scores.SoftCap(2.0)).decode is not None
