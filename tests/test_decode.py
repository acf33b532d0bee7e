"""Decoding: which calls it takes, and that it equals the oracle."""

import functools

import decoding
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from check import check, close
from decoding import (
    MOSAIC,
    B,
    N,
    arrays,
    equal_the_oracle,
    ints,
    needs_interpreter,
    pool,
    seen,
    without_a_race,
)
from selection import whole_but

from pallas_flash import explain, flash_attention, paged_attention
from pallas_flash.accounting import GPUS
from pallas_flash.choose.implementations import AMPERE
from pallas_flash.problem import arguments
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import split_kv
from pallas_flash.tiled.online_softmax import SoftmaxState
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_caches")
implementation = decoding.implementation


# ---- which calls ----

SHAPE = dict(T=1, S=4096, N=16, K=2)
ARE_DECODING = {  # what is not SHAPE's: whether it is decoding
    "one token": ({}, True),
    "rows of a tile": (dict(T=8), True),
    "masks and a soft cap": (
        dict(is_causal=True, query_offset=4095, logits_soft_cap=3.0, local_window_size=(9, 0)),
        True,
    ),
    "rows of more than a tile": (dict(T=9), False),
    "few keys": (dict(S=255), False),
    "a bias": (dict(bias=jax.ShapeDtypeStruct((1, 4096), "float32")), False),
    "dropout": (
        dict(dropout_rate=0.5, dropout_rng=jax.ShapeDtypeStruct((2,), "uint32")),
        False,
    ),
}


def problem(T, S, N, K, batch=1, **kw):
    q, k = (
        jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
        for length, heads in ((T, N), (S, K))
    )
    return explain(q, k, k, **kw).problem


@pytest.mark.parametrize("name", ARE_DECODING)
def test_a_few_tokens_against_many_keys_are_decoding_and_other_calls_are_not(name):
    changes, is_decoding = ARE_DECODING[name]
    assert split_kv.is_decoding(problem(**SHAPE | changes)) == is_decoding


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


@pytest.fixture
def decodes(monkeypatch):
    """decodes(batch, T, S, N, K, dtype, has_lengths): whether blockwise does."""
    monkeypatch.undo()  # small_caches

    def decodes(batch, T, S, N, K, dtype="float32", has_lengths=False):
        q, k = (
            jax.ShapeDtypeStruct((batch, length, heads, 64), dtype)
            for length, heads in ((T, N), (S, K))
        )
        lengths = jax.ShapeDtypeStruct((batch,), jnp.int32) if has_lengths else None
        found = explain(q, k, k, implementation="blockwise", key_value_seq_lengths=lengths)
        return "decoding" in str(found)

    return decodes


def test_blockwise_decodes_where_a_copy_of_the_keys_is_large_or_few_rows_see_some_of_many(decodes):
    half = "bfloat16"  # as many bytes
    assert decodes(2, 1, 8192, 8, 4) and not decodes(2, 1, 8191, 8, 4)
    assert decodes(2, 1, 16384, 8, 4, half) and not decodes(2, 1, 16383, 8, 4, half)
    # a single row is multiplied in float32
    assert decodes(2, 1, 4096, 8, 8, half) and not decodes(2, 2, 4096, 8, 8, half)
    lengths = dict(has_lengths=True)
    assert decodes(2, 1, 2049, 8, 4, **lengths) and not decodes(2, 1, 2048, 8, 4, **lengths)
    assert not decodes(2, 5, 2049, 8, 4, **lengths)


def test_blockwise_decodes_no_batch_rows_whose_keys_are_copied_by_nobody_or_are_few_for_many_rows(
    decodes,
):
    half, lengths = "bfloat16", dict(has_lengths=True)
    assert decodes(300, 1, 512, 8, 2)
    assert not decodes(300, 1, 512, 8, 1) and not decodes(300, 1, 512, 8, 1, half)
    # a single row of bfloat16 is multiplied in float32
    assert decodes(300, 1, 2048, 1, 1, half) and not decodes(300, 1, 2048, 1, 1)
    assert decodes(300, 1, 2049, 8, 1) and decodes(300, 1, 512, 4, 1, **lengths)
    assert decodes(300, 4, 1024, 4, 4, **lengths) and decodes(300, 4, 1025, 4, 2, **lengths)
    assert not decodes(300, 4, 1024, 4, 2, **lengths)


@pytest.mark.parametrize(
    "T, batch, S, num_splits",
    [
        (1, 1, 1024, 16),
        (1, 1, 8192, 16),
        (1, 4, 8192, 4),
        (16, 4, 8192, 2),  # 128 rows of a key head are two tiles
        (1, 16, 8192, 1),
        (1, 17, 8192, 13),
        (1, 64, 131072, 1),
        (1, 1, 64, 1),
    ],
)
def test_splits_keep_the_processors_of_an_h200_busy(T, batch, S, num_splits):
    assert split_kv.num_splits(problem(T, S, 64, 8, batch), 64, 132) == num_splits


def test_many_splits_are_merged_in_few_kernels_as_few_splits_are(rng, optimized, monkeypatch):
    p = problem(1, 4096, 8, 1, return_max_logits=True)
    o, m, l = (normal(rng, 1, 126, 1, 8, *size) for size in ((16,), (), ()))
    l[..., 3], l[:, 1:, :, 5] = 0, 0  # a row without keys, and one with keys of one split
    stats = SoftmaxState(40 * m, abs(l))
    for sinks in (None, np.linspace(-3, 60, 8, dtype=np.float32)):
        x = arguments.Operands(np.zeros((1, 1, 8, 128), np.float32), *[None] * 3, sinks, None, None)
        merge = lambda *a, x=x: split_kv.merge_splits(p, x, *a, LogBase.E)
        compiled = jax.jit(merge).lower(o, stats).compile()
        assert compiled.as_text().count(" fusion(") < 40  # one by one there are over 126
        with monkeypatch.context() as one_by_one:
            one_by_one.setattr(split_kv, "ONE_BY_ONE", 126)
            jax.tree.map(lambda a, b: close(a, b, 2e-6), compiled(o, stats), merge(o, stats))


