"""python scripts/benchmark.py [--quick] [--cases NAME] [--implementations NAME ...] ...

Times implementations of attention side by side: forward, backward, and both together. Also reports
the temporary memory of the compiled programs. Every result is checked before it is timed. Prints
tables, and writes benchmark.json, with every single time, into a new folder. On a GPU each case has
a process of its own: they compile at the same time, and run one after the other.

A further peer is a row of PEERS in bench/peers.py, a further list of cases one of CASES below.
"""

import argparse
import concurrent.futures
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench import cases, ceilings, clock, machine, report, workers
from scripts.bench.cases import JVP, PASSES, RESULTS, Case, telling
from scripts.bench.measure import Row, groups, measure
from scripts.bench.options import make_next_folder, positive
from scripts.bench.peers import DETERMINISTIC, PEERS, Contender, contender
from scripts.bench.programs import CHECK_BLOCK, TF32, TOLERANCE, check_length
from scripts.bench.report import OUT_OF_TIME


class Cases(NamedTuple):
    """A list of cases, and the defaults of the options that it uses."""

    make: Callable[[argparse.Namespace], list[Case]]
    help: str
    cpu: dict
    gpu: dict


TOKEN = dict(kv_heads=8, head_size=128, passes=[PASSES[0]])
LATENT = TOKEN | dict(kv_heads=1)
CASES = {
    "lengths": Cases(
        cases.by_length,
        "one shape at several lengths",
        cpu=dict(lengths=[512, 1024, 2048, 4096], batch=[1], heads=4, head_size=64),
        gpu=dict(lengths=[*cases.LENGTHS], batch=None, heads=16, head_size=128),
    ),
    "suite": Cases(cases.suite, "head sizes, lengths and masks, of 16384 tokens each", {}, {}),
    "decode": Cases(
        cases.decoding,
        "one new token beside a cache of each length",
        cpu=dict(lengths=[1024, 8192], batch=[1, 8], heads=32, **TOKEN),
        gpu=dict(lengths=[1024, 8192, 32768, 131072], batch=[1, 8, 64], heads=64, **TOKEN),
    ),
    "latents": Cases(
        cases.latents,
        "one new token beside a cache of latents (MLA: keys of 576, the first 512 are the values)",
        cpu=dict(lengths=[1024, 8192], batch=[1, 8], heads=16, **LATENT),
        gpu=dict(lengths=[8192, 32768], batch=[1, 16, 64], heads=128, **LATENT),
    ),
}
SHAPE = ("lengths", "batch", "heads", "kv_heads", "head_size", "causal")  # the suite has its own
ANYWHERE = dict(kv_heads=None, causal=True, repeats=9, budget=None, out=None, quick=False)
SLOW = ["blockwise", "jax.nn/xla"]
FAST = ["hopper", f"hopper {DETERMINISTIC}", "ampere", "triton"]
FAST += [peer.name for peer in PEERS if peer.name not in SLOW]
DEFAULTS = dict(
    cpu=dict(
        implementations=[*SLOW, "torch"],
        passes=[PASSES[0], PASSES[2]],
        dtype="float32",
        jobs=1,
    ),
    gpu=dict(
        implementations=FAST + SLOW,
        passes=[*PASSES],
        dtype="bfloat16",
        jobs=min(12, os.cpu_count() or 1),
    ),
)
QUICK = dict(
    cpu=dict(repeats=3),
    gpu=dict(implementations=FAST, passes=[*PASSES[:2], JVP], repeats=5, budget=450),
)
GRACE = 100  # seconds after the budget in which the last case must end, in its own process


