"""A run's folder: config.json, checkpoints/ and the lock. Whatever kills the run, each file is
whole, or the old one."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import time

from scripts.bench.options import make_next_folder
from scripts.gpt_run.curves import CURVES, csv_of
from scripts.gpt_run.hosts import is_first
from scripts.gpt_run.mesh import shardings
from scripts.gpt_run.options import NOT_SETTINGS, report
from scripts.gpt_run.stops import Refused, cannot_write, out_of_memory
from scripts.gpt_run.text import Text

METADATA = 2**20  # bytes of a checkpoint beyond its arrays, at most


@contextlib.contextmanager
def held(args):
    """The run's folder, new or to be resumed; no other process can train in it meanwhile."""
    import filelock

    if args.hosts is not None and not is_first():
        yield args.resume or args.out
        return
    folder = args.resume or new_folder(args.out)
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise Refused(
            f"another process trains in {folder}; wait for its end, or start a new run."
        ) from None
    try:
        yield folder
    finally:
        lock.release()
        if not (folder / "config.json").exists():  # nothing came of it
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()


def new_folder(folder: pathlib.Path | None) -> pathlib.Path:
    if folder is None:
        return make_next_folder(pathlib.Path("runs", "gpt"))
    if folder.exists() and not (
        folder.is_dir() and not any(path.name != "lock" for path in folder.iterdir())
    ):
        raise Refused(
            f"--out must be a new or an empty folder; {folder} is not. Choose another, or --resume "
            "it if it is a run."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out: {error}") from None
    return folder


def write_config(folder: pathlib.Path, args, text: Text):
    settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    config = dict(
        settings=settings,
        attention=args.taken,
        text=dict(source=text.source, sha256=text.fingerprint()),
    )
    with writing(folder):
        write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def read_config(folder: pathlib.Path, option: str = "--resume") -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())
        return dict(
            settings=dict(config["settings"]),
            attention=config["attention"],
            text=dict(config["text"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        message = (
            f"{option} must be the folder of a run, as runs/gpt-1; {folder} has no "
            "config.json that can be read."
        )
        raise Refused(message) from None


@contextlib.contextmanager
def writing(folder: pathlib.Path):
    """A full disk, or one that cannot be written, is told in one line, with what is left of the
    run."""
    try:
        yield
    except Exception as error:
        if not (why := cannot_write(error)):
            raise
        steps = saved_steps(folder)
        left = (
            f"The checkpoint of step {steps[-1]} is whole: go on with --resume {folder}"
            if steps
            else "Begin again"
        )
        raise Refused(f"{folder} cannot be written: {why}. {left} once there is room.") from None


def write_whole(path: pathlib.Path, content: bytes):
    """All of it or nothing, whenever the process is killed or the disk is full; of several
    processes the first writes."""
    if not is_first():
        return
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# ---- checkpoints ----


def saved_steps(folder: pathlib.Path) -> list[int]:
    return sorted(
        int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()
    )


def open_checkpoints(folder: pathlib.Path, read_only: bool = False):
    import orbax.checkpoint as ocp

    # what it logs of its threads' errors comes as an exception, too
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # not in the background: the next step overwrites the state, which was donated to it
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False, read_only=read_only, create=not read_only
    )
    path = (folder / "checkpoints").resolve()
    return ocp.CheckpointManager(
        path, options=options, item_handlers=ocp.StandardCheckpointHandler()
    )


def restore(folder: pathlib.Path, checkpoints, new: dict, read_only: bool = False) -> dict:
    """The last checkpoint that can be read, or `new` where there is none yet. The damaged ones
    after it are put aside."""
    steps, damaged = saved_steps(folder), []
    for step in reversed(steps):
        try:
            state = _restore(checkpoints, step, new)
            break
        except Exception as error:  # whatever a damaged file makes the library raise
            if out_of_memory(error):
                raise
            damaged.append(step)
            report(
                "damaged",
                f"the checkpoint of step {step}: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:150]}",
            )
    else:
        if steps:
            raise Refused(f"no checkpoint in {folder} can be read. Start a new run.")
        return new
    for step in [] if read_only or not is_first() else damaged:  # its place will be needed
        shutil.rmtree(folder / f"damaged-{step}", ignore_errors=True)
        shutil.move(folder / "checkpoints" / str(step), folder / f"damaged-{step}")
        checkpoints.reload()
    return state


def _restore(checkpoints, step: int, new: dict) -> dict:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    # the steps of its run, that may be extended since
    done = checkpoints.item_metadata(step)["train_losses"].shape[0]
    like = jax.eval_shape(lambda: new) | {
        name: jax.ShapeDtypeStruct((done,), jnp.float32) for name in CURVES
    }
    like = jax.tree.map(
        lambda x, here: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like, shardings(like)
    )
    state = checkpoints.restore(step, args=ocp.args.StandardRestore(like))
    longer = lambda curve, size: jnp.pad(curve, (0, size - done), constant_values=jnp.nan)
    return state | {name: longer(state[name], new[name].size) for name in CURVES}


def save(folder: pathlib.Path, checkpoints, state: dict):
    """The curve first: it is small, and a full disk leaves room for it."""
    import orbax.checkpoint as ocp

    with writing(folder):
        write_whole(folder / "loss.csv", csv_of(state))
        must_have_room(folder, state)
        try:
            checkpoints.save(int(state["step"]), args=ocp.args.StandardSave(state))
        except Exception:
            remove_partial(folder)
            raise


def must_have_room(folder: pathlib.Path, state: dict):
    """Before the library begins: its threads print pages when they meet a full disk."""
    import jax

    free, size = (
        shutil.disk_usage(folder).free,
        sum(x.nbytes for x in jax.tree.leaves(state)) + METADATA,
    )
    if free < size:
        room = (
            f"{os.strerror(errno.ENOSPC)} ({free / 1e6:,.1f} MB are free, a checkpoint takes "
            f"{size / 1e6:,.1f})"
        )
        raise OSError(errno.ENOSPC, room)


def remove_partial(folder: pathlib.Path):
    """What a save that failed leaves. Its writers end a moment later, and make the folder anew."""
    for seconds in (0, 0.1, 0.3, 1):
        time.sleep(seconds)
        for partial in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(partial, ignore_errors=True)
