"""The layer against a dense one in plain JAX."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_layers import (
    CAUSAL,
    COLUMN,
    IS_REAL,
    ROW,
    WINDOW,
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
from meshes import needs_devices

from pallas_flash import dropout_mask, masks
from pallas_flash.flax import FlashAttention, rope


def plain_rope(x, positions, base):
    """The same rotation by complex numbers: pair i is x[i] + 1j x[i + H/2]."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * base ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], -1)


def plain_layer(p, x, visible, rope_base=10_000.0, soft_cap=None, scale=None, kept=1.0):
    """The layer's equations on its parameters, dense; visible is bool, broadcastable to [B, T, T];
    the weights are multiplied by `kept`."""
    project = lambda name: (
        jnp.einsum("btd,dnh->btnh", x, p[name]["kernel"]) + p[name].get("bias", 0)
    )
    q, k, v = project("query"), project("key"), project("value")
    if "query_norm" in p:
        norm = lambda x, scale: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale
        q, k = norm(q, p["query_norm"]["scale"]), norm(k, p["key_norm"]["scale"])
    if rope_base is not None:
        q, k = (
            plain_rope(q, np.arange(x.shape[1]), rope_base),
            plain_rope(k, np.arange(x.shape[1]), rope_base),
        )
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scale = p.get("scale", q.shape[-1] ** -0.5 if scale is None else scale)
    scale = jnp.reshape(scale, (-1, 1, 1))
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    s = jnp.where(visible[:, None], s, -jnp.inf)
    sinks = p.get("sinks", jnp.full(1, -jnp.inf))[:, None, None]
    weights = kept * jnp.exp(s - jnp.logaddexp(jax.nn.logsumexp(s, -1, keepdims=True), sinks))
    return jnp.einsum("bnts,bsnh,nhe->bte", weights, v, p["out"]["kernel"]) + p["out"].get(
        "bias", 0
    )


