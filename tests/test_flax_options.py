"""The layer's KVCache, cross-attention, masks and options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import (
    B,
    D,
    H,
    N,
    T,
    apply,
    assert_close,
    layer_of,
    normal,
    pure,
    value_and_grads,
)

from pallas_flash import scores
from pallas_flash.flax import FlashAttention, attention_fn


def test_a_layer_that_is_not_causal_sees_the_tokens_in_its_cache_and_none_of_the_empty_slots():
    layer, x = layer_of(is_causal=False), normal(1, B, T, D)
    step, full = jax.jit(lambda x, cache: layer(x, cache=cache)), jax.jit(layer)
    first, cache = step(x[:, :3], layer.init_cache(B, T + 4))
    assert_close(first, full(x[:, :3]))
    assert_close(step(x[:, 3:], cache)[0], full(x)[:, 3:])


def test_gradients_flow_through_a_cache():
    layer = layer_of(num_kv_heads=2, implementation="reference")  # the quickest to compile
    args = pure(layer), normal(1, B, T, D)

    def cached(p, x):
        y, cache = apply(layer)(p, x[:, :3], cache=layer.init_cache(B, T + 1))
        return jnp.concatenate([y, apply(layer)(p, x[:, 3:], cache=cache)[0]], 1)

    assert_close(value_and_grads(cached, *args), value_and_grads(apply(layer), *args))


def test_with_a_cache_the_mask_is_over_its_slots():
    layer, x = layer_of(), normal(1, B, T, D)
    mask = np.ones((B, 1, 1, T), bool)
    mask[1, ..., 1] = False
    call = jax.jit(lambda x, cache: layer(x, cache=cache, mask=mask))
    _, cache = call(x[:, :3], layer.init_cache(B, T))
    assert_close(call(x[:, 3:], cache)[0], jax.jit(lambda x: layer(x, mask=mask))(x)[:, 3:])


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_token_without_room_is_nan_and_spoils_nothing_else(dtype):
    layer, x = layer_of(), normal(1, B, T, D)
    call = jax.jit(lambda x, cache: layer(x, cache=cache))
    cache = layer.init_cache(B, 5, dtype)
    slots = cache.key.shape[1]
    assert slots == (64 if dtype else 5)
    cache = cache._replace(lengths=jnp.array([slots - 5, slots - 2], jnp.int32))
    y, after = call(x[:, :4], cache)
    assert np.array_equal(np.isnan(y).all(-1), [[False] * 4, [False, False, True, True]])
    assert np.array_equal(np.isnan(y).any(-1), np.isnan(y).all(-1))
    fits, expected = call(x[:, :2], cache)
    assert_close(y[1, :2], fits[1])
    assert_close(after.key[1], expected.key[1])
    assert_close(y[0, :2], fits[0])
    assert np.isnan(call(x[:, :2], after)[0][1]).all()


def test_an_odd_head_size_is_possible_without_rope():
    assert jax.jit(layer_of(head_size=5, rope_base=None))(normal(0, B, T, D)).shape == (B, T, D)


def cross_layer(**options):
    return layer_of(num_kv_heads=2, in_kv_features=11, is_causal=False, rope_base=None, **options)


X, Y, IDS = normal(0, B, T, D), normal(0, B, 9, 11), np.zeros((B, T), int)
grouped = functools.partial(layer_of, num_kv_heads=2)
# of a layer what is said, and the call
IMPOSSIBLE = {
    grouped: {
        "inputs_q must be an array; got NoneType": lambda layer: layer(None),
        r"lengths must be int32 \[B\] = \(2,\); got \(1,\)": lambda layer: layer(X, lengths=[1]),
        r"segment_ids must be int32 \[B, T\] = \(2, 7\); got \(1,\)": lambda layer: layer(
            X, segment_ids=[1]
        ),
        r"mean score_mod=scores.SoftCap\(logits_soft_cap\)\?": lambda _: attention_fn(
            X, X, X, logits_soft_cap=3.0
        ),
        r"mean mask=masks.Documents\(segment_ids\)\?": lambda _: attention_fn(
            X, X, X, segment_ids=IDS
        ),
        "deterministic must be a static bool, .* got the text 'no'": lambda _: layer_of(
            dropout_rate=0.1
        )(X, deterministic="no"),
        "deterministic_gradients must be None or a static bool, .* got the text 'no'": lambda _: (
            attention_fn(X, X, X, deterministic_gradients="no")
        ),
        "Pass deterministic_gradients to the constructor": lambda layer: layer(
            X, deterministic_gradients=True
        ),
        r"mask must be an array or .* a mask_mod as masks.MaskMod\(function\)": lambda layer: layer(
            X, mask=lambda b, h, q, k: q >= k
        ),
        "Pass is_causal to the constructor": lambda layer: layer(X, is_causal=True),
        r"Did you mean positions\?": lambda layer: layer(X, position_ids=IDS),
        r"mean mask\? Padding is bool \[B, 1, 1, T\], or pass lengths": lambda layer: layer(
            X, attention_mask=IDS
        ),
        r"mean mask=masks.Window\(left, right\)\?": lambda _: attention_fn(
            X, X, X, local_window_size=3
        ),
        "max_length must be a static int from 1 on; got the int 0": lambda layer: layer.init_cache(
            B, 0
        ),
        "batch must be a static int from 1 on; got the float 0.5": lambda layer: layer.init_cache(
            0.5, 7
        ),
        "tokens must be a static int from 1 on; got the int 0": lambda _: layer_of(
            local_window_size=3
        ).init_rolling_cache(B, 0),
        r"inputs_q must be \[B, T, in_features\] = \(B, T, 24\); got \(2, 7, 23\)": lambda layer: (
            layer(X[..., 1:])
        ),
        r"inputs_q must be .*; got \(7, 24\)": lambda layer: layer(X[0]),
        "the 7 tokens of inputs_q must fit into the cache's max_length; got 6": lambda layer: layer(
            X, cache=layer.init_cache(B, 6)
        ),
        r"cache.key .* \(2, max_length, 2, 6\) .*got \(3, 9, 2, 6\).*init_cache\(2": lambda layer: (
            layer(X, cache=layer.init_cache(3, 9))
        ),
        "segment_ids cannot go with a cache": lambda layer: layer(
            X, cache=layer.init_cache(B, 9), segment_ids=IDS
        ),
        r"positions .* \[B, T\] = \(2, 7\), or \[1, T\] for all rows; got \(1, 3\)": lambda layer: (
            layer(X, positions=np.arange(3)[None])
        ),
        "positions are for RoPE, which this layer leaves out": lambda _: layer_of(rope_base=None)(
            X, positions=np.arange(T)[None]
        ),
        "give inputs_k too": lambda layer: layer(X, inputs_v=X),
        "give inputs_k too, or lengths": lambda layer: layer(X, kv_lengths=np.array([1, 2])),
    },
    cross_layer: {
        r"kv_lengths must be int32 \[B\] = \(2,\); got \(1,\)": lambda layer: layer(
            X, Y, kv_lengths=[1]
        ),
        "inputs_k must be an array; got the text 'keys'": lambda layer: layer(X, "keys"),
        "with is_causal=False": lambda _: layer_of(in_kv_features=11, rope_base=None)(X, Y),
        "rope_base=None": lambda _: layer_of(in_kv_features=11, is_causal=False)(X, Y),
        "no local_window_size": lambda _: cross_layer(local_window_size=3)(X, Y),
        "in_kv_features = 11 beside 24 needs inputs_k": lambda layer: layer(X),
        r"masks\.Documents": lambda layer: layer(X, Y, segment_ids=IDS),
        "a cache cannot go with inputs_k": lambda layer: layer(X, Y, cache=layer.init_cache(B, 9)),
        r"inputs_k must be .* = \(2, S, 11\) .*; got \(2, 9, 10\)": lambda layer: layer(
            X, Y[..., 1:]
        ),
        r"inputs_v must be .* = \(2, 9, 11\) .*; got \(2, 8, 11\)": lambda layer: layer(
            X, Y, Y[:, 1:]
        ),
    },
}


@pytest.mark.parametrize(
    "make, text", [(make, text) for make in IMPOSSIBLE for text in IMPOSSIBLE[make]]
)
def test_impossible_calls_raise(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        IMPOSSIBLE[make][text](make())


# ---- cross-attention


@pytest.mark.parametrize("is_cross", [False, True])
def test_beyond_the_lengths_nothing_is_read_and_the_attention_is_zero(is_cross):
    layer = cross_layer(qk_norm=True) if is_cross else layer_of(is_causal=False)
    inputs = [normal(1, B, T, D), normal(2, B, T + 4, 11)][: 1 + is_cross]
    ends = dict(lengths=np.array([T, 2], np.int32))
    ends |= dict(kv_lengths=np.array([T + 4, 3], np.int32)) if is_cross else {}
    beyond = lambda x, ends: np.arange(x.shape[1])[:, None] >= ends[:, None, None]
    padded = (
        jnp.where(beyond(x, n), jnp.nan, x) for x, n in zip(inputs, ends.values(), strict=True)
    )
    y = jax.jit(layer)(*padded, **ends)
    for b, length in enumerate(ends["lengths"]):
        alone = (x[b : b + 1, : n[b]] for x, n in zip(inputs, ends.values(), strict=True))
        assert_close(y[b : b + 1, :length], jax.jit(layer)(*alone))
        assert np.all(np.asarray(y[b, length:]) == 0)


# ---- masks and options


@pytest.mark.parametrize(
    "mask", [np.array([0.0, -1e9]), jnp.array([0, 2]), np.array([1.0, np.nan])]
)
def test_a_mask_of_other_numbers_than_0_and_1_raises_where_they_can_be_seen(mask):
    q, mask = normal(0, B, 2, N, H), mask[None]
    for attend in (
        functools.partial(attention_fn, mask=mask),
        jax.jit(functools.partial(attention_fn, mask=mask)),
    ):
        with pytest.raises(
            ValueError, match=r"mask must be bool, or 0 and 1 as Flax makes it; got .*mask > -1"
        ):
            attend(q, q, q)
    with pytest.raises(ValueError, match="mask must be bool"):
        layer_of()(normal(0, B, 2, D), mask=mask)


# what is said, and the options
REFUSED = {
    r"local_window_size must be a static int or \(left, right\)": dict(local_window_size=-1),
    "logits_soft_cap must be a finite number above 0, or None; got 0": dict(logits_soft_cap=0.0),
    "implementation must be None or one of .*; got 'flash3'": dict(implementation="flash3"),
    "is_causal must be a static bool": dict(is_causal="yes"),
    "dropout_rate must be at least 0 and below 1; got 1.0": dict(dropout_rate=1.0),
    "rope_base must be a finite number above 0, or None": dict(rope_base=0.0),
    "rope must be a function of x and positions; got 500.0": dict(rope=500.0),
    r"sinks must be a static bool, .* got an array float64\[4\]": dict(sinks=np.zeros(4)),
    "qk_norm must be a static bool": dict(qk_norm="rms"),
    "use_bias must be a static bool": dict(use_bias=None),
    "keep_rngs must be a static bool": dict(keep_rngs=0),
    "deterministic_gradients must be None or a static bool, True or False; got the int 1": dict(
        deterministic_gradients=1
    ),
    r"mean deterministic_gradients\? layer.eval\(\) turns dropout": dict(deterministic=True),
    r"context must be None, Ring\(axis\), .*; got 'ring'": dict(context="ring"),
    "kernel_init must be an initializer": dict(kernel_init="normal"),
    "out_kernel_init must be an initializer": dict(out_kernel_init=3),
    "dtype must be None, float32, .*; got 'int8'": dict(dtype="int8"),
    "param_dtype must be a float's; got None": dict(param_dtype=None),
    r"rngs must be nnx.Rngs .* as nnx.Rngs\(0\); got an array": dict(rngs=jax.random.key(0)),
    "with a stream params, .*; got streams dropout": dict(rngs=nnx.Rngs(dropout=0)),
    r"FlashAttention\(\) got .* mean head_size\? It is qkv_features": dict(qkv_features=24),
    "Leave decode out: init_cache makes a cache": dict(decode=True),
    r"mean dropout_rate\?$": dict(dropout=0.1),
    r"mean rope_base\?": dict(rope_theta=1e4),
    r"mean qk_norm\?": dict(normalize_qk=True),
    "scale must be a static number, or an array; got the text '1'": dict(scale="1"),
    r"one for each query head, \[N\] = \(4,\); got .* \(3,\)": dict(scale=np.ones(3)),
    r"Pass scale=query_pre_attn_scalar \*\* -0.5\.": dict(query_pre_attn_scalar=6),
    r"mean head_size\?": dict(head_dim=6),
    "Leave broadcast_dropout out: each batch row": dict(broadcast_dropout=True),
    "Pass segment_ids in the call": dict(segment_ids=IDS),
    "score_mod must be a function": dict(score_mod=3),
    "num_heads must be a multiple of num_kv_heads; got 4 and 3": dict(num_kv_heads=3),
    "num_kv_heads must be a static int from 1 on; got the int 0": dict(num_kv_heads=0),
    "num_kv_heads must be a static int .*; got the float 2.0": dict(num_kv_heads=2.0),
    "in_features must be a static int .*; got the text '24'": dict(in_features="24"),
    "head_size must be a static int from 1 on; got the int -2": dict(head_size=-2),
    "out_features must be a static int from 1 on; got the int 0": dict(out_features=0),
    "in_kv_features must be a static int .* the float 2.5": dict(in_kv_features=2.5),
    "head_size must be even, since RoPE turns pairs; got 5": dict(head_size=5),
    "in_features must be a multiple of num_heads = 4; got 22": dict(in_features=22),
}


@pytest.mark.parametrize("text", REFUSED)
def test_the_constructor_refuses_what_the_first_call_would(text):
    with pytest.raises((TypeError, ValueError), match=text):
        FlashAttention(**dict(num_heads=N, in_features=D, rngs=nnx.Rngs(0)) | REFUSED[text])


def test_the_constructor_leaves_it_to_the_call_what_an_implementation_can_run():
    assert layer_of(implementation="hopper").implementation == "hopper"


def test_the_layer_learns_the_parameters_of_a_score_mod_that_is_a_module():
    class Relative(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.linspace(-1, 1, 32).reshape(2, 16))

        def __call__(self, score, b, h, q_idx, kv_idx):
            return scores.T5Bias(self.table[...], bidirectional=False, max_distance=20)(
                score, b, h, q_idx, kv_idx
            )

    make = lambda score_mod: FlashAttention(2, 16, score_mod=score_mod, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 9, 16))
    layer, loss = make(Relative()), lambda layer, x: jnp.sum(jnp.sin(layer(x)))
    gradient = nnx.jit(nnx.grad(loss))(layer, x)["score_mod"]["table"][...]
    assert gradient.shape == (2, 16) and jnp.all(gradient[:, :8] != 0)

    @nnx.jit
    def cached_and_whole(layer, x):
        y, cache = layer(x[:, :6], cache=layer.init_cache(1, 9))  # positions count from the offset
        return jnp.concatenate([y, layer(x[:, 6:], cache=cache)[0]], axis=1), layer(x)

    np.testing.assert_allclose(*cached_and_whole(layer, x), atol=1e-5)
    slopes = [0.5, 0.25]
    of_floats, of_array = make(scores.Alibi(slopes)), make(scores.Alibi(jnp.asarray(slopes)))
    step = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_allclose(step(of_array, x), step(of_floats, x), atol=1e-6)
    parameters = lambda layer: jax.tree.structure(nnx.state(layer, nnx.Param))
    assert parameters(of_array) == parameters(of_floats)
