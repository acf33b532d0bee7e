"""What a run tells its user: lines of progress, generated text, errors of one line, and how signals
end it."""

import codecs
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

STOPS = b"\nstopping after this step, with a checkpoint; once more: at once, without\n"
# what the extra `train` installs
TRAIN = "flax optax orbax.checkpoint matplotlib tqdm filelock tensorboardX".split()


class UserError(Exception):
    """A mistake that the user can fix; its text is the line that is printed."""


def report(label: str, text: Any):
    print(f"{label:<11}" + str(text).replace("\n", "\n" + " " * 11), flush=True)


def check_installed():
    """Names what is missing, before minutes of work."""
    if lacking := [name for name in TRAIN if not _is_installed(name)]:
        raise UserError(f"there is no {' and no '.join(lacking)}. Run pip install '.[train]'.")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package
        return False


@contextlib.contextmanager
def one_line_errors(program: str, memory_hint: str):
    """Ends with one line on stderr and status 1 for a user's mistake, a failure of the system or a
    lack of memory; on a signal, with status 128 + its number."""
    with _signal_handler(_interrupt):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            received = signal.Signals(*interrupt.args or [signal.SIGINT])
            print(f"{program}: stopped by {received.name}", file=sys.stderr)
            raise SystemExit(128 + received) from None
        except Exception as error:
            if is_out_of_memory(error):
                reason = str(error).partition("\n")[0] or "Python's allocator failed"
                line = f"out of memory ({reason}). {memory_hint}"
            elif isinstance(error, UserError | OSError):
                line = str(error)
            else:
                raise
            raise SystemExit(f"{program}: error: {line}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Not a kernel's shared memory: a smaller batch does not change that."""
    text = str(error)
    exhausted = text.startswith("RESOURCE_EXHAUSTED") and "shared memory" not in text.lower()
    return exhausted or isinstance(error, MemoryError)


@contextlib.contextmanager
def deferred_signals():
    """A list that receives the first SIGINT or SIGTERM; a second one ends the process."""
    received = []

    def defer(number, frame):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        # not by print, within which the signal may have come
        os.write(2, STOPS)

    with _signal_handler(defer):
        yield received


def run(main: Callable):
    """main(), and nothing after it: Ctrl-C while Python ends is no traceback."""
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number, frame):
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process, not its cleaning up
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def _signal_handler(handler):
    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


# ---- generated text ----


class Row:
    """The text after one prompt: bytes go in, printable text comes out, up to the stop string."""

    def __init__(self, stop: bytes = b""):
        self.stop = stop
        self.count = 0
        self.is_done = False
        self.text = ""
        self.held = b""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, byte: int):
        if self.is_done:
            return
        self.held += bytes([byte])
        self.count += 1
        if self.stop and self.held.endswith(self.stop):
            self.held = self.held.removesuffix(self.stop)
            return self.finish()
        # what may be the beginning of the stop string is held back
        starts = (self.stop[:n] for n in range(len(self.stop) - 1, 0, -1))
        ready = self.held.removesuffix(next(filter(self.held.endswith, starts), b""))
        self.text += self.decoder.decode(ready)
        self.held = self.held[len(ready) :]

    def finish(self):
        """No more bytes come: what is held back is text."""
        self.text += self.decoder.decode(self.held, final=True)
        self.held = b""
        self.is_done = True

    def take(self) -> str:
        """The text since the last call."""
        text, self.text = self.text, ""
        return printable(text)


def printable(text: str) -> str:
    """The text without characters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def print_texts(prompts: list[bytes], headings: list[str], generated, stop: str = "") -> int:
    """The text of each prompt: the first as it comes, the others when it is their turn. Returns how
    many bytes were generated."""
    rows = [Row(stop.encode()) for _ in prompts]
    try:
        _print_rows(rows, prompts, headings, generated)
    except KeyboardInterrupt:
        print(flush=True)  # what is said next begins a line
        raise
    return sum(row.count for row in rows)


def _print_rows(rows: list[Row], prompts: list[bytes], headings: list[str], generated):
    for prompt, heading, row in zip(prompts, headings, rows, strict=True):
        text = heading + printable(prompt.decode(errors="replace"))
        print(text + row.take(), end="", flush=True)
        while not row.is_done and (new := next(generated, None)) is not None:
            for each, byte in zip(rows, new, strict=True):
                each.add(int(byte))
            print(row.take(), end="", flush=True)
        row.finish()
        print(row.take())
