"""attention_weights: the softmax of chosen queries; and listed_weights: that of the keys that lists
name; against the oracle, wherever a call may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MASKS, RULES, Sizes, arguments, normal, qkv
from check import close, equal, largest_array, strict_64_bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import (
    attention_weights,
    context_parallel,
    flash_attention,
    listed_weights,
    masks,
    scores,
)

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


# ---- of the keys that lists name ----

Y = Sizes(B=2, T=21, S=43, N=6, K=3, H=8, Hv=8)
ENTRIES = 5
LISTS = {  # block, query_block, L
    "keys for all heads": (1, 1, 1),
    "keys by key head": (1, 1, 3),
    "blocks by head": (3, 1, 6),
    "blocks for blocks of queries": (8, 8, 3),
}
OPTIONS = {
    "alone": lambda rng: {},
    "causal, with sinks": lambda rng: dict(
        is_causal=True,
        query_offset=11,
        sinks=np.append(normal(rng, Y.N - 1), np.float32(np.inf)),
    ),
    "a bias, a soft cap, a scale": lambda rng: dict(
        bias=normal(rng, Y.N, Y.T, Y.S), logits_soft_cap=2.0, scale=0.7
    ),
    "a bias that hides whole rows": lambda rng: dict(
        bias=np.where(
            rng.random((Y.N, Y.T, 1)) < 0.3,
            -np.inf,
            normal(rng, Y.N, Y.T, Y.S),
        )
    ),
    "a rule, lengths": lambda rng: dict(
        rule=lambda b, h, i, j: (i + j * h + b) % 3 > 0,
        query_seq_lengths=np.array([9, 21], np.int32),
        key_value_seq_lengths=np.array([30, 43], np.int32),
    ),
}


def draw(rng, block, query_block, L, z=Y):
    """Entries from before the first block of keys to beyond the last, some of them repeated."""
    blocks = -(-z.S // block)
    shape = z.B, -(-z.T // query_block), L, ENTRIES
    return rng.integers(-2, blocks + 2, shape).astype(np.int32)


def attended(q, k, lists, **kw):
    """The lists joined with the rule, the other options, and the lse of all keys that these show,
    which are more than the lists name."""
    options = arguments(kw)
    rule = options.pop("mask", None)
    attend = functools.partial(flash_attention, implementation="reference", return_residual=True)
    _, lse = attend(q, k, k, mask=rule, **options)
    return lists if rule is None else lists & rule, lse, options


def expected(q, k, indices, block, query_block, **kw):
    """The oracle's weights of all keys, at those that the lists name."""
    weights = oracle.weights(q, k, **kw)  # [B, N, T, S]
    B, N, T, S = weights.shape
    L = indices.shape[2]
    by_list = weights.reshape(B, L, N // L, T, S).sum(2)
    keys = (indices[..., None] * block + np.arange(block)).reshape(*indices.shape[:3], -1)
    keys = np.repeat(keys, query_block, 1)[:, :T]
    keys = np.where((keys >= 0) & (keys < S), keys, S)  # a key that is not there, without weight
    by_query = np.pad(np.swapaxes(by_list, 1, 2), ((0, 0), (0, 0), (0, 0), (0, 1)))
    return np.take_along_axis(by_query, keys, -1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LISTS)
def test_the_weights_of_a_list_are_the_oracles_of_the_whole_softmax(name, options, rng):
    block, query_block, L = LISTS[name]
    q, k, _ = qkv(rng, Y)
    indices, kw = draw(rng, block, query_block, L), OPTIONS[options](rng)
    lists, lse, more = attended(q, k, masks.KeyLists(indices, block, query_block), **kw)
    found = listed_weights(q, k, lists, lse, **more)
    assert found.dtype == jnp.float32 and found.shape == (Y.B, Y.T, L, ENTRIES * block)
    close(found, expected(q, k, indices, block, query_block, **kw), 5e-6)


@pytest.mark.parametrize("B, T, S", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_an_axis_of_size_0_has_no_weights_or_those_of_no_key(B, T, S):
    q, k = np.ones((B, T, 4, 8), np.float32), np.ones((B, S, 2, 8), np.float32)
    lists = masks.KeyLists(np.zeros((1, -(-T // 3), 2, 5), np.int32), 2, 3)
    found = listed_weights(q, k, lists, np.zeros((B, T, 4), np.float32))
    assert found.shape == (B, T, 2, 10) and found.dtype == jnp.float32 and not found.any()


def test_in_64_bits_the_weights_are_float64(rng):
    q, k = (x.astype(np.float64) for x in qkv(rng, Y)[:2])
    indices, kw = (
        draw(rng, 3, 2, Y.K),
        dict(is_causal=True, query_offset=9, sinks=normal(rng, Y.N)),
    )
    with strict_64_bits():
        lists, lse, more = attended(q, k, masks.KeyLists(indices, 3, 2), **kw)
        found = listed_weights(q, k, lists, lse, **more)
        assert found.dtype == jnp.float64
    close(found, expected(q, k, indices, 3, 2, **kw), 1e-12)


def test_nothing_flows_back_and_what_no_query_sees_may_be_nan(rng):
    q, k, _ = qkv(rng, Y)
    indices = draw(rng, 3, 1, Y.K)
    indices[indices == 4] = -1
    lists, options = masks.KeyLists(indices, 3), dict(key_value_seq_lengths=np.array([20, 31]))
    _, lse = flash_attention(q, k, k, mask=lists, return_residual=True, **options)
    plain = listed_weights(q, k, lists, lse, **options)
    k[:, 12:15] = k[0, 20:] = k[1, 31:] = np.nan
    f = lambda q, k, lse: listed_weights(q, k, lists, lse, **options)
    (found, gradients) = jax.vjp(f, q, k, lse)
    np.testing.assert_array_equal(found, plain)
    assert not any(np.any(x) for x in gradients(jnp.ones_like(found)))


def test_under_vmap_and_jit_they_are_those_of_each_call(rng):
    q, k, _ = qkv(rng, Y._replace(B=3))
    indices = draw(rng, 1, 1, Y.N, Y._replace(B=3))
    _, lse = flash_attention(q, k, k, return_residual=True)
    f = lambda q, k, indices, lse: listed_weights(q, k, masks.KeyLists(indices), lse)
    found = jax.jit(jax.vmap(f))(q, k, indices, lse)  # of a query without a batch
    close(found, f(q, k, indices, lse), 1e-6)
    shared = jax.vmap(f, (0, 0, None, 0))(q, k, indices[0], lse)
    close(shared, f(q, k, indices[:1], lse), 1e-6)


@needs_devices
@pytest.mark.parametrize("L", [1, 2, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_each_device_adds_the_weights_of_its_heads(kind, L, rng):
    z = Y._replace(N=4, K=2)
    q, k, _ = qkv(rng, z)
    indices = draw(rng, 1, 1, L, z)
    _, lse = flash_attention(q, k, k, return_residual=True)
    mesh = make_mesh(kind, b=2, h=2)
    placed = put(mesh, P("b", None, "h"), q, k)
    (placed_lse,) = put(mesh, P("b", None, "h"), lse)
    (placed_lists,) = put(mesh, P("b"), indices)
    f = lambda q, k, indices, lse: listed_weights(q, k, masks.KeyLists(indices), lse)
    found = jax.jit(f)(*placed, placed_lists, placed_lse)
    assert found.shape == (z.B, z.T, L, ENTRIES)
    close(found, f(q, k, indices, lse), 1e-6)
    if kind == AxisType.Explicit:
        assert found.sharding.spec == P("b", None, "h" if L > 1 else None, None)


def test_no_array_holds_the_weights_of_each_head_or_all_keys():
    T, S, N, n, H = 2**16, 2**16, 128, 256, 16
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    indices = jax.ShapeDtypeStruct((1, T, 1, n), jnp.int32)
    f = lambda q, k, indices, lse: listed_weights(q, k, masks.KeyLists(indices), lse)
    text = str(jax.make_jaxpr(f)(shape(1, T, N, H), shape(1, S, 1, H), indices, shape(1, T, N)))
    assert largest_array(text) < T * N * n / 2 < T * S


q = np.ones((2, 5, 4, 8), np.float32)
k = np.ones((2, 7, 2, 8), np.float32)
LSE = np.zeros((2, 5, 4), np.float32)
ONE = masks.KeyLists(np.zeros((5, 1, 3), np.int32))
LISTED_MISTAKES = {
    "indices": (
        dict(lists=np.zeros((5, 1, 3), np.int32)),
        TypeError,
        r"lists must be a masks.KeyLists, .*; got an array int32\[5, 1, 3\]",
    ),
    "another mask": (dict(lists=masks.Causal()), TypeError, r"lists must be .*; got Causal\(\)"),
    "two lists": (dict(lists=ONE & ONE), TypeError, "lists must be .*; got 2 joined by &"),
    "a mask beside": (dict(mask=masks.Causal()), TypeError, "joined with lists: lists & mask"),
    "an lse of a causal call": (
        dict(lse=np.where(np.arange(5)[:, None] < 1, -np.inf, LSE)),
        ValueError,
        "lse is -inf, .* where lists name keys that the query sees. Pass .* is_causal=True",
    ),
    "sinks of another number of heads": (
        dict(sinks=np.zeros(2, np.float32)),
        ValueError,
        r"sinks must be .* \[N\] = \(4,\); got float32 \(2,\)",
    ),
    "heads of size 0": (
        dict(query=q[..., :0], key=k[..., :0]),
        ValueError,
        "takes heads of size 1 and up",
    ),
    "an lse of heads first": (
        dict(lse=np.zeros((2, 4, 5), np.float32)),
        ValueError,
        r"lse must be floats \[\*B, T, N\] = \(2, 5, 4\), .*; got float32 \(2, 4, 5\)",
    ),
    "a residual": (dict(return_residual=True), TypeError, "returns the weights alone"),
    "a ring": (dict(context=context_parallel.Ring("x")), NotImplementedError, "whole on a device"),
    "no argument": (dict(causal=True), TypeError, r"mean is_causal\?"),
}


@pytest.mark.parametrize("name", LISTED_MISTAKES)
def test_a_mistake_of_listed_weights_says_what_was_expected(name):
    call, error, text = LISTED_MISTAKES[name]
    with pytest.raises(error, match=text):
        listed_weights(**dict(query=q, key=k, lists=ONE, lse=LSE) | call)
