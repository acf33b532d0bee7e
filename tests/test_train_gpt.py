"""scripts/train_gpt.py as its user meets it: results, resuming, being killed, errors, and --check."""

import csv
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from matplotlib import image

from pallas_flash import backends
from scripts import train_gpt
from scripts.gpt_run import text as texts

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "train_gpt.py"
TINY = "--layers 1 --heads 2 --features 16 --context 24 --batch 3 --eval-every 5 --save-every 4 --warmup 3".split()
STEPS = 13


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
    script.main([*TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder)])
    return folder


def loss_curve(folder):
    """{step: (train loss, held-out loss or None)} of loss.csv."""
    with (folder / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    number = lambda text: float(text) if text else None
    return {int(row["step"]): (number(row["train_loss"]), number(row["held_out_loss"])) for row in rows}


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


def test_the_loss_falls_below_that_of_bigrams_and_the_last_lines_say_so(script, text, tmp_path, capsys):
    sizes = "--layers 2 --features 32 --steps 150 --learning-rate 0.01 --eval-every 150 --save-every 150".split()
    script.main([*TINY, *sizes, "--data", text, "--out", str(tmp_path / "run"), "--prompt", "cab", "--samples", "2"])
    output, errors = capsys.readouterr()
    assert errors == "", "there is no bar where there is no terminal"
    lines = {line[:11].strip(): line[11:] for line in output.splitlines()}
    bigram, loss = (float(lines[name].split()[0]) for name in ("bigram", "held out"))
    assert loss < 0.85 * bigram
    assert f"{1 - loss / bigram:.0%}"[0] == lines["held out"].split("byte, ")[1][0]
    assert "below the bigram model's" in lines["held out"]
    assert output.count("\ncab") == 2, "both samples begin with the prompt"


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


def test_the_standard_library_is_the_default_text(script):
    text = texts.read_text(None, context=128)
    assert len(text.train) > 5_000_000
    assert len(text.held_out) > texts.HELD_OUT_BYTES
    assert text.fingerprint() == texts.read_text(None, context=128).fingerprint()


# --- resuming


def test_a_stopped_and_resumed_run_has_the_curves_of_an_unbroken_one(script, text, unbroken, tmp_path, monkeypatch, capsys):
    folder, save = tmp_path / "run", script.save

    def save_and_stop(folder, checkpoints, state):
        save(folder, checkpoints, state)
        if state["step"] == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(script, "save", save_and_stop)
        script.main([*TINY, "--steps", str(STEPS), "--data", text, "--out", str(folder)])
    assert ended.value.code == 130
    assert f"--resume {folder}" in capsys.readouterr().out
    assert list(loss_curve(folder)) == [1, 2, 3, 4, 5], "a step that has begun is finished and saved"

    script.main(["--resume", str(folder)])
    assert (folder / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()

    script.main(["--resume", str(folder), "--prompt", "nab"])
    assert "\nnab" in capsys.readouterr().out, "a run that is complete only writes its sample"
    assert (folder / "loss.csv").read_text() == (unbroken / "loss.csv").read_text()


def test_a_killed_run_goes_on_from_its_last_checkpoint(script, text, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    settings = [*TINY, "--steps", "200", "--save-every", "20", "--eval-every", "50", "--data", text]
    process = subprocess.Popen([sys.executable, SCRIPT, *settings, "--out", killed], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (killed / "checkpoints" / "40").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    left = len(loss_curve(killed))
    assert 20 <= left < 200
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
    assert "has 0 and 0" in error_of(script, "--data", str(tmp_path / "folder"))
    (tmp_path / "binary").write_bytes(bytes(1000))
    assert "has 0 and 0" in error_of(script, "--data", str(tmp_path / "binary"))
    (tmp_path / "short.txt").write_text("x" * 200)
    assert "--context 32 needs more than 32 bytes" in error_of(script, "--data", str(tmp_path / "short.txt"), "--context", "32")


def test_a_folder_in_use_is_refused(script, text, unbroken):
    assert "--resume it" in error_of(script, *TINY, "--data", text, "--out", str(unbroken))
    assert "--out" in error_of(script, *TINY, "--data", text, "--out", str(unbroken / "loss.csv" / "inside"))


def test_a_wrong_resume_folder_is_refused(script, tmp_path):
    assert "no config.json" in error_of(script, "--resume", str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("{}")
    assert "no config.json that can be read" in error_of(script, "--resume", str(tmp_path))


def test_resuming_with_other_settings_or_another_text_is_refused(script, unbroken, tmp_path):
    assert "--features must be 16" in error_of(script, "--resume", str(unbroken), "--features", "32")
    config = json.loads((unbroken / "config.json").read_text())
    config["text"]["sha256"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "the text that the run began with" in error_of(script, "--resume", str(tmp_path))


def test_sizes_and_names_that_do_not_fit_are_refused(script, text):
    def error(*arguments):
        return error_of(script, *TINY, "--data", text, *arguments)

    assert "--features must be a multiple of twice --heads" in error("--heads", "3")
    assert "got 'nothing'" in error("--attention", "nothing")
    assert "at most --context = 24" in error("--sample-length", "24")
    assert "at most --context = 24" in error("--prompt", "")


def test_a_loss_that_is_no_number_ends_the_run(script, text, tmp_path):
    diverging = ["--data", text, "--learning-rate", "1e30", "--steps", "20", "--out", str(tmp_path / "run")]
    assert "--learning-rate" in error_of(script, *TINY, *diverging)


def test_an_error_is_one_line_on_stderr_and_no_traceback():
    ended = subprocess.run([sys.executable, SCRIPT, "--data", "no/such/file"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("train_gpt.py: error: --data must be")
    assert ended.stderr.count("\n") == 1


# --- --check


CHECK = "--layers 1 --heads 2 --features 32 --context 37 --batch 2 --check".split()


@pytest.mark.parametrize("implementation, steps", [("blockwise", 50), ("portable", 10)])
def test_check_passes(script, text, capsys, small_tiles, implementation, steps):
    script.main([*CHECK, "--data", text, "--attention", implementation, "--steps", str(steps)])
    output = capsys.readouterr().out
    assert f"\n{steps} " in output, "both losses of the last step are printed"
    assert "\npassed" in output


def test_check_fails_where_an_implementation_is_wrong(script, text, monkeypatch):
    def with_wrong_gradient(backend):
        def backward(*arguments):
            dq, dk, dv, dbias = backend.backward(*arguments)
            return dq, dk, dv.at[:, :16].set(0), dbias  # as if a block were skipped

        return backend._replace(backward=backward) if backend.name == "blockwise" else backend

    monkeypatch.setattr(backends, "BACKENDS", tuple(map(with_wrong_gradient, backends.BACKENDS)))
    assert "blockwise and reference part at step" in error_of(script, *CHECK, "--data", text, "--attention", "blockwise")
