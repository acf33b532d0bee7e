"""What was measured, for people and for programs: tables in Markdown, JSON, CSV."""

import csv
import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Callable

from scripts.bench import product
from scripts.bench.cases import Case
from scripts.bench.measure import Row

REASON_LENGTH = 300  # printed; the JSON has all of it


def label(case: Case) -> str:
    """A case of the suite, whose tokens and dtype are those of all."""
    heads = f" N{case.N}/{case.K}" if case.N != case.K else ""
    sizes = f"{case.H}/{case.Hv}" if case.Hv else str(case.H)
    return f"H{sizes}{heads} T{case.T} {case.mask}"


def ratios(rows: list[Row], first: str) -> list[float | None]:
    """Each row's time over that of the contender `first` in the same case."""
    base = {(row.case, row.passes): row.median for row in rows if row.name == first}
    over = lambda row: base.get((row.case, row.passes))
    return [row.median / over(row) if row.median and over(row) else None for row in rows]


Speeds = dict[str, Callable[[Row], str]]  # columns of a table


def flops(mark: float | None = None) -> Speeds:
    """And beside those of a matrix product, where `mark` says them."""
    unit, scale = product.unit_and_scale()
    speed = lambda row: row.tflops * 1e12
    beside = {"of a product's": lambda row: f"{speed(row) / mark:.0%}"} if mark else {}
    return {unit: lambda row: f"{speed(row) / scale:.3g}"} | beside


def bytes_read(mark: float) -> Speeds:
    """Of keys, values and the little else, beside those that a copy reads and writes."""
    speed = lambda row: row.case.bytes() / row.median
    return {
        "GB/s": lambda row: f"{speed(row) / 1e9:.3g}",
        "of a copy's": lambda row: f"{speed(row) / mark:.0%}",
    }


def print_times(rows: list[Row], first: str, speeds: Speeds, name_of=lambda case: case.T, head="T"):
    header = (
        head,
        "pass",
        "implementation",
        "ms",
        "fastest to slowest",
        "ratio",
        *speeds,
        "temporaries, MB",
        "error",
    )
    table = []
    for row, ratio in zip(rows, ratios(rows, first), strict=True):
        megabytes = "" if row.temporary_bytes is None else f"{row.temporary_bytes / 1e6:,.1f}"
        off = "" if row.error is None else f"{row.error:.0e}" if row.error else "0"
        times = (row.status, "", "", *("" for _ in speeds))
        if row.median:
            spread = f"{milliseconds(min(row.seconds))} to {milliseconds(max(row.seconds))}"
            of_it = (speed(row) for speed in speeds.values())
            times = (milliseconds(row.median), spread, number(ratio, ".2f"), *of_it)
        table.append((name_of(row.case), row.passes, row.name, *times, megabytes, off))
    print_table(header, table)


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)


def print_ratios(rows: list[Row], ours: list[str], peers: list[str]):
    """A peer's time over that of each of ours, side by side: above 1, ours is faster."""
    medians = {(row.case, row.passes, row.name): row.median for row in rows}
    table = []
    for case, passes in dict.fromkeys((row.case, row.passes) for row in rows):
        for name in ours:
            if mine := medians.get((case, passes, name)):
                theirs = [medians.get((case, passes, peer)) for peer in peers]
                table.append(
                    (label(case), passes, name, *(number(t and t / mine, ".2f") for t in theirs))
                )
    if table and peers:
        print("\nThe time of each over that of pallas_flash: above 1, pallas_flash is faster")
        print_table(("case", "pass", "pallas_flash", *peers), table)


def print_sensors(rows: list[Row]):
    """The GPU's clock and power beside what it was doing."""
    seen = {(label(row.case), row.passes): row for row in rows if row.sensors}
    if seen:
        print("\nThe GPU while each was timed, medians")
        table = [(*at, *(f"{x:g}" for x in row.sensors.values())) for at, row in seen.items()]
        print_table(("case", "pass", "MHz", "W", "°C"), table)


def print_clocks(rows: list[Row], meant: str):
    """Where the time was not told by the clock that was meant."""
    for at, told_by in {
        (row.case, row.passes): row.clock for row in rows if row.clock not in ("", meant)
    }.items():
        print(f"\nnot by the clock {meant!r}: {at[1]}, {at[0]}: {told_by}")


def print_memory(rows: list[Row], names: list[str]):
    if not rows:
        return
    print("\nTemporaries of forward+backward at B1 N1, compiled and not run, MB")
    table = {}
    for row in rows:
        cell = row.status if row.temporary_bytes is None else f"{row.temporary_bytes / 1e6:,.1f}"
        table.setdefault(row.case.T, [row.case.T]).append(cell)
    print_table(("T", *names), table.values())


def print_table(header, rows):
    """In Markdown."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for row in rows:
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )


def print_reasons(rows: list[Row]):
    """Why what was not timed was not: a line for each reason of each contender."""
    alike = {}
    for row in rows:
        if row.reason:
            alike.setdefault((row.status, row.name, row.reason), []).append(row)
    if alike:
        print()
    for (status, name, reason), where in alike.items():
        passes, cases = (
            dict.fromkeys(getattr(row, what) for row in where) for what in ("passes", "case")
        )
        first, *more = map(str, cases)
        reason = " ".join(reason.split())
        reason = reason if len(reason) <= REASON_LENGTH else f"{reason[:REASON_LENGTH]} ..."
        print(
            f"{status:<11}{name}, {', '.join(passes)}, "
            f"{first}{f' and {len(more)} more' if more else ''}: {reason}"
        )


def write_json(path: pathlib.Path, facts, timed: list[Row], compiled_only: list[Row]):
    entry = lambda row: (
        dataclasses.asdict(row)
        | dict(case=row.case._asdict(), median=row.median, tflops=row.tflops)
    )
    results = facts | dict(timed=[*map(entry, timed)], compiled=[*map(entry, compiled_only)])
    _write_whole(path, json.dumps(results, indent=1) + "\n")


def write_csv(path: pathlib.Path, timed: list[Row], first: str):
    """A line for each row of the tables."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    own = (
        "pass implementation status ms ms_min ms_max ratio tflops error temporary_bytes clock "
        "mhz watts reason"
    ).split()
    lines.writerow([*Case._fields, *own])
    for row, ratio in zip(timed, ratios(timed, first), strict=True):
        ms = (
            [f(row.seconds) * 1e3 for f in (lambda _: row.median, min, max)]
            if row.seconds
            else [None] * 3
        )
        values = (
            row.passes,
            row.name,
            row.status,
            *ms,
            ratio,
            row.tflops,
            row.error,
            row.temporary_bytes,
            row.clock,
        )
        sensors = row.sensors.get("clocks.sm"), row.sensors.get("power.draw")
        lines.writerow([*row.case, *values, *sensors, row.reason])
    _write_whole(path, file.getvalue())


def _write_whole(path: pathlib.Path, text: str):
    """All of it or nothing, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
