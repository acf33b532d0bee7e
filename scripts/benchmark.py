"""python scripts/benchmark.py [--quick] [--implementations NAME ...] [--lengths T ...]

Times implementations of attention side by side, in one process: forward, backward, and both
together. Also gives the temporary memory of the compiled programs. Every result is checked before
it is timed. On a GPU it runs a suite of cases against every peer that is installed. --cases decode
times, with or without a GPU, one new token against caches. --cases context runs nothing: it counts
what a sequence on eight devices takes of each. Prints tables, and writes benchmark.json, with every
single time, benchmark.csv and pictures into a new folder.

`--help` lists the rest. A further peer is a row of PEERS in bench/peers.py, a further case one of
suite() in bench/cases.py.
"""

import argparse
import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import pathlib
import platform
import sys
import threading
import time

import jax
import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import pallas_flash
from scripts.bench import clock, context, machine, plots, product, report
from scripts.bench.cases import PASSES, Case, decoding, suite
from scripts.bench.measure import Row, groups, measure, memory
from scripts.bench.options import Help, numbered, positive
from scripts.bench.peers import PEERS, Contender, contender
from scripts.bench.programs import CHECK_BLOCK, TF32, TOLERANCE, check_length

DEFAULTS = dict(
    cpu=dict(
        implementations=["blockwise", "jax.nn/xla", "torch"],
        passes=[PASSES[0], PASSES[2]],
        lengths=[512, 1024, 2048, 4096],
        heads=4,
        head_size=64,
        tokens=1,
        dtype="float32",
        memory_lengths=[4096, 8192, 16384, 32768, 65536],
        jobs=1,
    ),
    gpu=dict(
        implementations=[
            "hopper",
            "hopper fused",
            "triton",
            "blockwise",
            *(peer.name for peer in PEERS),
        ],
        passes=list(PASSES),
        lengths=[512, 1024, 2048, 4096, 8192, 16384],
        heads=16,
        head_size=128,
        tokens=16384,
        dtype="bfloat16",
        memory_lengths=[],
        jobs=min(8, os.cpu_count() or 1),
    ),
)
QUICK = dict(
    cpu=dict(lengths=[256, 1024], memory_lengths=[4096, 8192, 65536], repeats=3),
    gpu=dict(
        implementations=[
            name for name in DEFAULTS["gpu"]["implementations"] if name != "blockwise"
        ],
        lengths=[4096, 16384],
        repeats=5,
        budget=390,
    ),
)
DECODE = dict(  # where no shape is given
    cpu=dict(batch=[1, 8], lengths=[1024, 8192], heads=32, kv_heads=8, head_size=128),
    gpu=dict(
        batch=[1, 8, 64], lengths=[1024, 8192, 32768, 131072], heads=64, kv_heads=8, head_size=128
    ),
)
CONTEXT = dict(
    implementations=["blockwise"], batch=1, lengths=[65536], heads=8, head_size=64, dtype="float32"
)
# of the cases that are not the suite's
SHAPE = ("lengths", "batch", "heads", "kv_heads", "head_size", "causal")
# seconds that the plan takes a program to be compiled and traced, and a row to be checked
COMPILE, LOWER, TIME = 4.0, 0.5, 0.25
NOT_YET = "the run ended before"
GRACE = 120  # seconds after the budget in which the last case must end; then it hangs


def main(argv=None) -> int:
    # of 80 GB: the largest caches, in pages too
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    args = parse(argv)
    if args.cases == "context":
        return count_context(args)
    everyone = [contender(name) for name in args.implementations]
    contenders = [one for one in everyone if not one.missing()]
    cases = the_cases(args)
    args.out = new_folder(args.out)
    facts = print_header(args, everyone, cases)
    run = Run(args, facts, contenders, cases)
    with guard(args.budget + GRACE, run.give_up) if args.budget else contextlib.nullcontext():
        for group, case in itertools.product(groups(contenders), cases):
            run.measure(case, group)
    return run.finish()


