"""What an error in the self-check says of kernels, and what a process leaves that ends in it."""

import glob
import os
import pathlib
import signal
import socket
import subprocess
import sys

import fakes
import jax
import pytest
from fakes import call, explained

from pallas_flash.choose.selfcheck import (
    attempts,
    comparison,
    outcome,
    records,
    trial,
    verdicts,
)
from pallas_flash.jax_support import jax_internals

pytestmark = pytest.mark.usefixtures("verdict_folder")
NAME = "CUDA_ERROR_"
ILLEGAL = f"INTERNAL: Failed to synchronize: {NAME}ILLEGAL_ADDRESS: an illegal memory access"
PTXAS = "INTERNAL: ptxas exited with non-zero error code 65280, output: ptxas"


# ---- errors ----

FAULT, REFUSED, UNKNOWN = "its kernels fault: ", "the compiler rejects it: ", None
MEANS = {  # an error: what it says of kernels
    ILLEGAL: FAULT,
    **{
        f"INTERNAL: CUDA error: {NAME}{name}: so it is": FAULT
        for name in (
            "MISALIGNED_ADDRESS ILLEGAL_INSTRUCTION LAUNCH_FAILED INVALID_ADDRESS_SPACE INVALID_PC "
            "HARDWARE_STACK_ERROR LAUNCH_TIMEOUT ASSERT TENSOR_MEMORY_LEAK"
        ).split()
    },
    f"{PTXAS} fatal   : Value 'sm_103a' is not defined for option 'gpu-name'": REFUSED,
    f"{PTXAS} /tmp/x, line 1; error   : no\nptxas fatal   : Ptx assembly aborted": REFUSED,
    "INTERNAL: ptxas error   : Entry function uses too much shared data": REFUSED,
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 107008": REFUSED,
    "UNIMPLEMENTED: no such layout": REFUSED,
    f"INTERNAL: cuModuleLoadData failed: {NAME}UNSUPPORTED_PTX_VERSION: the provided": REFUSED,
    f"INTERNAL: CUDA error: {NAME}LAUNCH_OUT_OF_RESOURCES: too many resources": REFUSED,
    f"{PTXAS} fatal   : Memory allocation failure": UNKNOWN,
    f"{PTXAS} fatal   : Could not open output file '/tmp/x'\nptxas fatal   : so it": UNKNOWN,
    "INTERNAL: ptxas exited with non-zero error code 9, output: ": UNKNOWN,  # it was killed
    "INTERNAL: Failed to find ptxas": UNKNOWN,
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.79GiB.": UNKNOWN,
    f"INTERNAL: Failed to allocate: {NAME}OUT_OF_MEMORY: out of memory": UNKNOWN,
    # any call of the driver may say it
    f"INTERNAL: CUDA error: Failed to launch: {NAME}INVALID_VALUE: invalid argument": UNKNOWN,
    f"INTERNAL: CUDA error: {NAME}ECC_UNCORRECTABLE: uncorrectable": UNKNOWN,
    f"INTERNAL: CUDA error: {NAME}CONTAINED: invalid peer access or hardware error": UNKNOWN,
}
OF_OTHERS = "ECC_UNCORRECTABLE", "CONTAINED:"


@pytest.mark.parametrize("text", MEANS)
def test_what_kernels_cannot_help_is_unknown_and_other_errors_are_final(text):
    error = jax.errors.JaxRuntimeError(text)
    verdict = outcome.fails(error)
    if MEANS[text] is UNKNOWN:
        assert verdict.wrong is None and verdict.unknown.startswith("JaxRuntimeError: ")
    else:
        assert verdict.unknown is None and verdict.wrong.startswith(MEANS[text])
    is_lost = MEANS[text] == FAULT or any(name in text for name in OF_OTHERS)
    assert outcome.loses_gpu(error) == is_lost


def test_the_line_is_told_that_says_what_is_wrong():
    verdict = outcome.failed(f"INTERNAL: callback: Traceback:\n  a line\nError: {ILLEGAL}.\nmore")
    assert verdict.wrong == f"its kernels fault: Error: {ILLEGAL}"


def faulty(text: str):
    def fault():
        raise RuntimeError(text)

    return fakes.when_it_runs(fault)


@pytest.mark.parametrize("saves", [True, False])
def test_a_fault_is_recorded_and_ends_the_call_with_what_to_do(
    saves, install, checked, verdict_folder
):
    if not saves:
        verdict_folder.write_text("a file where the folder should be")
    then = "it will no longer take bad" if saves else "it checks again"
    install(fakes.fake("bad", faulty(ILLEGAL)), "honest")
    with pytest.raises(
        RuntimeError, match=f"ILLEGAL_ADDRESS.* Restart the process: {then}. PALLAS"
    ):
        call()
    if saves:
        install(fakes.fake("bad", faulty(ILLEGAL)), "honest")  # a new process
        with pytest.warns(
            RuntimeWarning, match="self-check of bad .* its kernels fault: .*ILLEGAL"
        ):
            call()
        assert checked == ["bad", "honest"] and explained().implementation == "honest"


