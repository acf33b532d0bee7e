"""python scripts/benchmark.py [--quick] [--cases NAME] [--implementations NAME ...] ...

Times implementations of attention side by side, in one process: forward, backward, and both
together. Also reports the temporary memory of the compiled programs. Every result is checked before
it is timed. Prints tables, and writes benchmark.json, with every single time, into a new folder.

A further peer is a row of PEERS in bench/peers.py, a further list of cases one of CASES below.
"""

import argparse
import contextlib
import faulthandler
import itertools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench import cases, ceilings, clock, machine, report
from scripts.bench.cases import PASSES, RESULTS, Case
from scripts.bench.measure import Row, groups, measure
from scripts.bench.options import make_next_folder, positive
from scripts.bench.peers import PEERS, Contender, contender
from scripts.bench.programs import CHECK_BLOCK, TF32, TOLERANCE, check_length


class Cases(NamedTuple):
    """A list of cases, and the defaults of the options that it uses."""

    make: Callable[[argparse.Namespace], list[Case]]
    help: str
    ceiling: Callable[..., ceilings.Ceiling]  # what bounds them
    cpu: dict
    gpu: dict


CASES = {
    "lengths": Cases(
        cases.by_length,
        "one shape at several lengths",
        ceilings.matmul,
        cpu=dict(lengths=[512, 1024, 2048, 4096], batch=[1], heads=4, head_size=64),
        gpu=dict(lengths=[*cases.LENGTHS], batch=None, heads=16, head_size=128),
    ),
    "suite": Cases(
        cases.suite,
        "head sizes, lengths and masks, of 16384 tokens each",
        ceilings.matmul,
        cpu={},
        gpu={},
    ),
    "decode": Cases(
        cases.decoding,
        "one new token beside a cache of each length",
        ceilings.copy,
        cpu=dict(
            lengths=[1024, 8192],
            batch=[1, 8],
            heads=32,
            kv_heads=8,
            head_size=128,
            passes=[PASSES[0]],
        ),
        gpu=dict(
            lengths=[1024, 8192, 32768, 131072],
            batch=[1, 8, 64],
            heads=64,
            kv_heads=8,
            head_size=128,
            passes=[PASSES[0]],
        ),
    ),
}
SHAPE = ("lengths", "batch", "heads", "kv_heads", "head_size", "causal")  # the suite has its own
ANYWHERE = dict(kv_heads=None, causal=True, repeats=9, budget=None, out=None, quick=False)
DEFAULTS = dict(
    cpu=dict(
        implementations=["blockwise", "jax.nn/xla", "torch"],
        passes=[PASSES[0], PASSES[2]],
        dtype="float32",
        jobs=1,
    ),
    gpu=dict(
        implementations=[
            *("hopper", "hopper fused", "ampere", "triton", "blockwise"),
            *(peer.name for peer in PEERS),
        ],
        passes=[*PASSES],
        dtype="bfloat16",
        jobs=min(8, os.cpu_count() or 1),
    ),
)
QUICK = dict(
    cpu=dict(repeats=3),
    gpu=dict(
        implementations=[
            name for name in DEFAULTS["gpu"]["implementations"] if name != "blockwise"
        ],
        repeats=5,
        budget=390,
    ),
)
NOT_YET = "the run ended before"
GRACE = 120  # seconds after the budget in which the last case must end; then it hangs


def main(argv=None) -> int:
    # of 80 GB: the largest caches, in pages too
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    args = parse(argv)
    everyone = [contender(name) for name in args.implementations]
    contenders = [one for one in everyone if not one.missing()]
    args.out = new_folder(args.out)
    run = Run(args, contenders, CASES[args.cases].make(args))
    run.print_header([one for one in everyone if one.missing()])
    with guard(args.budget + GRACE, run.give_up) if args.budget else contextlib.nullcontext():
        for group, case in itertools.product(groups(contenders), run.cases):
            run.measure(case, group)
    return run.report()


