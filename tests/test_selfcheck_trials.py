"""The check of kernels itself: one wrong number is found, and what changes logits is checked by
itself."""

import dataclasses
import functools
import itertools

import fakes
import gpu_interpreter
import jax
import numpy as np
import pytest
from selection import whole_but

from pallas_flash import explain, masks, paged_cache
from pallas_flash.accounting import GPUS
from pallas_flash.caches import attend as paged_attend
from pallas_flash.choose import implementations as table
from pallas_flash.choose.selfcheck import comparison, trial, verdicts
from pallas_flash.jax_support import hardware
from pallas_flash.masks import block_types
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled import schedule
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("verdict_folder")
REFERENCE = fakes.REFERENCE
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


def problem_of(extra: str | None = None, dtype="float32", lengths=(8, 8), size=64, **call):
    if extra:
        return trial.Case("reference", size, size, dtype, True, extra).problem()
    q, k = (jax.ShapeDtypeStruct((1, length, 2, size), dtype) for length in lengths)
    return explain(q, k, k, **call).problem


def wrong(problem, forward=REFERENCE.forward, backward=REFERENCE.backward, **sizes) -> str | None:
    fake = fakes.fake("fake", forward, backward)
    return comparison.check(fake, problem, [fakes.TINY | sizes])().wrong


@functools.cache
def is_right(problem, *sizes) -> bool:
    return wrong(problem, **dict(sizes)) is None


# ---- what is found ----


def changed(change) -> dict:
    """A forward of other operands or another problem."""
    return dict(forward=lambda p, tiles, x: REFERENCE.forward(*change(p, tiles, x)))


def ignores(name: str) -> dict:
    lacks = {name: None}
    return changed(
        lambda p, tiles, x: (
            dataclasses.replace(p, **lacks),
            tiles,
            x._replace(**lacks) if hasattr(x, name) else x,
        )
    )


def with_mask(**fields) -> dict:
    mask = lambda x: dataclasses.replace(x.resolved_mask, **fields)
    return changed(lambda p, tiles, x: (p, tiles, x._replace(resolved_mask=mask(x))))


def off_by_a_percent(of) -> dict:
    def backward(*args):
        gradients = REFERENCE.backward(*args)
        return gradients._replace(**of(gradients))

    return dict(backward=backward)


def off_in_the_largest(*args):
    o, stats = REFERENCE.forward(*args)
    return o, stats._replace(top=stats.top * 1.01)


def lies(result: str) -> dict:
    return dict(zip(("forward", "backward"), fakes.lie(result), strict=True))


