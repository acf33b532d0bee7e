"""Decoding, contiguous and paged: what it takes, and that it equals the oracle."""

import functools
import os
from itertools import pairwise

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from check import TOLERANCE, check, close
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import whole_but

from pallas_flash import (
    blockwise,
    decode,
    explain,
    flash_attention,
    paged_attention,
    paged_cache,
    quantised,
)
from pallas_flash.accounting import GPUS
from pallas_flash.kernels import ampere, triton
from pallas_flash.kernels.hopper import tuning as hopper_tuning
from scripts.gpu_code import as_if_on

IMPLEMENTATIONS = ("blockwise", "triton")
MOSAIC = ("hopper", "ampere")
B, N, K, H, HV = 3, 6, 2, 11, 5
pytestmark = pytest.mark.usefixtures("small_caches")
needs_interpreter = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)
ints = lambda *x: np.array(x, np.int32)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def small_blocks(monkeypatch):
    """Few keys are decoding too, in blocks of 16 and three splits."""
    monkeypatch.setattr(decode, "KEYS", 1)
    monkeypatch.setattr(decode, "num_splits", lambda *_: 3)
    monkeypatch.setattr(blockwise.tuning, "BLOCK", 16)
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    of = triton.tuning.decode_tiles
    monkeypatch.setattr(triton.tuning, "decode_tiles", lambda *args: of(*args)._replace(block_k=16))
    monkeypatch.setattr(triton, "decode_tiles", triton.tuning.decode_tiles)


def arrays(rng, T, S, dtype="float32", head=H, value=HV, heads=N):
    shapes = (B, T, heads, head), (B, S, K, head), (B, S, K, value)
    return [rng.normal(size=shape).astype(np.float32).astype(dtype) for shape in shapes]


# ---- which calls ----

SHAPE = dict(T=1, S=4096, N=16, K=2)
NOT_DECODING = {
    "rows of more than a tile": dict(T=9),
    "few keys": dict(S=255),
    "a bias": dict(bias=jax.ShapeDtypeStruct((1, 4096), "float32")),
    "dropout": dict(dropout_rate=0.5, dropout_rng=jax.ShapeDtypeStruct((2,), "uint32")),
}


def problem(T, S, N, K, batch=1, **kw):
    q, k = (
        jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
        for length, heads in ((T, N), (S, K))
    )
    return explain(q, k, k, **kw).problem


def test_a_few_tokens_against_many_keys_are_decoding():
    assert decode.takes(problem(**SHAPE)) and decode.takes(problem(**SHAPE | dict(T=8)))
    assert decode.takes(
        problem(
            **SHAPE,
            is_causal=True,
            query_offset=4095,
            logits_soft_cap=3.0,
            local_window_size=(9, 0),
        )
    )


@pytest.mark.parametrize("name", NOT_DECODING)
def test_other_calls_are_not(name):
    assert not decode.takes(problem(**SHAPE | NOT_DECODING[name]))


def test_explain_shows_the_parts():
    q, k = (
        jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
        for length, heads in ((1, 16), (8192, 2))
    )
    assert "decoding 16 x 32, 4 warps, 3 stages, 63 splits" in str(
        explain(q, k, k, implementation="triton")
    )
    assert "decoding: all batch rows at a time by 512 keys" in str(
        explain(q, k, k, implementation="blockwise")
    )


def test_blockwise_decodes_where_a_copy_of_the_keys_is_large_or_few_rows_see_some_of_many(
    monkeypatch,
):
    monkeypatch.undo()  # small_caches
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def decodes(T, S, dtype="float32", K=4, **kw):
        q, k = (
            jax.ShapeDtypeStruct((2, length, heads, 64), dtype)
            for length, heads in ((T, 8), (S, K))
        )
        return "decoding" in str(explain(q, k, k, implementation="blockwise", **kw))

    assert decodes(1, 8192) and not decodes(1, 8191)
    assert decodes(1, 16384, "bfloat16") and not decodes(1, 16383, "bfloat16")  # half as many bytes
    # a single row is multiplied in float32
    assert decodes(1, 4096, "bfloat16", 8) and not decodes(2, 4096, "bfloat16", 8)
    assert decodes(1, 2049, key_value_seq_lengths=lengths) and not decodes(
        1, 2048, key_value_seq_lengths=lengths
    )
    assert not decodes(5, 2049, key_value_seq_lengths=lengths)


def test_blockwise_decodes_no_batch_rows_whose_keys_are_copied_by_nobody_or_are_few_for_many_rows(
    monkeypatch,
):
    monkeypatch.undo()  # small_caches
    lengths = jax.ShapeDtypeStruct((300,), jnp.int32)

    def decodes(T, S, N, K, dtype="float32", **kw):
        q, k = (
            jax.ShapeDtypeStruct((300, length, heads, 64), dtype)
            for length, heads in ((T, N), (S, K))
        )
        return "decoding" in str(explain(q, k, k, implementation="blockwise", **kw))

    assert (
        decodes(1, 512, 8, 2)
        and not decodes(1, 512, 8, 1)
        and not decodes(1, 512, 8, 1, "bfloat16")
    )
    # a single row of bfloat16 is multiplied in float32
    assert decodes(1, 2048, 1, 1, "bfloat16") and not decodes(1, 2048, 1, 1)
    assert decodes(1, 2049, 8, 1) and decodes(1, 512, 4, 1, key_value_seq_lengths=lengths)
    assert decodes(4, 1024, 4, 4, key_value_seq_lengths=lengths) and decodes(
        4, 1025, 4, 2, key_value_seq_lengths=lengths
    )
    assert not decodes(4, 1024, 4, 2, key_value_seq_lengths=lengths)


