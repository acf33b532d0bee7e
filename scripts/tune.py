"""python scripts/tune.py [--implementation NAME] [--length T] [--head-size H] [--sweep
FIELD=VALUE,VALUE ...]

Sweeps the tiles of an implementation's kernels for one shape. The forward kernel's tiles are judged
by the time of the forward, those of each backward kernel by the time of the backward, with the
other kernels as they are. Every candidate is checked against dense float32 before it is timed.
Prints a table for each kernel, and the row for kernels/NAME/tuning.py.
"""

import argparse
import dataclasses
import datetime
import itertools
import os
import pathlib
import sys
from typing import Any

import jax

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# tiles are no argument of the public function
from pallas_flash import attention, autodiff, backends, selection
from scripts.bench import clock, machine, report
from scripts.bench.cases import Case
from scripts.bench.measure import Row, measure
from scripts.bench.options import Help, positive
from scripts.bench.peers import Contender
from scripts.bench.programs import TOLERANCE

# Of fields that tiles may have; what a kernel cannot do with them it says, and that is reported.
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


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of those that an implementation's tiles describe: all of them, or the field `part` of a
    tuple of several."""

    part: str | None
    passes: str  # that its time is taken from

    def of(self, tiles) -> Any:
        return tiles if self.part is None else getattr(tiles, self.part)

    def put(self, tiles, own) -> Any:
        return own if self.part is None else tiles._replace(**{self.part: own})


def main(argv=None) -> int:
    args = parse(argv)
    if not (machine.on_gpu() or args.interpret):
        raise SystemExit(
            "tune.py: error: there is no GPU here to tune for. --interpret goes on without; give "
            "it a small shape."
        )
    case = the_case(args)
    try:
        tiles = default_tiles(args, case)
    except NotImplementedError as error:
        raise SystemExit(f"tune.py: {error}") from None
    print_header(args, case, tiles)
    timed_by = clock.which()
    print(f"{'clock':<11}{timed_by}", flush=True)
    best, failed = tiles, False
    for kernel in kernels_of(tiles):
        if args.kernels and kernel.part not in args.kernels:
            continue
        rows = sweep(args, case, tiles, kernel, timed_by)
        print_kernel(kernel, tiles, rows)
        right = [(row.median, own) for own, row in rows.items() if row.median]
        failed |= not right
        if right:
            best = kernel.put(best, min(right, key=lambda pair: pair[0])[1])
    print(
        f"\nrow for kernels/{args.implementation}/tuning.py, {case}, {machine.device()}:\n{best!r}"
    )
    return int(failed)


def sweep(args, case: Case, tiles, kernel: Kernel, timed_by: str) -> dict[Any, Row]:
    """By the kernel's own tiles; those in use first."""
    found = candidates(kernel.of(tiles), args.sweep)
    print(f"measuring  {kernel.part or 'tiles'}: {len(found)} candidates", file=sys.stderr)
    contenders = [contender(args, repr(own), kernel.put(tiles, own)) for own in found]
    rows = measure(contenders, case, [kernel.passes], args.repeats, args.jobs, timed_by)
    return dict(zip(found, rows, strict=True))


def kernels_of(tiles) -> list[Kernel]:
    """Each field that is a tuple of its own is a kernel; tiles without one describe one kernel, and
    forward is what it does."""
    parts = [name for name in tiles._fields if hasattr(getattr(tiles, name), "_fields")]
    passes = lambda part: "forward" if part == "forward" else "backward"
    return [Kernel(part, passes(part)) for part in parts] or [Kernel(None, "forward")]


def candidates(tiles, values: dict[str, tuple]) -> list:
    """The tiles, and all combinations of `values` for those fields that they have."""
    fields = [name for name in tiles._fields if name in values]
    combinations = itertools.product(*(values[name] for name in fields))
    found = [tiles._replace(**dict(zip(fields, chosen, strict=True))) for chosen in combinations]
    return list(dict.fromkeys([tiles, *found]))


def default_tiles(args, case: Case) -> Any:
    """Those in use; NotImplementedError where the implementation cannot run the case."""

    def trace(q, k, v):
        problems.append(_normalise(args, case, q, k, v)[0])

    problems = []
    jax.eval_shape(trace, *case.shapes()[:3])
    return selection.first(problems[0], args.implementation).tiles


def contender(args, name: str, tiles) -> Contender:
    backend = backends.find(args.implementation)

    def attend(case, q, k, v):
        problem, operands = _normalise(args, case, q, k, v)
        return autodiff.attend(problem, backends.Choice(backend, tiles), operands)[0]

    return Contender(name, attend, package="pallas-flash")


def _normalise(args, case: Case, q, k, v):
    call = dict(is_causal=case.causal, deterministic=not args.fused)
    call |= dict(local_window_size=(case.window - 1, 0)) if case.window else {}
    call |= dict(query_segment_ids=case.segment_ids()) if case.documents else {}
    return attention.normalised(q, k, v, **call)


