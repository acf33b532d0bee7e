"""The hook against Flax's own attention, and the layer against a dense one in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from pallas_flash import dropout_mask, flash_attention, masks, scores
from pallas_flash.flax import FlashAttention, KVCache, attention_fn, hook, rope

B, T, N, H = 2, 7, 4, 6
D = N * H


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(actual, expected, tolerance=2e-5):
    """All leaves agree, relative to the largest number of each."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * max(1, np.abs(e).max()))


def value_and_grads(apply, *args):
    """apply(*args), and the gradients of its product with fixed random numbers, in one
    compilation."""

    def loss(*args):
        y = apply(*args)
        return jnp.sum(y * normal(99, *y.shape)), y

    grads, y = jax.jit(jax.grad(loss, argnums=tuple(range(len(args))), has_aux=True))(*args)
    return y, grads


# ---- the hook


def nnx_module(hook, **options):
    """An nnx.MultiHeadAttention as a function of its parameters and inputs, and the parameters: the
    same for every hook."""
    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options, **hook)
    graph, params = nnx.split(layer)
    return lambda params, *inputs, **call: nnx.merge(graph, params)(*inputs, **call), params


@functools.cache
def linen_params():
    return linen.MultiHeadDotProductAttention(N).init(jax.random.key(0), normal(0, B, T, D))


def linen_module(hook, **options):
    return linen.MultiHeadDotProductAttention(N, **options, **hook).apply, linen_params()


