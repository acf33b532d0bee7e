"""What scripts/benchmark.py is made of: cases and their FLOPs, adapters of peers, clocks, ratios,
and the error of a result."""

import contextlib
import functools
import itertools
import os
import time
import types

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmark import SMALL, program, xla

from pallas_flash import flash_attention
from pallas_flash.choose import implementations
from scripts.bench import cases, clock, machine, measure, peers, programs, report

# ---- cases ----

MASKS = [
    dict(causal=False),
    dict(window=1),
    dict(window=7),
    dict(window=99),
    dict(documents=5),
    dict(documents=5, causal=False),
    dict(documents=5, window=7),
    dict(window=7, global_tokens=3),
    dict(window=7, global_tokens=99),
]


@pytest.mark.parametrize("more", [{}, *MASKS], ids=str)
def test_flops_count_each_visible_pair(more):
    case = SMALL._replace(Hv=8, **more)
    i, j = np.mgrid[: case.T, : case.S]
    ids = case.segment_ids()[0]
    visible = (i >= j if case.causal else np.full(i.shape, True)) & (ids[:, None] == ids)
    if case.window:
        visible &= (i - j < case.window) | (j < (case.global_tokens or 0))
    assert np.array_equal(case.dense_mask()[0, 0], visible)
    pairs = visible.sum() if more else case.T**2 / 2  # causal alone is half of all by convention
    products = dict(forward=16 + 8, backward=16 + 16 + 16 + 8 + 8)  # s and o; s, dq, dk, dp, dv
    for name, width in products.items():
        assert case.flops(name) == 2 * width * pairs * case.B * case.N
    assert case.flops("forward+backward") == case.flops("forward") + case.flops("backward")


def test_documents_fill_the_row_and_are_no_multiples_of_blocks():
    case = SMALL._replace(T=16384, S=16384, documents=16)
    lengths, ids = case.document_lengths(), case.segment_ids()
    assert lengths.sum() == case.T and len(lengths) == 16 and lengths.min() > 0
    assert len(set(lengths % 64)) > 8
    assert ids.shape == (case.B, case.T) and np.array_equal(np.bincount(ids[1]), lengths)


def test_the_suite_has_every_shape_that_is_promised():
    options = types.SimpleNamespace(dtype="bfloat16", quick=False)
    suite = cases.suite(options)
    assert len(set(suite)) == len(suite) and {case.B * case.T for case in suite} == {16384}
    plain = [c for c in suite if c.mask in ("causal", "full") and c.N == c.K and not c.Hv]
    sizes = itertools.product((64, 128, 256), [2**n for n in range(9, 15)], (True, False))
    assert {(c.H, c.T, c.causal) for c in plain} == {(512, 4096, True), *sizes}
    assert {c.N * c.H for c in plain} == {2048}
    assert [str(case) for case in suite if case not in plain] == [
        "B1 T16384 N16 H128 bfloat16 causal 16 documents",
        "B2 T8192 N16 H192/128 bfloat16 causal",
        "B2 T8192 N64/8 H128 bfloat16 causal",
        "B1 T16384 N16 H128 bfloat16 causal window 1024",
        "B1 T16384 N16 H128 bfloat16 causal window 1024 64 global tokens",
    ]


def test_quick_is_the_first_of_the_suite_with_three_that_decode_and_two_in_forward_mode():
    passes = ["forward", "backward", "jvp"]
    args = types.SimpleNamespace(dtype="bfloat16", cases="suite", passes=passes, quick=False)
    whole, args.quick = cases.suite(args), True
    quick = cases.suite(args)
    told = {case: cases.telling(case, args) for case in quick}
    assert [case for case in quick if case.T > 1] == whole[:16]
    assert [case.B for case, names in told.items() if names == ["forward"]] == [64, 1, 8]
    assert sum("jvp" in names for names in told.values()) == 2


# ---- peers ----


@pytest.mark.parametrize(
    "more",
    [
        dict(documents=3),
        dict(window=7),
        dict(K=4, Hv=8),
        dict(documents=3, window=7),
        dict(window=7, global_tokens=3),
    ],
    ids=str,
)
def test_the_adapters_ask_all_for_the_same_attention(more):
    case = SMALL._replace(**more)
    contenders = [peers.contender(name) for name in ("blockwise", "blockwise varlen", "jax.nn/xla")]
    rows = measure.measure(contenders, case, ["backward"], 1, jobs=2, time_by=clock.WALL)
    reasons = ["", "" if case.documents else "it is for documents"]
    reasons += ["it has no value size other than H" if case.Hv else ""]
    assert [row.reason for row in rows] == reasons and rows[0].status == "ok"


