"""A run's folder: its lock, config.json and other small files. Whatever ends the run, each file is
whole: the new one or the one before."""

import contextlib
import errno
import json
import os
import pathlib

from scripts.bench.options import make_next_folder
from scripts.gpt_run.console import UserError

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
    """Of those that train together, the one that writes."""
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
