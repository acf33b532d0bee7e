"""The ready score_mods: their formulas, and what is said of tables that do not fit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv
from check import close, cotangents, strict_64_bits
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put
from test_score_mod import ENDS, KEY_ENDS, Z, arrays

from pallas_flash import explain, flash_attention, masks, scores

pytestmark = pytest.mark.usefixtures("small_tiles")


def of_t5(distance, bidirectional, buckets, furthest):
    """T5's own formula for the bucket of a key so far to the right."""
    bucket = 0
    if bidirectional:
        buckets //= 2
        bucket, away = (distance > 0) * buckets, abs(distance)
    else:
        away = np.maximum(-distance, 0)
    exact = buckets // 2
    large = (
        np.log(np.maximum(away, 1).astype(np.float32) / exact)
        / math.log(furthest / exact)
        * (buckets - exact)
    )
    return bucket + np.where(away < exact, away, np.minimum(exact + large.astype(int), buckets - 1))


@pytest.mark.parametrize(
    "bidirectional, buckets, furthest",
    [(True, 32, 128), (False, 32, 128), (True, 6, 9), (False, 7, 50)],
)
def test_the_buckets_are_those_of_t5(bidirectional, buckets, furthest):
    distance = np.arange(-300, 301, dtype=np.int32)
    bias = scores.T5Bias(np.zeros(buckets, np.float32), bidirectional, furthest)
    np.testing.assert_array_equal(
        bias.bucket(distance), of_t5(distance, bidirectional, buckets, furthest)
    )


def test_those_that_are_ready_are_their_dense_formulas(rng):
    q, k, v, table = arrays(rng)
    q_idx, kv_idx = np.arange(Z.T)[:, None] + 18, np.arange(Z.S)
    attend = functools.partial(
        flash_attention, q, k, v, query_offset=18, implementation="blockwise"
    )
    buckets = table[:, of_t5(kv_idx - q_idx, True, 20, 30)]
    with strict_64_bits():
        made = [
            attend(score_mod=f)
            for f in (
                scores.Alibi(table[:, 1]),
                scores.T5Bias(table[:, :20], True, 30),
                scores.SoftCap(2.0),
            )
        ]
    close(made[0], attend(bias=-table[:, 1, None, None] * abs(q_idx - kv_idx)), 1e-5)
    close(made[1], attend(bias=buckets), 1e-5)
    close(made[2], attend(logits_soft_cap=2.0), 1e-5)


def test_those_that_are_ready_print_compare_and_go_through_jit(rng):
    q, k, v, _ = arrays(rng)
    slopes = [0.5, 0.25, 0.125, 0.0625]
    assert scores.Alibi(slopes) == scores.Alibi(tuple(slopes)) != scores.Alibi(slopes[::-1])
    assert repr(scores.Alibi(slopes)) == "Alibi((0.5, 0.25, 0.125, 0.0625))"
    assert repr(scores.T5Bias(np.zeros((4, 32), np.float32))) == "T5Bias(float32[4, 32], True, 128)"
    assert "score_mod SoftCap(2.0), bias" in str(
        explain(q, k, v, np.zeros(37), score_mod=scores.SoftCap(2.0))
    )
    assert (
        "score_mod"
        in explain(q, k, v, score_mod=scores.SoftCap(2.0), implementation="blockwise").why_not[
            "standard"
        ]
    )
    f = jax.jit(
        lambda score_mod: flash_attention(q, k, v, score_mod=score_mod, implementation="blockwise")
    )
    close(f(scores.Alibi(np.array(slopes, np.float32))), f(scores.Alibi(slopes)), 1e-6)
    assert jax.eval_shape(f, scores.T5Bias(np.zeros((4, 8)).tolist())).shape == (
        *q.shape[:-1],
        v.shape[-1],
    )


@pytest.mark.whole("triton")
def test_alibi_gives_each_packed_sequence_its_slopes_and_their_gradient(implementation, rng):
    ends = ENDS, KEY_ENDS
    packed = masks.Varlen(*ends)
    (q, k, v), slopes = qkv(rng, Z), rng.random((4, Z.N)).astype(np.float32)
    do, dlse = cotangents(rng, q, v)

    @jax.jit
    def found(q, slopes):
        alibi = lambda slopes: scores.Alibi(slopes, packed.key_value_segment_ids(Z.S))
        attend = lambda q, slopes: flash_attention(
            *(q, k, v),
            mask=packed,
            is_causal=True,
            score_mod=alibi(slopes),
            implementation=implementation,
            return_residual=True,
        )
        results, vjp = jax.vjp(attend, q, slopes)
        return *results, *vjp((do, dlse))

    _, position = oracle.sequences(*ends, Z.B, Z.T, Z.S)
    distance = np.zeros((4, Z.B, Z.T, Z.S))  # within each sequence
    for b, n in np.ndindex(Z.B, 4):
        rows, keys = (slice(*x[b, n : n + 2]) for x in ends)
        distance[n, b, rows, keys] = abs(np.arange(Z.S) - position[b])[rows, keys]
    kw = dict(varlen=ends, is_causal=True, bias=-np.einsum("cbts,ch->bhts", distance, slopes))
    o, lse, (dq, _, _, dbias) = oracle.attention(q, k, v, do, dlse, **kw)
    d_slopes = -np.einsum("cbts,bhts->ch", distance, dbias)
    for x, wanted in zip(found(q, slopes), (o, lse, dq, d_slopes), strict=True):
        close(x, wanted, 1e-5)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: scores.T5Bias(np.zeros((2, 3, 4))),
            r"T5Bias takes a table \[N, buckets\] or \[buckets\].*; got \(2, 3, 4\)",
        ),
        (lambda: scores.T5Bias(np.zeros((2, 7))), "an even number of buckets"),
        (lambda: scores.T5Bias(np.zeros((2, 32)), max_distance=8), "max_distance must be above"),
        (
            lambda: scores.Alibi(0.5),
            r"Alibi takes slopes \[N\], one for each query head.*; got \(\)",
        ),
        (lambda: scores.Alibi(np.zeros((3, 4))), r"with key_value_segment_ids; got \(3, 4\)\."),
        (lambda: scores.Alibi(np.zeros(4), np.zeros(37, int)), r"got \(4,\), with these"),
        (lambda: scores.Alibi(np.zeros((2, 4)), [0, 1, 2, -1]), "must be from 0 to 1, .*; got -1"),
        (lambda: scores.Alibi(np.zeros((2, 4)), jnp.array([3])), "or 2 for padding; got 3"),
        (
            lambda: flash_attention(
                *(jnp.zeros((1, n, 4, 8)) for n in (19, 37, 37)),
                score_mod=scores.Alibi(np.zeros((3, 4)), np.zeros(19, int)),
            ),
            r"must be \[\*B, S\] = \(1, 37\), or \[S\] for all batch rows; got \(19,\)",
        ),
    ],
)
def test_a_table_that_does_not_fit_raises(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "score_mod",
    [scores.Alibi((0.5, 0.25)), scores.T5Bias(np.zeros((32, 4))), scores.Alibi(np.ones(8))],
)
def test_numbers_for_other_heads_than_the_calls_raise_on_a_mesh_too(score_mod):
    q = jnp.ones((1, 5, 4, 8))
    mesh = make_mesh(x=1)
    for x in q, *put(mesh, P(), q):
        with pytest.raises(
            ValueError, match=rf"has values for {score_mod.heads} query heads; the call has N = 4"
        ):
            flash_attention(x, x, x, score_mod=score_mod)