MODULES = {"nnx": nnx_module, "linen": linen_module}
IS_REAL = np.arange(T) < np.array([[T], [T - 3]])
MASKS = {
    "none": None,
    "boolean": np.tril(np.ones((T, T), bool))[None, None],
    "float, causal": nnx.make_causal_mask(jnp.ones((B, T))),
    "float, padded keys": nnx.make_attention_mask(jnp.ones((B, 1)), IS_REAL),
    "int, padded keys, by query": nnx.make_attention_mask(
        jnp.ones((B, T)), IS_REAL, dtype=jnp.int32
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("library", MODULES)
def test_the_hook_gives_what_flax_gives(library, mask):
    mask, x = MASKS[mask], normal(1, B, T, D)
    ours, params = MODULES[library](dict(attention_fn=attention_fn))
    theirs, _ = MODULES[library]({})
    assert_close(
        *(jax.jit(functools.partial(apply, mask=mask))(params, x) for apply in (ours, theirs))
    )


@pytest.mark.parametrize("library", MODULES)
def test_the_hook_gives_the_gradients_that_flax_gives(library):
    mask, x = MASKS["float, padded keys"], normal(1, B, T, D)
    ours, params = MODULES[library](dict(attention_fn=attention_fn))
    theirs, _ = MODULES[library]({})
    assert_close(
        *(
            value_and_grads(functools.partial(apply, mask=mask), params, x)
            for apply in (ours, theirs)
        )
    )


def test_the_hook_honours_is_causal_and_grouped_heads_and_cross_attention():
    ours, params = nnx_module(dict(attention_fn=attention_fn), num_kv_heads=2, normalize_qk=True)
    theirs, _ = nnx_module({}, num_kv_heads=2, normalize_qk=True)
    inputs = normal(1, B, T, D), normal(2, B, T + 4, D)
    assert_close(
        *(
            jax.jit(functools.partial(apply, is_causal=True))(params, *inputs)
            for apply in (ours, theirs)
        )
    )


@pytest.mark.parametrize("lead", [(), (2, 3)])
@pytest.mark.parametrize("library", MODULES)
def test_the_hook_takes_no_batch_axis_or_several(library, lead):
    x, mask = normal(1, *lead, T, D), nnx.make_causal_mask(jnp.ones((*lead, T)))
    ours, params = MODULES[library](dict(attention_fn=attention_fn))
    theirs, _ = MODULES[library]({})
    y = jax.jit(ours)(params, x, mask=mask)
    assert y.shape == x.shape
    assert_close(y, jax.jit(theirs)(params, x, mask=mask))


@pytest.mark.parametrize("library", MODULES)
def test_the_hook_computes_in_the_dtype_of_the_module(library):
    ours, params = MODULES[library](dict(attention_fn=attention_fn), dtype=jnp.bfloat16)
    theirs, _ = MODULES[library]({}, dtype=jnp.bfloat16)
    y = jax.jit(ours)(params, normal(1, B, T, D))
    assert y.dtype == jnp.bfloat16
    assert_close(y, jax.jit(theirs)(params, normal(1, B, T, D)), 2e-2)


def test_the_hook_decodes_step_by_step_in_nnx_as_flax_does():
    x = normal(1, B, T, D)

    def decode(hook):
        layer = nnx.MultiHeadAttention(N, D, decode=True, rngs=nnx.Rngs(0), **hook)
        layer.init_cache(x.shape)
        step = nnx.jit(lambda layer, x: layer(x))
        return jnp.concatenate([step(layer, x[:, t : t + 1]) for t in range(T)], 1)

    ours = decode(dict(attention_fn=attention_fn))
    full, params = nnx_module({})
    assert_close(ours, decode({}))
    assert_close(ours, jax.jit(functools.partial(full, is_causal=True))(params, x))


def test_the_hook_decodes_step_by_step_in_linen_as_flax_does():
    x = normal(1, B, T, D)

    def decode(hook):
        layer = linen.MultiHeadDotProductAttention(N, decode=True, **hook)
        variables = layer.init(jax.random.key(0), x)
        step, ys = jax.jit(functools.partial(layer.apply, mutable=["cache"])), []
        for t in range(T):
            y, cache = step(variables, x[:, t : t + 1])
            variables, ys = {**variables, **cache}, [*ys, y]
        return jnp.concatenate(ys, 1)

    assert_close(decode(dict(attention_fn=attention_fn)), decode({}))


@pytest.mark.parametrize("library", MODULES)
def test_partial_chooses_the_implementation(library):
    x, mask = normal(1, B, T, D), MASKS["float, padded keys"]
    ours, params = MODULES[library](
        dict(attention_fn=functools.partial(attention_fn, implementation="triton"))
    )
    theirs, _ = MODULES[library]({})
    assert_close(jax.jit(ours)(params, x, mask=mask), jax.jit(theirs)(params, x, mask=mask))
    with pytest.raises(ValueError, match="implementation must be"):
        MODULES[library](
            dict(attention_fn=functools.partial(attention_fn, implementation="none of them"))
        )[0](params, x)


def test_a_padding_mask_is_not_spread_over_the_queries(monkeypatch):
    seen = []
    monkeypatch.setattr(
        hook, "flash_attention", lambda q, k, v, bias, mask, **_: seen.append(mask) or q
    )
    ours, params = nnx_module(dict(attention_fn=attention_fn))
    ours(params, normal(1, B, T, D), mask=MASKS["float, padded keys"])
    assert seen[0].shape == (B, 1, 1, T) and seen[0].dtype == bool


def test_the_hook_takes_a_mask_object_through_flax():
    ours, params = nnx_module(dict(attention_fn=attention_fn))
    theirs, _ = nnx_module({})
    x = normal(1, B, T, D)
    expected = jax.jit(functools.partial(theirs, is_causal=True))(params, x)
    assert_close(jax.jit(functools.partial(ours, mask=masks.Causal()))(params, x), expected)


def test_a_query_that_sees_no_key_gets_zero_where_flax_gives_the_mean():
    q, k, v = (normal(i, T, N, H) for i in range(3))
    mask = np.ones((1, T, T), bool)
    mask[0, 3] = False
    ours, theirs = (
        attention_fn(q, k, v, mask=mask),
        nnx.dot_product_attention(q, k, v, mask=jnp.asarray(mask)),
    )
    assert np.all(np.asarray(ours[3]) == 0)
    assert_close(theirs[3], v.mean(0))
    others = np.arange(T) != 3
    assert_close(ours[others], theirs[others])


def test_the_hook_promotes_as_flax_does():
    q, k, v = (
        normal(0, B, T, N, H),
        normal(1, B, T, N, H, dtype=jnp.bfloat16),
        jnp.ones((B, T, N, H), jnp.int32),
    )
    bias = normal(3, 1, N, T, T)
    for dtype in (None, jnp.bfloat16):
        ours, theirs = (
            jax.jit(functools.partial(f, dtype=dtype))(q, k, v, bias)
            for f in (attention_fn, nnx.dot_product_attention)
        )
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, 2e-5 if dtype is None else 3e-2)


@pytest.mark.parametrize(
    "precision", ["highest", "bfloat16", jax.lax.Precision.HIGH, ("default", None)]
)
def test_every_precision_is_met(precision):
    q, k, v = (normal(i, 1, T, N, H) for i in range(3))
    assert jnp.array_equal(attention_fn(q, k, v, precision=precision), attention_fn(q, k, v))


def test_deterministic_turns_dropout_off():
    x = normal(1, B, T, D)
    ours, params = nnx_module(dict(attention_fn=attention_fn), dropout_rate=0.5)
    theirs, _ = nnx_module({}, dropout_rate=0.5)
    assert_close(ours(params, x, deterministic=True), theirs(params, x, deterministic=True))


def dense_with_dropout(query, key, value, dropout_rng, dropout_rate, broadcast_dropout, **_):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / H**0.5)
    shape = weights.shape[-2:] if broadcast_dropout else weights.shape
    weights *= dropout_mask(dropout_rng, dropout_rate, shape) / (1 - dropout_rate)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("library", MODULES)
