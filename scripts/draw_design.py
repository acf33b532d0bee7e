"""python scripts/draw_design.py [--out DIR] [--format svg|png]

Draws the pictures of pallas_flash/DESIGN.md: tiles, memory, timeline. Nothing in them is placed or
counted by hand: the tiles come from the package's own schedule, the bytes from formulas, the
timeline from a simulation. Same code, same files.
"""

import argparse
import collections
import heapq
import itertools
import math
import pathlib
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from pallas_flash import accounting, masks, schedule

FOLDER = pathlib.Path(__file__).parents[1] / "pallas_flash" / "design"
BLUE, AMBER, GREEN, PURPLE, GRAY, INK = (
    "#3b76af",
    "#f0b040",
    "#5aa469",
    "#9467bd",
    "#e9e9e9",
    "#222222",
)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", default=FOLDER, help="folder of the pictures"
    )
    parser.add_argument(
        "--format", choices=("svg", "png"), default="svg", help="DESIGN.md shows svg, the default"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in dict(tiles=draw_tiles, memory=draw_memory, timeline=draw_timeline).items():
        with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": name, "text.color": INK}):
            options = (
                dict(metadata=dict(Date=None, Creator=None))
                if args.format == "svg"
                else dict(dpi=110)
            )
            draw().savefig(args.out / f"{name}.{args.format}", facecolor="white", **options)
        print(f"written  {args.out / name}.{args.format}")


# ---- tiles: what the schedule visits ----

LENGTH, BLOCK = 96, 8  # queries and keys, and both of a tile
START, STOP = (
    dict(color=INK, linewidth=1.4, linestyle=(0, (2, 1.2))),
    dict(color=INK, linewidth=1.4),
)


class Visits(NamedTuple):
    """What one mask makes of the tiles of one head."""

    blocks: np.ndarray  # [query tiles, 4], schedule.Blocks
    start: np.ndarray  # [T]
    stop: np.ndarray

    def kind(self, i: int, j: int) -> str:
        first, full_first, full_last, last = self.blocks[i]
        if not first <= j < last:
            return "skipped"
        return "full" if full_first <= j < full_last else "masked"


def example_masks() -> dict[str, list[masks.Mask]]:
    ids = np.repeat(np.arange(4), [20, 36, 12, 28])[None].astype(np.int32)
    whole = lambda n: np.array([n], np.int32)
    return {
        "causal": [masks.Causal()],
        "causal window (30, 0)": [masks.Causal(), masks.Window(30, 0)],
        "window (20, 12)": [masks.Window(20, 12)],
        "documents": [masks.Documents(ids, ids)],
        "documents, causal": [masks.Documents(ids, ids), masks.Causal()],
        "lengths: 70 queries, 60 keys": [
            masks.QueryLengths(whole(70)),
            masks.KeyLengths(whole(60)),
        ],
    }


def visits(rules: list[masks.Mask]) -> Visits:
    resolved_mask = masks.resolve(rules, 1, LENGTH, LENGTH, 0)
    rows = resolved_mask.narrow(masks.ResolvedMask.BY_BATCH, lambda x: x[:, None])
    start, stop = (
        np.broadcast_to(end, (1, LENGTH))[0] for end in rows.interval(np.arange(LENGTH)[None])
    )
    tiled = lambda x: None if x is None else np.broadcast_to(x, (1, LENGTH))[0].reshape(-1, BLOCK)
    blocks = schedule.key_blocks(
        tiled(start), tiled(stop), tiled(resolved_mask.contiguous), BLOCK, axis=-1
    )
    return Visits(np.stack(blocks, -1), start, stop)


def draw_tiles() -> Figure:
    figure = Figure(figsize=(10, 7.3))
    colors = dict(full=BLUE, masked=AMBER, skipped=GRAY)
    for number, (name, rules) in enumerate(example_masks().items()):
        column, row = number % 3, number // 3
        axes = figure.add_axes((0.06 + 0.32 * column, 0.53 - 0.475 * row, 0.27, 0.27 * 10 / 7.3))
        seen = visits(rules)
        squares = {kind: [] for kind in colors}
        for i, j in np.ndindex(LENGTH // BLOCK, LENGTH // BLOCK):
            squares[seen.kind(i, j)].append(
                Path.unit_rectangle().transformed(Affine2D().translate(j, i).scale(BLOCK))
            )
        for kind, paths in squares.items():
            axes.add_patch(
                PathPatch(
                    Path.make_compound_path(*paths),
                    facecolor=colors[kind],
                    edgecolor="white",
                    linewidth=1,
                )
            )
        rows = np.arange(LENGTH + 1)
        for end, line in ((seen.start, START), (np.maximum(seen.start, seen.stop), STOP)):
            axes.plot(np.append(end, end[-1]), rows, drawstyle="steps-pre", **line)
        full, masked, skipped = (len(squares[kind]) for kind in ("full", "masked", "skipped"))
        title = (
            f"{name}\n{full + masked} of {full + masked + skipped} tiles visited, {masked} masked"
        )
        axes.set_title(title, fontsize=9.5)
        axes.set(
            xlim=(0, LENGTH),
            ylim=(LENGTH, 0),
            xticks=range(0, LENGTH + 1, 24),
            yticks=range(0, LENGTH + 1, 24),
        )
        axes.tick_params(labelsize=8)
        if row == 1:
            axes.set_xlabel("key")
        if column == 0:
            axes.set_ylabel("query")
    words = dict(
        full="visited, no mask needed",
        masked="visited, masked",
        skipped="skipped: no load, no product",
    )
    handles = [Patch(color=colors[kind], label=text) for kind, text in words.items()]
    for line, text in ((START, "start of a query's keys"), (STOP, "stop")):
        handles += axes.plot([], [], label=text, **line)
    figure.legend(
        handles=handles, loc="upper center", ncols=5, frameon=False, fontsize=9, columnspacing=1.5
    )
    return figure


# ---- memory: where things are, and what moves ----


GPUS = {"A100": accounting.GPUS["A100-80GB"], "H200": accounting.GPUS["H200"]}
L2_RATE = {"A100": 5120}  # bytes a clock, of NVIDIA's whitepaper; the H200's is not published


def sizes(name: str) -> list[str]:
    """Size and bandwidth of a GPU's memories, from the fastest level to the slowest."""
    gpu = GPUS[name]
    whole = lambda size: f"{gpu.cores} x {size >> 10} KB = {gpu.cores * size / 2**20:.0f} MB"
    rate = lambda bandwidth: f"{bandwidth / 1e12:.1f} TB/s"
    return [
        whole(4 * gpu.registers),
        # a core moves 128 bytes a clock
        f"{whole(gpu.shared_memory)}, {rate(128 * gpu.cores * gpu.clock)}",
        f"{gpu.l2 >> 20} MB, "
        f"{rate(L2_RATE[name] * gpu.clock) if name in L2_RATE else 'rate not published'}",
        f"{gpu.memory >> 30} GB, {rate(gpu.bandwidth)}",
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


# a head of 16-bit elements, and the queries of a tile in generations 2 and 3
EXAMPLE, ROWS = Sizes(4096, 4096, 128), 128
SRAM = GPUS["A100"].shared_memory // 2  # elements: generation 1's M


class Generation(NamedTuple):
    name: str
    where: tuple[str, str, str, str]  # arrays in registers, shared memory, L2 and HBM
    formula: str
    moved: Moved


def generations() -> list[Generation]:
    rows, inputs = "$S_{ij}\\ \\ P_{ij}\\ \\ O_i\\ \\ m_i\\ \\ l_i$", "Q  K  V  O"
    query_tiles = "$2\\,SH$ for each of\n$T\\,/\\,B_r$ query tiles"
    return [
        Generation(
            "standard:\nthree kernels",
            (
                "tiles of a product",
                "tiles of its operands,\nrows of S",
                "S  P\nas far as they fit",
                f"{inputs}\nS  P",
            ),
            "$6\\,TS$",
            moved_standard(EXAMPLE),
        ),
        Generation(
            "FlashAttention 1:\nkey tiles outside",
            (
                "$S_{ij}\\ \\ P_{ij}$",
                "$K_j\\ \\ V_j$\n$Q_i\\ \\ O_i\\ \\ m_i\\ \\ l_i$",
                "Q  O  m  l\nfor every key tile",
                f"{inputs}\nm  l",
            ),
            "$3\\,TH$ for each of\n$4\\,SH\\,/\\,M$ key tiles",
            moved_flash1(EXAMPLE, SRAM),
        ),
        Generation(
            "FlashAttention 2:\nquery tiles outside",
            (f"$Q_i$\n{rows}", "$K_j\\ \\ V_j$", "K  V\nfor every query tile", f"{inputs}\nlse"),
            query_tiles,
            moved_flash2(EXAMPLE, ROWS),
        ),
        Generation(
            "FlashAttention 3:\nroles, rings of slots",
            (
                rows,
                "$Q_i$\nrings of $K_j$ and $V_j$",
                "K  V of the heads\nthat run together",
                f"{inputs}\nlse",
            ),
            query_tiles,
            moved_flash2(EXAMPLE, ROWS),
        ),
    ]


def draw_memory() -> Figure:
    width, height = 11, 6.9
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    box = lambda x, y, w, h, color: axes.add_patch(
        Rectangle((x, y), w, h, facecolor=color, edgecolor="white", linewidth=2)
    )
    write = lambda x, y, text, **look: axes.text(
        x, y, text, **dict(ha="center", va="center", linespacing=1.4) | look
    )
    levels = ("registers", "shared memory", "L2 cache", "HBM")
    colors, tops, high = ("#fde0b8", "#fbeecb", "#dfeaf4", "#c3d7ea"), (6.1, 5.3, 3.55, 2.75), 0.8
    for name, color, top, *of in zip(levels, colors, tops, *map(sizes, GPUS), strict=True):
        box(0.1, top - high, width - 0.2, high, color)
        write(0.25, top - 0.2, name, ha="left", weight="bold", fontsize=10)
        for line, (gpu, size) in enumerate(zip(GPUS, of, strict=True)):
            write(0.25, top - 0.42 - 0.2 * line, f"{gpu}  {size}", ha="left", fontsize=8.5)
    write(0.25, 4.02, "moved between an SM and\nwhat is behind it, in elements", ha="left")
    write(
        0.25,
        1.35,
        "the same in MB, for a head with\nT = S = {}, H = {}, 16 bits each".format(*EXAMPLE[1:]),
        ha="left",
    )
    write(0.25, 0.75, f"$B_r$ = {ROWS}\nM = {SRAM:,} (an SM of the A100)", ha="left")
    megabytes = lambda arrays: sum(arrays.values()) * 2 / 1e6
    scale = 1.25 / max(megabytes(g.moved.read) for g in generations())
    for column, g in enumerate(generations()):
        x = 4.05 + 1.88 * column
        write(x, 6.48, g.name, fontsize=9.5, weight="bold")
        for text, top in zip(g.where, tops, strict=True):
            write(x, top - high / 2, text, fontsize=9.5)
        arrow = dict(arrowstyle="-|>", linewidth=2, shrinkA=0, shrinkB=0)
        axes.annotate("", (x - 0.82, 4.45), (x - 0.82, 3.6), arrowprops=arrow | dict(color=BLUE))
        axes.annotate("", (x - 0.7, 3.6), (x - 0.7, 4.45), arrowprops=arrow | dict(color=AMBER))
        write(x + 0.12, 4.02, g.formula)
        for offset, arrays, color in ((-0.3, g.moved.read, BLUE), (0.3, g.moved.written, AMBER)):
            size = megabytes(arrays)
            box(x + offset - 0.22, 0.15, 0.44, size * scale, color)
            write(x + offset, 0.28 + size * scale, f"{size:.0f}")
    handles = [Patch(color=BLUE, label="read"), Patch(color=AMBER, label="written")]
    figure.legend(
        handles=handles, loc="center right", bbox_to_anchor=(0.99, 0.25), frameon=False, ncols=2
    )
    return figure


# ---- timeline: a model of the Hopper forward ----

# Clocks of a step, 64 queries x 128 keys at head size 128. The tensor cores of an SM do 4096 FLOP a
# clock, its other units 16 exponentials; a product is 2 x 64 x 128 x 128 FLOP. The maximum is what
# is left of a softmax of about 650 clocks, an estimate; a load is 32 KB at an assumed 64 bytes a
# clock.
PRODUCT = 2 * 64 * 128 * 128 // 4096
# of the scores, and of alpha, in each of the four threads that share a row
EXPONENTIALS = (64 * 128 + 64 * 4) // 16
MAXIMUM = 650 - EXPONENTIALS
LOAD = 128 * 128 * 2 // 64
STAGES = 2


class Span(NamedTuple):
    lane: str
    label: str
    start: int
    stop: int


class Clock:
    """Calls functions at their times. A process is a generator that yields the events it waits
    for."""

    def __init__(self):
        self.now, self._queue, self._order = 0, [], itertools.count()

    def at(self, time: int, call):
        heapq.heappush(self._queue, (time, next(self._order), call))

    def start(self, process):
        def go_on():
            for event in process:
                if event.missing > 0:
                    event.waiting.append(go_on)
                    return

        self.at(self.now, go_on)

    def run(self):
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()


class Event:
    """Happens when as many have arrived as were expected."""

    def __init__(self, clock: Clock, arrivals: int = 1):
        self.clock, self.missing, self.waiting = clock, arrivals, []

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            for go_on in self.waiting:
                self.clock.at(self.clock.now, go_on)


class Unit:
    """Does one job at a time, in the order in which they were begun."""

    def __init__(self, clock: Clock, spans: list[Span]):
        self.clock, self.spans, self.free = clock, spans, 0

    def begin(self, clocks: int, lane: str, label: str) -> Event:
        """The event that the job is done."""
        start = max(self.clock.now, self.free)
        self.free, done = start + clocks, Event(self.clock)
        self.spans.append(Span(lane, label, start, self.free))
        self.clock.at(self.free, done.arrive)
        return done


def simulate(blocks: int, consumers: int, overlap: bool, maximum: int = MAXIMUM) -> list[Span]:
    """The forward of one program; without `overlap` the softmax of a block waits for the product of
    the block before it."""
    clock, spans = Clock(), []
    tensor, exponentials, tma = (Unit(clock, spans) for _ in range(3))
    full, released, turn = {}, {}, collections.defaultdict(lambda: Event(clock))
    for key in itertools.product("KV", range(blocks)):
        full[key], released[key] = Event(clock), Event(clock, consumers)

    def arrival(event, then):
        yield event
        then.arrive()

    def pass_on(j, own):
        turn[j * consumers + own + 1].arrive()
        spans.append(Span("turns", f"{own}", clock.now, clock.now))

    def producer():
        for j in range(blocks):
            for array in "KV":
                if j >= STAGES:
                    yield released[array, j - STAGES]
                clock.start(arrival(tma.begin(LOAD, "TMA", f"${array}_{j}$"), full[array, j]))

    def consumer(own):
        own_unit, lane = Unit(clock, spans), f"consumer {own}"
        products, softmax = f"{lane}, products", f"{lane}, softmax"
        yield tma.begin(LOAD // 2, "TMA", "$Q$")
        for j in range(blocks + 1):
            if j < blocks:
                yield full["K", j]
            yield turn[j * consumers + own]
            if j < blocks:
                s = tensor.begin(PRODUCT, products, f"$S_{j}$")
            if j > 0:
                yield full["V", j - 1]
                o = tensor.begin(PRODUCT, products, f"$P_{j - 1}V_{j - 1}$")
            if j < blocks:
                pass_on(j, own)
                yield s
                if j > 0 and not overlap:
                    yield o
                released["K", j].arrive()
                yield own_unit.begin(maximum, softmax, "max")
                yield exponentials.begin(EXPONENTIALS, softmax, f"exp {j}")
            if j > 0:
                yield o
                released["V", j - 1].arrive()
        if own < consumers - 1:
            pass_on(blocks, own)

    turn[0].arrive()
    for own in range(consumers):
        clock.start(consumer(own))
    clock.start(producer())
    clock.run()
    return spans


def busy(consumers: int, overlap: bool, maximum: int = MAXIMUM) -> float:
    """Which part of the time the tensor cores are busy in the long run."""
    spans = simulate(60, consumers, overlap, maximum)
    start = {span.label: span.start for span in spans if span.lane == "consumer 0, products"}
    return 20 * consumers * 2 * PRODUCT / (start["$S_40$"] - start["$S_20$"])


SCHEDULES = {
    "one consumer, softmax after its products": (1, False),
    "one consumer, softmax under its products": (1, True),
    "two consumers in turns, softmax after": (2, False),
    "two consumers in turns, softmax under (the kernel)": (2, True),
}


def draw_timeline() -> Figure:
    figure = Figure(figsize=(11, 9.4))
    shown, blocks = [name for name in SCHEDULES if SCHEDULES[name] != (1, True)], 4
    end = max(span.stop for name in shown for span in simulate(blocks, *SCHEDULES[name]))
    top = 0.925
    for name in shown:
        consumers, height = SCHEDULES[name][0], (1 + 2 * SCHEDULES[name][0]) * 0.0365
        axes = figure.add_axes((0.145, top - height, 0.84, height))
        top -= height + 0.06
        _draw_schedule(axes, simulate(blocks, *SCHEDULES[name]), consumers)
        axes.set(xlim=(0, end * 1.005))
        axes.set_title(
            f"{name}: tensor cores busy {busy(*SCHEDULES[name]):.0%} in the long run",
            fontsize=10,
            loc="left",
        )
    axes.set_xlabel("clocks of a model, not measured")
    names = dict(
        load="load",
        S="$S_j = Q K_j^T$",
        P="$O$ += $P_{j-1} V_{j-1}$",
        max="row maximum",
        exp="exponentials",
    )
    handles = [Patch(color=JOBS[job], label=text) for job, text in names.items()]
    handles += axes.plot(
        [], [], color=INK, marker="v", markersize=4, linewidth=1, label="the turn is passed on"
    )
    figure.legend(handles=handles, loc="upper center", ncols=6, frameon=False, columnspacing=1.6)
    _draw_slack(figure.add_axes((0.145, 0.055, 0.45, 0.185)))
    return figure


JOBS = dict(load="#d9d9d9", S=BLUE, P=PURPLE, max="#2f6b3c", exp=GREEN)


def _draw_schedule(axes, spans: list[Span], consumers: int):
    lanes = [
        "TMA",
        *(f"consumer {own}, {job}" for own in range(consumers) for job in ("products", "softmax")),
    ]
    for span in spans:
        if span.lane == "turns":
            if consumers == 2:
                tip, tail = (3, 2) if span.label == "0" else (2, 3)
                look = dict(arrowstyle="-|>", color=INK, linewidth=1, shrinkA=0, shrinkB=0)
                axes.annotate("", (span.start, tip), (span.start, tail), arrowprops=look)
            continue
        y, length = lanes.index(span.lane), span.stop - span.start
        job = (
            "load"
            if span.lane == "TMA"
            else span.label.split()[0]
            if span.lane.endswith("softmax")
            else span.label[1]
        )
        axes.add_patch(
            Rectangle(
                (span.start, y + 0.08),
                length,
                0.84,
                facecolor=JOBS[job],
                edgecolor="white",
                linewidth=0.8,
            )
        )
        if job != "max":
            color = INK if job == "load" else "white"
            axes.text(
                span.start + length / 2,
                y + 0.5,
                span.label,
                ha="center",
                va="center",
                color=color,
                fontsize=8,
            )
    axes.set(ylim=(len(lanes), 0), yticks=np.arange(len(lanes)) + 0.5)
    axes.set_yticklabels([lane.replace("TMA", "producer, TMA") for lane in lanes], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_slack(axes):
    clocks, above = np.arange(550, 2001, 25), MAXIMUM + EXPONENTIALS
    for (name, order), line in zip(SCHEDULES.items(), (":", "-.", "--", "-"), strict=True):
        axes.plot(
            clocks,
            [100 * busy(*order, maximum=int(c) - EXPONENTIALS) for c in clocks],
            line,
            color=INK,
            label=name,
        )
    axes.set(
        xlabel="clocks of a softmax: a mask or a soft cap makes it longer",
        ylabel="tensor cores busy, %",
        ylim=(0, 105),
    )
    axes.axvline(above, color=GREEN, linewidth=1)
    axes.text(above + 12, 6, f"{above}, as above", color=GREEN, fontsize=8.5)
    axes.grid(alpha=0.3)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.03, 0.5),
        frameon=False,
        handlelength=2.6,
        labelspacing=0.9,
    )


if __name__ == "__main__":
    main()