BF16 = dict(dtype="bfloat16")
ROWS, ENDS = dict(batch=2), dict(sinks=True)
ARRAYS = "arrays of a score_mod"
FAULTS = {  # problem, its scheme behind "deterministic", a fault, sizes, what is said
    "one row of o": ({}, "", lies("o"), {}, "o is off by"),
    "one row of lse": ({}, "", lies("lse"), {}, "lse is off by"),
    "one row of dq": ({}, "", lies("query"), {}, "dq is off by"),
    "one row of dk": ({}, "", lies("key"), {}, "dk is off by"),
    "one row of dv": ({}, "", lies("value"), {}, "dv is off by"),
    "the left end": ({}, "", with_mask(left=None), ENDS, "o is off by"),
    "the offset": ({}, "", with_mask(offset=0), ENDS, "o is off by"),
    "the sinks": (
        {},
        "",
        changed(lambda p, tiles, x: (p.for_part(x := x._replace(sinks=None)), tiles, x)),
        ENDS,
        "o is off by",
    ),
    "other weights dropped": (
        BF16 | DROPOUT,
        ", dropout",
        changed(lambda p, tiles, x: (p, tiles, x._replace(seeds=x.seeds + 1))),
        {},
        "o is off by",
    ),
    **{
        extra: (BF16 | dict(extra=extra), f", {extra}", fault, ROWS, "o is off by")
        for extra, fault in {
            "a rule": with_mask(mask_mod=None),
            "a mask": ignores("mask"),
            "a bias": ignores("bias"),
            "a score_mod": ignores("score"),
            "a soft cap": ignores("soft_cap"),
            "segment ids": with_mask(query_ids=None, key_ids=None),
            "lists of keys": with_mask(lists=None),
        }.items()
    },
    "a rule beside lists": (
        dict(mask=masks.Dilated(2) & masks.KeyLists(np.zeros((1, 8, 1, 3), np.int32))),
        ", a rule, lists of keys",
        with_mask(mask_mod=None),
        ENDS,
        "o is off by",
    ),
    "the gradient of a bias": (
        dict(extra="a bias"),
        ", a bias",
        off_by_a_percent(lambda x: dict(bias=x.bias * 1.01)),
        {},
        "dbias is off by 1.0e-02",
    ),
    "the gradients of arrays": (
        dict(extra=ARRAYS),
        f", a score_mod, {ARRAYS}",
        off_by_a_percent(
            lambda x: dict(captured=(x.captured[0], x.captured[1] * 1.01, x.captured[2]))
        ),
        {},
        "darray1 is off by 1.0e-02",
    ),
    "the largest logits": (
        dict(return_max_logits=True),
        ", the largest logits",
        dict(forward=off_in_the_largest),
        {},
        "largest is off by 1.0e-02",
    ),
}
FAST = (
    "one row of o",
    "one row of lse",
    "one row of dq",
    "one row of dv",
    "the offset",
    "lists of keys",
    "a rule beside lists",
)


@pytest.mark.parametrize("name", whole_but(FAULTS, *FAST))
def test_what_changes_a_result_is_a_variant_and_a_fault_in_it_is_found(name):
    call, scheme, fault, sizes, said = FAULTS[name]
    problem = problem_of(**call)
    assert verdicts.variant_of(REFERENCE, problem).scheme == f"deterministic{scheme}"
    assert is_right(problem, *sizes.items())
    assert said in wrong(problem, **fault, **sizes)


def test_every_trial_has_windows_and_offsets_by_row_and_one_has_sinks():
    assert [sizes["sinks"] for sizes in comparison.all_sizes(problem_of())] == [False, True]


def test_nan_is_wrong():
    x = np.ones((1, 70, 2, 3), np.float32)
    assert not comparison.error(np.where(np.arange(3) == 1, np.nan, x), x) <= 1e9
    assert comparison.error(x, x) == 0


# ---- kernels that pass ----


def assert_passes(name: str, problem, room: float, **sizes):
    errors, wrong, _ = comparison.check(table.find(name), problem, [fakes.TINY | sizes])()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE[problem.dtype] / room


no_interpreter = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


@pytest.mark.gpu
@pytest.mark.whole
@pytest.mark.parametrize("dtype, call", [("float32", {}), ("bfloat16", DROPOUT)])
def test_the_portable_kernels_pass_with_room_to_spare(dtype, call):
    assert_passes("triton", problem_of(dtype=dtype, size=50, **call), room=2)


@pytest.mark.gpu
@no_interpreter
def test_the_hopper_kernels_pass_with_room_to_spare():
    with gpu_interpreter.hopper_kernels():
        assert_passes("hopper", problem_of(dtype="bfloat16", size=50, deterministic=False), room=3)


@pytest.mark.gpu
@pytest.mark.whole
@no_interpreter
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("extra", ["a bias", ARRAYS])
def test_the_kernels_of_score_gradients_pass(extra, sinks):
    with gpu_interpreter.ampere_kernels():
        assert_passes("ampere", problem_of(extra, "bfloat16"), room=2, sinks=sinks)


# ---- what is a variant ----


