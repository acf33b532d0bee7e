"""The checkpoints of a run: its state and its curves, by orbax."""

import errno
import logging
import os
import pathlib
import shutil
import sys

import jax
import orbax.checkpoint as ocp

from scripts.gpt_run.console import UserError, is_out_of_memory, report
from scripts.gpt_run.curves import Curves
from scripts.gpt_run.steps import abstract_state

METADATA = 2**20  # bytes of a checkpoint beyond its arrays, at most


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


def open_checkpoints(folder: pathlib.Path, read_only: bool = False) -> ocp.CheckpointManager:
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


def load(run: pathlib.Path, args) -> dict:
    """The state of a run's last checkpoint, to read it alone."""
    with open_checkpoints(run, read_only=True) as checkpoints:
        restored = restore(checkpoints, args, read_only=True)
    if restored is None:
        raise UserError(f"{run} has no checkpoint yet.")
    return restored[0]


def restore(checkpoints: ocp.CheckpointManager, args, read_only: bool = False):
    """(state, curves) of the last checkpoint that can be read, None where there is none yet. The
    damaged ones after it are moved out of the way."""
    items = ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state(args)), curves=ocp.args.JsonRestore()
    )
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
            reason = " ".join(str(error).split())[:150]
            report("damaged", f"the checkpoint of step {step}: {type(error).__name__}: {reason}")
    else:
        if damaged:
            raise UserError(f"no checkpoint in {folder} can be read. Start a new run.")
        return None
    if damaged and not read_only and jax.process_index() == 0:
        for step in damaged:  # the run will save it again
            shutil.move(folder / str(step), folder.with_name(f"damaged-{step}"))
        checkpoints.reload()
    return saved.state, Curves(**saved.curves)


def save(checkpoints: ocp.CheckpointManager, state, curves: Curves):
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
