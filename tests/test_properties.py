"""Whole calls drawn by hypothesis: output, lse and all gradients equal the oracle's, on every
implementation."""

import os

import numpy as np
import pytest
from cases import GATHERS, Sizes, normal, qkv
from check import check
from drawn_masks import joined, key_lists
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SLICES = 4  # so that several processes share the work


@pytest.fixture
def examples(request):
    """Calls to draw in one slice: 200 of each implementation with --whole, else 16;
    PALLAS_FLASH_EXAMPLES draws more or fewer."""
    return -(
        -int(os.environ.get("PALLAS_FLASH_EXAMPLES", 200 if request.config.option.whole else 16))
        // SLICES
    )


@st.composite
def calls(draw, gathers: bool):
    """(sizes, keywords of the oracle, seed): any arguments that fit together."""
    length = st.sampled_from([1, 2, 7, 16, 17, 31, 32, 40])
    K, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head = st.sampled_from([1, 3, 8, 16, 20])
    z = Sizes(
        draw(st.integers(1, 2)), draw(length), draw(length), K * group, K, draw(head), draw(head)
    )
    by_batch = lambda low, high: st.lists(st.integers(low, high), min_size=z.B, max_size=z.B).map(
        lambda x: np.array(x, np.int32)
    )
    ids = lambda length: st.lists(
        st.integers(0, 3), min_size=z.B * length, max_size=z.B * length
    ).map(lambda x: np.array(x, np.int32).reshape(z.B, length))
    in_runs = draw(st.booleans())
    run = lambda x: np.sort(x, axis=1) if in_runs else x
    axes = st.tuples(*(st.sampled_from([1, n]) for n in (z.B, z.N, z.T, z.S)))
    side = st.integers(0, 45)
    kw = draw(
        st.fixed_dictionaries(
            {},
            optional=dict(
                is_causal=st.just(True),
                local_window_size=st.one_of(side, st.tuples(side, side)),
                query_offset=st.one_of(st.integers(-20, 40), by_batch(-20, 40)),
                query_seq_lengths=by_batch(0, z.T + 3),
                key_value_seq_lengths=by_batch(0, z.S + 3),
                query_segment_ids=ids(z.T).map(run),
                prefix=by_batch(0, z.S),
                logits_soft_cap=st.sampled_from([0.5, 3.0, 50.0]),
                scale=st.sampled_from([0.1, 1.0]),
                sinks=st.just(True),
                bias=axes,
                mask=axes,
                return_max_logits=st.just(True),
            ),
        )
    )
    is_apart = "query_offset" not in kw and draw(st.booleans())
    offset, pairs = kw.get("query_offset", 0), 1 if gathers else 64
    kw["drawn"] = draw(
        st.one_of(st.none(), key_lists(z, pairs), joined(z, offset, is_apart, gathers))
    )
    if "query_segment_ids" in kw:
        kw["key_value_segment_ids"] = run(draw(ids(z.S)))
    if "prefix" in kw or kw["drawn"]:
        kw.pop("mask", None)  # one argument takes either
    return z, kw, draw(st.integers(0, 2**32 - 1))


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.whole("triton")
@pytest.mark.parametrize("part", range(SLICES))
def test_a_drawn_call_equals_the_oracle(implementation, part, examples):
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
        z, kw, seed = call
        rng, kw = np.random.default_rng(seed), dict(kw)
        if "bias" in kw:
            kw["bias"] = rng.normal(size=kw["bias"]).astype(np.float32)
        if "sinks" in kw:
            kw["sinks"] = normal(rng, z.N)
        if "mask" in kw:
            kw["mask"] = rng.random(kw["mask"]) < 0.8
        check(rng, *qkv(rng, z), implementation, **kw)

    equals()
