"""An implementation on trial, in a process of its own: compared with the reference, then timed."""

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
import jax.numpy as jnp

from pallas_flash import backends, decode
from pallas_flash.arguments import Problem
from pallas_flash.attention import flash_attention
from pallas_flash.backends import Backend
from pallas_flash.explanation import explain
from pallas_flash.kernels import device
from pallas_flash.selfcheck import comparison, records, verdicts
from pallas_flash.selfcheck.comparison import Verdict
from pallas_flash.selfcheck.verdicts import Variant

COMMAND = [sys.executable, "-m", "pallas_flash"]  # that does what CASE tells it
CASE = "--case"
READY = "ready"  # says a process that has compiled
SECONDS = 40  # that a process takes on a GPU, nearly all of it to compile: an estimate
Sizes = list[tuple[int, int]]  # of heads: of queries and keys, and of values
# The last three of a Case: those that most calls need, and all.
SHORT = [(True, 0.0, None), (False, 0.0, None), (True, 0.0, "decoding")]
SCHEMES = [
    *SHORT,
    (True, 0.25, None),
    (False, 0.25, None),
    *itertools.product((True, False), (0.0,), comparison.MORE),
    (True, 0.0, comparison.FORWARD_MODE.name),
]
_one_runs = threading.Lock()


class Case(NamedTuple):
    implementation: str
    head_size: int
    value_size: int
    dtype: str
    deterministic: bool
    dropout_rate: float
    more: str | None  # of comparison.MORE, or decoding, or forward mode

    def call(self) -> dict:
        call = dict(
            implementation=self.implementation,
            deterministic=self.deterministic,
            is_causal=self.more != "decoding",
        )
        more = {
            "a rule": dict(mask=comparison.RULE),
            "a score_mod": dict(score_mod=comparison.far_is_less),
            "arrays of a score_mod": dict(score_mod=comparison.reads_arrays()),
        }
        more["a soft cap"] = dict(logits_soft_cap=comparison.SOFT_CAP)
        dropout = (
            dict(dropout_rate=self.dropout_rate, dropout_rng=jax.random.key(0))
            if self.dropout_rate
            else {}
        )
        return call | more.get(self.more, {}) | dropout

    def shapes(self, B: int, T: int, N: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Of query, key and value, and of a mask, a bias or segment ids."""
        sizes = dict(query=self.head_size, key=self.head_size, value=self.value_size)
        rows = lambda name: 1 if name == "query" and self.more == "decoding" else T
        shapes = {
            name: jax.ShapeDtypeStruct((B, rows(name), N, size), self.dtype)
            for name, size in sizes.items()
        }
        more = {
            "a mask": ("mask", (1, 1, T, T), bool),
            "a bias": ("bias", (1, N, T, T), self.dtype),
        }
        more["segment ids"] = ("query_segment_ids", (B, T), "int32")
        name, *shape = more.get(self.more, (None,))
        return shapes | ({name: jax.ShapeDtypeStruct(*shape)} if name else {})

    def problem(self) -> Problem:
        """NotImplementedError says why this machine cannot run it."""
        return explain(**self.shapes(1, decode.KEYS, 2), **self.call()).problem

    def backend(self) -> Backend:
        return backends.find(self.implementation)

    @property
    def way(self) -> comparison.Way:
        """How its kernels are checked."""
        ways = comparison.FORWARD_MODE, comparison.FLASH_ATTENTION
        return next(way for way in ways if way.name in (self.more, ""))

    def variant(self) -> Variant:
        """NotImplementedError says why this machine cannot run it."""
        if self.way is comparison.FORWARD_MODE and self.backend().tangent is None:
            raise NotImplementedError("blockwise is its forward mode")
        return verdicts.variant_of(self.backend(), self.problem(), self.way)


class Finding(NamedTuple):
    verdict: Verdict
    compile: float | None = None  # seconds, of forward and backward; of decoding the forward alone
    run: float | None = None


def cases(
    names: Iterable[str], sizes: Sizes | None, dtypes: list[str], everything: bool
) -> tuple[dict[Variant, Case], dict[str, str]]:
    """A case for each variant that this machine can run; and for each implementation that has none,
    why."""
    found, refused, schemes = {}, {}, SCHEMES if everything else SHORT
    for name in names:
        # of the plainest problem: what this machine lacks
        if why_not := backends.find(name).why_not(_plain()):
            refused[name] = why_not
            continue
        of_sizes = itertools.product(sizes or default_sizes(name, everything), dtypes, schemes)
        for case in [Case(name, *size, dtype, *scheme) for size, dtype, scheme in of_sizes]:
            try:
                found.setdefault(case.variant(), case)
            except NotImplementedError as error:
                refused.setdefault(name, str(error))
    able = {variant.implementation for variant in found}
    return found, {name: reason for name, reason in refused.items() if name not in able}


def _plain() -> Problem:
    return Case("reference", 64, 64, "bfloat16", *SHORT[0]).problem()


def default_names() -> list[str]:
    """The implementations with kernels that this machine runs by default once their self-check has
    passed; where there are none, all that it runs by default."""
    names = [
        backend.name
        for backend in backends.BACKENDS
        if backend.why_not_by_default(_plain()) is None
    ]
    return [name for name in names if backends.find(name).own_kernels] or names


def default_sizes(name: str, everything: bool) -> Sizes:
    """All widths of kernels that this machine may run by default, or those that most calls have:
    the toy GPT's is 32."""
    if not (name in default_names() and backends.find(name).own_kernels):
        return [(64, 64)]
    return [(32, 32), (64, 64), (128, 128), *([(192, 128), (256, 256)] if everything else [])]


def findings(cases: Iterable[Case], limit: float, jobs: int) -> Iterator[Finding]:
    """Of so many processes at a time, in the order of the cases."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(lambda case: in_a_process(case, limit), cases)
    finally:
        pool.shutdown(cancel_futures=True)


def in_a_process(case: Case, limit: float) -> Finding:
    """What a process finds of a case. Several may compile at a time, and one runs; that it does not
    end within `limit` seconds then, or dies, is a finding too."""
    command = [*COMMAND, CASE, json.dumps(case)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        said = ""
        # it ends where there is nothing to run
        while (line := process.stdout.readline()) and line.strip() != READY:
            said += line
        with _one_runs:
            try:
                out, _ = process.communicate("\n", timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                return Finding(comparison.hangs(limit))
        if process.returncode:
            errors.seek(0)
            return Finding(_died(process.returncode, errors.read()))
    verdict, *times = json.loads((said + out).splitlines()[-1])
    return Finding(Verdict(*verdict), *times)


def _died(status: int, errors: str) -> Verdict:
    """Of a process that ended by itself or by a signal."""
    if status > 0:
        return Verdict({}, unknown=(errors.strip().splitlines() or ["its process failed"])[-1])
    died = f"its process died of {signal.Signals(-status).name}"
    of_itself = -status in (
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGTRAP,
    )
    return (
        Verdict({}, died)
        if of_itself
        else Verdict({}, unknown=f"{died}, which others send: a system short of memory, say")
    )


class Setting(NamedTuple):
    """How large the problems are."""

    checked: list[dict[str, int]] | None  # None: as the self-check has them
    timed: dict[str, int]
    rounds: int


ON_GPU = Setting(None, dict(B=4, T=2048, N=8), 20)
ON_CPU = Setting([comparison.SIZES], dict(B=1, T=1024, N=4), 5)
INTERPRETED = Setting(
    [comparison.SIZES | dict(batch=1, queries=37, keys=53, heads=2, kv_heads=1)],
    dict(B=1, T=37, N=2),
    3,
)


def setting(case: Case) -> Setting:
    if device.here().platform == "gpu":
        return ON_GPU
    return INTERPRETED if case.backend().own_kernels else ON_CPU


def tried(case: Case, ready: Callable[[], None]) -> Finding:
    """What this process finds; it calls `ready` when it has compiled, and then runs."""
    try:
        return measured(case, ready)
    except Exception as error:
        return Finding(comparison.fails(error))


def measured(case: Case, ready: Callable[[], None]) -> Finding:
    size = setting(case)
    problem = case.problem()
    sizes = size.checked or comparison.trials(problem)
    check = comparison.check(case.backend(), problem, sizes, case.way)
    timed = {"decoding": _forward, comparison.FORWARD_MODE.name: _along}.get(case.more, _both)
    shapes = case.shapes(**size.timed)
    start = time.perf_counter()
    program = comparison.compiled(timed(lambda **x: flash_attention(**x, **case.call())), shapes)
    compile_ = time.perf_counter() - start
    ready()
    verdict, arrays = (
        check(),
        {name: _random(number, x) for number, (name, x) in enumerate(shapes.items())},
    )
    jax.block_until_ready(program(arrays))
    return Finding(verdict, compile_, _time(program, arrays, size.rounds))


def _random(number: int, x: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(number)
    if x.dtype == jnp.int32:  # of documents
        return jnp.broadcast_to(
            jnp.arange(x.shape[-1], dtype=x.dtype) // -(-x.shape[-1] // 4), x.shape
        )
    return (
        jax.random.bernoulli(key, 0.7, x.shape)
        if x.dtype == bool
        else jax.random.normal(key, x.shape, x.dtype)
    )


def _forward(attend: Callable) -> Callable:
    return lambda arrays: attend(**arrays)


def _along(attend: Callable) -> Callable:
    """Forward mode, along the arrays themselves."""
    return lambda arrays: jax.jvp(lambda x: attend(**x), (arrays,), (arrays,))


def _both(attend: Callable) -> Callable:
    """Forward and backward."""

    def both(arrays):
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        floats, others = (
            {n: x for n, x in arrays.items() if is_float(x) == wanted} for wanted in (True, False)
        )
        o, vjp = jax.vjp(lambda floats: attend(**floats, **others), floats)
        return o, vjp(o)

    return both


def _time(program: Callable, arrays: dict[str, jax.Array], rounds: int) -> float:
    """The median of seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(program(arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def judged(variant: Variant, verdict: Verdict) -> str:
    """Records a verdict where a call would ask for it, and says it in a word."""
    if machine := records.machine():
        verdicts.record(variant, machine, verdict)
    if verdict.unknown:
        return f"NOT CHECKED: {verdict.unknown}"
    return f"WRONG: {verdict.wrong}" if verdict.wrong else "right"
