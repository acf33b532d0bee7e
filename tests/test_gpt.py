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
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, V)


def new_gpt(**changes):
    sizes = dict(
        vocab_size=V, num_layers=L, num_heads=N, num_kv_heads=2, features=D, hidden_features=F
    )
    return GPT(GPTConfig(**sizes | changes), rngs=nnx.Rngs(0))


def parameters_of(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


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
def test_a_new_model_has_the_parameters_of_the_equations_and_finds_all_tokens_likely(tied):
    model, head_size = new_gpt(tied=tied), D // N
    attention = D * head_size * (N + 2 * 2) + N * head_size * D
    block = 2 * D + attention + 2 * D * F
    size = V * D * (1 if tied else 2) + L * block + D
    assert sum(parameter.size for parameter in parameters_of(model)) == size
    tokens = jax.random.randint(jax.random.key(1), (B, 101), 0, V)
    logits = forward(model, tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    assert -chosen.mean() == pytest.approx(math.log(V), rel=0.02)


def test_the_cache_decodes_several_and_single_tokens_under_jit_and_scan():
    model, prefill = new_gpt(), T - 4

    @jax.jit
    def decode(tokens):
        def step(caches, token):
            logits, caches = model(token[:, None], caches)
            return caches, logits[:, 0]

        first, caches = model(tokens[:, :prefill], model.init_cache(B, T + 4))
        second, caches = model(tokens[:, prefill : prefill + 2], caches)
        _, rest = jax.lax.scan(step, caches, tokens[:, prefill + 2 :].T)
        return jnp.concatenate([first, second, rest.swapaxes(0, 1)], 1)

    close(decode(TOKENS), forward(model, TOKENS))


def test_every_implementation_gives_the_same_logits_and_drops_the_same():
    expected = forward(new_gpt(implementation="reference"), TOKENS)
    for implementation in (None, "blockwise", "triton"):
        close(forward(new_gpt(implementation=implementation), TOKENS), expected)
    close(forward(new_gpt(dropout=0.2), TOKENS), expected)  # without rngs there is none
    train = nnx.jit(lambda model, seed: model(TOKENS, rngs=nnx.Rngs(dropout=jax.random.key(seed))))
    dropped = train(new_gpt(dropout=0.2, implementation="reference"), 0)
    close(train(new_gpt(dropout=0.2), 0), dropped)
    for other in train(new_gpt(dropout=0.2), 1), expected:
        assert not np.allclose(other, dropped, atol=1e-3)
    assert len(parameters_of(new_gpt(dropout=0.2))) == len(parameters_of(new_gpt()))


def test_bfloat16_computes_in_16_bits_with_float32_parameters_and_logits():
    model = new_gpt(dtype="bfloat16")
    assert {parameter.dtype for parameter in parameters_of(model)} == {jnp.dtype("float32")}
    logits, caches = forward(model, TOKENS, model.init_cache(B, T))
    assert (logits.dtype, caches[0].key.dtype) == (jnp.float32, jnp.bfloat16)
    exact = forward(new_gpt(), TOKENS)
    np.testing.assert_allclose(logits, exact, atol=0.05)
    assert not np.array_equal(logits, exact)
