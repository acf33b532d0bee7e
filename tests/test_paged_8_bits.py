"""Pages of int8 and float8."""

import functools
import itertools

import decoding
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import ptx_values
import pytest
from decoding import (
    MOSAIC,
    B,
    H,
    N,
    T,
    equal_the_oracle,
    ints,
    needs_interpreter,
    normal,
    pool,
    seen,
)

from pallas_flash import explain, flash_attention, paged_attention, paged_cache
from pallas_flash.accounting import GPUS
from pallas_flash.choose.implementations import AMPERE
from pallas_flash.jax_support import jax_internals, xla_cpu
from pallas_flash.kernels.decoding import tuning
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled import blockwise, quantised, split_kv
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_caches")
implementation = decoding.implementation


QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
QUERIES = [  # and of keys and values what they are stored in, None: as the query
    *((query, (x, x)) for query in ("float32", "float16", "bfloat16") for x in QUANTISED),
    ("bfloat16", ("int8", None)),
    ("float16", (None, "float8_e5m2")),
]


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("query, stored", QUERIES, ids=str)
def test_pages_in_8_bits_equal_the_oracle_on_what_they_stand_for(
    implementation, query, stored, rng
):
    """Small values too, whose scales float16 does not hold; shared pages, NaN where nobody
    looks."""
    lengths, count = ints(29, 48, 0), ints(5, 2, 0)
    call, rows = pool(rng, 8, lengths, dtype=query, stored=stored, shared=3, of_v=1e-3)
    q = normal(rng, B, T, N, H, dtype=query)
    shared = dict(local_window_size=(30, 0), logits_soft_cap=2.0)
    options = dict(implementation=implementation, return_residual=True, **shared)
    attend = jax.jit(functools.partial(paged_attention, **options))
    o, lse = attend(q, **call, query_seq_lengths=count)
    k, v = (x.astype(np.float32) for x in rows)
    equal_the_oracle((o * 1e3, lse), q, (k, v * 1e3), **seen(lengths, count), **shared)


