"""The times of an H100, read from the tables of scripts/results.md."""

import itertools
import pathlib
import re
from typing import NamedTuple

FILE = pathlib.Path(__file__).parents[1] / "results.md"
SECTION = "## An H100", "### Hopper by the clock"
PEERS = ("cuDNN", "fa3", "tokamax", "jla", "PyTorch")
FORWARD, BACKWARD, DETERMINISTIC = "forward", "backward", "backward, deterministic=True"
ONE_KERNEL = 128  # the widest heads of the one kernel: wider ones have the deterministic two alone


class Timed(NamedTuple):
    case: str  # head size and mask
    T: int
    tflops: float
    peers: dict[str, float]  # a peer's time over ours

    def faster_peers(self) -> dict[str, str]:
        """Peers with a ratio below 1, and the ratio as it is printed."""
        texts = {peer: as_text(ratio) for peer, ratio in self.peers.items()}
        return {peer: text for peer, text in texts.items() if float(text) < 1}


def as_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


def of_an_h100() -> dict[str, list[Timed]]:
    """FORWARD, BACKWARD (as by default, which is the faster) and DETERMINISTIC."""
    begin, end = map(FILE.read_text().index, SECTION)
    forward, backward = _tables(FILE.read_text()[begin:end])
    return {
        FORWARD: [_timed(row) for row in forward],
        BACKWARD: [_over(_timed(row), min(1, _deterministic(row) or 1)) for row in backward],
        DETERMINISTIC: [_over(_timed(row), by) for row in backward if (by := _deterministic(row))],
    }


def _tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of tables of times, by column; an empty first cell repeats the one above."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, _, *lines = ([c.strip() for c in x.split("|")[1:-1]] for x in table.splitlines())
        names = ["case", *(name.replace("`", "").partition(" ")[0] for name in header[1:])]
        if "TFLOP/s" in names:
            rows = [dict(zip(names, line, strict=True)) for line in lines]
            for above, row in itertools.pairwise(rows):
                row["case"] = row["case"] or above["case"]
            found.append(rows)
    return found


def _timed(row: dict[str, str]) -> Timed:
    number = lambda name: re.match(r"[\d.]+", row.get(name, ""))  # not of what was wrong
    ratios = {peer: float(number(peer)[0]) for peer in PEERS if number(peer)}
    return Timed(row["case"], int(row["T"]), float(row["TFLOP/s"]), ratios)


def _deterministic(row: dict[str, str]) -> float | None:
    """The time of the deterministic backward over that of the row; None where none was taken."""
    head_size = int(re.match(r"\d+", row["case"])[0])
    return 1.0 if head_size > ONE_KERNEL else float(row["deterministic"] or 0) or None


def _over(timed: Timed, by: float) -> Timed:
    """The row for an implementation of ours that takes `by` times as long."""
    peers = {peer: ratio / by for peer, ratio in timed.peers.items()}
    return timed._replace(tflops=timed.tflops / by, peers=peers)
