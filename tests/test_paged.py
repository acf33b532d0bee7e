"""Attention to pages where they lie: that it equals the oracle, in what callers vary; and by tokens
of several rows without padding."""

import functools
from itertools import pairwise

import decoding
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import TOLERANCE, close, strict_64_bits
from decoding import (
    HV,
    MOSAIC,
    PAGES,
    B,
    H,
    K,
    N,
    T,
    arrays,
    calls,
    equal_the_oracle,
    ints,
    needs_interpreter,
    normal,
    pool,
    seen,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import whole_but

from pallas_flash import explain, flash_attention, paged_attention, paged_cache
from pallas_flash.tiled import split_kv

pytestmark = pytest.mark.usefixtures("small_caches")
implementation = decoding.implementation


ALL = dict(return_residual=True, return_max_logits=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def contiguous(implementation, window, q, k, v, **seen):
    options = dict(implementation=implementation, local_window_size=window, **ALL)
    return flash_attention(q, k, v, is_causal=True, **seen, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def paged(implementation, window, q, count, **call):
    options = dict(implementation=implementation, local_window_size=window, **ALL)
    return paged_attention(q, query_seq_lengths=count, **call, **options)


@st.composite
def decode_calls(draw):
    """A page size, a window, lengths, how many tokens are new, how many pages two rows share, and a
    seed."""
    page, window = draw(st.sampled_from([(8, None), (24, (9, 0))]))
    by_row = lambda low, high: ints(*draw(st.lists(st.integers(low, high), min_size=B, max_size=B)))
    lengths = by_row(0, page * PAGES)
    count = np.minimum(by_row(1, T), lengths)
    return page, window, lengths, count, draw(st.integers(0, PAGES)), draw(st.integers(0, 99))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_splits")
def test_a_drawn_call_equals_the_oracle_with_pages_and_without(implementation, request):
    @settings(max_examples=calls(request), deadline=None, database=None)
    @given(decode_calls())
    def equals(call):
        page, window, lengths, count, shared, seed = call
        rng = np.random.default_rng(seed)
        first = np.maximum(lengths - count - 9, 0) if window else 0
        call, rows = pool(rng, page, lengths, shared=shared, first=first)
        q, at = normal(rng, B, T, N, H), seen(lengths, count)
        kw = at | (dict(local_window_size=window) if window else {})
        of_rows = {name: x for name, x in at.items() if name != "is_causal"}
        for found in (
            contiguous(implementation, window, q, *rows, **of_rows),
            paged(implementation, window, q, count, **call),
        ):
            equal_the_oracle(found, q, rows, 1e-6, **kw)

    equals()


def test_traced_lengths_beyond_the_table_are_those_of_the_whole_table(rng):
    whole = np.full(B, 8 * PAGES, np.int32)
    call, _ = pool(rng, 8, whole)
    q = normal(rng, B, T, N, H)
    attend = jax.jit(
        lambda lengths: paged_attention(
            q, **call | dict(lengths=lengths), implementation="blockwise"
        )
    )
    np.testing.assert_array_equal(attend(whole + ints(0, 3, 99)), attend(whole))


KINDS = "contiguous", "paged", "in 8 bits"
SCORED = [(name, kind) for name in ("blockwise", "triton", *MOSAIC) for kind in KINDS]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation, kind",
    whole_but(
        SCORED,
        ("blockwise", "contiguous"),
        ("blockwise", "paged"),
        ("hopper", "contiguous"),
        ("hopper", "in 8 bits"),
        ("ampere", "paged"),
    ),
)
def test_a_score_mod_of_rows_of_several_heads_equals_the_reference(
    implementation, kind, rng, monkeypatch
):
    """By batch row, query head, token and key, and by arrays of them and of both at once."""
    if implementation in MOSAIC and gpu_interpreter.MISSING:
        pytest.skip(str(gpu_interpreter.MISSING))
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 2)
    page, size, offset = 32, 64, ints(260, 77, 130)
    dtype = np.float16 if implementation in MOSAIC else np.float32
    stored = "int8" if kind == "in 8 bits" else None
    call, (k, v) = pool(rng, page, offset + 3, 10, (size, size), dtype, stored)
    q = normal(rng, B, 3, N, size, dtype=dtype)
    by_row, near, by_pair, by_key = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, N), (N, 9), (N, 320), (320,))
    )

    def mod(s, b, h, i, j):
        s = s * 1.1 + by_row[b, h] * (i - j) * 0.01 + near[h, jnp.clip(i - j, 0, 8)]
        return s + by_pair[h, j] + jnp.where(i % 2 == 0, by_key[j], 0.0)

    options = dict(logits_soft_cap=3.0, score_mod=mod, return_residual=True, return_max_logits=True)
    causal = dict(is_causal=True, query_offset=offset, key_value_seq_lengths=offset + 3)
    expected = flash_attention(
        *(x.astype(np.float32) for x in (q, k, v)), implementation="reference", **causal, **options
    )
    kernels = gpu_interpreter.kernels(implementation, detect_races=True)
    with kernels as races, jax.numpy_rank_promotion("raise"):
        half = (x.astype(q.dtype) for x in (k, v))
        assert split_kv.is_decoding(explain(q, *half, score_mod=mod, **causal).problem)
        if kind == "contiguous":
            found = flash_attention(q, k, v, implementation=implementation, **causal, **options)
        else:
            found = paged_attention(q, **call, implementation=implementation, **options)
    for x, y, tolerance in zip(found, expected, (TOLERANCE[str(q.dtype)], 1e-5, 1e-5), strict=True):
        close(x, y, tolerance, kind)
    assert not races.found


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("implementation", MOSAIC)
def test_splits_are_merged_by_their_sums_where_logits_are_beyond_them(
    implementation, rng, monkeypatch
):
    """At -1e6 a log-sum-exp rounds by more than what the sums of two splits differ by."""
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 2)
    q, k, v = (rng.normal(size=(1, n, 4, 64)).astype(np.float16) for n in (2, 300, 300))
    options = dict(score_mod=lambda s, b, h, i, j: s - 1e6 * h)
    wide = (x.astype(np.float32) for x in (q, k, v))
    with gpu_interpreter.kernels(implementation):
        o = flash_attention(q, k, v, implementation=implementation, **options)
    close(o, flash_attention(*wide, implementation="reference", **options), 2e-3, "output")


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(
    "kind", whole_but(["contiguous", "paged", "ragged", "in 8 bits"], "ragged", "in 8 bits")
)
def test_64_bits_and_strict_promotion_change_nothing(kind, implementation, rng):
    lengths, count, ends = ints(29, 48, 9), ints(5, 2, 3), ints(0, 4, 4, 5)
    call, rows = pool(rng, 8, lengths, stored="int8" if kind == "in 8 bits" else None)
    q, near, sinks = normal(rng, B, T, N, H), normal(rng, N, 9), normal(rng, N)
    more = dict(implementation=implementation, logits_soft_cap=3.0, sinks=sinks)
    mod = lambda s, b, h, i, j: (
        s + jnp.asarray(near)[h, jnp.clip(i - j, 0, 8)] * b.astype(jnp.float32)
    )

    def run():
        options = dict(score_mod=mod, **more)
        if kind == "contiguous":
            return flash_attention(q, *rows, **seen(lengths, count), **options)
        if kind == "ragged":
            return paged_attention(q[0], **call, cu_seqlens_q=ends, **options)
        return paged_attention(q, **call, query_seq_lengths=count, **options)

    expected = run()
    with strict_64_bits():
        actual = run()
    assert actual.dtype == jnp.float32
    close(actual, expected, 1e-6, "output")


