"""The hook against Flax's own attention."""

import functools
from typing import Any, NamedTuple

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
from selection import whole_but

from pallas_flash import dropout_mask, flash_attention, masks
from pallas_flash.flax import attention_fn, hook


def nnx_module(attention_fn=None, **options):
    """An nnx.MultiHeadAttention as a function of its parameters and inputs, and the parameters: the
    same for every hook."""
    options |= dict(attention_fn=attention_fn) if attention_fn else {}
    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0), **options)
    graph, params = nnx.split(layer)
    return lambda params, *inputs, **call: nnx.merge(graph, params)(*inputs, **call), params


@functools.cache
def linen_params():
    return linen.MultiHeadDotProductAttention(N).init(jax.random.key(0), normal(0, B, T, D))


def linen_module(attention_fn=None, **options):
    options |= dict(attention_fn=attention_fn) if attention_fn else {}
    return linen.MultiHeadDotProductAttention(N, **options).apply, linen_params()


MODULES = {"nnx": nnx_module, "linen": linen_module}
PADDED_KEYS = nnx.make_attention_mask(jnp.ones((B, 1)), IS_REAL)


class Case(NamedTuple):
    """What our hook and Flax's attention are given."""

    call: dict[str, Any] = {}
    options: dict[str, Any] = {}  # of the module
    hook: dict[str, Any] = {}  # of ours
    inputs: Any = ((B, T, D),)
    of_flax: dict[str, Any] | None = None  # in place of `call`
    tolerance: float = 2e-5


def causal(*lead):
    mask = nnx.make_causal_mask(jnp.ones((*lead, T)))
    return Case(dict(mask=mask), inputs=((*lead, T, D),))


BY_QUERY = nnx.make_attention_mask(jnp.ones((B, T)), IS_REAL, dtype=jnp.int32)
CASES = {
    "no mask": Case(),
    "boolean, of queries and keys": Case(dict(mask=np.tril(np.ones((T, T), bool)))),
    "float, causal": causal(B),
    "float, padded keys": Case(dict(mask=PADDED_KEYS)),
    "int, padded keys, by query": Case(dict(mask=BY_QUERY)),
    "no batch axis": causal(),
    "two batch axes": causal(2, 3),
    "the dtype of the module": Case(options=dict(dtype=jnp.bfloat16), tolerance=2e-2),
    "triton, by partial": Case(dict(mask=PADDED_KEYS), hook=dict(implementation="triton")),
    "dropout turned off": Case(dict(deterministic=True), dict(dropout_rate=0.5)),
}
NEXT = (np.arange(T) + 1) % T
OF_NNX = {
    "is_causal, grouped heads, cross-attention": Case(
        dict(is_causal=True),
        dict(num_kv_heads=2, normalize_qk=True),
        inputs=((B, T, D), (B, T + 4, D)),
    ),
    "a score_mod, by partial": Case(
        hook=dict(score_mod=lambda s, b, h, i, j: jnp.where(j <= i, s, -jnp.inf)),
        of_flax=dict(is_causal=True),
    ),
    "a mask object": Case(dict(mask=masks.Causal()), of_flax=dict(is_causal=True)),
    "lists of keys": Case(
        dict(mask=masks.KeyLists(NEXT[:, None, None])),
        of_flax=dict(mask=(np.arange(T) == NEXT[:, None])[None, None]),
    ),
}
EACH = [*(("nnx", name) for name in CASES | OF_NNX), *(("linen", name) for name in CASES)]
FAST = [pair for pair in EACH if pair[0] == "nnx"] + [("linen", name) for name in [*CASES][3::2]]


def assert_hook_is_flax(library, case, run):
    """`run` takes a function, its parameters and its inputs."""
    inputs = [normal(i, *shape) for i, shape in enumerate(case.inputs, 1)]
    of_flax = case.call if case.of_flax is None else case.of_flax
    results = []
    for attend, call in (
        (functools.partial(attention_fn, **case.hook), case.call),
        (None, of_flax),
    ):
        module, params = MODULES[library](attend, **case.options)
        results.append(run(functools.partial(module, **call), params, *inputs))
    assert jax.tree.map(jax.typeof, results[0]) == jax.tree.map(jax.typeof, results[1])
    assert_close(*results, case.tolerance)


@pytest.mark.parametrize("library, case", whole_but(EACH, *FAST))
def test_the_hook_gives_what_flax_gives(library, case):
    assert_hook_is_flax(library, (CASES | OF_NNX)[case], lambda f, *args: jax.jit(f)(*args))