def test_the_hook_drops_one_mask_from_all_rows_and_heads_or_one_from_each_as_the_module_asks(
    library, broadcast
):
    more, inputs = (
        dict(dropout_rate=0.5) | ({} if broadcast else dict(broadcast_dropout=False)),
        normal(1, B, T, D),
    )
    rngs = lambda: dict(
        rngs=nnx.Rngs(dropout=3) if library == "nnx" else dict(dropout=jax.random.key(3))
    )
    results = []
    for attend in (attention_fn, dense_with_dropout):
        module, params = MODULES[library](dict(attention_fn=attend), **more)
        results.append(
            jax.jit(
                lambda x, module=module, params=params: module(
                    params, x, deterministic=False, **rngs()
                )
            )(inputs)
        )
    assert_close(*results)


@pytest.mark.parametrize("library", MODULES)
def test_the_hook_drops_what_flash_attention_drops_with_the_key_that_flax_hands_on(
    library, monkeypatch
):
    given, attend = [], hook.flash_attention
    watched = lambda *args, **kw: given.append((args, kw)) or attend(*args, **kw)
    monkeypatch.setattr(hook, "flash_attention", watched)
    ours, params = MODULES[library](
        dict(attention_fn=attention_fn), dropout_rate=0.5, broadcast_dropout=False
    )
    x, rngs = (
        normal(1, B, T, D),
        dict(rngs=nnx.Rngs(dropout=3) if library == "nnx" else dict(dropout=jax.random.key(3))),
    )
    first, again = (ours(params, x, deterministic=False, **rngs) for _ in range(2))
    _, kw = given[0]
    assert kw["dropout_rate"] == 0.5 and kw["dropout_rng"] is not None
    assert np.array_equal(first, again) == (library == "linen"), "nnx counts its calls"
    assert not np.array_equal(first, ours(params, x, deterministic=True))