@pytest.mark.parametrize("kernels", [table.HOPPER, table.TRITON], ids=str)
def test_all_problems_of_a_variant_have_the_tiles_that_were_checked(kernels):
    some = problem_of(dtype="bfloat16", lengths=(523, 709), size=1)
    sizes = itertools.product(range(1, 257, 9), range(1, 257, 11), (True, False), (0, 1))
    names = "head_size", "value_size", "deterministic", "dropped"
    for values in sizes:
        p = dataclasses.replace(some, **dict(zip(names, values, strict=True)))
        assert kernels.tiles(p) == kernels.tiles(dataclasses.replace(p, **comparison.widths(p)))


def test_schemes_are_told_apart_where_the_kernels_are():
    def schemes(name, size, length=trial.LENGTH):
        call = dict(dtype="bfloat16", lengths=(length, length), size=size)
        problems = (problem_of(**call, deterministic=d) for d in (True, False))
        return [verdicts.variant_of(table.find(name), problem).scheme for problem in problems]

    assert schemes("hopper", 128) == ["deterministic", "in any order"]
    for name, *sizes in ("hopper", 256), ("hopper", 128, 512), ("triton", 128):
        assert schemes(name, *sizes) == ["deterministic"] * 2


def test_small_trials_run_the_kernels_of_a_large_call():
    call = dict(dtype="bfloat16", deterministic=False)
    large = table.HOPPER.tiles(problem_of(lengths=(trial.LENGTH,) * 2, **call))
    small = comparison.make(problem_of(**call), fakes.TINY)[0]
    assert table.HOPPER.tiles(small).fused is None
    assert table.HOPPER.for_same_kernels(large, small).fused.width == large.fused.width


def test_trials_have_groups_of_heads_in_one_program_and_in_several(monkeypatch):
    monkeypatch.setattr(hardware, "processors", lambda: 132)
    large = problem_of(dtype="bfloat16", lengths=(2048, 2048), size=16, deterministic=False)
    tiles = table.HOPPER.tiles(large)
    assert tiles.fused is not None
    smalls = [comparison.make(large, sizes)[0] for sizes in comparison.all_sizes(large)]
    parts = [(p.group, table.HOPPER.for_same_kernels(tiles, p).fused.group_parts) for p in smalls]
    assert parts == [(4, 4), (2, 1)]
    with as_if_on(GPUS["B200"]):
        smalls = [comparison.make(large, sizes)[0] for sizes in comparison.all_sizes(large)]
        parts = [(p.group, table.BLACKWELL.tiles(p).dkv.group_parts) for p in smalls]
    assert parts == [(4, 4), (2, 1)]


def test_the_tiles_of_a_trial_with_dropout_are_those_of_calls_with_it():
    dropping = problem_of(dtype="bfloat16", **DROPOUT)
    tiles = table.HOPPER.tiles(comparison.make(dropping, fakes.TINY)[0])
    assert table.HOPPER.tiles(problem_of(dtype="bfloat16")) != table.HOPPER.tiles(dropping) == tiles


@no_interpreter
@pytest.mark.parametrize("size", [64, 128])
def test_a_trial_fills_each_slot_of_the_blackwell_kernels_again(size):
    problem = problem_of(dtype="bfloat16", size=size)
    small, *_ = comparison.make(problem, comparison.all_sizes(problem)[0])
    with as_if_on(GPUS["B200"]):
        t = table.BLACKWELL.tiles(small)
    heads = small.group // t.dkv.group_parts
    blocks = small.keys // t.forward.block_k, small.queries // t.dkv.block_q * heads
    assert blocks[0] > max(t.forward.stages, t.dq.stages) and blocks[1] > t.dkv.stages


ALL_KINDS = {block_types.EMPTY, block_types.PARTIAL, block_types.FULL}


