"""A run measures tasks, on a GPU each in a process of its own; it writes what it knows as soon as
that is known, and ends with tables."""

import argparse
import concurrent.futures
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from scripts.bench import ceilings, clock, machine, report, workers
from scripts.bench.cases import Case
from scripts.bench.measure import Row, groups, measure
from scripts.bench.options import make_next_folder, positive
from scripts.bench.peers import Contender
from scripts.bench.programs import CHECK_BLOCK, TF32, TOLERANCE, check_length
from scripts.bench.report import OUT_OF_TIME

GRACE = 100  # seconds after the budget in which the last task must end, in its own process


class Task(NamedTuple):
    """What is timed together. No two of a run have a pass of a case in common."""

    case: Case
    passes: list[str]
    contenders: list[Contender]


def share_gpu():
    """Limits jax's share of GPU memory; call it before jax sees the GPU."""
    # the largest caches take most of 80 GB, which several processes share
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def add_options(add: Callable):
    """Adds the options of a run."""
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


def new_folder(folder: pathlib.Path | None, command: str) -> pathlib.Path:
    """Measurements are never overwritten."""
    if folder is None:
        return make_next_folder(pathlib.Path("runs", command))
    if list(folder.glob(f"{command}*")):
        raise SystemExit(
            f"{command}.py: error: --out must be a folder without results; {folder} has some. "
            "Choose another."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{command}.py: error: --out: {error}") from None
    return folder


class Run:
    """What was measured so far. `args` has out, repeats, budget and jobs, as add_options adds them;
    `command` is the name of the script."""

    def __init__(self, args: argparse.Namespace, tasks: list[Task], command: str = "benchmark"):
        everyone = {one.name: one for task in tasks for one in task.contenders}
        self.absent = {name: why for name, one in everyone.items() if (why := one.missing())}
        self.contenders = [one for name, one in everyone.items() if name not in self.absent]
        there = lambda task: [one for one in task.contenders if one.name not in self.absent]
        self.tasks = [task._replace(contenders=there(task)) for task in tasks]
        self.args, self.command, self.first = args, command, next(iter(everyone))
        self.out = new_folder(args.out, command)
        self.file = self.out / f"{command}.json"
        self.started, self.is_over, self.lock = time.perf_counter(), False, threading.Lock()
        self.clock = clock.detect()
        self.facts: dict[str, str] = {}
        end = f"the budget is {args.budget} s" if args.budget else "the run ended before"
        self.not_yet = f"{OUT_OF_TIME}: {end}"
        self.rows = {
            (task.case, passes, one.name): Row(task.case, passes, one.name, "not run", self.not_yet)
            for task in self.tasks
            for passes in task.passes
            for one in task.contenders
            if passes in one.passes
        }

    def all(self) -> int:
        """The exit status."""
        self.print_header()
        pool = concurrent.futures.ThreadPoolExecutor(self.args.jobs)
        try:
            # on a CPU what compiles would disturb what is timed
            list((pool.map if machine.on_gpu() else map)(self.measure, self.tasks))
        except KeyboardInterrupt:
            print(f"{self.command}.py: interrupted; measured so far:", file=sys.stderr)
        finally:
            self.is_over = True
            pool.shutdown(cancel_futures=True)
        return self.report()

    def ceiling(self, case: Case) -> ceilings.Ceiling:
        return ceilings.of(case, case.dtype, self.clock)

    def print_header(self):
        args, first, tf32 = self.args, self.first, ""
        dtype = self.tasks[0].case.dtype
        if dtype == "float32" and machine.on_gpu():
            tf32 = f", and {TF32:g} of peers, as in TF32"
        each = "back to back" if machine.on_gpu() else "each awaited, after one that is not timed"
        versions = dict.fromkeys(
            one.version() for one in self.contenders if one.package not in ("jax", "pallas-flash")
        )
        absent = [f"{name} not installed: {why}" for name, why in self.absent.items()]
        self.facts = machine.facts() | dict(
            peers=", ".join(versions) or "none but jax's own",
            missing="; ".join(absent) or "none",
            inputs=f"random normal, {dtype}",
            times=f"median of {args.repeats} rounds, in each of which every contender has a turn, "
            f"in random order: calls for {clock.SAMPLE * 1e3:g} ms, {each}",
            clock=self.clock,
            ratio=f"time / time of {first}: above 1, {first} is faster",
            flops="2 (H + Hv) forward, 2 (3 H + 2 Hv) backward and 6 (H + Hv) in forward mode for "
            "each visible pair of query and key; a causal mask alone counts as half",
            memory="temporaries of the compiled program, without inputs and outputs",
            error=f"of output and gradients against dense float32, relative, in the worst "
            f"{CHECK_BLOCK} rows of the first {check_length()}; the tolerance is "
            f"{TOLERANCE[dtype]:g}{tf32}",
            plan=f"{len(self.tasks)} cases, {len(self.rows)} rows",
        )
        self.facts |= {
            bound.name: str(bound) for bound in (self.ceiling(task.case) for task in self.tasks)
        }
        if args.budget:
            self.facts["plan"] += f"; no case begins after {args.budget} s"
        if machine.on_gpu():
            self.facts["gpu"] = machine.limits()
        self.facts |= {one.name: one.note for one in self.contenders if one.note}
        machine.print_facts(self.facts)

    def measure(self, task: Task):
        args, (case, passes, contenders) = self.args, task
        if self.left() < 0:
            return
        print(f"measuring  {case}, {', '.join(passes)}, at {self.spent():.0f} s", file=sys.stderr)
        if machine.on_gpu():
            self.in_processes(task)
        else:
            self.add(measure(contenders, case, passes, args.repeats, args.jobs, self.clock))

    def in_processes(self, task: Task):
        """One; if it dies before anything ran, one without foreign code."""
        order = dict(case=task.case, passes=task.passes)
        order |= dict(rounds=self.args.repeats, time_by=self.clock)
        log = self.out / f"case-{self.tasks.index(task) + 1}.txt"
        for group in reversed(groups(task.contenders)):
            order["contenders"] = [one.name for one in group]
            try:
                return workers.in_a_process(order, self.left, self.add, log)
            except workers.Lost as error:
                reason, has_run = error.args
            self.lose(task, f"{reason}; see {log.name}" if reason else None)
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

    def lose(self, task: Task, reason: str | None):
        """What was not timed of a task, by a failure or for want of time."""
        for row in self.rows.values():
            is_open = row.status == "ok" or row.reason == self.not_yet
            if row.case == task.case and row.passes in task.passes and is_open and not row.seconds:
                row.status, row.reason = ("failed", reason) if reason else ("not run", self.not_yet)
        self.write()

    def report(self) -> int:
        rows, names = [*self.rows.values()], [one.name for one in self.contenders]
        columns = lambda row: self.ceiling(row.case).columns(row)
        report.print_rows(rows, self.first, columns)
        ours = [one.name for one in self.contenders if not one.is_peer]
        report.print_ratios(rows, ours, [name for name in names if name not in ours])
        ran = any(row.status == "ok" for row in rows)
        if not ran:
            print("nothing ran")
        self.write()
        print(f"\nwritten    {self.file}; {self.spent():.0f} s in all")
        return int(not ran or any(row.status in ("wrong", "failed") for row in rows))

    def write(self):
        with self.lock:
            report.write_json(self.file, self.facts, [*self.rows.values()])
