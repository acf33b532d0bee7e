"""python scripts/tune.py [--implementation NAME] [--length T] [--head-size H] [--sweep
FIELD=VALUE,VALUE ...]

Sweeps the tiles of an implementation's kernels for one shape. The forward kernel's tiles are judged
by the time of the forward, those of each backward kernel by the time of the backward, and those of
forward mode by the time of a jvp, with the other kernels as they are. Every candidate is checked
against dense float32 before it is timed. Prints a table for each kernel, and the best tiles, to be
copied into the table of the kernel's file in kernels/NAME, for Triton into tuning.py.
"""

import argparse
import itertools
import os
import pathlib
import sys
from typing import Any, NamedTuple

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash.choose import implementations
from scripts.bench import clock, machine, peers, report
from scripts.bench.cases import JVP, Case
from scripts.bench.measure import Row, measure
from scripts.bench.options import Help, positive
from scripts.bench.programs import TOLERANCE
from scripts.bench.tiles import number

# To try in the fields that tiles have; what a kernel refuses is reported.
VALUES = dict(
    block_q=(32, 64, 128),
    block_k=(32, 64, 128),
    num_warps=(4, 8),
    num_stages=(1, 2, 3),
    warpgroups=(1, 2, 3),
    stages=(2, 3, 4),
    value_stages=(1, 2),
    split=(False, True),
)
BY_TCGEN05 = dict(
    stages=(2, 3),
    value_stages=(1, 2),
    columns=(32, 64),
    exp2_columns=(0, 4, 8, 12, 16),
    first_columns=(64, 96),
    in_order=(False, True),
    rescale_threshold=(0, 8),
)


class Kernel(NamedTuple):
    """One of the kernels that an implementation's tiles describe."""

    field: str | None  # of the tiles, where they are a tuple for each kernel; None: all of them
    passes: str  # that it is timed in

    def get(self, tiles) -> Any:
        return tiles if self.field is None else getattr(tiles, self.field)

    def replace(self, tiles, new) -> Any:
        return new if self.field is None else tiles._replace(**{self.field: new})


def main(argv=None) -> int:
    args = parse(argv)
    if not (machine.on_gpu() or args.interpret):
        raise SystemExit(
            "tune.py: error: there is no GPU here to tune for. --interpret goes on without; give "
            "it a small shape."
        )
    case = make_case(args)
    try:
        current = peers.tiles_of(case, args.implementation, kind(args))
    except NotImplementedError as error:
        raise SystemExit(f"tune.py: {error}") from None
    time_by = print_header(args, case, current)
    best, failed = current, False
    for kernel in split_by_kernel(current):
        if args.kernels and kernel.field not in args.kernels:
            continue
        rows = sweep(args, case, current, kernel, time_by)
        print_kernel(kernel, current, rows)
        timed = [(row.median, tiles) for tiles, row in rows.items() if row.median]
        failed |= not timed
        if timed:
            best = kernel.replace(best, min(timed, key=lambda pair: pair[0])[1])
    print(f"\nbest tiles of {args.implementation}, {case}, {machine.device()}:\n{best!r}")
    return int(failed)


def sweep(args, case: Case, current, kernel: Kernel, time_by: str) -> dict[Any, Row]:
    """A row for each candidate of the kernel's tiles, the current ones first."""
    tried = candidates(kernel.get(current), args.sweep)
    print(f"measuring  {kernel.field or 'tiles'}: {len(tried)} candidates", file=sys.stderr)
    contenders = [contender(args, kernel.replace(current, tiles)) for tiles in tried]
    rows = measure(contenders, case, [kernel.passes], args.repeats, args.jobs, time_by)
    return dict(zip(tried, rows, strict=True))


def split_by_kernel(tiles) -> list[Kernel]:
    """Each field that is itself a tuple of fields is a kernel; tiles without one describe the
    forward."""
    fields = [name for name in tiles._fields if hasattr(getattr(tiles, name), "_fields")]
    passes = dict(forward="forward", tangent=JVP)
    kernels = [Kernel(field, passes.get(field, "backward")) for field in fields]
    return kernels or [Kernel(None, "forward")]


def candidates(tiles, values: dict[str, tuple]) -> list:
    """The tiles, and all combinations of `values` for those fields that they have."""
    fields = [name for name in tiles._fields if name in values]
    combinations = itertools.product(*(values[name] for name in fields))
    others = [tiles._replace(**dict(zip(fields, chosen, strict=True))) for chosen in combinations]
    return list(dict.fromkeys([tiles, *others]))


def contender(args, tiles) -> peers.Contender:
    return peers.ours(repr(tiles), args.implementation, kind(args), lambda current: tiles)


def kind(args) -> str:
    """The kind of backward that --deterministic asks for."""
    return peers.DETERMINISTIC if args.deterministic else ""


# ---- the command line, and the tables ----