def test_rows_that_see_no_key_do_not_widen_what_is_read():
    start, stop = jnp.array([[0, 40, 70], [9, 0, 5]]), jnp.array([[0, 50, 60], [9, 0, 5]])
    first, last = split_kv.reach(start, stop, 99)
    assert (first.tolist(), last.tolist()) == ([40, 99], [50, 0])


# ---- against the oracle ----

SEEN = {
    "full": {},
    "causal with lengths": dict(
        is_causal=True, query_offset=ints(50, 298, -2), key_value_seq_lengths=ints(53, 301, 0)
    ),
    "a window": dict(
        local_window_size=(40, 0),
        query_offset=ints(50, 298, 5),
        logits_soft_cap=2.0,
        return_max_logits=True,
    ),
    "documents": dict(
        query_segment_ids=ints([0, 1, 2], [1, 1, 1], [7, 0, 0]),
        key_value_segment_ids=np.arange(B * 301).reshape(B, 301) % 3,
    ),
    "some queries": dict(
        query_seq_lengths=ints(1, 0, 3),
        key_value_seq_lengths=ints(1, 2, 400),
        return_max_logits=True,
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_output_lse_and_gradients_equal_the_oracle(implementation, name, rng):
    sinks = np.append(normal(rng, N - 1), np.float32(np.inf))
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


# ---- by Mosaic ----

SINKS = np.array([1, np.inf, *[1] * 6], np.float32)
# head size, and query heads of two key heads: of 16 a key head has 24 rows, of 8 it has 12, which
# all warps share
BY_MOSAIC = {
    "causal with lengths, 128": (128, 8, SEEN["causal with lengths"]),
    "causal with lengths, 128, 24 rows": (128, 16, SEEN["causal with lengths"]),
    "a window and sinks, 64": (64, 8, dict(SEEN["a window"], sinks=SINKS)),
    "a window, 80": (80, 8, SEEN["a window"]),
    "a window, 80, 24 rows": (80, 16, SEEN["a window"]),
    "a soft cap, 96": (96, 8, dict(SEEN["causal with lengths"], logits_soft_cap=2.0)),
    "documents, 64": (64, 8, SEEN["documents"]),
    "documents, 64, 24 rows": (64, 16, SEEN["documents"]),
    "some queries, 64": (64, 8, SEEN["some queries"]),
    "full, 64, 24 rows": (64, 16, {}),
    "full, 256": (256, 8, {}),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "name",
    whole_but(BY_MOSAIC, "causal with lengths, 128", "causal with lengths, 128, 24 rows"),
)
@pytest.mark.parametrize("implementation", MOSAIC)
def test_by_mosaic_output_and_lse_equal_the_oracle_without_a_race(
    implementation, name, rng, monkeypatch
):
    head, heads, kw = BY_MOSAIC[name]
    q, k, v = arrays(rng, 3, 301, jnp.bfloat16, head, head, heads)
    with without_a_race(implementation, 2, monkeypatch):
        found = flash_attention(q, k, v, implementation=implementation, return_residual=True, **kw)
    equal_the_oracle(found, q, (k, v), **kw)


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("page", whole_but([8, 16, 32, 64, 128], 16))
@pytest.mark.parametrize("implementation", MOSAIC)
def test_by_mosaic_pages_equal_the_oracle_without_a_race(
    implementation, page, heads, rng, monkeypatch
):
    """In one split, so that slots of shared memory are used again."""
    lengths = ints(150, 384, 0)
    call, rows = pool(rng, page, lengths, 384 // page, (128, 128), jnp.bfloat16)
    q = arrays(rng, 3, 1, jnp.bfloat16, 128, heads=heads)[0]
    with without_a_race(implementation, 1, monkeypatch):
        found = paged_attention(q, **call, implementation=implementation, return_residual=True)
    equal_the_oracle(found, q, rows, **seen(lengths, 3))


@needs_interpreter
def test_on_ampere_a_wait_that_lets_one_copy_more_run_is_a_race(rng, monkeypatch):
    from pallas_flash.kernels.mma import tile

    wait = tile.wait
    monkeypatch.setattr(tile, "wait", lambda full=None, running=0: wait(full, running + 1))
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 1)
    q, k, v = arrays(rng, 1, 301, jnp.bfloat16, 64, 64)
    with gpu_interpreter.kernels("ampere", detect_races=True) as races:
        flash_attention(q, k, v, implementation="ampere")
    assert races.found


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-4090", "RTX-5090", "H200"])
@pytest.mark.parametrize("head", [64, 80, 128])
def test_at_least_48_kb_of_loads_are_in_flight_and_shared_memory_holds_them(gpu, head):
    q, k = (jax.ShapeDtypeStruct((1, *n, head), jnp.bfloat16) for n in ((1, 8), (8192, 1)))
    with as_if_on(GPUS[gpu]):
        tiles = AMPERE.tiles(explain(q, k, k, implementation="blockwise").problem).decode
    block = tiles.block_k * 2 * (tiles.width + tiles.value_width)
    assert (tiles.stages - 1) * block >= 48 << 10
    assert (
        tiles.stages * block + 2 * tiles.block_q * tiles.width * tiles.copies_q
        < GPUS[gpu].shared_memory - 1024
    )
