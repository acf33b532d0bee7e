"""python scripts/draw_design.py [--out DIR]

Draws the pictures of docs/DESIGN.md: tiles, memory, mma; and those of docs/masks.md: masks,
alignment, lists. Nothing in them is placed or counted by hand: the tiles are those of
`create_block_mask`, the bytes come from formulas, the lanes from the layouts of mma in the PTX ISA.
"""

import argparse
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash import accounting, masks
from scripts.bench.pictures import Figure, Patch, Rectangle, matplotlib, write
from scripts.draw_mask import LEGEND, draw_blocks

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "design"
BLUE, AMBER, GREEN, INK = "#3b76af", "#f0b040", "#5aa469", "#222222"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", default=FOLDER, help="folder of the pictures"
    )
    args = parser.parse_args(argv)
    for name, draw in PICTURES.items():
        with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": name, "text.color": INK}):
            write(draw(), args.out / f"{name}.svg", metadata=dict(Date=None, Creator=None))


# ---- tiles: which of them a mask visits ----

LENGTH, BLOCK = 96, 8  # queries and keys, and both of a tile


def example_masks() -> dict[str, masks.Mask]:
    ids = np.repeat(np.arange(4), [20, 36, 12, 28])[None].astype(np.int32)
    length = lambda n: np.array([n], np.int32)
    documents = masks.Documents(ids, ids)
    return {
        "causal": masks.Causal(),
        "causal window (30, 0)": masks.Causal() & masks.Window(30, 0),
        "window (20, 12)": masks.Window(20, 12),
        "documents": documents,
        "documents, causal": documents & masks.Causal(),
        "lengths: 70 queries, 60 keys": masks.QueryLengths(length(70))
        & masks.KeyLengths(length(60)),
    }


def block_mask(mask: masks.Mask) -> masks.BlockMask:
    return masks.create_block_mask(mask, LENGTH, LENGTH, block=BLOCK)


def draw_tiles() -> Figure:
    figure = Figure(figsize=(10, 7.4))
    place = dict(left=0.06, right=0.99, top=0.9, bottom=0.06, hspace=0.32, wspace=0.2)
    titles = {}
    for name, mask in example_masks().items():
        one = block_mask(mask)
        counts = one.counts()
        visited = counts["partial"] + counts["full"]
        of_all = f"{visited} of {sum(counts.values())} tiles visited, {counts['partial']} masked"
        titles[f"{name}\n{of_all}"] = one
    draw_grid(figure, figure.subplots(2, 3, gridspec_kw=place), titles, fontsize=9.5)
    return figure


def draw_grid(figure: Figure, grid, tiles: dict[str, masks.BlockMask], **title):
    """Draws the tiles of each mask below its title, and names the axes at the edges alone."""
    for axes, (name, one) in zip(grid.ravel(), tiles.items(), strict=True):
        draw_blocks(axes, one)
        axes.set_title(name, **title)
        axes.set(xticks=range(0, LENGTH + 1, 24), yticks=range(0, LENGTH + 1, 24))
    for axes in grid[-1]:
        axes.set_xlabel("key")
    for axes in grid[:, 0]:
        axes.set_ylabel("query")
    figure.legend(handles=LEGEND, loc="upper center", ncols=3, frameon=False)


# ---- masks: the kinds that a user combines ----


def kinds_of_masks() -> dict[str, masks.Mask]:
    """Masks by how they are typed, with ids, lengths and a prefix as arrays."""
    ids = np.repeat(np.arange(3), [36, 24, 36])[None].astype(np.int32)
    of_one_row = lambda n: np.array([n], np.int32)
    return {
        "Causal()": masks.Causal(),
        "Window(24, 8)": masks.Window(24, 8),
        "Chunked(24)": masks.Chunked(24),
        "PrefixLM(prefix)": masks.PrefixLM(of_one_row(32)),
        "Documents(ids, ids)": masks.Documents(ids, ids),
        "KeyLengths(lengths)": masks.KeyLengths(of_one_row(60)),
        "Causal() & Documents(ids, ids)": masks.Causal() & masks.Documents(ids, ids),
        "Window(12, 12) | GlobalTokens(8)": masks.Window(12, 12) | masks.GlobalTokens(8),
    }


