"""An implementation on trial, in a process of its own: compared with the reference, then timed beside jax.nn."""

import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from pallas_flash import backends
from pallas_flash.arguments import Problem
from pallas_flash.attention import flash_attention
from pallas_flash.backends import Backend
from pallas_flash.explanation import explain
from pallas_flash.kernels import device
from pallas_flash.machine import records, selfcheck
from pallas_flash.machine.selfcheck import Variant, Verdict

COMMAND = [sys.executable, "-m", "pallas_flash"]  # that does what CASE tells it
CASE = "--case"
Sizes = list[tuple[int, int]]  # of heads: of queries and keys, and of values
SCHEMES = [(*scheme, None) for scheme in itertools.product((True, False), (0.0, 0.25))]  # the last three of a Case
SCHEMES += [(deterministic, 0.0, more) for more in selfcheck.MORE for deterministic in (True, False)]


class Case(NamedTuple):
    implementation: str
    head_size: int
    value_size: int
    dtype: str
    deterministic: bool
    dropout_rate: float
    more: str | None  # of selfcheck.MORE

    def call(self) -> dict:
        call = dict(implementation=self.implementation, deterministic=self.deterministic, is_causal=True)
        call |= {"a rule": dict(mask=selfcheck.RULE), "a score_mod": dict(score_mod=selfcheck.far_is_less)}.get(self.more, {})
        return call | (dict(dropout_rate=self.dropout_rate, dropout_rng=jax.random.key(0)) if self.dropout_rate else {})

    def shapes(self, B: int, T: int, N: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Of query, key and value, and of a mask or a bias."""
        sizes = dict(query=self.head_size, key=self.head_size, value=self.value_size)
        shapes = {name: jax.ShapeDtypeStruct((B, T, N, size), self.dtype) for name, size in sizes.items()}
        dense = dict(mask=((1, 1, T, T), bool), bias=((1, N, T, T), self.dtype))
        return shapes | {name: jax.ShapeDtypeStruct(*x) for name, x in dense.items() if self.more == f"a {name}"}

    def problem(self) -> Problem:
        """NotImplementedError says why this machine cannot run it."""
        return explain(**self.shapes(1, 8, 2), **self.call()).problem

    def backend(self) -> Backend:
        return next(backend for backend in backends.BACKENDS if backend.name == self.implementation)


class Finding(NamedTuple):
    verdict: Verdict
    compile: float | None = None  # seconds, of forward and backward
    run: float | None = None
    jax_nn: float | None = None  # seconds of its run
    lasting: bool = True  # so that it is worth a record


def cases(names: Iterable[str], sizes: Sizes | None, dtypes: list[str]) -> tuple[dict[Variant, Case], dict[str, str]]:
    """A case for each variant that this machine can run; and for each implementation that has none, why."""
    found, refused = {}, {}
    of = lambda name: [(*size, dtype, *scheme) for size in sizes or default_sizes(name) for dtype in dtypes for scheme in SCHEMES]
    for case in [Case(name, *variant) for name in names for variant in of(name)]:
        try:
            found.setdefault(selfcheck.variant_of(case.backend(), case.problem()), case)
        except NotImplementedError as error:
            refused[case.implementation] = str(error)
    able = {variant.implementation for variant in found}
    return found, {name: reason for name, reason in refused.items() if name not in able}


def default_sizes(name: str) -> Sizes:
    """All widths of kernels that this machine may take unasked."""
    case = Case(name, 64, 64, "bfloat16", *SCHEMES[0])
    some = explain(**case.shapes(1, 8, 2)).problem
    unasked = case.backend().own_kernels and case.backend().why_not_by_default(some) is None
    return [(64, 64), (128, 128), (192, 128), (256, 256)] if unasked else [(64, 64)]


def in_a_process(case: Case, limit: float) -> Finding:
    """What a process finds of a case; that it does not end within `limit` seconds, or dies, is a finding too."""
    try:
        done = subprocess.run([*COMMAND, CASE, json.dumps(case)], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return Finding(selfcheck.hangs(limit))
    if done.returncode < 0:
        return Finding(Verdict({}, f"its process died of {signal.Signals(-done.returncode).name}"))
    if done.returncode > 0:
        return Finding(Verdict({}, (done.stderr.strip().splitlines() or ["its process failed"])[-1]), lasting=False)
    verdict, *times = json.loads(done.stdout.splitlines()[-1])
    return Finding(Verdict(*verdict), *times)


class Setting(NamedTuple):
    """How large the problems are."""

    checked: list[dict[str, int]] | None  # None: as the self-check has them
    timed: dict[str, int]
    rounds: int


ON_GPU = Setting(None, dict(B=4, T=2048, N=8), 20)
ON_CPU = Setting([selfcheck.SIZES], dict(B=1, T=1024, N=4), 5)
INTERPRETED = Setting([dict(batch=1, queries=37, keys=53, heads=2, kv_heads=1)], dict(B=1, T=37, N=2), 3)


def setting(case: Case) -> Setting:
    if device.here().platform == "gpu":
        return ON_GPU
    return INTERPRETED if case.backend().own_kernels else ON_CPU


def tried(case: Case) -> Finding:
    """What this process finds."""
    try:
        return measured(case)
    except Exception as error:  # of the compiler or the memory: another day may be better
        return Finding(selfcheck.fails(error), lasting=False)


def measured(case: Case) -> Finding:
    size = setting(case)
    problem = case.problem()
    verdict = selfcheck.check(case.backend(), problem, size.checked or selfcheck.trials(problem))
    arrays = {name: _random(number, x) for number, (name, x) in enumerate(case.shapes(**size.timed).items())}
    start = time.perf_counter()
    ours = _compiled(lambda **x: flash_attention(**x, **case.call()), arrays)
    compile_ = time.perf_counter() - start
    # jax.nn has one head size, no dropout, no rules and no score_mods
    more = case.more in ("a rule", "a score_mod")
    if size is INTERPRETED or case.head_size != case.value_size or case.dropout_rate or more:
        return Finding(verdict, compile_, *_times([ours], arrays, size.rounds))
    theirs = _compiled(lambda **x: jax.nn.dot_product_attention(**x, is_causal=True), arrays)
    return Finding(verdict, compile_, *_times([ours, theirs], arrays, size.rounds))


def _random(number: int, x: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(number)
    return jax.random.bernoulli(key, 0.7, x.shape) if x.dtype == bool else jax.random.normal(key, x.shape, x.dtype)


def _compiled(attend: Callable, arrays: dict[str, jax.Array]) -> Callable:
    """Forward and backward, run once."""

    def both(arrays):
        floats, others = ({n: x for n, x in arrays.items() if (x.dtype == bool) == dense} for dense in (False, True))
        o, vjp = jax.vjp(lambda floats: attend(**floats, **others), floats)
        return o, vjp(o)

    program = jax.jit(both).lower(arrays).compile()
    jax.block_until_ready(program(arrays))
    return program


def _times(programs: list[Callable], arrays: dict[str, jax.Array], rounds: int) -> list[float]:
    """Medians of seconds, the programs in turns."""
    times = [[] for _ in programs]
    for _ in range(rounds):
        for program, seconds in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(arrays))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def judged(variant: Variant, finding: Finding) -> str:
    """Records a finding where a call would ask for it, and says it in a word."""
    machine = records.machine()
    if machine and finding.lasting:
        selfcheck.record(variant, machine, finding.verdict)
    return "right" if finding.verdict.wrong is None else f"WRONG: {finding.verdict.wrong}"
