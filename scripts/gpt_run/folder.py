"""A run's folder: config.json, checkpoints/, loss.csv, loss.png. Whatever kills the run, each is whole or absent."""

import csv
import io
import json
import math
import os
import pathlib

import numpy as np

from scripts.gpt_run.options import NOT_SETTINGS, fail
from scripts.gpt_run.text import Text


def new_folder(args, text: Text) -> pathlib.Path:
    folder, number = args.out, 1
    while folder is None or (args.out is None and folder.exists()):
        folder, number = pathlib.Path("runs", f"gpt-{number}"), number + 1
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        fail(f"--out must be a new or an empty folder; {folder} is not. Choose another, or --resume it if it is a run.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out: {error}")
    settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    config = dict(settings=settings, text=dict(source=text.source, sha256=text.fingerprint()))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def resumed_folder(folder: pathlib.Path, text: Text) -> pathlib.Path:
    was = read_config(folder)["text"]
    if was["sha256"] != text.fingerprint():
        fail(f"--resume needs the text that the run began with ({was['source']}); {text.source} differs. Start a new run.")
    return folder


def read_config(folder: pathlib.Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())
        return dict(settings=config["settings"], text=config["text"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--resume must be the folder of a run, as runs/gpt-1; {folder} has no config.json that can be read.")


def write_whole(path: pathlib.Path, text: str):
    """All of it or nothing, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def open_checkpoints(folder: pathlib.Path):
    import orbax.checkpoint as ocp

    # not in the background: the next step overwrites the state, which was donated to it
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)


def restore(checkpoints, state: dict) -> dict:
    """The last checkpoint, or `state` where there is none yet."""
    import jax
    import orbax.checkpoint as ocp

    if checkpoints.latest_step() is None:
        return state
    return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))


def save(folder: pathlib.Path, checkpoints, state: dict):
    import orbax.checkpoint as ocp

    checkpoints.save(int(state["step"]), args=ocp.args.StandardSave(state))
    write_csv(folder, state)


def curves(state: dict):
    """(step, train loss, held-out loss or nan), one row for each step so far."""
    number = int(state["step"])
    return np.arange(1, number + 1), *(np.asarray(state[name])[:number] for name in ("train_losses", "held_out_losses"))


def write_csv(folder: pathlib.Path, state: dict):
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["step", "train_loss", "held_out_loss"])
    rows.writerows(
        (step, train, "" if math.isnan(held_out) else held_out) for step, train, held_out in zip(*curves(state), strict=True)
    )
    write_whole(folder / "loss.csv", file.getvalue())


def write_png(folder: pathlib.Path, state: dict, bigram: float):
    from matplotlib.figure import Figure

    steps, train, held_out = curves(state)
    window = max(1, len(train) // 50)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, train, color="C0", alpha=0.25, linewidth=0.8)
    smooth = np.convolve(train, np.ones(window) / window, "valid")
    axes.plot(steps[window - 1 :], smooth, color="C0", label=f"training, mean of {window} steps")
    measured = ~np.isnan(held_out)
    axes.plot(steps[measured], held_out[measured], "o-", color="C1", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram model, held out")
    axes.set(xlabel="step", ylabel="loss [nats per byte]", xlim=(0, steps[-1]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
