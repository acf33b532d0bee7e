"""A run's folder: its lock, config.json, curves (loss.csv, loss.png, events for TensorBoard), and
checkpoints by orbax. Whatever ends the run, each file is whole: the new one or the one before."""

import contextlib
import errno
import io
import json
import logging
import os
import pathlib
import shutil
import sys
from typing import NamedTuple

import numpy as np

from scripts.bench.options import make_next_folder
from scripts.gpt_run.console import UserError, is_out_of_memory, report

METADATA = 2**20  # bytes of a checkpoint beyond its arrays, at most
DISK_ERRORS = "ENOSPC EDQUOT EFBIG EROFS EACCES EIO".split()


@contextlib.contextmanager
def open_folder(args):
    """The run's folder, new or to be resumed; no other process can train in it meanwhile. A disk
    that cannot be written is one line, which says what is left of the run."""
    if not is_first_process(args):
        yield args.resume or args.out
        return
    import filelock  # here, where what is missing has been told

    folder = args.resume or new_folder(args.out)
    try:
        lock = filelock.FileLock(folder / "lock").acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(
            f"another process trains in {folder}; wait for it to end, or start a new run."
        ) from None
    try:
        with lock:
            yield folder
    except Exception as error:
        if not (reason := disk_error(error)):
            raise
        saved = [int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit()]
        step = f"The checkpoint of step {max(saved)} is intact: continue with" if saved else "Begin"
        option = f"--resume {folder}" if saved else "again"
        raise UserError(
            f"{folder} cannot be written: {reason}. {step} {option} once there is room."
        ) from None
    finally:
        if not (folder / "config.json").exists():  # no training took place
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()


def is_first_process(args) -> bool:
    """Whether this is the process that writes, of those that train together."""
    if args.hosts is None:
        return True
    import jax

    return jax.process_index() == 0


def new_folder(folder: pathlib.Path | None) -> pathlib.Path:
    if folder is None:
        return make_next_folder(pathlib.Path("runs", "gpt"))
    if folder.exists() and (not folder.is_dir() or any(p.name != "lock" for p in folder.iterdir())):
        raise UserError(
            f"--out must be a new or an empty folder; {folder} is not. Choose another, or --resume "
            "it if it is a run."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {error}") from None
    return folder


def disk_error(error: Exception) -> str | None:
    """Why the disk cannot be written, if that is what happened; libraries wrap the system's errors
    in their own."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    reasons = (os.strerror(getattr(errno, name)) for name in DISK_ERRORS)
    return next((r for r in reasons if r in str(error) and not isinstance(error, UserError)), None)


def write_atomically(path: pathlib.Path, content: bytes):
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_config(folder: pathlib.Path, settings: dict, attention: str, text):
    config = dict(
        settings=settings,
        attention=attention,
        text=dict(source=text.source, sha256=text.fingerprint()),
    )
    write_atomically(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")


def read_config(folder: pathlib.Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())
        return {name: config[name] for name in ("settings", "attention", "text")}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} is not the folder of a run, e.g. runs/gpt-1: it has no config.json that can "
            "be read."
        ) from None


# ---- curves ----


class Curves(NamedTuple):
    """Nats per byte."""

    training: list  # of each step so far
    held_out: list  # [step, loss]


def to_csv(curves: Curves) -> bytes:
    held_out = dict(curves.held_out)
    rows = [f"{i},{loss},{held_out.get(i, '')}\n" for i, loss in enumerate(curves.training, 1)]
    return "".join(["step,train_loss,held_out_loss\n", *rows]).encode()


def draw(curves: Curves, bigram: float):
    """A matplotlib figure of the losses after the first tenth, whose fall would hide the rest."""
    from matplotlib.figure import Figure

    count = len(curves.training)
    window = max(1, count // 50)
    smooth = np.convolve(curves.training, np.ones(window) / window, "valid")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, count + 1), curves.training, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(range(window, count + 1), smooth, "C0", label=f"training, mean of {window} steps")
    if curves.held_out:
        axes.plot(*zip(*curves.held_out, strict=True), "C1o-", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram model, held out")
    late = np.quantile(curves.training[count // 10 :], 0.99)
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.set_ylim(top=1.05 * max(late, bigram))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return figure


def to_png(curves: Curves, bigram: float) -> bytes:
    file = io.BytesIO()
    draw(curves, bigram).savefig(file, format="png", dpi=120)
    return file.getvalue()


class Events:
    """The curves for TensorBoard. Each process that continues a run writes them from the first step
    again, and TensorBoard forgets the earlier ones."""

    def __init__(self, folder: pathlib.Path):
        # not SummaryWriter, which hangs where the disk is full
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        (folder / "tensorboard").mkdir(exist_ok=True)
        self.writer = EventsWriter(str(folder / "tensorboard" / "events"))
        self.steps = 0
        self.writer.write_event(Event(step=1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, curves: Curves):
        """What has come since the last call."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        training = enumerate(curves.training, 1)
        for name, points in dict(training=training, held_out=curves.held_out).items():
            for step, loss in points:
                if step > self.steps:
                    summary = scalar(f"loss/{name}", loss)
                    self.writer.write_event(Event(step=step, summary=summary))
        self.steps = len(curves.training)
        self.writer.flush()


# ---- checkpoints ----


def silence_threads():
    """What orbax logs of errors in its threads is raised as well. Those of TensorStore that read a
    damaged checkpoint find that nobody waits any more, and would print pages."""
    for name in "absl", "asyncio":
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook
    if show.__module__ != __name__:
        sys.unraisablehook = lambda found: _comes_too_late(found) or show(found)


def _comes_too_late(found) -> bool:
    is_unread = "_read_array_index" in getattr(found.object, "__qualname__", "")
    return is_unread or str(found.exc_value) == "Event loop is closed"


def open_checkpoints(folder: pathlib.Path, read_only: bool = False):
    """Orbax's CheckpointManager."""
    import orbax.checkpoint as ocp  # here, as jax below: --help and errors come at once

    silence_threads()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        cleanup_tmp_directories=not read_only,
        # the next step overwrites the state, which was donated to it
        enable_async_checkpointing=False,
        read_only=read_only,
        create=not read_only,
    )
    return ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)


