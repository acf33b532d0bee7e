"""Masks and biases that are arrays in the Mosaic kernels, in jax's GPU interpreter: what the
reference says, and which blocks are multiplied."""

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

LOWEST = float(np.finfo(np.float32).min)
LENGTHS = dict(
    query_offset=np.array([50, -4], np.int32),
    query_seq_lengths=np.array([100, 131], np.int32),
    key_value_seq_lengths=np.array([205, 150], np.int32),
)
OTHERS = dict(logits_soft_cap=3.0, sinks=np.array([0.5, -1.0], np.float32))
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


def seen(*shape, blocks=(64, 64)):
    """A mask with empty, partial and full blocks of about that size, broadcast where the shape has
    a 1."""
    rng = np.random.default_rng(2)
    kinds = rng.choice(
        [0.0, 0.6, 1.0],
        (*shape[:2], *(-(-n // size) for n, size in zip(shape[2:], blocks, strict=True))),
    )
    rows, columns = (np.arange(n) // size for n, size in zip(shape[2:], blocks, strict=True))
    return rng.random(shape) < kinds[:, :, rows][..., columns]


def added(*shape, hidden=0.0, rows=()):
    """A bias that hides that part of all pairs, and adds these numbers to the logits of whole rows,
    in turn."""
    rng = np.random.default_rng(3)
    x = np.where(rng.random(shape) < hidden, -np.inf, rng.standard_normal(shape)).astype(np.float32)
    return jnp.asarray(x if not rows else x + np.resize(np.float32(rows), shape[2])[:, None])


EXTREMES = 0.0, -1e4, -1e9, LOWEST, 3e38
CASES = {  # head size, whether the same bits each time, the bias, the mask, and what else
    "both, all that changes logits": (
        64,
        True,
        added(1, 2, 131, 205),
        seen(2, 1, 131, 205),
        LENGTHS | OTHERS,
    ),
    "a mask by head, halves of dK and dV": (
        192,
        True,
        None,
        seen(2, 2, 131, 205),
        dict(is_causal=True) | DROPOUT,
    ),
    "a mask by batch row, one kernel": (
        128,
        False,
        None,
        seen(2, 1, 131, 205, blocks=(140, 140)),
        LENGTHS,
    ),
    "a mask of keys": (
        64,
        False,
        None,
        seen(2, 1, 1, 205, blocks=(1, 3)),
        dict(is_causal=True, query_offset=74),
    ),
    "a mask of queries": (128, True, None, seen(1, 2, 131, 1, blocks=(3, 1)), {}),
    "a mask, the widest heads": (256, True, None, seen(1, 1, 131, 205), {}),
    "a bias by head, one kernel": (128, False, added(1, 2, 131, 205, hidden=0.3), None, LENGTHS),
    "a bias of keys": (
        64,
        True,
        added(2, 1, 1, 205, hidden=0.3),
        None,
        dict(is_causal=True, query_offset=74) | OTHERS,
    ),
    "a bias of queries": (64, False, added(2, 2, 131, 1), None, DROPOUT),
    "a bias by head alone, halves of dK and dV": (256, True, added(1, 2, 1, 1), None, OTHERS),
    "a bias to the ends of float32": (64, True, added(1, 1, 131, 205, rows=EXTREMES), None, {}),
    "a bias and a score_mod": (
        128,
        True,
        added(2, 1, 131, 205),
        None,
        dict(score_mod=scores.Alibi((0.05, 0.02))),
    ),
}
EACH = [("hopper", name) for name in CASES]
EACH += [("ampere", name) for name, (size, *_) in CASES.items() if size <= 128]
FAST = (
    ("hopper", "both, all that changes logits"),
    ("hopper", "a mask by batch row, one kernel"),
    ("ampere", "a bias to the ends of float32"),
)


def attended(implementation, q, k, v, bias, **options):
    """Output and log-sum-exp, and the gradients of a function of both."""

    def loss(q, k, v, bias):
        o, lse = flash_attention(
            q, k, v, bias, implementation=implementation, return_residual=True, **options
        )
        of_lse = jnp.where(jnp.abs(lse) < 1e3, lse, 0)  # the cosine of others is noise
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(of_lse)), (o, lse)

    given = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, argnums=given, has_aux=True))(
        q, k, v, bias
    )
    return *outputs, *gradients


def all_close(found, expected):
    for name, x, y in zip(
        ("output", "lse", "dq", "dk", "dv", "dbias"), found, expected, strict=False
    ):
        close(x, y, 1e-5 if name == "lse" else TOLERANCE["bfloat16"], name)


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "name"), whole_but(EACH, *FAST))
def test_output_lse_and_all_gradients_are_the_references(implementation, name, rng):
    size, deterministic, bias, mask, options = CASES[name]
    options = options | dict(mask=mask)
    q, k, v = qkv(rng, Sizes(B=2, T=131, S=205, N=2, K=1, H=size, Hv=size), jnp.bfloat16)
    expected = attended("reference", *(x.astype(np.float32) for x in (q, k, v)), bias, **options)
    if options.keys() >= LENGTHS.keys():
        for row, (queries, keys) in enumerate(
            zip(LENGTHS["query_seq_lengths"], LENGTHS["key_value_seq_lengths"], strict=True)
        ):
            q[row, queries:], k[row, keys:], v[row, keys:] = np.nan, np.nan, np.nan
    options |= dict(deterministic=deterministic)
    with gpu_interpreter.kernels(implementation):
        all_close(attended(implementation, q, k, v, bias, **options), expected)


