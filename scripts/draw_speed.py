"""python scripts/draw_speed.py [--out FILE]

Draws README's picture of speed: the times of peers over ours on an H100, of the tables of
scripts/results.md.
"""

import argparse
import math
import pathlib
import sys

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench.pictures import Figure, Rectangle, matplotlib, write
from scripts.bench.results import BACKWARD, DETERMINISTIC, FORWARD, Timed, as_text, of_an_h100

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "design" / "speed.svg"
TITLES = {
    FORWARD: "Forward",
    BACKWARD: "Backward",
    DETERMINISTIC: "Backward,\ndeterministic=True",
}
HEADER = {  # of the columns
    "ours": "TFLOP/s,\nours",
    "cuDNN": "cuDNN",
    "fa3": "Flash-\nAttn. 3",
    "tokamax": "toka-\nmax",
    "jla": "jla",
    "PyTorch": "Py-\nTorch",
}
SLOWER, FASTER, LEVEL, INK = "#e8896b", "#7fb2d9", "#f5f5f5", "#222222"
BLUE, RED = "#2f6fa3", "#b8492a"
LEAST_COLOR, FULL_COLOR = 0.2, 1.4  # of the colour at 1; and the ratio that has all of it


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="FILE", default=PICTURE, help="the picture"
    )
    args = parser.parse_args(argv)
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "speed", "text.color": INK}):
        write(draw(of_an_h100()), args.out, metadata=dict(Date=None, Creator=None))


def draw(passes: dict[str, list[Timed]]) -> Figure:
    """A table for each pass, whose cells are red where the peer is faster."""
    cases = ordered(passes)
    figure = Figure(figsize=(11, 5.8))
    heading = lambda x, y, text, **options: figure.text(x, y, text, weight="bold", **options)
    heading(0.005, 0.97, "Time of a peer over ours", fontsize=12)
    heading(0.005, 0.935, "above 1 pallas_flash is faster", color=BLUE)
    heading(0.005, 0.905, "below 1 the peer is faster", color=RED)
    setup = "NVIDIA H100, bfloat16, 16384 tokens,\nhidden size 2048; by head size, mask, T"
    figure.text(0.005, 0.88, setup, va="top", fontsize=8)
    place = dict(left=0.235, right=0.995, top=0.81, bottom=0.01, wspace=0.05)
    grid = figure.subplots(1, len(passes), gridspec_kw=place)
    for axes, (name, rows) in zip(grid, passes.items(), strict=True):
        axes.set(xlim=(0, len(HEADER)), ylim=(len(cases), 0), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(TITLES[name], fontsize=10, pad=32)
        for column, label in enumerate(HEADER.values()):
            axes.text(column + 0.5, -0.15, label, ha="center", va="bottom", fontsize=8)
        for row in rows:
            draw_row(axes, cases.index((row.case, row.T)), row)
    for number, (case, T) in enumerate(cases):
        grid[0].text(-0.15, number + 0.5, f"{case}, T = {T}", ha="right", va="center")
    return figure


def ordered(passes: dict[str, list[Timed]]) -> list[tuple[str, int]]:
    """Cases as the longest table has them."""
    return [(row.case, row.T) for row in max(passes.values(), key=len)]


def draw_row(axes, number: int, row: Timed):
    cells = {"ours": f"{row.tflops:.0f}"} | {peer: as_text(x) for peer, x in row.peers.items()}
    for name, text in cells.items():
        column, is_loss = list(HEADER).index(name), name in row.faster_peers()
        color = LEVEL if name == "ours" else color_of(row.peers[name])
        axes.add_patch(Rectangle((column + 0.03, number + 0.05), 0.94, 0.9, color=color, lw=0))
        weight = "bold" if is_loss else "normal"
        axes.text(column + 0.5, number + 0.52, text, ha="center", va="center", weight=weight)


def color_of(x: float):
    if as_text(x) == "1.00":
        return LEVEL
    ends = [LEVEL, FASTER if x > 1 else SLOWER]
    scale = matplotlib.colors.LinearSegmentedColormap.from_list("", ends)
    return scale(min(LEAST_COLOR + abs(math.log(x)) / math.log(FULL_COLOR), 1.0))


if __name__ == "__main__":
    main()
