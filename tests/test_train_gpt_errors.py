"""scripts/train_gpt.py where something is wrong: each error is one line, and leaves whole what was
there."""

import argparse
import gc
import json
import logging
import re
import resource
import shutil
import signal
import subprocess
import sys

import filelock
import jax
import numpy as np
import pytest
import trainer
from trainer import SCRIPT, STEPS, TINY, contents, loss_curve, same_curves, train

from scripts import train_gpt
from scripts.gpt_run import console, devices, folder, training
from scripts.gpt_run.options import parse

pytestmark = pytest.mark.usefixtures("compiled_once")


def error_of(*arguments):
    return trainer.error_of(train_gpt.main, *arguments)


# ---- what is refused ----

NEW = " ".join(TINY) + " --data {text}"
REFUSED = {  # arguments: a part of the line
    "--data {tmp}/missing": "does not exist",
    "--data {tmp}/empty.txt": "has 0 and 0",
    "--data {tmp}/no-files": "has no files",
    "--data {tmp}/binary": "NUL bytes in {tmp}/binary/a, {tmp}/binary/b, {tmp}/binary/c, 1 more.",
    "--data {tmp}/short.txt --context 32": "--context 32 needs more than 32 bytes",
    NEW + " --out {run}": "--resume it",
    NEW + " --out {run}/loss.csv/inside": "--out",
    "--resume {tmp}/missing": "no config.json",
    "--resume {tmp}/broken": "no config.json that can be read",
    "--resume {run} --features 32": "--features must be 16",
    "--resume {run} --steps 12": "--steps must be 13 or more",
    "--resume {run} --preset tiny": "--preset is for new runs",
    "--resume {tmp}/other-text": "the text that the run began with",
    "--eval-only {run} --features 32": "--features must be 16",
    "--eval-only {tmp}/other-text": "has no checkpoint yet",
    NEW + " --heads 3": "--features must be a multiple of twice --heads; got 16 and 3 heads",
    NEW + " --kv-heads 4": "--heads must be a multiple of --kv-heads; got 2 and 4",
    NEW + " --preset gpt2 --heads 5": "--features must be a multiple",
    NEW + " --accumulate 2": "--batch must be a multiple of --accumulate; got 3 and 2",
    NEW + " --steps 3": "--warmup must be below --steps = 3; got 3",
    NEW + " --attention hopper": "implementation 'hopper' cannot run this call: it needs",
    NEW + " --sample-length 24": "fit in --context = 24",
    NEW + " --prompt=": "fit in --context = 24",
    NEW + " --mesh data=2": "--batch / --accumulate must be a multiple of data in --mesh; got 3",
    NEW + " --mesh context=5": "--context must be a multiple of context in --mesh; got 24 and 5",
    NEW + " --mesh context=24": "--mesh needs 24 devices; there are 8",
    NEW + " --hosts localhost:1234,2,0": "--hosts is for training on a --mesh, in a folder that",
    NEW + " --hosts": "--hosts is for training on a --mesh",
    NEW + " --learning-rate 1e30 --steps 20 --out {tmp}/run": "try a smaller --learning-rate",
}


@pytest.fixture
def places(finished_run, text, tmp_path):
    for name in "no-files", "binary", "broken", "other-text":
        (tmp_path / name).mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("x" * 200)
    for name in "abcd":
        (tmp_path / "binary" / name).write_bytes(b"text" * 1000 + bytes(1))
    (tmp_path / "broken" / "config.json").write_text("{}")
    config = json.loads((finished_run / "config.json").read_text())
    config["text"]["sha256"] = "another"
    (tmp_path / "other-text" / "config.json").write_text(json.dumps(config))
    return dict(tmp=tmp_path, run=finished_run, text=text)


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_a_user_can_mend_is_refused_by_one_line(arguments, places):
    expected = REFUSED[arguments].format(**places)
    assert expected in error_of(*arguments.format(**places).split())
    assert not (places["tmp"] / "run" / "checkpoints" / "20").exists()


OUT_OF_RANGE = {
    "--layers 0": "must be at least 1; got 0",
    "--layers x": "invalid int value: 'x'",
    "--clip 0": "must be above 0; got 0",
    "--dropout 1": "must be at least 0 and below 1; got 1",
    "--attention flash2": "'flash2' (choose from",
    "--mesh data=2,data=2": "must give each of data, model, context at most one size",
    "--mesh data=0": "e.g. data=2,context=4; got 'data=0'",
    "--hosts a:1,2,2": "e.g. host:1234,2,0; got 'a:1,2,2'",
    "--hosts localhost,2,0": "must be an address",
    "--hosts a:1,2": "must be an address",
}


