"""models/gpt.py: what its logits depend on, its size, its start, and its cache."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import GPT, GPTConfig

V, L, N, D, F = 61, 2, 6, 24, 37
B, T = 3, 13


def new_gpt(**changes):
    sizes = dict(
        vocab_size=V, num_layers=L, num_heads=N, num_kv_heads=2, features=D, hidden_features=F
    )
    return GPT(GPTConfig(**sizes | changes), rngs=nnx.Rngs(0))


def some_tokens(*shape):
    return jax.random.randint(jax.random.key(1), shape, 0, V)


def count(model):
    return sum(parameter.size for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)))


@nnx.jit
def forward(model, *inputs):
    return model(*inputs)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.whole
def test_a_logit_depends_on_every_earlier_token_and_on_no_later_one():
    # the way from a token to a logit leads through its embedding: with tokens 0 .. T - 1 row s of
    # the gradient is token s
    model = new_gpt(tied=False)
    structure, embedding, rest = nnx.split(model, nnx.PathContains("embedding"), ...)
    tokens = jnp.arange(T)[None]

    def logits_of_one_row(embedding):
        return nnx.merge(structure, embedding, rest)(tokens)[0].mean(-1)  # [T]

    (gradient,) = jax.tree.leaves(jax.jit(jax.jacobian(logits_of_one_row))(embedding))  # [T, V, D]
    depends = np.abs(gradient[:, :T]).max(-1) > 0
    np.testing.assert_array_equal(depends, np.tril(np.ones((T, T), bool)))


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_are_as_many_as_the_equations_say(tied):
    heads, kv_heads, head_size = N, 2, D // N
    attention = D * head_size * (heads + 2 * kv_heads) + heads * head_size * D
    block = 2 * D + attention + 2 * D * F
    assert count(new_gpt(tied=tied)) == V * D * (1 if tied else 2) + L * block + D


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_finds_all_tokens_equally_likely(tied):
    tokens = some_tokens(B, 101)
    logits = forward(new_gpt(tied=tied), tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    assert -chosen.mean() == pytest.approx(math.log(V), rel=0.02)


@pytest.mark.whole
def test_decoding_with_the_cache_gives_the_logits_of_the_whole_sequence():
    model, tokens = new_gpt(), some_tokens(B, T)
    caches, parts, start = model.init_cache(B, T + 4), [], 0
    for length in (T - 4, 2, 1, 1):
        logits, caches = forward(model, tokens[:, start : start + length], caches)
        parts.append(logits)
        start += length
    close(jnp.concatenate(parts, 1), forward(model, tokens))


def test_the_cache_decodes_under_jit_and_scan():
    model, tokens = new_gpt(), some_tokens(B, T)

    @jax.jit
    def decode(tokens):
        def step(caches, token):
            logits, caches = model(token[:, None], caches)
            return caches, logits[:, 0]

        return jax.lax.scan(step, model.init_cache(B, T), tokens.T)[1].swapaxes(0, 1)

    close(decode(tokens), forward(model, tokens))


def test_every_implementation_gives_the_same_logits():
    tokens = some_tokens(B, T)
    expected = forward(new_gpt(implementation="reference"), tokens)
    for implementation in (None, "blockwise", "triton"):
        close(forward(new_gpt(implementation=implementation), tokens), expected)


def test_dropout_acts_where_rngs_are_given_and_every_implementation_drops_the_same():
    tokens, parameters = some_tokens(B, T), count(new_gpt())
    assert count(new_gpt(dropout=0.2)) == parameters
    close(forward(new_gpt(dropout=0.2), tokens), forward(new_gpt(), tokens))
    train = nnx.jit(lambda model, seed: model(tokens, rngs=nnx.Rngs(dropout=jax.random.key(seed))))
    dropped = train(new_gpt(dropout=0.2, implementation="reference"), 0)
    close(train(new_gpt(dropout=0.2), 0), dropped)
    assert not np.allclose(train(new_gpt(dropout=0.2), 1), dropped, atol=1e-3)
    assert not np.allclose(forward(new_gpt(), tokens), dropped, atol=1e-3)


def test_bfloat16_computes_in_16_bits_with_float32_parameters_and_logits():
    model = new_gpt(dtype="bfloat16")
    assert {parameter.dtype for parameter in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
        jnp.dtype("float32")
    }
    tokens = some_tokens(B, T)
    logits, caches = forward(model, tokens, model.init_cache(B, T))
    assert logits.dtype == jnp.float32
    assert caches[0].key.dtype == jnp.bfloat16
    exact = forward(new_gpt(), tokens)
    np.testing.assert_allclose(logits, exact, atol=0.05)
    assert not np.array_equal(logits, exact)