def load(run: pathlib.Path, state) -> dict:
    """The state of a run's last checkpoint, to read it alone, like the abstract `state`."""
    with open_checkpoints(run, read_only=True) as checkpoints:
        restored = restore(checkpoints, state, read_only=True)
    if restored is None:
        raise UserError(f"{run} has no checkpoint yet.")
    return restored[0]


def restore(checkpoints, state, read_only: bool = False):
    """(state, curves) of the last checkpoint that can be read, like the abstract `state`; None
    where there is none yet. The damaged ones after it are moved out of the way."""
    import jax
    import orbax.checkpoint as ocp

    items = ocp.args.Composite(state=ocp.args.StandardRestore(state), curves=ocp.args.JsonRestore())
    folder = pathlib.Path(checkpoints.directory)
    damaged = []
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            saved = checkpoints.restore(step, args=items)
            break
        except Exception as error:  # whatever a damaged file makes orbax raise
            if is_out_of_memory(error):
                raise
            damaged.append(step)
            # what follows in orbax's is the name of a function
            reason = " ".join(str(error).partition("See full TensorStore details")[0].split())[:150]
            report("damaged", f"the checkpoint of step {step}: {type(error).__name__}: {reason}")
    else:
        if damaged:
            raise UserError(f"no checkpoint in {folder} can be read. Start a new run.")
        return None
    if damaged:
        report("instead", f"the checkpoint of step {step} is taken")
    if damaged and not read_only and jax.process_index() == 0:
        for number in damaged:  # the run will save it again
            moved = shutil.move(folder / str(number), folder.with_name(f"damaged-{number}"))
            report("moved", f"the damaged one to {moved}")
        checkpoints.reload()
    return saved.state, Curves(**saved.curves)


def save(checkpoints, state, curves: Curves):
    import jax
    import orbax.checkpoint as ocp

    # a full disk is seen before: the threads of orbax would print pages
    free = shutil.disk_usage(checkpoints.directory).free
    size = sum(x.nbytes for x in jax.tree.leaves(state)) + METADATA
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)} ({free / 1e6:,.1f} MB are free, a checkpoint takes "
            f"{size / 1e6:,.1f})",
        )
    checkpoints.save(
        int(state["step"]),
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), curves=ocp.args.JsonSave(curves._asdict())
        ),
    )
