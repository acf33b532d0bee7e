"""The check of kernels itself: one wrong number is found, and what changes logits is checked by
itself."""

import dataclasses
import itertools

import fakes
import gpu_interpreter
import jax
import numpy as np
import pytest
from selection import whole_but

from pallas_flash import (
    backends,
    explain,
    masks,
    paged_attention,
    paged_cache,
    schedule,
    trial,
)
from pallas_flash.caches import attend
from pallas_flash.kernels import hopper, triton
from pallas_flash.masks import block_types
from pallas_flash.selfcheck import comparison, verdicts

pytestmark = pytest.mark.usefixtures("verdict_folder")


@pytest.mark.parametrize(
    "result, name", [("o", "o"), ("lse", "lse"), ("query", "dq"), ("key", "dk"), ("value", "dv")]
)
def test_one_wrong_row_is_found_in_every_result(result, name, install):
    backend = fakes.backend("liar", *fakes.lie(result))
    wrong = comparison.check(
        backend, explain(fakes.QUERY, fakes.QUERY, fakes.QUERY).problem, [fakes.TINY]
    )().wrong
    assert f"{name} is off by" in wrong


def test_nan_is_wrong():
    x = np.ones((1, 70, 2, 3), np.float32)
    assert not comparison.error(np.where(np.arange(3) == 1, np.nan, x), x) <= 1e9
    assert comparison.error(x, x) == 0


DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, call", [("float32", {}), ("bfloat16", DROPOUT)])
def test_the_portable_kernels_pass_with_room_to_spare(dtype, call):
    backend = backends.find("triton")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), dtype)
    errors, wrong, _ = comparison.check(backend, explain(q, q, q, **call).problem, [fakes.TINY])()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE[dtype] / 2


@pytest.mark.gpu
@pytest.mark.skipif(gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING))
def test_the_hopper_kernels_pass_with_room_to_spare():
    backend = backends.find("hopper")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), "bfloat16")
    with gpu_interpreter.hopper_kernels():
        errors, wrong, _ = comparison.check(
            backend, explain(q, q, q, deterministic=False).problem, [fakes.TINY]
        )()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE["bfloat16"] / 3


@pytest.mark.parametrize("kernels", [hopper, triton], ids=lambda kernels: kernels.__name__)
def test_all_problems_of_a_variant_have_the_tiles_that_were_checked(kernels):
    shape = lambda length, size: jax.ShapeDtypeStruct((1, length, 2, size), "bfloat16")
    some = explain(shape(523, 1), shape(709, 1), shape(709, 1)).problem
    for size in range(1, 257, 9):
        for value_size in range(1, 257, 11):
            for deterministic, dropped in itertools.product((True, False), (0, 1)):
                p = dataclasses.replace(
                    some,
                    head_size=size,
                    value_size=value_size,
                    deterministic=deterministic,
                    dropped=dropped,
                )
                wide = dict(zip(("head_size", "value_size"), comparison.widths(p), strict=True))
                assert kernels.tiles(p) == kernels.tiles(dataclasses.replace(p, **wide))


def test_schemes_are_told_apart_where_the_kernels_are():
    hopper, triton = map(backends.find, ("hopper", "triton"))

    def schemes(backend, size):
        q = jax.ShapeDtypeStruct((1, 8, 2, size), "bfloat16")
        return [
            verdicts.variant_of(backend, explain(q, q, q, deterministic=d).problem).scheme
            for d in (True, False)
        ]

    assert schemes(hopper, 128) == ["deterministic", "in any order"]
    assert schemes(hopper, 256) == schemes(triton, 128) == ["deterministic"] * 2


def test_dropout_is_checked_by_itself_with_weights_dropped():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    plain, dropping = (explain(q, q, q, **call).problem for call in ({}, DROPOUT))
    assert verdicts.variant_of(hopper, dropping).scheme == "deterministic, dropout"
    assert (
        hopper.tiles(plain)
        != hopper.tiles(dropping)
        == hopper.tiles(comparison.trial(dropping, fakes.TINY)[0])
    )
    other = lambda problem, tiles, x: fakes.REFERENCE.forward(
        problem, tiles, x._replace(seeds=x.seeds + 1)
    )
    wrong = comparison.check(
        fakes.backend("liar", other, fakes.REFERENCE.backward), dropping, [fakes.TINY]
    )().wrong
    assert "o is off by" in wrong


def test_masks_that_are_rules_are_checked_by_themselves_with_blocks_of_all_kinds():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    problem = explain(q, q, q, mask=masks.Dilated(2)).problem
    assert verdicts.variant_of(hopper, problem).scheme == "deterministic, a rule"
    small, operands, _ = comparison.trial(problem, comparison.SIZES)
    tiles = hopper.tiles(small).forward
    found = schedule.block_types(
        operands.resolved_mask,
        small.batch,
        small.heads,
        small.queries,
        tiles.block_q,
        tiles.block_k,
    )
    assert set(np.asarray(found).ravel().tolist()) == {
        block_types.EMPTY,
        block_types.PARTIAL,
        block_types.FULL,
    }
    assert len({head.tobytes() for head in np.asarray(found)[0]}) > 1