def test_an_isolated_process_finds_that_kernels_fault(install):
    install(fakes.fake("bad", faulty(ILLEGAL)))
    found = trial.run_case(trial.Case("bad", 64, 64, "float32", *trial.SHORT[0]), lambda: None)
    assert found.verdict.wrong.startswith("its kernels fault: ")


def broken(*_):
    raise jax.errors.JaxRuntimeError(ILLEGAL)


@pytest.mark.parametrize("program", [broken, lambda *_: broken], ids=["compiles", "runs"])
def test_a_fault_of_what_ran_before_is_not_blamed_on_kernels(
    program, install, monkeypatch, verdict_folder
):
    """As in a notebook of which an earlier cell broke the GPU."""
    monkeypatch.setattr(comparison, "program", program)
    install("honest")
    with pytest.raises(RuntimeError, match=r"GPU failed before its kernels ran: .*: it checks"):
        call()
    assert not [*verdict_folder.iterdir()]


# ---- processes that end ----

RUN = f"""
import os, pathlib, signal, sys, threading, time
sys.path.insert(0, {str(pathlib.Path(attempts.__file__).parent)!r})
import attempts

may_exit = threading.Event()

def check():
    with attempts.begin(pathlib.Path(sys.argv[1])):
        print("begun", flush=True)
        input()
        eval(sys.argv[2])

if "may_exit" in sys.argv[2]:
    threading.Thread(target=check, daemon=True).start()
    may_exit.wait()
else:
    check()
"""
RECORD = "a-record.json"


@pytest.fixture
def begin(tmp_path):
    """Starts a process with an attempt, which does something when it is told to."""
    started = []

    def begin(act: str = "None"):
        command = [sys.executable, "-c", RUN, str(tmp_path / RECORD), act]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(command, **pipes, text=True)
        started.append(process)
        assert process.stdout.readline() == "begun\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def unfinished(tmp_path) -> int:
    """How many attempts, one after another, ended with their process."""
    last = attempts.unfinished(tmp_path / RECORD)
    return last.number if last else 0


RUNS = "time.sleep(9)"
ENDS = {  # a process in a check: whether that counts as one that was not finished
    "os.abort()": 1,
    "os.kill(os.getpid(), signal.SIGSEGV)": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": 1,
    "os._exit(1)": 1,
    "None": 0,
    "1 / 0": 0,
    "sys.exit(1)": 0,
    "os.kill(os.getpid(), signal.SIGINT)": 0,
    "(may_exit.set(), time.sleep(9))": 0,  # the main thread ends the process
    RUNS: 0,
}


@pytest.mark.parametrize("act", ENDS)
def test_an_attempt_is_unfinished_once_its_process_has_ended_in_it(act, begin, tmp_path):
    process = begin(act)
    assert unfinished(tmp_path) == 0
    process.stdin.write("\n")
    process.stdin.flush()
    if act != RUNS:
        process.wait()
    assert unfinished(tmp_path) == ENDS[act]
    assert len([*tmp_path.glob("*.attempt")]) == (ENDS[act] or act == RUNS)


def kill(*processes):
    for process in processes:
        process.kill()
        process.wait()


def test_attempts_at_the_same_time_count_as_one_and_those_after_them_as_more(begin, tmp_path):
    several = [begin() for _ in range(3)]
    kill(*several[:2])
    assert unfinished(tmp_path) == 1  # the third goes on
    kill(several[2], begin())
    assert unfinished(tmp_path) == 2
    attempts.forget(tmp_path / RECORD)
    assert unfinished(tmp_path) == 0


def test_what_another_host_does_not_lock_may_run_there_for_an_hour(begin, tmp_path, monkeypatch):
    kill(begin())
    monkeypatch.setattr(attempts, "_boot", lambda: "another")
    assert unfinished(tmp_path) == 0
    (path,) = tmp_path.glob("*.attempt")
    os.utime(path, (0, 0))
    assert unfinished(tmp_path) == 1


def test_what_is_no_attempt_counts_as_none(tmp_path):
    for number, text in enumerate(("", "{", "[]", '{"number": 3}')):
        (tmp_path / f"a-record.{number}.attempt").write_text(text)
    assert unfinished(tmp_path) == 0


