"""scripts/experiments.py as its user meets it; and each of its variants, as far as it can be known
without a GPU."""

import json

import pytest
import test_benchmark
from decoding import needs_interpreter
from test_benchmark import SMALL, lines

from pallas_flash.accounting import GPUS
from pallas_flash.kernels.mosaic import scheduler
from scripts import experiments
from scripts.bench import gpu_code, peers, workers
from scripts.experiments import EXPERIMENTS, Experiment

as_on_a_gpu = test_benchmark.as_on_a_gpu


@pytest.fixture
def small(monkeypatch):
    names = ["blockwise", "blockwise: dq.stages=2", "jax.nn/xla"]
    monkeypatch.setattr(
        experiments, "EXPERIMENTS", dict(small=Experiment(SMALL, "backward", names, "nothing"))
    )


@pytest.mark.whole
def test_variants_are_timed_beside_peers_and_what_has_no_field_is_left_out(
    small, as_on_a_gpu, tmp_path, capsys
):
    assert experiments.main(["--repeats", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert lines(printed, "small", str(SMALL), "backward; it decides: nothing")
    rows = json.loads((tmp_path / "experiments.json").read_text())["rows"]
    found = {row["name"]: (row["status"], len(row["seconds"]), row["reason"]) for row in rows}
    assert found == {
        "blockwise": ("ok", 2, ""),
        "blockwise: dq.stages=2": ("not run", 0, "its tiles have no kernel dq"),
        "jax.nn/xla": ("ok", 2, ""),
    }
    assert lines(printed, "blockwise", "| backward | blockwise ")


def test_a_process_that_dies_costs_its_own_pass_of_a_case_alone(as_on_a_gpu, monkeypatch, tmp_path):
    def in_a_process(order, left, keep, log):
        if order["passes"] == ["backward"]:
            raise workers.Lost("its process ended with SIGSEGV", True)

    monkeypatch.setattr(workers, "in_a_process", in_a_process)
    two = {name: Experiment(SMALL, name, ["blockwise"], "") for name in ("forward", "backward")}
    monkeypatch.setattr(experiments, "EXPERIMENTS", two)
    assert experiments.main(["--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "experiments.json").read_text())["rows"]
    status = {row["passes"]: (row["status"], row["reason"]) for row in rows}
    assert status["backward"] == ("failed", "its process ended with SIGSEGV; see case-2.txt")
    assert status["forward"][0] == "not run"


def test_for_a_profiler_each_contender_runs_twice(small, capsys, monkeypatch):
    called = []
    program = experiments.programs.program

    def counted(*args):
        one = program(*args)
        return one._replace(call=lambda: called.append(args[0].name) or one.call())

    monkeypatch.setattr(experiments.programs, "program", counted)
    assert experiments.main(["--once"]) == 0
    assert called == ["blockwise"] * 2 + ["jax.nn/xla"] * 2
    printed = capsys.readouterr().out
    assert lines(printed, "blockwise: dq.stages=2: not run: its tiles have no kernel dq")


def test_what_raises_is_printed_and_the_others_go_on(small, capsys, monkeypatch):
    def traced(one, *args):
        raise ValueError("exceeds available shared memory")

    monkeypatch.setattr(experiments.programs, "traced", traced)
    assert experiments.main(["--dry"]) == 1
    failed, left_out, peer = capsys.readouterr().out.splitlines()
    assert "blockwise: failed: ValueError: exceeds available shared memory" in failed
    assert "not run" in left_out and "a peer, which is installed" in peer


# ---- the experiments ----


def test_no_two_experiments_time_the_same_pass_of_a_case():
    timed = {(one.contenders[0], one.case, one.passes) for one in EXPERIMENTS.values()}
    assert len(timed) == len(EXPERIMENTS)


@needs_interpreter
@pytest.mark.parametrize("kernels, gpu", [("hopper", "H200"), ("blackwell", "B200")])
def test_on_its_gpu_every_variant_can_run_unless_it_is_the_default(kernels, gpu):
    refused = {}
    with gpu_code.as_if_on(GPUS[gpu]):
        for experiment in getattr(experiments, kernels.upper()).values():
            ours = [name for name in experiment.contenders if name.startswith(kernels)]
            reasons = (peers.contender(name).why_not(experiment.case) for name in ours)
            refused |= dict(zip(reasons, ours, strict=True))
    same = {f"the {what} are the same by default" for what in ("tiles", "kernels")}
    assert refused.keys() <= {None, *same}, refused


@needs_interpreter
def test_by_default_a_gpu_has_the_experiments_of_its_kernels():
    for gpu, own in dict(H100=experiments.HOPPER, B300=experiments.BLACKWELL).items():
        with gpu_code.as_if_on(GPUS[gpu]):
            assert experiments.of_this_machine() == [*own]


@needs_interpreter
def test_dry_lowers_the_variants_for_a_gpu_that_is_not_here(capsys):
    assert experiments.main(["backward-512", "--dry"]) == 0
    printed = capsys.readouterr().out
    assert len(lines(printed, "backward-512", "hopper", ": lowers; ")) == 3


@needs_interpreter
def test_the_kernel_has_the_section_that_the_experiment_of_l2_gives_it(monkeypatch):
    asked, section = set(), scheduler._section
    monkeypatch.setattr(scheduler, "_section", lambda *x: asked.add(x[3]) or section(*x))
    experiment = EXPERIMENTS[f"{experiments.TCGEN05}-l2"]
    with gpu_code.as_if_on(GPUS["B200"]):
        for one in map(peers.contender, experiment.contenders[:2]):
            (traced,) = experiments.programs.traced(one, experiment.case, experiment.passes)
            traced.lower(lowering_platforms=("cuda",))
    assert asked == {None, 45 << 20}
