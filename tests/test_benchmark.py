"""scripts/benchmark.py as its user meets it: its tables and files, peers that are absent, wrong or
raise, and its arguments."""

import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest
from jax import lax

from scripts import benchmark
from scripts.bench import ceilings, clock, machine, measure, peers, programs, workers
from scripts.bench import run as bench_run
from scripts.bench.cases import PASSES, Case
from scripts.bench.run import new_folder

TINY = "--lengths 67 --batch 3 --heads 2 --kv-heads 1 --head-size 16 --dtype float32 --repeats 3"
SMALL = Case(B=2, T=48, S=48, N=4, K=2, H=16, dtype="float32", causal=True)


@pytest.fixture
def peer(monkeypatch):
    """Adds a peer for one test: peer(name, attend, ...)."""

    def add(*args, **kw):
        monkeypatch.setattr(peers, "PEERS", [*peers.PEERS, peers.Contender(*args, **kw)])
        monkeypatch.setattr(benchmark, "PEERS", peers.PEERS)

    return add


def fake_gpu(put):
    """The scripts take the CPU for a GPU. `put` is monkeypatch.setattr, or setattr in a worker."""
    put(machine, "on_gpu", lambda: True)
    put(machine, "_query", lambda names: ["no-such-program"])
    # a GPU's size would take long
    matmul = ceilings.Ceiling("matmul", 1e12, "TFLOP/s", 1e12, Case.flops, "")
    put(ceilings, "of", lambda *args: matmul)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    fake_gpu(monkeypatch.setattr)
    tests = pathlib.Path(__file__).parent
    run = f"import sys; sys.path[:0] = {[str(tests), str(tests.parent)]}; "
    run += "import test_benchmark_workers; test_benchmark_workers.main()"
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-c", run])


@pytest.fixture
def run(tmp_path, capsys):
    """Runs it for implementations that ", " separates. Gives its rows {(T, passes, name): row} and
    what it printed."""

    def run(names: str, options: str = "", status: int = 0):
        names = ["--implementations", *names.split(", ")]
        arguments = [*TINY.split(), *names, *shlex.split(options), "--out", str(tmp_path / "run")]
        assert benchmark.main(arguments) == status
        rows = json.loads((tmp_path / "run" / "benchmark.json").read_text())["rows"]
        by_key = {(row["case"]["T"], row["passes"], row["name"]): row for row in rows}
        return by_key, capsys.readouterr().out

    return run


def xla(case, q, k, v):
    return peers.contender("jax.nn/xla").attend(SMALL, q, k, v)


def raises(case, q, k, v):
    raise RuntimeError(f"no kernel for {q.shape[1]} queries")


def lines(printed: str, *words):
    return [line for line in printed.splitlines() if all(word in line for word in words)]


# ---- a run ----


def test_a_run_prints_a_header_and_tables_and_writes_every_time(run):
    rows, printed = run("blockwise, jax.nn/xla")
    header = (
        "device versions peers missing commit date inputs times clock matmul ratio flops memory "
        "error plan"
    )
    for name in header.split():
        assert re.search(rf"^{name} +\S", printed, re.MULTILINE), name
    assert len(rows) == 2 * 2 and "| GFLOP/s | of a matmul's |" in printed
    for (_, passes, name), row in rows.items():
        assert (row["status"], row["clock"], len(row["seconds"])) == ("ok", "wall", 3)
        assert row["error"] < 1e-5 and row["temporary_bytes"] > 0 and row["case"]["K"] == 1
        assert row["median"] == sorted(row["seconds"])[1]
        ratio = row["median"] / rows[67, passes, "blockwise"]["median"]
        speed = row["tflops"] * 1e3
        ceiling = row["tflops"] * 1e12 / ceilings.matmul("float32", clock.WALL).speed
        cells = (
            rf"{re.escape(passes)} +\| {name} .*\| {ratio:.2f} +\| {speed:.3g} +\| {ceiling:.0%} "
        )
        assert re.search(rf"^\| B3 T67 N2/1 H16 float32 causal \| {cells}", printed, re.MULTILINE)
    _, _, table = printed.partition("above 1, pallas_flash is faster")
    ratio = rows[67, PASSES[2], "jax.nn/xla"]["median"] / row_of_ours(rows)["median"]
    assert re.search(rf"^\| .* \| forward\+backward \| blockwise +\| {ratio:.2f} ", table, re.M)


