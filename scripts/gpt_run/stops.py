"""How a run ends before its end: errors of one line, Ctrl-C and SIGTERM."""

import contextlib
import errno
import os
import signal

from scripts.gpt_run.options import report

WRITING = [
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
]


class Refused(Exception):
    """What a user can mend; its text is the line that is printed."""


@contextlib.contextmanager
def one_line(program: str, less_memory: str):
    """What a user can mend ends with one line on stderr and status 1, a signal with 128 and its
    number."""
    with _handler(_interrupt, signal.SIGINT, signal.SIGTERM):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            number = signal.Signals(*interrupt.args or [signal.SIGINT])
            report("stopped", f"by {number.name}")
            raise SystemExit(128 + number) from None
        except Exception as error:
            if line := plain(error, less_memory):
                raise SystemExit(f"{program}: error: {line}") from None
            raise


def plain(error: Exception, less_memory: str) -> str | None:
    """The line for a user; None for what only a developer can mend."""
    if isinstance(error, Refused | OSError):
        return str(error)
    if out_of_memory(error):
        first = str(error).partition("\n")[0] or "Python had no more"
        return f"out of memory ({first}). {less_memory}"
    return None


def out_of_memory(error: Exception) -> bool:
    """Shared memory, which a GPU's kernel may ask too much of, grows with no batch."""
    exhausted = (
        str(error).startswith("RESOURCE_EXHAUSTED") and "shared memory" not in str(error).lower()
    )
    return isinstance(error, MemoryError) or exhausted


def cannot_write(error: Exception) -> str | None:
    """Why, if that is what the error says: libraries wrap the system's errors in their own."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return next((reason for reason in WRITING if reason in str(error)), None)


@contextlib.contextmanager
def stop_signals():
    """A list that holds the first SIGINT or SIGTERM once it has come; a second one ends the
    process."""
    stopped = []

    def stop(number, frame):
        stopped.append(number)
        signal.signal(number, signal.SIG_DFL)

    with _handler(stop, signal.SIGINT, signal.SIGTERM):
        yield stopped


def _interrupt(number, frame):
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _handler(handler, *numbers):
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