LONG = {"pages as they are": None, "in 8 bits": "int8"}
ANY = (
    "triton",
    "blockwise",
    "reference",
    "flash1",
    "standard",
    *(pytest.param(name, marks=needs_interpreter) for name in MOSAIC),
)


@pytest.mark.whole("standard", "flash1")
@pytest.mark.parametrize("stored", LONG.values(), ids=LONG)
@pytest.mark.parametrize("implementation", ANY)
def test_a_piece_of_a_prompt_equals_the_oracle_by_any_implementation_whatever_nobody_sees(
    implementation, stored, rng
):
    """300 rows of a key head. The first row of the batch has a short table's worth of keys, the
    last none."""
    page, count, lengths, window = (
        16,
        ints(100, 37, 0),
        ints(180, 37, 0),
        dict(local_window_size=(60, 0)),
    )
    dtype, wide = ("bfloat16", 64) if implementation in MOSAIC else ("float32", H)
    for pages in (12, 50):
        sizes, first = (wide, HV), ints(page, 0, 0)
        call, rows = pool(rng, page, lengths, pages, sizes, dtype, stored, first=first)
        q = arrays(rng, 100, 1, dtype, wide)[0]
        more = dict(
            window, query_seq_lengths=count, implementation=implementation, return_residual=True
        )
        attend = jax.jit(functools.partial(paged_attention, **more))
        with gpu_interpreter.kernels(implementation):
            found = attend(q, **call)
        rows = [x.astype(dtype) for x in rows]
        equal_the_oracle(found, q, rows, **seen(lengths, count), **window)


# ---- tokens of several rows without padding ----

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
