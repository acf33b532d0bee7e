"""The layer's rolling and paged caches: token after token gives what the whole text gives at
once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import paged_cache, scores
from pallas_flash.flax import FlashAttention

B, LENGTH, SIZE, STEP = 2, 150, 12, 10
SLOPES = 0.5, 0.25, 0.125, 0.0625


def layer(**kw):
    return FlashAttention(4, SIZE, num_kv_heads=2, head_size=6, rngs=nnx.Rngs(0), **kw)


def tokens(rng, length=LENGTH):
    return rng.normal(size=(B, length, SIZE)).astype(np.float32)


def at_once(model, x):
    return jax.jit(lambda x: model(x))(x)


def in_steps(model, x, cache, size=STEP):
    step = jax.jit(lambda x, cache: model(x, cache=cache), donate_argnums=1)
    ys = []
    for start in range(0, x.shape[1], size):
        y, cache = step(x[:, start : start + size], cache)
        ys.append(y)
    return jnp.concatenate(ys, 1), cache


def test_a_rolling_cache_gives_what_the_whole_text_gives_however_long(rng):
    model, x = layer(local_window_size=7, sinks=True, qk_norm=True), tokens(rng)
    cache = model.init_rolling_cache(B, tokens=STEP)
    assert cache.key.shape[1] == 128 < LENGTH
    y, cache = in_steps(model, x, cache)
    np.testing.assert_allclose(y, at_once(model, x), atol=2e-6)
    assert cache.length.tolist() == [LENGTH] * B


@pytest.mark.parametrize("size, implementation", [(50, None), (10, "reference")])
def test_what_is_no_decoding_goes_from_a_rolling_cache_to_the_ordinary_forward(
    size, implementation, rng
):
    model, x = layer(local_window_size=7, implementation=implementation), tokens(rng)
    y, _ = in_steps(model, x, model.init_rolling_cache(B, tokens=size), size)
    np.testing.assert_allclose(y, at_once(model, x), atol=2e-6)


def test_rows_of_a_rolling_cache_go_on_from_their_own_lengths(rng):
    model, x = layer(local_window_size=7), tokens(rng, 20)
    lengths = np.array([3, 10], np.int32)
    prompts = jnp.where(np.arange(10)[:, None] < lengths[:, None, None], x[:, :10], jnp.nan)
    step = jax.jit(lambda x, cache, lengths: model(x, cache=cache, lengths=lengths))
    _, cache = step(prompts, model.init_rolling_cache(B, 10), lengths)
    following = np.stack([x[b, n : n + 4] for b, n in enumerate(lengths)])
    y, _ = step(jnp.pad(following, ((0, 0), (0, 6), (0, 0))), cache, np.array([4, 4], np.int32))
    expected = at_once(model, x)
    np.testing.assert_allclose(
        y[:, :4], np.stack([expected[b, n : n + 4] for b, n in enumerate(lengths)]), atol=2e-6
    )


def test_a_paged_cache_gives_what_the_whole_text_gives(rng):
    model, x = layer(score_mod=scores.Alibi(SLOPES)), tokens(rng)
    y, cache = in_steps(
        model, x, paged_cache(B, LENGTH, 2, 6, pages=2 * 19, page=8, dtype="float32")
    )
    np.testing.assert_allclose(y, at_once(model, x), atol=2e-6)
    assert cache.users.tolist() == [1] * 38


def test_tokens_that_find_no_page_get_nan_and_the_others_stay_right(rng):
    model, x = layer(), tokens(rng, 20)
    y, cache = in_steps(model, x, paged_cache(B, LENGTH, 2, 6, pages=4, page=8, dtype="float32"))
    assert cache.length.tolist() == [16, 16] and jnp.isnan(y[:, 16:]).all()
    np.testing.assert_allclose(y[:, :16], at_once(model, x)[:, :16], atol=2e-6)


CACHES = {
    "in one piece": ({}, lambda model, dtype: model.init_cache(B, LENGTH, dtype)),
    "rolling": (
        dict(local_window_size=7),
        lambda model, dtype: model.init_rolling_cache(B, STEP, dtype),
    ),
    "in pages": (
        {},
        lambda model, dtype: paged_cache(B, LENGTH, 2, 6, pages=2 * 19, page=8, dtype=dtype),
    ),
}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_quantised_cache_gives_nearly_what_the_whole_text_gives(kind, dtype, rng):
    options, make = CACHES[kind]
    model, x = layer(sinks=True, **options), tokens(rng)
    y, cache = in_steps(model, x, make(model, dtype))
    assert cache.key.dtype == dtype and cache.length.tolist() == [LENGTH] * B
    error = jnp.linalg.norm(y - at_once(model, x)) / jnp.linalg.norm(y)
    assert 1e-4 < error < dict(int8=0.01, float8_e4m3fn=0.05, float8_e5m2=0.1)[dtype]


def test_tokens_without_room_in_a_quantised_cache_get_nan_and_padding_is_not_kept(rng):
    model, x = layer(), tokens(rng, 70)
    step = jax.jit(lambda x, cache, lengths: model(x, cache=cache, lengths=lengths))
    _, cache = step(
        jnp.array(x[:, :10]).at[1, 4:].set(jnp.nan),
        model.init_cache(B, 10, jnp.int8),
        np.array([10, 4], np.int32),
    )
    assert cache.key.shape[1] == 64 and not jnp.isnan(cache.key_scale).any()
    x = jnp.stack([x[0, 10:70], x[1, 4:64]])
    y, _ = jax.jit(lambda x, cache: model(x, cache=cache))(x, cache)
    assert (
        jnp.isnan(y[0, 54:]).all() and not jnp.isnan(y[0, :54]).any() and not jnp.isnan(y[1]).any()
    )


WITH = {
    "none": lambda model: None,
    "in one piece": lambda model: model.init_cache(B, 20),
    "in one piece, 8 bits": lambda model: model.init_cache(B, 20, jnp.int8),
    "rolling": lambda model: model.init_rolling_cache(B, STEP),
    "paged": lambda model: (
        paged_cache(B, 20, 2, 6, pages=9, page=8).share(0, 1).release(np.array([True, False]))
    ),
}


@pytest.mark.parametrize("kind", WITH)
def test_64_bits_and_strict_promotion_change_nothing(kind, rng):
    # Flax's RMSNorm takes no strict promotion
    model = layer(local_window_size=7, sinks=True, dtype=jnp.bfloat16)
    prompt, token = (jnp.asarray(tokens(rng, length), jnp.bfloat16) for length in (STEP, 1))

    def run(model, prompt, token):
        if (cache := WITH[kind](model)) is None:
            return model(prompt)
        y, cache = model(prompt, cache=cache, lengths=np.array([STEP, 3]))
        return jnp.concatenate([y, model(token, cache=cache)[0]], 1)

    expected = nnx.jit(run)(model, prompt, token)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        actual = nnx.jit(run)(model, prompt, token)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), atol=0.02)


ON_A_MESH = {
    "in one piece": (dict(sinks=True), lambda model: model.init_cache(B, 9)),
    "in one piece, 8 bits": (dict(sinks=True), lambda model: model.init_cache(B, 9, jnp.int8)),
    "rolling": (
        dict(sinks=True, local_window_size=3),
        lambda model: model.init_rolling_cache(B, 6),
    ),
    "paged": (
        dict(sinks=True, score_mod=scores.Alibi(SLOPES)),
        lambda model: paged_cache(B, 9, 2, 6, pages=5, page=8, dtype="float32"),
    ),
}


@pytest.mark.parametrize("kind", ON_A_MESH)
def test_on_a_mesh_with_explicit_axes_a_cache_stays_where_it_lies(kind, rng):
    options, make = ON_A_MESH[kind]
    model, x = layer(**options), tokens(rng, 9)
    graph, params = nnx.split(model)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    heads = dict(sinks=P("model"), out=P("model"))  # which axis of each parameter they are
    by_head = lambda path, w: place(w, *heads.get(path[0].key, P(None, "model")))
    rows = None if kind == "paged" else "data"
    places = dict.fromkeys(
        ("key", "value", "key_scale", "value_scale"), P(rows, None, "model")
    ) | dict(length=P(rows))
    cache = make(model)
    placed = cache._replace(
        **{
            name: place(y, *places.get(name, ()))
            for name, y in cache._asdict().items()
            if y is not None
        }
    )

    def generate(params, x, cache):
        model = nnx.merge(graph, params)
        prompt, cache = model(x[:, :5], cache=cache, lengths=jnp.full(B, 4, jnp.int32))
        step = lambda cache, x: model(x[:, None], cache=cache)[::-1]
        # whose carry keeps its type
        cache, ys = jax.lax.scan(step, cache, jnp.swapaxes(x[:, 4:], 0, 1))
        return jnp.concatenate([prompt[:, :4], jnp.swapaxes(ys[:, :, 0], 0, 1)], 1), cache

    expected, full = jax.jit(generate)(params, x, cache)
    y, filled = jax.jit(generate)(
        jax.tree_util.tree_map_with_path(by_head, params), place(x, "data"), placed
    )
    np.testing.assert_allclose(y, expected, atol=2e-6)
    np.testing.assert_array_equal(filled.length, full.length)
    assert jax.tree.map(jax.typeof, filled) == jax.tree.map(jax.typeof, placed)


def refused(message, model, x, cache, **kw):
    with pytest.raises((TypeError, ValueError), match=message):
        model(x, cache=cache, **kw)


def test_what_a_cache_cannot_hold_it_refuses_with_a_reason(rng):
    model, x = layer(local_window_size=7), tokens(rng, 90)
    cache = model.init_rolling_cache(B, STEP)
    refused(r"takes up to 58 tokens .* got 90. Give a prompt in pieces", model, x, cache)
    refused(
        "a RollingCache does not support mask", model, x[:, :4], cache, mask=np.ones((4, 128), bool)
    )
    refused("needs a causal layer with local_window_size", layer(), x[:, :4], cache)
    whole = layer().init_cache(B, 9, jnp.int8)
    refused(
        "a quantised KVCache does not support mask. Use an unquantised KVCache",
        layer(),
        x[:, :4],
        whole,
        mask=np.ones((4, 64), bool),
    )
    refused(
        r"lengths must be int32 \[B\] = \(2,\); got \(3,\)",
        model,
        x[:, :4],
        cache,
        lengths=[1, 2, 3],
    )
    pair = model(x[:, :4], cache=cache)
    refused(r"got tuple. A call returns the pair \(y, cache\): pass its sec", model, x[:, :4], pair)
    refused("must be a KVCache, a RollingCache or a PagedCache, .* got dict", model, x[:, :4], {})
    refused("PagedCache must have 2 rows", model, x[:, :4], paged_cache(3, 9, 2, 6, pages=9))
    in_training = layer(dropout_rate=0.1)
    pages = paged_cache(B, 9, 2, 6, pages=9)
    refused(
        "does not support dropout_rate, dropout_rng. .* layer.eval",
        in_training,
        x[:, :4],
        pages,
        rngs=jax.random.key(0),
    )
    with pytest.raises(ValueError, match="needs a causal layer with local_window_size"):
        layer().init_rolling_cache(B)


def test_a_paged_cache_that_rounds_what_the_layer_computes_says_so(rng):
    model, x = layer(), tokens(rng, 4)
    told = r"stores bfloat16, to which the layer's float32 is rounded: .*dtype=jnp.float32\)"
    with pytest.warns(UserWarning, match=told):
        model(x, cache=paged_cache(B, 9, 2, 6, pages=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for dtype in "float32", "int8":
            model(x, cache=paged_cache(B, 9, 2, 6, pages=2, dtype=dtype))


def test_lengths_beyond_the_tokens_keep_no_more_than_there_are(rng):
    model, x = layer(local_window_size=7), tokens(rng, 4)
    for cache in (
        model.init_cache(B, 9),
        model.init_rolling_cache(B, 4),
        paged_cache(B, 9, 2, 6, pages=2, dtype="float32"),
    ):
        _, kept = model(x, cache=cache, lengths=[9, 2])
        assert kept.length.tolist() == [4, 2]


def test_a_window_of_numpy_is_one(rng):
    x, models = tokens(rng, 4), [layer(local_window_size=n) for n in (np.int64(2), 2)]
    y, expected = (model(x, cache=model.init_rolling_cache(B, 4))[0] for model in models)
    np.testing.assert_array_equal(y, expected)
