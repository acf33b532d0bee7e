"""Runs an implementation on trial, in a process: compares it with the reference, and then times
it."""

import concurrent.futures
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax

from pallas_flash import checks
from pallas_flash.choose import implementations, selection
from pallas_flash.choose.selfcheck import comparison, outcome, records, specs, verdicts
from pallas_flash.choose.selfcheck.outcome import Verdict
from pallas_flash.choose.selfcheck.verdicts import Variant
from pallas_flash.jax_support import hardware, options
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.call import Call
from pallas_flash.problem.implementation import Implementation

COMMAND = [sys.executable, "-m", "pallas_flash"]  # runs a case after CASE
CASE = "--case"
READY = "ready"  # printed by a process that has compiled
LENGTH = 2048  # with so many queries and keys every kernel of a variant runs: hopper/tuning.py
SECONDS = 40  # estimated time of a process on a GPU, nearly all of it to compile
Sizes = list[tuple[int, int]]  # head sizes of queries and keys, and of values
# the last two fields of a Case: those that most calls need, and all
SHORT = [(True, None), (False, None), (None, "decoding")]
# not among EXTRAS, each of which is run alone; the last two are checked where a call has them
OTHERS = "decoding", "dropout", "values of keys", "the largest logits"
EXTRAS = [n for n, each in specs.FEATURES.items() if each.is_in and n not in OTHERS]
SCHEMES = [
    *SHORT,
    *itertools.product((True, False), ["dropout"]),
    *itertools.product((True, False), EXTRAS),
    (True, comparison.FORWARD_MODE.name),
]
_one_runs = threading.Lock()


class Case(NamedTuple):
    implementation: str
    head_size: int
    value_size: int
    dtype: str
    deterministic: bool | None
    extra: str | None  # one of specs.FEATURES, or forward mode

    def problem(self) -> Problem:
        """The problem that has the case's kernels. Raises NotImplementedError, which says why this
        machine cannot run it."""
        sizes = self.sizes() | dict(head_size=self.head_size, value_size=self.value_size)
        names = [self.extra] if self.extra in specs.FEATURES else []
        call, _ = specs.make_call(sizes, self.dtype, names)
        call |= dict(implementation=self.implementation, deterministic=self.deterministic)
        problem = checks.from_shapes(lambda call: arguments.normalise(call)[0], Call(**call))
        selection.first(problem, self.implementation)  # raises where it cannot run
        return problem

    def sizes(self, batch: int = 1, length: int = LENGTH, heads: int = 2) -> dict[str, int]:
        queries = 1 if self.extra == "decoding" else length
        lengths = dict(batch=batch, queries=queries, keys=length)
        return lengths | dict(heads=heads, kv_heads=heads, sinks=False)

    def on_trial(self) -> Implementation:
        return implementations.find(self.implementation)

    @property
    def entry(self) -> comparison.EntryPoint:
        """How the kernels of the case are checked."""
        is_forward_mode = self.extra == comparison.FORWARD_MODE.name
        return comparison.FORWARD_MODE if is_forward_mode else comparison.FLASH_ATTENTION

    def variant(self) -> Variant:
        """The variant of the case's kernels. Raises NotImplementedError, which says why this
        machine cannot run them."""
        problem, tried = self.problem(), self.on_trial()
        has_tangent = tried.has_tangent(tried.tiles(tried.converted(problem)))
        if self.entry is comparison.FORWARD_MODE and not has_tangent:
            raise NotImplementedError("blockwise is its forward mode")
        return verdicts.variant_of(tried, problem, self.entry)


class Finding(NamedTuple):
    verdict: Verdict
    compile: float | None = None  # seconds for forward and backward, or decoding's forward alone
    run: float | None = None  # seconds


def cases(
    names: Iterable[str], sizes: Sizes | None, dtypes: list[str], everything: bool
) -> tuple[dict[Variant, Case], dict[str, str]]:
    """A case for each variant that this machine can run; and for each implementation without one,
    why it has none."""
    chosen, refused, schemes = {}, {}, SCHEMES if everything else SHORT
    for name in names:
        # what this machine lacks even for the plainest problem
        if why_not := implementations.find(name).why_not(_plain()):
            refused[name] = why_not
            continue
        fields = itertools.product(sizes or default_sizes(name, everything), dtypes, schemes)
        for case in [Case(name, *size, dtype, *scheme) for size, dtype, scheme in fields]:
            try:
                chosen.setdefault(case.variant(), case)
            except NotImplementedError as error:
                refused.setdefault(name, str(error))
    able = {variant.implementation for variant in chosen}
    return chosen, {name: reason for name, reason in refused.items() if name not in able}