@contextlib.contextmanager
def guard(seconds: float, give_up: Callable[[], None]):
    """Calls give_up() in another thread, if the block takes longer."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def new_folder(folder: pathlib.Path | None) -> pathlib.Path:
    """Measurements are never overwritten."""
    if folder is None:
        return make_next_folder(pathlib.Path("runs", "benchmark"))
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


class Run:
    """What was measured so far; written after every case, since a kernel that crashes takes the
    process with it."""

    def __init__(self, args, contenders: list[Contender], cases: list[Case]):
        self.args, self.contenders, self.cases = args, contenders, cases
        self.started = time.perf_counter()
        self.clock = clock.detect()
        self.ceiling = CASES[args.cases].ceiling(args.dtype, self.clock)
        self.facts: dict[str, str] = {}
        self.rows = {
            (case, passes, one.name): Row(case, passes, one.name, "not run", NOT_YET)
            for case, passes, one in itertools.product(cases, args.passes, contenders)
            if passes in one.passes
        }

    def print_header(self, missing: list[Contender]):
        args, first, tf32 = self.args, self.args.implementations[0], ""
        if args.dtype == "float32" and machine.on_gpu():
            tf32 = f", and {TF32:g} of peers, as in TF32"
        each = "back to back" if machine.on_gpu() else "each awaited, after one that is not timed"
        versions = dict.fromkeys(
            one.version() for one in self.contenders if one.package not in ("jax", "pallas-flash")
        )
        absent = [f"{one.name} not installed: {one.missing()}" for one in missing]
        self.facts = machine.facts() | dict(
            peers=", ".join(versions) or "none but jax's own",
            missing="; ".join(absent) or "none",
            inputs=f"random normal, {args.dtype}",
            times=f"median of {args.repeats} rounds, in each of which every contender has a turn, "
            f"in random order: calls for {clock.SAMPLE * 1e3:g} ms, {each}",
            clock=self.clock,
            ratio=f"time / time of {first}: above 1, {first} is faster",
            flops="2 (H + Hv) forward, 2 (3 H + 2 Hv) backward and 6 (H + Hv) in forward mode for "
            "each visible pair of query and key; a causal mask alone counts as half",
            memory="temporaries of the compiled program, without inputs and outputs",
            error=f"of output and gradients against dense float32, relative, in the worst "
            f"{CHECK_BLOCK} rows of the first {check_length()}; the tolerance is "
            f"{TOLERANCE[args.dtype]:g}{tf32}",
            plan=f"{len(self.cases)} cases, {len(self.rows)} rows",
        )
        self.facts[self.ceiling.name] = str(self.ceiling)
        if args.budget:
            self.facts["plan"] += f"; no case begins after {args.budget} s"
        if machine.on_gpu():
            self.facts["gpu"] = machine.limits()
        self.facts |= {one.name: one.note for one in self.contenders if one.note}
        machine.print_facts(self.facts)

    def measure(self, case: Case, contenders: list[Contender]):
        args, spent = self.args, time.perf_counter() - self.started
        if args.budget and spent > args.budget:
            reason = f"out of time: the budget is {args.budget} s, and {spent:.0f} s were spent"
            for row in self.rows.values():
                if row.case == case and row.reason == NOT_YET:
                    row.reason = reason
            return
        print(f"measuring  {', '.join(args.passes)}, {case}, after {spent:.0f} s", file=sys.stderr)
        self.add(measure(contenders, case, args.passes, args.repeats, args.jobs, self.clock))
        self.write()

    def add(self, rows: list[Row]):
        """What is known of a contender stays, unless it was timed once more."""
        for row in rows:
            key = row.case, row.passes, row.name
            if row.seconds or self.rows[key].status == "not run":
                self.rows[key] = row

    def give_up(self):
        """Called in another thread while the main one hangs: says where, prints the tables and ends
        the process."""
        print("\nbenchmark.py: a case hangs; measured so far:", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.__stderr__)
        try:
            self.report()
            sys.stdout.flush()
        finally:
            os._exit(1)

    def report(self) -> int:
        rows, names = [*self.rows.values()], [one.name for one in self.contenders]
        report.print_rows(rows, self.args.implementations[0], self.ceiling.columns)
        ours = [one.name for one in self.contenders if not one.is_peer]
        report.print_ratios(rows, ours, [name for name in names if name not in ours])
        ran = any(row.status == "ok" for row in rows)
        if not ran:
            print("nothing ran")
        self.write()
        seconds = time.perf_counter() - self.started
        print(f"\nwritten    {self.args.out / 'benchmark.json'}; {seconds:.0f} s in all")
        return int(not ran or any(row.status in ("wrong", "failed") for row in rows))

    def write(self):
        report.write_json(self.args.out / "benchmark.json", self.facts, [*self.rows.values()])


# ---- the command line ----


def parse(argv) -> argparse.Namespace:
    kind = "gpu" if machine.on_gpu() else "cpu"
    parser = make_parser(kind)
    given = vars(parser.parse_args(argv))
    shape = ["--" + name.replace("_", "-") for name in SHAPE if name in given]
    name = given.setdefault("cases", "suite" if kind == "gpu" and not shape else "lengths")
    quick = QUICK[kind] if "quick" in given else {}
    defaults = ANYWHERE | DEFAULTS[kind] | getattr(CASES[name], kind) | quick
    args = argparse.Namespace(**defaults | given)
    if name == "suite" and shape:
        shape = ", ".join(shape).replace("--causal", "--causal or --full")
        parser.error(f"the suite has its own shapes; leave out {shape}, or choose --cases lengths.")
    if name == "suite":
        return args
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(
            f"--heads must be a multiple of --kv-heads; got {args.heads} and {args.kv_heads}."
        )
    return args


def implementation(name: str) -> str:
    """The name of a contender."""
    one = contender(name)
    try:
        if not one.is_peer:
            one.why_not(Case(1, 1, 1, 1, 1, 8, "float32", True))
    except ValueError as error:
        peers = ", ".join(peer.name for peer in PEERS)
        raise argparse.ArgumentTypeError(f"{error} Or one of {peers}.") from None
    return name


def make_parser(kind: str) -> argparse.ArgumentParser:
    """Without defaults: they differ by --cases and --quick."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog=defaults_in_words(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add(
        "--implementations",
        nargs="+",
        type=implementation,
        metavar="NAME",
        help="implementations of flash_attention (followed by ' fused': its backward with "
        f"deterministic=False), or {', '.join(peer.name for peer in PEERS)}; ratios are to the "
        "first",
    )
    help = f"of {', '.join(RESULTS)}; the last is forward mode, which not all peers have"
    add("--passes", nargs="+", choices=RESULTS, metavar="PASS", help=help)
    lists = "; ".join(f"{name}: {each.help}" for name, each in CASES.items())
    add("--cases", choices=CASES, help=lists)
    add("--lengths", nargs="+", type=positive, metavar="T", help="of queries and keys")
    add("--batch", nargs="+", type=positive, metavar="B", help="sequences")
    add("--heads", type=positive, metavar="N", help="query heads")
    add("--kv-heads", type=positive, metavar="K", help="key/value heads")
    add("--head-size", type=positive, metavar="H", help="head size")
    add("--dtype", choices=list(TOLERANCE), help="of the inputs")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="the default")
    mask.add_argument("--full", action="store_false", dest="causal", help="no mask")
    add(
        "--repeats",
        type=int,
        metavar="R",
        help="rounds, in each of which every contender is timed once; 0 compiles the programs for "
        "their memory alone and runs nothing",
    )
    add("--jobs", type=positive, metavar="J", help="programs to compile at a time")
    add("--budget", type=positive, metavar="S", help="seconds after which no case begins")
    add("--out", type=pathlib.Path, metavar="DIR", help="folder to write to")
    add("--quick", action="store_true", help="fewer cases of the suite, fewer rounds")
    return parser


def defaults_in_words(kind: str) -> str:
    """The defaults of a machine, as they are typed."""
    sets = {"": DEFAULTS[kind] | dict(repeats=ANYWHERE["repeats"])}
    sets |= {f"--cases {name}": getattr(each, kind) for name, each in CASES.items()}
    lines = []
    for name, defaults in (sets | {"--quick": QUICK[kind]}).items():
        typed = [
            f"--{option.replace('_', '-')} {' '.join(map(str, np.atleast_1d(value)))}"
            for option, value in defaults.items()
            if value is not None
        ]
        lines += [f"  {name or 'always':<16}{' '.join(typed)}"] if typed else []
    return "\n".join(
        [
            f"Defaults on a {kind.upper()}, where --cases is {CHOSEN[kind]}:",
            *lines,
            "",
            "Exit status 1: something was wrong or failed, or nothing ran.",
        ]
    )


CHOSEN = dict(cpu="lengths", gpu="suite, or lengths if a shape is given")


if __name__ == "__main__":
    raise SystemExit(main())
