"""The text to train on: bytes of files, a part held out, and what a bigram model makes of it."""

import hashlib
import pathlib
import sysconfig
from typing import Any, NamedTuple

import numpy as np

from scripts.gpt_run.options import BYTES
from scripts.gpt_run.stops import Refused

HELD_OUT_BYTES = 65_536  # that the held-out loss is measured on
# tests, and tables of numbers
NOT_TEXT = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


class Text(NamedTuple):
    train: Any  # uint8
    held_out: Any  # uint8
    source: str

    def fingerprint(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"|" + self.held_out.tobytes()).hexdigest()


def read_text(path: str | None, context: int) -> Text:
    root = pathlib.Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise Refused(f"--data must be a file or a folder; {root} does not exist.")
    files = [root] if root.is_file() else sorted(text_files(root, python_only=path is None))
    if not files:
        raise Refused(
            f"--data must hold text; the folder {root} has no files in it, but for hidden ones."
        )
    contents = {file: file.read_bytes() for file in files}
    binary = [file for file, content in contents.items() if b"\0" in content]
    if len(binary) == len(files):
        raise Refused(f"--data must be text, as UTF-8; there are NUL bytes in {named(binary)}.")
    texts = [content for content in contents.values() if b"\0" not in content]
    train, held_out = (
        b"".join(t for i, t in enumerate(texts) if i % 10 != 9),
        b"".join(texts[9::10]),
    )
    if len(texts) < 10:
        cut = len(train) - len(train) // 10
        train, held_out = train[:cut], train[cut:]
    if min(len(train), len(held_out)) <= context:
        raise Refused(
            f"--context {context} needs more than {context} bytes of training text and as many "
            f"held out; the text of {root} has "
            f"{len(train):,} and {len(held_out):,}. Give more text or a smaller --context."
        )
    source = f"{root}, {len(texts):,} file{'s' if len(texts) > 1 else ''}"
    source += f", left out for their NUL bytes: {named(binary)}" if binary else ""
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), source)


def named(files: list[pathlib.Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1:,} more" if len(files) > 1 else "")


def text_files(root: pathlib.Path, python_only: bool):
    for file in root.rglob("*.py" if python_only else "*"):
        folders = file.relative_to(root).parts[:-1]
        if (python_only and NOT_TEXT.intersection(folders)) or any(
            part.startswith(".") for part in (*folders, file.name)
        ):
            continue
        if file.is_file():
            yield file


def held_out_windows(text: Text, context: int):
    """uint8 [windows, context + 1], evenly spread; the last byte of each is only predicted."""
    count = max(1, min(HELD_OUT_BYTES, len(text.held_out) - 1) // context)
    starts = np.linspace(0, len(text.held_out) - context - 1, count).astype(int)
    return text.held_out[starts[:, None] + np.arange(context + 1)]


def bigram_loss(text: Text, windows) -> float:
    """Nats a byte on the windows, of the frequencies of byte pairs in the training text, each
    counted once more than it is."""
    pairs = text.train[:-1].astype(np.int64) * BYTES + text.train[1:]
    counts = 1.0 + np.bincount(pairs, minlength=BYTES**2).reshape(BYTES, BYTES)
    surprise = -np.log(counts / counts.sum(1, keepdims=True))
    return float(surprise[windows[:, :-1], windows[:, 1:]].mean())
