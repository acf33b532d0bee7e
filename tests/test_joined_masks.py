"""Masks joined by &, | and ~, of every kind: what the oracle says, on every implementation, and
elsewhere."""

import functools
import operator
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GATHERS, Sizes, normal, qkv
from check import check
from drawn_masks import Drawn, joined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_flash import explain, masks

Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)


@pytest.fixture
def examples(request):
    """Calls to draw: PALLAS_FLASH_EXAMPLES draws more or fewer."""
    return int(os.environ.get("PALLAS_FLASH_EXAMPLES", 8 if request.config.option.whole else 2))


@st.composite
def calls(draw, gathers: bool):
    """(keywords of the oracle, seed)."""
    by_batch = lambda low, high: st.lists(st.integers(low, high), min_size=Z.B, max_size=Z.B).map(
        lambda x: np.array(x, np.int32)
    )
    is_apart = draw(st.integers(0, 5)) == 0
    offset = 0 if is_apart else draw(st.one_of(st.integers(-9, 20), by_batch(-20, 40)))
    more = dict(
        is_causal=st.just(True),
        local_window_size=st.integers(0, 45),
        query_seq_lengths=by_batch(0, Z.T + 3),
        key_value_seq_lengths=by_batch(0, Z.S + 3),
        logits_soft_cap=st.just(3.0),
        sinks=st.just(True),
        return_max_logits=st.just(True),
        bias=st.tuples(*(st.sampled_from([1, n]) for n in (Z.B, Z.N, Z.T, Z.S))),
    )
    names = draw(st.lists(st.sampled_from(list(more)), max_size=2, unique=True))
    kw = dict(
        drawn=draw(joined(Z, offset, is_apart, gathers)),
        query_offset=offset,
        **{name: draw(more[name]) for name in names},
    )
    return kw, draw(st.integers(0, 2**32 - 1))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.whole("triton", "reference")
def test_a_drawn_mask_shows_what_its_parts_say(implementation, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
    @given(calls(implementation in GATHERS))
    def equals(call):
        kw, seed = call
        rng = np.random.default_rng(seed)
        if "bias" in kw:
            kw = kw | dict(bias=rng.normal(size=kw["bias"]).astype(np.float32))
        if "sinks" in kw:
            kw = kw | dict(sinks=normal(rng, Z.N))
        check(rng, *qkv(rng, Z), implementation, **kw)

    equals()


@pytest.mark.whole("triton")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("join", ["and", "or", "with a map"])
def test_several_sets_of_document_ids_hide_what_each_of_them_hides(implementation, join, rng):
    ids = lambda size: rng.integers(0, 2, (Z.B, size)).astype(np.int32)
    documents = [(ids(Z.T), ids(Z.S)) for _ in range(2)]
    mask = functools.reduce(operator.and_, [masks.Documents(*x) for x in documents])

    def seen(b, h, i, p, j):
        same = np.logical_and(*(x[b, i] == y[b, j] for x, y in documents))
        return same | (j > p) if join == "or" else same

    if join == "or":
        mask = mask | ~masks.Causal()
    if join == "with a map":
        mask = masks.create_block_mask(mask, Z.T, Z.S, block=16, batch=Z.B)
    segments = dict(query_segment_ids=ids(Z.T), key_value_segment_ids=ids(Z.S))
    check(rng, *qkv(rng, Z), implementation, drawn=Drawn(mask, seen), **segments)


# ---- one mask with arrays of every kind, elsewhere


def test_a_joined_mask_says_what_it_is_made_of_and_forgets_maps():
    mask = ~(masks.KeyLengths([3, 4]) & masks.create_block_mask(masks.Causal(), 8, 8))
    assert repr(mask) == "~(KeyLengths(lengths=[3, 4]) & Causal())"
    q = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.bfloat16)
    assert "where ~(KeyLengths(lengths=int32[2]) & Causal())" in str(explain(q, q, q, mask=mask))
    assert masks.Causal() | ~masks.Dilated(3) == masks.Causal() | ~masks.Dilated(3)


def test_positions_that_no_offset_says_go_with_rules_but_with_no_offset():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)
    packed = masks.Varlen(np.array([[0, 3, 8]]), np.array([[0, 5, 8]]))
    assert "where ~(Varlen(" in str(explain(q, q, q, mask=~packed & masks.Dilated(3)))
    with pytest.raises(ValueError, match="cannot be combined with query_offset"):
        explain(q, q, q, mask=~packed | masks.Causal(), query_offset=1)