@pytest.mark.parametrize("extra", ["a rule", "a mask"])
def test_a_mask_has_blocks_of_all_kinds_and_a_rule_others_for_each_head(extra):
    p, operands, _ = comparison.make(problem_of(extra, "bfloat16"), comparison.SIZES)
    tiles = table.HOPPER.tiles(p).forward
    blocks = tiles.block_q, tiles.block_k
    if extra == "a mask":
        types = np.asarray(block_types.from_array(operands.mask, p.queries, p.keys, *blocks))
    else:
        sizes = p.batch, p.heads, p.queries, *blocks
        types = np.asarray(schedule.block_types(operands.resolved_mask, *sizes))
        assert len({head.tobytes() for head in types[0]}) > 1
    assert {*types.flat} == ALL_KINDS


PAGES = [
    Pages(((9, page, 2, 64),) * 2, *of)
    for page, *of in [(8, "int8", False, "keys"), (16, None, False), (64, "float8_e4m3fn", True)]
]


@pytest.mark.parametrize(
    "pages", [PAGES[0], *(pytest.param(pages, marks=pytest.mark.whole) for pages in PAGES[1:])]
)
def test_kernels_that_read_pages_are_checked_by_themselves(pages, monkeypatch):
    problem = problem_of(dtype="bfloat16", lengths=(1, 4096))
    blockwise, entry = table.find("blockwise"), paged_attend.entry_point(pages)
    scheme = verdicts.variant_of(blockwise, problem, entry).scheme
    assert scheme == f"deterministic, decoding, {entry.name}"
    sizes = fakes.TINY | dict(queries=3, keys=320, sinks=True)
    right = comparison.check(blockwise, problem, [sizes], entry)()
    assert right.errors.keys() == {"o", "lse"} and right.wrong is None
    attend = paged_attend.attend_in_place
    monkeypatch.setattr(
        paged_attend,
        "attend_in_place",
        lambda p, pages, name, x, numbers, s: attend(p, pages, name, x, numbers + 1, s),
    )
    assert "o is off by" in comparison.check(blockwise, problem, [sizes], entry)().wrong


def test_a_call_with_pages_takes_no_kernel_that_was_found_right_without_them(monkeypatch):
    asked = []

    def first_right(implementation, problems, entry, check):
        asked.append((implementation.name, entry.name))
        return verdicts.Right(*problems)

    monkeypatch.setattr(verdicts, "first_right", first_right)
    cache = paged_cache(4, 16, 2, 16, pages=8, page=8, dtype="int8")
    cache.attend(fakes.QUERY[:, :1])
    assert asked[-1][1] == "pages of 8 int8"


def test_a_bias_by_pair_and_one_by_key_are_checked():
    problem = problem_of("a bias")
    found = [comparison.make(problem, sizes)[1].bias for sizes in comparison.all_sizes(problem)]
    assert [bias.shape[2] > 1 for bias in found] == [True, False]


def test_decoding_is_checked_by_itself_on_a_problem_that_is_decoding():
    triton, problem = (
        table.find("triton"),
        problem_of(dtype="bfloat16", lengths=(1, 4096)),
    )
    assert verdicts.variant_of(triton, problem).scheme == "deterministic, decoding"
    (sizes,) = comparison.all_sizes(problem)
    assert table.TRITON.tiles(comparison.make(problem, sizes)[0]).decode is not None


@pytest.mark.parametrize("size", [64, 96, 128])
def test_hopper_is_checked_with_one_tile_to_a_program_and_with_several(size):
    problem = problem_of(dtype="bfloat16", size=size, is_causal=True)
    one, several = (
        table.HOPPER.tiles(comparison.make(problem, sizes)[0]).forward
        for sizes in comparison.all_sizes(problem)
    )
    assert one.tiles_per_program == 1 < several.tiles_per_program and several.q_stages == 2


def test_the_largest_error_of_all_trials_counts_and_nan_most(monkeypatch):
    errors = [dict(o=1e-6, dq=float("nan")), dict(o=0.5, dq=1e-6)]
    monkeypatch.setattr(comparison, "_errors", lambda *_: errors.pop(0))
    told = comparison.check(fakes.fake("honest"), problem_of(), [fakes.TINY] * 2)().wrong
    assert told.startswith("o is off by 5.0e-01, dq is off by nan; ")