@pytest.mark.parametrize("library", MODULES)
def test_the_hook_gives_the_gradients_that_flax_gives(library):
    assert_hook_is_flax(library, CASES["float, padded keys"], value_and_grads)


def decoded_by_nnx(x, **hook):
    layer = nnx.MultiHeadAttention(N, D, decode=True, rngs=nnx.Rngs(0), **hook)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x))
    return [step(layer, x[:, t : t + 1]) for t in range(T)]


def decoded_by_linen(x, **hook):
    layer = linen.MultiHeadDotProductAttention(N, decode=True, **hook)
    variables = layer.init(jax.random.key(0), x)
    step, ys = jax.jit(functools.partial(layer.apply, mutable=["cache"])), []
    for t in range(T):
        y, cache = step(variables, x[:, t : t + 1])
        variables, ys = {**variables, **cache}, [*ys, y]
    return ys


@pytest.mark.parametrize("decoded", [decoded_by_nnx, decoded_by_linen])
def test_the_hook_decodes_step_by_step_as_flax_does(decoded):
    x = normal(1, B, T, D)
    assert_close(decoded(x, attention_fn=attention_fn), decoded(x))


def test_a_padding_mask_is_not_spread_over_the_queries(monkeypatch):
    seen = []
    monkeypatch.setattr(
        hook, "flash_attention", lambda q, k, v, bias, mask, **_: seen.append(mask) or q
    )
    ours, params = nnx_module(attention_fn)
    ours(params, normal(1, B, T, D), mask=PADDED_KEYS)
    assert seen[0].shape == (B, 1, 1, T) and seen[0].dtype == bool


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


def rngs(library):
    return nnx.Rngs(dropout=3) if library == "nnx" else dict(dropout=jax.random.key(3))


def dense_with_dropout(query, key, value, dropout_rng, dropout_rate, broadcast_dropout, **_):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / H**0.5)
    shape = weights.shape[-2:] if broadcast_dropout else weights.shape
    weights *= dropout_mask(dropout_rng, dropout_rate, shape) / (1 - dropout_rate)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize("broadcast", [{}, dict(broadcast_dropout=False)], ids=str)
@pytest.mark.parametrize("library", MODULES)
def test_the_hook_drops_one_mask_from_all_rows_and_heads_or_one_from_each_as_the_module_asks(
    library, broadcast
):
    def run(attend):
        module, params = MODULES[library](attend, dropout_rate=0.5, **broadcast)
        call = lambda x: module(params, x, deterministic=False, rngs=rngs(library))
        return jax.jit(call)(normal(1, B, T, D))

    assert_close(run(attention_fn), run(dense_with_dropout))


@pytest.mark.parametrize("library", MODULES)
def test_flax_draws_a_key_for_each_call_of_nnx_and_none_where_it_is_deterministic(library):
    more = dict(dropout_rate=0.5, broadcast_dropout=False)
    ours, params = MODULES[library](attention_fn, **more)
    x, more = normal(1, B, T, D), dict(deterministic=False, rngs=rngs(library))
    first, again = (ours(params, x, **more) for _ in range(2))
    assert np.array_equal(first, again) == (library == "linen"), "nnx counts its calls"
    assert not np.array_equal(first, ours(params, x, deterministic=True))


NO_EINSUM = dict.fromkeys(
    ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: jnp.einsum
)
HERE = r".*pallas_flash.flax.attention_fn"
# what is said, modules, the function in the place of the hook, and options of the module and call
REFUSED = {
    r"sow_weights False; pallas_flash.attention_weights computes": (
        *MODULES,
        attention_fn,
        {},
        dict(sow_weights=True),
    ),
    "implementation must be": (
        *MODULES,
        functools.partial(attention_fn, implementation="none of them"),
        {},
        {},
    ),
    "no einsum to replace": ("linen", attention_fn, NO_EINSUM, {}),
    f"'broadcast_dropout'.* pass {HERE}": ("nnx", flash_attention, {}, {}),
    f"needs dropout_rng.* need {HERE}": (
        "linen",
        flash_attention,
        dict(dropout_rate=0.5),
        dict(deterministic=True),
    ),
    f"mask must be bool.* need {HERE}": ("linen", flash_attention, {}, dict(mask=PADDED_KEYS)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_module_cannot_have_is_refused_in_words(text):
    *libraries, attend, options, call = REFUSED[text]
    for library in libraries:
        module, params = MODULES[library](attend, **options)
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            module(params, normal(1, B, T, D), **call)


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
