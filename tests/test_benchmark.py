"""scripts/benchmark.py as its user meets it, and what it promises of blockwise's memory, by
compiling alone."""

import csv
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matplotlib import image

from pallas_flash import flash_attention
from pallas_flash.devices import ring
from scripts import benchmark
from scripts.bench import clock, context, machine, measure, peers, plots, product, programs, report
from scripts.bench.cases import PASSES, Case, decoding, suite

TINY = (
    "--lengths 67 --heads 2 --kv-heads 1 --head-size 16 --batch 3 --dtype float32 --repeats 3 "
    "--memory-lengths"
).split()
SMALL = Case(B=2, T=48, S=48, N=4, K=2, H=16, dtype="float32", causal=True)


@pytest.fixture
def peer(monkeypatch):
    """Adds a peer for one test: peer(name, attend, ...)."""

    def add(*args, **kw):
        monkeypatch.setattr(peers, "PEERS", [*peers.PEERS, peers.Contender(*args, **kw)])
        monkeypatch.setattr(benchmark, "PEERS", peers.PEERS)

    return add


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The scripts take the CPU for a GPU."""
    monkeypatch.setattr(machine, "on_gpu", lambda: True)
    # a GPU's size would take long
    monkeypatch.setattr(product, "measure", lambda dtype, time_by: (1e12, "1 TFLOP/s"))


def xla(q, k, v):
    return peers.contender("jax.nn/xla").attend(SMALL, q, k, v)


def lines_of(capsys, *words):
    return [
        line for line in capsys.readouterr().out.splitlines() if all(word in line for word in words)
    ]


def rows_of(folder, part="timed"):
    """{(T, passes, name): row} of benchmark.json."""
    rows = json.loads((folder / "benchmark.json").read_text())[part]
    return {(row["case"]["T"], row["passes"], row["name"]): row for row in rows}


# ---- a run ----


def test_a_run_prints_a_table_and_writes_json_csv_and_png(tmp_path, capsys):
    names = ["--implementations", "blockwise", "jax.nn/xla"]
    assert benchmark.main([*TINY, *names, "--memory-lengths", "128", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    names = (
        "device versions peers missing commit date inputs times turns clock product ratio "
        "flops memory error"
    ).split()
    for name in names:
        assert re.search(rf"^{name} +\S", printed, re.MULTILINE), name
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * 2
    for (T, passes, name), row in rows.items():
        assert (
            row["status"] == "ok"
            and len(row["seconds"]) == 3
            and row["error"] < 1e-5
            and row["clock"] == "wall"
        )
        assert row["median"] == sorted(row["seconds"])[1]
        ratio = row["median"] / rows[T, passes, "blockwise"]["median"]
        assert re.search(
            rf"^\| {T} +\| {re.escape(passes)} +\| {name} .*\| {ratio:.2f} ", printed, re.MULTILINE
        )
        speeds = (
            rf"{row['tflops'] * 1e3:.3g} +\| "
            rf"{row['tflops'] * 1e12 / product.measure('float32', clock.WALL)[0]:.0%}"
        )
        assert re.search(
            rf"^\| {T} +\| {re.escape(passes)} +\| {name} .*\| {speeds} ", printed, re.MULTILINE
        )
    assert "| GFLOP/s | of a product's |" in printed
    compiled = rows_of(tmp_path, "compiled")
    assert len(compiled) == 2 and all(
        row["temporary_bytes"] > 0 and not row["seconds"] for row in compiled.values()
    )
    assert image.imread(tmp_path / "benchmark.png").std() > 0.01
    with (tmp_path / "benchmark.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["ms"]) for line in lines] == [
        pytest.approx(row["median"] * 1e3) for row in rows.values()
    ]
    assert {line["K"] for line in lines} == {"1"} and {line["status"] for line in lines} == {"ok"}


def test_results_are_never_overwritten(tmp_path, monkeypatch):
    (tmp_path / "benchmark.csv").write_text("measured")
    with pytest.raises(
        SystemExit, match=r"error: --out must be a folder without results; .* Choose another"
    ):
        benchmark.main([*TINY, "--out", str(tmp_path)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("benchmark.csv", "measured")
    ]
    monkeypatch.chdir(tmp_path)
    assert [str(benchmark.new_folder(None)) for _ in range(2)] == [
        "runs/benchmark-1",
        "runs/benchmark-2",
    ]


def test_pytorch_is_a_peer_on_the_cpu(tmp_path):
    pytest.importorskip("torch")
    arguments = [
        *TINY,
        "--implementations",
        "blockwise",
        "torch",
        "--passes",
        *PASSES,
        "--memory-lengths",
        "128",
    ]
    assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    assert all(rows[67, passes, "torch"]["median"] > 0 for passes in PASSES)
    assert [name for *_, name in rows_of(tmp_path, "compiled")] == ["blockwise"], (
        "XLA counts no memory of torch"
    )


@pytest.mark.whole
def test_the_backward_is_timed_alone_and_counts_its_own_flops(tmp_path):
    arguments = [
        *TINY,
        "--implementations",
        "blockwise",
        "--passes",
        *PASSES,
        "--out",
        str(tmp_path),
    ]
    assert benchmark.main(arguments) == 0
    rows = [row for (_, _, _), row in rows_of(tmp_path).items()]
    assert [row["passes"] for row in rows] == list(PASSES)
    forward, backward, both = (row["tflops"] * row["median"] for row in rows)
    assert backward == pytest.approx(2.5 * forward) and both == pytest.approx(3.5 * forward)
    o, gradients, all_of_them = (row["error"] for row in rows)
    # XLA may round otherwise in one program
    assert o != gradients and all_of_them == pytest.approx(max(o, gradients), rel=0.1)


PAGED = ["decode_attention", "paged_attention"]


def test_decoding_is_timed_beside_the_bytes_of_a_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark.product, "measure_copy", lambda time_by: (1e9, "a copy"))
    arguments = (
        "--cases decode --batch 2 --lengths 300 --heads 4 --kv-heads 2 --head-size 16 "
        "--repeats 2 --out"
    ).split()
    assert (
        benchmark.main(
            [*arguments, str(tmp_path), "--implementations", "blockwise", "jax.nn/xla", *PAGED]
        )
        == 0
    )
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "benchmark.json").read_text())["timed"]
    assert [(row["case"]["T"], row["case"]["S"], row["passes"]) for row in rows] == [
        (1, 300, "forward")
    ] * 4
    assert [(row["status"], row["reason"]) for row in rows[2:]] == [
        ("not run", "it needs a GPU")
    ] * 2
    caches, rest = 2 * 2 * 300 * 2 * 16 * 4, 2 * 2 * 4 * 16 * 4
    rate = (caches + rest) / rows[0]["median"] / 1e9
    assert re.search(
        rf"^\| B2 S300 \| forward \| blockwise .*\| {rate:.3g} +\| {rate:.0%} ",
        printed,
        re.MULTILINE,
    )
    assert benchmark.parse(["--cases", "decode"]).batch == [1, 8]


@pytest.mark.whole
def test_a_suite_prints_ratios_and_draws_lengths_and_masks(tmp_path, capsys, monkeypatch):
    cases = [SMALL._replace(K=4), SMALL._replace(K=4, causal=False), SMALL._replace(documents=3)]
    monkeypatch.setattr(benchmark, "suite", lambda dtype, quick: cases)
    arguments = (
        "--cases suite --implementations blockwise jax.nn/xla --dtype float32 --repeats 2 "
        "--memory-lengths 48"
    ).split()
    assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    _, _, ratios = printed.partition("above 1, pallas_flash is faster")
    assert "| case" in ratios and "Temporaries" not in ratios
    rows = json.loads((tmp_path / "benchmark.json").read_text())["timed"]
    assert len(rows) == 3 * 2 * 2 and {row["status"] for row in rows} == {"ok"}
    ratio = rows[-1]["median"] / rows[-2]["median"]
    label = r"H16 N4/2 T48 causal 3 documents"
    assert re.search(
        rf"^\| {label} +\| forward\+backward \| blockwise +\| {ratio:.2f} ", printed, re.MULTILINE
    )
    for name in ("causal", "full", "masks"):
        assert image.imread(tmp_path / f"benchmark-{name}.png").std() > 0.01


@pytest.mark.whole
def test_on_a_gpu_it_says_its_plan_and_falls_back_to_the_wall_clock_out_loud(
    tmp_path, capsys, monkeypatch, as_on_a_gpu
):
    monkeypatch.setattr(benchmark, "suite", lambda dtype, quick: [SMALL._replace(dtype=dtype)])
    monkeypatch.setattr(machine, "_query", lambda names: ["no-such-program"])
    names = ["--implementations", "hopper", "hopper fused", "jax.nn/xla"]
    assert benchmark.main([*names, "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^plan +1 cases, up to 5 programs, 3 rows: at .*, about \d+ s; no case begins after "
        r"390 s$",
        printed,
        re.MULTILINE,
    )
    assert re.search(r"^clock +wall: the profiler saw nothing run on a GPU", printed, re.MULTILINE)
    assert re.search(r"^gpu +unknown: nvidia-smi gave no answer", printed, re.MULTILINE)
    rows = rows_of(tmp_path)
    assert len(rows) == 3 + 2 + 3  # the forward of "hopper fused" is that of hopper
    for (_, _, name), row in rows.items():
        assert row["status"] == ("not run" if name.startswith("hopper") else "ok"), row["reason"]
        assert row["clock"].startswith("wall: ") == (row["status"] == "ok")


def test_out_of_time_no_case_is_begun_and_the_report_says_so(tmp_path, capsys, monkeypatch):
    now = iter(range(0, 10**6, 40))
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    arguments = (
        "--lengths 16 32 48 --heads 1 --dtype float32 --implementations jax.nn/xla "
        "--repeats 1 --memory-lengths"
    )
    assert benchmark.main([*arguments.split(), "--budget", "60", "--out", str(tmp_path)]) == 0
    status = {T: row["status"] for (T, _, _), row in rows_of(tmp_path).items()}
    assert status[16] == "ok" and status[48] == "not run"
    assert (
        len(
            lines_of(
                capsys,
                "not run",
                "forward, forward+backward",
                "out of time: the budget is 60 s",
                "T48",
            )
        )
        == 1
    )


def test_where_nothing_ran_it_says_so_and_ends_with_status_1(tmp_path, capsys):
    arguments = (
        "--lengths 16 --implementations jax.nn/cudnn --dtype float32 --repeats 1 "
        "--memory-lengths --full --out"
    )
    assert benchmark.main([*arguments.split(), str(tmp_path)]) == 1
    *_, reason, nothing, _, _ = capsys.readouterr().out.splitlines()
    assert (
        reason.startswith("not run    jax.nn/cudnn, forward, forward+backward, ")
        and "full: it needs" in reason
    )
    assert nothing == "nothing ran"
    assert (tmp_path / "benchmark.png").exists()


@pytest.mark.parametrize("seconds", [[2e-4, 7e-4], [3e-4, 4.5e-4], [1e-4, 3.0]])
def test_a_picture_has_numbers_on_every_axis_and_says_what_was_not_measured(
    seconds, monkeypatch, tmp_path
):
    drawn = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    cases = [SMALL._replace(T=T, S=T) for T in (64, 128)]
    rows = [
        measure.Row(case, PASSES[0], "blockwise", seconds=[one])
        for case, one in zip(cases, seconds, strict=True)
    ]
    args = types.SimpleNamespace(
        implementations=["blockwise"],
        passes=PASSES[:1],
        dtype="float32",
        head_size=16,
        lengths=[64, 128],
        memory_lengths=[],
    )
    facts = dict.fromkeys("device versions commit date inputs".split(), "")
    plots.write_lengths(tmp_path / "benchmark.png", facts, rows, [], args)
    drawn[0].draw_without_rendering()
    left, right = drawn[0].axes
    low, high = left.get_ylim()
    assert any(
        tick.label1.get_text()
        for tick in left.yaxis.get_major_ticks()
        if low <= tick.get_loc() <= high
    )
    assert [text.get_text() for text in right.texts] == [
        "not measured"
    ] and not right.get_xticks().size


# ---- peers that are absent, wrong, or raise ----


def wrong_in_its_last_row(case, q, k, v):
    o = xla(q, k, v)
    return o.at[:, -1].set(jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)[:, -1])


def test_a_wrong_result_is_reported_and_not_timed(peer, tmp_path, capsys):
    peer("careless", wrong_in_its_last_row)
    assert (
        benchmark.main(
            [*TINY, "--implementations", "careless", "--dtype", "bfloat16", "--out", str(tmp_path)]
        )
        == 1
    )
    for (_, passes, _), row in rows_of(tmp_path).items():
        assert row["status"] == "wrong" and not row["seconds"] and "o is off by" in row["reason"]
        assert ("dq is off by" in row["reason"]) == (passes == "forward+backward")
    assert len(lines_of(capsys, "wrong", "careless", "o is off by", "the tolerance is")) == 2


def test_what_a_reader_of_a_peers_numbers_must_know_stands_above_them(peer, tmp_path, capsys):
    peer("cautious", lambda case, q, k, v: xla(q, k, v), note="compiled without care")
    benchmark.main(
        [*TINY, "--implementations", "cautious", "--passes", "forward", "--out", str(tmp_path)]
    )
    assert lines_of(capsys, "cautious", "compiled without care")[0].startswith("cautious")


def test_a_wrong_gradient_is_enough(peer, tmp_path):
    peer("stopped", lambda case, q, k, v: xla(q, lax.stop_gradient(k), v))
    arguments = [*TINY, "--implementations", "stopped", "--passes", *PASSES, "--out", str(tmp_path)]
    assert benchmark.main(arguments) == 1
    status = {passes: row["status"] for (_, passes, _), row in rows_of(tmp_path).items()}
    assert status == {"forward": "ok", "backward": "wrong", "forward+backward": "wrong"}


def test_what_raises_is_reported_with_its_error_and_the_others_are_timed(peer, tmp_path, capsys):
    def raises(case, q, k, v):
        raise RuntimeError(f"no kernel for {q.shape[1]} queries")

    def cannot(case, q, k, v):
        raise NotImplementedError("no such mask yet")

    peer("broken", raises)
    peer("unfinished", cannot)
    names = ["--implementations", "blockwise", "broken", "unfinished"]
    assert benchmark.main([*TINY, *names, "--memory-lengths", "128", "--out", str(tmp_path)]) == 1
    rows = rows_of(tmp_path)
    assert rows[67, "forward", "broken"]["reason"] == "RuntimeError: no kernel for 67 queries"
    assert rows[67, "forward", "unfinished"]["reason"] == "no such mask yet"
    status = dict(blockwise="ok", broken="failed", unfinished="not run")
    assert all(row["status"] == status[name] for (*_, name), row in rows.items())
    # timed and compiled ones
    assert len(lines_of(capsys, "failed", "broken", "RuntimeError: no kernel for")) == 2


def test_a_peer_that_is_not_installed_is_named_and_left_out(peer, tmp_path, capsys):
    peer("elsewhere", xla, modules=("json", "no_such_module"))
    assert (
        benchmark.main(
            [*TINY, "--implementations", "jax.nn/xla", "elsewhere", "--out", str(tmp_path)]
        )
        == 0
    )
    assert {name for *_, name in rows_of(tmp_path)} == {"jax.nn/xla"}
    assert lines_of(capsys, "missing", "elsewhere not installed: no module no_such_module")


def test_what_would_not_fit_into_memory_is_not_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(programs, "memory_limit", lambda: 10**6)
    arguments = (
        "--lengths 1024 --heads 1 --dtype float32 --implementations jax.nn/xla "
        "--memory-lengths --out"
    )
    assert benchmark.main([*arguments.split(), str(tmp_path)]) == 1
    assert len(lines_of(capsys, "not run", "jax.nn/xla", "over the limit of 0.0 GB")) == 1


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
    contenders = [peers.contender(name) for name in ("blockwise", "jax.nn/xla")]
    rows = measure.measure(contenders, case, ["backward"], 1, jobs=2, time_by=clock.WALL)
    reasons = ["", "it wants values of the keys' head size" if case.Hv else ""]
    assert [row.reason for row in rows] == reasons and rows[0].status == "ok"


def test_jaxs_paged_attention_gets_the_same_caches_in_pages_or_says_why_not(monkeypatch):
    kernels = pytest.importorskip(
        "jax.experimental.pallas.ops.gpu.paged_attention", reason="this jax has it no more"
    )
    interpreted = functools.partial(kernels.paged_attention, interpret=True)
    monkeypatch.setattr(kernels, "paged_attention", interpreted)
    one, (case,) = (
        peers.contender("paged_attention"),
        decoding([2], [512], N=4, K=2, H=16, dtype="float32"),
    )
    o = one.attend(case, *case.inputs()[:3], **one.operands(case, *case.inputs()[1:3]))
    np.testing.assert_allclose(
        o, peers.contender("jax.nn/xla").attend(case, *case.inputs()[:3]), atol=1e-5
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert one.why_not(case) is None
    assert "got S = 576" in one.why_not(case._replace(S=576)) and "got S = 300" in one.why_not(
        case._replace(S=300)
    )
    assert "one new token" in one.why_not(case._replace(T=2))


def test_one_that_takes_a_single_dtype_is_given_and_checked_in_that():
    seen = []

    def attend(case, q, k, v):
        seen.append((case.dtype, str(q.dtype)))
        return flash_attention(q, k, v, is_causal=True)

    one = peers.Contender("half", attend, dtype="float16")
    (row,) = measure.measure(
        [one], SMALL._replace(dtype="bfloat16"), ["forward"], 1, jobs=1, time_by=clock.WALL
    )
    assert (
        row.reason == "" and row.case.dtype == "bfloat16" and set(seen) == {("float16", "float16")}
    )
    assert row.error < programs.TOLERANCE["float16"]


# ---- what goes wrong while it is measured ----


def test_one_that_raises_while_it_is_timed_costs_its_own_cell_alone():
    calls = []

    def call():
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("an illegal memory access was encountered")

    rows = {name: measure.Row(SMALL, "forward", name) for name in ("ours", "broken")}
    together = {
        "ours": (rows["ours"], program(lambda: None)),
        "broken": (rows["broken"], program(call)),
    }
    measure._time(together, 3, clock.WALL)
    assert (rows["ours"].status, len(rows["ours"].seconds)) == ("ok", 3)
    assert (rows["broken"].status, rows["broken"].seconds) == ("failed", [])
    assert rows["broken"].reason == "RuntimeError: an illegal memory access was encountered"


def test_where_the_profiler_raises_the_wall_clock_tells_the_time(monkeypatch):
    def raises(*args, **kw):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(jax.profiler, "start_trace", raises)
    timing = clock.timing({"a": program(lambda: None)}, 2, clock.DEVICE)
    assert (
        timing.clock == "wall: the profiler raised RuntimeError: no CUPTI"
        and len(timing.seconds["a"]) == 2
    )


def test_on_a_gpu_ours_are_timed_before_foreign_code_is_loaded_and_keep_their_times_if_it_spoils_all(
    peer, tmp_path, capsys, monkeypatch, as_on_a_gpu
):
    loaded, spoilt = [], []

    def spoils(case, q, k, v):
        spoilt.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    def timed(programs, rounds, time_by):
        loaded.append(bool(spoilt))
        for name in programs if spoilt else ():
            raise clock.Failed(name) from RuntimeError("as was encountered before")
        return clock.Timing({name: [1.0] for name in programs}, time_by, {})

    monkeypatch.setattr(clock, "timing", timed)
    peer("foreign", spoils, modules=("json",), before_import=lambda: spoilt.append(True))
    monkeypatch.delitem(sys.modules, "json")
    lengths = (
        "--lengths 32 48 --heads 1 --head-size 16 --dtype float32 --repeats 1 "
        "--memory-lengths --passes forward"
    ).split()
    assert (
        benchmark.main(
            [*lengths, "--implementations", "blockwise", "foreign", "--out", str(tmp_path)]
        )
        == 1
    )
    assert loaded[:2] == [False, False] and loaded[-1]
    rows = rows_of(tmp_path)
    assert {(T, name): row["status"] for (T, _, name), row in rows.items()} == {
        (T, name): status
        for T in (32, 48)
        for name, status in (("blockwise", "ok"), ("foreign", "failed"))
    }
    assert lines_of(capsys, "failed", "foreign", "an illegal memory access")


@pytest.mark.whole
def test_a_case_that_hangs_ends_the_run_with_the_tables_of_those_before(
    peer, tmp_path, capsys, monkeypatch
):
    guards, ended = [], []

    class Timer:
        def __init__(self, seconds, give_up):
            guards.append((seconds, give_up))

        start = cancel = lambda self: None

    def hangs(case, q, k, v):
        ((seconds, give_up),) = guards
        assert seconds == 100 + benchmark.GRACE
        if not ended:
            give_up()
        return xla(q, k, v)

    monkeypatch.setattr(benchmark.threading, "Timer", Timer)
    monkeypatch.setattr(os, "_exit", ended.append)
    peer("stuck", hangs, lambda case: "it takes few tokens" if case.T < 48 else None)
    arguments = (
        "--lengths 32 48 --dtype float32 --implementations jax.nn/xla stuck --passes "
        "forward --repeats 1 --budget 100"
    )
    benchmark.main([*arguments.split(), "--memory-lengths", "--out", str(tmp_path)])
    assert ended == [1]
    printed = capsys.readouterr()
    assert "a case hangs" in printed.err
    before, _ = printed.out.split("written", 1)
    assert re.search(r"^\| 32 +\| forward +\| jax.nn/xla +\| [\d.]+ ", before, re.M)
    assert re.search(r"^not run +jax.nn/xla, .* T48 .*: the run ended before$", before, re.M)


def test_nvidia_smi_that_does_not_answer_is_no_end(monkeypatch, as_on_a_gpu):
    def hangs(command, timeout, **kw):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.limits() == "unknown: nvidia-smi gave no answer (TimeoutExpired)"


@pytest.mark.parametrize(
    "name, on_gpu, off, status",
    [("jax.nn/xla", True, 5e-4, "ok"), ("jax.nn/xla", True, 5e-3, "wrong"), ("jax.nn/xla", False, 5e-4, "wrong"),
     ("blockwise", True, 5e-4, "wrong")],
)  # fmt: skip
def test_a_peer_in_tf32_is_timed_and_told_to_be_in_that(name, on_gpu, off, status, monkeypatch):
    one = peers.contender(name)
    one = one._replace(
        attend=lambda case, q, k, v, attend=one.attend: attend(case, q, k, v) * (1 + off)
    )
    monkeypatch.setattr(machine, "on_gpu", lambda: on_gpu)
    found = programs.check(one, SMALL, "forward")
    assert (found.status, "TF32" in found.reason) == (status, status == "ok"), found
    assert programs.check(one, SMALL._replace(dtype="bfloat16"), "forward") == (
        pytest.approx(off, abs=5e-3),
        "ok",
        "",
    )


def test_the_largest_caches_are_made_once_for_all_and_are_checked_on_few_rows(monkeypatch):
    case = SMALL._replace(B=5, T=1, S=48, causal=False)
    monkeypatch.setattr(programs, "check_length", lambda: 100)
    assert (
        programs._checked_part(case) == case._replace(B=2)
        and programs._checked_part(case._replace(S=300)).B == 1
    )
    given = []
    operands = lambda case, k, v: given.append((k, v)) or {}
    programs.program(
        peers.Contender("paged", lambda case, q, k, v: xla(q, k, v), operands=operands),
        case,
        "forward",
    )
    assert all(a is b for a, b in zip(given[-1], case.inputs()[1:3], strict=True))
    measure.measure([], SMALL, ["forward"], 1, jobs=1, time_by=clock.WALL)
    assert case.inputs()[1] is not given[-1][0], (
        "a case's inputs are freed where the next one begins"
    )


# ---- a sequence on several devices, counted ----


def test_what_devices_send_and_hold_is_counted_from_the_compiled_program(tmp_path, capsys):
    sizes = "--cases context --lengths 512 --heads 8 --head-size 16 --out".split()
    assert benchmark.main([*sizes, str(tmp_path / "run")]) == 0
    sent = {
        row["scheme"]: row["sent"]
        for row in json.loads((tmp_path / "run" / "benchmark.json").read_text())["context"]
    }
    # of one device's rows: K, V forward; K, V, dK, dV backward, once around
    unit = 512 // 8 * 8 * 16 * 4
    # rows: m, l; m, 1 / l, dlse, delta
    around, exchanged = (7 * 2 + 8 * 4) * unit, (8 * unit + 6 * 4 * 512) * 7 // 8
    assert sent == {
        "one device": 0,
        "Ring('context')": around,
        "Zigzag('context')": around,
        "AllToAll('context')": exchanged,
    }
    assert "| zigzag" in capsys.readouterr().out


@pytest.mark.whole
def test_some_heads_at_a_time_send_as_many_bytes_as_all(monkeypatch):
    case, scheme = Case(1, 512, 512, 8, 2, 16, "float32", True), context.SCHEMES[0]
    sent = lambda: context.bytes_sent(
        context.compiled.__wrapped__("blockwise", case, scheme).as_text()
    )
    together = sent()
    monkeypatch.setattr(ring, "ROWS", 64)
    jax.clear_caches()
    assert sent() == together == 46 * 512 // 8 * 2 * 16 * 4


@pytest.mark.whole
@pytest.mark.parametrize(
    "implementation, kv_heads, schemes",
    [
        ("blockwise", 1, context.SCHEMES[:2]),
        ("blockwise", 8, context.SCHEMES),
        ("triton", 8, context.SCHEMES[:2]),
    ],
)
def test_each_of_eight_devices_has_a_sixth_of_the_temporaries_of_one_alone(
    implementation, kv_heads, schemes
):
    case = Case(1, 65536, 65536, 8, kv_heads, 64, "float32", True)
    alone = context.temporaries(implementation, case)
    assert max(context.temporaries(implementation, case, scheme) for scheme in schemes) <= alone / 6


@pytest.mark.parametrize("chunks", [1, 2])
def test_zigzag_gives_all_devices_equal_work_under_a_causal_mask(chunks):
    of_device = context.visited(chunks)
    most = of_device.max() / of_device.min()
    assert most <= 1.1 if chunks == 2 else most > 5


# ---- arguments ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--implementations fast", "got 'fast'. Or one of jax.nn/xla"),
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads; got 3 and 2."),
        ("--lengths 0", "must be at least 1; got 0"),
        (
            "--cases context --implementations jax.nn/xla",
            "counts implementations of flash_attention; got 'jax.nn/xla'",
        ),
        (
            "--cases suite --full --heads 2",
            "the suite has its own shapes; leave out --heads, --causal or --full",
        ),
    ],
)
def test_a_wrong_argument_is_explained(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_gpu_gets_the_suite_unless_a_shape_is_given(as_on_a_gpu):
    assert benchmark.parse([]).cases == benchmark.parse(["--quick"]).cases == "suite"
    assert benchmark.parse(["--lengths", "512"]).cases == "lengths"
    names = benchmark.parse([]).implementations
    assert names[:2] == ["hopper", "hopper fused"] and {peer.name for peer in peers.PEERS} < set(
        names
    )


# ---- cases ----


@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(causal=False),
        dict(window=1),
        dict(window=7),
        dict(window=99),
        dict(documents=5),
        dict(documents=5, causal=False),
        dict(documents=5, window=7),
        dict(window=7, global_tokens=3),
        dict(window=7, global_tokens=99),
    ],
    ids=str,
)
def test_flops_count_each_visible_pair(more):
    case = SMALL._replace(Hv=8, **more)
    i, j = np.mgrid[: case.T, : case.S]
    ids = case.segment_ids()[0]
    seen = (i >= j if case.causal else np.full(i.shape, True)) & (ids[:, None] == ids)
    if case.window:
        seen &= (i - j < case.window) | (j < (case.global_tokens or 0))
    assert np.array_equal(case.visible()[0, 0], seen)
    pairs = seen.sum() if more else case.T**2 / 2  # causal alone is half of all by convention
    products = dict(forward=16 + 8, backward=16 + 16 + 16 + 8 + 8)  # s and o; s, dq, dk, dp, dv
    for name, width in products.items():
        assert case.flops(name) == 2 * width * pairs * case.B * case.N
    assert case.flops("forward+backward") == case.flops("forward") + case.flops("backward")


def test_documents_fill_the_row_and_are_no_multiples_of_blocks():
    case = SMALL._replace(T=16384, S=16384, documents=16)
    lengths = case.document_lengths()
    assert (
        lengths.sum() == case.T
        and len(lengths) == 16
        and lengths.min() > 0
        and len(set(lengths % 64)) > 8
    )
    assert case.segment_ids().shape == (case.B, case.T) and np.array_equal(
        np.bincount(case.segment_ids()[1]), lengths
    )


def test_the_suite_has_every_shape_that_is_promised():
    cases = suite("bfloat16")
    assert all(case.B * case.T == 16384 and case.S == case.T for case in cases) and len(
        set(cases)
    ) == len(cases)
    plain = {
        (case.H, case.T, case.causal)
        for case in cases
        if not (case.window or case.documents or case.Hv or case.N != case.K)
    }
    assert plain == {
        (H, 2**n, causal) for H in (64, 128, 256) for n in range(9, 15) for causal in (True, False)
    }
    assert all(case.N * case.H == 2048 for case in cases if case.N == case.K and not case.Hv)
    others = [
        case for case in cases if case.window or case.documents or case.Hv or case.N != case.K
    ]
    assert [(c.N, c.K, c.H, c.Hv, c.window, c.documents, c.global_tokens) for c in others] == [
        (16, 16, 128, None, None, 16, None),
        (64, 8, 128, None, None, None, None),
        (16, 16, 192, 128, None, None, None),
        (16, 16, 128, None, 1024, None, None),
        (16, 16, 128, None, 1024, None, 64),
    ]
    assert suite("bfloat16", quick=True) == cases[:10]


# ---- clocks ----


def program(call):
    return programs.Program(call, lambda started: started, list)


@pytest.mark.parametrize("on_gpu, calls", [(True, 1), (False, 2)])
def test_after_a_trial_a_round_calls_each_behind_any_other_and_on_a_cpu_times_no_first_call(
    on_gpu, calls, monkeypatch
):
    called = []
    monkeypatch.setattr(clock.machine, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(clock, "SAMPLE", 0)
    turns = clock.interleave(
        {name: program(functools.partial(called.append, name)) for name in "abc"}, 9
    )
    text = "".join(called)
    assert text == "abc" + "".join(turn.name * calls for turn in turns) and {
        turn.calls for turn in turns
    } == {1}
    text = text[:3] + text[3::calls]
    assert all(sorted(text[i : i + 3]) == ["a", "b", "c"] for i in range(0, 30, 3))
    assert {a + b for a, b in itertools.pairwise(text)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_a_short_call_is_repeated_and_on_a_cpu_each_is_waited_for(monkeypatch):
    waited, now = [], [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(
            clock,
            "time",
            types.SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None),
        )
        call = lambda: now.append(now.pop() + clock.SAMPLE / 7)
        (turn,) = clock.interleave({"a": programs.Program(call, waited.append, list)}, 1)
    assert (
        turn.calls in (7, 8)
        and len(waited) == 2 + turn.calls
        and turn.seconds == pytest.approx(turn.calls / 7 * clock.SAMPLE)
    )
    timing = clock.timing({name: program(lambda: None) for name in "abc"}, 4, clock.WALL)
    assert [len(timing.seconds[name]) for name in "abc"] == [4, 4, 4] and timing.clock == "wall"


def test_the_trace_finds_each_turn_between_its_own_start_and_stop():
    with clock.trace() as traced:
        turns = clock.interleave(
            {"a": program(lambda: np.sort(np.zeros(10**6))), "b": program(lambda: None)}, 3
        )
    spans, busy = traced()
    assert sorted(spans) == list(range(6)) and busy == []
    for number, turn in enumerate(turns):
        assert (spans[number].stop - spans[number].start) / 1e9 >= turn.seconds * 0.9
    assert all(spans[n].stop <= spans[n + 1].start for n in range(5))


def test_device_time_is_what_kernels_cover_within_a_turn():
    turns = [clock.Turn("a", 2, 1.0), clock.Turn("b", 1, 1.0), clock.Turn("a", 2, 1.0)]
    ms = lambda start, stop: clock.Span(start * 1e6, stop * 1e6)
    spans = {n: ms(20 * n + 2, 20 * n + 20) for n in range(3)}
    # two of the first turn overlap; the second's seems to begin just before its turn, as the two
    # clocks differ a little
    busy = [ms(3, 6), (ms(5, 8)), ms(21.99, 25), ms(43, 46), ms(50, 51)]
    assert clock.device_seconds(turns, spans, busy) == pytest.approx([5e-3, 3.01e-3, 4e-3])


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
        clock.device_seconds(turns, spans, [clock.Span(at * 1e6, (at + 1) * 1e6) for at in kernels])


def test_a_case_whose_trace_is_not_whole_falls_back_and_the_report_says_so(
    monkeypatch, as_on_a_gpu, capsys
):
    def lost(*args):
        raise clock.NoDeviceTime("the trace lost kernels")

    monkeypatch.setattr(clock, "device_seconds", lost)
    monkeypatch.setattr(machine, "_query", lambda names: ["no-such-program"])
    timing = clock.timing({"a": program(lambda: None)}, 2, clock.DEVICE)
    assert timing.clock == "wall: the trace lost kernels" and len(timing.seconds["a"]) == 2
    rows = [
        measure.Row(SMALL, "forward", "a", clock=timing.clock),
        measure.Row(SMALL, "backward", "a", clock=clock.DEVICE),
    ]
    report.print_clocks(rows, clock.DEVICE)
    (line,) = lines_of(capsys, "not by the clock")
    assert line == f"not by the clock 'device': forward, {SMALL}: wall: the trace lost kernels"


def test_the_gpus_clock_and_power_are_medians_of_what_nvidia_smi_says(
    tmp_path, monkeypatch, as_on_a_gpu
):
    fake, printed = tmp_path / "nvidia-smi", tmp_path / "printed"
    # one without a sensor, one cut off
    samples = r"1200, 300.5, 40\n1980, 650.0, [N/A]\n1500, 500.0, 60\n1400, 400.0, 50\n19"
    fake.write_text(f"#!/bin/sh\nprintf '{samples}'\ntouch {printed}\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with machine.sensors() as sensed:
        deadline = time.monotonic() + 20
        while not printed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sensed() == {"clocks.sm": 1400, "power.draw": 400.0, "temperature.gpu": 50}


def test_ratios_are_to_the_first_by_name_and_to_nobody_where_it_was_not_timed():
    timed = lambda name, seconds, T: measure.Row(
        SMALL._replace(T=T), "forward", name, seconds=seconds
    )
    rows = [
        timed("a", [], 16),
        timed("b", [2.0], 16),
        timed("b", [3.0], 32),
        timed("a", [2.0, 1.0, 9.0], 32),
    ]
    assert report.ratios(rows, "a") == [None, None, 1.5, 1.0]


def test_the_error_is_relative_to_the_block_that_is_wrong():
    want = np.ones((2, 200, 3, 5), np.float32)
    want[:, 128:] *= 1e-2  # as late rows of causal attention are small
    x = want.copy()
    x[1, 150, 2] *= 2
    assert programs.error(jnp.asarray(want), want) == 0
    np.testing.assert_allclose(programs.error(jnp.asarray(x), want), (1 / 64) ** 0.5, rtol=1e-5)
    assert np.isnan(programs.error(jnp.asarray(x).at[0, 0, 0, 0].set(jnp.nan), want))


# ---- what is claimed of memory; nothing here is run ----


@functools.cache
def temporary_bytes(name, T, N):
    case = Case(B=1, T=T, S=T, N=N, K=N, H=64, dtype="float32", causal=True)
    row = measure.memory(peers.contender(name), case)
    assert row.status == "ok", row.reason
    return row.temporary_bytes


def test_65536_tokens_take_less_than_300_megabytes():
    assert temporary_bytes("blockwise", 65536, 1) < 300e6


@pytest.mark.parametrize("T", [16384, 32768])
def test_temporaries_grow_at_most_linearly(T):
    assert temporary_bytes("blockwise", 2 * T, 1) <= 2.1 * temporary_bytes("blockwise", T, 1)


def test_4096_tokens_take_an_eighth_of_the_memory_of_jax_nn():
    assert temporary_bytes("blockwise", 4096, 4) <= temporary_bytes("jax.nn/xla", 4096, 4) / 8