def test_a_contender_has_the_features_of_a_case():
    case = SMALL._replace(extras="a bias, a soft cap")
    *qkv, _ = case.inputs()
    arrays = case.extra_arrays()
    found = peers.contender("blockwise").attend(case, *qkv, **arrays)
    expected = flash_attention(*qkv, **arrays, is_causal=True, logits_soft_cap=2.0)
    np.testing.assert_array_equal(found, expected)


def test_a_contender_has_the_tiles_of_its_name(monkeypatch):
    triton, found = implementations.find("triton"), []

    def forward(problem, tiles, operands):
        found.append(tiles)
        return triton.forward(problem, tiles, operands)

    fakes.replace(monkeypatch.setattr, triton, forward=forward)
    names = "triton", "triton: forward.block_k=16, dq.num_stages=1"
    contenders = map(peers.contender, names)
    case = SMALL._replace(documents=2)
    rows = measure.measure([*contenders], case, ["forward"], 1, jobs=1, time_by=clock.WALL)
    assert [(row.status, row.name) for row in rows] == [("ok", name) for name in names]
    default, changed = dict.fromkeys(found)
    assert changed == default._replace(
        forward=default.forward._replace(block_k=16), dq=default.dq._replace(num_stages=1)
    )
    assert changed.forward != default.forward and changed.dq != default.dq


@pytest.mark.parametrize(
    "name, reason",
    {
        "blockwise deterministic": "the kernels are the same by default",
        "blockwise: dq.stages=2": "its tiles have no kernel dq",
        "triton: dq.num_stages=2": "the tiles are the same by default",
        "triton: fused.stages=2": "its tiles have no kernel fused",
        "triton: dq.group_parts=2": "the tiles of dq have no field group_parts",
    }.items(),
)
def test_a_contender_without_a_kernel_or_a_field_says_so(name, reason):
    assert peers.contender(name).why_not(SMALL) == reason


# ---- clocks ----