@pytest.mark.gpu
def test_a_score_mod_may_bring_logits_to_the_ends_of_float32(rng):
    """Rows that it moves as a whole keep their P. In the backward it was e^(lse - m) times too
    large, or infinite."""
    moved = jnp.asarray(np.resize(np.float32(EXTREMES), 70))
    score_mod = lambda s, b, h, q, k: s + moved[q]
    q, k, v = qkv(rng, Sizes(B=1, T=70, S=130, N=1, K=1, H=64, Hv=64), jnp.bfloat16)
    expected = attended(
        "reference", *(x.astype(np.float32) for x in (q, k, v)), None, score_mod=score_mod
    )
    with gpu_interpreter.hopper_kernels():
        all_close(attended("hopper", q, k, v, None, score_mod=score_mod), expected)


def test_only_blocks_that_some_pair_needs_are_multiplied(rng, monkeypatch):
    """Of 192 queries by 128 keys: all four of the second tile of the second head; of each other
    tile one, which is empty."""
    mask = np.zeros((1, 2, 384, 512), bool)
    mask[0, 1, 200::7, ::5] = True
    products = gpu_interpreter.record_products(monkeypatch)
    q, k, v = qkv(rng, Sizes(B=1, T=384, S=512, N=2, K=1, H=64, Hv=64), jnp.bfloat16)
    with gpu_interpreter.hopper_kernels():
        o = flash_attention(q, k, v, mask=mask, implementation="hopper")
    close(
        o,
        flash_attention(*(x.astype(np.float32) for x in (q, k, v)), mask=mask),
        TOLERANCE["bfloat16"],
        "output",
    )
    assert len(products) == 2 * 3 * (4 + 3)  # by three consumers


@pytest.mark.whole
def test_there_is_no_race(rng):
    q, k, v = qkv(rng, Sizes(B=1, T=259, S=530, N=2, K=1, H=64, Hv=64), jnp.bfloat16)
    more = dict(mask=seen(1, 2, 259, 530), bias=added(1, 1, 259, 530), implementation="hopper")
    loss = lambda q, k, v: flash_attention(q, k, v, **more).astype(jnp.float32).sum()
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    assert not races.found


@pytest.mark.parametrize(
    "name, shape, dtype", [("mask", (1, 1, 1, 300), bool), ("bias", (1, 2, 1, 300), jnp.bfloat16)]
)
def test_it_is_not_decoding(name, shape, dtype):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (1, 300))
    assert (
        hopper.tiles(explain(q, k, k, **{name: jax.ShapeDtypeStruct(shape, dtype)}).problem).decode
        is None
    )
