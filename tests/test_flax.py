"""The hook against Flax's own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_layers import (
    IS_REAL,
    B,
    D,
    H,
    N,
    T,
    assert_close,
    normal,
    value_and_grads,
)

from pallas_flash import dropout_mask, flash_attention, masks
from pallas_flash.flax import attention_fn, hook


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


@pytest.mark.parametrize(
    "library, options, call, said",
    [
        ("nnx", {}, {}, "'broadcast_dropout'.* pass "),
        ("linen", dict(dropout_rate=0.5), dict(deterministic=True), "needs dropout_rng.* need "),
        ("linen", {}, dict(mask=MASKS["float, padded keys"]), "mask must be bool.* need "),
    ],
)
def test_flash_attention_in_the_place_of_the_hook_names_the_hook(library, options, call, said):
    module, params = MODULES[library](dict(attention_fn=flash_attention), **options)
    with pytest.raises((TypeError, ValueError), match=f"{said}.*pallas_flash.flax.attention_fn"):
        module(params, normal(1, B, T, D), **call)


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