def draw_masks() -> Figure:
    figure = Figure(figsize=(10, 5.8))
    place = dict(left=0.05, right=0.98, top=0.88, bottom=0.08, hspace=0.3, wspace=0.22)
    tiles = {name: block_mask(mask) for name, mask in kinds_of_masks().items()}
    grid = figure.subplots(2, 4, gridspec_kw=place)
    draw_grid(figure, grid, tiles, fontsize=7.5, family="monospace")
    return figure


# ---- alignment: causal masks where T is not S ----

FEW, MANY = 4, 8


def alignments() -> dict[str, masks.BlockMask]:
    """Causal masks by their titles, in blocks of one query and one key."""
    aligned = {}
    for T, S in (FEW, MANY), (MANY, FEW):
        make = lambda offset: masks.create_block_mask(
            masks.Causal(), T, S, block=1, query_offset=offset
        )
        aligned[f"T = {T}, S = {S}\ntop-left, query_offset=0"] = make(0)
        aligned[f"T = {T}, S = {S}\nbottom-right, query_offset=S - T"] = make(S - T)
    return aligned


def draw_alignment() -> Figure:
    figure = Figure(figsize=(10, 2.9))
    place = dict(left=0.04, right=0.99, top=0.84, bottom=0.12, wspace=0.15)
    grid = figure.subplots(1, 4, gridspec_kw=place)
    for axes, (name, mask) in zip(grid, alignments().items(), strict=True):
        draw_blocks(axes, mask)
        axes.set_title(name, fontsize=9)
        axes.set(xlabel="key", ylabel="query", xticks=[], yticks=[], anchor="N")
    return figure


# ---- lists: keys by their numbers ----

TOKENS, GROUP = 24, 4  # and the tokens of a block


