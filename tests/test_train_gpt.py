"""scripts/train_gpt.py: the results of a run, resuming it, being killed, devices, and --check."""

import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import typing

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image
from tensorboardX.proto.event_pb2 import Event
from trainer import SCRIPT, STEPS, TINY, error_of, loss_curve, same_curves, train, train_losses

from pallas_flash.choose import implementations
from pallas_flash.problem.call import ImplementationName
from scripts import train_gpt
from scripts.gpt_run import devices, model, options, training
from scripts.gpt_run import folder as run_folder
from scripts.gpt_run import text as texts
from scripts.gpt_run.options import parse

pytestmark = pytest.mark.usefixtures("compiled_once")
CHECK = "--check --layers 1 --heads 2 --features 32 --context 37 --batch 2".split()


FAULTS = """
import ctypes, resource, sys
from scripts.train_gpt import keep_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, size = ctypes.c_void_p, 2**26
if sys.argv[1:]:
    keep_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(array, 1, ctypes.c_size_t(size))
    libc.free(array)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries of C are left alone")
def test_memory_of_a_step_is_there_for_the_next_one():
    command, root = [sys.executable, "-c", FAULTS], SCRIPT.parents[1]
    faults = lambda *args: int(subprocess.check_output([*command, *args], cwd=root))
    assert faults("keep") < 100 < faults()


# ---- results ----


def test_a_run_leaves_its_curves_as_numbers_as_a_picture_and_for_tensorboard(finished_run):
    curve = loss_curve(finished_run)
    assert list(curve) == list(range(1, STEPS + 1))
    assert [step for step, (_, held_out) in curve.items() if held_out is not None] == [5, 10, STEPS]
    assert all(0 < train < 6 for train, _ in curve.values())

    pixels = image.imread(finished_run / "loss.png")[..., :3]
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50

    (file,) = (finished_run / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # each: length, checksum, event, checksum
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    written = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    for step, losses in curve.items():
        for name, loss in zip(("loss/training", "loss/held_out"), losses, strict=True):
            assert written.get((name, step)) == (None if loss is None else pytest.approx(loss))
    assert [event.session_log.status for event in events if event.HasField("session_log")] == [1]


def test_the_plot_shows_the_end_of_training_and_not_the_fall_from_the_start():
    losses = 2 + 3.5 * np.exp(-np.arange(1, 1001) / 20)
    held_out = [[i, 2.15] for i in (250, 500, 750, 1000)]
    for training_losses, measured in (losses, held_out), (losses[:1], []):
        figure = run_folder.draw(run_folder.Curves(list(training_losses), measured), bigram=2.4)
        low, high = figure.axes[0].get_ylim()
        assert low < min(2.4, *training_losses)
        assert 2.4 < high < (2.6 if measured else 6)


def labelled(output: str) -> dict[str, str]:
    return {line[:11].strip(): line[11:] for line in output.splitlines()}


@pytest.mark.whole
def test_the_loss_falls_below_that_of_bigrams_and_the_last_lines_say_so(text, tmp_path, capsys):
    longer = "--features 32 --steps 150 --learning-rate 0.01 --eval-every 150 --save-every 150"
    sample = "--prompt cab --samples 2"
    train(*TINY, *longer.split(), *sample.split(), "--data", text, "--out", tmp_path / "run")
    output, errors = capsys.readouterr()
    assert errors == "", "there is no bar where there is no terminal"
    lines = labelled(output)
    bigram, loss = (float(lines[name].split()[0]) for name in ("bigram", "held out"))
    assert loss < 0.85 * bigram
    assert f"{1 - loss / bigram:.0%}"[0] == lines["held out"].split("byte, ")[1][0]
    assert "below the bigram model's" in lines["held out"]
    assert len(re.findall(r"^--- sample \d\ncab", output, re.M)) == 2
    assert list(lines)[:6] == ["start", "model", "text", "bigram", "compiles", "run"]
    assert "not hopper" not in output


def test_the_bigram_loss_is_that_of_counted_pairs():
    text = texts.Text(np.frombuffer(b"ababac", np.uint8), np.frombuffer(b"abac", np.uint8), "")
    a, b = 3 + 256, 2 + 256  # each of a byte's 256 pairs counts once more than it is
    expected = -np.mean(np.log([3 / a, 3 / b, 2 / a]))
    assert texts.bigram_loss(text, text.held_out[None]) == pytest.approx(expected)


def test_of_ten_files_one_is_held_out_and_binary_ones_are_left_out(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02} ")
    (tmp_path / "99.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_text("hidden")
    text = texts.read_text(str(tmp_path), context=2)
    assert text.held_out.tobytes() == b"09 19 "
    assert text.train.tobytes() == b"00 01 02 03 04 05 06 07 08 10 11 12 13 14 15 16 17 18 "
    assert text.source.endswith("(files: 20; skipped, with NUL bytes: 99.bin)")


@pytest.mark.whole
def test_the_standard_library_is_the_default_text():
    text = texts.read_text(None, context=128)
    assert len(text.train) > 5_000_000
    assert len(text.held_out) > texts.HELD_OUT_BYTES
    assert text.fingerprint() == texts.read_text(None, context=128).fingerprint()


def test_the_options_know_the_implementations():
    assert options.IMPLEMENTATIONS == [*typing.get_args(ImplementationName)]


@pytest.mark.whole
def test_the_tiny_preset_ends_well_below_the_bigram_model(tmp_path, capsys):
    train("--preset", "tiny", "--out", tmp_path / "run")
    lines = labelled(capsys.readouterr().out)
    assert lines["start"] == "trains 800 steps of 8 x 64 bytes: reads the text and loads jax"
    assert float(re.search(r", ([\d.]+)% below", lines["held out"])[1]) > 15


# ---- resuming ----


@pytest.mark.parametrize("rates", [(3e-4, 3e-4), (3e-4, 3.0004e-4), (3e-4, 1e-3)])
def test_learning_rates_are_told_apart(rates):
    old, new = training.apart(*rates)
    assert (old == new) == (rates[0] == rates[1])
    assert [float(old), float(new)] == pytest.approx(rates, rel=1e-5)


def test_a_stopped_and_resumed_run_has_the_curves_of_an_unbroken_one(
    text, finished_run, tmp_path, monkeypatch, capsys
):
    folder, save = tmp_path / "run", training.save

    def save_and_stop(checkpoints, state, curves):
        save(checkpoints, state, curves)
        if state["step"] == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(training, "save", save_and_stop)
        train(*TINY, "--data", text, "--out", folder)
    assert ended.value.code == 128 + signal.SIGTERM == 143
    assert f"--resume {folder}" in capsys.readouterr().out
    assert list(loss_curve(folder)) == [1, 2, 3, 4, 5], "a step that has begun is finished"

    train("--resume", folder)
    assert same_curves(folder, finished_run)
    train("--resume", folder, "--prompt", "nab")
    assert "\nnab" in capsys.readouterr().out, "a run that is complete only writes its samples"
    assert same_curves(folder, finished_run)


def test_a_run_of_before_an_option_was_there_resumes_with_its_default(finished_run, tmp_path):
    config = json.loads((finished_run / "config.json").read_text())
    del config["settings"]["untied"], config["settings"]["clip"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = parse(["--resume", str(tmp_path)])
    assert (args.untied, args.clip, args.layers) == (False, 1.0, 2)


@pytest.mark.whole
def test_a_killed_run_goes_on_from_its_last_checkpoint(text, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    settings = [*TINY, "--steps", "200", "--save-every", "20", "--eval-every", "50", "--data", text]
    # see conftest.py: the same bits
    as_here = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, SCRIPT, *settings, "--out", killed]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=as_here)
    while process.poll() is None and not (killed / "checkpoints" / "40").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    left = len(loss_curve(killed))
    assert 40 <= left < 200
    assert left % 20 == 0

    train("--resume", killed)
    train(*settings, "--out", whole)
    assert same_curves(killed, whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(finished_run, tmp_path):
    shutil.copy(finished_run / "config.json", tmp_path)
    train("--resume", tmp_path)
    assert same_curves(tmp_path, finished_run)


@pytest.mark.whole
def test_a_run_is_extended_by_more_steps_and_says_how_the_schedule_changes(
    copy, finished_run, capsys
):
    train("--resume", copy, "--steps", "20")
    pattern = r"^schedule +20 steps instead of 13: .* to (\S+) instead of (\S+) at step 14$"
    (rates,) = re.findall(pattern, capsys.readouterr().out, re.M)
    assert float(rates[0]) > float(rates[1]) == pytest.approx(3e-4, rel=0.02)
    curve = loss_curve(copy)
    assert list(curve) == list(range(1, 21))
    assert list(curve.items())[:STEPS] == list(loss_curve(finished_run).items())
    train("--resume", copy)
    assert loss_curve(copy) == curve, "the run has its new length"


# ---- devices ----


@pytest.mark.whole
def test_runs_on_a_mesh_of_one_or_two_processes_have_the_losses_of_one_device(
    text, tmp_path, compiled_anew
):
    sizes = "--kv-heads 2 --batch 4 --steps 30"
    settings = [*TINY, *sizes.split(), "--data", text]
    one, meshed, together = tmp_path / "one", tmp_path / "meshed", tmp_path / "together"
    mesh = ["--mesh", "data=2,model=2,context=2", "--out"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        hosts = f"localhost:{free.getsockname()[1]},2"
    command = [sys.executable, SCRIPT, *settings, *mesh, together, "--simulate-devices", "4"]
    cache = dict(
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    options = dict(stdout=subprocess.PIPE, text=True, env={**os.environ, **cache})
    processes = [
        subprocess.Popen([*command, "--hosts", f"{hosts},{i}"], **options) for i in range(2)
    ]
    try:
        said, silent = (process.communicate(timeout=300)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert not (tmp_path / "compiled").exists(), "a restored program may wait for ever"
    # but for its first line, and those that Gloo writes
    assert "scripts/generate.py" in said
    assert not re.search("^(model|step|held out|files)", silent, re.M)
    train(*settings, "--out", one)
    train(*settings, *mesh, meshed)
    for count, *other in (30,), (34, "--mesh", "context=4"), (38,):
        for folder in one, meshed, together:
            if count > 30:  # one process goes on with what others have written, on another mesh
                train("--resume", folder, "--steps", count, *(other if folder != one else ()))
            np.testing.assert_allclose(train_losses(folder), train_losses(one), rtol=1e-4)


def test_on_a_mesh_parameters_and_their_optimizer_are_sharded_over_data_and_model():
    kernel = lambda *shape: dict(kernel=jnp.ones(shape))
    blocks = {0: dict(attention=dict(query=kernel(8, 4, 2)))}
    state = dict(
        parameters=dict(blocks=blocks, norm=dict(scale=jnp.ones(8))),
        optimizer=dict(mu=dict(up=kernel(8, 7))),
    )
    with devices.set_mesh(dict(data=2, model=4)):
        specs = [tuple(sharding.spec) for sharding in jax.tree.leaves(devices.shardings(state))]
    assert specs == [("data", None), ("data", "model", None), ()]


# ---- the model and its speed ----


def test_accumulated_gradients_are_those_of_the_whole_batch():
    args = parse([*TINY, "--batch", "6", "--dtype", "float32"])
    structure, parameters = model.model_structure(args), model.initial_state(args)["parameters"]
    windows = jax.random.randint(jax.random.key(0), (6, 25), 0, 256)
    whole, accumulated = (
        jax.jit(lambda p, n=n: model.loss_and_gradients(structure, p, windows, n))(parameters)
        for n in (1, 3)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), whole, accumulated
    )


def test_the_preset_gpt2_has_gpt2s_parameters_and_context():
    args = parse(["--preset", "gpt2", "--context", "512"])
    assert (args.dtype, args.context) == ("bfloat16", 512)
    assert parse(["--preset", "gpt2"]).context == 1024
    leaves = jax.tree.leaves(model.abstract_state(args)["parameters"])
    assert round(sum(math.prod(p.shape) for p in leaves) / 1e6) == 124


def test_short_runs_warm_up_for_a_fifteenth_and_their_first_step_learns():
    for count in (1, 14, 30, 1500):
        args = parse(["--steps", str(count)])
        rate = model.learning_rate(args)
        assert args.warmup == count // 15
        assert rate(args.warmup) == pytest.approx(args.learning_rate)
        assert 0 < rate(0) <= args.learning_rate


def test_model_flops_are_those_of_the_products():
    sizes = "--layers 2 --heads 2 --features 128 --context 64 --dtype float32"
    args = parse([*sizes.split(), "--attention", "reference"])
    structure = model.model_structure(args)
    parameters = model.abstract_state(args)["parameters"]
    windows = jax.ShapeDtypeStruct((1, args.context + 1), jnp.int32)
    step = jax.jit(lambda p, w: model.loss_and_gradients(structure, p, w, 1))
    products = step.lower(parameters, windows).cost_analysis()["flops"] / args.context
    # the reference computes what causal attention does not need
    dense = 6 * args.layers * args.context * args.features
    counted = devices.flops_per_token(args, jax.tree.leaves(parameters)) + dense
    assert counted == pytest.approx(products, rel=0.1)


def test_the_speed_comes_with_the_mfu_of_a_known_gpu(monkeypatch):
    assert devices.peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert devices.peak_flops("cpu") is None
    args = parse(["--dtype", "bfloat16"])
    assert devices.speed_format(args, {})(1e6) == "1,000,000 tokens/s"
    monkeypatch.setattr(devices, "peak_flops", lambda kind: 1e9)
    monkeypatch.setattr(devices, "flops_per_token", lambda *_: 1e4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert devices.speed_format(args, {})(25e3) == "25,000 tokens/s, 25.0% MFU"


# ---- which attention ----


@pytest.mark.whole
def test_with_dropout_a_resumed_run_has_the_curves_of_an_unbroken_one(text, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    dropout = [*TINY, *"--dropout 0.2 --accumulate 3 --steps 8".split(), "--data", text]
    train(*dropout, "--out", whole)
    train(*dropout, "--out", resumed, "--save-every", "3")
    shutil.rmtree(resumed / "checkpoints" / "8")
    train("--resume", resumed)
    assert ", after step 6" in capsys.readouterr().out
    assert same_curves(resumed, whole)


@pytest.mark.usefixtures("verdict_folder")
@pytest.mark.parametrize("name, why", [("liar", "dk is off by"), ("raiser", "ptxas fell over")])
def test_kernels_that_lie_or_do_not_compile_are_not_trained_with(text, install, name, why):
    install(name, "honest")
    with pytest.warns(RuntimeWarning, match=f"self-check of {name} .*{why}"):
        assert training.resolve(parse([*TINY, "--data", text])) == "honest"
    named = parse([*TINY, "--data", text, "--attention", "blockwise"])
    assert training.resolve(named) == named.attention == "blockwise"


@pytest.mark.whole
@pytest.mark.usefixtures("verdict_folder")
def test_a_run_goes_on_where_its_kernels_are_not_and_says_so_in_a_line(
    text, finished_run, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "run"
    config = lambda: json.loads((folder / "config.json").read_text())
    with monkeypatch.context() as patch:
        fakes.install(patch.setattr, fakes.fake("honest"))
        train(*TINY, "--data", text, "--out", folder)
        assert config()["attention"] == "honest" and config()["settings"]["attention"] is None
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    capsys.readouterr()
    train("--resume", folder)
    changed = "\nattention  blockwise from here on; until now it was honest\n"
    assert changed in capsys.readouterr().out
    assert config()["attention"] == "blockwise"
    np.testing.assert_allclose(train_losses(folder), train_losses(finished_run), rtol=1e-4)
    train("--resume", folder, "--steps", STEPS + 1, "--attention", "reference")
    assert "\nattention  reference from here on" in capsys.readouterr().out


@pytest.mark.whole
@pytest.mark.parametrize(
    "options", ["blockwise --steps 50", "triton --steps 10", "blockwise --steps 10 --dropout 0.1"]
)
def test_check_passes(text, capsys, small_tiles, options):
    implementation, _, steps, *_ = options.split()
    train(*CHECK, "--data", text, "--attention", *options.split())
    output = capsys.readouterr().out
    assert f"\nstep       {implementation}" in output
    assert f"\n{steps} " in output, "both losses of the last step are printed"
    assert "\npassed" in output


def test_check_fails_where_an_implementation_is_wrong(text, monkeypatch):
    right = implementations.BLOCKWISE

    def backward(*arguments):
        gradients = right.backward(*arguments)  # as if a block were skipped
        return gradients._replace(value=gradients.value.at[:, :16].set(0))

    fakes.replace(monkeypatch.setattr, right, backward=backward)
    error = error_of(train_gpt.main, *CHECK, "--data", text, "--attention", "blockwise")
    assert "blockwise and reference differ at step" in error