@pytest.mark.parametrize("library", MODULES)
def test_the_hook_refuses_to_sow_weights(library):
    ours, params = MODULES[library](dict(attention_fn=attention_fn))
    with pytest.raises(
        NotImplementedError, match=r"sow_weights False; pallas_flash.attention_weights computes"
    ):
        ours(params, normal(1, B, T, D), sow_weights=True)


def test_the_hook_refuses_the_einsums_of_linen():
    einsum = lambda: jnp.einsum
    options = dict(qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum)
    ours, params = linen_module(dict(attention_fn=attention_fn), **options)
    with pytest.raises(NotImplementedError, match="no einsum to replace"):
        ours(params, normal(1, B, T, D))


@pytest.mark.parametrize(
    "asked, text",
    [
        (dict(einsum_dot_general=jax.lax.dot_general), "no einsum to replace"),
        (dict(precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), "precision must be None"),
        (dict(precision="BF16_BF16_F32"), "precision must be None"),
        (dict(input_positions=np.arange(T)), "it has no RoPE"),
    ],
)
def test_the_hook_refuses_what_it_cannot_honour(asked, text):
    q = normal(0, B, T, N, H)
    with pytest.raises(NotImplementedError, match=text):
        attention_fn(q, q, q, **asked)


# ---- the layer


