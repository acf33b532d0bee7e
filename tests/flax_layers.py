"""What the tests of the Flax hook, layer and caches share."""

import jax
import jax.numpy as jnp
import numpy as np
from check import equal, value_and_gradients
from flax import nnx

from pallas_flash.flax import FlashAttention

B, T, N, H = 2, 7, 4, 6
D = N * H


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(actual, expected, tolerance=2e-5):
    """All leaves agree, relative to the largest number of each."""
    equal(actual, expected, tolerance)


def value_and_grads(apply, *args):
    """apply(*args), and the gradients of the sum of its sines."""
    return value_and_gradients(apply, tuple(range(len(args))))(*args)


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
IS_REAL = np.arange(T) < np.array([[T], [T - 3]])
