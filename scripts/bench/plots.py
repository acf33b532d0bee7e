"""The measurements as pictures."""

import pathlib

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.bench.cases import PASSES, Case
from scripts.bench.measure import Row
from scripts.bench.report import label

COLORS = ("black", *(f"C{number}" for number in range(10)))
MARKERS = "osD^vP*X<>h"


def _subtitle(facts) -> str:
    return f"{facts['device']}; {facts['versions']}; {facts['commit']}; {facts['date']}"


def _look(names: list[str], name: str) -> dict:
    """The color and marker of its family: what differs in its backward alone is dashed."""
    families = list(dict.fromkeys(other.removesuffix(" fused") for other in names))
    at = families.index(name.removesuffix(" fused"))
    line = "--" if name.endswith(" fused") else "-"
    return dict(
        color=COLORS[at % len(COLORS)],
        marker=MARKERS[at % len(MARKERS)],
        markersize=4,
        linestyle=line,
    )


def lengths_axis(axes, lengths: list[int], label_every: bool = True):
    axes.set(xlabel="length T", xscale="log")
    axes.set_xticks(lengths, [f"{T:,}" if label_every else f"{T / 1024:g}k" for T in lengths])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


# ---- one shape at several lengths: time and memory ----


def write_lengths(path: pathlib.Path, facts, timed: list[Row], compiled_only: list[Row], args):
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(args.implementations):
        look = dict(color=f"C{number}", marker="o", markersize=4)
        for passes, line in zip(PASSES, ("--", ":", "-"), strict=True):
            rows = [row for row in timed if (row.name, row.passes) == (name, passes) and row.median]
            if rows or passes in args.passes:
                times = [row.median * 1e3 for row in rows]
                left.plot(
                    [row.case.T for row in rows], times, line, label=f"{name}, {passes}", **look
                )
        rows = [row for row in compiled_only if row.name == name and row.temporary_bytes]
        right.plot(
            [row.case.T for row in rows],
            [row.temporary_bytes / 1e6 for row in rows],
            label=name,
            **look,
        )
        if rows:
            last, megabytes = rows[-1], rows[-1].temporary_bytes / 1e6
            at = dict(xytext=(-6, 5), textcoords="offset points", ha="right", color=f"C{number}")
            at |= dict(bbox=dict(color="white", pad=0.5))  # over the grid
            right.annotate(
                f"{megabytes:,.0f}" if megabytes >= 10 else f"{megabytes:.2g}",
                (last.case.T, megabytes),
                **at,
            )
    left.set_title(facts["inputs"], fontsize=10)
    right.set_title(
        f"forward+backward, {args.dtype}, B1 N1 H{args.head_size}, compiled only", fontsize=10
    )
    left.set_ylabel("time of a call, ms")
    right.set_ylabel("temporary memory, MB")
    for axes, lengths in ((left, args.lengths), (right, args.memory_lengths)):
        if any(len(line.get_xdata()) for line in axes.lines):  # nothing has no logarithm
            lengths_axis(axes, lengths)
            axes.set_yscale("log")
            # a short axis may hold no power of 10
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("")  # or a short axis mixes 10 with 6 x 10^1
            axes.legend(frameon=False, fontsize=9)
        else:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    figure.suptitle(_subtitle(facts), fontsize=10)
    figure.savefig(path, dpi=120)


# ---- the suite: TFLOP/s by length for each head size, and of the masks ----


def write_suite(folder: pathlib.Path, facts, rows: list[Row], names: list[str]) -> list[str]:
    """The names of the files."""
    timed = [row for row in rows if row.median]
    names = [name for name in names if any(row.name == name for row in timed)]
    plain = [row for row in timed if _is_plain(row.case)]
    files = []
    for mask in ("causal", "full"):
        if chosen := [row for row in plain if row.case.mask == mask]:
            files.append(f"benchmark-{mask}.png")
            _by_length(folder / files[-1], f"{mask}; {_subtitle(facts)}", chosen, names)
    if others := [row for row in timed if not _is_plain(row.case)]:
        files.append("benchmark-masks.png")
        _bars(folder / files[-1], _subtitle(facts), others, names)
    return files


def _is_plain(case: Case) -> bool:
    return case.mask in ("causal", "full") and case.N == case.K and not case.Hv


def _by_length(path: pathlib.Path, title: str, rows: list[Row], names: list[str]):
    passes = [name for name in PASSES if any(row.passes == name for row in rows)]
    sizes, lengths = (sorted({getattr(row.case, letter) for row in rows}) for letter in "HT")
    figure = Figure(figsize=(1.6 + 3.4 * len(sizes), 1.2 + 2.7 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), len(sizes), squeeze=False, sharex=True, sharey="row")
    for name in names:
        for line, panel_row in zip(passes, panels, strict=True):
            for H, axes in zip(sizes, panel_row, strict=True):
                mine = [
                    row for row in rows if (row.name, row.passes, row.case.H) == (name, line, H)
                ]
                mine.sort(key=lambda row: row.case.T)
                axes.plot(
                    [row.case.T for row in mine],
                    [row.tflops for row in mine],
                    label=name,
                    **_look(names, name),
                )
                lengths_axis(axes, lengths, label_every=False)
                axes.set(title=f"{line}, H{H}", xlabel="length T" if line == passes[-1] else "")
                axes.title.set_fontsize(10)
    for panel_row in panels:
        panel_row[0].set(ylabel="TFLOP/s", ylim=(0, None))
    _finish(figure, path, title, panels[0][0])


def _bars(path: pathlib.Path, title: str, rows: list[Row], names: list[str]):
    cases, passes = (
        list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("case", "passes")
    )
    names = [name for name in names if any(row.name == name for row in rows)]
    width = 0.85 / len(names)
    figure = Figure(figsize=(2 + 2.6 * len(cases), 1.4 + 2.4 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), 1, squeeze=False, sharex=True)[:, 0]
    for line, axes in zip(passes, panels, strict=True):
        for at, name in enumerate(names):
            mine = {row.case: row.tflops for row in rows if (row.name, row.passes) == (name, line)}
            middle = [i + (at - (len(names) - 1) / 2) * width for i in range(len(cases))]
            hatch = "///" if name.endswith(" fused") else None
            color = _look(names, name)["color"]
            heights = [mine.get(case, 0) for case in cases]
            axes.bar(
                middle,
                heights,
                width,
                label=name,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
            )
        axes.set_title(line, fontsize=10)
        axes.set(ylabel="TFLOP/s")
        axes.grid(alpha=0.3, axis="y")
    panels[-1].set_xticks(
        range(len(cases)), [label(case).replace(" T", "\nT") for case in cases], fontsize=9
    )
    _finish(figure, path, title, panels[0])


def _finish(figure: Figure, path: pathlib.Path, title: str, axes):
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