SCALES = np.array([0.5, 0.1, 1.5, 0.9])
LAYERS = {
    "the defaults": (dict(), dict(), CAUSAL),
    "grouped heads, QK norm, biases": (
        dict(num_kv_heads=2, qk_norm=True, use_bias=True),
        dict(),
        CAUSAL,
    ),
    "one kv head, another base": (
        dict(num_kv_heads=1, rope_base=50.0),
        dict(rope_base=50.0),
        CAUSAL,
    ),
    "no RoPE, not causal": (
        dict(rope_base=None, is_causal=False),
        dict(rope_base=None),
        CAUSAL | True,
    ),
    "window, soft cap, a scale": (
        dict(local_window_size=2, logits_soft_cap=0.7, scale=24**-0.5),
        dict(soft_cap=0.7, scale=24**-0.5),
        WINDOW,
    ),
    "QK norm, a scale for each head": (
        dict(num_kv_heads=2, qk_norm=True, scale=SCALES),
        dict(scale=SCALES),
        CAUSAL,
    ),
    "a function in place of a base": (
        dict(rope=lambda x, positions: rope(x, positions, 50.0)),
        dict(rope_base=50.0),
        CAUSAL,
    ),
    "sizes of their own": (
        dict(num_heads=3, in_features=11, head_size=10, out_features=5),
        dict(),
        CAUSAL,
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_the_layer_is_its_equations(case):
    options, plain_options, visible = LAYERS[case]
    layer = layer_of(**options)
    x = normal(1, B, T, layer.in_features)
    assert_close(
        jax.jit(layer)(x),
        jax.jit(functools.partial(plain_layer, visible=visible, **plain_options))(pure(layer), x),
    )


def test_the_gradients_of_the_layer_are_those_of_its_equations():
    layer = layer_of(
        num_kv_heads=2,
        qk_norm=True,
        use_bias=True,
        local_window_size=2,
        rope_base=50.0,
        scale=nnx.Param(jnp.asarray(SCALES)),
    )
    args = pure(layer), normal(1, B, T, D)
    plain = functools.partial(plain_layer, visible=WINDOW, rope_base=50.0)
    assert_close(value_and_grads(apply(layer), *args), value_and_grads(plain, *args))


ANY = np.random.default_rng(0).random((B, 1, T, T)) < 0.6
PREFIX = np.array([2, 5], np.int32)
# each token's own, two others, and what names nothing, for each of two layers
LISTS = np.random.default_rng(0).integers(-1, T, (2, B, T, 1, 3))
LISTS[..., 0] = np.arange(T)[:, None]
LISTED = CAUSAL & (LISTS[..., 0, :, None] == COLUMN[0]).any(-2)
# equal ids need not be neighbours
IDS = np.array([[5, 5, 5, 1, 1, 8, 8], [2, 2, 2, 3, 3, 2, 2]])
# a call, what is visible, and the layer's options
CALLS = {
    "a boolean mask": (
        dict(mask=ANY | np.eye(T, dtype=bool)),
        CAUSAL & (ANY[:, 0] | np.eye(T, dtype=bool)),
        {},
    ),
    "a float mask of keys": (
        dict(mask=IS_REAL[:, None, None].astype("f4")),
        CAUSAL & IS_REAL[:, None],
        {},
    ),
    "a mask object": (dict(mask=masks.Window(1, None)), CAUSAL & (ROW - COLUMN <= 1), {}),
    "a mask object that is partly causal": (
        dict(mask=masks.PrefixLM(PREFIX)),
        CAUSAL | (COLUMN < PREFIX[:, None, None]),
        dict(is_causal=False),
    ),
    "lists of keys": (dict(mask=masks.KeyLists(LISTS[0])), LISTED[0], {}),
    "packed documents": (
        dict(segment_ids=IDS),
        CAUSAL & (IDS[:, :, None] == IDS[:, None]),
        dict(num_kv_heads=2, qk_norm=True),
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_layer_joins_its_mask_with_causality(case):
    call, visible, options = CALLS[case]
    layer, x = layer_of(**options), normal(1, B, T, D)
    assert_close(
        jax.jit(lambda x: layer(x, **call))(x), jax.jit(plain_layer)(pure(layer), x, visible)
    )


def test_rematted_layers_in_a_scan_have_lists_of_their_own_with_gradients():
    layer, x = layer_of(num_kv_heads=2), normal(1, B, T, D)
    graph, state = nnx.split(layer)
    params = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), pure(layer))

    @nnx.remat
    def step(x, layer, indices):
        return layer(x, mask=masks.KeyLists(indices))

    scan = nnx.scan(step, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)

    def run(params, x):
        nnx.replace_by_pure_dict(state, params)
        return scan(x, nnx.merge(graph, state), LISTS)

    def plain(params, x):
        for n in range(2):
            x = plain_layer(jax.tree.map(lambda a: a[n], params), x, LISTED[n])
        return x

    assert_close(value_and_grads(run, params, x), value_and_grads(plain, params, x))


@pytest.mark.parametrize("is_cross", [False, True])
def test_without_rope_the_layer_is_flax_own_on_the_same_parameters(is_cross):
    options = dict(num_kv_heads=2, use_bias=False, in_kv_features=11 if is_cross else D)
    theirs = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(3), **options)
    ours = FlashAttention(N, D, is_causal=not is_cross, rope_base=None, rngs=nnx.Rngs(0), **options)
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    inputs = normal(1, B, T, D), normal(2, B, T + 4, 11), normal(3, B, T + 4, 11)
    for n in (2, 3) if is_cross else (1,):
        expected = jax.jit(functools.partial(theirs, is_causal=not is_cross))(*inputs[:n])
        assert_close(jax.jit(ours)(*inputs[:n]), expected)


def test_rope_turns_halves_in_float32():
    x, positions = (
        normal(0, B, T, N, H),
        np.array([[0, 1, 2, 3, 4, 5, 6], [9, 8, 7, 1000, 5, 4, 3]]),
    )
    assert_close(rope(x, positions, 500.0), plain_rope(x, positions, 500.0), 1e-4)
    half = rope(x.astype(jnp.bfloat16), positions, 500.0)
    assert jnp.array_equal(
        half,
        rope(x.astype(jnp.bfloat16).astype(jnp.float32), positions, 500.0).astype(jnp.bfloat16),
    )


def published(frequencies):
    """RoPE in halves, in float64."""

    def turned(x, positions):
        z = x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
        z = z * np.exp(1j * positions[..., None, None] * frequencies(x.shape[-1]))
        return np.concatenate([z.real, z.imag], -1)

    return turned


def by_base(base):
    return lambda H: np.array([base ** (-2 * i / H) for i in range(H // 2)])


def llama3(H):
    """By wavelengths, as Meta's code has it."""
    found = []
    for f in by_base(500_000.0)(H):
        wavelength, smooth = 2 * np.pi / f, (8192 * f / (2 * np.pi) - 1) / (4 - 1)
        between = (1 - smooth) * f / 8 + smooth * f
        found.append(f if wavelength < 8192 / 4 else f / 8 if wavelength > 8192 else between)
    return np.array(found)


def yarn(H):
    """By arXiv:2309.00071's dimensions, whose pair turns 32 times, or once, in 32768 tokens."""
    dimension = lambda turns: H / 2 * np.log(32768 / (2 * np.pi * turns)) / np.log(10_000.0)
    low, high = np.floor(dimension(32)), np.ceil(dimension(1))
    ramp = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(H // 2)])
    return by_base(10_000.0)(H) * (ramp / 4 + 1 - ramp)


def first_four(x, positions):
    turned = published(by_base(10_000.0))(x[..., :4], positions)
    return np.concatenate([turned, x[..., 4:]], -1)


def neighbours(x, positions):
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(
        1j * positions[..., None, None] * by_base(10_000.0)(x.shape[-1])
    )
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


ROPES = {
    "llama3": published(llama3),
    "yarn": lambda x, positions: published(yarn)(x, positions) * (0.1 * np.log(4) + 1),
    "partial": first_four,
    "interleaved": neighbours,
}
PAGE = (pathlib.Path(__file__).parents[1] / "docs/flax.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def code_with(text):
    """The page's imports and its x, and the block with a text."""
    return CODE[0].partition("in_nnx = ")[0] + next(block for block in CODE if text in block)


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_functions_of_the_docs_are_the_published_ones(name):
    namespace = {}
    exec(code_with("def llama3").partition("\nfor function in")[0], namespace)
    x = np.random.default_rng(0).normal(size=(B, T, N, 64))
    positions = np.array([range(T), [900, 800, 3000, 4, 55, 666, 7]])
    got = jax.jit(namespace[name])(jnp.float32(x), jnp.asarray(positions))
    np.testing.assert_allclose(got, ROPES[name](x, positions), atol=1e-3)


def test_given_positions_turn_queries_and_keys_with_a_cache_too():
    doubled = layer_of(local_window_size=2, rope=lambda x, positions: rope(x, 2 * positions))
    layer, x = layer_of(local_window_size=2), normal(1, B, T, D)
    positions = 2 * np.arange(T)[None] + np.array([[0], [30]])  # scores depend on differences
    expected = jax.jit(doubled)(x)
    assert_close(jax.jit(layer)(x, positions=positions), expected)

    def in_two_calls(x, positions):
        first, cache = layer(x[:, :4], cache=layer.init_cache(B, T), positions=positions[:, :4])
        return first, layer(x[:, 4:], cache=cache, positions=positions[:, 4:])[0]

    first, second = jax.jit(in_two_calls)(x, positions)
    assert_close((first, second), (expected[:, :4], expected[:, 4:]))


@needs_devices
def test_a_step_on_four_devices_is_that_of_one_with_auto_and_explicit_axes():
    found = {}
    for sizes in "(1, 1)", "(2, 2)":
        namespace, code = {}, code_with("def train(")
        assert "SIZES = (1, 1)" in code
        exec(code.replace("SIZES = (1, 1)", f"SIZES = {sizes}"), namespace)
        found[sizes] = np.array(namespace["losses"])
        kernel = namespace["layer"].query.kernel[...]
        assert kernel.sharding.shard_shape(kernel.shape) == (64, 4 // eval(sizes)[1], 16)
    np.testing.assert_allclose(found["(2, 2)"], found["(1, 1)"], rtol=1e-5)
    assert (found["(1, 1)"][:, 1] < found["(1, 1)"][:, 0]).all()


def test_sinks_and_dropout_of_the_layer_are_those_of_flash_attention():
    layer, x = (
        layer_of(num_kv_heads=2, sinks=True, dropout_rate=0.3, implementation="reference"),
        normal(1, B, T, D),
    )
    assert layer.sinks[...].shape == (N,) and np.any(np.asarray(layer.sinks[...]) != 0)
    key = jax.random.key(5)
    kept = dropout_mask(key, 0.3, (B, N, T, T)) / (1 - 77 / 256)
    plain = functools.partial(plain_layer, visible=CAUSAL, kept=kept)
    ours, args = functools.partial(apply(layer), rngs=key), (pure(layer), x)
    assert_close(value_and_grads(ours, *args), value_and_grads(plain, *args))
    assert_close(nnx.view(layer, deterministic=True)(x), layer(x, deterministic=True))
    layer.eval()
    assert_close(layer(x), layer(x, deterministic=True))
    assert not np.array_equal(layer(x), layer(x, rngs=nnx.Rngs(dropout=0), deterministic=False))


def test_the_layer_draws_from_the_stream_of_its_constructor_and_rather_from_the_rngs_of_a_call():
    layer, x = FlashAttention(N, D, dropout_rate=0.3, rngs=nnx.Rngs(0)), normal(1, B, T, D)
    keys = [jax.random.fold_in(layer.rngs.key[...], n) for n in range(2)]
    layer.eval()
    layer(x)
    layer.train()
    given = [layer(x, rngs=key) for key in keys]
    kept = [layer(x) for _ in keys]
    for ours, expected in zip(kept, given, strict=True):
        assert jnp.array_equal(ours, expected)
    assert not jnp.array_equal(*kept)
    for rngs in nnx.Rngs(5), nnx.Rngs(5).dropout:
        assert jnp.array_equal(layer(x, rngs=rngs), layer(x, rngs=nnx.Rngs(5).dropout()))
    assert layer.rngs.count[...] == 2, "a call with rngs takes no key of the layer's stream"


@pytest.mark.whole
def test_scanned_layers_have_streams_of_their_own_and_two_calls_drop_other_weights():
    new = lambda rngs: FlashAttention(N, D, dropout_rate=0.3, rngs=rngs)
    layers = nnx.split_rngs(splits=2)(nnx.vmap(new))(nnx.Rngs(0))
    assert layers.rngs.key.shape == (2,) and layers.rngs.key[0] != layers.rngs.key[1]
    run = nnx.jit(nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry))
    x = normal(1, B, T, D)
    assert not jnp.array_equal(run(x, layers), run(x, layers))
    assert jnp.array_equal(layers.rngs.count[...], jnp.array([2, 2]))


@pytest.mark.parametrize(
    "rate, stream, keep_rngs",
    [(0.0, "default", True), (0.3, "default", False), (0.3, "params", True)],
)
def test_a_layer_without_dropout_or_a_stream_has_parameters_alone_as_state(rate, stream, keep_rngs):
    layer = FlashAttention(
        N, D, dropout_rate=rate, rngs=nnx.Rngs(**{stream: 0}), keep_rngs=keep_rngs
    )
    assert not jax.tree.leaves(nnx.state(layer, nnx.RngState)) and jax.tree.leaves(
        nnx.state(layer, nnx.Param)
    )
    if rate:
        with pytest.raises(ValueError, match="dropout needs rngs in training"):
            layer(normal(1, B, T, D))
