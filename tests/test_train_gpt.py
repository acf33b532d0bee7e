"""scripts/train_gpt.py as its user meets it: results, resuming, being killed, errors, and
--check."""

import argparse
import contextlib
import csv
import gc
import importlib.util
import json
import math
import os
import pathlib
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types

import fakes
import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image
from tensorboardX.proto.event_pb2 import Event

from pallas_flash import backends
from scripts import train_gpt
from scripts.gpt_run import curves, machine, mesh, options, steps, stops
from scripts.gpt_run import folder as folders
from scripts.gpt_run import text as texts

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "train_gpt.py"
TINY = (
    "--layers 1 --heads 2 --features 16 --context 24 --batch 3 --eval-every 5 --save-every 4 "
    "--warmup 3"
).split()
STEPS = 13
CACHE = dict(jax_compilation_cache_dir=None, jax_persistent_cache_min_compile_time_secs=0.0)


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    """Most runs have the same programs."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    for name, value in (
        CACHE | dict(jax_compilation_cache_dir=str(tmp_path_factory.mktemp("compiled")))
    ).items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def script():
    return train_gpt


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Lines that a context tells apart and a byte alone does not."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    lines = ["banana cabana", "a cabin abacus", "cab in a bin", "nab a bubba"]
    order = np.random.default_rng(0).integers(0, len(lines), 1000)
    path.write_text("".join(lines[i] + "\n" for i in order))
    return str(path)


@pytest.fixture(scope="module")
def unbroken(script, text, tmp_path_factory):
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    script.main(
        [*TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder), "--tensorboard"]
    )
    return folder


@pytest.fixture
def copy(unbroken, tmp_path):
    """Of the run that nothing stopped."""
    return shutil.copytree(unbroken, tmp_path / "copy")


def contents(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def loss_curve(folder):
    """{step: (train loss, held-out loss or None)} of loss.csv."""
    with (folder / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    number = lambda text: float(text) if text else None
    return {
        int(row["step"]): (number(row["train_loss"]), number(row["held_out_loss"])) for row in rows
    }


FAULTS = """
import ctypes, resource, sys
from scripts.gpt_run.machine import keep_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, size = ctypes.c_void_p, 2**26
if sys.argv[1:]:
    keep_memory()
for _ in range(3):
    before, array = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(array, 1, ctypes.c_size_t(size))
    libc.free(array)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other libraries of C are left as they are"
)
def test_memory_of_a_step_is_there_for_the_next_one():
    faults = lambda *args: int(
        subprocess.check_output([sys.executable, "-c", FAULTS, *args], cwd=SCRIPT.parents[1])
    )
    assert faults("kept") < 100 < faults()


def error_of(script, *arguments):
    """The one line with which the script ends."""
    with pytest.raises(SystemExit) as ended:
        script.main(list(arguments))
    message = ended.value.code
    assert isinstance(message, str), "a text as exit code is printed, with status 1"
    assert message.startswith("train_gpt.py: error: ")
    assert "\n" not in message
    return message


def test_the_curves_hold_every_step_and_every_held_out_loss(unbroken):
    curve = loss_curve(unbroken)
    assert list(curve) == list(range(1, STEPS + 1))
    assert [step for step, (_, held_out) in curve.items() if held_out is not None] == [5, 10, STEPS]
    assert all(0 < train < 6 for train, _ in curve.values())


def test_the_plot_is_a_picture_with_something_on_it(unbroken):
    pixels = image.imread(unbroken / "loss.png")[..., :3]
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50


def test_the_plot_shows_the_end_of_training_and_not_the_fall_from_the_start():
    steps = np.arange(1, 1001)
    train, held_out = (
        2 + 3.5 * np.exp(-steps / 20) + 0.2 * (1 - steps / 1000),
        np.where(steps % 250, np.nan, 2.15),
    )
    low, high = curves.interesting(train, train, held_out, bigram=2.4)
    assert low < 2 and 2.4 < high < 2.6
    assert np.isfinite(curves.interesting(train[:1], train[:1], held_out[:1], bigram=2.4)).all(), (
        "before a held-out loss"
    )


