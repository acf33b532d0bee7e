"""What a call of paged_attention refuses, in which words, and what it takes in other forms."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import ints
from selection import needs_mosaic

from pallas_flash import explain_paged, masks, paged_attention
from pallas_flash.accounting import GPUS
from pallas_flash.choose import implementations
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.mma import tile_sizes
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_caches")


def pages(P=4, page=8, heads=1, rows=1, width=8, dtype=jnp.float32, **more):
    k = jnp.ones((P, page, heads, width), dtype)
    call = dict(query=jnp.ones((1, 1, 1, 8)), k_pages=k, v_pages=k, lengths=ints(3))
    return call | dict(page_table=jnp.zeros((rows, 2), int)) | more


SCALES = jnp.ones((4, 8, 1))


# what is said, and the arguments
WRONG = {
    "multiple of 8 keys; got": dict(page=9),
    r"the same B rows, here 1, as query or cu_seqlens_q; got \(2, 2\) and \(1,\)": dict(rows=2),
    r"with the H of query \(1, 1, 1, 8\); got \(4, 8, 1, 16\)": dict(width=16),
    r"got \(1, 8, 4, 8\). Do the heads come .*: jnp.moveaxis\(x, 0, 2\)": dict(P=1, heads=4),
    "lengths must be integers; got NoneType": dict(lengths=None),
    r"query_seq_lengths must be int32 \[B\] = \(1,\); got \(2,\)": dict(query_seq_lengths=[1, 1]),
    r"the same B rows, here 2, as query or cu_seqlens_q; got \(1, 2\) and \(1,\)": dict(
        query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 2, 5]
    ),
    r"query must be \[T, N, H\] with cu_seqlens_q \[B \+ 1\]": dict(cu_seqlens_q=[0, 1]),
    r"cu_seqlens_q must ascend, from 0 or more to the 5 tokens at most; got \[0, 6\]": dict(
        query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 6]
    ),
    "query_seq_lengths must be 0 to the 1 queries of a row; got 2 in row 0": dict(
        query_seq_lengths=[2]
    ),
    "got 4 queries and 3 keys in row 0: query_seq_lengths .* query_offset .* is_causal=False": dict(
        query=jnp.ones((1, 5, 1, 8)), query_seq_lengths=[4]
    ),
    "got 4 queries and 3 keys in row 0: append adds": dict(
        query=jnp.ones((5, 1, 8)), cu_seqlens_q=[1, 5]
    ),
    "query_seq_lengths cannot go with cu_seqlens_q": dict(
        query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 5], query_seq_lengths=[5]
    ),
    "v_pages must be an array; .*k_pages, pass their number": dict(v_pages=None),
    "value_size is for v_pages=None": dict(value_size=4),
    r"at most the H of k_pages \(4, 8, 1, 8\)": dict(v_pages=None, value_size=9),
    r"v_scales must be None where v_pages is: .* k_scales; got v_scales \(4, 8, 1\)": dict(
        dtype=jnp.int8, v_pages=None, value_size=4, k_scales=SCALES, v_scales=SCALES
    ),
    r"k_pages of int8 needs k_scales \[P, page, K\]": dict(dtype=jnp.int8),
    "float32 is for int8, float8_e4m3fn or float8_e5m2, .* no place for k_sc": dict(
        k_scales=SCALES, v_scales=SCALES
    ),
    r"\(4, 8, 1\) like k_.*; got": dict(dtype=jnp.int8, k_scales=SCALES[:3], v_scales=SCALES),
    "it reads keys and values in 8 bits, or neither; got keys alone in int8: triton and": dict(
        dtype=jnp.int8, v_pages=jnp.ones((4, 8, 1, 8)), k_scales=SCALES, implementation="ampere"
    ),
    "must have one dtype, or one of them int8, float8_e4m3fn or float8_e5m2; got int8 and fl": dict(
        dtype=jnp.int8,
        v_pages=jnp.ones((4, 8, 1, 8), jnp.float8_e5m2),
        k_scales=SCALES,
        v_scales=SCALES,
    ),
    r"pages from 0 to 3 where queries see keys; got 4 in row 0, entry 0, for the keys": dict(
        page_table=[[4, 0]]
    ),
    "got -1 in row 0, entry 1, for the keys from 8 on of 9": dict(
        page_table=[[0, -1]], lengths=[9]
    ),
    "got 9 in row 0, entry 0": dict(
        rows=2,
        query=jnp.ones((3, 1, 8)),
        cu_seqlens_q=[0, 3, 3],
        page_table=[[9, 0], [9, 9]],
        lengths=[3, 3],
    ),
    r"at most 16, the keys of the 2 pages that page_table \(1, 2\) .*; got 17 in row 0": dict(
        lengths=[17]
    ),
    r"query and k_pages must have one dtype, .*bfloat16 and float32. .*\(dtype=query.dtype\)": dict(
        query=jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    ),
    "or k_pages int8, float8_e4m3fn or float8_e5m2; got float32 and float8_e4m3": dict(
        dtype=jnp.float8_e4m3
    ),
    r"mask must be a masks.KeyLists, of positions in a row; got an array bool\[1, 16\]. is": dict(
        mask=np.ones((1, 16), bool)
    ),
    r"mask must be a masks.KeyLists, .*; got KeyLists\(.*\) & Causal\(\)\. is_causal, len": dict(
        mask=masks.KeyLists([[[0]]]) & masks.Causal()
    ),
    r"KeyLists.indices must be integers .* = \(1, 1, L, n\), .*got \(2, 1, 1\)": dict(
        mask=masks.KeyLists([[[0]], [[1]]])
    ),
    "KeyLists.query_block must be 1 with cu_seqlens_q, a list for each token; got 2": dict(
        query=jnp.ones((5, 1, 8)), cu_seqlens_q=[0, 5], mask=masks.KeyLists([[[0]]] * 3, 1, 2)
    ),
    "it copies pages of 8 keys of int8 of heads of a multiple of 128; got H = 8, Hv = 8": dict(
        dtype=jnp.int8, k_scales=SCALES, v_scales=SCALES, implementation="ampere"
    ),
    "it copies pages of 8 keys of heads of a multiple of 64; got H = 8, Hv = 8": dict(
        implementation="ampere"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_raises_and_says_what_does(message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        paged_attention(**pages(**WRONG[message]))


# the table and what else the call has; -1 is no page
NEEDLESS = {
    "beyond the lengths": dict(page_table=[[0, -1]], lengths=[8]),
    "before a window": dict(page_table=[[-1, 0]], lengths=[12], local_window_size=(3, None)),
    "behind a causal query": dict(page_table=[[0, -1]], lengths=[16], query_offset=7),
    "of a row without queries": dict(page_table=[[-1, -1]], lengths=[16], query_seq_lengths=[0]),
    "that no list names": dict(
        page_table=[[-1, 0]], lengths=[16], mask=masks.KeyLists([[[9, -1, 99]]])
    ),
}


@pytest.mark.parametrize("name", NEEDLESS)
def test_an_entry_of_the_table_that_no_visible_key_needs_may_be_anything(name):
    call = pages(**NEEDLESS[name])
    expected = paged_attention(**call | dict(page_table=np.maximum(call["page_table"], 0)))
    np.testing.assert_array_equal(paged_attention(**call), expected)
    all_visible = dict(is_causal=False, mask=None, local_window_size=None, query_seq_lengths=[1])
    with pytest.raises(ValueError, match="page_table must have pages from 0 to 3"):
        paged_attention(**call | all_visible | dict(lengths=[16]))


def test_in_jit_a_table_and_lengths_that_are_wrong_raise_nothing():
    call = {name: jnp.asarray(x) for name, x in pages().items()}
    wrong = call | dict(page_table=jnp.array([[-1, 9]]), lengths=jnp.array([99]))
    expected = paged_attention(**call | dict(page_table=[[0, 3]], lengths=[16]))
    found = jax.jit(lambda call: paged_attention(**call))(wrong)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("stored", [None, "int8"])
@pytest.mark.parametrize("has_tma", [False, True])
def test_by_mma_the_head_sizes_that_pages_need_are_those_of_the_docstring(
    stored, has_tma, monkeypatch
):
    monkeypatch.setattr(hardware, "has_tma", lambda: has_tma)
    for page, H, HV in itertools.product((8, 16, 32, 64, 128), (64, 128, 192, 256, 576), (64, 192)):
        widest = max(H, HV)
        step = 16 if widest <= 128 else 32 if widest <= 256 else 64
        if stored:
            step = max(step, 32)
        if not has_tma:
            small = {8: 64, 16: 32}.get(page, 1) * (2 if stored else 1)
            step = max(step, small, 64 if stored and HV > 128 else 1)
        problem = types.SimpleNamespace(head_size=H, value_size=HV, dtype="bfloat16")
        assert tile_sizes.page_columns(problem, page, stored) == step


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(T=1, page=64, **more):
    pages = dict.fromkeys(("k_pages", "v_pages"), array(9, page, 2, 64))
    rows = dict(page_table=array(3, 5, dtype="int32"), lengths=array(3, dtype="int32"))
    return dict(query=array(3, T, 8, 64)) | pages | rows | more


def lists(T=1, block=1):
    return masks.KeyLists(jax.ShapeDtypeStruct((3, T, 1, 4), "int32"), block)


@pytest.mark.parametrize(
    "call, taken, copies",
    [
        (shapes(), "blockwise", "nothing: pages of 64 keys are read where they lie"),
        (shapes(500), "blockwise", "all pages in the table, in order"),
        (shapes(70), "blockwise", "nothing: pages of 64 keys"),  # the table is longer than its rows
        (shapes(implementation="reference"), "reference", "all pages in the table, in order"),
        (shapes(implementation="triton"), "triton", "nothing: pages of 64 keys"),
        (
            shapes(mask=lists()),
            "blockwise",
            "nothing: keys that lists name are read where they lie",
        ),
        (shapes(500, mask=lists(500)), "blockwise", "nothing: keys that lists name"),
        (shapes(mask=lists(), implementation="reference"), "reference", "all pages in the table"),
    ],
)
def test_explain_paged_says_what_runs_and_whether_pages_are_copied(call, taken, copies):
    said = explain_paged(**call)
    assert said.implementation == taken and said.copies.startswith(copies)
    assert said.derivatives == "none" and f"copies          {copies}" in str(said)
    named = f"{taken} was selected by name" if "implementation" in call else "an earlier algorithm"
    assert said.why_not["flash1"].startswith(named) or "mask" in call


IN_8_BITS = dict.fromkeys(("k_pages", "v_pages"), array(9, 64, 2, 64, dtype="int8"))
IN_8_BITS |= dict.fromkeys(("k_scales", "v_scales"), array(9, 64, 2, dtype="float32"))
BY_HEAD = dict(score_mod=lambda s, b, h, i, j: s + h)


@needs_mosaic
@pytest.mark.parametrize(
    "gpu, call, taken",
    [
        ("H200", BY_HEAD, "hopper"),
        ("A100-80GB", BY_HEAD, "ampere"),
        ("H200", IN_8_BITS, "hopper"),
        ("H200", dict(v_pages=array(9, 64, 2, 256)), "hopper"),
    ],
)
def test_a_gpu_reads_pages_by_its_own_kernels_and_needs_no_triton(gpu, call, taken, monkeypatch):
    monkeypatch.setattr(implementations.TRITON, "why_no_import", "it is hidden")
    with as_if_on(GPUS[gpu]):
        assert explain_paged(**shapes() | call).implementation == taken


def test_explain_paged_says_why_lists_of_keys_go_to_blockwise():
    said = explain_paged(**shapes(mask=lists()))
    assert str(said.tiles).startswith("lists of 4 keys, gathered, 1 query at a time")
    as_table = "it takes lists as a table of blocks, with block * query_block >= 64; got 1 * 1"
    assert said.why_not["triton"] == as_table
    of_blocks = explain_paged(**shapes(mask=lists(block=64)))
    assert of_blocks.implementation == "blockwise"
    assert of_blocks.why_not["reference"].startswith("it copies all pages, and lists name some")


def test_explain_paged_has_the_errors_of_the_call_and_its_lists():
    with pytest.raises(ValueError, match="pages of a multiple of 8 keys"):
        explain_paged(**shapes(page=9))
    with pytest.raises(NotImplementedError, match=r"of paged_attention: it needs a GPU .*none"):
        explain_paged(**shapes(implementation="hopper"))
    ragged = shapes(query=jnp.ones((7, 8, 64), jnp.bfloat16), cu_seqlens_q=[0, 1, 6, 7])
    assert explain_paged(**ragged).problem.batch == 3


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