def row_of_ours(rows):
    return rows[67, PASSES[2], "blockwise"]


def test_results_are_never_overwritten(tmp_path, monkeypatch):
    (tmp_path / "benchmark.json").write_text("measured")
    message = r"error: --out must be a folder without results; .* Choose another"
    with pytest.raises(SystemExit, match=message):
        benchmark.main([*TINY.split(), "--out", str(tmp_path)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("benchmark.json", "measured")
    ]
    monkeypatch.chdir(tmp_path)
    folders = [str(new_folder(None, "benchmark")) for _ in range(2)]
    assert folders == ["runs/benchmark-1", "runs/benchmark-2"]


def test_pytorch_is_a_peer_on_the_cpu(run):
    pytest.importorskip("torch")
    rows, _ = run("blockwise, torch", f"--passes {' '.join(PASSES)}")
    assert all(rows[67, passes, "torch"]["median"] > 0 for passes in PASSES)


def test_without_rounds_it_compiles_and_runs_nothing(run):
    rows, _ = run("blockwise, jax.nn/xla", "--repeats 0")
    for row in rows.values():
        assert row["status"] == "ok" and row["temporary_bytes"] > 0 and not row["seconds"]


def test_features_are_timed_by_name_without_peers(run):
    options = "--features 'a bias' sinks --passes forward --repeats 1"
    rows, printed = run("blockwise, jax.nn/xla", options)
    status = [(row["status"], row["reason"]) for row in rows.values()]
    assert status == [("ok", ""), ("not run", "pallas_flash alone is timed with a bias, sinks")]
    assert lines(printed, "causal with a bias, sinks | forward | blockwise ")


@pytest.mark.whole
def test_the_backward_is_timed_alone_and_has_its_own_flops(run):
    rows, _ = run("blockwise", f"--passes {' '.join(PASSES)}")
    assert [passes for _, passes, _ in rows] == list(PASSES)
    forward, backward, both = (row["tflops"] * row["median"] for row in rows.values())
    assert backward == pytest.approx(2.5 * forward) and both == pytest.approx(3.5 * forward)
    o, gradients, worst = (row["error"] for row in rows.values())
    # XLA may round otherwise in one program
    assert o != gradients and worst == pytest.approx(max(o, gradients), rel=0.1)


@pytest.mark.whole
def test_decoding_is_timed_beside_the_bytes_of_a_copy(run, monkeypatch):
    copy = ceilings.copy
    monkeypatch.setattr(ceilings, "copy", lambda *args: copy(*args)._replace(speed=1e9))
    rows, printed = run(
        "blockwise, jax.nn/xla, decode_attention",
        "--cases decode --batch 2 --lengths 300 --heads 4 --kv-heads 2 --repeats 2",
    )
    assert [(T, row["case"]["S"], passes) for (T, passes, _), row in rows.items()] == [
        (1, 300, "forward")
    ] * 3
    ours, _, gqa = rows.values()
    assert (gqa["status"], gqa["reason"]) == ("not run", "it needs a GPU")
    caches, rest = 2 * 2 * 300 * 2 * 16 * 4, 2 * 2 * 4 * 16 * 4
    rate = (caches + rest) / ours["median"] / 1e9
    cells = rf"forward \| blockwise .*\| {rate:.3g} +\| {rate:.0%} "
    assert re.search(rf"^\| B2 T1 S300 N4/2 H16 float32 full \| {cells}", printed, re.MULTILINE)


def the_suite(monkeypatch, *cases: Case):
    suite = benchmark.CASES["suite"]._replace(make=lambda args: list(cases))
    monkeypatch.setitem(benchmark.CASES, "suite", suite)


@pytest.mark.whole
def test_on_a_gpu_it_falls_back_to_the_wall_clock_out_loud(
    tmp_path, capsys, monkeypatch, as_on_a_gpu
):
    the_suite(monkeypatch, SMALL)
    names = [
        "--implementations",
        "hopper",
        "hopper deterministic",
        "jax.nn/xla",
        "--dtype",
        "float32",
    ]
    assert benchmark.main([*names, "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    # the forward of "hopper deterministic" is that of hopper
    assert re.search(r"^plan +1 cases, 5 rows; no case begins after 450 s$", printed, re.MULTILINE)
    assert re.search(r"^clock +wall: the profiler saw nothing run on a GPU", printed, re.MULTILINE)
    assert re.search(r"^gpu +unknown: nvidia-smi gave no answer", printed, re.MULTILINE)
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    for row in rows:
        is_ours = row["name"].startswith("hopper")
        assert row["status"] == ("not run" if is_ours else "ok"), row["reason"]
        assert row["clock"].startswith("wall: ") == (row["status"] == "ok")


def test_out_of_time_no_case_begins_and_the_report_says_so(run, monkeypatch):
    now = iter(range(0, 10**6, 40))
    monkeypatch.setattr(bench_run, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    rows, printed = run("jax.nn/xla", "--lengths 16 32 48 --repeats 1 --budget 60")
    status = {T: row["status"] for (T, _, _), row in rows.items()}
    assert status[16] == "ok" and status[48] == "not run"
    assert len(lines(printed, "rows not run, out of time: the budget is 60 s: of", "T48")) == 1
    assert not lines(printed, "| not run")


def test_interrupted_it_prints_the_tables_of_what_was_measured(run, monkeypatch):
    def measure_(contenders, case, passes, *args):
        if case.T == 48:
            raise KeyboardInterrupt
        return [measure.Row(case, name, contenders[0].name, seconds=[1.0]) for name in passes]

    monkeypatch.setattr(bench_run, "measure", measure_)
    rows, printed = run("jax.nn/xla", "--lengths 32 48 64 --passes forward")
    assert [row["status"] for row in rows.values()] == ["ok", "not run", "not run"]
    assert len(lines(printed, "T32", "| 1,000 ")) == 1
    reason = "2 rows not run, out of time: the run ended before: of B3 T48"
    assert len(lines(printed, reason, "T64")) == 1


def test_where_nothing_ran_it_says_so_and_ends_with_status_1(run):
    _, printed = run("jax.nn/cudnn", "--full", status=1)
    *_, reason, nothing, _, _ = printed.splitlines()
    assert reason.startswith("not run    jax.nn/cudnn, forward, forward+backward, ")
    assert reason.endswith("full: it needs a GPU") and nothing == "nothing ran"


# ---- peers that are absent, wrong, or raise ----


def wrong_in_its_last_row(case, q, k, v):
    o = xla(case, q, k, v)
    return o.at[:, -1].set(jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)[:, -1])


@pytest.mark.whole
def test_a_wrong_result_is_reported_and_not_timed(peer, run):
    peer("careless", wrong_in_its_last_row)
    rows, printed = run("careless", "--dtype bfloat16", status=1)
    for (_, passes, _), row in rows.items():
        assert row["status"] == "wrong" and not row["seconds"] and "o is off by" in row["reason"]
        assert ("dq is off by" in row["reason"]) == (passes == "forward+backward")
    assert len(lines(printed, "wrong", "careless", "o is off by", "the tolerance is")) == 2


def test_a_wrong_gradient_is_enough(peer, run):
    peer("stopped", lambda case, q, k, v: xla(case, q, lax.stop_gradient(k), v))
    rows, _ = run("stopped", f"--passes {' '.join(PASSES)}", status=1)
    status = {passes: row["status"] for (_, passes, _), row in rows.items()}
    assert status == {"forward": "ok", "backward": "wrong", "forward+backward": "wrong"}


def test_what_raises_is_reported_with_its_error_and_the_others_are_timed(peer, run):
    def cannot(case, q, k, v):
        raise NotImplementedError("no such mask yet")

    peer("broken", raises)
    peer("unfinished", cannot, note="compiled without care")
    rows, printed = run("blockwise, broken, unfinished", status=1)
    assert rows[67, "forward", "broken"]["reason"] == "RuntimeError: no kernel for 67 queries"
    assert rows[67, "forward", "unfinished"]["reason"] == "no such mask yet"
    status = dict(blockwise="ok", broken="failed", unfinished="not run")
    assert all(row["status"] == status[name] for (*_, name), row in rows.items())
    assert len(lines(printed, "failed", "broken", "RuntimeError: no kernel for")) == 1
    # what a reader of a peer's times must know stands above them
    assert lines(printed, "unfinished", "compiled without care")[0].startswith("unfinished")


def test_a_peer_that_is_not_installed_is_named_and_left_out(peer, run):
    peer("elsewhere", xla, modules=("json", "no_such_module"))
    rows, printed = run("jax.nn/xla, elsewhere")
    assert {name for *_, name in rows} == {"jax.nn/xla"}
    assert lines(printed, "missing", "elsewhere not installed: no module no_such_module")


def test_what_would_not_fit_into_memory_is_not_run(monkeypatch, run):
    monkeypatch.setattr(programs, "memory_limit", lambda: 10**6)
    _, printed = run("jax.nn/xla", "--lengths 1024", status=1)
    assert len(lines(printed, "not run", "jax.nn/xla", "over the limit of 0.0 GB")) == 1


# ---- what goes wrong while it is measured ----


def program(call):
    return programs.Program(call, lambda started: started, list)


def test_one_that_raises_while_it_is_timed_costs_its_own_cell_alone():
    calls = []

    def call():
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("an illegal memory access was encountered")

    ours, broken = (measure.Row(SMALL, "forward", name) for name in ("ours", "broken"))
    together = {"ours": (ours, program(lambda: None)), "broken": (broken, program(call))}
    measure._time(together, 3, clock.WALL)
    assert (ours.status, len(ours.seconds)) == ("ok", 3)
    assert (broken.status, broken.seconds) == ("failed", [])
    assert broken.reason == "RuntimeError: an illegal memory access was encountered"


def test_nvidia_smi_that_does_not_answer_is_no_end(monkeypatch):
    def hangs(command, timeout, **kw):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.limits() == "unknown: nvidia-smi gave no answer (TimeoutExpired)"


# ---- arguments ----


WRONG = {  # arguments: what is said
    "benchmark --implementations fast": "got 'fast'. Or one of jax.nn/xla",
    "benchmark --implementations 'hopper slow'": (
        "nothing, deterministic, fused or varlen; got 'hopper slow'."
    ),
    "benchmark --implementations 'hopper: dq'": "as dq.stages=2, fused.block_q=64; got 'dq'.",
    "benchmark --heads 3 --kv-heads 2": ("--heads must be a multiple of --kv-heads; got 3 and 2."),
    "benchmark --lengths 0": "must be at least 1; got 0",
    "benchmark --cases suite --full --heads 2": (
        "the suite has its own shapes; leave out --heads, --causal or --full"
    ),
    "benchmark --features 'a score_mod' 'arrays of a score_mod'": "a call has one score_mod",
    "experiments forward": "NAME must be one of backward-16384, ",
    "experiments --dry --once": "argument --once: not allowed with argument --dry",
    "experiments": "experiments.py: error: there is no GPU here; --dry goes without.",
    "tune --sweep block_k=fast": (
        "must be FIELD=VALUE,VALUE with whole numbers, as block_k=64,128; got 'block_k=fast'"
    ),
    "tune --full --window 3": "--window is causal; leave out --full.",
    "tune --implementation blockwise": "invalid choice: 'blockwise'",
    "tune": "tune.py: error: there is no GPU here to tune for",
}


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_argument_is_explained(typed, capsys):
    script, *arguments = shlex.split(typed)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"scripts.{script}").main(arguments)
    code, printed = ended.value.code, capsys.readouterr().err
    assert WRONG[typed] in (printed if code == 2 else code) and "\n" not in str(code)


def test_a_machine_and_a_list_of_cases_have_their_defaults(as_on_a_gpu, monkeypatch):
    assert benchmark.parse([]).cases == benchmark.parse(["--quick"]).cases == "suite"
    assert benchmark.parse(["--lengths", "512"]).cases == "lengths"
    names = benchmark.parse([]).implementations
    assert names[:2] == ["hopper", "hopper deterministic"]
    assert {peer.name for peer in peers.PEERS} < set(names)
    monkeypatch.setattr(machine, "on_gpu", lambda: False)
    assert benchmark.parse(["--cases", "decode"]).batch == [1, 8]
    assert benchmark.parse(["--quick", "--repeats", "7"]).repeats == 7
    assert benchmark.parse(["--quick"]).repeats == 3 and benchmark.parse([]).repeats == 9
