"""What was measured, for people and for programs: tables in Markdown, and JSON."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

from scripts.bench.measure import Row

REASON_LENGTH, NAME_LENGTH = 300, 60  # printed of a reason and a kernel's name; the JSON has all
OUT_OF_TIME = "out of time"  # begins the reason of a row that was not reached


def print_rows(rows: list[Row], first: str, columns: Callable[[Row], dict[str, str]]):
    """Times, with what `columns` makes of each row and the ratio to the contender `first`; the
    kernels of a call; what the GPU's sensors said meanwhile; and why other rows have no time. Those
    that were not reached are a single line."""
    unreached = [row for row in rows if row.reason.startswith(OUT_OF_TIME)]
    rows = [row for row in rows if row not in unreached]
    tables = {}
    for row, ratio in zip(rows, ratios(rows, first), strict=True):
        spread = " to ".join(milliseconds(f(row.seconds)) for f in (min, max) if row.seconds)
        cells = {
            "case": row.case,
            "pass": row.passes,
            "implementation": row.name,
            "ms": milliseconds(row.median) if row.median else row.status,
            "fastest to slowest": spread,
            "ratio": _format(ratio, ".2f"),
            **columns(row),
            "temporaries, MB": _format(row.temporary_bytes, ",.1f", 1e-6),
            "error": _format(row.error, ".0e"),
        }
        tables.setdefault(tuple(cells), []).append(cells.values())
    for header, lines in tables.items():
        print_table(header, lines)
    _print_kernels([row for row in rows if row.kernels])
    sensed = {(row.case, row.passes): row.sensors.values() for row in rows if row.sensors}
    if sensed:
        print("\nThe GPU while each case was timed, medians")
        lines = [(*at, *(f"{x:g}" for x in values)) for at, values in sensed.items()]
        print_table(("case", "pass", "MHz", "W", "°C"), lines)
    _print_reasons(rows)
    if unreached:
        cases = dict.fromkeys(str(row.case) for row in unreached)
        print(f"\n{len(unreached)} rows not run, {unreached[0].reason}: of {'; '.join(cases)}")


def _print_kernels(rows: list[Row]):
    """The main kernel of each call, which takes the longest, and the rest."""
    print(end="\nMain kernel and rest of each call, ms of device time\n" * bool(rows))
    for row in rows:
        (main, longest), *rest = row.kernels.items()
        text = f"{_shortened(main)} {milliseconds(longest)}"
        if rest:
            text += f", rest {milliseconds(sum(seconds for _, seconds in rest))}: "
            text += ", ".join(f"{_shortened(name)} {milliseconds(each)}" for name, each in rest)
        print(f"{row.case}, {row.passes}, {row.name}: {text}")


def _shortened(name: str, length: int = NAME_LENGTH) -> str:
    return name if len(name) <= length else f"{name[:length]} ..."


def ratios(rows: list[Row], first: str) -> list[float | None]:
    """Each row's time over that of the contender `first` in the same case."""
    base = {(row.case, row.passes): row.median for row in rows if row.name == first}
    bases = [base.get((row.case, row.passes)) for row in rows]
    return [
        row.median / seconds if row.median and seconds else None
        for row, seconds in zip(rows, bases, strict=True)
    ]


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _format(x: float | None, form: str, scale: float = 1) -> str:
    return "" if x is None else format(x * scale, form)


def print_ratios(rows: list[Row], ours: list[str], peers: list[str]):
    """Each peer's time over that of each of our implementations."""
    medians = {(row.case, row.passes, row.name): row.median for row in rows if row.median}
    lines = []
    for (case, passes, name), median in medians.items():
        if name in ours:
            times = (medians.get((case, passes, peer)) for peer in peers)
            lines.append((case, passes, name, *(_format(t, ".2f", 1 / median) for t in times)))
    if lines and peers:
        print("\nTime of the peer / time of pallas_flash: above 1, pallas_flash is faster")
        print_table(("case", "pass", "pallas_flash", *peers), lines)


def print_table(header, rows):
    """Prints a table in Markdown."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |")


def _print_reasons(rows: list[Row]):
    """A line for each reason of each contender, with the first of the cases that have it."""
    same = {}
    for row in rows:
        if reason := "; ".join(filter(None, (row.reason, row.note))):
            same.setdefault((row.status, row.name, reason), []).append(row)
    print(end="\n" * bool(same))
    for (status, name, reason), where in same.items():
        passes = ", ".join(dict.fromkeys(row.passes for row in where))
        first, *others = dict.fromkeys(row.case for row in where)
        more = f" and {len(others)} more" if others else ""
        reason = _shortened(" ".join(reason.split()), REASON_LENGTH)
        print(f"{status:<11}{name}, {passes}, {first}{more}: {reason}")


def write_json(path: pathlib.Path, facts: dict, rows: list[Row]):
    """All of it or nothing, whenever the process is killed."""
    entries = [
        dataclasses.asdict(row)
        | dict(case=row.case._asdict(), median=row.median, tflops=row.tflops)
        for row in rows
    ]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(facts | dict(rows=entries), indent=1) + "\n")
    os.replace(partial, path)