def test_a_mask_that_is_an_array_has_blocks_of_all_kinds():
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, "a mask").problem()
    small, operands, _ = comparison.trial(problem, comparison.SIZES)
    tiles = backends.BACKENDS[0].tiles(small).forward
    found = block_types.from_array(
        operands.mask, small.queries, small.keys, tiles.block_q, tiles.block_k
    )
    assert set(np.asarray(found).ravel().tolist()) == {
        block_types.EMPTY,
        block_types.PARTIAL,
        block_types.FULL,
    }


IGNORED = {  # what a call may have, and problem and operands without it
    "a mask": lambda p, x: (dataclasses.replace(p, mask=None), x._replace(mask=None)),
    "a bias": lambda p, x: (dataclasses.replace(p, bias=None), x._replace(bias=None)),
    "a score_mod": lambda p, x: (dataclasses.replace(p, score=None), x._replace(score=None)),
    "a soft cap": lambda p, x: (dataclasses.replace(p, soft_cap=None), x),
    "segment ids": lambda p, x: (
        p,
        x._replace(
            resolved_mask=dataclasses.replace(x.resolved_mask, query_ids=None, key_ids=None)
        ),
    ),
}


@pytest.mark.parametrize("more", whole_but(IGNORED, "a mask", "a score_mod", "segment ids"))
def test_what_else_changes_logits_is_checked_by_itself(more):
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, more).problem()
    assert verdicts.variant_of(fakes.REFERENCE, problem).scheme == f"deterministic, {more}"

    def without(problem, tiles, x):
        problem, x = IGNORED[more](problem, x)
        return fakes.REFERENCE.forward(problem, tiles, x)

    wrong = lambda *fake: (
        comparison.check(
            fakes.backend("fake", *fake), problem, [fakes.TINY | dict(batch=2)]
        )().wrong
    )
    assert "o is off by" in wrong(without) and wrong(fakes.REFERENCE.forward) is None


@pytest.mark.parametrize("lacks", whole_but(["left", "offset", "sinks"], "offset"))
def test_windows_offsets_by_row_and_sinks_are_checked_whether_a_call_has_them_or_not(lacks):
    problem = explain(fakes.QUERY, fakes.QUERY, fakes.QUERY).problem
    assert [sizes["sinks"] for sizes in comparison.trials(problem)] == [False, True]

    def without(problem, tiles, x):
        if lacks == "sinks":
            return fakes.REFERENCE.forward(
                dataclasses.replace(problem, sinks=False), tiles, x._replace(sinks=None)
            )
        at = dataclasses.replace(x.resolved_mask, **{lacks: dict(left=None, offset=0)[lacks]})
        return fakes.REFERENCE.forward(problem, tiles, x._replace(resolved_mask=at))

    wrong = lambda *fake: (
        comparison.check(
            fakes.backend("fake", *fake), problem, [fakes.TINY | dict(sinks=True)]
        )().wrong
    )
    assert "o is off by" in wrong(without) and wrong(fakes.REFERENCE.forward) is None


PAGES = [
    attend.Pages(((9, page, 2, 64),) * 2, *of)
    for page, *of in [(8, "int8", False), (16, None, False), (64, "float8_e4m3fn", True)]
]


@pytest.mark.parametrize(
    "pages", [PAGES[0], *(pytest.param(pages, marks=pytest.mark.whole) for pages in PAGES[1:])]
)
def test_kernels_that_read_pages_are_checked_by_themselves(pages, monkeypatch):
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16") for length in (1, 4096))
    problem, blockwise = explain(q, k, k).problem, backends.find("blockwise")
    assert (
        verdicts.variant_of(blockwise, problem, pages.entry).scheme
        == f"deterministic, decoding, {pages.entry.name}"
    )
    sizes = fakes.TINY | dict(queries=3, keys=320, sinks=True)
    right = comparison.check(blockwise, problem, [sizes], pages.entry)()
    assert right.errors.keys() == {"o", "lse"} and right.wrong is None
    in_place = attend._in_place
    monkeypatch.setattr(
        attend,
        "_in_place",
        lambda p, page, name, x, table, *s: in_place(p, page, name, x, table + 1, *s),
    )
    assert "o is off by" in comparison.check(blockwise, problem, [sizes], pages.entry)().wrong