def example_lists() -> dict[str, masks.Mask]:
    """Masks by how they are typed; lists are the largest of drawn scores. Under a causal mask the
    key, or block, of the query itself is one of them."""
    rng = np.random.default_rng(0)

    def largest(n, block, query_block, causal):
        scores = rng.normal(size=(TOKENS // query_block, TOKENS // block))
        if causal:
            behind = np.arange(TOKENS)[:, None] // block - np.arange(TOKENS // block)
            scores = np.where(behind == 0, np.inf, np.where(behind < 0, -np.inf, scores))
        chosen = np.argsort(-scores, axis=1)[:, None, :n].astype(np.int32)
        return masks.KeyLists(chosen, block, query_block)

    return {
        "KeyLists(indices) & Causal()": largest(5, 1, 1, causal=True) & masks.Causal(),
        "KeyLists(indices, 4) & Causal()": largest(3, GROUP, 1, causal=True) & masks.Causal(),
        "KeyLists(indices, 4, 4)": largest(2, GROUP, GROUP, causal=False),
    }


def draw_lists() -> Figure:
    figure = Figure(figsize=(10, 3.8))
    place = dict(left=0.05, right=0.99, top=0.92, bottom=0.12, wspace=0.1)
    grid = figure.subplots(1, 3, gridspec_kw=place)
    for axes, (name, mask) in zip(grid, example_lists().items(), strict=True):
        draw_blocks(axes, masks.create_block_mask(mask, TOKENS, TOKENS, block=1))
        ticks = range(0, TOKENS + 1, GROUP)
        axes.set(xlabel="key", xticks=ticks, yticks=ticks)
        axes.set_title(name, fontsize=9, family="monospace")
    grid[0].set_ylabel("query")
    return figure


# ---- memory: where things are, and what moves ----

GPUS = {"A100": accounting.GPUS["A100-80GB"], "H200": accounting.GPUS["H200"]}
L2_RATE = {"A100": 5120}  # bytes a clock, of NVIDIA's whitepaper; the H200's is not published


def memories(name: str) -> list[str]:
    """Size and bandwidth of a GPU's memories, from the fastest to the slowest."""
    gpu = GPUS[name]
    total = lambda size: f"{gpu.cores} x {size >> 10} KB = {gpu.cores * size / 2**20:.0f} MB"
    rate = lambda bandwidth: f"{bandwidth / 1e12:.1f} TB/s"
    l2 = rate(L2_RATE[name] * gpu.clock) if name in L2_RATE else "rate not published"
    return [
        f"{name}  {total(4 * gpu.registers)}",
        # a core moves 128 bytes a clock
        f"{name}  {total(gpu.shared_memory)}, {rate(128 * gpu.cores * gpu.clock)}",
        f"{name}  {gpu.l2 >> 20} MB, {l2}",
        f"{name}  {gpu.memory >> 30} GB, {rate(gpu.bandwidth)}",
    ]


class Sizes(NamedTuple):
    T: int
    S: int
    H: int


class Moved(NamedTuple):
    """Elements that the programs of one head read and write, by array."""

    read: dict[str, int]
    written: dict[str, int]


def moved_standard(z: Sizes) -> Moved:
    """Three kernels, each of which reads its operands once; three passes over S."""
    T, S, H = z
    return Moved(
        dict(q=T * H, k=S * H, s=3 * T * S, p=T * S, v=S * H), dict(s=T * S, p=T * S, o=T * H)
    )


def moved_flash1(z: Sizes, M: int) -> Moved:
    T, S, H = z
    tiles = math.ceil(S / math.ceil(M / (4 * H)))  # of keys
    rows = dict(o=tiles * T * H, l=tiles * T, m=tiles * T)
    return Moved(dict(q=tiles * T * H, k=S * H, v=S * H) | rows, rows)


def moved_flash2(z: Sizes, block_q: int) -> Moved:
    T, S, H = z
    tiles = math.ceil(T / block_q)  # of queries
    return Moved(dict(q=T * H, k=tiles * S * H, v=tiles * S * H), dict(o=T * H, lse=T))


# a head of 16-bit elements, and the queries of a tile in FlashAttention 2 and 3
EXAMPLE, ROWS = Sizes(4096, 4096, 128), 128
SRAM = GPUS["A100"].shared_memory // 2  # elements: FlashAttention 1's M
LEVELS = {"registers": "#fde0b8", "shared memory": "#fbeecb", "L2 cache": "#dfeaf4"}
LEVELS |= {"HBM": "#c3d7ea"}
STATE, INPUTS = "$S_{ij}$  $P_{ij}$  $O_i$  $m_i$  $l_i$", "Q  K  V  O"
QUERY_TILES = "$2\\,SH$ for each of\n$T\\,/\\,B_r$ query tiles"
# For each generation the arrays at each level of memory, what crosses between shared memory and L2,
# and its amount.
GENERATIONS = {
    "standard:\nthree kernels": (
        "tiles of a product",
        "tiles of its operands,\nrows of S",
        "S  P\nas far as they fit",
        f"{INPUTS}\nS  P",
        "$6\\,TS$",
        moved_standard(EXAMPLE),
    ),
    "FlashAttention 1:\nkey tiles outside": (
        "$S_{ij}$  $P_{ij}$",
        "$K_j$  $V_j$\n$Q_i$  $O_i$  $m_i$  $l_i$",
        "Q  O  m  l\nfor every key tile",
        f"{INPUTS}\nm  l",
        "$3\\,TH$ for each of\n$4\\,SH\\,/\\,M$ key tiles",
        moved_flash1(EXAMPLE, SRAM),
    ),
    "FlashAttention 2:\nquery tiles outside": (
        f"$Q_i$\n{STATE}",
        "$K_j$  $V_j$",
        "K  V\nfor every query tile",
        f"{INPUTS}\nlse",
        QUERY_TILES,
        moved_flash2(EXAMPLE, ROWS),
    ),
    "FlashAttention 3:\nwarp-specialized": (
        STATE,
        "$Q_i$\nrings of $K_j$ and $V_j$",
        "K  V of the heads\nthat run together",
        f"{INPUTS}\nlse",
        QUERY_TILES,
        moved_flash2(EXAMPLE, ROWS),
    ),
}


def draw_memory() -> Figure:
    """A table of the levels, the elements that cross between an SM and L2, and their bytes."""
    figure = Figure(figsize=(11, 6.4))
    top = figure.add_axes((0.01, 0.3, 0.98, 0.69))
    top.axis("off")
    both = zip(*map(memories, GPUS), strict=True)
    head = [f"{level}\n{a}\n{b}" for level, (a, b) in zip(LEVELS, both, strict=True)]
    head.append("elements moved between\nan SM and the L2 cache")
    rows = [list(row) for row in zip(head, *GENERATIONS.values(), strict=False)]
    colors = [*LEVELS.values(), "white"]
    rows = [["", *GENERATIONS], *rows[:2], rows[4], *rows[2:4]]
    colors = ["white", *colors[:2], "white", *colors[2:4]]
    table = top.table(
        rows,
        cellColours=[[color] * 5 for color in colors],
        colWidths=[0.3, *[0.175] * 4],
        cellLoc="center",
        bbox=(0, 0, 1, 1),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, column), cell in table.get_celld().items():
        cell.set(edgecolor="white", linewidth=2)
        if row == 0:
            cell.set_text_props(weight="bold")
        if column == 0:
            cell.set_text_props(ha="left")
    bottom = figure.add_axes((0.304, 0.02, 0.686, 0.26))
    for offset, field, color in ((-0.15, "read", BLUE), (0.15, "written", AMBER)):
        each = [getattr(moved, field) for *_, moved in GENERATIONS.values()]
        megabytes = [sum(arrays.values()) * 2 / 1e6 for arrays in each]
        bars = bottom.bar(np.arange(4) + offset, megabytes, 0.26, color=color, label=field)
        bottom.bar_label(bars, fmt="{:.0f}")
    bottom.set(xlim=(-0.5, 3.5))
    bottom.margins(y=0.15)
    bottom.axis("off")
    bottom.legend(loc="upper right", frameon=False)
    words = "the same in MB, for a head with\nT = S = {}, H = {}, 16 bits each".format(*EXAMPLE[1:])
    sizes = f"$B_r$ = {ROWS}\nM = {SRAM:,} (an SM of the A100)"
    figure.text(0.016, 0.15, f"{words}\n\n{sizes}", va="center", linespacing=1.4)
    return figure


# ---- mma: which lane has what ----


def lanes(registers: list[tuple[int, int]], columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The lane and the register of each element of 16 rows; a register holds, of each lane, two
    neighbours in a block of 8 x 8 at these (row, column)."""
    lane, register = (np.zeros((16, columns), int) for _ in range(2))
    for n, (top, left) in enumerate(registers):
        for i in range(32):
            at = top + i // 4, slice(left + i % 4 * 2, left + i % 4 * 2 + 2)
            lane[at], register[at] = i, n
    return lane, register


SUM = [(0, 0), (8, 0)]  # m16n8k16's accumulator
OPERAND = [(0, 0), (8, 0), (0, 8), (8, 8)]  # its left operand


def draw_mma() -> Figure:
    figure = Figure(figsize=(9, 4.6))
    place = dict(left=0.05, right=0.99, top=0.88, bottom=0.03, wspace=0.12)
    grid = figure.subplots(1, 3, gridspec_kw=place | dict(width_ratios=[1, 1, 2]))
    colors = [BLUE, AMBER, GREEN, "#b07aa1"]
    panels = [("a sum of 8 columns", SUM, 8, 0), ("the next one", SUM, 8, 2)]
    panels += [("a left operand of 16 columns", OPERAND, 16, 0)]
    for axes, (title, registers, columns, first) in zip(grid, panels, strict=True):
        lane, register = lanes(registers, columns)
        for (i, j), n in np.ndenumerate(lane[:, ::2]):  # two columns are one register's
            color = colors[first + register[i, 2 * j]]
            axes.add_patch(Rectangle((2 * j, i), 2, 1, facecolor=color, edgecolor="white", lw=0.8))
            axes.text(2 * j + 1, i + 0.55, str(n), ha="center", va="center", fontsize=7.5)
        axes.set(xlim=(0, columns), ylim=(16, 0), xticks=[], yticks=range(0, 17, 8), title=title)
        axes.set_frame_on(False)
    labels = [Patch(color=color, label=f"register {n}") for n, color in enumerate(colors)]
    figure.legend(handles=labels, loc="upper right", ncols=4, frameon=False, fontsize=8)
    figure.text(0.01, 0.965, "numbers: the lane of a warp", fontsize=8)
    return figure


PICTURES = dict(tiles=draw_tiles, memory=draw_memory, mma=draw_mma)
PICTURES |= dict(masks=draw_masks, alignment=draw_alignment, lists=draw_lists)

if __name__ == "__main__":
    main()
