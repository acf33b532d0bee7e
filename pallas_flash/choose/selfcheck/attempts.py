"""Self-checks that have begun, each a locked file beside the record. The lock ends with its
process: an unlocked file is of a check whose process crashed or was killed, which look alike."""

import atexit
import contextlib
import glob
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

fcntl: Any
try:
    import fcntl
except ImportError:  # on Windows, for which jax has no GPUs
    fcntl = None

SUFFIX = ".attempt"
# seconds, more than a check takes: some shared file systems lock within a host alone, so that a
# process of another host may still run
LATER = 3600


class Attempt(NamedTuple):
    number: int  # counts attempts that ended with their process, this one included
    pid: int
    host: str
    boot: str  # what the host calls its running kernel
    time: str

    def __str__(self):
        return f"process {self.pid} on {self.host}, {self.time}"


def unfinished(record: pathlib.Path) -> Attempt | None:
    """The last attempt whose process is gone."""
    attempts = []
    for path in _files(record):
        with contextlib.suppress(OSError, ValueError, TypeError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # OSError: its process runs
            attempt = Attempt(**json.load(file))
            is_old = time.time() - os.fstat(file.fileno()).st_mtime > LATER
            attempts += [attempt] if is_old or attempt.boot == _boot() else []
    return max(attempts, default=None)


@contextlib.contextmanager
def begin(record: pathlib.Path) -> Iterator[None]:
    """A context with an attempt on file. The file stays only if the process ends within it, other
    than by an exception or sys.exit."""
    before = unfinished(record)
    remove = _lock_file(record, before.number + 1 if before else 1)
    atexit.register(remove)  # another thread may end the process
    try:
        yield
    finally:
        remove()
        atexit.unregister(remove)


def forget(record: pathlib.Path):
    """Removes the files of all attempts."""
    for path in _files(record):
        with contextlib.suppress(OSError):
            path.unlink()


def _lock_file(record: pathlib.Path, number: int) -> Callable[[], None]:
    """Makes and locks the file of an attempt, if the folder lets it, and returns the function that
    removes it."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    attempt = Attempt(number, os.getpid(), platform.node(), _boot(), now)
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        name = dict(prefix=f"{record.stem}.", suffix=SUFFIX, dir=record.parent)
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", **name, delete=False))
        stack.callback(pathlib.Path(file.name).unlink, missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(json.dumps(attempt._asdict()))  # an empty file is no attempt
        file.flush()
        return stack.pop_all().close
    return lambda: None


def _files(record: pathlib.Path) -> list[pathlib.Path]:
    with contextlib.suppress(OSError):
        return [*record.parent.glob(f"{glob.escape(record.stem)}.*{SUFFIX}")]
    return []


def _boot() -> str:
    """A name that differs by host, and is the same in all of its containers."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