@pytest.mark.parametrize(
    "batch, S, num_splits",
    [
        (1, 1024, 16),
        (1, 8192, 16),
        (4, 8192, 4),
        (16, 8192, 1),
        (17, 8192, 13),
        (64, 131072, 1),
        (1, 64, 1),
    ],
)
def test_splits_keep_the_processors_of_an_h200_busy(batch, S, num_splits):
    assert decode.num_splits(problem(1, S, 64, 8, batch), 64, 132) == num_splits


# ---- against the oracle ----

SEEN = {
    "full": {},
    "causal with lengths": dict(
        is_causal=True, query_offset=ints(50, 298, -2), key_value_seq_lengths=ints(53, 301, 0)
    ),
    "a window": dict(local_window_size=(40, 0), query_offset=ints(50, 298, 5), logits_soft_cap=2.0),
    "documents": dict(
        query_segment_ids=ints([0, 1, 2], [1, 1, 1], [7, 0, 0]),
        key_value_segment_ids=np.arange(B * 301).reshape(B, 301) % 3,
    ),
    "some queries": dict(query_seq_lengths=ints(1, 0, 3), key_value_seq_lengths=ints(1, 2, 400)),
}


@pytest.mark.parametrize("name", SEEN)
def test_output_lse_and_gradients_equal_the_oracle(implementation, name, rng):
    sinks = rng.normal(size=N).astype(np.float32)
    check(rng, *arrays(rng, 3, 301), implementation, sinks=sinks, **SEEN[name])


def test_garbage_beyond_the_lengths_changes_no_bit(implementation, rng):
    q, k, v = arrays(rng, 1, 301)
    attend = jax.jit(
        functools.partial(
            flash_attention, key_value_seq_lengths=ints(0, 77, 300), implementation=implementation
        )
    )
    clean = attend(q, k, v)
    for b, length in enumerate((0, 77, 300)):
        k[b, length:], v[b, length:] = np.nan, np.inf
    np.testing.assert_array_equal(clean, attend(q, k, v))


# ---- pages ----

T, PAGES = 5, 6


