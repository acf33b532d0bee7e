"""A case in a process of its own: several compile at a time, which Pallas does in Python, and one
at a time runs. One that crashes or hangs loses only what it has not yet said."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from scripts.bench.cases import Case
from scripts.bench.measure import READY, Row, measure
from scripts.bench.peers import contender

COMMAND = [sys.executable, str(pathlib.Path(__file__).parents[1] / "benchmark.py")]
CASE = "--case"
COMPILE, RUN = 300, 50  # seconds, and 10 a round: what takes longer hangs
_one_runs = threading.Lock()


class Lost(Exception):
    """How a process ended, or None where time did; and whether it ran what it had compiled."""


def in_a_process(
    job: dict, left: Callable[[bool], float], keep: Callable[[list[Row]], None], log: pathlib.Path
):
    """`keep` is given the rows of `measure` that changed. `left` says how many seconds remain, once
    it runs or before. What it prints is in `log`."""
    step, runs, limit, begun = "starting", False, COMPILE, time.monotonic()
    with contextlib.ExitStack() as turn, _started(job, log) as process:
        while left(runs) > 0:
            if time.monotonic() > begun + limit:
                process.send_signal(signal.SIGUSR1)  # it prints where it is
                time.sleep(1)
                raise Lost(f"its process hangs, {limit} s of {step}", runs)
            if not select.select([process.stdout], [], [], 1)[0]:
                continue
            if not (line := process.stdout.readline()).endswith(b"\n"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if status := process.wait(10):
                        how = f"status {status}" if status > 0 else signal.Signals(-status).name
                        raise Lost(f"its process ended with {how}, {step}", runs)
                return
            step, rows = json.loads(line)
            keep([Row(**row | dict(case=Case(*row["case"]))) for row in rows])
            if step == READY:
                while not _one_runs.acquire(timeout=1):
                    if left(runs) <= 0:
                        raise Lost(None, runs)
                turn.callback(_one_runs.release)
                runs, limit = True, RUN + 10 * job["rounds"]
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(b"\n")
            begun = time.monotonic()
    raise Lost(None, runs)


@contextlib.contextmanager
def _started(job: dict, log: pathlib.Path) -> Iterator[subprocess.Popen]:
    """It ends with what it started itself, as nvidia-smi: a session."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    with log.open("a") as file:
        process = subprocess.Popen([*COMMAND, CASE, json.dumps(job)], stderr=file, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it
            process.wait(10)


def serve(job: str):
    """Measures a case in the worker process, and reports each step and row."""
    job = json.loads(job)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # others print too
    said = {}

    def say(step: str, rows: list[Row]):
        new = {(row.passes, row.name): dataclasses.asdict(row) for row in rows}
        changed = [row for key, row in new.items() if row != said.get(key)]
        said.update(new)
        print(json.dumps([step, changed]), file=out, flush=True)
        if step == READY and not sys.stdin.readline():
            raise SystemExit("nobody waits for it")

    contenders = [contender(name) for name in job.pop("contenders")]
    case = Case(*job.pop("case"))
    say("ending", measure(contenders, case, **job, jobs=1, say=say))
