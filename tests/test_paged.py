"""Attention to pages where they lie: that it equals the oracle, in what callers vary."""

import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from check import TOLERANCE, close
from decoding import (
    HV,
    IMPLEMENTATIONS,
    MOSAIC,
    PAGES,
    B,
    H,
    K,
    N,
    T,
    arrays,
    calls,
    ints,
    needs_interpreter,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import (
    backends,
    decode,
    explain,
    flash_attention,
    paged_attention,
    quantised,
)
from pallas_flash.accounting import GPUS
from pallas_flash.caches import attend
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_caches")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


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


@pytest.mark.gpu
@pytest.mark.usefixtures("small_splits")
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


@pytest.mark.usefixtures("small_splits")
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

    assert decode.is_decoding(explain(q, k, v, score_mod=lambda s, b, h, i, j: s + h).problem)
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


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("kind", ["contiguous", "paged", "in 8 bits"])
@pytest.mark.parametrize("implementation", MOSAIC)
def test_a_score_mod_of_rows_of_several_heads_equals_the_reference(
    implementation, kind, rng, monkeypatch
):
    """By batch row, query head, token and key, and by arrays of them and of both at once."""
    monkeypatch.setattr(decode, "num_splits", lambda *_: 2)
    page, size, offset = 32, 64, ints(260, 77, 130)
    table = ints(*rng.permutation(B * 10)).reshape(B, 10)
    pages = [rng.normal(size=(B * 10, page, K, size)).astype(np.float16) for _ in "kv"]
    q = rng.normal(size=(B, 3, N, size)).astype(np.float16)
    by_row, near, by_pair, by_key = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, N), (N, 9), (N, 320), (320,))
    )

    def mod(s, b, h, i, j):
        s = s * 1.1 + by_row[b, h] * (i - j) * 0.01 + near[h, jnp.clip(i - j, 0, 8)]
        return s + by_pair[h, j] + jnp.where(i % 2 == 0, by_key[j], 0.0)

    options = dict(logits_soft_cap=3.0, score_mod=mod, return_residual=True, return_max_logits=True)
    scales, wide = {}, pages
    if kind == "in 8 bits":
        stored = [quantised.quantised(jnp.asarray(x), "int8") for x in pages]
        wide = [x8.astype(jnp.float32) * scale[..., None] for x8, scale in stored]
        pages, scales = zip(*stored, strict=True)
        scales = dict(zip(("k_scales", "v_scales"), scales, strict=True))
    k, v = (np.array(x)[table].reshape(B, 320, K, size) for x in wide)
    causal = dict(is_causal=True, query_offset=offset, key_value_seq_lengths=offset + 3)
    expected = flash_attention(
        *(x.astype(np.float32) for x in (q, k, v)), implementation="reference", **causal, **options
    )
    kernels = gpu_interpreter.kernels(implementation, detect_races=True)
    with kernels as races, jax.numpy_rank_promotion("raise"):
        half = (x.astype(q.dtype) for x in (k, v))
        assert "decoding" in str(explain(q, *half, score_mod=mod, **causal).tiles)
        if kind == "contiguous":
            found = flash_attention(q, k, v, implementation=implementation, **causal, **options)
        else:
            found = paged_attention(
                q, *pages, table, offset + 3, implementation=implementation, **scales, **options
            )
    for x, y, tolerance in zip(found, expected, (TOLERANCE["float16"], 1e-5, 1e-5), strict=True):
        close(x, y, tolerance, kind)
    assert not races.found


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("implementation", MOSAIC)
def test_splits_are_merged_by_their_sums_where_logits_are_beyond_them(
    implementation, rng, monkeypatch
):
    """At -1e6 a log-sum-exp rounds by more than what the sums of two splits differ by."""
    monkeypatch.setattr(decode, "num_splits", lambda *_: 2)
    q, k, v = (rng.normal(size=(1, n, 4, 64)).astype(np.float16) for n in (2, 300, 300))
    options = dict(score_mod=lambda s, b, h, i, j: s - 1e6 * h)
    wide = (x.astype(np.float32) for x in (q, k, v))
    with gpu_interpreter.kernels(implementation):
        o = flash_attention(q, k, v, implementation=implementation, **options)
    close(o, flash_attention(*wide, implementation="reference", **options), 2e-3, "output")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="an older jax lacks the kernels")
@pytest.mark.parametrize("gpu, taken", [("H200", "hopper"), ("A100-80GB", "ampere")])
def test_pages_with_a_score_mod_need_no_triton(gpu, taken, monkeypatch):
    monkeypatch.setattr(backends, "_triton_why_no_import", lambda: "it is hidden")
    q, k = (jax.ShapeDtypeStruct((1, *n), "bfloat16") for n in ((1, 8, 64), (512, 2, 64)))
    with as_if_on(GPUS[gpu]):
        add_head = lambda s, b, h, i, j: s + h
        problem = explain(q, k, k, score_mod=add_head, implementation="blockwise").problem
        pages = attend.Pages(((9, 64, 2, 64),) * 2, None, False)
        assert attend.choose(problem, pages, None).name == taken


@pytest.mark.usefixtures("small_splits")
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
