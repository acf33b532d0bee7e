"""scripts/benchmark.py on a GPU, which is not there: a process for each case."""

import os
import time

import jax
import pytest
import test_benchmark
from test_benchmark import SMALL, fake_gpu, lines, xla

from scripts import benchmark
from scripts.bench import clock, measure, peers, programs, workers
from scripts.bench.cases import Case
from scripts.bench.run import GRACE

run, as_on_a_gpu = test_benchmark.run, test_benchmark.as_on_a_gpu


def foreign(case, q, k, v):
    """Crashes as it compiles, crashes or hangs as it runs, or is right, by the length."""
    act = {32: os.abort, 48: lambda: time.sleep(3600)}.get(case.T, lambda: None)
    if case.T == 16:
        os.abort()
    print("not of the protocol")
    return jax.pure_callback(lambda o: (act(), o)[1], *[xla(case, q, k, v)] * 2)


def install(put):
    one = peers.Contender("foreign", foreign, modules=("json",), passes=("forward",))
    put(peers, "PEERS", [*peers.PEERS, one])
    put(benchmark, "PEERS", peers.PEERS)


def main():
    """What a worker of these tests runs."""
    fake_gpu(setattr)
    install(setattr)
    raise SystemExit(benchmark.main())


@pytest.mark.whole
def test_a_case_that_crashes_or_hangs_costs_what_was_not_yet_measured_of_it(
    run, as_on_a_gpu, monkeypatch, tmp_path
):
    install(monkeypatch.setattr)
    monkeypatch.setattr(workers, "RUN", 5)
    options = "--lengths 16 32 48 64 --passes forward --repeats 1 --jobs 2"
    rows, printed = run("jax.nn/xla, foreign", options, status=1)
    for T in (16, 32, 48, 64):
        safe = rows[T, "forward", "jax.nn/xla"]
        assert safe["status"] == "ok" and len(safe["seconds"]) == 1, safe
    reasons = {T: rows[T, "forward", "foreign"]["reason"] for T in (16, 32, 48)}
    assert reasons == {
        16: "its process ended with SIGABRT, compiling foreign, forward; see case-1.txt",
        32: "its process ended with SIGABRT, checking foreign, forward; see case-2.txt",
        48: "its process hangs, 15 s of checking foreign, forward; see case-3.txt",
    }
    assert len(lines(printed, "failed", "foreign, forward")) == 3
    assert len(rows[64, "forward", "foreign"]["seconds"]) == 1
    logs = [(tmp_path / "run" / f"case-{i}.txt").read_text() for i in (1, 2, 3, 4)]
    # where it crashed, and where it hangs
    assert all("most recent call first" in log for log in logs[:3])
    assert logs[3] == "not of the protocol\n"


def test_out_of_time_cases_are_not_run_and_are_one_line(run, as_on_a_gpu, monkeypatch):
    def in_a_process(job, left, keep, log):
        assert left(True) > 200 + left(False) - GRACE and left(False) < 100
        if job["case"].T != 16:
            raise workers.Lost(None, False)
        keep([measure.Row(job["case"], "forward", "jax.nn/xla", seconds=[1.0])])

    monkeypatch.setattr(workers, "in_a_process", in_a_process)
    options = "--lengths 16 32 48 --passes forward --budget 90"
    rows, printed = run("jax.nn/xla, jax.nn/cudnn", options)
    assert [row["status"] for row in rows.values()] == ["ok", *["not run"] * 5]
    (line,) = lines(printed, "out of time: the budget is 90 s")
    assert line.startswith("5 rows not run, ") and all(f"T{T} " in line for T in (16, 32, 48))
    assert len(lines(printed, "| forward |")) == 1


def test_on_a_gpu_ours_are_timed_before_foreign_code_runs_and_keep_their_times(
    as_on_a_gpu, monkeypatch
):
    timed, steps = [], []

    def timing(programs, rounds, time_by):
        timed.append([*programs])
        for name in programs if len(timed) > 1 else ():
            raise clock.Failed(name) from RuntimeError("as was encountered before")
        return clock.Timing({name: [1.0] for name in programs}, time_by, {})

    monkeypatch.setattr(clock, "timing", timing)
    contenders = [peers.Contender("foreign", xla, modules=("json",)), peers.contender("blockwise")]
    say = lambda step, rows: steps.append(step)
    rows = measure.measure(contenders, SMALL, ["forward"], 1, 1, clock.WALL, say)
    assert timed[:2] == [["blockwise"], ["foreign", "blockwise"]]
    assert [(row.status, row.seconds) for row in rows] == [("failed", []), ("ok", [1.0])]
    what = [step.partition(",")[0] for step in steps]
    assert what.index("checking foreign") > what.index("timing blockwise")
    assert max(map(what.count, {*what})) == 1, "a program is compiled and checked once"


def test_a_reference_that_fails_is_no_failure_of_the_first_contender(monkeypatch):
    def fails(*args, **kw):
        raise RuntimeError("NOT_FOUND: Failed to get configs")

    monkeypatch.setattr(programs, "DENSE", peers.Contender("dense", fails))
    programs.expected.cache_clear()
    case = Case(1, 24, 24, 1, 1, 16, "float32", True)
    (row,) = measure.measure([peers.contender("jax.nn/xla")], case, ["forward"], 1, 1, clock.WALL)
    assert row.status == "failed" and row.reason == (
        "the dense reference, by which it is checked, failed: RuntimeError: NOT_FOUND: Failed to "
        "get configs"
    )


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_reference_alone_is_compiled_without_autotuning_on_a_gpu(on_gpu, monkeypatch):
    given = []

    def compile_(self, compiler_options=None):
        given.append(compiler_options)

    monkeypatch.setattr(programs.machine, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    case = Case(1, 8 + on_gpu, 8, 1, 1, 16, "float32", False)
    programs.reference(case, "forward")
    programs.compiled(peers.contender("jax.nn/xla"), case, "forward")
    assert given == [{"xla_gpu_autotune_level": "0"} if on_gpu else None, None]
