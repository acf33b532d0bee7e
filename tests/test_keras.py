"""Keras' attention layers, with flash_attention in the place of jax.nn.dot_product_attention."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, on import

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import equal, value_and_gradients

from pallas_flash import flash_attention

keras = pytest.importorskip("keras", reason="keras is in the extra test")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Keras was imported with another backend before"
)
B, T, S, D = 2, 7, 9, 12
LAYERS = {
    "MultiHeadAttention": lambda: keras.layers.MultiHeadAttention(num_heads=4, key_dim=6),
    "GroupQueryAttention": lambda: keras.layers.GroupQueryAttention(
        head_dim=6, num_query_heads=4, num_key_value_heads=2
    ),
}
SEEN = np.random.default_rng(5).random((B, T, S)) < 0.7
SEEN[..., 0] = True  # a row that sees no key is 0 here, and the mean of the values there
REAL = np.arange(S) < np.array([[S], [4]])
CALLS = {
    "all": dict(),
    "causal": dict(use_causal_mask=True),
    "a mask": dict(attention_mask=SEEN),
    "padded values": dict(value_mask=REAL),
    "a causal mask, padded": dict(attention_mask=SEEN, value_mask=REAL, use_causal_mask=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_keras_gives_the_same_with_ours_swapped_in(layer, call, monkeypatch):
    keras.utils.set_random_seed(0)
    layer, call = LAYERS[layer](), CALLS[call]
    rng = np.random.default_rng(0)
    query, value = (jnp.asarray(rng.normal(size=(B, n, D)), jnp.float32) for n in (T, S))
    layer.build((B, T, D), (B, S, D))
    weights, taken = [v.value for v in layer.trainable_variables], []

    def apply(weights, query, value):
        fixed = [v.value for v in layer.non_trainable_variables]
        return layer.stateless_call(weights, fixed, query, value, **call)[0]

    run = lambda: value_and_gradients(apply)(weights, query, value)
    theirs = run()

    def ours(*args, **kw):
        o = flash_attention(*args, **kw)
        taken.append(kw["implementation"])
        return o

    monkeypatch.setattr(jax.nn, "dot_product_attention", ours)
    equal(run(), theirs, 1e-5)
    assert taken == ["xla"]  # once: Keras takes its own, in silence, where this raises
