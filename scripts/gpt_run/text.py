"""The text to train on: bytes of files, some of them held out, and the loss of a bigram model."""

import hashlib
import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np

from scripts.gpt_run.console import UserError
from scripts.gpt_run.options import BYTES

HELD_OUT_BYTES = 65_536  # that the held-out loss is measured on
# of the standard library: tests, and tables of numbers
NOT_TEXT = {"site-packages", "test", "tests", "idle_test", "encodings"}


class Text(NamedTuple):
    train: np.ndarray  # uint8
    held_out: np.ndarray  # uint8
    source: str

    def fingerprint(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"|" + self.held_out.tobytes()).hexdigest()


def read_text(path: str | None, context: int) -> Text:
    root = pathlib.Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise UserError(f"--data must be a file or a folder; {root} does not exist.")
    contents = {f: f.read_bytes() for f in ([root] if root.is_file() else find_files(root, path))}
    if not contents:
        raise UserError(f"--data must hold text; {root} has no files, except for hidden ones.")
    texts = [content for content in contents.values() if b"\0" not in content]
    binary = [file for file, content in contents.items() if b"\0" in content]
    if not texts:
        raise UserError(
            f"--data must be text, such as UTF-8; there are NUL bytes in {listed(binary)}."
        )
    train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    held_out = b"".join(texts[9::10])
    if len(texts) < 10:
        cut = len(train) - len(train) // 10
        train, held_out = train[:cut], train[cut:]
    if min(len(train), len(held_out)) <= context:
        raise UserError(
            f"--context {context} needs more than {context} bytes to train on and as many held "
            f"out; {root} has {len(train):,} and {len(held_out):,}. Use more text or a smaller "
            "--context."
        )
    skipped = listed([file.relative_to(root) for file in binary])
    skipped = f"; skipped, with NUL bytes: {skipped}" if skipped else ""
    source = f"{root} (files: {len(texts):,}{skipped})"
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), source)


def listed(files: list[pathlib.Path], count: int = 3) -> str:
    """The first ones, and how many more there are."""
    more = [f"{len(files) - count:,} more"] if len(files) > count else []
    return ", ".join([*map(str, files[:count]), *more])


def find_files(root: pathlib.Path, path: str | None) -> list[pathlib.Path]:
    """All but hidden ones; of the standard library, the default, only Python's source."""
    found = []
    for file in sorted(root.rglob("*" if path else "*.py")):
        names = file.relative_to(root).parts
        skipped = NOT_TEXT.intersection(names) if path is None else ()
        if file.is_file() and not skipped and not any(name.startswith(".") for name in names):
            found.append(file)
    return found


def held_out_windows(text: Text, context: int):
    """uint8 [windows, context + 1], evenly spread; the last byte of each is only predicted."""
    count = max(1, min(HELD_OUT_BYTES, len(text.held_out) - 1) // context)
    starts = np.linspace(0, len(text.held_out) - context - 1, count).astype(int)
    return text.held_out[starts[:, None] + np.arange(context + 1)]


def bigram_loss(text: Text, windows) -> float:
    """Nats per byte on the windows, from the counts of byte pairs in the training text, plus one
    each."""
    pairs = text.train[:-1].astype(np.int64) * BYTES + text.train[1:]
    counts = 1.0 + np.bincount(pairs, minlength=BYTES**2).reshape(BYTES, BYTES)
    surprise = -np.log(counts / counts.sum(1, keepdims=True))
    return float(surprise[windows[:, :-1], windows[:, 1:]].mean())