def main(argv=None) -> int:
    # of 80 GB: the largest caches, in pages too; but several processes share them
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [workers.CASE]:
        workers.serve(argv[1])
        return 0
    args = parse(argv)
    everyone = [contender(name) for name in args.implementations]
    contenders = [one for one in everyone if not one.missing()]
    args.out = new_folder(args.out)
    run = Run(args, contenders, CASES[args.cases].make(args))
    run.print_header([one for one in everyone if one.missing()])
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    try:
        # on a CPU what compiles would disturb what is timed
        list((pool.map if machine.on_gpu() else map)(run.measure, run.cases))
    except KeyboardInterrupt:
        print("benchmark.py: interrupted; measured so far:", file=sys.stderr)
    finally:
        run.is_over = True
        pool.shutdown(cancel_futures=True)
    return run.report()


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
    """What was measured so far; written as soon as it is known."""

    def __init__(self, args, contenders: list[Contender], cases: list[Case]):
        self.args, self.contenders, self.cases = args, contenders, cases
        self.started, self.is_over, self.lock = time.perf_counter(), False, threading.Lock()
        self.clock = clock.detect()
        self.facts: dict[str, str] = {}
        end = f"the budget is {args.budget} s" if args.budget else "the run ended before"
        self.not_yet = f"{OUT_OF_TIME}: {end}"
        self.rows = {
            (case, passes, one.name): Row(case, passes, one.name, "not run", self.not_yet)
            for case in cases
            for passes in telling(case, args)
            for one in contenders
            if passes in one.passes
        }

    def ceiling(self, case: Case) -> ceilings.Ceiling:
        return ceilings.of(case, self.args.dtype, self.clock)

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
        self.facts |= {bound.name: str(bound) for bound in map(self.ceiling, self.cases)}
        if args.budget:
            self.facts["plan"] += f"; no case begins after {args.budget} s"
        if machine.on_gpu():
            self.facts["gpu"] = machine.limits()
        self.facts |= {one.name: one.note for one in self.contenders if one.note}
        machine.print_facts(self.facts)

    def measure(self, case: Case):
        args, passes = self.args, telling(case, self.args)
        if self.left() < 0:
            return
        print(f"measuring  {case}, {', '.join(passes)}, at {self.spent():.0f} s", file=sys.stderr)
        if machine.on_gpu():
            self.in_processes(case, passes)
        else:
            self.add(measure(self.contenders, case, passes, args.repeats, args.jobs, self.clock))

    def in_processes(self, case: Case, passes: list[str]):
        """One; if it dies before anything ran, one without foreign code."""
        job = dict(case=case, passes=passes, rounds=self.args.repeats, time_by=self.clock)
        log = self.args.out / f"case-{self.cases.index(case) + 1}.txt"
        for group in reversed(groups(self.contenders)):
            job["contenders"] = [one.name for one in group]
            try:
                return workers.in_a_process(job, self.left, self.add, log)
            except workers.Lost as error:
                reason, has_run = error.args
            self.lose(case, f"{reason}; see {log.name}" if reason else None)
            if has_run or not reason:
                return

    def spent(self) -> float:
        return time.perf_counter() - self.started

    def left(self, has_begun: bool = False) -> float:
        """Seconds in which a case may begin to run, or one that has begun may end."""
        seconds = (self.args.budget or math.inf) + GRACE * has_begun - self.spent()
        return -1 if self.is_over else seconds

    def add(self, rows: list[Row]):
        self.rows |= {(row.case, row.passes, row.name): row for row in rows}
        self.write()

    def lose(self, case: Case, reason: str | None):
        """What was not timed of a case, by a failure or for want of time."""
        for row in self.rows.values():
            is_open = row.status == "ok" or row.reason == self.not_yet
            if row.case == case and is_open and not row.seconds:
                row.status, row.reason = ("failed", reason) if reason else ("not run", self.not_yet)
        self.write()

    def report(self) -> int:
        rows, names = [*self.rows.values()], [one.name for one in self.contenders]
        columns = lambda row: self.ceiling(row.case).columns(row)
        report.print_rows(rows, self.args.implementations[0], columns)
        ours = [one.name for one in self.contenders if not one.is_peer]
        report.print_ratios(rows, ours, [name for name in names if name not in ours])
        ran = any(row.status == "ok" for row in rows)
        if not ran:
            print("nothing ran")
        self.write()
        print(f"\nwritten    {self.args.out / 'benchmark.json'}; {self.spent():.0f} s in all")
        return int(not ran or any(row.status in ("wrong", "failed") for row in rows))

    def write(self):
        with self.lock:
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
    try:
        one = contender(name)
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
        help="implementations of flash_attention, as hopper, 'hopper deterministic' (its backward "
        "with deterministic=True), 'hopper varlen' (documents by cu_seqlens) or 'hopper: "
        "dq.stages=2, fused.stages=3' (with other tiles); "
        f"or {', '.join(peer.name for peer in PEERS)}; ratios are to the first",
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
    help = "cases to compile at a time, each in its own process; on a CPU programs, in threads"
    add("--jobs", type=positive, metavar="J", help=help)
    add("--budget", type=positive, metavar="S", help="seconds after which no case begins to run")
    add("--out", type=pathlib.Path, metavar="DIR", help="folder to write to")
    add("--quick", action="store_true", help="telling cases of the suite, fewer rounds")
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout`
    raise SystemExit(main())