# ---- what is asked, and what it says ----


def parse(argv) -> argparse.Namespace:
    tuned = [backend.name for backend in backends.BACKENDS if backend.name in ("hopper", "triton")]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog="Exit status 1: a kernel has no candidate that is right.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add(
        "--implementation",
        choices=tuned,
        default="hopper" if machine.on_gpu() else "triton",
        help="whose kernels to sweep",
    )
    add("--batch", type=positive, default=4, metavar="B", help="sequences")
    add("--length", type=positive, default=4096, metavar="T", help="number of queries and of keys")
    add("--heads", type=positive, default=16, metavar="N", help="query heads")
    add(
        "--kv-heads",
        type=positive,
        metavar="K",
        help="key/value heads; as many as query heads if left out",
    )
    add(
        "--head-size", type=positive, default=128, metavar="H", help="head size of queries and keys"
    )
    add(
        "--value-size",
        type=positive,
        metavar="Hv",
        help="head size of values; as of queries and keys if left out",
    )
    add("--dtype", choices=list(TOLERANCE), default="bfloat16", help="dtype of the inputs")
    add(
        "--full",
        action="store_true",
        help="every query sees every key, rather than those up to its own",
    )
    add(
        "--window", type=positive, metavar="W", help="a query sees W keys, the last of them its own"
    )
    add(
        "--documents",
        type=positive,
        metavar="D",
        help="number of documents packed into each sequence",
    )
    add("--fused", action="store_true", help="sweep with deterministic=False")
    add(
        "--interpret",
        action="store_true",
        help="go on without a GPU, in Pallas' interpreter, whose times mean nothing",
    )
    add("--kernels", nargs="+", metavar="PART", help="kernels to sweep; all if left out")
    known = " ".join(f"{name}={','.join(map(str, values))}" for name, values in VALUES.items())
    add(
        "--sweep",
        nargs="+",
        type=_values,
        metavar="FIELD=VALUE,...",
        help=f"values to try, in place of {known}",
    )
    add(
        "--repeats",
        type=positive,
        default=5,
        metavar="R",
        help="rounds, each of which times each candidate once",
    )
    add(
        "--jobs",
        type=positive,
        default=min(8, os.cpu_count() or 1),
        metavar="J",
        help="how many programs compile at a time",
    )
    args = parser.parse_args(argv)
    if args.window and args.full:
        parser.error("--window is causal; leave out --full.")
    args.sweep = dict(args.sweep or VALUES)
    return args


def _values(text: str) -> tuple[str, tuple]:
    name, _, values = text.partition("=")
    bools = {"True": True, "False": False}
    try:
        return name, tuple(
            bools[value] if value in bools else int(value) for value in values.split(",")
        )
    except ValueError:
        form = "FIELD=VALUE,VALUE with whole numbers, as block_k=64,128"
        raise argparse.ArgumentTypeError(f"must be {form}; got {text!r}") from None


def the_case(args) -> Case:
    kv_heads, Hv = args.kv_heads or args.heads, args.value_size
    shape = args.batch, args.length, args.length, args.heads, kv_heads, args.head_size
    return Case(*shape, args.dtype, not args.full, Hv, args.window, args.documents)


def print_header(args, case: Case, tiles):
    facts = dict(
        device=machine.device(),
        commit=machine.commit(),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        case=f"{case}{', deterministic=False' if args.fused else ''}",
        tiles=repr(tiles),
        times=f"median of {args.repeats} rounds, interleaved: each candidate once a round, in an "
        "order drawn anew",
    )
    if not machine.on_gpu():
        facts |= dict(
            beware="there is no GPU: the kernels run in Pallas' interpreter, and their times mean "
            "nothing"
        )
    for name, text in facts.items():
        print(f"{name:<11}{text}")


def print_kernel(kernel: Kernel, tiles, rows: dict[Any, Row]):
    """Fastest first; what was not timed last, with its reason."""
    in_use = kernel.of(tiles)
    fields = [name for name in in_use._fields if len({getattr(own, name) for own in rows}) > 1]
    table = []
    for own, row in sorted(rows.items(), key=lambda pair: pair[1].median or float("inf")):
        times = (
            (report.milliseconds(row.median), f"{row.tflops:.3g}")
            if row.median
            else (row.status, "")
        )
        off = "" if row.error is None else f"{row.error:.0e}"
        reason = " ".join(row.reason.split())[: report.REASON_LENGTH]
        table.append(
            (
                *(getattr(own, name) for name in fields),
                *times,
                off,
                "in use" if own == in_use else "",
                reason,
            )
        )
    print(f"\n{kernel.part or 'tiles'}, by the time of the {kernel.passes}")
    report.print_table((*fields, "ms", "TFLOP/s", "error", "", "reason"), table)


if __name__ == "__main__":
    raise SystemExit(main())
