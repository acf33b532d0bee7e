"""python -m pallas_flash."""

import pathlib
import sys

import fakes
import jax
import pytest
from selection import whole_but

from pallas_flash import explain
from pallas_flash.__main__ import main, print_machine
from pallas_flash.accounting import GPUS
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import records, trial, verdicts
from pallas_flash.jax_support import hardware
from scripts.bench import gpu_code

pytestmark = pytest.mark.usefixtures("verdict_folder")


@pytest.fixture
def with_fakes(install, monkeypatch):
    """Processes that know the fakes, as this one does."""
    install(*fakes.FORWARDS)
    tests = str(pathlib.Path(__file__).parent)
    run = f"import sys; sys.path[:0] = [{tests!r}]; import fakes; fakes.main()"
    monkeypatch.setattr(trial, "COMMAND", [sys.executable, "-c", run])


@pytest.mark.whole
def test_the_command_tells_right_from_wrong_crashed_and_failed_and_records_what_lasts(
    with_fakes, capsys
):
    names = "honest", "liar", "crasher", "raiser"
    assert main(["--implementations", *names, "--dtypes", "float32", "--head-sizes", "64"]) == 1
    out, told = capsys.readouterr()
    assert told.startswith("0 of 4 done; compiles and runs honest 64/64 float32")
    assert "\n3 of 4 done; compiles and runs raiser 64/64 float32" in told
    rows = {
        name: line
        for name in names
        for line in out.splitlines()
        if line.startswith(f"{name} 64/64 float32")
    }
    assert rows["honest"].endswith(" right") and " ms " in rows["honest"]
    assert "WRONG: dk is off by" in rows["liar"]
    assert rows["crasher"].endswith("WRONG: its process died of SIGABRT")
    assert rows["raiser"].endswith("NOT CHECKED: RuntimeError: ptxas fell over")
    assert f"1 of 4 are right. Recorded in {records.folder()}." in out
    found = {
        name: records.read(fakes.VARIANT._replace(implementation=name), fakes.GPU) for name in names
    }
    assert (
        found["honest"]["wrong"] is None
        and "SIGABRT" in found["crasher"]["wrong"]
        and found["raiser"] is None
    )


CASE = trial.Case("honest", 64, 64, "float32", *trial.SHORT[0])
RIGHT = "print(json.dumps([[{}, None, None], 1, 2]))"
FOUND = {  # by what a process does
    f"print('compiling'); time.sleep(2.5); print('ready', flush=True); input(); {RIGHT}": None,
    "print('ready', flush=True); time.sleep(60)": "wrong on this machine: its check did not finish "
    "within 2 s",
    "print(json.dumps([[{}, 'refused', None]]))": "wrong on this machine: refused",
    "os.abort()": "wrong on this machine: its process died of SIGABRT",
    "os.kill(os.getpid(), 9)": "not checked on this machine: its process died of SIGKILL, which "
    "others send: a system short of "
    "memory, say",
    "print('ready', flush=True); input(); exit('no more')": "not checked on this machine: no more",
    "print('ready', flush=True); input(); exit('CUDA_ERROR_ILLEGAL_ADDRESS')": "wrong on this "
    "machine: its kernels fault: CUDA_ERROR_ILLEGAL_ADDRESS",
}


def processes(monkeypatch, code: str):
    monkeypatch.setattr(
        trial, "COMMAND", [sys.executable, "-c", f"import json, os, sys, time; {code}"]
    )


@pytest.mark.parametrize("code", whole_but(FOUND, *(code for code in FOUND if "sleep" not in code)))
def test_a_process_is_ended_where_it_hangs_and_only_what_lasts_is_its_verdict(code, monkeypatch):
    processes(monkeypatch, code)
    assert trial.in_a_process(CASE, limit=2).verdict.why_not == FOUND[code]


@pytest.mark.whole
def test_several_processes_compile_at_a_time_and_one_runs(monkeypatch, tmp_path):
    log = tmp_path / "log"
    note = lambda word: f"open({str(log)!r}, 'a').write('{word} '); time.sleep(0.3)"
    processes(
        monkeypatch,
        f"{note('compile')}; print('ready', flush=True); input(); {note('run')}; {note('end')}; "
        f"{RIGHT}",
    )
    found = list(trial.findings([CASE] * 3, limit=60, jobs=3))
    assert [finding.verdict.why_not for finding in found] == [None] * 3
    words = log.read_text()
    assert words.count("run end") == 3 and words.startswith("compile compile compile")