@contextlib.contextmanager
def guard(seconds: float, give_up):
    """Calls give_up() in another thread, if the block takes longer."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def count_context(args) -> int:
    args.out = new_folder(args.out)
    facts = {name: text for name, text in where().items() if name != "device"}
    for name, text in facts.items():
        print(f"{name:<11}{text}", flush=True)
    try:
        rows = context.count(args.implementations, the_cases(args))
    except (ValueError, NotImplementedError) as error:
        raise SystemExit(f"benchmark.py: error: {error}") from None
    (args.out / "benchmark.json").write_text(
        json.dumps(facts | dict(context=rows), indent=1) + "\n"
    )
    print(f"\nwritten    {args.out}: benchmark.json")
    return 0


def new_folder(folder: pathlib.Path | None) -> pathlib.Path:
    """What was measured once is never overwritten."""
    if folder is None:
        return numbered(pathlib.Path("runs", "benchmark"))
    if list(folder.glob("benchmark*")):
        raise SystemExit(
            f"benchmark.py: error: --out must be a folder without results; {folder} has some. "
            "Choose another."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"benchmark.py: error: --out: {error}") from None
    return folder


def the_cases(args) -> list[Case]:
    if args.cases == "suite":
        return suite(args.dtype, args.quick)
    shape = dict(N=args.heads, K=args.kv_heads, H=args.head_size, dtype=args.dtype)
    if args.cases == "decode":
        return decoding(np.atleast_1d(args.batch).tolist(), args.lengths, **shape)
    shape |= dict(causal=args.causal)
    return [Case(B=args.batch or max(1, args.tokens // T), T=T, S=T, **shape) for T in args.lengths]


def speeds(args, time_by: str) -> report.Speeds:
    """The columns beside a time: of what bounds the cases, and the part of it that is reached."""
    if args.cases == "decode":
        return report.bytes_read(product.measure_copy(time_by)[0])
    return report.flops(product.measure(args.dtype, time_by)[0])


class Run:
    """What is measured so far; written after every case, since a kernel that crashes takes the
    process with it."""

    def __init__(self, args, facts: dict, contenders: list[Contender], cases: list[Case]):
        self.args, self.facts, self.contenders = args, facts, contenders
        self.speeds = speeds(args, facts["clock"])
        self.started = time.perf_counter()
        self.rows = {
            (case, passes, one.name): Row(case, passes, one.name, "not run", NOT_YET)
            for case, passes, one in itertools.product(cases, args.passes, contenders)
            if passes in one.passes
        }
        self.compiled_only: list[Row] = []

    @property
    def timed(self) -> list[Row]:
        return list(self.rows.values())

    def measure(self, case: Case, contenders: list[Contender]):
        args, spent = self.args, time.perf_counter() - self.started
        if args.budget and spent > args.budget:
            for row in self.timed:
                if row.case == case and row.reason == NOT_YET:
                    row.reason = (
                        f"out of time: the budget is {args.budget} s, and {spent:.0f} s were spent"
                    )
            return
        print(f"measuring  {', '.join(args.passes)}, {case}, after {spent:.0f} s", file=sys.stderr)
        self.add(
            measure(contenders, case, args.passes, args.repeats, args.jobs, self.facts["clock"])
        )
        self.write()

    def add(self, rows: list[Row]):
        """What is known of one stays, unless it is timed once more."""
        for row in rows:
            at = row.case, row.passes, row.name
            if row.seconds or self.rows[at].status == "not run":
                self.rows[at] = row

    def give_up(self):
        """In another thread, as the main one hangs: tells where, prints the tables and ends the
        process."""
        print("\nbenchmark.py: a case hangs; what was measured until now:", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.__stderr__)
        try:
            self.report()
            sys.stdout.flush()
        finally:
            os._exit(1)

    def finish(self) -> int:
        args = self.args
        for T in args.memory_lengths:
            case = Case(
                B=1, T=T, S=T, N=1, K=1, H=args.head_size, dtype=args.dtype, causal=args.causal
            )
            self.compiled_only += [memory(one, case) for one in self.contenders if not one.is_torch]
        return self.report()

    def report(self) -> int:
        args, names = self.args, [one.name for one in self.contenders]
        if args.cases == "suite":
            ran = [row for row in self.timed if row.status != "not run"]
            report.print_times(ran, args.implementations[0], self.speeds, report.label, "case")
        elif args.cases == "decode":
            report.print_times(
                self.timed,
                args.implementations[0],
                self.speeds,
                lambda case: f"B{case.B} S{case.S}",
                "case",
            )
        else:
            report.print_times(self.timed, args.implementations[0], self.speeds)
        report.print_clocks(self.timed, self.facts["clock"])
        report.print_sensors(self.timed)
        report.print_memory(
            self.compiled_only, [one.name for one in self.contenders if not one.is_torch]
        )
        rows = self.timed + self.compiled_only
        report.print_reasons(rows)
        if args.cases == "suite":  # last, for whoever sees the end alone
            ours = [name for name in names if all(name != peer.name for peer in PEERS)]
            report.print_ratios(self.timed, ours, [name for name in names if name not in ours])
        if not (ran := any(row.seconds for row in self.timed)):
            print("nothing ran")
        self.write()
        if args.cases == "suite":
            pictures = plots.write_suite(args.out, self.facts, self.timed, names)
        elif args.cases == "decode":
            pictures = []
        else:
            pictures = ["benchmark.png"]
            plots.write_lengths(
                args.out / pictures[0], self.facts, self.timed, self.compiled_only, args
            )
        took = time.perf_counter() - self.started
        print(
            f"\nwritten    {args.out}: "
            f"{', '.join(['benchmark.json', 'benchmark.csv', *pictures])}; {took:.0f} s in all"
        )
        return int(not ran or any(row.status in ("wrong", "failed") for row in rows))

    def write(self):
        report.write_json(
            self.args.out / "benchmark.json", self.facts, self.timed, self.compiled_only
        )
        report.write_csv(self.args.out / "benchmark.csv", self.timed, self.args.implementations[0])


# ---- what is asked ----


def parse(argv) -> argparse.Namespace:
    kind = "gpu" if machine.on_gpu() else "cpu"
    default, quick = DEFAULTS[kind], QUICK[kind]
    parser = make_parser(default, quick)
    parser.set_defaults(**default)
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(**quick)
    given, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(SHAPE)))
    given = ["--" + name.replace("_", "-") for name in SHAPE if getattr(given, name) is not None]
    asked = parser.parse_known_args(argv)[0].cases
    if asked == "decode":
        parser.set_defaults(**DECODE[kind], passes=PASSES[:1], memory_lengths=[])
    if asked == "context":
        parser.set_defaults(**CONTEXT)
    args = parser.parse_args(argv)
    args.cases = args.cases or ("suite" if machine.on_gpu() and not given else "lengths")
    if args.cases == "suite" and given:
        given = ", ".join(given).replace("--causal", "--causal or --full")
        parser.error(f"the suite has its own shapes; leave out {given}, or choose --cases lengths.")
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(
            f"--heads must be a multiple of --kv-heads; got {args.heads} and {args.kv_heads}."
        )
    for name in args.implementations:
        try:
            if not (one := contender(name)).modules:
                one.why_not(Case(1, 1, 1, 1, 1, 8, args.dtype, args.causal))
        except ValueError as error:  # no such name
            parser.error(f"{error} Or one of {', '.join(peer.name for peer in PEERS)}.")
        if args.cases == "context" and name in [peer.name for peer in PEERS]:
            parser.error(
                f"--cases context counts implementations of flash_attention; got {name!r}. Leave "
                "it out."
            )
    return args


def make_parser(default: dict, quick: dict) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog="The defaults are for this machine; a GPU has larger ones. Status 1: something was "
        "wrong, failed, or nothing ran.",
        formatter_class=Help,
    )
    add = parser.add_argument
    names = (
        "implementations of flash_attention (with ' fused': its backward with "
        "deterministic=False), or "
    )
    names += f"{', '.join(peer.name for peer in PEERS)}; the others are compared with the first"
    add("--implementations", nargs="+", metavar="NAME", help=names)
    add(
        "--passes",
        nargs="+",
        choices=PASSES,
        metavar="PASS",
        help="which to time: forward, backward, forward+backward",
    )
    add("--cases", choices=("lengths", "suite", "decode", "context"),
        help="what is timed. lengths: one shape at several lengths, the "
        "default without a GPU, and where a shape is given; suite: several head sizes, lengths and "
        "masks; decode: one new token "
        "that sees all of a cache, at several lengths; context, which is counted and not run: "
        "temporaries, bytes sent and blocks "
        "visited by each of eight devices that a sequence lies on")  # fmt: skip
    add(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="T",
        help="T = S of the timed cases; in decoding S, and T is 1",
    )
    add(
        "--batch",
        type=positive,
        metavar="B",
        help="sequences (default: %s)" % ("16384 // T" if default["tokens"] > 1 else 1),
    )
    add("--heads", type=positive, metavar="N", help="query heads")
    add(
        "--kv-heads",
        type=positive,
        metavar="K",
        help="key/value heads (default: as many as query heads)",
    )
    add("--head-size", type=positive, metavar="H", help="size of each head")
    add("--dtype", choices=list(TOLERANCE), help="dtype of the inputs")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal",
        action="store_true",
        default=True,
        help="a query sees the keys up to its own; the default",
    )
    mask.add_argument("--full", action="store_false", dest="causal", help="a query sees every key")
    add(
        "--repeats",
        type=positive,
        metavar="R",
        default=9,
        help="rounds, each of which times each contender once",
    )
    memory = (
        "T of the cases, B1 N1, that are compiled for their memory and not run; give no T to "
        "leave them out"
    )
    add("--memory-lengths", nargs="*", type=positive, metavar="T", help=memory)
    add("--jobs", type=positive, metavar="J", help="how many programs compile at a time")
    add(
        "--budget",
        type=positive,
        metavar="S",
        help="seconds after which no further case is begun (default: no end)",
    )
    add(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of the results (default: runs/benchmark-1, -2, ...)",
    )
    shown = {name: value for name, value in quick.items() if name != "implementations"}
    words = ", ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, np.atleast_1d(value)))}"
        for name, value in shown.items()
    )
    words += ", and no blockwise" if "implementations" in quick else ""
    add(
        "--quick",
        action="store_true",
        help=f"changes defaults: {words}; of the suite only the first cases",
    )
    return parser


# ---- what it says first ----


def where() -> dict[str, str]:
    """And with what, and when."""
    return dict(
        device=machine.device(),
        versions=f"jax {jax.__version__}, Python {platform.python_version()}, pallas_flash "
        f"{pallas_flash.__version__}",
        commit=machine.commit(),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
    )


def print_header(args, everyone: list[Contender], cases: list[Case]) -> dict[str, str]:
    first = args.implementations[0]
    contenders = [one for one in everyone if not one.missing()]
    tf32 = (
        f", and of peers up to {TF32:g}, as in TF32"
        if args.dtype == "float32" and machine.on_gpu()
        else ""
    )
    versions = dict.fromkeys(
        one.version() for one in contenders if one.package not in ("jax", "pallas-flash")
    )
    facts = where() | dict(
        peers=", ".join(versions) or "none but jax's own",
        missing="; ".join(
            f"{one.name} not installed: {one.missing()}" for one in everyone if one.missing()
        )
        or "none",
        inputs=f"random normal, {args.dtype}, {_shapes(args)}",
        times=f"median of {args.repeats} rounds, interleaved: each contender once a round, in an "
        "order drawn anew",
        clock=(time_by := clock.which()),
        **_marks(args, time_by),
        ratio=f"its time / time of {first}: above 1, {first} is faster",
        flops="forward 2 (H + Hv) for each query and key that it sees, backward 2 (3 H + 2 Hv): 4 "
        "B N T S H and 2.5 times that;"
        " half for causal, the exact pairs for windows and documents",
        memory="temporaries of the compiled program, as XLA counts them: without inputs and "
        "outputs",
        error=f"of output and gradients against dense float32, relative, the worst {CHECK_BLOCK} "
        "rows of the first"
        f" {check_length()}; up to {TOLERANCE[args.dtype]:g} is right{tf32}",
    )
    turns = f"{clock.SAMPLE * 1e3:g} ms of calls"
    if machine.on_gpu():
        turns = f'{turns} behind each other; the clock "device" counts when any kernel or copy ran'
        facts |= dict(turns=turns, gpu=machine.limits(), plan=plan(args, contenders, cases))
    else:
        facts |= dict(turns=f"{turns}, at least one, each waited for; one before them is not timed")
    facts |= {one.name: one.note for one in contenders if one.note}
    for name, text in facts.items():
        print(f"{name:<11}{text}", flush=True)
    return facts


def _marks(args, time_by: str) -> dict[str, str]:
    if args.cases == "decode":
        return dict(copy=product.measure_copy(time_by)[1])
    return dict(product=product.measure(args.dtype, time_by)[1])


def _shapes(args) -> str:
    if args.cases == "decode":
        return f"N{args.heads} K{args.kv_heads} H{args.head_size}, one new token that sees all keys"
    if args.cases == "suite":
        return "16384 tokens in all, hidden size 2048, S = T"
    batch = f"B{args.batch}" if args.batch else f"B*T {args.tokens}" if args.tokens > 1 else "B1"
    return (
        f"{'causal' if args.causal else 'full'}, {batch} N{args.heads} K{args.kv_heads} "
        f"H{args.head_size}, S = T"
    )


def _why_not(one: Contender, case: Case) -> str | None:
    """None of foreign code, which is not loaded yet."""
    try:
        return None if one.is_foreign else one.why_not(one.takes(case))
    except Exception as error:  # it will be reported case by case
        return str(error)


def plan(args, contenders: list[Contender], cases: list[Case]) -> str:
    """How long it should take: by programs to compile, the backward alone counting two, and one
    dense program a case."""
    programs, timed = len(cases), 0
    for case, one, name in itertools.product(cases, contenders, args.passes):
        if name in one.passes and not _why_not(one, case):
            programs += 0 if one.is_torch else 1 + (name == "backward")
            timed += 1
    seconds = programs * (LOWER + COMPILE / args.jobs) + timed * (
        TIME + clock.SAMPLE * args.repeats
    )
    until = f"; no case begins after {args.budget} s" if args.budget else ""
    each = (
        f"{COMPILE:g} s to compile a program ({args.jobs} at a time), {LOWER:g} s to trace it, "
        f"{TIME:g} s to check a row"
    )
    return (
        f"{len(cases)} cases, up to {programs} programs, {timed} rows: at {each}, about "
        f"{seconds:.0f} s{until}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
