"""python scripts/draw_mask.py 'Window(128, 128) | GlobalTokens(4)'

Draws which blocks of queries and keys a mask of pallas_flash.masks leaves empty, partial and full,
and counts them.
"""

import argparse
import pathlib
import sys
import textwrap
from typing import NamedTuple

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash import masks
from scripts.bench.pictures import Figure, ListedColormap, Patch, write

COLORS = {"skipped": "#e9e9e9", "partial: masked": "#f0b040", "full: no mask": "#3b76af"}
LEGEND = [Patch(color=color, label=label) for label, color in COLORS.items()]


class Typed(NamedTuple):
    """A mask, and how it was typed: its repr may hold thousands of numbers."""

    mask: masks.Mask
    text: str


def parse_mask(text: str) -> Typed:
    try:
        mask = eval(text, vars(masks) | {"np": np})
    except Exception as error:  # whatever the expression raises
        raise argparse.ArgumentTypeError(f"{text!r} makes no mask: {error}") from error
    if not isinstance(mask, masks.Mask):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a mask such as Causal() & Dilated(4); it is a {type(mask).__name__}"
        )
    return Typed(mask, textwrap.shorten(text, 100))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mask", type=parse_mask, help="an expression of the names in pallas_flash.masks")
    add("--queries", type=int, default=1024, metavar="T")
    add("--keys", type=int, metavar="S", help="as many as queries if not given")
    add("--block", type=int, default=64, help="block size (default: %(default)s)")
    add("--query-offset", type=int, default=0, help="the key position of query 0")
    add("--heads", type=int, default=1, help="draw each head, for a mask that differs by head")
    out = pathlib.Path("mask.png")
    add("--out", type=pathlib.Path, default=out, help="the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        block_mask = masks.create_block_mask(
            args.mask.mask,
            args.queries,
            args.keys or args.queries,
            block=args.block,
            query_offset=args.query_offset,
            heads=args.heads,
        )
    except (TypeError, ValueError) as error:  # its arrays do not fit the sizes
        parser.error(str(error))
    title = f"{args.mask.text}: {summary(block_mask)}"
    print(title)
    write(draw(block_mask, title), args.out, dpi=110)


def summary(block_mask: masks.BlockMask) -> str:
    """Counts of the kinds of blocks, and the work of full attention that they save."""
    counts = block_mask.counts()
    total = sum(counts.values())
    words = ", ".join(f"{n} {name}" for name, n in counts.items())
    saved = counts["skipped"] / total
    return f"{total} blocks, {words}; {saved:.0%} of the work saved"


def draw(block_mask: masks.BlockMask, title: str) -> Figure:
    heads = block_mask.second.block_types.shape[1]
    figure = Figure(figsize=(1.2 + 4.6 * heads, 5.8), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True)
    for head, axes in enumerate(figure.subplots(1, heads, squeeze=False)[0]):
        draw_blocks(axes, block_mask, head)
        axes.set(xlabel="key", ylabel="query", title=f"head {head}" if heads > 1 else "")
    figure.legend(handles=LEGEND, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_blocks(axes, block_mask: masks.BlockMask, head: int = 0):
    """Draws the blocks of a head of a mask in the colours of COLORS."""
    mask = block_mask.second
    types = np.asarray(mask.block_types)[0, head]
    edges = [np.arange(n + 1) * mask.block_size for n in types.shape[::-1]]
    colors = ListedColormap(list(COLORS.values()))
    axes.pcolormesh(*edges, types, cmap=colors, vmin=0, vmax=2, edgecolor="white", linewidth=0.3)
    axes.set(xlim=(0, mask.keys), ylim=(mask.queries, 0), aspect="equal")


if __name__ == "__main__":
    main()