@pytest.mark.parametrize(
    "gpu, mosaic", [("A100-80GB", "ampere"), ("H100", "hopper"), ("B200", "blackwell")]
)
def test_by_default_a_gpu_checks_what_most_calls_need_within_minutes(gpu, mosaic):
    with gpu_code.as_if_on(GPUS[gpu]):
        has_mosaic = jax.__version_info__ >= (0, 11, 2)
        assert trial.default_names() == [mosaic] * has_mosaic + ["triton"]
        found, _ = trial.cases([mosaic, "triton"], None, ["bfloat16"], False)
    assert len(found) * trial.SECONDS / 8 <= 180
    needed = {
        f"triton {H}/{H} bfloat16, deterministic{more}"
        for H in (32, 64, 128)
        for more in ("", ", decoding")
    }
    assert needed <= {str(variant) for variant in found}


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="an older jax lacks the kernels")
@pytest.mark.parametrize("flags", ["", "--xla_gpu_deterministic_ops"])
@pytest.mark.parametrize("length", [1, 4096])
def test_it_checks_the_order_in_which_a_call_adds_by_default(length, flags, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), "bfloat16") for n in (length, 4096))
    with gpu_code.as_if_on(GPUS["H100"]):
        found, _ = trial.cases(["hopper"], [(128, 128)], ["bfloat16"], False)
        variant = verdicts.variant_of(implementations.find("hopper"), explain(q, k, k).problem)
    assert variant in found
    assert variant.scheme.startswith("deterministic" if flags else "in any order")


def test_the_command_says_what_is_taken_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setattr(trial, "in_a_process", lambda case, limit: trial.Finding(verdicts.TRUSTED))
    monkeypatch.setattr(hardware, "compute_capability", lambda: None)
    assert main(["--implementations", "hopper"]) == 1  # there is nothing that it could run
    out = capsys.readouterr().out
    assert "hopper is not here: it needs " in out and "0 of 0 are right." in out
    if jax.default_backend() == "cpu":
        assert out.count("takes  blockwise\n") == 5
    assert main(["--all", "--implementations", "blockwise", "--head-sizes", "64", "192/128"]) == 0
    assert "blockwise 192/128 bfloat16, deterministic, dropout  " in capsys.readouterr().out


CUDA13, CUDA12 = "jax-cuda13-plugin", "jax-cuda12-plugin"


@pytest.mark.parametrize(
    "driver, plugins, environment, told",
    [
        ("unknown", [], {}, "no NVIDIA driver is loaded here; for an NVIDIA GPU pip install "),
        ("580.65.06", [], {}, "driver 580.65.06 is loaded, but jax has no plugin for CUDA: pip "),
        ("535.104.05", [CUDA13], {}, f"{CUDA13} needs a newer driver than 535.104.05: pip install"),
        ("535.104.05", [CUDA12], {}, f"{CUDA12} did not start with driver 535.104.05: it broke\n"),
        ("580.65.06", [CUDA13], {}, f"{CUDA13} did not start with driver 580.65.06: it broke\n"),
        ("580.65.06", [CUDA13], dict(CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES='-1' hides"),
        ("580.65.06", [CUDA13], dict(JAX_PLATFORMS="cpu"), "JAX_PLATFORMS=cpu names none; unset"),
    ],
)
def test_the_command_says_why_there_is_no_gpu_and_what_to_do(
    driver, plugins, environment, told, capsys, monkeypatch
):
    fakes.unplug(monkeypatch.setattr, driver, plugins, "it broke\nand so on")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", environment.get("JAX_PLATFORMS"))
    try:
        print_machine()
    finally:
        jax.config.update("jax_platforms", before)
    assert f"\nno GPU: {told}" in capsys.readouterr().out


def test_the_command_misses_no_gpu_where_there_is_one(capsys, monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device())
    print_machine()
    assert "no GPU" not in capsys.readouterr().out


def test_the_command_says_which_flag_makes_gradients_deterministic(capsys, monkeypatch):
    for flag in ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops"):
        monkeypatch.setenv("XLA_FLAGS", f"{flag}=true")
        print_machine()
        assert f"\nXLA_FLAGS has {flag}: gradients are bitwise" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "64/600", "wide"])
def test_a_bad_head_size_has_a_clear_error(text, capsys):
    with pytest.raises(SystemExit):
        main(["--head-sizes", text])
    assert "--head-sizes: " in capsys.readouterr().err