@pytest.mark.parametrize("typed", OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(typed, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(typed.split())
    line = capsys.readouterr().err
    assert f"argument {typed.split()[0]}: " in line and OUT_OF_RANGE[typed] in line


def test_wrong_paths_are_refused_before_jax_is_imported_without_a_traceback(finished_run, tmp_path):
    wrong = f"--out {finished_run} --resume {tmp_path} --eval-only {tmp_path} --data none"
    code = """if True:
        import runpy, sys
        sys.modules["jax"] = None
        script, *wrong = sys.argv[1:]
        while wrong:
            sys.argv[1:], wrong = wrong[:2], wrong[2:]
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as error:
                if not wrong: raise
                print(error)
    """
    command = [sys.executable, "-c", code, SCRIPT, *wrong.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "start      trains 1,500 steps of 4 x 128 bytes: reads the text and" in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("start ")]
    assert [line.split(":")[0] for line in lines] == ["train_gpt.py"] * 3
    assert ended.returncode == 1
    assert ended.stderr.startswith("train_gpt.py: error: --data must be")
    assert ended.stderr.count("\n") == 1


# ---- the machine ----


def test_a_step_that_the_memory_cannot_hold_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "sysconf", lambda name: 100)  # pages, and bytes of each
    error = error_of(*TINY, "--data", text, "--out", tmp_path / "run")
    pattern = (
        r"out of memory \(a step needs [\d,.]+ GB of 0.0\). Try a smaller --batch or --context"
    )
    assert re.search(pattern, error)
    assert not (tmp_path / "run").exists(), "nothing came of it"


def test_an_allocation_that_fails_names_what_to_change():
    def ended(error):
        with pytest.raises(SystemExit) as caught, console.one_line_errors("x.py", "Try less."):
            raise error
        return caught.value.code

    xla = lambda text: jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}\nmore")
    line = "x.py: error: out of memory (RESOURCE_EXHAUSTED: Out of memory). Try less."
    assert ended(xla("Out of memory")) == line
    assert "Try less." in ended(MemoryError())
    for other in xla("Shared memory size limit exceeded"), ZeroDivisionError():
        with pytest.raises(type(other)):  # no smaller batch mends it
            ended(other)


OF_DRIVER = {  # what /proc says, and what is told of it
    "x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023": "driver 535.104.05",
    "NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release": "driver 580.65.06",
    "no version here": "driver of unknown version",
    None: None,
}