@pytest.mark.parametrize("on_gpu, calls", [(True, 1), (False, 2)])
def test_after_a_trial_a_round_calls_each_behind_any_other_and_on_a_cpu_times_no_first_call(
    on_gpu, calls, monkeypatch
):
    called = []
    monkeypatch.setattr(clock.machine, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(clock, "SAMPLE", 0)
    abc = {name: program(functools.partial(called.append, name)) for name in "abc"}
    turns, text = clock.interleave(abc, 9), "".join(called)
    assert text == "abc" + "".join(turn.name * calls for turn in turns)
    assert {turn.calls for turn in turns} == {1}
    text = text[:3] + text[3::calls]
    assert all(sorted(text[i : i + 3]) == ["a", "b", "c"] for i in range(0, 30, 3))
    assert {a + b for a, b in itertools.pairwise(text)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_a_short_call_is_repeated_and_on_a_cpu_each_is_awaited(monkeypatch):
    awaited, now = [], [0.0]
    fake = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(clock, "time", fake)
        call = lambda: now.append(now.pop() + clock.SAMPLE / 7)
        (turn,) = clock.interleave({"a": programs.Program(call, awaited.append, list)}, 1)
    assert turn.calls in (7, 8) and len(awaited) == 2 + turn.calls
    assert turn.seconds == pytest.approx(turn.calls / 7 * clock.SAMPLE)
    timing = clock.timing({name: program(lambda: None) for name in "abc"}, 4, clock.WALL)
    assert [len(timing.seconds[name]) for name in "abc"] == [4, 4, 4] and timing.clock == "wall"


def test_the_trace_finds_each_turn_between_its_own_start_and_stop():
    sort = program(lambda: np.sort(np.zeros(10**6)))
    with clock.trace() as traced:
        turns = clock.interleave({"a": sort, "b": program(lambda: None)}, 3)
    spans, busy = traced()
    assert sorted(spans) == list(range(6)) and busy == []
    for i, turn in enumerate(turns):
        assert (spans[i].stop - spans[i].start) / 1e9 >= turn.seconds * 0.9
    assert all(spans[i].stop <= spans[i + 1].start for i in range(5))


PLANE = 'planes {{ name: "{}" lines {{ name: "{}" timestamp_ns: 1000000 {} }} {} }}'
EVENT = "events {{ metadata_id: {} offset_ps: {} duration_ps: {} }}"
NAME = "event_metadata {{ key: {0} value {{ id: {0} name: {1!r} }} }}"


def plane(plane: str, line: str, events: list[tuple[str, float, float]]) -> str:
    """A plane of a trace; events are a name, start and stop in ms."""
    names = list(dict.fromkeys(name for name, *_ in events))
    ps = lambda ms: round(ms * 1e9)
    lines = [EVENT.format(1 + names.index(n), ps(a), ps(b - a)) for n, a, b in events]
    metadata = [NAME.format(1 + i, name) for i, name in enumerate(names)]
    return PLANE.format(plane, line, " ".join(lines), " ".join(metadata))


def test_the_time_of_a_call_is_that_of_its_kernels_by_name(tmp_path, monkeypatch):
    """The trace is as a GPU's: turns of a, which calls twice, and of b."""
    turns = [clock.Turn("a", 2, 1.0), clock.Turn("b", 1, 1.0), clock.Turn("a", 2, 1.0)]
    spans = [(f"turn {n}", 20 * n + 2, 20 * n + 20) for n in range(3)]
    # two of the first turn overlap; the second's seems to begin just before its turn, as the two
    # clocks differ a little
    ran = [
        *(("flash", 3, 6), ("zeros", 5, 6), ("zeros", 6, 7), ("flash", 7, 9)),
        *(("MemcpyD2D", 21.99, 23), ("flash", 24, 25)),
        *(("flash", 43, 46), ("zeros", 46, 47), ("flash", 50, 51), ("zeros", 52, 52.5)),
    ]
    text = plane("/host:CPU", "python", [*spans, ("other", 0, 99)])
    text += plane("/device:GPU:0", "Stream #7(Compute)", ran[:6])
    text += plane("/device:GPU:0", "Stream #8(Compute)", ran[6:])
    text += plane("/device:GPU:0", "XLA Modules", [("jit_f", 3, 52.5)])
    xspace = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (tmp_path / "host.xplane.pb").write_bytes(xspace)
    traced = contextlib.nullcontext(lambda: clock._read(tmp_path))
    monkeypatch.setattr(clock, "trace", lambda: traced)
    monkeypatch.setattr(clock, "interleave", lambda programs, rounds: turns)
    timing = clock.timing({}, 3, clock.DEVICE)
    assert timing.clock == clock.DEVICE
    assert timing.seconds == dict(a=pytest.approx([3e-3, 2.75e-3]), b=pytest.approx([2.01e-3]))
    expected = dict(a=dict(flash=2.25e-3, zeros=0.875e-3), b=dict(MemcpyD2D=1.01e-3, flash=1e-3))
    assert timing.kernels == {name: pytest.approx(each) for name, each in expected.items()}
    longest = {name: next(iter(kernels)) for name, kernels in timing.kernels.items()}
    assert longest == dict(a="flash", b="MemcpyD2D")


def test_a_report_has_the_main_kernel_and_the_rest_of_each_call(capsys):
    timing = clock.Timing(
        dict(a=[1.0], b=[1.0]), clock.DEVICE, {}, dict(a=KERNELS, b={"n" * 99: 1})
    )
    rows = [measure.Row(SMALL, "forward", name) for name in "ab"]
    together = {row.name: (row, program(lambda: None)) for row in rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "timing", lambda *args: timing)
        measure._time(together, 1, clock.DEVICE)
    report.print_rows(rows, "a", lambda row: {})
    of_a, of_b = capsys.readouterr().out.splitlines()[-2:]
    assert of_a == f"{SMALL}, forward, a: flash 0.41, rest 0.12: zeros 0.08, convert 0.04"
    assert of_b == f"{SMALL}, forward, b: {'n' * 60} ... 1,000"


KERNELS = dict(flash=0.41e-3, zeros=0.08e-3, convert=0.04e-3)


@pytest.mark.parametrize(
    "kernels, spans, message",
    [
        ([], 2, "saw nothing run on a GPU"),
        ([1, 3, 101], 2, "the trace lost kernels of a: 1 in a turn of 2 calls"),
        ([1, 3, 5, 101, 103], 2, "the trace lost kernels of a: 2 in a turn"),
        ([1, 3], 1, "the trace lacks a turn of a"),
    ],
)
def test_a_trace_that_is_not_whole_gives_no_device_time(kernels, spans, message):
    turns = [clock.Turn("a", 2, 1.0)] * 2
    spans = {n: clock.Span(100e6 * n, 100e6 * n + 90e6) for n in range(spans)}
    with pytest.raises(clock.NoDeviceTime, match=message):
        clock.by_turn(turns, spans, [clock.Span(at * 1e6, (at + 1) * 1e6) for at in kernels])


@pytest.mark.parametrize(
    "owner, name, error, reason",
    [
        (clock, "by_turn", clock.NoDeviceTime("the trace lost kernels"), "the trace lost"),
        (jax.profiler, "start_trace", RuntimeError("no CUPTI"), "the profiler raised RuntimeError"),
    ],
)
def test_without_a_whole_trace_a_case_falls_back_to_the_wall_clock_and_the_report_says_so(
    owner,
    name,
    error,
    reason,
    monkeypatch,
    capsys,
):
    def fails(*args, **kw):
        raise error

    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(machine, "_query", lambda names: ["no-such-program"])
    row = measure.Row(SMALL, "forward", "a")
    measure._time({"a": (row, program(lambda: None))}, 2, clock.DEVICE)
    assert row.clock.startswith(f"wall: {reason}") and str(error) in row.clock
    assert len(row.seconds) == 2
    report.print_rows([row], "a", lambda row: {})
    *_, line = capsys.readouterr().out.splitlines()
    assert line == f"ok         a, forward, {SMALL}: timed by {row.clock}"


def test_the_gpus_clock_and_power_are_medians_of_what_nvidia_smi_says(tmp_path, monkeypatch):
    fake, printed = tmp_path / "nvidia-smi", tmp_path / "printed"
    # one without a sensor, one cut off
    samples = r"1200, 300.5, 40\n1980, 650.0, [N/A]\n1500, 500.0, 60\n1400, 400.0, 50\n19"
    fake.write_text(f"#!/bin/sh\nprintf '{samples}'\ntouch {printed}\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(machine, "on_gpu", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with machine.sensors() as sensed:
        deadline = time.monotonic() + 20
        while not printed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sensed() == {"clocks.sm": 1400, "power.draw": 400.0, "temperature.gpu": 50}


# ---- results ----


def test_ratios_are_to_the_first_by_name_and_to_none_where_it_was_not_timed():
    timed = lambda name, seconds, T: measure.Row(
        SMALL._replace(T=T), "forward", name, seconds=seconds
    )
    first, second = [timed("a", [], 16), timed("b", [2.0], 16)], [timed("b", [3.0], 32)]
    rows = [*first, *second, timed("a", [2.0, 1.0, 9.0], 32)]
    assert report.ratios(rows, "a") == [None, None, 1.5, 1.0]


def test_the_error_is_relative_to_the_block_that_is_wrong():
    want = np.ones((2, 200, 3, 5), np.float32)
    want[:, 128:] *= 1e-2  # as late rows of causal attention are small
    x = want.copy()
    x[1, 150, 2] *= 2
    assert programs.error(jnp.asarray(want), want) == 0
    np.testing.assert_allclose(programs.error(jnp.asarray(x), want), (1 / 64) ** 0.5, rtol=1e-5)
    assert np.isnan(programs.error(jnp.asarray(x).at[0, 0, 0, 0].set(jnp.nan), want))


@pytest.mark.parametrize(
    "name, on_gpu, off, status",
    [
        ("jax.nn/xla", True, 5e-4, "ok"),
        ("jax.nn/xla", True, 5e-3, "wrong"),
        ("jax.nn/xla", False, 5e-4, "wrong"),
        ("blockwise", True, 5e-4, "wrong"),
    ],
)
def test_a_peer_in_tf32_is_timed_and_said_to_be(name, on_gpu, off, status, monkeypatch):
    one = peers.contender(name)
    one = one._replace(
        attend=lambda case, q, k, v, attend=one.attend: attend(case, q, k, v) * (1 + off)
    )
    monkeypatch.setattr(machine, "on_gpu", lambda: on_gpu)
    result = programs.check(one, SMALL, "forward")
    assert (result.status, "TF32" in result.reason) == (status, status == "ok"), result
    half = programs.check(one, SMALL._replace(dtype="bfloat16"), "forward")
    assert half == (pytest.approx(off, abs=5e-3), "ok", "")


def test_the_largest_caches_are_made_once_for_all_and_are_checked_on_few_rows(monkeypatch):
    case = SMALL._replace(B=5, T=1, S=48, causal=False)
    monkeypatch.setattr(programs, "check_length", lambda: 100)
    assert programs._truncate(case) == case._replace(B=2)
    assert programs._truncate(case._replace(S=300)).B == 1
    given = []
    operands = lambda case, k, v: given.append((k, v)) or {}
    programs.program(peers.Contender("paged", xla, operands=operands), case, "forward")
    assert all(a is b for a, b in zip(given[-1], case.inputs()[1:3], strict=True))
    measure.measure([], SMALL, ["forward"], 1, jobs=1, time_by=clock.WALL)
    assert case.inputs()[1] is not given[-1][0], "inputs are freed where the next case begins"