def parse(argv) -> argparse.Namespace:
    names = [each.name for each in implementations.IMPLEMENTATIONS if each.own_kernels]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog="Exit status 1: a kernel has no candidate that is right.",
        formatter_class=Help,
    )
    add = parser.add_argument
    by_mosaic = implementations.HOPPER, implementations.BLACKWELL, implementations.AMPERE
    default = next((each.name for each in by_mosaic if each.is_for_this_gpu()), "triton")
    add("--implementation", choices=names, default=default, help="whose kernels to sweep")
    add("--batch", type=positive, default=4, metavar="B", help="sequences")
    add("--length", type=positive, default=4096, metavar="T", help="of queries and of keys")
    add("--heads", type=positive, default=16, metavar="N", help="query heads")
    add("--kv-heads", type=positive, metavar="K", help="key/value heads (default: N)")
    add("--head-size", type=positive, default=128, metavar="H", help="of queries and keys")
    add("--value-size", type=positive, metavar="Hv", help="head size of values (default: H)")
    add("--dtype", choices=list(TOLERANCE), default="bfloat16", help="of the inputs")
    add("--full", action="store_true", help="no causal mask")
    help = "keys that a query sees, of which its own is the last (default: all before it)"
    add("--window", type=positive, metavar="W", help=help)
    add("--documents", type=positive, metavar="D", help="packed into each sequence (default: 1)")
    add("--deterministic", action="store_true", help="sweep with deterministic=True")
    help = "go on without a GPU, in Pallas' interpreter, whose times mean nothing"
    add("--interpret", action="store_true", help=help)
    add("--kernels", nargs="+", metavar="FIELD", help="of the tiles (default: all kernels)")
    help = f"values to try, in place of {in_words(VALUES)}; for blackwell {in_words(BY_TCGEN05)}"
    add("--sweep", nargs="+", type=_values, metavar="FIELD=VALUE,...", help=help)
    help = "rounds, in each of which every candidate is timed once"
    add("--repeats", type=positive, default=5, metavar="R", help=help)
    jobs = min(8, os.cpu_count() or 1)
    add("--jobs", type=positive, default=jobs, metavar="J", help="programs to compile at a time")
    args = parser.parse_args(argv)
    if args.window and args.full:
        parser.error("--window is causal; leave out --full.")
    args.sweep = dict(args.sweep or values_of(args.implementation))
    return args


def values_of(implementation: str) -> dict[str, tuple]:
    """The values to try in the tiles of an implementation."""
    return BY_TCGEN05 if implementation == "blackwell" else VALUES


def in_words(values: dict[str, tuple]) -> str:
    return " ".join(f"{name}={','.join(map(str, each))}" for name, each in values.items())


def _values(text: str) -> tuple[str, tuple]:
    name, _, values = text.partition("=")
    try:
        return name, tuple(map(number, values.split(",")))
    except ValueError:
        form = "FIELD=VALUE,VALUE with whole numbers, as block_k=64,128"
        raise argparse.ArgumentTypeError(f"must be {form}; got {text!r}") from None


def make_case(args) -> Case:
    kv_heads, Hv = args.kv_heads or args.heads, args.value_size
    shape = args.batch, args.length, args.length, args.heads, kv_heads, args.head_size
    return Case(*shape, args.dtype, not args.full, Hv, args.window, args.documents)


def print_header(args, case: Case, tiles) -> str:
    """Returns the clock."""
    time_by = clock.detect()
    facts = machine.facts() | dict(
        case=f"{case}{', deterministic=True' if args.deterministic else ''}",
        tiles=repr(tiles),
        times=f"median of {args.repeats} rounds, in each of which every candidate has a turn, in "
        "random order",
        clock=time_by,
    )
    if not machine.on_gpu():
        facts["beware"] = "no GPU: the kernels run in an interpreter, and their times mean nothing"
    machine.print_facts(facts)
    return time_by


def print_kernel(kernel: Kernel, tiles, rows: dict[Any, Row]):
    """Fastest first; what was not timed last, with its reason."""
    current = kernel.get(tiles)
    fields = [name for name in current._fields if len({getattr(each, name) for each in rows}) > 1]
    lines = []
    for each, row in sorted(rows.items(), key=lambda pair: pair[1].median or float("inf")):
        cells = [getattr(each, name) for name in fields]
        cells += (
            [report.milliseconds(row.median), f"{row.tflops:.3g}"]
            if row.median
            else [row.status, ""]
        )
        cells += ["" if row.error is None else f"{row.error:.0e}"]
        cells += ["in use" if each == current else ""]
        lines.append([*cells, " ".join(row.reason.split())[: report.REASON_LENGTH]])
    print(f"\n{kernel.field or 'tiles'}, by the time of the {kernel.passes}")
    report.print_table((*fields, "ms", "TFLOP/s", "error", "", "reason"), lines)


if __name__ == "__main__":
    raise SystemExit(main())