def test_tensorboards_events_hold_the_curves(unbroken):
    (file,) = (unbroken / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # each: length, checksum, event, checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    written = {
        (value.tag, event.step): value.simple_value
        for event in events
        for value in event.summary.value
    }
    for step, losses in loss_curve(unbroken).items():
        for name, loss in zip(("loss/training", "loss/held_out"), losses, strict=True):
            assert written.get((name, step)) == (None if loss is None else pytest.approx(loss))
    assert [event.session_log.status for event in events if event.HasField("session_log")] == [1], (
        "it starts anew here"
    )


@pytest.mark.whole
def test_the_loss_falls_below_that_of_bigrams_and_the_last_lines_say_so(
    script, text, tmp_path, capsys
):
    sizes = (
        "--layers 2 --features 32 --steps 150 --learning-rate 0.01 --eval-every 150 "
        "--save-every 150"
    ).split()
    script.main(
        [
            *TINY,
            *sizes,
            "--data",
            text,
            "--out",
            str(tmp_path / "run"),
            "--prompt",
            "cab",
            "--samples",
            "2",
        ]
    )
    output, errors = capsys.readouterr()
    assert errors == "", "there is no bar where there is no terminal"
    lines = {line[:11].strip(): line[11:] for line in output.splitlines()}
    bigram, loss = (float(lines[name].split()[0]) for name in ("bigram", "held out"))
    assert loss < 0.85 * bigram
    assert f"{1 - loss / bigram:.0%}"[0] == lines["held out"].split("byte, ")[1][0]
    assert "below the bigram model's" in lines["held out"]
    assert len(re.findall(r"^--- sample \d\ncab", output, re.M)) == 2, (
        "both samples begin with the prompt"
    )
    assert list(lines)[:4] == ["model", "text", "bigram", "run"], (
        "before the first step there are four lines"
    )
    assert "not hopper" not in output


def test_the_bigram_loss_is_that_of_counted_pairs(script):
    text = texts.Text(np.frombuffer(b"ababac", np.uint8), np.frombuffer(b"abac", np.uint8), "")
    a, b = 3 + 256, 2 + 256  # each of a byte's 256 pairs counts once more than it is
    expected = -np.mean(np.log([3 / a, 3 / b, 2 / a]))
    assert texts.bigram_loss(text, text.held_out[None]) == pytest.approx(expected)


