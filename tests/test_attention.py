"""Every implementation against the oracle: sizes, masks, biases, dtypes, and the contracts that
hold on all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BROADCASTS,
    MASKS,
    SIZES,
    TABLES,
    Sizes,
    bias,
    dense_mask,
    normal,
    qkv,
)
from check import check, equal
from contracts import Contracts
from selection import whole_but

from pallas_flash import flash_attention, masks

pytestmark = pytest.mark.usefixtures("small_tiles")


class TestContracts(Contracts):
    pass


FEW_MASKS = [
    "full",
    "causal",
    "causal_bottom_right",
    "window",
    "window_causal_offset",
    "window_and_offset_at_the_ends_of_int32",
    "key_lengths",
    "query_lengths",
    "documents",
    "documents_scattered_window",
    "prefix_window_lengths",
    "everything",
    "varlen_window_causal",
]


@pytest.mark.parametrize("name", whole_but(MASKS, *FEW_MASKS))
def test_every_mask_gives_the_oracles_output_and_gradients(name, implementation, rng):
    z = Sizes()
    check(rng, *qkv(rng, z), implementation, **MASKS[name](rng, z))


@pytest.mark.parametrize("name", whole_but(TABLES, "lists of blocks", "lists, a rule"))
def test_lists_of_blocks_give_the_oracles_output_and_gradients(name, implementation, rng):
    z = Sizes()
    check(rng, *qkv(rng, z), implementation, **TABLES[name](rng, z))


@pytest.mark.parametrize("name", SIZES)
def test_every_size_gives_the_oracles_output_and_gradients(name, implementation, rng):
    check(rng, *qkv(rng, SIZES[name]), implementation, is_causal=True, query_offset=3)


@pytest.mark.parametrize(
    "letters", whole_but(BROADCASTS, "BNTS", "B1TS", "BN1S", "1N11", ".NT1", "...S")
)
def test_every_shape_of_bias_and_mask_is_added_masked_and_differentiated(
    letters, implementation, rng
):
    z = Sizes(N=4)
    others = dict(mask=dense_mask(rng, letters, z), bias=bias(rng, letters, z))
    check(rng, *qkv(rng, z), implementation, logits_soft_cap=2.5, **others)


def test_a_row_hidden_by_an_infinite_bias_gives_zero_and_no_gradient(implementation, rng):
    z = Sizes()
    hidden = np.where(np.arange(z.T)[:, None] % 3 == 0, -np.inf, bias(rng, "..TS", z)).astype(
        np.float32
    )
    check(rng, *qkv(rng, z), implementation, bias=hidden)


def test_a_row_of_the_smallest_finite_bias_still_sees_its_keys(implementation, rng):
    z = Sizes(T=3)
    q, k, v = qkv(rng, z)
    lowest = np.full((z.T, z.S), np.finfo(np.float32).min)
    o = flash_attention(q, k, v, lowest, implementation=implementation)
    mean = np.repeat(np.mean(v, axis=1, keepdims=True), z.N // z.K, axis=2)
    np.testing.assert_allclose(o, np.broadcast_to(mean, o.shape), atol=1e-5)


WITHOUT_KEYS = {  # the last two of six queries
    "query_seq_lengths": dict(query_seq_lengths=np.array([4])),
    "QueryLengths": dict(mask=masks.QueryLengths(np.array([4]))),
    "Varlen": dict(mask=masks.Varlen(np.array([[0, 4]]))),
    "Varlen of queries and keys": dict(mask=masks.Varlen(np.array([[0, 4]]), np.array([[0, 6]]))),
    "a sequence without keys": dict(
        mask=masks.Varlen(np.array([[0, 4, 6]]), np.array([[0, 6, 6]]))
    ),
    "a mask": dict(mask=np.arange(6)[:, None] < 4),
    "a rule": dict(mask=masks.MaskMod(lambda b, h, q, k: q < 4)),
    "lengths in a rule": dict(mask=~~masks.QueryLengths(np.array([4]))),
    "no keys": dict(key_value_seq_lengths=np.array([0])),
    "a window": dict(local_window_size=(0, 0), query_offset=2),
}
PADDING = [*WITHOUT_KEYS][:4]


@pytest.mark.whole("triton", "standard", "flash1")
@pytest.mark.parametrize("way", WITHOUT_KEYS)
@pytest.mark.parametrize(
    "implementation", ["blockwise", "reference", "triton", "standard", "flash1"]
)
def test_a_query_without_keys_has_its_sinks_gradient_unless_it_is_padding(implementation, way):
    q = jnp.linspace(-1, 1, 48).reshape(1, 6, 1, 8)
    sinks, expected = jnp.array([0.3]), [0.0 if way in PADDING else 1.0] * 2

    @jax.jit
    def slopes(q, sinks, dlse):
        options = dict(return_residual=True, implementation=implementation, **WITHOUT_KEYS[way])
        lse = lambda sinks: flash_attention(q, q, q, sinks=sinks, **options)[1][0, :, 0]
        tangent = jax.jvp(lse, (sinks,), (jnp.ones(1),))
        return *tangent, jax.vjp(lse, sinks)[1](dlse)[0]

    lse, tangent, gradient = slopes(q, sinks, jnp.arange(6.0) * (np.arange(6) > 3))
    np.testing.assert_allclose(lse[4:], 0.3)
    np.testing.assert_allclose(tangent[4:], expected)
    np.testing.assert_allclose(gradient, [9 * expected[0]])


def test_leading_axes_fold_into_the_batch(implementation, rng):
    q, k, v = (normal(rng, 2, 3, 19, 4, 8) for _ in range(3))
    lengths = rng.integers(1, 20, (2, 3)).astype(np.int32)
    # broadcasts over the first axis, not over the second
    bias5 = normal(rng, 3, 1, 19, 19)
    attend = functools.partial(flash_attention, implementation=implementation, return_residual=True)
    o, lse = attend(q, k, v, bias5, key_value_seq_lengths=lengths)
    assert o.shape == q.shape and lse.shape == (2, 3, 19, 4)
    for at in np.ndindex(2, 3):
        alone = attend(q[at], k[at], v[at], bias5[at[1]], key_value_seq_lengths=lengths[at])
        equal((o[at], lse[at]), alone, 2e-6)


@pytest.mark.parametrize(
    "shape", [(0, 5, 7, 2), (2, 0, 7, 2), (2, 5, 0, 2)], ids=["B=0", "T=0", "S=0"]
)
def test_an_empty_axis_gives_zeros_or_nothing(shape):
    B, T, S, N = shape
    q, k = jnp.ones((B, T, N, 3)), jnp.ones((B, S, N, 3))
    ids = dict(
        query_segment_ids=np.zeros((B, T), np.int32),
        key_value_segment_ids=np.zeros((B, S), np.int32),
    )
    for options in {}, ids:
        o, lse = flash_attention(q, k, k, return_residual=True, **options)
        assert (
            o.shape == q.shape and np.all(np.asarray(o) == 0) and np.all(np.asarray(lse) == -np.inf)
        )
    grads = jax.grad(lambda *x: flash_attention(*x).sum(), argnums=(0, 1, 2))(q, k, k)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