@functools.partial(jax.jit, static_argnums=(0, 1))
def contiguous(implementation, window, q, k, v, lengths, count):
    options = dict(
        is_causal=True,
        local_window_size=window,
        query_seq_lengths=count,
        key_value_seq_lengths=lengths,
    )
    return flash_attention(
        q,
        k,
        v,
        query_offset=lengths - count,
        implementation=implementation,
        return_residual=True,
        **options,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def paged(implementation, window, q, k, v, table, lengths, count):
    options = dict(
        local_window_size=window,
        query_seq_lengths=count,
        implementation=implementation,
        return_residual=True,
    )
    return paged_attention(q, k, v, table, lengths, **options)


@st.composite
def decode_calls(draw):
    """A page size, a window, lengths, how many tokens are new, pages in any order that rows may
    share, and a seed."""
    page, window = draw(st.sampled_from([(8, None), (24, (9, 0))]))
    by_row = lambda low, high: ints(*draw(st.lists(st.integers(low, high), min_size=B, max_size=B)))
    lengths = by_row(0, page * PAGES)
    order = draw(st.permutations(range(B * PAGES)))
    shared = draw(st.integers(0, PAGES))
    count = np.minimum(by_row(1, T), lengths)
    return page, window, lengths, count, order, shared, draw(st.integers(0, 99))


def calls(request) -> int:
    """To draw for each implementation: 500 with --whole, else 25; PALLAS_FLASH_EXAMPLES draws more
    or fewer."""
    return int(os.environ.get("PALLAS_FLASH_EXAMPLES", 500 if request.config.option.whole else 25))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_blocks")
def test_a_drawn_call_equals_the_oracle_with_pages_and_without(implementation, request):
    @settings(max_examples=calls(request), deadline=None, database=None)
    @given(decode_calls())
    def equals(call):
        page, window, lengths, count, order, shared, seed = call
        rng = np.random.default_rng(seed)
        table = ints(*order).reshape(B, PAGES)
        table[1, :shared] = table[0, :shared]  # a common prefix
        dead = len(order)
        k_pages, v_pages = (
            rng.normal(size=(dead + 1, page, K, n)).astype(np.float32) for n in (H, HV)
        )
        k_pages[dead] = v_pages[dead] = np.nan
        q = rng.normal(size=(B, T, N, H)).astype(np.float32)
        k, v = (x[table].reshape(B, PAGES * page, K, -1) for x in (k_pages, v_pages))
        for b in range(B):
            table[b, -(-lengths[b] // page) :] = [dead, -1, 10**6][b]
            first = lengths[b] - count[b] - 9 if window else 0
            table[b, : max(first, 0) // page] = dead
        options = dict(
            is_causal=True,
            query_offset=lengths - count,
            query_seq_lengths=count,
            key_value_seq_lengths=lengths,
        )
        options |= dict(local_window_size=window) if window else {}
        zeros = np.zeros((B, T, N, HV)), np.zeros((B, T, N))
        expected = oracle.attention(q, k, v, *zeros, **options)
        for found in (
            contiguous(implementation, window, q, k, v, lengths, count),
            paged(implementation, window, q, k_pages, v_pages, table, lengths, count),
        ):
            close(found[0], expected[0], TOLERANCE["float32"], "output")
            close(found[1], expected[1], 1e-6, "lse")

    equals()


@pytest.mark.usefixtures("small_blocks")
def test_a_score_mod_equals_the_reference_with_pages_and_without_and_in_the_gradient(
    implementation, rng
):
    """By token, query head, batch row and key, and by arrays of them."""
    lengths, count = ints(29, 48, 9), ints(5, 2, 3)
    table = ints(*rng.permutation(B * PAGES)).reshape(B, PAGES)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    k_pages, v_pages = (rng.normal(size=(B * PAGES, 8, K, n)).astype(np.float32) for n in (H, HV))
    k, v = (x[table].reshape(B, PAGES * 8, K, -1) for x in (k_pages, v_pages))
    by_row, near, by_key = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((B, N), (N, 9), (48,))
    )
    options = dict(
        is_causal=True,
        query_offset=lengths - count,
        query_seq_lengths=count,
        key_value_seq_lengths=lengths,
    )

    def loss(attend, tables):
        by_row, near, by_key = tables
        mod = lambda s, b, h, i, j: (
            s * 1.1 + by_row[b, h] * (i - j) * 0.1 + near[h, jnp.clip(i - j, 0, 8)] + by_key[j]
        )
        o, lse = attend(score_mod=mod, return_residual=True)
        return jnp.sum(jnp.sin(o)), (o, lse)

    def dense(implementation):
        attend = lambda **kw: flash_attention(
            q, k, v, implementation=implementation, logits_soft_cap=3.0, **options, **kw
        )
        return jax.jit(jax.value_and_grad(functools.partial(loss, attend), has_aux=True))(
            (by_row, near, by_key)
        )

    assert decode.takes(explain(q, k, v, score_mod=lambda s, b, h, i, j: s + h).problem)
    more = dict(query_seq_lengths=count, implementation=implementation, logits_soft_cap=3.0)
    paged = jax.jit(
        lambda tables: loss(
            functools.partial(paged_attention, q, k_pages, v_pages, table, lengths, **more), tables
        )
    )
    expected, actual = dense("reference"), dense(implementation)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        close(y, x, 2e-6, "decoding, and its gradients")
    for x, y in zip(expected[0][1], paged((by_row, near, by_key))[1], strict=True):
        close(y, x, 2e-6, "paged")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["contiguous", "paged", "ragged", "in 8 bits"])
def test_64_bits_and_strict_promotion_change_nothing(kind, implementation, rng):
    lengths, count, ends = ints(29, 48, 9), ints(5, 2, 3), ints(0, 4, 4, 5)
    table = ints(*rng.permutation(B * PAGES)).reshape(B, PAGES)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    pool = [rng.normal(size=(B * PAGES, 8, K, n)).astype(np.float32) for n in (H, HV)]
    near, sinks = (rng.normal(size=size).astype(np.float32) for size in ((N, 9), N))
    more = dict(implementation=implementation, logits_soft_cap=3.0, sinks=sinks)
    mod = lambda s, b, h, i, j: (
        s + jnp.asarray(near)[h, jnp.clip(i - j, 0, 8)] * b.astype(jnp.float32)
    )

    def run():
        if kind == "contiguous":
            kv = (x.reshape(B, PAGES * 8, K, -1) for x in pool)
            options = dict(
                is_causal=True, query_offset=lengths - count, key_value_seq_lengths=lengths
            )
            return flash_attention(q, *kv, score_mod=mod, **options, **more)
        if kind == "ragged":
            return paged_attention(
                q[0], *pool, table, lengths, score_mod=mod, cu_seqlens_q=ends, **more
            )
        pages, scales = pool, {}
        if kind == "in 8 bits":
            (k, k_scales), (v, v_scales) = (
                quantised.quantised(jnp.asarray(x), "int8") for x in pool
            )
            pages, scales = (k, v), dict(k_scales=k_scales, v_scales=v_scales)
        return paged_attention(
            q, *pages, table, lengths, query_seq_lengths=count, score_mod=mod, **scales, **more
        )

    expected = run()
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
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
        table = rng.permutation(B * pages).astype(np.int32).reshape(B, pages)
        pool = [rng.normal(size=(B * pages + 1, page, K, n)).astype(dtype) for n in (wide, HV)]
        scales = None, None
        if stored:
            pool, scales = zip(
                *(map(np.array, quantised.quantised(x, stored)) for x in pool), strict=True
            )
        read = [
            x if s is None else (x * s[..., None]).astype(dtype)
            for x, s in zip(pool, scales, strict=True)
        ]
        k, v = (x[table].reshape(B, pages * page, K, -1) for x in read)
        for x in pool if stored is None else scales:
            x[-1] = np.nan
            x[table[0, 180 // page], 180 % page :] = np.nan
        table[:, 180 // page + 1 :], table[1:, 37 // page + 1 :], table[2], table[0, :1] = (
            B * pages,
            -1,
            10**6,
            B * pages,
        )
        q = arrays(rng, 100, 1, dtype, wide)[0]
        more = dict(
            window, query_seq_lengths=count, implementation=implementation, return_residual=True
        )
        more |= {} if stored is None else dict(zip(("k_scales", "v_scales"), scales, strict=True))
        attend = jax.jit(functools.partial(paged_attention, **more))
        with gpu_interpreter.kernels(implementation):
            o, lse = attend(q, *pool, table, lengths)
        options = dict(
            is_causal=True,
            query_offset=lengths - count,
            query_seq_lengths=count,
            key_value_seq_lengths=lengths,
        )
        expected = oracle.attention(
            q, k, v, np.zeros(o.shape), np.zeros(lse.shape), **options, **window
        )
        close(o, expected[0], TOLERANCE[dtype], "output")
        close(lse, expected[1], 1e-5, "lse")


# ---- ragged queries ----

TOKENS = 50  # of which a tile takes 64 K / N = 21


@functools.partial(jax.jit, static_argnums=(0, 1))
def ragged(implementation, window, q, k, v, table, lengths, ends, by_row):
    mod = lambda s, b, h, i, j: s + by_row[b, h] * (i - j) * 0.1
    more = dict(local_window_size=window, score_mod=mod, sinks=by_row[0])
    options = dict(cu_seqlens_q=ends, implementation=implementation, return_residual=True)
    return paged_attention(q, k, v, table, lengths, **options, **more)


@st.composite
def ragged_calls(draw):
    """A window, where the tokens of each row begin and end, how many keys each row had before, and
    a seed."""
    ends = np.sort(ints(*draw(st.lists(st.integers(0, TOKENS), min_size=B + 1, max_size=B + 1))))
    before = ints(*draw(st.lists(st.integers(0, 30), min_size=B, max_size=B)))
    return draw(st.sampled_from([None, (9, 0)])), ends, before, draw(st.integers(0, 99))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_blocks")
def test_ragged_tokens_equal_the_oracle_row_by_row(implementation, request):
    @settings(max_examples=calls(request), deadline=None, database=None)
    @given(ragged_calls())
    def equals(call):
        window, ends, before, seed = call
        rng = np.random.default_rng(seed)
        lengths = before + np.diff(ends)
        table = ints(*rng.permutation(B * 10)).reshape(B, 10)
        q = rng.normal(size=(TOKENS, N, H)).astype(np.float32)
        k_pages, v_pages = (rng.normal(size=(B * 10, 8, K, n)).astype(np.float32) for n in (H, HV))
        by_row = rng.normal(size=(B, N)).astype(np.float32)
        o, lse = ragged(implementation, window, q, k_pages, v_pages, table, lengths, ends, by_row)
        more = dict(is_causal=True, sinks=by_row[0]) | (
            dict(local_window_size=window) if window else {}
        )
        for b, (first, last) in enumerate(pairwise(ends)):
            k, v = (x[table[b]].reshape(1, 80, K, -1)[:, : lengths[b]] for x in (k_pages, v_pages))
            zeros = np.zeros((1, last - first, N, HV)), np.zeros((1, last - first, N))
            distance = before[b] + np.arange(last - first)[:, None] - np.arange(lengths[b])
            options = more | dict(
                query_offset=int(before[b]), bias=0.1 * by_row[b][:, None, None] * distance
            )
            expected = (
                oracle.attention(q[None, first:last], k, v, *zeros, **options)
                if last > first
                else zeros
            )
            close(o[first:last], expected[0][0], TOLERANCE["float32"], "output")
            close(lse[first:last], expected[1][0], 1e-6, "lse")
        assert not o[: ends[0]].any() and not o[ends[-1] :].any()
        assert np.isneginf(lse[: ends[0]]).all() and np.isneginf(lse[ends[-1] :]).all()

    equals()


RAGGED = {
    "hopper": pytest.param("hopper", None, marks=needs_interpreter),
    "ampere": pytest.param("ampere", None, marks=[needs_interpreter, pytest.mark.whole]),
    "reference": ("reference", None),
    "standard": ("standard", None),
    "blockwise, int8": ("blockwise", "int8"),
    "triton, float8_e4m3fn": ("triton", "float8_e4m3fn"),
}


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
    jax.tree.map(np.testing.assert_array_equal, padded, cache)

    def attend(q, cache, **more):
        more |= {} if stored is None else dict(k_scales=cache.key_scale, v_scales=cache.value_scale)
        more |= dict(implementation=implementation, local_window_size=(40, 0), return_residual=True)
        with gpu_interpreter.kernels(implementation):
            return paged_attention(q, cache.key, cache.value, cache.table, cache.length, **more)

    expected, found = (
        attend(q[at], padded, query_seq_lengths=count),
        attend(q, cache, cu_seqlens_q=ends),
    )
    for x, y in zip(expected, found, strict=True):
        for b, (first, last) in enumerate(pairwise(ends)):
            close(y[first:last], x[b, : last - first], TOLERANCE[dtype], "output and lse")


def pages(P=4, page=8, heads=1, rows=1, width=8, dtype=jnp.float32):
    k = jnp.ones((P, page, heads, width), dtype)
    return dict(
        query=jnp.ones((1, 1, 1, 8)),
        k_pages=k,
        v_pages=k,
        page_table=jnp.zeros((rows, 2), int),
        lengths=ints(3),
    )


SCALES = jnp.ones((4, 8, 1))


def test_ends_that_only_the_program_knows_are_in_order_and_within_the_tokens(rng):
    k, v = (jnp.asarray(rng.normal(size=(5, 1, 8)), jnp.float32) for _ in range(2))

    @jax.jit
    def run(ends):
        cache = paged_cache(
            batch=2, max_length=16, kv_heads=1, head_size=8, pages=4, page=8, dtype=jnp.float32
        )
        cache = cache.append(k, v, cu_seqlens=ends)
        return cache.length, paged_attention(
            k, cache.key, cache.value, cache.table, cache.length, cu_seqlens_q=ends
        )

    for wrong, meant in (([-1, 3, 6], [0, 3, 5]), ([0, 4, 2], [0, 4, 4])):
        for actual, expected in zip(run(ints(*wrong)), run(ints(*meant)), strict=True):
            np.testing.assert_array_equal(actual, expected)


WRONG = {
    "a page that is no multiple of 8": (dict(page=9), {}, "multiple of 8 keys; got"),
    "rows that are not the query's": (
        dict(rows=2),
        {},
        r"the same B rows, here 1, as query or cu_seqlens_q; got \(2, 2\) and \(1,\)",
    ),
    "heads of another size": (
        dict(width=16),
        {},
        r"with the H of query \(1, 1, 1, 8\); got \(4, 8, 1, 16\)",
    ),
    "pages behind heads": (
        dict(P=1, heads=4),
        {},
        r"got \(1, 8, 4, 8\). Do the heads come .*: jnp.moveaxis\(x, 0, 2\)",
    ),
    "no lengths": ({}, dict(lengths=None), "lengths must be integers; got NoneType"),
    "a number for a flag": (
        {},
        dict(is_causal=1),
        "is_causal must be a static bool, True or False; got int",
    ),
    "lengths of other rows": (
        {},
        dict(query_seq_lengths=[1, 1]),
        r"query_seq_lengths must be int32 \[B\] = \(1,\); got \(2,\)",
    ),
    "a name of no implementation": (
        {},
        dict(implementation="flash"),
        "implementation must be None or one of hopper, ampere, triton",
    ),
    "ragged tokens of other rows": (
        {},
        dict(query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 2, 5]),
        r"the same B rows, here 2, as query or cu_seqlens_q; got \(1, 2\) and \(1,\)",
    ),
    "ragged tokens in a batch": (
        {},
        dict(cu_seqlens_q=[0, 1]),
        r"query must be \[T, N, H\] with cu_seqlens_q \[B \+ 1\]",
    ),
    "ragged tokens beyond the last": (
        {},
        dict(query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 6]),
        r"cu_seqlens_q must ascend, from 0 or more to the 5 tokens at most; got \[0, 6\]",
    ),
    "ragged tokens and lengths": (
        {},
        dict(query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 5], query_seq_lengths=[5]),
        "query_seq_lengths cannot go with cu_seqlens_q",
    ),
    "8 bits without scales": (
        dict(dtype=jnp.int8),
        {},
        r"k_pages of int8 needs k_scales \[P, page, K\]",
    ),
    "scales of floats": (
        {},
        dict(k_scales=SCALES, v_scales=SCALES),
        "float32 is for int8 or float8_e4m3fn, .* no place for k_sc",
    ),
    "scales of other pages": (
        dict(dtype=jnp.int8),
        dict(k_scales=SCALES[:3], v_scales=SCALES),
        r"\(4, 8, 1\) like k_.*; got",
    ),
    "8 bits on hopper": (
        dict(dtype=jnp.int8),
        dict(k_scales=SCALES, v_scales=SCALES, implementation="hopper"),
        "wgmma multiplies pages as they lie, in float32; got int8: triton and blockwise take them",
    ),
    "8 bits on ampere": (
        dict(dtype=jnp.int8),
        dict(k_scales=SCALES, v_scales=SCALES, implementation="ampere"),
        "mma multiplies pages as they lie, in float32; got int8: triton and blockwise take them",
    ),
    "small pages of narrow heads on ampere": (
        {},
        dict(implementation="ampere"),
        "it copies pages of 8 keys of heads of a multiple of 64; got H = 8, Hv = 8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_raises_and_says_what_does(name):
    shape, more, message = WRONG[name]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        paged_attention(**pages(**shape) | more)


def test_lists_and_what_is_of_numpy_serve_as_in_flash_attention():
    expected = paged_attention(**pages(), scale=0.5, local_window_size=(1, 0), logits_soft_cap=2.0)
    kinds = dict(
        scale=[0.5],
        local_window_size=[1, 0],
        logits_soft_cap=jnp.float32(2.0),
        is_causal=np.bool_(True),
    )
    np.testing.assert_array_equal(paged_attention(**pages(), **kinds), expected)


def test_paged_attention_has_no_derivative_and_says_so():
    call = pages()
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda q: paged_attention(**call | dict(query=q)).sum())(call["query"])


# ---- pages in 8 bits ----

QUANTISED = ("int8", "float8_e4m3fn")
QUERIES = [(query, stored) for query in ("float32", "float16", "bfloat16") for stored in QUANTISED]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("query, stored", QUERIES)
def test_pages_in_8_bits_equal_the_oracle_on_what_they_stand_for(
    implementation, query, stored, rng
):
    """Small values too, whose scales float16 does not hold; shared pages, NaN where nobody
    looks."""
    lengths, count = ints(29, 48, 0), ints(5, 2, 0)
    table = ints(*rng.permutation(B * PAGES)).reshape(B, PAGES)
    table[1, :3] = table[0, :3]
    x8, scales, wide = [], [], []
    for n, size in ((H, 1.0), (HV, 1e-3)):
        stored_x, scale = map(
            np.array, quantised.quantised(size * rng.normal(size=(B * PAGES + 1, 8, K, n)), stored)
        )
        wide.append(
            (stored_x.astype(np.float32) * scale[..., None])[table].reshape(B, PAGES * 8, K, n)
        )
        used = np.zeros(scale.shape[:2], bool)
        for b in range(B):
            used[table[b, np.arange(lengths[b]) // 8], np.arange(lengths[b]) % 8] = True
        stored_x[~used], scale[~used] = 127 if stored == "int8" else np.nan, np.nan
        x8, scales = [*x8, stored_x], [*scales, scale]
    for b in range(B):
        table[b, -(-lengths[b] // 8) :] = [B * PAGES, -1, 10**6][b]
    q = rng.normal(size=(B, T, N, H)).astype(query)
    more, shared = (
        dict(zip(("k_scales", "v_scales"), scales, strict=True)),
        dict(local_window_size=(30, 0), logits_soft_cap=2.0),
    )
    attend = functools.partial(
        paged_attention, implementation=implementation, return_residual=True, **shared
    )
    o, lse = jax.jit(attend)(q, *x8, table, lengths, query_seq_lengths=count, **more)
    zeros = np.zeros((B, T, N, HV)), np.zeros((B, T, N))
    options = dict(
        is_causal=True,
        query_offset=lengths - count,
        query_seq_lengths=count,
        key_value_seq_lengths=lengths,
    )
    expected = oracle.attention(q, *wide, *zeros, **options, **shared)
    close(o * 1e3, 1e3 * expected[0], TOLERANCE[query], "output")
    close(lse, expected[1], 1e-5, "lse")


@pytest.mark.parametrize("stored, of_page", [("int8", "k_pages"), ("float8_e4m3fn", "v_pages")])
def test_pages_in_8_bits_that_jax_cannot_index_are_refused(stored, of_page):
    shape = jax.ShapeDtypeStruct
    width = dict(k_pages=64, v_pages=64) | {of_page: 128}
    rows = dict(page_table=shape((2, 9), "int32"), lengths=shape((2,), "int32"))

    def traced(pages, implementation):
        call = rows | dict(query=shape((2, 1, 8, width["k_pages"]), "bfloat16"))
        call |= {name: shape((pages, 64, 8, n), stored) for name, n in width.items()}
        call |= dict.fromkeys(("k_scales", "v_scales"), shape((pages, 64, 8), "float32"))
        return jax.eval_shape(
            functools.partial(paged_attention, implementation=implementation), **call
        )

    assert traced(2**15, "triton").shape == traced(2**15 + 1, "blockwise").shape
    sentence = (
        f"indexes pages in {stored} of 2\\^31 to 2\\^32 elements by an int32; got \\(32769, "
        "64, 8, 128"
    )
    with pytest.raises(NotImplementedError, match=sentence):
        traced(2**15 + 1, "triton")


@pytest.mark.parametrize("stored", QUANTISED)
def test_8_bits_err_as_stated_and_a_row_of_0_or_nan_stays_what_it_is(stored, rng):
    x = rng.normal(size=(1000, 64)).astype(np.float32) * np.exp(rng.normal(size=(1000, 1)) * 20)
    x[0], x[1, 3], x[2] = 0, np.nan, 1e-45
    x8, scales = quantised.quantised(x, stored)
    found = np.array(x8.astype(jnp.float32) * scales[:, None])
    assert (found[0] == 0).all() and np.isnan(found[1]).all() and (abs(found[2]) < 1e-36).all()
    found, x = found[3:].astype(np.float64), x[3:].astype(np.float64)
    largest = abs(x).max(1, keepdims=True)
    limit = largest / 254 if stored == "int8" else np.maximum(abs(x) / 16, largest / 448 / 1024)
    assert (abs(found - x) <= 1.001 * limit).all()


@pytest.mark.parametrize("stored, part", [("int8", 0.1), ("float8_e4m3fn", 1.1)])
def test_beside_a_cache_in_8_bits_nothing_wider_is_in_memory(stored, part, monkeypatch):
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    cache = jax.eval_shape(lambda: paged_cache(8, 8192, 8, 128, pages=1024, dtype=stored))

    def step(cache, q, new):
        cache, scales = (
            cache.append(new, new),
            dict(k_scales=cache.key_scale, v_scales=cache.value_scale),
        )
        return paged_attention(
            q,
            cache.key,
            cache.value,
            cache.table,
            cache.length,
            implementation="blockwise",
            **scales,
        ), cache

    new = (jax.ShapeDtypeStruct((8, 1, heads, 128), jnp.float32) for heads in (32, 8))
    memory = jax.jit(step, donate_argnums=0).lower(cache, *new).compile().memory_analysis()
    assert memory.temp_size_in_bytes < part * 2 * 8 * 8192 * 8 * 128


@pytest.mark.gpu
def test_the_output_of_a_cache_in_8_bits_errs_by_1_and_4_percent(rng):
    q, k, v = (
        rng.normal(size=(1, length, 8, 128)).astype(np.float32) for length in (4, 2048, 2048)
    )
    exact = flash_attention(q, k, v)
    for stored, stated in dict(int8=0.01, float8_e4m3fn=0.04).items():
        make = lambda k, v, stored=stored: paged_cache(
            1, 2048, 8, 128, pages=32, dtype=stored
        ).append(k, v)
        cache = jax.jit(make)(k, v)
        options = dict(k_scales=cache.key_scale, v_scales=cache.value_scale, is_causal=False)
        o = paged_attention(q, cache.key, cache.value, cache.table, cache.length, **options)
        assert jnp.linalg.norm(o - exact) < stated * jnp.linalg.norm(exact)


# ---- by Mosaic ----

BY_MOSAIC = {
    "causal with lengths, 128": (128, dict(SEEN["causal with lengths"])),
    "a window and sinks, 64": (64, dict(SEEN["a window"], sinks=np.ones(8, np.float32))),
    "a window, 80": (80, SEEN["a window"]),
    "a soft cap, 96": (96, dict(SEEN["causal with lengths"], logits_soft_cap=2.0)),
}
FAMILIES = dict(
    {name: (name, {}) for name in MOSAIC}, **{"ampere by TMA": ("ampere", dict(tma=True))}
)


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("name", whole_but(BY_MOSAIC, "causal with lengths, 128"))
@pytest.mark.parametrize("family", whole_but(FAMILIES, *MOSAIC))
def test_by_mosaic_output_and_lse_equal_the_oracle_without_a_race(family, name, rng, monkeypatch):
    (implementation, more), (head, kw) = FAMILIES[family], BY_MOSAIC[name]
    monkeypatch.setattr(decode, "num_splits", lambda *_: 2)
    q, k, v = arrays(rng, 3, 301, jnp.bfloat16, head, head, 8)
    with gpu_interpreter.kernels(implementation, detect_races=True, **more) as races:
        o, lse = flash_attention(q, k, v, implementation=implementation, return_residual=True, **kw)
    expected_o, expected_lse, _ = oracle.attention(
        q, k, v, np.zeros(o.shape), np.zeros(lse.shape), **kw
    )
    close(o, expected_o, TOLERANCE["bfloat16"], "output")
    close(lse, expected_lse, 1e-5, "lse")
    assert not races.found


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("page", whole_but([8, 16, 32, 64, 128], 16))
@pytest.mark.parametrize("family", FAMILIES)
def test_by_mosaic_pages_equal_the_oracle_without_a_race(family, page, rng, monkeypatch):
    """In one split, so that slots of shared memory are used again."""
    implementation, more = FAMILIES[family]
    monkeypatch.setattr(decode, "num_splits", lambda *_: 1)
    count, lengths = 384 // page, ints(150, 384, 0)
    table = rng.permutation(B * count).astype(np.int32).reshape(B, count)
    pool = [rng.normal(size=(B * count + 1, page, K, 128)).astype(jnp.bfloat16) for _ in range(2)]
    k, v = (x[table].reshape(B, 384, K, 128) for x in pool)
    for x in pool:
        x[-1] = x[table[0, 150 // page], 150 % page :] = np.nan
    for b in range(B):
        table[b, -(-lengths[b] // page) :] = [B * count, 10**6, -7][b]
    q = arrays(rng, 3, 1, jnp.bfloat16, 128, heads=8)[0]
    with gpu_interpreter.kernels(implementation, detect_races=True, **more) as races:
        o, lse = paged_attention(
            q, *pool, table, lengths, implementation=implementation, return_residual=True
        )
    kw = dict(is_causal=True, query_offset=lengths - 3, key_value_seq_lengths=lengths)
    expected_o, expected_lse, _ = oracle.attention(
        q, k, v, np.zeros(o.shape), np.zeros(lse.shape), **kw
    )
    close(o, expected_o, TOLERANCE["bfloat16"], "output")
    close(lse, expected_lse, 1e-5, "lse")
    assert not races.found


@needs_interpreter
def test_on_ampere_a_wait_that_lets_one_copy_more_run_is_a_race(rng, monkeypatch):
    from pallas_flash.kernels.ampere import tile  # an older jax lacks its layouts

    wait = tile.wait
    monkeypatch.setattr(tile, "wait", lambda full=None, running=0: wait(full, running + 1))
    monkeypatch.setattr(decode, "num_splits", lambda *_: 1)
    q, k, v = arrays(rng, 1, 301, jnp.bfloat16, 64, 64)
    with gpu_interpreter.kernels("ampere", detect_races=True) as races:
        flash_attention(q, k, v, implementation="ampere")
    assert races.found


def test_on_hopper_at_least_64_kb_of_loads_are_in_flight():
    for width, value in ((64, 64), (128, 128), (192, 128), (128, 64)):
        q, k, v = (
            jax.ShapeDtypeStruct((1, *n), jnp.bfloat16)
            for n in ((1, 8, width), (8192, 1, width), (8192, 1, value))
        )
        tiles = hopper_tuning.tiles(explain(q, k, v).problem).decode
        assert tiles.stages * tiles.block_k * 2 * (tiles.width + tiles.value_width) >= 2**16


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-4090", "RTX-5090", "H200"])
@pytest.mark.parametrize("head", [64, 80, 128])
def test_on_ampere_at_least_48_kb_of_loads_are_in_flight_and_shared_memory_holds_them(gpu, head):
    q, k = (jax.ShapeDtypeStruct((1, *n, head), jnp.bfloat16) for n in ((1, 8), (8192, 1)))
    with as_if_on(GPUS[gpu]):
        tiles = ampere.tiles(explain(q, k, k, implementation="blockwise").problem).decode
    block = tiles.block_k * 2 * (tiles.width + tiles.value_width)
    assert (tiles.stages - 1) * block >= 48 << 10
    assert tiles.stages * block + 2 * 64 * tiles.width < GPUS[gpu].shared_memory - 1024


# ---- a cache of pages ----


def filled(cache, rng, counts):
    """The cache with counts[n][b] more tokens of row b in step n, and the keys of each row in
    order."""
    rows = [np.zeros((0, K, H), np.float32) for _ in range(B)]
    append = jax.jit(type(cache).append, donate_argnums=0)
    for count in counts:
        new = rng.normal(size=(B, T, K, H)).astype(np.float32)
        cache = append(cache, new, 2 * new, ints(*count))
        rows = [np.concatenate([row, new[b, : count[b]]]) for b, row in enumerate(rows)]
    return cache, rows


def holds(cache, b, row):
    length = int(cache.length[b])
    keys = np.asarray(cache.key[cache.table[b]]).reshape(-1, K, H)[:length]
    np.testing.assert_array_equal(keys, row[:length])
    return length


def test_tokens_are_found_where_they_were_appended(rng):
    cache, rows = filled(
        paged_cache(B, 24, K, H, pages=8, page=8, dtype="float32"),
        rng,
        [(5, 0, 2), (4, 5, 5), (5, 1, 0)],
    )
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [14, 6, 7]
    assert sorted(cache.users.tolist()) == [0] * 4 + [1] * 4  # no page is two rows'


def test_without_a_free_page_or_entry_tokens_are_left_out_and_the_others_stay_right(rng):
    cache, rows = filled(
        paged_cache(B, 16, K, H, pages=3, page=8, dtype="float32"), rng, [(5, 5, 5)] * 4
    )
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [8, 8, 8]
    cache, rows = filled(
        paged_cache(B, 16, K, H, pages=9, page=8, dtype="float32"), rng, [(5, 0, 1)] * 4
    )
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [16, 0, 4]


def test_shared_pages_are_free_when_the_last_row_releases_them(rng):
    cache, rows = filled(
        paged_cache(B, 24, K, H, pages=6, page=8, dtype="float32"), rng, [(5, 3, 0)] * 4
    )
    cache = jax.jit(type(cache).share)(cache, 0, 1)
    assert holds(cache, 1, rows[0]) == 16 and sorted(cache.users.tolist()) == [0, 0, 0, 1, 2, 2]
    cache, more = filled(cache, rng, [(0, 5, 0)])
    assert (
        holds(cache, 0, rows[0]) == 20
        and holds(cache, 1, np.concatenate([rows[0][:16], more[1]])) == 21
    )
    cache = cache.release(np.array([True, False, False]))
    assert sorted(cache.users.tolist()) == [0, 0, 0, 1, 1, 1]
    assert not cache.release(np.array([False, True, False])).users.any()


def test_more_tokens_than_there_are_count_as_those_and_fewer_than_none_as_none(rng):
    cache = paged_cache(B, 24, K, H, pages=8, page=8, dtype="float32")
    new = jnp.ones((B, 3, K, H))
    assert cache.append(new, new, count=[9, -1, 2]).length.tolist() == [3, 0, 2]


@pytest.mark.parametrize("source, target", [(0, 3), (0, -1), (-1, 1), (3, 1)])
def test_to_share_with_no_row_changes_nothing_where_it_is_traced(source, target, rng):
    cache, _ = filled(
        paged_cache(B, 24, K, H, pages=6, page=8, dtype="float32"), rng, [(5, 3, 0)] * 2
    )
    shared = jax.jit(type(cache).share)(cache, source, target)
    for name in ("table", "length", "users"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(cache, name))


NEW = jnp.ones((2, 3, 2, 8))
MISUSED = {
    "one head for all": (
        lambda cache: cache.append(NEW[:, :, :1], NEW),
        r"key must be .* = \(2, 3, 2, 8\) .* got \(2, 3, 1, 8\)",
    ),
    "fewer values": (
        lambda cache: cache.append(NEW, NEW[:, :1]),
        r"value must be .* = \(2, 3, 2, 8\) .* got \(2, 1, 2, 8\)",
    ),
    "numbers of rows": (
        lambda cache: cache.release(np.array([0])),
        r"rows must be bool \[B\] = \(2,\), True: .* int32 \(1,\)",
    ),
    "tokens of other rows": (
        lambda cache: cache.append(NEW, NEW, [1, 2, 3]),
        r"count must be int32 \[B\] = \(2,\), or one for all rows; got \(3,\)",
    ),
    "room for other rows": (
        lambda cache: cache.reserve([1, 2, 3]),
        r"tokens must be int32 \[B\] = \(2,\), or .* got \(3,\)",
    ),
    "several rows": (
        lambda cache: cache.share(0, jnp.array([1, 0])),
        r"target must be the number of one row; got \(2,\)",
    ),
    "no such row": (
        lambda cache: cache.share(0, -1),
        "target must be the number of a row, from 0 to 1; got -1",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_what_a_cache_would_broadcast_or_drop_in_silence_raises(name):
    misuse, message = MISUSED[name]
    with pytest.raises(ValueError, match=message):
        misuse(paged_cache(2, 16, 2, 8, pages=4, page=8, dtype="float32"))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool"])
def test_a_cache_is_of_floats_or_of_8_bits_that_have_scales(dtype):
    with pytest.raises(
        TypeError, match=f"must be a float's, or int8 or float8_e4m3fn; got {dtype}"
    ):
        paged_cache(batch=1, max_length=8, kv_heads=1, head_size=8, pages=1, page=8, dtype=dtype)
