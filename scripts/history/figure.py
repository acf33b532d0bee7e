"""Draws what was counted: the same counts, the same file. And what was timed."""

import pathlib

import matplotlib
from matplotlib.figure import Figure

from pallas_flash.accounting import published
from scripts.bench.measure import Row
from scripts.history.counts import GENERATIONS, PUBLISHED_MEMORY, PUBLISHED_SPEED_UP, SECOND
from scripts.history.times import BOTH, block_name, speed_ups

INK = "#222222"
COLORS = dict(
    zip(GENERATIONS, ("#8c8c8c", "#bdbdbd", "#f0b040", "#3b76af", "#9467bd"), strict=True)
)
UNITS = dict(memory="#b5524b", products="#3b76af", exponentials="#5aa469", float32="#bdbdbd")
DOTS = dict(marker="o", markersize=3.5)
FAMILIES = dict(
    standard="standard",
    flash1="flash1",
    triton="triton = FlashAttention-2",
    hopper="hopper = FlashAttention-3",
)


def write(path: pathlib.Path, figure: Figure):
    options = (
        dict(metadata=dict(Date=None, Creator=None)) if path.suffix == ".svg" else dict(dpi=110)
    )
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, facecolor="white", **options)


# ---- counted ----


def counted(p, table, units, lengths, blocks) -> Figure:
    figure = Figure(figsize=(10, 10.8))
    # no layout engine: the same anywhere
    place = dict(left=0.165, right=0.98, top=0.94, bottom=0.045, hspace=0.34, wspace=0.5)
    top, middle, bottom = figure.subplots(3, 2, gridspec_kw=place)
    _bytes(top[0], table)
    _units(top[1], units)
    _bytes_by_length(middle[0], lengths)
    _by_block(middle[1], blocks)
    _memory(bottom[0], lengths)
    _less_memory(bottom[1], lengths)
    shape = f"batch {p.batch}, {p.heads} heads of {p.head_size}, {p.queries} queries and keys"
    figure.suptitle(
        f"Forward and backward of attention, counted. GPT-2 medium: {shape}, {p.dtype}", fontsize=11
    )
    return figure


def _bytes(axes, table):
    papers = {f"{name}, the paper's": GB for name, GB in published.GIGABYTES.items()}
    names = [
        GENERATIONS[0] + ", the paper's",
        *GENERATIONS[:2],
        "flash, the paper's",
        *GENERATIONS[2:],
    ]
    for at, name in enumerate(names):
        GB = table[name].bytes / 1e9
        axes.barh(
            at, GB, color=COLORS.get(name, "white"), edgecolor=INK, linewidth=0.6, height=0.72
        )
        printed = f"   (printed: {papers[name]})" if name in papers else ""
        axes.text(GB + 0.8, at, f"{GB:.1f}{printed}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 1.18 * max(table[name].bytes for name in names) / 1e9),
        xlabel="GB read and written",
    )
    axes.set_title("Bytes asked of device memory, GPT-2 medium", fontsize=10)
    _bare(axes)