def plain_rope(x, positions, base):
    """The same rotation by complex numbers: pair i is x[i] + 1j x[i + H/2]."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * base ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], -1)


def plain_layer(p, x, visible, rope_base=10_000.0, soft_cap=None):
    """The layer's equations on its parameters, dense; visible is bool, broadcastable to [B, T,
    T]."""
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
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
    weights = jax.nn.softmax(jnp.where(visible[:, None], s, -jnp.inf))
    return jnp.einsum("bnts,bsnh,nhe->bte", weights, v, p["out"]["kernel"]) + p["out"].get(
        "bias", 0
    )


def layer_of(num_heads=N, in_features=D, **options):
    """A layer whose parameters are all random, also those that start at 0 or 1."""
    layer = FlashAttention(
        num_heads, in_features, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0), **options
    )
    params = nnx.state(layer, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    nnx.update(
        layer,
        jax.tree.unflatten(
            tree, [x + 0.3 * normal(i, *x.shape, dtype=x.dtype) for i, x in enumerate(leaves)]
        ),
    )
    return layer


def pure(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def apply(layer):
    """The layer as a function of its parameters."""
    graph, state = nnx.split(layer)

    def run(params, x, **call):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x, **call)

    return run


ROW, COLUMN = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = (COLUMN <= ROW)[None]
WINDOW = CAUSAL & (ROW - COLUMN <= 2)
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
    "window, soft cap": (
        dict(local_window_size=2, logits_soft_cap=0.7),
        dict(soft_cap=0.7),
        WINDOW,
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
        num_kv_heads=2, qk_norm=True, use_bias=True, local_window_size=2, rope_base=50.0
    )
    args, plain = (
        (pure(layer), normal(1, B, T, D)),
        functools.partial(plain_layer, visible=WINDOW, rope_base=50.0),
    )
    assert_close(value_and_grads(apply(layer), *args), value_and_grads(plain, *args))


ANY = np.random.default_rng(0).random((B, 1, T, T)) < 0.6
PREFIX = np.array([2, 5], np.int32)
CALLS = {
    "a boolean mask": (
        dict(mask=ANY | np.eye(T, dtype=bool)),
        CAUSAL & (ANY[:, 0] | np.eye(T, dtype=bool)),
    ),
    "a float mask of keys": (
        dict(mask=IS_REAL[:, None, None].astype("f4")),
        CAUSAL & IS_REAL[:, None],
    ),
    "a mask object": (dict(mask=masks.Window(1)), CAUSAL & (ROW - COLUMN <= 1)),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_layer_joins_its_mask_with_causality(case):
    call, visible = CALLS[case]
    layer, x = layer_of(), normal(1, B, T, D)
    assert_close(
        jax.jit(lambda x: layer(x, **call))(x), jax.jit(plain_layer)(pure(layer), x, visible)
    )


def test_a_layer_that_is_not_causal_takes_a_mask_that_is_partly_so():
    layer, x = layer_of(is_causal=False), normal(1, B, T, D)
    visible = CAUSAL | (COLUMN < PREFIX[:, None, None])
    actual = jax.jit(lambda x: layer(x, mask=masks.PrefixLM(PREFIX)))(x)
    assert_close(actual, jax.jit(plain_layer)(pure(layer), x, visible))


def test_packed_documents_are_as_documents_alone():
    layer, x = layer_of(num_kv_heads=2, qk_norm=True), normal(1, B, T, D)
    # equal ids need not be neighbours
    ids = np.array([[5, 5, 5, 1, 1, 8, 8], [2, 2, 2, 3, 3, 2, 2]])
    together = jax.jit(lambda x: layer(x, segment_ids=ids))(x)
    alone = jax.jit(layer)
    assert_close(together[:1, :3], alone(x[:1, :3]))
    assert_close(together[:1, 3:5], alone(x[:1, 3:5]))
    assert_close(together[:1, 5:], alone(x[:1, 5:]))
    assert_close(together[1:, 3:5], alone(x[1:, 3:5]))


def test_beyond_the_lengths_nothing_is_read_and_the_attention_is_zero():
    layer, x, lengths = layer_of(is_causal=False), normal(1, B, T, D), np.array([T, 3], np.int32)
    is_real = np.arange(T) < lengths[:, None]
    y = jax.jit(layer)(jnp.where(is_real[..., None], x, jnp.nan), lengths=lengths)
    assert_close(y[:1], jax.jit(layer)(x[:1]))
    assert_close(y[1:, :3], jax.jit(layer)(x[1:, :3]))
    assert np.all(np.asarray(y[1, 3:]) == 0)


def test_without_rope_the_layer_is_flax_own_on_the_same_parameters():
    theirs = nnx.MultiHeadAttention(
        N, D, num_kv_heads=2, use_bias=False, decode=False, rngs=nnx.Rngs(3)
    )
    ours = FlashAttention(N, D, num_kv_heads=2, rope_base=None, rngs=nnx.Rngs(0))
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    x = normal(1, B, T, D)
    assert_close(jax.jit(ours)(x), jax.jit(functools.partial(theirs, is_causal=True))(x))


def test_in_bfloat16_the_layer_stays_close_to_float32():
    exact, x = layer_of(num_kv_heads=2, qk_norm=True), normal(1, B, T, D)
    layer = layer_of(num_kv_heads=2, qk_norm=True, dtype=jnp.bfloat16)
    y = jax.jit(layer)(x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, jax.jit(exact)(x), 3e-2)
    cache = layer.init_cache(B, T)
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
    z, cache = jax.jit(lambda x, cache: layer(x, cache=cache))(x, cache)
    assert z.dtype == cache.key.dtype == jnp.bfloat16
    assert_close(z, y, 1e-2)


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


def test_sinks_and_dropout_of_the_layer_are_those_of_flash_attention():
    layer, x = (
        layer_of(num_kv_heads=2, sinks=True, dropout_rate=0.3, implementation="reference"),
        normal(1, B, T, D),
    )
    assert layer.sinks[...].shape == (N,) and np.any(np.asarray(layer.sinks[...]) != 0)
    key = jax.random.key(5)
    mask = dropout_mask(key, 0.3, (B, N, T, T)) / (1 - 77 / 256)

    def plain(p, x):
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", x, p[name]["kernel"]) for name in ("query", "key", "value")
        )
        q, k = (plain_rope(a, np.arange(T), 10_000.0) for a in (q, k))
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        e = jnp.where(CAUSAL[:, None], jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5), 0)
        weights = mask * e / (e.sum(-1, keepdims=True) + jnp.exp(p["sinks"])[:, None, None])
        return jnp.einsum("bnts,bsnh,nhe->bte", weights, v, p["out"]["kernel"])

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


# ---- the cache


def decode(layer, x, chunks, max_length):
    """y of x fed in chunks of these sizes, each written into the memory of the cache before, and
    the cache."""
    step = jax.jit(lambda x, cache: layer(x, cache=cache), donate_argnums=1)
    cache, ys, start = layer.init_cache(x.shape[0], max_length), [], 0
    for t in chunks:
        y, cache = step(x[:, start : start + t], cache)
        ys, start = [*ys, y], start + t
    return jnp.concatenate(ys, 1), cache


@pytest.mark.parametrize("chunks", [(1,) * T, (T,), (3, 1, 3)])
def test_decoding_in_any_chunks_is_the_full_forward(chunks):
    layer, x = layer_of(num_kv_heads=2, qk_norm=True, local_window_size=(3, 0)), normal(1, B, T, D)
    y, cache = decode(layer, x, chunks, max_length=T + 4)
    assert_close(y, jax.jit(layer)(x))
    assert np.array_equal(cache.length, [T, T])


def test_decoding_in_a_scan_fills_the_cache_to_its_end():
    layer, x = layer_of(num_kv_heads=2), normal(1, B, T, D)

    def step(cache, token):
        y, cache = layer(token[:, None], cache=cache)
        return cache, y[:, 0]

    _, y = jax.jit(lambda x: jax.lax.scan(step, layer.init_cache(B, T), x.swapaxes(0, 1)))(x)
    assert_close(y.swapaxes(0, 1), jax.jit(layer)(x))


def test_a_layer_that_is_not_causal_sees_the_tokens_in_its_cache_and_none_of_the_empty_slots():
    layer, x = layer_of(is_causal=False), normal(1, B, T, D)
    step, full = jax.jit(lambda x, cache: layer(x, cache=cache)), jax.jit(layer)
    first, cache = step(x[:, :3], layer.init_cache(B, T + 4))
    assert_close(first, full(x[:, :3]))
    assert_close(step(x[:, 3:], cache)[0], full(x)[:, 3:])


def test_rows_of_different_lengths_decode_side_by_side():
    layer, x = layer_of(num_kv_heads=2), normal(1, B, T, D)
    lengths, padded = np.array([5, 2], np.int32), 5
    is_real = np.arange(padded)[None] < lengths[:, None]
    step = jax.jit(lambda x, cache, **call: layer(x, cache=cache, **call))
    y, cache = step(
        jnp.where(is_real[..., None], x[:, :padded], jnp.nan),
        layer.init_cache(B, T),
        lengths=lengths,
    )
    assert np.array_equal(cache.length, lengths)
    following = jnp.stack([x[b, n : n + 2] for b, n in enumerate(lengths)])
    z, cache = step(following, cache)
    full = jax.jit(layer)(x)
    for b, n in enumerate(lengths):
        assert_close(jnp.concatenate([y[b, :n], z[b]]), full[b, : n + 2])


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


def test_a_token_without_room_is_nan_and_spoils_nothing_else():
    layer, x = layer_of(), normal(1, B, T, D)
    call = jax.jit(lambda x, cache: layer(x, cache=cache))
    cache = layer.init_cache(B, 5)._replace(length=jnp.array([0, 3], jnp.int32))
    y, after = call(x[:, :4], cache)
    assert np.array_equal(np.isnan(y).all(-1), [[False] * 4, [False, False, True, True]])
    assert np.array_equal(np.isnan(y).any(-1), np.isnan(y).all(-1))
    fits, expected = call(x[:, :2], cache)
    assert_close(y[1, :2], fits[1])
    assert_close(after.key[1], expected.key[1])
    assert_close(y[0, :2], fits[0])
    assert np.isnan(call(x[:, :2], after)[0][1]).all()


def test_a_cache_of_another_dtype_keeps_it():
    layer, x = layer_of(), normal(1, B, T, D)
    y, cache = jax.jit(lambda x, cache: layer(x, cache=cache))(
        x, layer.init_cache(B, T, dtype=jnp.bfloat16)
    )
    assert (y.dtype, cache.key.dtype) == (jnp.float32, jnp.bfloat16)
    assert_close(y, jax.jit(layer)(x), 2e-2)


@pytest.mark.parametrize(
    "options, text",
    [
        (
            dict(num_kv_heads=3),
            "num_heads must be a multiple of num_kv_heads, both above 0; got 4 and 3",
        ),
        (dict(num_kv_heads=0), "got 4 and 0"),
        (dict(head_size=5), "head_size must be even, since RoPE turns pairs; got 5"),
        (dict(in_features=22), "in_features must be a multiple of num_heads = 4; got 22"),
    ],
)
def test_impossible_sizes_raise(options, text):
    with pytest.raises(ValueError, match=text):
        layer_of(**options)


def test_an_odd_head_size_is_possible_without_rope():
    assert jax.jit(layer_of(head_size=5, rope_base=None))(normal(0, B, T, D)).shape == (B, T, D)


def test_impossible_calls_raise():
    layer, x = layer_of(num_kv_heads=2), normal(0, B, T, D)
    with pytest.raises(
        ValueError, match=r"inputs_q must be \[B, T, in_features\] = \(B, T, 24\); got \(2, 7, 23\)"
    ):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"inputs_q must be .*; got \(7, 24\)"):
        layer(x[0])
    with pytest.raises(
        ValueError, match="the 7 tokens of inputs_q must fit into the cache's max_length; got 6"
    ):
        layer(x, cache=layer.init_cache(B, 6))
    with pytest.raises(
        ValueError,
        match=r"cache.key must be .*\(2, max_length, 2, 6\) .*; got \(3, 9, 2, 6\).*init_cache\(2,",
    ):
        layer(x, cache=layer.init_cache(3, 9))
    with pytest.raises(ValueError, match="segment_ids cannot go with a cache"):
        layer(x, cache=layer.init_cache(B, 9), segment_ids=np.zeros((B, T), int))


def test_the_cache_is_a_pytree_of_arrays():
    cache = layer_of().init_cache(B, 9)
    assert isinstance(jax.tree.map(jnp.copy, cache), KVCache)
    assert [x.shape for x in jax.tree.leaves(cache)] == [(B, 9, N, H), (B, 9, N, H), (B,)]


# ---- cross-attention


def cross_layer(**options):
    return layer_of(num_kv_heads=2, in_kv_features=11, is_causal=False, rope_base=None, **options)


def test_cross_attention_is_that_of_flax_on_the_same_parameters():
    options = dict(num_kv_heads=2, in_kv_features=11, use_bias=False)
    theirs = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(3), **options)
    ours = FlashAttention(N, D, is_causal=False, rope_base=None, rngs=nnx.Rngs(0), **options)
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    inputs = normal(1, B, T, D), normal(2, B, T + 4, 11), normal(3, B, T + 4, 11)
    assert_close(jax.jit(ours)(*inputs), jax.jit(theirs)(*inputs))
    assert_close(jax.jit(ours)(*inputs[:2]), jax.jit(theirs)(*inputs[:2]))


def test_cross_attention_sees_the_real_inputs_alone():
    layer, x, y = cross_layer(qk_norm=True), normal(1, B, T, D), normal(2, B, T + 4, 11)
    kv_lengths, lengths = np.array([T + 4, 3], np.int32), np.array([T, 2], np.int32)
    padded = jnp.where(np.arange(T + 4)[None, :, None] < kv_lengths[:, None, None], y, jnp.nan)
    z = jax.jit(lambda x, y: layer(x, y, lengths=lengths, kv_lengths=kv_lengths))(x, padded)
    assert_close(z[:1], jax.jit(layer)(x[:1], y[:1]))
    assert_close(z[1:, :2], jax.jit(layer)(x[1:, :2], y[1:, :3]))
    assert np.all(np.asarray(z[1, 2:]) == 0)


def test_what_makes_no_sense_in_cross_attention_raises():
    layer, x, y = cross_layer(), normal(0, B, T, D), normal(0, B, 9, 11)
    for options in (dict(is_causal=True), dict(rope_base=10.0), dict(local_window_size=3)):
        with pytest.raises(
            ValueError, match="is_causal=False, rope_base=None and no local_window_size"
        ):
            layer_of(**(dict(in_kv_features=11, is_causal=False, rope_base=None) | options))(x, y)
    with pytest.raises(ValueError, match="in_kv_features = 11 beside 24 needs inputs_k"):
        layer(x)
    with pytest.raises(ValueError, match="give inputs_k too"):
        layer_of()(x, inputs_v=x)
    with pytest.raises(ValueError, match="give inputs_k too, or lengths"):
        layer_of()(x, kv_lengths=np.array([1, 2]))
    with pytest.raises(ValueError, match=r"masks\.Documents"):
        layer(x, y, segment_ids=np.zeros((B, T), int))
    with pytest.raises(ValueError, match="a cache cannot go with inputs_k"):
        layer(x, y, cache=layer.init_cache(B, 9))
    with pytest.raises(
        ValueError, match=r"inputs_k must be .* = \(2, S, 11\) .*; got \(2, 9, 10\)"
    ):
        layer(x, y[..., 1:])
    with pytest.raises(
        ValueError, match=r"inputs_v must be .* = \(2, 9, 11\) .*; got \(2, 8, 11\)"
    ):
        layer(x, y, y[:, 1:])


# ---- masks and options


@pytest.mark.parametrize("axes", ["TS", "NTS", "11TS", "B1TS"])
def test_leading_axes_of_a_mask_may_be_left_out(axes):
    sizes = {"B": B, "N": N, "T": T, "S": T, "1": 1}
    mask = (np.random.default_rng(0).random([sizes[a] for a in axes]) < 0.6) | np.eye(T, dtype=bool)
    layer, x = layer_of(implementation="reference"), normal(1, B, T, D)
    q = normal(2, B, T, N, H)
    full = np.broadcast_to(mask, (B, N, T, T))
    assert_close(layer(x, mask=mask), layer(x, mask=full))
    assert_close(layer(x, mask=mask.astype("f4")), layer(x, mask=full))
    assert_close(attention_fn(q, q, q, mask=mask.astype("f4")), flash_attention(q, q, q, mask=full))


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


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(local_window_size=-1), r"local_window_size must be a static int or \(left, right\)"),
        (dict(local_window_size=(1, 2, 3)), "local_window_size must be"),
        (
            dict(logits_soft_cap=0.0),
            "logits_soft_cap must be a finite number above 0, or None; got 0",
        ),
        (dict(implementation="flash3"), "implementation must be None or one of .*; got 'flash3'"),
        (dict(is_causal="yes"), "is_causal must be a static bool"),
        (
            dict(dropout_rate=1.0),
            "dropout_rate must be at least 0 and below 1; got 1.0",
        ),
        (dict(rope_base=0.0), "rope_base must be a number above 0, or None"),
    ],
)
def test_the_constructor_refuses_what_the_first_call_would(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        layer_of(**options)


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
    hook = functools.partial(attention_fn, is_causal=True, score_mod=scores.Alibi(slopes))
    q = x.reshape(1, 9, 2, 8)
    np.testing.assert_allclose(
        hook(q, q, q),
        flash_attention(q, q, q, is_causal=True, score_mod=scores.Alibi(slopes)),
        atol=1e-6,
    )
    assert make(scores.Alibi(slopes))(x).shape == x.shape
    with pytest.raises(TypeError, match="score_mod must be a function"):
        make(3)