# pages of a block of keys, of several and of a part of one; the heads' sizes
PAGES_BY_MMA = {  # keys of a page, sizes of heads, and how many query heads
    "64": (64, 128, 128, N),
    "64, 24 rows": (64, 128, 128, 16),
    "128": (128, 64, 64, N),
    "16": (16, 128, 64, N),
    "8": (8, 128, 256, N),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize("name", PAGES_BY_MMA)
@pytest.mark.parametrize("implementation", MOSAIC)
def test_by_mma_pages_in_8_bits_equal_the_oracle_without_a_race(
    implementation, name, stored, rng, monkeypatch
):
    """In one split, so that slots of shared memory are used again; the scales are NaN, and the
    largest numbers in the pages, where nobody looks."""
    page, size, value_size, heads = PAGES_BY_MMA[name]
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 1)
    lengths = ints(150, 384, 0)
    call, rows = pool(rng, page, lengths, 384 // page, (size, value_size), stored=stored)
    dtype = dict(int8="bfloat16", float8_e4m3fn="float16", float8_e5m2="bfloat16")[stored]
    q = normal(rng, B, 3, heads, size, dtype=dtype)
    with gpu_interpreter.kernels(implementation, detect_races=True) as races:
        found = paged_attention(q, **call, implementation=implementation, return_residual=True)
    equal_the_oracle(found, q, rows, **seen(lengths, 3))
    assert not races.found


# compute capability, and the PTX that the compiler knows, which may be an older one
CODES = [(8.0, 90), (8.9, 90), (10.0, 90), (10.0, 92)]


@needs_interpreter
@pytest.mark.parametrize("stored", QUANTISED)
def test_by_mma_8_bits_are_what_numpy_reads_in_all_256_patterns(stored, monkeypatch):
    """Each at each place in a word, by the code of each GPU."""
    from pallas_flash.kernels.mma import widening

    patterns = np.stack([np.roll(np.arange(256, dtype=np.uint8), n) for n in (0, 3, 7, 11)], 1)
    for (capability, isa), dtype in itertools.product(CODES, ("bfloat16", "float16")):
        monkeypatch.setattr(jax_internals, "ptx_isa", lambda isa=isa: isa)
        code = widening.code_of_four(stored, widening.FORMATS[dtype], capability)
        by_one = isa == 92 and dtype == "bfloat16"
        assert (code is None) == (stored == "int8" and not by_one)
        if code is None:
            continue
        has_e4m3 = stored == "float8_e4m3fn" and capability >= 8.9
        assert ("e4m3x2" in code) == has_e4m3 and ("bf16x2.e" in code or stored == "int8") == by_one
        pairs = ptx_values.results(code, patterns.view(np.uint32)[:, 0])
        found = np.stack(pairs, 1).astype(np.uint32).view(dtype)
        found, expected = (np.float32(x) for x in (found, patterns.view(stored).astype(dtype)))
        np.testing.assert_array_equal(found, expected)
        is_0 = expected == 0
        np.testing.assert_array_equal(np.signbit(found[is_0]), np.signbit(expected[is_0]))


@pytest.mark.parametrize("stored", QUANTISED)
def test_blockwise_reads_8_bits_as_numpy_does_in_all_256_patterns(stored):
    patterns = np.arange(256, dtype=np.uint8).view(stored)
    for dtype in (jnp.float32, jnp.bfloat16):
        found = jax.jit(xla_cpu.widen, static_argnums=1)(patterns, dtype)
        expected = patterns.astype(dtype)
        np.testing.assert_array_equal(*(np.float32(x) for x in (found, expected)))


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-4090", "H200"])
def test_by_mma_a_copy_is_of_whole_tiles_for_four_warps_in_shared_memory_that_there_is(gpu):
    shape, taken = jax.ShapeDtypeStruct, 0
    for head, value, page, stored in itertools.product(
        (16, 24, 64, 80, 96, 128, 160, 192, 224, 256),
        (64, 128, 160, 192, 256),
        (8, 16, 64),
        (None, "int8"),
    ):
        q, k, v = (
            shape((1, *n), "bfloat16") for n in ((1, 8, head), (512, 2, head), (512, 2, value))
        )
        with as_if_on(GPUS[gpu]):
            problem = explain(q, k, v, implementation="blockwise").problem
            shapes = tuple((9, page, 2, n) for n in (head, value))
            if AMPERE.why_no_pages(problem, Pages(shapes, stored, False)):
                continue
            t = tuning.decode_tiles(problem, page, stored)
        size, taken = 1 if stored else 2, taken + 1
        for width in (t.width, t.value_width):
            tiles = width * size / t.swizzle_in_slots  # side by side
            assert (tiles if t.tma else min(page, t.block_k) // 8 * tiles / 4) % 1 == 0
            assert t.block_k // 8 * (width * 2 / t.swizzle) % 4 == 0 or not stored
        row = t.width + t.value_width
        slots, in_use = t.stages * t.block_k * row * size, 2 * t.block_k * row * bool(stored)
        of_q = 2 * t.block_q * t.width * t.copies_q
        assert slots + in_use + of_q <= GPUS[gpu].shared_memory - 1024
    assert taken > 80


@pytest.mark.parametrize(
    "alone, sizes", [(None, [1, 1]), ("keys", [1, 2]), ("values", [2, 1])], ids=str
)
def test_of_keys_or_values_alone_in_8_bits_the_others_are_as_wide_as_the_query(alone, sizes):
    pages = Pages(((9, 64, 2, 64),) * 2, "int8", False, alone)
    assert pages.itemsizes("bfloat16") == sizes


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
    x = normal(rng, 1000, 64) * np.exp(rng.normal(size=(1000, 1)) * 20)
    x[0], x[1, 3], x[2] = 0, np.nan, 1e-45
    x8, scales = quantised.quantise(x, stored)
    found = np.array(x8.astype(jnp.float32) * scales[:, None])
    assert (found[0] == 0).all() and np.isnan(found[1]).all() and (abs(found[2]) < 1e-36).all()
    found, x = found[3:].astype(np.float64), x[3:].astype(np.float64)
    largest = abs(x).max(1, keepdims=True)
    limit = dict(
        int8=largest / 254,
        float8_e4m3fn=np.maximum(abs(x) / 16, largest / 448 / 2**10),
        float8_e5m2=np.maximum(abs(x) / 8, largest / 57344 / 2**17),
    )[stored]
    assert (abs(found - x) <= 1.001 * limit).all()


@pytest.mark.parametrize("stored", [*QUANTISED, "bfloat16", "float16"])
def test_beside_a_cache_no_copy_of_it_is_in_memory(stored, monkeypatch):
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    cache = jax.eval_shape(lambda: paged_cache(8, 8192, 8, 128, pages=1024, dtype=stored))

    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache.attend(q, implementation="blockwise"), cache

    dtype = jnp.float32 if stored in QUANTISED else stored
    new = (jax.ShapeDtypeStruct((8, 1, heads, 128), dtype) for heads in (32, 8, 8))
    memory = jax.jit(step, donate_argnums=0).lower(cache, *new).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 2 * cache.k_pages.size


@pytest.mark.whole
@pytest.mark.gpu
def test_the_output_of_a_cache_in_8_bits_errs_by_1_4_and_8_percent(rng):
    q, k, v = (normal(rng, 1, length, 8, 128) for length in (4, 2048, 2048))
    exact = flash_attention(q, k, v)
    keys_alone = "int8", dict(value_dtype="float32"), 0.007
    of_both = ("int8", {}, 0.01), ("float8_e4m3fn", {}, 0.04), ("float8_e5m2", {}, 0.08)
    for stored, more, stated in (*of_both, keys_alone):
        make = lambda k, v, stored=stored, more=more: paged_cache(
            1, 2048, 8, 128, pages=32, dtype=stored, **more
        ).append(k, v)
        cache = jax.jit(make)(k, v)
        o = cache.attend(q, is_causal=False)
        assert jnp.linalg.norm(o - exact) < stated * jnp.linalg.norm(exact)