CRASHES = """
import fakes

fakes.install(setattr, fakes.fake("crasher"), fakes.fake("honest"))
fakes.call()
"""


FOLDERS = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])


def crash() -> str:
    environment = os.environ | dict(PYTHONPATH=FOLDERS)
    run = [sys.executable, "-c", CRASHES]
    found = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert found.returncode == -signal.SIGABRT
    return found.stderr


def test_what_ended_two_processes_is_not_run_in_a_third(install, checked, caplog):
    install("crasher", "honest")
    key = fakes.VARIANT._replace(implementation="crasher", head_size=16, value_size=16), fakes.GPU
    assert "it ahead of time, in an isolated process" in crash()
    assert explained().implementation == "crasher" and records.unfinished(*key).number == 1
    assert "its last self-check ended with the process (process " in crash()
    with pytest.warns(
        RuntimeWarning, match="crasher .* ended the process 2 times, .* checks again"
    ):
        call()
    assert checked == ["honest"] and records.read(*key) is None
    files = explained().why_not["crasher"].partition(" delete ")[2]
    assert len(glob.glob(files)) == 2
    verdicts.record(*key, verdicts.TRUSTED)  # of python -m pallas_flash
    install("crasher", "honest")
    assert explained().implementation == "crasher" and explained().condition is None
    assert records.unfinished(*key) is None


# ---- jobs of several processes ----

RIGHT, LATER = outcome.Verdict({}), outcome.Verdict({}, unknown="no memory")
OFF, MORE = (outcome.Verdict({}, f"dk is off by {n}") for n in (1, 2))
JOBS = {  # what processes 0 and 1 find: why process 1 raises
    "right, right": (RIGHT, RIGHT, "None"),
    "wrong, right": (OFF, RIGHT, "None"),
    "wrong, wrong": (OFF, MORE, "None"),
    "right, wrong": (RIGHT, OFF, "process 0 found it right. Run python -m pallas_flash on each"),
    "unknown, wrong": (LATER, OFF, "process 0 found it unknown"),
    "unknown, unknown": (LATER, LATER, "what could not be checked may be right elsewhere"),
}
PROCESS = """
import sys

import jax

address, me = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, me)

import fakes
from pallas_flash.choose.selfcheck import records
from test_selfcheck_failures import JOBS

for name, found in JOBS.items():
    try:
        print(name, records.agree(name, fakes.GPU, found[me]))
    except RuntimeError as error:
        print(name, error)
"""


def refused(*_):
    raise NotImplementedError


@pytest.mark.whole
def test_processes_of_a_job_compare_what_they_found():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    env = os.environ | dict(PYTHONPATH=FOLDERS, JAX_PLATFORMS="cpu")
    run = lambda me: [sys.executable, "-c", PROCESS, address, str(me)]
    started = [
        subprocess.Popen(run(me), env=env, stdout=subprocess.PIPE, text=True) for me in (0, 1)
    ]
    said = [process.communicate(timeout=300)[0].splitlines() for process in started]
    for line, (name, (*_, reason)) in zip(said[1], JOBS.items(), strict=True):
        assert line.startswith(name) and reason in line


class Job:
    """What the other processes of a job say that they found."""

    key_value_set = staticmethod(lambda key, value, allow_overwrite: None)

    def __init__(self, found):
        self.found = found

    def blocking_key_value_get(self, key, milliseconds):
        if self.found is None:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.found


@pytest.mark.parametrize(
    "job, reason",
    [
        (Job("wrong"), None),
        (
            Job("right"),
            "in process 0 of 2: wrong .* process 1 found it right. Run python -m pallas",
        ),
        (Job(None), "process 1 did not say within 300 s what it found"),
        (None, "jax.distributed, by which they could compare, is not running"),
    ],
)
def test_a_process_of_a_job_falls_back_only_where_all_found_the_same(
    job, reason, install, checked, monkeypatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax_internals, "job", lambda: job)
    install(fakes.fake("wide", refused))
    for _ in range(2):  # again and again, and without another check
        told = pytest.warns(RuntimeWarning, match="Falling back to the next implementation, ")
        with pytest.raises(RuntimeError, match=reason) if reason else told:
            call()
        verdicts._known.clear()
    assert checked == ["wide"] and explained().implementation == "blockwise"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_check_that_its_user_stops_leaves_nothing(error, install, monkeypatch, verdict_folder):
    def stop(*_):
        assert len([*verdict_folder.iterdir()]) == 1
        raise error

    monkeypatch.setattr(verdicts, "_in_a_thread", stop)
    install("honest")
    with pytest.raises(error):
        call()
    assert not [*verdict_folder.iterdir()]