def test_a_call_with_pages_takes_no_kernel_that_was_found_right_without_them(monkeypatch):
    asked = []
    why_not = lambda backend, problem, check=True, entry=comparison.FLASH_ATTENTION: asked.append(
        (backend.name, entry.name)
    )
    monkeypatch.setattr(verdicts, "why_not", why_not)
    cache = paged_cache(4, 16, 2, 16, pages=8, page=8, dtype="int8")
    scales = dict(k_scales=cache.key_scale, v_scales=cache.value_scale)
    paged_attention(fakes.QUERY[:, :1], cache.key, cache.value, cache.table, cache.length, **scales)
    assert asked[-1][1] == "pages of 8 int8"


def test_the_gradient_of_a_bias_is_checked():
    problem = trial.Case("reference", 64, 64, "float32", True, 0.0, "a bias").problem()

    def backward(*args):
        gradients = fakes.REFERENCE.backward(*args)
        return gradients._replace(bias=gradients.bias * 1.01)

    wrong = comparison.check(
        fakes.backend("liar", fakes.REFERENCE.forward, backward), problem, [fakes.TINY]
    )().wrong
    assert wrong.startswith("dbias is off by 1.0e-02")


def test_the_gradients_of_the_arrays_of_a_score_mod_are_checked_by_themselves():
    name = "arrays of a score_mod"
    problem = trial.Case("reference", 64, 64, "float32", True, 0.0, name).problem()
    scheme = verdicts.variant_of(fakes.REFERENCE, problem).scheme
    assert scheme == "deterministic, a score_mod, arrays of a score_mod"

    def backward(*args):
        gradients = fakes.REFERENCE.backward(*args)
        slopes, by_key, *rest = gradients.captured
        return gradients._replace(captured=(slopes, by_key * 1.01, *rest))

    wrong = lambda backward: (
        comparison.check(
            fakes.backend("fake", fakes.REFERENCE.forward, backward), problem, [fakes.TINY]
        )().wrong
    )
    assert wrong(backward).startswith("darray1 is off by 1.0e-02")
    assert wrong(fakes.REFERENCE.backward) is None


def test_a_bias_by_pair_and_one_by_key_are_checked():
    problem = trial.Case("reference", 64, 64, "float32", True, 0.0, "a bias").problem()
    found = [comparison.trial(problem, sizes)[1].bias for sizes in comparison.trials(problem)]
    assert [bias.shape[2] > 1 for bias in found] == [True, False]


@pytest.mark.gpu
@pytest.mark.whole
@pytest.mark.skipif(gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING))
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("more", ["a bias", "arrays of a score_mod"])
def test_the_kernels_of_score_gradients_pass(more, sinks):
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, more).problem()
    with gpu_interpreter.ampere_kernels():
        sizes = [fakes.TINY | dict(sinks=sinks)]
        errors, wrong, _ = comparison.check(backends.find("ampere"), problem, sizes)()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE["bfloat16"] / 2


def test_decoding_is_checked_by_itself_on_a_problem_that_is_decoding():
    triton = backends.find("triton")
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16") for length in (1, 4096))
    problem = explain(q, k, k).problem
    assert verdicts.variant_of(triton, problem).scheme == "deterministic, decoding"
    (sizes,) = comparison.trials(problem)
    assert triton.tiles(comparison.trial(problem, sizes)[0]).decode is not None


@pytest.mark.parametrize("size", [64, 96, 128])
def test_hopper_is_checked_with_one_tile_to_a_program_and_with_several(size):
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((4, 4096, 8, size), "bfloat16")
    problem = explain(q, q, q, is_causal=True).problem
    one, several = (
        hopper.tiles(comparison.trial(problem, sizes)[0]).forward
        for sizes in comparison.trials(problem)
    )
    assert one.tiles_per_program == 1 < several.tiles_per_program and several.q_stages == 2


def test_the_largest_error_of_all_trials_counts_and_nan_most(monkeypatch):
    problem = explain(fakes.QUERY, fakes.QUERY, fakes.QUERY).problem
    found = [dict(o=1e-6, dq=float("nan")), dict(o=0.5, dq=1e-6)]
    monkeypatch.setattr(comparison, "_errors", lambda *_: found.pop(0))
    wrong = comparison.check(fakes.backend("honest"), problem, [fakes.TINY, fakes.TINY])().wrong
    assert wrong.startswith("o is off by 5.0e-01, dq is off by nan; ")


def test_the_largest_logits_are_checked_by_themselves():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), "float32")
    problem = explain(q, q, q, return_max_logits=True).problem
    assert (
        verdicts.variant_of(fakes.REFERENCE, problem).scheme == "deterministic, the largest logits"
    )

    def forward(*args):
        o, stats = fakes.REFERENCE.forward(*args)
        return o, stats._replace(top=stats.top * 1.01)

    wrong = lambda forward: (
        comparison.check(
            fakes.backend("fake", forward, fakes.REFERENCE.backward), problem, [fakes.TINY]
        )().wrong
    )
    assert wrong(fakes.REFERENCE.forward) is None and wrong(forward).startswith(
        "largest is off by 1.0e-02"
    )
