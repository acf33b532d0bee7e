"""The layer's rolling and paged caches: token after token gives what the whole text gives at
once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from check import strict_64_bits
from flax import nnx
from jax.sharding import PartitionSpec as P
from selection import whole_but
from test_sharding import place, place_cache

from pallas_flash import masks, paged_cache, scores
from pallas_flash.flax import FlashAttention

B, LENGTH, SIZE, STEP = 2, 150, 12, 10
SLOPES, SCALES = (0.5, 0.25, 0.125, 0.0625), (0.3, 0.9, 0.5, 1.5)


def layer(**kw):
    return FlashAttention(4, SIZE, num_kv_heads=2, head_size=6, rngs=nnx.Rngs(0), **kw)


def tokens(rng, length=LENGTH):
    return normal(rng, B, length, SIZE)


def at_once(model, x):
    return jax.jit(lambda x: model(x))(x)


def in_steps(model, x, cache, size=STEP):
    step = jax.jit(lambda x, cache: model(x, cache=cache), donate_argnums=1)
    ys = []
    for start in range(0, x.shape[1], size):
        y, cache = step(x[:, start : start + size], cache)
        ys.append(y)
    return jnp.concatenate(ys, 1), cache


def in_pages(model, length, dtype=None):
    dtype, pages = dtype or model.cache_dtype, B * -(-length // 8)
    return paged_cache(B, length, 2, 6, pages=pages, page=8, dtype=dtype)


# the layer's options, and a cache for up to so many tokens
KINDS = {
    "in one piece": (
        dict(sinks=True, scale=0.7),
        lambda model, length, dtype=None: model.init_cache(B, length, dtype),
    ),
    "rolling": (
        dict(local_window_size=7, sinks=True, scale=np.array(0.7)),
        lambda model, _, dtype=None: model.init_rolling_cache(B, STEP, dtype),
    ),
    "in pages": (dict(score_mod=scores.Alibi(SLOPES), scale=np.array(SCALES)), in_pages),
}


IN_8_BITS = "in one piece, 8 bits"


def cache_of(kind, model, length):
    dtype = jnp.int8 if kind == IN_8_BITS else None
    return KINDS[kind.removesuffix(", 8 bits")][1](model, length, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_gives_what_the_whole_text_gives_however_long(kind, rng):
    options, make = KINDS[kind]
    model, x = layer(qk_norm=True, **options), tokens(rng)
    y, cache = in_steps(model, x, make(model, LENGTH))
    np.testing.assert_allclose(y, at_once(model, x), atol=2e-6)
    assert cache.lengths.tolist() == [LENGTH] * B
    assert kind != "rolling" or cache.key.shape[1] == 128 < LENGTH
    assert kind != "in pages" or cache.users.tolist() == [1] * 38


@pytest.mark.parametrize("kind", ["in one piece", "in pages"])
def test_tokens_in_a_cache_see_those_that_their_lists_name(kind, rng):
    options, make = KINDS[kind]
    model, x, new = layer(**options), tokens(rng, 2 * STEP), slice(STEP, None)
    indices = rng.integers(-1, 2 * STEP, (B, 2 * STEP, 2, 6))
    expected = model(x, mask=masks.KeyLists(indices))
    _, cache = model(x[:, :STEP], cache=make(model, 2 * STEP))
    found, _ = model(x[:, new], mask=masks.KeyLists(indices[:, new]), cache=cache)
    np.testing.assert_allclose(found, expected[:, new], atol=2e-6)


@pytest.mark.parametrize("size, implementation", [(50, None), (10, "reference")])
def test_what_is_no_decoding_goes_from_a_rolling_cache_to_the_ordinary_forward(
    size, implementation, rng
):
    model, x = layer(local_window_size=7, implementation=implementation), tokens(rng)
    y, _ = in_steps(model, x, model.init_rolling_cache(B, tokens=size), size)
    np.testing.assert_allclose(y, at_once(model, x), atol=2e-6)


@pytest.mark.parametrize("kind", [*KINDS, IN_8_BITS])
def test_rows_go_on_from_their_own_lengths_whatever_was_beyond_them(kind, rng):
    options, _ = KINDS[kind.removesuffix(", 8 bits")]
    model, x = layer(**options), tokens(rng, 20)
    lengths = np.array([3, 10], np.int32)
    prompts = jnp.where(np.arange(10)[:, None] < lengths[:, None, None], x[:, :10], jnp.nan)
    step = jax.jit(lambda x, cache, lengths: model(x, cache=cache, lengths=lengths))
    first, cache = step(prompts, cache_of(kind, model, 24), lengths)
    assert cache.lengths.tolist() == lengths.tolist()
    assert kind != IN_8_BITS or not jnp.isnan(cache.k_scales).any()
    following = np.stack([x[b, n : n + 4] for b, n in enumerate(lengths)])
    y, _ = step(jnp.pad(following, ((0, 0), (0, 6), (0, 0))), cache, np.array([4, 4], np.int32))
    expected, atol = at_once(model, x), 0.02 if kind == IN_8_BITS else 2e-6
    for b, n in enumerate(lengths):
        found = jnp.concatenate([first[b, :n], y[b, :4]])
        np.testing.assert_allclose(found, expected[b, : n + 4], atol=atol)


def test_tokens_that_find_no_page_get_nan_and_the_others_stay_right(rng):
    model, x = layer(), tokens(rng, 20)
    y, cache = in_steps(model, x, paged_cache(B, LENGTH, 2, 6, pages=4, page=8, dtype="float32"))
    assert cache.lengths.tolist() == [16, 16] and jnp.isnan(y[:, 16:]).all()
    np.testing.assert_allclose(y[:, :16], at_once(model, x)[:, :16], atol=2e-6)
    assert cache.lost.tolist() == [4, 4]
    step, first = jax.jit(lambda x, cache: model(x, cache=cache)), np.array([True, False])
    y, cache = step(x[:, :5], cache.release(first))
    np.testing.assert_allclose(y[0], at_once(model, x)[0, :5], atol=2e-6)
    assert jnp.isnan(y[1]).all() and cache.lost.tolist() == [0, 9]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_fewer_bits_gives_nearly_what_the_whole_text_gives(kind, dtype, rng):
    options, make = KINDS[kind]
    model, x = layer(**options), tokens(rng)
    y, cache = in_steps(model, x, make(model, LENGTH, dtype))
    assert cache[0].dtype == dtype and cache.lengths.tolist() == [LENGTH] * B
    error = jnp.linalg.norm(y - at_once(model, x)) / jnp.linalg.norm(y)
    limits = dict(int8=0.01, float8_e4m3fn=0.05, float8_e5m2=0.1, bfloat16=0.01)
    assert 1e-4 < error < limits[dtype]


@pytest.mark.parametrize("kind", whole_but(["none", *KINDS, IN_8_BITS], "none", IN_8_BITS))
def test_64_bits_and_strict_promotion_change_nothing(kind, rng):
    # Flax's RMSNorm takes no strict promotion
    model = layer(local_window_size=7, sinks=True, dtype=jnp.bfloat16)
    prompt, token = (jnp.asarray(tokens(rng, length), jnp.bfloat16) for length in (STEP, 1))

    def run(model, prompt, token):
        if kind == "none":
            return model(prompt)
        cache = cache_of(kind, model, 20)
        if kind == "in pages":
            cache = cache.share(0, 1).release(np.array([True, False]))
        y, cache = model(prompt, cache=cache, lengths=np.array([STEP, 3]))
        return jnp.concatenate([y, model(token, cache=cache)[0]], 1)

    expected = nnx.jit(run)(model, prompt, token)
    with strict_64_bits():
        actual = nnx.jit(run)(model, prompt, token)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), atol=0.02)


@pytest.mark.parametrize("kind", whole_but([*KINDS, IN_8_BITS], "in pages", IN_8_BITS))
def test_on_a_mesh_with_explicit_axes_a_cache_stays_where_it_lies(kind, rng):
    options, _ = KINDS[kind.removesuffix(", 8 bits")]
    model, x = layer(**options | dict(sinks=True)), tokens(rng, 9)
    graph, params = nnx.split(model)
    # which axis of each parameter the heads are
    heads = dict(sinks=P("model"), out=P("model"), scale=P())
    by_head = lambda path, w: place(heads.get(path[0].key, P(None, "model")), w)[0]
    rows = None if kind == "in pages" else "data"
    arrays = "key value k_pages v_pages k_scales v_scales".split()
    places = dict.fromkeys(arrays, P(rows, None, "model")) | dict(lengths=P(rows))
    cache = cache_of(kind, model, 9)
    placed = place_cache(cache, places)

    def generate(params, x, cache):
        model = nnx.merge(graph, params)
        prompt, cache = model(x[:, :5], cache=cache, lengths=jnp.full(B, 4, jnp.int32))
        step = lambda cache, x: model(x[:, None], cache=cache)[::-1]
        # whose carry keeps its type
        cache, ys = jax.lax.scan(step, cache, jnp.swapaxes(x[:, 4:], 0, 1))
        return jnp.concatenate([prompt[:, :4], jnp.swapaxes(ys[:, :, 0], 0, 1)], 1), cache

    expected, full = jax.jit(generate)(params, x, cache)
    y, filled = jax.jit(generate)(
        jax.tree_util.tree_map_with_path(by_head, params), *place(P("data"), x), placed
    )
    np.testing.assert_allclose(y, expected, atol=2e-6)
    np.testing.assert_array_equal(filled.lengths, full.lengths)
    assert jax.tree.map(jax.typeof, filled) == jax.tree.map(jax.typeof, placed)


WINDOW, PLAIN = dict(local_window_size=7), {}
of_pages = lambda model: paged_cache(B, 9, 2, 6, pages=9)
of_steps = lambda model: model.init_rolling_cache(B, STEP)
# what is said, the layer's options, the cache and what else a call is given
REFUSED = {
    r"takes up to 58 tokens .* got 90. Give a prompt in pieces": (
        WINDOW,
        of_steps,
        dict(tokens=90),
    ),
    "a RollingCache does not support mask": (WINDOW, of_steps, dict(mask=np.ones((4, 128), bool))),
    "a PagedCache does not support mask. Its mask is a masks.KeyLists alone: the layer's is_c": (
        PLAIN,
        of_pages,
        dict(mask=np.ones((4, 16), bool)),
    ),
    r"needs a causal layer with local_window_size; this one .* make .* init_cache\(2, max_len": (
        PLAIN,
        lambda _: layer(**WINDOW).init_rolling_cache(B, STEP),
        {},
    ),
    r"this one has no window or is not causal: make the cache with init_cache\(2, max_len": (
        PLAIN,
        lambda _: layer(**WINDOW).init_rolling_cache(B, STEP)._replace(key=jnp.ones(4)),
        {},
    ),
    "needs a causal layer with local_window_size": (PLAIN, of_steps, {}),
    "a quantised KVCache does not support mask. An unquantised KVCache, from init_cache, does": (
        PLAIN,
        lambda model: model.init_cache(B, 9, jnp.int8),
        dict(mask=np.ones((4, 64), bool)),
    ),
    r"got tuple. A call returns the pair \(y, cache\): pass its sec": (
        WINDOW,
        lambda model: (None, of_steps(model)),
        {},
    ),
    "must be a KVCache, a RollingCache or a PagedCache, .* got dict": (WINDOW, lambda _: {}, {}),
    "PagedCache must have 2 rows": (WINDOW, lambda _: paged_cache(3, 9, 2, 6, pages=9), {}),
    "does not support dropout_rate, dropout_rng. layer.eval": (
        dict(dropout_rate=0.1),
        of_pages,
        dict(rngs=jax.random.key(0)),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_cache_cannot_hold_it_refuses_with_a_reason(message, rng):
    options, make, call = REFUSED[message]
    model, call = layer(**options), dict(call)
    x = tokens(rng, call.pop("tokens", 4))
    with pytest.raises((TypeError, ValueError), match=message):
        model(x, cache=make(model), **call)


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
    for kind in KINDS:
        cache = cache_of(kind, model, 9)
        _, kept = model(x, cache=cache, lengths=[9, 2])
        assert kept.lengths.tolist() == [4, 2]


def test_a_window_of_numpy_is_one(rng):
    x, models = tokens(rng, 4), [layer(local_window_size=n) for n in (np.int64(2), 2)]
    y, expected = (model(x, cache=model.init_rolling_cache(B, 4))[0] for model in models)
    np.testing.assert_array_equal(y, expected)
