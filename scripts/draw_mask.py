"""python scripts/draw_mask.py 'Window(128, 128) | GlobalTokens(4)'

Draws which blocks of queries and keys a mask of pallas_flash.masks leaves empty, partial and full,
and counts them.
"""

import argparse
import pathlib
import sys

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash import masks
from scripts.typed_mask import typed_mask

KINDS = {"skipped": "#e9e9e9", "partial: masked": "#f0b040", "full: no mask": "#3b76af"}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "mask", type=typed_mask, help="an expression of the names in pallas_flash.masks"
    )
    parser.add_argument("--queries", type=int, default=1024, metavar="T")
    parser.add_argument("--keys", type=int, metavar="S", help="as many as queries if not given")
    parser.add_argument(
        "--block", type=int, default=64, help="queries and keys of a block (default: %(default)s)"
    )
    parser.add_argument("--query-offset", type=int, default=0, help="the key position of query 0")
    parser.add_argument(
        "--heads", type=int, default=1, help="for a mask that differs by head: a picture of each"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("mask.png"),
        help="the picture (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    made = masks.create_block_mask(
        args.mask,
        args.queries,
        args.keys or args.queries,
        block=args.block,
        query_offset=args.query_offset,
        heads=args.heads,
    )
    draw(made).savefig(args.out, dpi=110, facecolor="white")
    print(f"{said(made)}\nwritten  {args.out}")


def said(made: masks.BlockMask) -> str:
    """The mask, its counts, and what they save of the blocks of full attention."""
    counts = made.counts()
    total = sum(counts.values())
    numbers = ", ".join(f"{n} {name}" for name, n in counts.items())
    return (
        f"{made.first!r}: {total} blocks, {numbers}; {counts['skipped'] / total:.0%} of the "
        "work saved"
    )


def draw(made: masks.BlockMask) -> Figure:
    of = made.second
    kinds = np.asarray(of.block_types)[0]
    figure = Figure(figsize=(1.2 + 4.6 * len(kinds), 5.8), layout="constrained")
    figure.suptitle(said(made), fontsize=9, wrap=True)
    for head, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), head + 1)
        edges = (np.arange(n + 1) * of.block_size for n in kind.shape[::-1])
        axes.pcolormesh(
            *edges,
            kind,
            cmap=ListedColormap(list(KINDS.values())),
            vmin=0,
            vmax=2,
            edgecolor="white",
            linewidth=0.3,
        )
        axes.set(
            xlabel="key",
            ylabel="query",
            aspect="equal",
            title=f"head {head}" if len(kinds) > 1 else "",
        )
        axes.set(xlim=(0, of.keys), ylim=(of.queries, 0))
    handles = [Patch(color=color, label=label) for label, color in KINDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
