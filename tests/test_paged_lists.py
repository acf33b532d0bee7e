"""Attention to the keys in pages that lists name: it equals the oracle, and reads no others."""

import functools
from itertools import pairwise

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import equal
from decoding import (
    MOSAIC,
    PAGES,
    B,
    H,
    K,
    N,
    T,
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
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import masks, paged_attention
from pallas_flash.caches.attend import _attend_jit
from pallas_flash.kernels.decoding import listed_keys
from pallas_flash.masks.resolved_mask import ResolvedLists
from pallas_flash.problem.page_layout import PageLayout, PageTable
from pallas_flash.tiled import split_kv

pytestmark = pytest.mark.usefixtures("small_caches")
PAGE = 8
SIZES = [(1, 1, 1), (1, 1, K), (3, 2, N), (8, 1, 1), (16, 4, K)]  # block, query_block, L
ALL = dict(return_residual=True, return_max_logits=True)


def draw_lists(rng, block, query_block, L, n=7, queries=T):
    """Indices from before the first block to beyond the last."""
    shape = B, -(-queries // query_block), L, n
    return rng.integers(-2, PAGES * PAGE // block + 2, shape).astype(np.int32)


def named(indices, block, query_block, queries=T):
    """Whether each query head's list names each key, bool [B, N, T, S]."""
    keys = np.arange(PAGES * PAGE) // block
    of_list = (indices[..., None] == keys).any(-2)  # [B, T', L, S]
    of_row = np.repeat(of_list, query_block, 1)[:, :queries]
    return np.repeat(np.swapaxes(of_row, 1, 2), N // indices.shape[2], 1)


def hide_unlisted(call, is_named):
    """The call with NaN in place of the keys, or of their scales, that no list names, and without
    the pages that have none of these."""
    call = {name: np.array(x) for name, x in call.items()}
    in_pages = is_named.any((1, 2)).reshape(B, PAGES, PAGE)
    is_read = np.zeros(call["k_pages"].shape[:2], bool)
    is_page = call["page_table"] < len(is_read)
    np.logical_or.at(is_read, np.where(is_page, call["page_table"], -1), in_pages)
    for name in ("k_scales", "v_scales") if "k_scales" in call else ("k_pages", "v_pages"):
        call[name][~is_read] = np.nan
    call["page_table"][~in_pages.any(2)] = -9
    return call


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def attend(block, query_block, window, q, indices, **call):
    lists = masks.KeyLists(indices, block, query_block)
    return paged_attention(q, mask=lists, local_window_size=window, **call, **ALL)


@st.composite
def list_calls(draw):
    """The sizes of lists, a window, lengths, how many tokens are new, how many pages two rows
    share, and a seed."""
    by_row = lambda low, high: ints(*draw(st.lists(st.integers(low, high), min_size=B, max_size=B)))
    lengths = by_row(0, PAGE * PAGES)
    count, window = np.minimum(by_row(1, T), lengths), draw(st.sampled_from([None, (9, 0)]))
    sizes = draw(st.sampled_from(SIZES))
    return sizes, window, lengths, count, draw(st.integers(0, PAGES)), draw(st.integers(0, 99))


def test_a_drawn_call_equals_the_oracle_and_reads_no_key_that_no_list_names(request):
    @settings(max_examples=calls(request), deadline=None, database=None)
    @given(list_calls())
    def equals(call):
        (block, query_block, L), window, lengths, count, shared, seed = call
        rng = np.random.default_rng(seed)
        call, rows = pool(rng, PAGE, lengths, shared=shared)
        rows = [np.nan_to_num(x) for x in rows]
        q, sinks = normal(rng, B, T, N, H), np.append(normal(rng, N - 1), np.float32(np.inf))
        indices = draw_lists(rng, block, query_block, L)
        is_named = named(indices, block, query_block)
        kw = dict(sinks=sinks) | (dict(local_window_size=window) if window else {})
        more = hide_unlisted(call, is_named) if not shared else call
        more |= dict(query_seq_lengths=count, sinks=sinks)
        found = attend(block, query_block, window, q, indices, **more)
        equal_the_oracle(found, q, rows, 1e-6, mask=is_named, **seen(lengths, count), **kw)

    equals()


def test_calls_with_other_lists_share_one_program(rng):
    call, q = pool(rng, PAGE, ints(29, 48, 9))[0], normal(rng, B, T, N, H)
    before = _attend_jit._cache_size()
    for _ in range(2):
        paged_attention(q, mask=masks.KeyLists(draw_lists(rng, 1, 1, 1)), **call)
    assert _attend_jit._cache_size() == before + 1


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", ("int8", None)])
@pytest.mark.parametrize("query", ["float32", "bfloat16"])
def test_listed_keys_in_8_bits_equal_the_oracle_on_what_they_stand_for(query, stored, rng):
    lengths = ints(29, 48, 9)
    call, rows = pool(rng, PAGE, lengths, dtype=query, stored=stored)
    q, indices = normal(rng, B, T, N, H, dtype=query), draw_lists(rng, 1, 1, 1, 20)
    is_named = named(indices, 1, 1)
    if isinstance(stored, str):
        call = hide_unlisted(call, is_named)
    found = paged_attention(q, **call, mask=masks.KeyLists(indices), return_residual=True)
    rows = [np.nan_to_num(x.astype(np.float32)) for x in rows]
    equal_the_oracle(found, q, rows, mask=is_named, **seen(lengths, T))


# block, query_block, L; 8 bits; and how many columns of the keys are the values
BY_MOSAIC = {
    "keys": ((1, 1, 1), None, None),
    "latents": ((1, 1, 1), None, 32),
    "keys in int8, for heads": ((1, 1, N), "int8", None),
    "blocks of 4 keys in float8, for 2 queries": ((4, 2, K), "float8_e4m3fn", None),
    "blocks of 16 keys, of two pages": ((16, 4, K), None, None),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "implementation, name",
    whole_but(
        [(implementation, name) for name in BY_MOSAIC for implementation in MOSAIC],
        ("hopper", "latents"),
        ("hopper", "blocks of 16 keys, of two pages"),
        ("ampere", "keys in int8, for heads"),
    ),
)
def test_by_mosaic_listed_keys_equal_the_oracle_without_a_race(
    implementation, name, rng, monkeypatch
):
    (block, query_block, L), stored, value_size = BY_MOSAIC[name]
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 1)
    lengths = ints(29, 48, 9)
    call, rows = pool(rng, PAGE, lengths, PAGES, (64, 64), "bfloat16", stored)
    q, indices = normal(rng, B, T, N, 64, dtype="bfloat16"), draw_lists(rng, block, query_block, L)
    is_named = named(indices, block, query_block)
    call = hide_unlisted(call, is_named)
    rows = [np.nan_to_num(x.astype(np.float32)) for x in rows]
    if value_size:
        call |= dict(v_pages=None, value_size=value_size)
        rows[1] = rows[0][..., :value_size]
    lists = masks.KeyLists(indices, block, query_block)
    with gpu_interpreter.kernels(implementation, detect_races=True) as races:
        found = paged_attention(q, **call, mask=lists, implementation=implementation, **ALL)
    equal_the_oracle(found, q, rows, mask=is_named, **seen(lengths, T))
    assert not races.found


def test_ragged_tokens_have_lists_by_token(rng):
    lengths, ends = ints(29, 48, 9), ints(1, 5, 5, 9)
    call, _ = pool(rng, PAGE, lengths)
    q, indices = normal(rng, 10, N, H), draw_lists(rng, 1, 1, K, 9, 10)[0]
    lists = masks.KeyLists(indices)
    found = paged_attention(q, **call, cu_seqlens_q=ends, mask=lists, **ALL)
    for b, (first, last) in enumerate(pairwise(ends)):
        if last > first:
            row = {
                name: x[b : b + 1] if name in ("page_table", "lengths") else x
                for name, x in call.items()
            }
            of_row = masks.KeyLists(indices[first:last])
            expected = paged_attention(q[None, first:last], **row, mask=of_row, **ALL)
            equal([x[first:last] for x in found], [x[0] for x in expected], 1e-6)
    with pytest.raises(ValueError, match=r"page_table must have pages .* in row 2, entry 0"):
        table = call["page_table"].copy()
        table[2, 0], indices[8, 0, 0] = -1, 3
        options = dict(cu_seqlens_q=ends, mask=masks.KeyLists(indices))
        paged_attention(q, **call | dict(page_table=table), **options)


@needs_devices
@pytest.mark.parametrize("L", [1, K, N])
def test_on_a_mesh_each_device_attends_by_the_lists_of_its_rows_and_heads(L, rng):
    mesh, lengths = make_mesh(b=3, h=2), ints(29, 48, 9)
    call, _ = pool(rng, PAGE, lengths)
    q, indices = normal(rng, B, T, N, H), draw_lists(rng, 1, 1, L)
    expected = paged_attention(q, **call, mask=masks.KeyLists(indices), **ALL)
    specs = dict(k_pages=P(None, None, "h"), page_table=P("b"), lengths=P("b"))
    specs["v_pages"] = specs["k_pages"]
    placed = {name: put(mesh, specs[name], x)[0] for name, x in call.items()}
    (q,) = put(mesh, P("b", None, "h"), q)
    (indices,) = put(mesh, P("b", None, "h" if L > 1 else None), indices)
    run = jax.jit(
        lambda q, indices, call: paged_attention(q, mask=masks.KeyLists(indices), **call, **ALL)
    )
    found = run(q, indices, placed)
    assert found[0].sharding.spec == P("b", None, "h", None)
    equal(found, expected, 1e-6)


def test_entries_that_name_nothing_lead_to_pages_that_exist():
    """A kernel copies what they lead to, too."""
    lists = ResolvedLists.from_indices(jnp.array([[[[0, -1, 9]]]]), block=8, query_block=1, keys=16)
    table = listed_keys.ListedKeys(listed_keys._ascending(lists), lists.block, 1, 1)
    pages = PageTable(jnp.array([[3, 1]]), 8, PageLayout())
    np.testing.assert_array_equal(listed_keys._in_pages(table, pages).entries.ravel(), [3, 1, 1])
