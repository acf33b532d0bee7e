"""Attention to pages by tokens of several rows without padding."""

import functools
from itertools import pairwise

import decoding
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import TOLERANCE, close
from decoding import (
    MOSAIC,
    B,
    H,
    K,
    N,
    calls,
    equal_the_oracle,
    ints,
    needs_interpreter,
    normal,
    pool,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import (
    paged_attention,
    paged_cache,
)

pytestmark = pytest.mark.usefixtures("small_caches")
implementation = decoding.implementation


TOKENS = 50  # of which a tile takes 64 K / N = 21


def sinks_of(by_row):
    return jnp.append(by_row[0, 1:], jnp.inf)


@functools.partial(jax.jit, static_argnums=(0, 1))
def ragged(implementation, window, q, call, ends, by_row):
    mod = lambda s, b, h, i, j: s + by_row[b, h] * (i - j) * 0.1
    more = dict(local_window_size=window, score_mod=mod, sinks=sinks_of(by_row))
    options = dict(cu_seqlens_q=ends, implementation=implementation, return_residual=True)
    options |= dict(return_max_logits=True)
    return paged_attention(q, **call, **options, **more)


@st.composite
def ragged_calls(draw):
    """A window, where the tokens of each row begin and end, how many keys each row had before, and
    a seed."""
    ends = np.sort(ints(*draw(st.lists(st.integers(0, TOKENS), min_size=B + 1, max_size=B + 1))))
    before = ints(*draw(st.lists(st.integers(0, 30), min_size=B, max_size=B)))
    return draw(st.sampled_from([None, (9, 0)])), ends, before, draw(st.integers(0, 99))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_splits")
def test_ragged_tokens_equal_the_oracle_row_by_row(implementation, request):
    @settings(max_examples=calls(request), deadline=None, database=None)
    @given(ragged_calls())
    def equals(call):
        window, ends, before, seed = call
        rng = np.random.default_rng(seed)
        lengths = before + np.diff(ends)
        call, (k, v) = pool(rng, 8, lengths, 10)
        q, by_row = normal(rng, TOKENS, N, H), normal(rng, B, N)
        o, lse, largest = ragged(implementation, window, q, call, ends, by_row)
        more = dict(is_causal=True, sinks=sinks_of(by_row)) | (
            dict(local_window_size=window) if window else {}
        )
        for b, (first, last) in enumerate(pairwise(ends)):
            if last == first:
                continue
            distance = before[b] + np.arange(last - first)[:, None] - np.arange(lengths[b])
            options = dict(bias=0.1 * by_row[b][:, None, None] * distance)
            options |= more | dict(query_offset=int(before[b]))
            found = [x[None, first:last] for x in (o, lse, largest)]
            rows = [x[b : b + 1, : lengths[b]] for x in (k, v)]
            equal_the_oracle(found, q[None, first:last], rows, 1e-6, **options)
        assert not o[: ends[0]].any() and not o[ends[-1] :].any()
        for x, empty in (lse, sinks_of(by_row)), (largest, -np.inf):
            assert (x[: ends[0]] == empty).all() and (x[ends[-1] :] == empty).all()

    equals()


RAGGED = {
    "hopper": pytest.param("hopper", None, marks=needs_interpreter),
    "ampere": pytest.param("ampere", None, marks=[needs_interpreter, pytest.mark.whole]),
    "reference": ("reference", None),
    "standard": ("standard", None),
    "blockwise, int8": ("blockwise", "int8"),
    "triton, float8_e4m3fn": ("triton", "float8_e4m3fn"),
}


@pytest.mark.whole("reference", "standard")
@pytest.mark.parametrize("implementation, stored", RAGGED.values(), ids=RAGGED)
def test_ragged_tokens_get_what_padded_ones_get(implementation, stored, rng):
    """From a cache to which they are appended ragged and padded. Of the second row there is
    none."""
    ends, before, page = ints(1, 31, 31, 48), 60, 16
    count, size = np.diff(ends), 64 if implementation in MOSAIC else H
    dtype = "bfloat16" if implementation in MOSAIC else "float32"
    cache = paged_cache(B, 96, K, size, pages=20, page=page, dtype=stored or dtype)
    cache = cache.append(*[rng.normal(size=(B, before, K, size)).astype(dtype)] * 2)
    q, k, v = (rng.normal(size=(TOKENS, heads, size)).astype(dtype) for heads in (N, K, K))
    at = np.minimum(ends[:-1, None] + np.arange(30), TOKENS - 1)
    padded, cache = cache.append(k[at], v[at], count), cache.append(k, v, cu_seqlens=ends)
    same = padded._replace(append_length=cache.append_length)
    jax.tree.map(np.testing.assert_array_equal, same, cache)

    def attend(q, cache, **more):
        more |= dict(implementation=implementation, local_window_size=(40, 0), return_residual=True)
        with gpu_interpreter.kernels(implementation):
            return cache.attend(q, **more)

    expected, found = (
        attend(q[at], padded, query_seq_lengths=count),
        attend(q, cache, cu_seqlens_q=ends),
    )
    for x, y in zip(expected, found, strict=True):
        for b, (first, last) in enumerate(pairwise(ends)):
            close(y[first:last], x[b, : last - first], TOLERANCE[dtype], "output and lse")


def test_ends_that_only_the_program_knows_are_in_order_and_within_the_tokens(rng):
    k, v = (jnp.asarray(rng.normal(size=(5, 1, 8)), jnp.float32) for _ in range(2))

    @jax.jit
    def run(ends):
        cache = paged_cache(
            batch=2, max_length=16, kv_heads=1, head_size=8, pages=4, page=8, dtype=jnp.float32
        )
        cache = cache.append(k, v, cu_seqlens=ends)
        return cache.lengths, cache.attend(k, cu_seqlens_q=ends)

    for wrong, meant in (([-1, 3, 6], [0, 3, 5]), ([0, 4, 2], [0, 4, 4])):
        for actual, expected in zip(run(ints(*wrong)), run(ints(*meant)), strict=True):
            np.testing.assert_array_equal(actual, expected)