@pytest.mark.parametrize("words, platforms", [*((w, None) for w in OF_DRIVER), ("580.65", "cpu")])
def test_a_gpu_that_jax_does_not_use_is_told(words, platforms, monkeypatch, tmp_path):
    if words:
        (tmp_path / "version").write_text(words)
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        advice = devices.unused_gpu()
    finally:
        jax.config.update("jax_platforms", before)
    told = None if platforms else OF_DRIVER[words]
    assert (told in advice and "Install jax[cuda13]" in advice) if told else advice is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_with_one_line_and_leaves_no_folder(
    text, tmp_path, monkeypatch, capsys, number
):
    monkeypatch.setattr(training, "model_structure", lambda args: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        train(*TINY, "--data", text, "--out", tmp_path / "run")
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"train_gpt.py: stopped by {number.name}\n"
    assert not (tmp_path / "run").exists()


TWICE = """
import contextlib, signal, sys, time
from scripts.gpt_run.console import deferred_signals, one_line_errors

with one_line_errors("x.py", ""), deferred_signals() if sys.argv[1] else contextlib.nullcontext():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("ends", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("deferred", ["", "deferred"])
def test_a_second_signal_ends_the_process_without_a_traceback(deferred):
    command = [sys.executable, "-c", TWICE, deferred]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=trainer.ROOT)
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline() + process.stderr.readline() if deferred else ""
        assert deferred or process.stdout.readline() == "ends\n"
        process.send_signal(signal.SIGINT)
        said += process.communicate()[1]
    assert process.returncode == -signal.SIGINT
    assert said == console.STOPS.decode() * bool(deferred)


def test_a_signal_within_a_sample_begins_a_line(capsys):
    def bytes_then_signal():
        yield [ord("x")]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        console.print_texts([b"a"], ["--- sample 1\n"], bytes_then_signal())
    assert capsys.readouterr().out == "--- sample 1\nax\n"


# ---- the folder ----


def test_two_processes_cannot_train_in_one_folder(finished_run, text, tmp_path):
    for place, arguments in (finished_run, ["--resume"]), (tmp_path, ["--data", text, "--out"]):
        with filelock.FileLock(place / "lock"):
            assert "another process trains in" in error_of(*arguments, place)


# Orbax, of a failed save
@pytest.mark.filterwarnings(r"ignore:(?s)Exception ignored in. None.*Event loop is closed")
@pytest.mark.whole
def test_a_full_disk_ends_with_one_line_and_leaves_what_was_there_whole(
    text, tmp_path, monkeypatch, finished_run
):
    run, save = tmp_path / "run", training.save

    def save_on_a_full_disk(checkpoints, state, curves):
        if state["step"] != 8:
            return save(checkpoints, state, curves)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save(checkpoints, state, curves)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(training, "save", save_on_a_full_disk)
        message = error_of(*TINY, "--data", text, "--out", run)
    expected = f"{run} cannot be written: File too large. The checkpoint of step 4 is intact"
    assert expected in message and f"continue with --resume {run} once there is room" in message
    assert len(loss_curve(run)) == 8
    train("--resume", run)
    assert same_curves(run, finished_run)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["12", "13"], "nothing is left of the failed one that takes room"


def test_a_checkpoint_without_room_is_not_begun(tmp_path, monkeypatch):
    state, saved = dict(step=np.int32(4), array=np.zeros(1000, "f4")), []
    manager = type(
        "Manager", (), dict(directory=tmp_path, save=lambda self, i, args: saved.append(i))
    )
    disk = shutil.disk_usage(tmp_path)
    for free in (2**20 + 4004, 2**20 + 4003):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: disk._replace(free=free))
        try:
            folder.save(manager(), state, folder.Curves([], []))
        except OSError as error:
            room = r"No space left on device (1.1 MB are free, a checkpoint takes 1.1)"
            assert folder.disk_error(error) == room
    assert saved == [4]


def test_a_file_that_cannot_be_written_is_the_old_one(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    (tmp_path / "config.json").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    args = argparse.Namespace(hosts=None, resume=tmp_path)
    again = r"cannot be written: No space left on device. Begin again once there is room"
    with pytest.raises(console.UserError, match=again), folder.open_folder(args):
        folder.write_atomically(tmp_path / "config.json", b"new")
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock"}
    assert files == {"config.json": b"old"}


@pytest.fixture
def unread():
    """What Orbax leaves behind of arrays that it could not read is collected, and warns of that, in
    the test itself."""
    yield
    gc.collect()


warns_of_unread = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <coroutine object _read_array_index_and_device_put "
)


@warns_of_unread
@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("fraction", [0, 0.5], ids=["empty", "half"])
def test_a_damaged_checkpoint_is_moved_away_and_the_one_before_is_continued(
    copy, finished_run, capsys, fraction
):
    files = (copy / "checkpoints" / str(STEPS) / "state").rglob("d/*")
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: int(largest.stat().st_size * fraction)])
    train("--resume", copy)
    printed = capsys.readouterr().out
    lines = re.findall(r"^(?:damaged|instead|moved|run) .*", printed, re.MULTILINE)
    assert lines[0].startswith(f"damaged    the checkpoint of step {STEPS}: ")
    assert "<" not in lines[0]
    assert lines[1:] == [
        "instead    the checkpoint of step 12 is taken",
        f"moved      the damaged one to {copy}/damaged-{STEPS}",
        f"run        {copy}, after step 12",
    ]
    assert same_curves(copy, finished_run)
    assert (copy / f"damaged-{STEPS}").exists()


def test_what_comes_too_late_from_threads_that_read_damaged_files_is_not_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for _ in range(2):
        folder.silence_threads()
    late, other = (
        argparse.Namespace(exc_value=RuntimeError(text), object=None)
        for text in ("Event loop is closed", "another")
    )
    for found in late, other:
        sys.unraisablehook(found)
    assert told == [other]
    assert not logging.getLogger("asyncio").isEnabledFor(logging.ERROR)


@warns_of_unread
@pytest.mark.usefixtures("unread")
def test_a_run_without_a_checkpoint_that_can_be_read_is_refused(copy):
    for path in (copy / "checkpoints").rglob("*"):
        if path.is_file() and "state" in path.parts:
            path.write_bytes(b"")
    before = contents(copy)
    assert "no checkpoint in" in error_of("--resume", copy)
    assert contents(copy) == before


# ---- evaluation ----


def test_eval_only_measures_the_last_checkpoint_on_any_text_and_writes_nothing(
    copy, tmp_path, capsys
):
    (tmp_path / "other.txt").write_text("another text " * 100)
    before, (*_, (_, held_out)) = contents(copy), loss_curve(copy).values()
    (copy / "config.json").chmod(0o400)

    def printed(*arguments):
        train("--eval-only", copy, *arguments)
        return capsys.readouterr().out

    own = printed("--prompt", "nab")
    assert f"\nheld out   {held_out:.4f} nats" in own and "\nnab" in own
    other = printed("--data", tmp_path / "other.txt")
    assert "which is not what the run was trained on" in other and "\nheld out " in other
    gone = printed("--data", tmp_path / "gone.txt")
    assert "gone.txt does not exist. Without it there is no held-out loss." in gone
    assert gone.count("--- sample") == 3
    assert contents(copy) == before
