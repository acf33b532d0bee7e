"""The gradients of a bias and of the arrays that a score_mod reads in the Mosaic kernels, in jax's
GPU interpreter: what the reference says, by cp.async and by TMA."""

import itertools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close
from selection import whole_but

from pallas_flash import flash_attention, masks, scores

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)
Z = Sizes(B=2, T=67, S=70, N=2, K=1, H=32, Hv=32)  # two tiles of queries, two or three of keys
IDS = jnp.arange(200, dtype=jnp.int32) // 7
LENGTHS = dict(
    query_seq_lengths=np.array([60, 67], np.int32),
    key_value_seq_lengths=np.array([70, 30], np.int32),
)
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


def gradient(implementation, q, k, v, array, of_array, **options):
    """Of the array from which of_array makes a bias or a score_mod."""

    def loss(array):
        more = of_array(array)
        o, lse = flash_attention(
            q, k, v, implementation=implementation, return_residual=True, **more, **options
        )
        of_lse = jnp.where(lse == -jnp.inf, 0, lse)
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(of_lse))

    return jax.jit(jax.grad(loss))(array)


def is_the_references(q, k, v, array, of_array, tma, **options):
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected = gradient("reference", *wide, array, of_array, **options)
    with gpu_interpreter.ampere_kernels(tma=tma):
        found = gradient("ampere", q, k, v, array, of_array, **options)
    close(found, expected, TOLERANCE[str(q.dtype)])


SHAPES = [*itertools.product((1, Z.B), (1, Z.N), (1, Z.T), (1, Z.S))]
MASKS = (  # that of a shape is that of its number, modulo theirs
    {},
    dict(is_causal=True, query_offset=3) | DROPOUT,
    LENGTHS,
    dict(mask=masks.MaskMod(lambda b, h, q, k: (IDS[q] + h) % 3 != IDS[k] % 3)),
    dict(is_causal=True, logits_soft_cap=2.0),
)


@pytest.mark.gpu
@pytest.mark.parametrize("number", whole_but(range(len(SHAPES)), 3))
def test_the_gradient_of_a_bias_that_broadcasts(number, rng):
    shape = SHAPES[number]
    dtype = jnp.float16 if number % 3 == 1 else jnp.bfloat16
    bias = jnp.asarray(rng.normal(size=shape), jnp.float32 if number % 2 else dtype)
    of_bias = lambda bias: dict(bias=bias)
    is_the_references(
        *qkv(rng, Z, dtype), bias, of_bias, tma=number % 4 < 2, **MASKS[number % len(MASKS)]
    )


def by_entry(rule):
    return lambda array: dict(score_mod=rule(array))


RULES = {  # the shape of the array, what reads it, and a mask
    "a slope by head": ((Z.N,), by_entry(scores.Alibi), dict(is_causal=True)),
    "all heads' slope": ((), by_entry(lambda x: lambda s, b, h, q, k: s - x * abs(q - k)), {}),
    "T5's buckets": (
        (Z.N, 8),
        by_entry(lambda x: scores.T5Bias(x, max_distance=40)),
        dict(is_causal=True, query_offset=3) | LENGTHS,
    ),
    # of more entries than a program owns, the heads last
    "distances": (
        (150, Z.N),
        by_entry(lambda x: lambda s, b, h, q, k: s * x[q - k + 75, h]),
        dict(logits_soft_cap=2.0) | DROPOUT,
    ),
    "by what an array says of distances": (
        (30,),
        by_entry(lambda x: lambda s, b, h, q, k: s + x[IDS[jnp.abs(q - k)]]),
        {},
    ),
    "by key, and by query": (
        (Z.N, 90),
        by_entry(lambda x: lambda s, b, h, q, k: s + jnp.sin(x)[h, k] * x[0, IDS[q + b]]),
        dict(is_causal=True, query_offset=3),
    ),
    "by query and key": (
        (90, Z.S),
        by_entry(lambda x: lambda s, b, h, q, k: s + x[q, k] * x[k, k]),
        dict(mask=masks.MaskMod(lambda b, h, q, k: (q + h) % 3 != k % 3)),
    ),
    # neither the logarithm nor its derivative is a number where the key comes later
    "no number behind the mask": (
        (Z.N, 3),
        by_entry(lambda x: lambda s, b, h, q, k: s - x[h, 1] * jnp.log(q - k + 1.0)),
        dict(is_causal=True),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [False, True], ids=["cp.async", "TMA"])
@pytest.mark.parametrize("name", whole_but(RULES, "a slope by head", "T5's buckets"))
def test_the_gradient_of_what_a_score_mod_reads(name, tma, rng):
    shape, of_array, options = RULES[name]
    array = jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)
    is_the_references(*qkv(rng, Z, jnp.bfloat16), array, of_array, tma=tma, **options)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits_and_garbage_in_padding_changes_none(rng):
    q, k, v = qkv(rng, Z, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=(1, 1, Z.T, Z.S)), jnp.float32)
    rule = lambda x: lambda s, b, h, q, k: s + x[0, 0, 0, k] * x[0, 0, q, 0]
    of_array = lambda x: dict(bias=x, score_mod=rule(x))
    call = lambda: gradient("ampere", q, k, v, bias, of_array, is_causal=True, **LENGTHS)
    with gpu_interpreter.ampere_kernels():
        clean = call()
        q[0, 60:], k[1, 30:], v[1, 30:] = np.nan, np.inf, -np.inf
        np.testing.assert_array_equal(call(), clean)


# one that takes each kernel
RACES = {
    "by query": RULES["a slope by head"][:2],
    "by key": ((Z.N, 1, Z.S), lambda x: dict(bias=x)),
    "by pair": ((1, Z.T, Z.S), lambda x: dict(bias=x)),
    "by entry": RULES["T5's buckets"][:2],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", whole_but(RACES, "by key"))
def test_blocks_of_16_that_shared_memory_holds_of_wide_heads(name, rng):
    z = Z._replace(B=1, H=208, Hv=256)
    shape, of_array = RACES[name]
    array = jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)
    options = dict(is_causal=True, query_offset=3) | DROPOUT
    is_the_references(*qkv(rng, z, jnp.bfloat16), array, of_array, tma=False, **options)


@pytest.mark.whole
@pytest.mark.parametrize("tma", [False, True], ids=["cp.async", "TMA"])
@pytest.mark.parametrize("name", RACES)
def test_there_is_no_race(name, tma, rng):
    shape, of_array = RACES[name]
    array = jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)
    with gpu_interpreter.ampere_kernels(detect_races=True, tma=tma) as races:
        jax.block_until_ready(gradient("ampere", *qkv(rng, Z, jnp.bfloat16), array, of_array))
    assert not races.found