def _plain() -> Problem:
    return Case("reference", 64, 64, "bfloat16", *SHORT[0]).problem()


def default_names() -> list[str]:
    """The implementations with kernels that this machine runs by default once their self-check has
    passed; if there are none, all that it runs by default."""
    p = _plain()
    able = [
        b for b in implementations.IMPLEMENTATIONS if not (b.why_not(p) or b.why_not_by_default(p))
    ]
    return [b.name for b in able if b.own_kernels] or [b.name for b in able]


def default_sizes(name: str, everything: bool) -> Sizes:
    """All widths of kernels that this machine may run by default, or those that most calls have:
    the toy GPT's is 32."""
    if not (name in default_names() and implementations.find(name).own_kernels):
        return [(64, 64)]
    rare = [(192, 128), (256, 256), (512, 512)] if everything else []
    return [(32, 32), (64, 64), (128, 128), *rare]


def findings(cases: Iterable[Case], limit: float, jobs: int) -> Iterator[Finding]:
    """The findings of the cases, in their order, by so many processes at a time."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(lambda case: in_a_process(case, limit), cases)
    finally:
        pool.shutdown(cancel_futures=True)


def in_a_process(case: Case, limit: float) -> Finding:
    """Runs a case in a process. Several may compile at a time, and one runs; that it does not end
    within `limit` seconds then, or dies, is a finding too."""
    command = [*COMMAND, CASE, json.dumps(case)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        said = ""
        # a process that has nothing to run ends at once
        while (line := process.stdout.readline()) and line.strip() != READY:
            said += line
        with _one_runs:
            try:
                out, _ = process.communicate("\n", timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                return Finding(outcome.hangs(limit))
        if process.returncode:
            errors.seek(0)
            return Finding(_died(process.returncode, errors.read()))
    verdict, *times = json.loads((said + out).splitlines()[-1])
    return Finding(Verdict(*verdict), *times)


def _died(status: int, errors: str) -> Verdict:
    """The verdict on a process that exited with this status."""
    if status > 0:
        return outcome.failed((errors.strip().splitlines() or ["its process failed"])[-1])
    name = signal.Signals(-status).name
    died = f"its process died of {name}"
    if name in "SIGABRT SIGBUS SIGFPE SIGILL SIGSEGV SIGTRAP".split():  # by its own fault
        return Verdict({}, died)
    return Verdict({}, unknown=f"{died}, which others send: a system short of memory, say")


class Setting(NamedTuple):
    """The sizes of the small problems, and of the problem that is timed."""

    checked: list[dict[str, int]] | None  # None: those of the self-check
    timed: tuple[int, int, int]  # batch, queries and keys, heads
    rounds: int


ON_GPU = Setting(None, (4, 2048, 8), 20)
ON_CPU = Setting([comparison.SIZES], (1, 1024, 4), 5)
INTERPRETED = Setting(
    [comparison.SIZES | dict(batch=1, queries=37, keys=53, heads=2, kv_heads=1)], (1, 37, 2), 3
)


def setting(case: Case) -> Setting:
    if hardware.here().platform == "gpu":
        return ON_GPU
    return INTERPRETED if case.on_trial().own_kernels else ON_CPU


def run_case(case: Case, ready: Callable[[], None]) -> Finding:
    """The finding of this process, which calls `ready` when it has compiled, and then runs."""
    try:
        with options.defaults():
            return _measure(case, ready)
    except Exception as error:
        return Finding(outcome.fails(error))


def _measure(case: Case, ready: Callable[[], None]) -> Finding:
    size, problem, implementation = setting(case), case.problem(), case.on_trial()
    sizes = size.checked or comparison.all_sizes(problem, **case.entry.sizes)
    check = comparison.check(implementation, problem, sizes, case.entry)
    timed = comparison.make(problem, case.sizes(*size.timed))
    is_decoding = case.extra == "decoding"
    results = comparison.forward_results if is_decoding else case.entry.results
    start = time.perf_counter()
    program = comparison.program(implementation, implementation.tiles(problem), results, *timed)
    compile_ = time.perf_counter() - start
    ready()
    verdict = check()
    jax.block_until_ready(program())
    return Finding(verdict, compile_, _median_seconds(program, size.rounds))


def _median_seconds(program: Callable, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(program())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def record_verdict(variant: Variant, verdict: Verdict) -> str:
    """Records a verdict where a call looks for it, and returns it in words."""
    if machine := records.machine():
        verdicts.record(variant, machine, verdict)
    if verdict.unknown:
        return f"NOT CHECKED: {verdict.unknown}"
    return f"WRONG: {verdict.wrong}" if verdict.wrong else "right"
