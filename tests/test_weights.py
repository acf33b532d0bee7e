"""attention_weights: the softmax of chosen queries, against the oracle, wherever a call may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MASKS, RULES, Sizes, arguments, normal, qkv
from check import close, equal, largest_array
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put
from selection import whole_but

from pallas_flash import attention_weights, context_parallel, flash_attention, scores

Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)
ROWS = [36, 0, 5, 5, 20]

MORE = {
    "a bias": lambda rng, z: dict(bias=normal(rng, z.B, 1, z.T, z.S)),
    "a bias of keys": lambda rng, z: dict(bias=normal(rng, z.N, 1, z.S)),
    "a mask array": lambda rng, z: dict(mask=rng.random((z.B, 1, z.T, z.S)) < 0.7),
    "a soft cap, a scale": lambda rng, z: dict(logits_soft_cap=2.0, scale=0.7),
    "sinks": lambda rng, z: dict(sinks=normal(rng, z.N), is_causal=True, query_offset=-9),
    "a rule": lambda rng, z: dict(
        rule=RULES["by batch, with lengths"][0], **RULES["by batch, with lengths"][1]
    ),
}
CASES = MASKS | MORE
FAST = "everything", "a bias", "a mask array", "sinks", "a rule"


@pytest.mark.parametrize("name", whole_but(CASES, *FAST))
def test_weights_are_the_oracles(name, rng):
    q, k, _ = qkv(rng, Z)
    kw = CASES[name](rng, Z)
    found = jax.jit(functools.partial(attention_weights, rows=ROWS, **arguments(kw)))(q, k)
    assert found.dtype == jnp.float32
    close(found, oracle.weights(q, k, **kw)[:, :, ROWS], 5e-6)


def gradients(f, *x):
    return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2)))(*x)


def test_weights_times_values_are_the_output_with_its_gradients_for_traced_rows_too(
    rng,
):
    q, k, v = (x.reshape(1, *x.shape) for x in qkv(rng, Z._replace(K=4)))
    kw = dict(
        is_causal=True,
        score_mod=scores.Alibi((0.5, 0.1, 0.2, 0.3)),
        query_offset=np.array([[9, 3]]),
    )
    v[..., 50:, :, :] = k[..., 50:, :, :] = np.nan  # no chosen row sees them

    def by_hand(rows, q, k, v):
        weights = attention_weights(
            q, k, rows=rows, dropout_rate=0.5, dropout_rng=jax.random.key(0), **kw
        )
        return jnp.einsum("abnrs,absnh->abrnh", weights, jnp.nan_to_num(v))

    rows = jnp.array(ROWS)
    found = gradients(functools.partial(by_hand, rows), q, k, v)
    expected = gradients(
        lambda *x: flash_attention(*x, **kw, implementation="reference")[:, :, rows], q, k, v
    )
    equal(found, expected, 5e-6)


@pytest.mark.whole
def test_on_a_mesh_each_device_has_the_weights_of_its_batch_rows_and_heads(rng):
    mesh = make_mesh(b=2, h=2)
    q, k, _ = qkv(rng, Z)
    kw = dict(
        query_seq_lengths=np.array([30, 4], np.int32),
        rule=lambda b, h, i, j: (i + j * h + b) % 3 > 0,
    )
    placed = put(mesh, P("b", None, "h"), q, k)
    found = attention_weights(*placed, rows=ROWS, **arguments(kw))
    assert found.sharding.spec == P("b", "h", None, None)
    close(found, oracle.weights(q, k, **kw)[:, :, ROWS], 5e-6)


def test_no_array_is_larger_than_the_chosen_rows_ask_for():
    q, k = (jax.ShapeDtypeStruct((1, 2**16, 1, 8), jnp.float32),) * 2
    f = functools.partial(attention_weights, rows=[3, 2**16 - 1], is_causal=True)
    text = str(jax.make_jaxpr(jax.grad(lambda *x: f(*x)[0, 0, 0, 0]))(q, k))
    assert largest_array(text) == 2**16 * 8


MISTAKES = {
    "a number": (
        dict(rows=3),
        ValueError,
        r"rows must be the numbers of some queries, \[rows\]; got shape \(\)",
    ),
    "beyond the last": (
        dict(rows=[0, 37]),
        ValueError,
        r"rows must be from 0 to T - 1 = 36; got \[0, 37\]",
    ),
    "from the end": (
        dict(rows=np.array([-1])),
        ValueError,
        r"rows must be from 0 to T - 1 = 36; got \[-1\]",
    ),
    "floats": (dict(rows=[0.5]), TypeError, "rows must be .*integers"),
    "a ring": (
        dict(rows=[0], context=context_parallel.Ring("s")),
        NotImplementedError,
        "sequences that are whole on a device",
    ),
    "no argument": (dict(rows=[0], causal=True), TypeError, "causal"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_was_expected(name, rng):
    options, error, text = MISTAKES[name]
    q, k, _ = qkv(rng, Z)
    with pytest.raises(error, match=text):
        attention_weights(q, k, **options)


def test_no_rows_have_no_weights(rng):
    q, k, _ = qkv(rng, Z)
    found = jax.jit(lambda q, k: attention_weights(q, k, rows=[]))(q, k)
    assert found.shape == (Z.B, Z.N, 0, Z.S)
