"""Runs of scripts/train_gpt.py: small, and what they leave."""

import csv
import pathlib

import numpy as np
import pytest

from scripts import train_gpt

SCRIPT = pathlib.Path(train_gpt.__file__)
ROOT = SCRIPT.parents[1]
STEPS = 13
SIZES = "--layers 2 --heads 2 --kv-heads 1 --features 16 --context 24 --batch 3".split()
TINY = [*SIZES, *f"--steps {STEPS} --eval-every 5 --save-every 4 --warmup 3".split()]


def write_text(path: pathlib.Path) -> str:
    """Lines that a context tells apart and a byte alone does not."""
    lines = ["banana cabana", "a cabin abacus", "cab in a bin", "nab a bubba"]
    order = np.random.default_rng(0).integers(0, len(lines), 1000)
    path.write_text("".join(lines[i] + "\n" for i in order))
    return str(path)


def train(*arguments):
    train_gpt.main(list(map(str, arguments)))


def error_of(main, *arguments) -> str:
    """The one line with which a program ends."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    message = ended.value.code
    assert isinstance(message, str), "a text as exit code is printed, with status 1"
    assert ": error: " in message and "\n" not in message
    return message


def loss_curve(folder) -> dict:
    """{step: (train loss, held-out loss or None)} of loss.csv."""
    with (folder / "loss.csv").open() as file:
        next(rows := csv.reader(file))
        return {
            int(i): (float(train), float(held_out) if held_out else None)
            for i, train, held_out in rows
        }


def train_losses(folder):
    return np.array([train for train, _ in loss_curve(folder).values()])


def same_curves(folder, other) -> bool:
    return (folder / "loss.csv").read_bytes() == (other / "loss.csv").read_bytes()


def contents(folder) -> dict:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}