def test_of_ten_files_one_is_held_out_and_what_is_no_text_is_left_out(script, tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02} ")
    (tmp_path / "99.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_text("hidden")
    text = texts.read_text(str(tmp_path), context=2)
    assert text.held_out.tobytes() == b"09 19 "
    assert text.train.tobytes() == b"00 01 02 03 04 05 06 07 08 10 11 12 13 14 15 16 17 18 "
    assert "left out for their NUL bytes: " in text.source and "99.bin" in text.source


@pytest.mark.whole
def test_the_standard_library_is_the_default_text(script):
    text = texts.read_text(None, context=128)
    assert len(text.train) > 5_000_000
    assert len(text.held_out) > texts.HELD_OUT_BYTES
    assert text.fingerprint() == texts.read_text(None, context=128).fingerprint()


# --- resuming


def test_a_stopped_and_resumed_run_has_the_curves_of_an_unbroken_one(
    script, text, unbroken, tmp_path, monkeypatch, capsys
):
    folder, save = tmp_path / "run", script.save

    def save_and_stop(folder, checkpoints, state):
        save(folder, checkpoints, state)
        if state["step"] == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(script, "save", save_and_stop)
        script.main([*TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder)])
    assert ended.value.code == 128 + signal.SIGTERM == 143
    assert f"--resume {folder}" in capsys.readouterr().out
    assert list(loss_curve(folder)) == [1, 2, 3, 4, 5], (
        "a step that has begun is finished and saved"
    )

    script.main(["--resume", str(folder)])
    assert (folder / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()

    script.main(["--resume", str(folder), "--prompt", "nab"])
    assert "\nnab" in capsys.readouterr().out, "a run that is complete only writes its sample"
    assert (folder / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()


@pytest.mark.whole
def test_a_run_on_a_mesh_has_the_losses_of_one_device_and_goes_on_with_another_mesh(
    script, text, tmp_path
):
    settings = [*TINY, "--batch", "4", "--steps", "50", "--data", text]
    script.main([*settings, "--out", str(tmp_path / "one")])
    spread = tmp_path / "mesh"
    script.main([*settings, "--mesh", "data=2,model=2,context=2", "--out", str(spread)])
    np.testing.assert_allclose(losses(spread), losses(tmp_path / "one"), rtol=1e-4)
    for other in (["--mesh", "context=4"], []):
        steps = str(len(losses(spread)) + 4)
        script.main(["--resume", str(spread), "--steps", steps, *other])
    script.main(["--resume", str(tmp_path / "one"), "--steps", "54"])
    np.testing.assert_allclose(losses(spread)[:54], losses(tmp_path / "one"), rtol=1e-4)


@pytest.mark.whole
def test_two_processes_with_four_devices_each_have_the_losses_of_one_device(script, text, tmp_path):
    settings, together = (
        [*TINY, "--batch", "4", "--steps", "9", "--data", text],
        tmp_path / "together",
    )
    script.main([*settings, "--out", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    mesh = ["--simulate-devices", "4", "--mesh", "data=2,model=2,context=2", "--out", together]
    start = lambda i: subprocess.Popen(
        [sys.executable, SCRIPT, *settings, *mesh, "--hosts", f"{address},2,{i}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    first, second = map(start, range(2))
    try:
        said, silent = (process.communicate(timeout=300)[0] for process in (first, second))
    finally:
        first.kill(), second.kill()
    assert first.returncode == second.returncode == 0
    # but for the lines that Gloo writes
    assert "writes some" in said and not re.search("model|step|held out|files", silent)
    np.testing.assert_allclose(losses(together), losses(tmp_path / "one"), rtol=1e-4)
    for folder in together, tmp_path / "one":
        # one process reads what two have written
        script.main(["--resume", str(folder), "--steps", "11"])
    np.testing.assert_allclose(losses(together), losses(tmp_path / "one"), rtol=1e-4)


def losses(folder):
    return np.array([train for train, _ in loss_curve(folder).values()])


def test_on_a_mesh_parameters_and_their_optimizer_lie_on_data_and_model():
    state = dict(
        parameters=dict(
            blocks={0: dict(attention=dict(query=dict(kernel=jnp.ones((8, 4, 2)))))},
            norm=dict(scale=jnp.ones(8)),
        ),
        optimizer=dict(mu=dict(up=dict(kernel=jnp.ones((8, 7))))),
    )
    with jax.set_mesh(
        jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ):
        specs = [
            tuple(spec)
            for spec in jax.tree.leaves(mesh.specs(state), is_leaf=lambda x: isinstance(x, tuple))
        ]
    assert specs == [("data", None), ("data", "model", None), (None,)]


@pytest.mark.whole
def test_a_killed_run_goes_on_from_its_last_checkpoint(script, text, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    settings = [*TINY, "--steps", "200", "--save-every", "20", "--eval-every", "50", "--data", text]
    # see conftest.py: the same bits
    as_here = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *settings, "--out", killed], stdout=subprocess.DEVNULL, env=as_here
    )
    while process.poll() is None and not (killed / "checkpoints" / "40").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    left = len(loss_curve(killed))
    assert 40 <= left < 200
    assert left % 20 == 0

    script.main(["--resume", str(killed)])
    script.main([*settings, "--out", str(whole)])
    assert (killed / "loss.csv").read_text() == (whole / "loss.csv").read_text()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(script, unbroken, tmp_path):
    (tmp_path / "config.json").write_text((unbroken / "config.json").read_text())
    script.main(["--resume", str(tmp_path)])
    assert (tmp_path / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()


# --- errors


def test_text_that_cannot_be_trained_on_is_refused(script, tmp_path):
    assert "does not exist" in error_of(script, "--data", str(tmp_path / "missing"))
    (tmp_path / "empty.txt").touch()
    assert "has 0 and 0" in error_of(script, "--data", str(tmp_path / "empty.txt"))
    (tmp_path / "folder").mkdir()
    assert "folder has no files" in error_of(script, "--data", str(tmp_path / "folder"))
    for name in ("a", "b"):
        (tmp_path / "folder" / name).write_bytes(bytes(1000))
    assert "NUL bytes in" in error_of(script, "--data", str(tmp_path / "folder" / "a"))
    assert "folder/a and 1 more" in error_of(script, "--data", str(tmp_path / "folder"))
    (tmp_path / "short.txt").write_text("x" * 200)
    assert "--context 32 needs more than 32 bytes" in error_of(
        script, "--data", str(tmp_path / "short.txt"), "--context", "32"
    )


def test_a_folder_in_use_is_refused(script, text, unbroken):
    assert "--resume it" in error_of(script, *TINY, "--data", text, "--out", str(unbroken))
    assert "--out" in error_of(
        script, *TINY, "--data", text, "--out", str(unbroken / "loss.csv" / "inside")
    )


def test_a_wrong_resume_folder_is_refused(script, tmp_path):
    assert "no config.json" in error_of(script, "--resume", str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("{}")
    assert "no config.json that can be read" in error_of(script, "--resume", str(tmp_path))


def test_resuming_with_other_settings_or_another_text_is_refused(script, unbroken, tmp_path):
    assert "--features must be 16" in error_of(
        script, "--resume", str(unbroken), "--features", "32"
    )
    assert "--steps must be 13 or more" in error_of(
        script, "--resume", str(unbroken), "--steps", "12"
    )
    assert "--features must be 16" in error_of(
        script, "--eval-only", str(unbroken), "--features", "32"
    )
    assert "--preset is for new runs" in error_of(
        script, "--resume", str(unbroken), "--preset", "tiny"
    )
    config = json.loads((unbroken / "config.json").read_text())
    config["text"]["sha256"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has none yet" in error_of(script, "--eval-only", str(tmp_path))
    assert "the text that the run began with" in error_of(script, "--resume", str(tmp_path))


def test_sizes_and_names_that_do_not_fit_are_refused(script, text):
    def error(*arguments):
        return error_of(script, *TINY, "--data", text, *arguments)

    assert "--features must be a multiple of twice --heads" in error("--heads", "3")
    assert "--batch must be a multiple of --accumulate; got 3 and 2" in error("--accumulate", "2")
    assert "--warmup must be below --steps = 3; got 3" in error("--steps", "3")
    assert "got 'nothing'" in error("--attention", "nothing")
    assert "at most --context = 24" in error("--sample-length", "24")
    assert "at most --context = 24" in error("--prompt", "")
    assert "--batch / --accumulate must be a multiple of data in --mesh, 2; got 3" in error(
        "--mesh", "data=2"
    )
    assert "--context must be a multiple of context in --mesh, 5; got 24" in error(
        "--mesh", "model=2,context=5"
    )
    assert f"--mesh needs 24 devices; there are {len(jax.devices())}" in error(
        "--mesh", "context=24"
    )
    assert "--hosts is for training on a --mesh, with a folder that all" in error(
        "--hosts", "localhost:1234,2,0"
    )
    assert "--hosts is for training on a --mesh" in error("--hosts")


def test_an_address_of_hosts_is_a_place_and_two_numbers():
    assert options.hosts_type("a:1,2,0") == dict(
        coordinator_address="a:1", num_processes=2, process_id=0
    )
    for wrong in "localhost,2,0", "a:1,2,2", "a:1,2":
        with pytest.raises(argparse.ArgumentTypeError, match="as host:1234,2,0; got"):
            options.hosts_type(wrong)


def test_a_loss_that_is_no_number_ends_the_run(script, text, tmp_path):
    diverging = [
        "--data",
        text,
        "--learning-rate",
        "1e30",
        "--steps",
        "20",
        "--out",
        str(tmp_path / "run"),
    ]
    assert "--learning-rate" in error_of(script, *TINY, *diverging)


def test_an_error_is_one_line_on_stderr_and_no_traceback():
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--data", "no/such/file"], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("train_gpt.py: error: --data must be")
    assert ended.stderr.count("\n") == 1


def test_wrong_paths_are_refused_before_jax_is_imported(unbroken, tmp_path):
    wrong = {
        "--data": tmp_path / "missing",
        "--out": unbroken,
        "--resume": tmp_path,
        "--eval-only": tmp_path,
    }
    calls = "".join(f"main([{option!r}, {str(path)!r}])" + "\n" for option, path in wrong.items())
    calls = re.sub(
        "^main(.*)$", r"try: main\1\nexcept SystemExit as error: print(error)", calls, flags=re.M
    )
    code = "import sys; sys.modules['jax'] = None\nfrom scripts.train_gpt import main\n" + calls
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parents[1]
    )
    errors = ended.stdout.splitlines()
    assert [error.split("error: ")[1].split()[0] for error in errors] == list(wrong), ended.stderr


# Orbax, of a failed save
@pytest.mark.filterwarnings(r"ignore:(?s)Exception ignored in. None.*Event loop is closed")
def test_a_full_disk_ends_with_one_line_and_leaves_what_was_there_whole(
    script, text, tmp_path, monkeypatch, unbroken
):
    folder, save = tmp_path / "run", script.save

    def save_on_a_full_disk(folder, checkpoints, state):
        if state["step"] != 8:
            return save(folder, checkpoints, state)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save(folder, checkpoints, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(script, "save", save_on_a_full_disk)
        message = error_of(
            script, *TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder)
        )
    assert (
        f"{folder} cannot be written: File too large. The checkpoint of step 4 is whole" in message
    )
    assert len(loss_curve(folder)) == 8
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["4"], (
        "nothing is left that takes room"
    )
    script.main(["--resume", str(folder)])
    assert (folder / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()


def test_a_checkpoint_without_room_is_not_begun(tmp_path, monkeypatch):
    state, disk = dict(step=np.int32(4), losses=np.zeros(1000, "f4")), shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=2**20 + 4004))
    save = lambda: folders.save(
        tmp_path, types.SimpleNamespace(save=lambda step, args: None), state
    )
    monkeypatch.setattr(folders, "csv_of", lambda state: b"4")
    save()
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=2**20 + 4003))
    with pytest.raises(
        stops.Refused,
        match=r"No space left on device \(1.1 MB are free, a checkpoint takes 1.1\). Begin again",
    ):
        save()


def test_what_a_failed_save_still_writes_is_removed_as_well(tmp_path):
    partial = tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp" / "default"
    writers = [
        threading.Timer(seconds, partial.mkdir, kwargs=dict(parents=True, exist_ok=True))
        for seconds in (0.05, 0.2)
    ]
    partial.mkdir(parents=True)
    for writer in writers:
        writer.start()
    folders.remove_partial(tmp_path)
    for writer in writers:
        writer.join()
    assert not any(writer.is_alive() for writer in writers)
    assert not any((tmp_path / "checkpoints").iterdir())


def test_a_file_that_cannot_be_written_is_the_old_one(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    (tmp_path / "loss.csv").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    with (
        pytest.raises(stops.Refused, match=r"No space left on device.* Begin again"),
        train_gpt.writing(tmp_path),
    ):
        train_gpt.write_whole(tmp_path / "loss.csv", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"loss.csv": b"old"}


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
@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2]], ids=["empty", "half"]
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_goes_on(
    script, copy, unbroken, capsys, damage
):
    largest = max(
        (copy / "checkpoints" / str(STEPS)).rglob("d/*"), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(damage(largest.read_bytes()))
    script.main(["--resume", str(copy)])
    printed = capsys.readouterr().out
    assert f"damaged    the checkpoint of step {STEPS}: " in printed
    assert "from step 12 on" in printed
    assert (copy / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()
    assert (copy / f"damaged-{STEPS}").exists()


@warns_of_unread
@pytest.mark.usefixtures("unread")
def test_a_run_without_a_checkpoint_that_can_be_read_is_refused(script, copy):
    for path in (copy / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    before = contents(copy)
    assert "no checkpoint in" in error_of(script, "--resume", str(copy))
    assert contents(copy) == before


def test_a_step_that_the_memory_cannot_hold_is_refused(script, text, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)  # pages, and bytes of each
    error = error_of(
        script, *TINY, "--steps", str(STEPS), "--data", text, "--out", str(tmp_path / "run")
    )
    assert re.search(
        r"out of memory: a step needs [\d,.]+ GB, and there are 0.0. Try a smaller --batch or "
        r"--context",
        error,
    )
    assert not (tmp_path / "run").exists(), "nothing came of it"


def test_an_allocation_that_fails_names_what_to_change():
    def ended(error):
        with pytest.raises(SystemExit) as caught, stops.one_line("train_gpt.py", "Try less."):
            raise error
        return caught.value.code

    failed = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore"
    )
    assert (
        "out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.). Try less."
        in ended(failed)
    )
    assert "Try less." in ended(MemoryError())
    refused = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")
    with pytest.raises(jax.errors.JaxRuntimeError):  # a kernel's, which no smaller batch mends
        ended(refused)
    with pytest.raises(ZeroDivisionError), stops.one_line("train_gpt.py", "Try less."):
        1 / 0  # noqa: B018


def test_two_processes_cannot_train_in_one_folder(script, unbroken, text, tmp_path):
    with filelock.FileLock(unbroken / "lock"):
        assert "another process trains in" in error_of(script, "--resume", str(unbroken))
    (tmp_path / "new").mkdir()
    with filelock.FileLock(tmp_path / "new" / "lock"):
        assert "another process trains in" in error_of(
            script, "--data", text, "--out", str(tmp_path / "new")
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_with_one_line_and_leaves_no_folder(
    script, text, tmp_path, monkeypatch, capsys, number
):
    monkeypatch.setattr(script, "new_model", lambda args, **more: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        script.main([*TINY, "--data", text, "--out", str(tmp_path / "run")])
    assert ended.value.code == 128 + number
    assert capsys.readouterr().out == f"stopped    by {number.name}\n"
    assert not (tmp_path / "run").exists()


# --- more of a run: evaluation, more steps, presets


def test_eval_only_measures_the_last_checkpoint_and_writes_nothing(script, copy, capsys):
    before, (*_, (_, held_out)) = contents(copy), loss_curve(copy).values()
    (copy / "config.json").chmod(0o400)
    script.main(["--eval-only", str(copy), "--prompt", "nab"])
    printed = capsys.readouterr().out
    assert f"\nheld out   {held_out:.4f} nats" in printed and "\nnab" in printed
    assert contents(copy) == before


def test_eval_only_takes_another_text_and_says_so(script, unbroken, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("another text " * 100)
    script.main(["--eval-only", str(unbroken), "--data", str(tmp_path / "other.txt")])
    printed = capsys.readouterr().out
    assert "which is not what the run was trained on" in printed and "\nheld out " in printed
    script.main(["--eval-only", str(unbroken), "--data", str(tmp_path / "gone.txt")])
    printed = capsys.readouterr().out
    assert "gone.txt does not exist. Without it there is no held-out loss." in printed
    assert printed.count("--- sample") == 3


def test_a_run_is_extended_by_more_steps_and_says_how_the_schedule_changes(
    script, copy, unbroken, capsys
):
    script.main(["--resume", str(copy), "--steps", "20"])
    printed = capsys.readouterr().out
    (rates,) = re.findall(
        r"^schedule +20 steps in place of 13: .* (\S+) and not (\S+) at step 14$", printed, re.M
    )
    assert float(rates[0]) > float(rates[1]) == pytest.approx(3e-4, rel=0.02)
    curve = loss_curve(copy)
    assert list(curve) == list(range(1, 21))
    assert list(curve.items())[:STEPS] == list(loss_curve(unbroken).items())
    script.main(["--resume", str(copy)])
    assert loss_curve(copy) == curve, "the run has its new length"


def test_accumulated_gradients_are_those_of_the_whole_batch(script):
    args = script.parse([*TINY, "--batch", "6", "--dtype", "float32"])
    script.check_sizes(args)
    structure, parameters = steps.new_model(args)
    windows = jax.random.randint(jax.random.key(0), (6, 25), 0, 256)
    whole, parts = (
        jax.jit(lambda p, n=n: steps.loss_and_gradients(structure, p, windows, n))(parameters)
        for n in (1, 3)
    )
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_preset_gpt2_has_gpt2s_parameters_and_context(script):
    args = script.parse(["--preset", "gpt2", "--context", "512"])
    assert (args.dtype, args.context, script.parse(["--preset", "gpt2"]).context) == (
        "bfloat16",
        512,
        1024,
    )
    script.check_sizes(args)
    size = sum(
        math.prod(p.shape)
        for p in jax.tree.leaves(jax.eval_shape(lambda: steps.new_model(args)[1]))
    )
    assert round(size / 1e6) == 124


def test_short_runs_warm_up_for_a_fifteenth_and_their_first_step_learns(script):
    for count in (1, 14, 30, 1500):
        args = script.parse(["--steps", str(count)])
        script.check_sizes(args)
        rate = steps.learning_rate(args)
        assert args.warmup == count // 15
        assert rate(args.warmup) == pytest.approx(args.learning_rate)
        assert 0 < rate(0) <= args.learning_rate


def test_model_flops_are_those_of_the_products(script):
    args = script.parse(
        "--layers 2 --heads 2 --features 128 --context 64 --dtype float32 --attention "
        "reference".split()
    )
    script.check_sizes(args)
    structure, parameters = steps.new_model(args)
    windows = jax.ShapeDtypeStruct((1, args.context + 1), jnp.int32)
    run = jax.jit(lambda p, w: steps.loss_and_gradients(structure, p, w, 1)).lower(
        parameters, windows
    )
    products = run.cost_analysis()["flops"] / args.context
    # the reference computes what causal attention does not need
    dense = 6 * args.layers * args.context * args.features
    counted = machine.flops_per_token(args, jax.tree.leaves(parameters)) + dense
    assert counted == pytest.approx(products, rel=0.1)


def test_the_speed_says_what_part_of_a_known_gpus_peak_it_is(script, monkeypatch):
    assert machine.peak_of("NVIDIA H100 80GB HBM3") == 989.4e12
    assert machine.peak_of("cpu") is None
    args = script.parse(["--dtype", "bfloat16"])
    assert machine.speed_in_words(args, {})(1e6) == "1,000,000 tokens/s"
    monkeypatch.setattr(machine, "peak_of", lambda kind: 1e9)
    monkeypatch.setattr(machine, "flops_per_token", lambda *_: 1e4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert machine.speed_in_words(args, {})(25e3) == "25,000 tokens/s, 25.0% MFU"


NVIDIA = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.104.05  Sat Aug 19 01:15:15 UTC "
    "2023\nGCC version:  gcc 12.3.0\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.65.06  Release Build  "
    "(dvs-builder@U22)\n"
)
NO_GPU = {  # the driver's words, its version, of which CUDA jax has a plugin, what else: why
    "an old driver": (
        NVIDIA,
        535,
        [13],
        {},
        "jax[cuda13] needs driver 580 or newer, and this is 535: install jax[cuda12]",
    ),
    "a very old driver": (
        NVIDIA,
        470,
        [12],
        {},
        "jax[cuda12] needs driver 525 or newer, and this is 470: update the driver",
    ),
    "no plugin": (OPEN, 580, [], {}, "jax has no plugin for it. Install jax[cuda13]."),
    "no plugin, an old driver": (
        NVIDIA,
        535,
        [],
        {},
        "jax has no plugin for it. Install jax[cuda12].",
    ),
    "a plugin that fails": (
        OPEN,
        580,
        [13],
        {},
        "jax[cuda13] is there and did not start; what jax logged before says why",
    ),
    "a driver of unknown words": ("{}", "?", [12], {}, "jax[cuda12] is there and did not start"),
    "a CPU that was asked for": (OPEN, 580, [13], dict(jax_platforms="cpu"), None),
    "no driver": (None, None, [13], {}, None),
}


@pytest.mark.parametrize("name", NO_GPU)
def test_a_gpu_that_jax_does_not_use_is_told_with_the_reason_and_what_to_do(
    name, script, monkeypatch, tmp_path, capsys
):
    words, driver, plugins, config, reason = NO_GPU[name]
    if words is not None:
        (tmp_path / "version").write_text(words.format(driver))
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    has = [f"jax_cuda{version}_plugin" for version in plugins]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in has)
    args = script.parse(TINY)
    script.check_sizes(args)
    with contextlib.ExitStack() as stack:
        for option, value in (dict(jax_platforms=None) | config).items():
            stack.callback(jax.config.update, option, getattr(jax.config, option))
            jax.config.update(option, value)
        script.resolve(args)
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no GPU")]
    assert [reason in line for line in found] == [True] * (reason is not None)


# --- --check


@pytest.mark.whole
def test_with_dropout_a_resumed_run_has_the_curves_of_an_unbroken_one_and_check_passes(
    script, text, tmp_path, capsys
):
    dropout = [*TINY, "--dropout", "0.2", "--accumulate", "3", "--data", text]
    script.main([*dropout, "--steps", "8", "--out", str(tmp_path / "whole")])
    script.main([*dropout, "--steps", "8", "--out", str(tmp_path / "parts"), "--save-every", "3"])
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "8")
    script.main(["--resume", str(tmp_path / "parts")])
    assert "from step 6 on" in capsys.readouterr().out
    assert (tmp_path / "parts" / "loss.csv").read_text() == (
        tmp_path / "whole" / "loss.csv"
    ).read_text()
    script.main(
        [*CHECK, "--data", text, "--dropout", "0.1", "--attention", "blockwise", "--steps", "10"]
    )
    assert "\npassed" in capsys.readouterr().out


CHECK = "--layers 1 --heads 2 --features 32 --context 37 --batch 2 --check".split()


# ---- kernels that a machine takes once they were found right ----


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts fakes before all others, as on a GPU that nobody has checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "1")
    return lambda patch, *names: fakes.install(patch.setattr, *map(fakes.backend, names))


@pytest.mark.parametrize("name, why", [("liar", "dk is off by"), ("raiser", "ptxas fell over")])
def test_kernels_that_lie_or_do_not_compile_are_not_trained_with(
    script, text, install, monkeypatch, name, why
):
    def resolved(*options):
        args = script.parse([*TINY, "--data", text, *options])
        script.check_sizes(args)
        script.resolve(args)
        return args.taken, args.attention  # the model's

    install(monkeypatch, name, "honest")
    with pytest.warns(RuntimeWarning, match=f"does not take {name} .*{why}"):
        assert resolved() == ("honest", None)
    assert resolved("--attention", "blockwise") == ("blockwise", "blockwise")


@pytest.mark.whole
def test_a_run_goes_on_where_its_kernels_are_not_and_says_so_in_a_line(
    script, text, install, unbroken, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "run"
    config = lambda: json.loads((folder / "config.json").read_text())
    with monkeypatch.context() as patch:
        install(patch, "honest")
        script.main([*TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder)])
        assert config()["attention"] == "honest" and config()["settings"]["attention"] is None
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    capsys.readouterr()
    script.main(["--resume", str(folder)])
    assert (
        "\nattention  blockwise from here on, chosen anew; until now it was honest\n"
        in capsys.readouterr().out
    )
    assert config()["attention"] == "blockwise"
    losses = [[train for train, _ in loss_curve(run).values()] for run in (folder, unbroken)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    script.main(["--resume", str(folder), "--steps", str(STEPS + 1), "--attention", "reference"])
    assert "\nattention  reference from here on" in capsys.readouterr().out


@pytest.mark.whole
@pytest.mark.parametrize("implementation, steps", [("blockwise", 50), ("triton", 10)])
def test_check_passes(script, text, capsys, small_tiles, implementation, steps):
    script.main([*CHECK, "--data", text, "--attention", implementation, "--steps", str(steps)])
    output = capsys.readouterr().out
    assert f"\n{steps} " in output, "both losses of the last step are printed"
    assert "\npassed" in output


def test_check_fails_where_an_implementation_is_wrong(script, text, monkeypatch):
    def with_wrong_gradient(backend):
        def backward(*arguments):
            gradients = backend.backward(*arguments)  # as if a block were skipped
            return gradients._replace(value=gradients.value.at[:, :16].set(0))

        return backend._replace(backward=backward) if backend.name == "blockwise" else backend

    monkeypatch.setattr(backends, "BACKENDS", tuple(map(with_wrong_gradient, backends.BACKENDS)))
    assert "blockwise and reference part at step" in error_of(
        script, *CHECK, "--data", text, "--attention", "blockwise"
    )