def _units(axes, units):
    width = 0.2
    for at, unit in enumerate(UNITS):
        ms = [units[name][unit] * 1e3 for name in GENERATIONS]
        middle = [i + (at - 1.5) * width for i in range(len(GENERATIONS))]
        axes.barh(middle, ms, width, color=UNITS[unit], label=unit)
        for y, x in zip(middle, ms, strict=True):
            axes.text(x + 0.12, y, f"{x:.2g}" if x < 10 else f"{x:.0f}", va="center", fontsize=7)
    axes.set_yticks(range(len(GENERATIONS)), GENERATIONS, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlabel("ms at peak rates, all loads from device memory")
    axes.set_title(f"What binds on an {SECOND}: computed, not measured", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    _bare(axes)


def _lengths_axis(axes, lengths: list[int]):
    axes.set(xlabel="length T", xscale="log")
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


def _bytes_by_length(axes, lengths):
    for name in GENERATIONS[1:]:
        for causal, line in ((False, "-"), (True, "--")):
            mine = [row for row in lengths if row.causal == causal]
            ratio = [row.bytes[GENERATIONS[0]] / row.bytes[name] for row in mine]
            label = None if causal else name
            axes.plot(
                [row.length for row in mine], ratio, line, color=COLORS[name], **DOTS, label=label
            )
    axes.plot([], [], "--", color=INK, label="causal")
    _lengths_axis(axes, sorted({row.length for row in lengths}))
    axes.set(ylabel="bytes of standard / its bytes", ylim=(0, None))
    axes.set_title("Fewer bytes than standard attention", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _memory(axes, lengths):
    full = [row for row in lengths if not row.causal]
    x = [row.length for row in full]
    for name, label in FAMILIES.items():
        line = "--" if name == "hopper" else "-"
        axes.plot(
            x,
            [row.extra[name] / 1e6 for row in full],
            line,
            color=COLORS[name],
            **DOTS,
            label=label,
        )
    axes.plot(
        x, [row.arrays / 1e6 for row in full], ":", color=INK, label="operands and results of each"
    )
    axes.set_yscale("log")
    # room for the legend
    axes.set_ylim(None, 100 * max(row.extra["standard"] for row in full) / 1e6)
    _lengths_axis(axes, x)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel("MB for one sequence")
    axes.set_title("Memory beyond operands and results: T², then T", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _less_memory(axes, lengths):
    full = [row for row in lengths if not row.causal]
    x, less, most = [row.length for row in full], *PUBLISHED_MEMORY
    axes.axhspan(less, most, color="#eeeeee", label=f"published: {less} to {most}")
    frameworks = [(row.arrays + row.kept) / (row.arrays + row.flash) for row in full]
    axes.plot(x, frameworks, color=INK, **DOTS, label="frameworks / flash, the paper's")
    for name in ("flash1", "triton"):
        ratio = [
            (row.arrays + row.extra["standard"]) / (row.arrays + row.extra[name]) for row in full
        ]
        label = f"standard / {name}{', hopper' if name == 'triton' else ''}"
        axes.plot(x, ratio, color=COLORS[name], **DOTS, label=label)
    _lengths_axis(axes, x)
    axes.set(ylabel="times less memory", ylim=(0, None))
    axes.set_title("Memory of all, operands and results too", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _by_block(axes, blocks):
    x = [at.tiles.block_k for at in blocks]
    GB = lambda values: [value / 1e9 for value in values]
    look = dict(color=COLORS["flash1"], **DOTS)
    axes.plot(
        x,
        GB(at.forward + at.backward for at in blocks),
        **look,
        label="flash1, forward and backward",
    )
    axes.plot(x, GB(at.forward for at in blocks), **look, linestyle="--", label="flash1, forward")
    axes.plot(
        x,
        GB(at.paper for at in blocks),
        color=INK,
        linewidth=1,
        label="the paper's formulas, forward and backward",
    )
    axes.plot(
        x,
        GB(at.bound for at in blocks),
        ":",
        color=INK,
        label="T S H² / M of the lower bound, forward",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="keys of a tile, $B_c = M / 4H$",
        ylabel="GB read and written",
    )
    axes.set_xticks(x, [str(block) for block in x])
    axes.minorticks_off()
    axes.set_ylim(1e-2 * min(at.bound for at in blocks) / 1e9, None)  # room for the legend
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
    axes.set_title("Larger tiles, fewer bytes: flash1, GPT-2 medium", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def _bare(axes):
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


# ---- timed ----


def timed(title: str, shape: list[Row], lengths: list[Row], blocks, tiles: list[Row]) -> Figure:
    figure = Figure(figsize=(12, 7.2), layout="constrained")
    top, bottom = figure.subplots(2, 2)
    for axes, causal in zip(top, (False, True), strict=True):
        _times(axes, [row for row in shape if row.case.causal == causal])
        axes.set_title(f"GPT-2 medium, {'causal' if causal else 'full'}", fontsize=10)
    _speed_ups(bottom[0], lengths)
    _times_by_block(bottom[1], blocks, tiles)
    figure.suptitle(title, fontsize=10)
    return figure


def _times(axes, rows):
    passes = list(dict.fromkeys(row.passes for row in rows))
    ms = {(row.name, row.passes): row.median * 1e3 for row in rows if row.median}
    for at, name in enumerate(GENERATIONS):
        middle = [i + (at - 2) * 0.17 for i in range(len(passes))]
        axes.bar(
            middle, [ms.get((name, one), 0) for one in passes], 0.17, color=COLORS[name], label=name
        )
        for x, one in zip(middle, passes, strict=True):
            axes.text(
                x,
                ms.get((name, one), 0),
                f"{ms[name, one]:.3g}" if (name, one) in ms else "–",
                ha="center",
                va="bottom",
                fontsize=7,
            )
    axes.set_xticks(range(len(passes)), passes)
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize=8.5)
    _bare(axes)


def _speed_ups(axes, rows):
    found, lengths = speed_ups(rows), sorted({row.case.T for row in rows})
    axes.axhspan(
        *PUBLISHED_SPEED_UP, color="#eeeeee", label="published for FlashAttention on an A100"
    )
    for name in GENERATIONS[1:]:
        for causal, line in ((False, "-"), (True, "--")):
            points = [
                (T, found[T, causal][name]) for T in lengths if name in found.get((T, causal), {})
            ]
            label = f"{name}{', causal' if causal else ''}"
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                line,
                color=COLORS[name],
                **DOTS,
                label=label,
            )
    _lengths_axis(axes, lengths)
    axes.set(ylabel="time of standard / its time", ylim=(0, None))
    axes.set_title(BOTH, fontsize=10)
    axes.legend(frameon=False, fontsize=7.5, ncols=2)


def _times_by_block(axes, blocks, rows):
    for passes, line in (("forward", "--"), (BOTH, "-")):
        ms = {row.name: row.median * 1e3 for row in rows if row.median and row.passes == passes}
        points = [
            (at.tiles.block_k, ms[block_name(at.tiles)])
            for at in blocks
            if block_name(at.tiles) in ms
        ]
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            line,
            color=COLORS["flash1"],
            marker="o",
            label=passes,
        )
    x = [at.tiles.block_k for at in blocks]
    axes.set(xscale="log", xlabel="keys of a tile", ylabel="ms", ylim=(0, None))
    axes.set_xticks(x, [str(block) for block in x])
    axes.minorticks_off()
    axes.set_title("flash1 by tiles, GPT-2 medium", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8.5)
