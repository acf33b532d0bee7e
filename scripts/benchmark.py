"""python scripts/benchmark.py [--quick] [--implementations NAME ...] [--lengths T ...]

Times implementations of attention side by side, in one process: forward, and forward with backward, and the temporary memory
of the compiled programs. Every result is checked before it is timed. Prints tables; writes benchmark.json, with every single
time, and benchmark.png.

`--help` lists the rest. A further peer is a row of PEERS.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure

import pallas_flash
from pallas_flash import explain, flash_attention

PASSES = ("forward", "forward+backward")
CHECK_LENGTH = 8192  # a longer case is checked on its first tokens: the dense scores of more fit into few machines
CHECK_BLOCK = 64  # rows that are compared as one vector: a single row of a gradient may be zero but for rounding
TOLERANCE = dict(float32=1e-5, bfloat16=1e-2, float16=2e-3)
GPU_SAMPLE = 0.05  # seconds of calls behind each other that make one time on a GPU, or dispatch is what is timed
DEFAULTS = dict(
    cpu=dict(
        implementations=["blockwise", "jax.nn/xla"],
        lengths=[512, 1024, 2048, 4096],
        heads=4,
        head_size=64,
        tokens=1,
        dtype="float32",
    ),
    gpu=dict(
        implementations=["portable", "blockwise", "jax.nn/cudnn", "jax.nn/xla"],
        lengths=[1024, 2048, 4096, 8192, 16384],
        heads=16,
        head_size=128,
        tokens=16384,
        dtype="bfloat16",
    ),
)
QUICK = dict(lengths=[256, 1024], memory_lengths=[4096, 8192, 65536], repeats=3)


class Case(NamedTuple):
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    causal: bool

    def __str__(self):
        mask = "causal" if self.causal else "full"
        return f"B{self.B} T{self.T} S{self.S} N{self.N} K{self.K} H{self.H} {self.dtype} {mask}"

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of query, key, value, and the output's gradient."""
        q, k = ((self.B, self.T, self.N, self.H), (self.B, self.S, self.K, self.H))
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in (q, k, k, q)]

    def flops(self, passes: str) -> float:
        forward = 4 * self.B * self.N * self.T * self.S * self.H * (0.5 if self.causal else 1)
        return forward * (1 if passes == "forward" else 3.5)


class Contender(NamedTuple):
    name: str
    attend: Callable  # (query, key, value, causal) -> output
    why_not: Callable[[Case], str | None] = lambda case: None  # None: it can be asked for this case; else the reason


def jax_nn(implementation: str) -> Callable:
    return lambda q, k, v, causal: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


def cudnn_why_not(case: Case) -> str | None:
    if jax.default_backend() != "gpu":
        return "it needs an NVIDIA GPU"
    return "it takes bfloat16 and float16 only" if case.dtype == "float32" else None


PEERS = [Contender("jax.nn/xla", jax_nn("xla")), Contender("jax.nn/cudnn", jax_nn("cudnn"), cudnn_why_not)]


def contender(name: str) -> Contender:
    """A peer, or pallas_flash's implementation of that name."""
    for peer in PEERS:
        if peer.name == name:
            return peer

    def why_not(case):
        try:
            explain(*case.shapes()[:3], is_causal=case.causal, implementation=name)
        except NotImplementedError as error:
            return str(error)

    attend = lambda q, k, v, causal: flash_attention(q, k, v, is_causal=causal, implementation=name)
    return Contender(name, attend, why_not)


@dataclasses.dataclass
class Row:
    """What is known of one contender in one case."""

    case: Case
    passes: str
    name: str
    status: str = "ok"  # or "wrong", "failed", "not run"; the reason says why
    reason: str = ""
    error: float | None = None  # the largest of the output's and the gradients'
    temporary_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)  # of one call, round after round

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def main(argv=None) -> int:
    args = parse(argv)
    facts = print_header(args)
    contenders = [contender(name) for name in args.implementations]
    shape = dict(N=args.heads, K=args.kv_heads, H=args.head_size, dtype=args.dtype, causal=args.causal)
    timed, compiled_only = [], []
    for T in args.lengths:
        case = Case(B=args.batch or max(1, args.tokens // T), T=T, S=T, **shape)
        for passes in PASSES:
            print(f"measuring  {passes}, {case}", file=sys.stderr)
            timed += measure(contenders, case, passes, args.repeats)
    print_times(timed)
    for T in args.memory_lengths:
        case = Case(B=1, T=T, S=T, **shape | dict(N=1, K=1))
        compiled_only += [memory(contender, case) for contender in contenders]
    print_memory(compiled_only, args.implementations)
    rows = timed + compiled_only
    print_reasons(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "benchmark.json", facts, timed, compiled_only)
    write_png(args.out / "benchmark.png", facts, timed, compiled_only, args)
    print(f"\nwritten    {args.out}: benchmark.json, benchmark.png")
    return int(any(row.status in ("wrong", "failed") for row in rows))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return action.help if action.default in (None, True, False) else super()._get_help_string(action)


def parse(argv) -> argparse.Namespace:
    default = DEFAULTS["gpu" if jax.default_backend() == "gpu" else "cpu"]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog="The defaults are for this machine; a GPU has larger ones. Exit status 1: something was wrong or failed.",
        formatter_class=_Help,
    )
    add = parser.add_argument
    peers = ", ".join(peer.name for peer in PEERS)
    names = f"implementations of flash_attention, or {peers}; the others are compared with the first"
    add("--implementations", nargs="+", metavar="NAME", help=names)
    add("--lengths", nargs="+", type=positive, metavar="T", help="T = S of the cases that are timed")
    add("--batch", type=positive, metavar="B", help="sequences (default: %s)" % ("16384 // T" if default["tokens"] > 1 else 1))
    add("--heads", type=positive, metavar="N", help="query heads")
    add("--kv-heads", type=positive, metavar="K", help="key/value heads (default: as many as query heads)")
    add("--head-size", type=positive, metavar="H")
    add("--dtype", choices=list(TOLERANCE), help="of the inputs")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="a query sees the keys up to its own; the default")
    mask.add_argument("--full", action="store_false", dest="causal", help="a query sees every key")
    add("--repeats", type=positive, metavar="R", default=9, help="rounds, each of which times each contender once")
    lengths = [4096, 8192, 16384, 32768, 65536]
    memory = "T of the cases, B1 N1, that are compiled for their memory and not run; none: leave them out"
    add("--memory-lengths", nargs="*", type=positive, metavar="T", default=lengths, help=memory)
    add("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("runs/benchmark"), help="folder of the results")
    quick = ", ".join(f"--{name.replace('_', '-')} {' '.join(map(str, np.atleast_1d(value)))}" for name, value in QUICK.items())
    add("--quick", action="store_true", help=f"changes defaults: {quick}")
    parser.set_defaults(**default)
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads; got {args.heads} and {args.kv_heads}.")
    for name in args.implementations:
        try:
            contender(name).why_not(Case(1, 1, 1, 1, 1, 8, args.dtype, args.causal))
        except ValueError as error:  # no such name
            parser.error(f"{error} Or one of {peers}.")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


# ---- measuring ----


def measure(contenders, case: Case, passes: str, repeats: int) -> list[Row]:
    """Checks every contender, then times together those that passed."""
    rows, calls = [], {}
    for one in contenders:
        row = Row(case, passes, one.name)
        rows.append(row)
        try:
            if call := prepare(row, one):
                calls[one.name] = call
        except Exception as error:  # whatever a contender raises belongs in the report
            row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
    times = interleave(calls, repeats)
    for row in rows:
        row.seconds = times.get(row.name, [])
    return rows


def prepare(row: Row, contender: Contender) -> Callable | None:
    """Fills in the row's verdict and memory; returns the call to time, or None where the verdict is against it."""
    if reason := contender.why_not(row.case):
        row.status, row.reason = "not run", reason
        return None
    program = compiled(contender, row.case, row.passes)
    sizes = program.memory_analysis()
    row.temporary_bytes = sizes.temp_size_in_bytes
    needed = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    if needed > memory_limit():
        row.status, row.reason = "not run", f"it needs {needed / 1e9:.1f} GB, over the limit of {memory_limit() / 1e9:.1f} GB"
        return None
    row.error, row.reason = check(contender, row.case, row.passes)
    if row.reason:
        row.status = "wrong"
        return None
    call = functools.partial(program, *inputs(row.case))
    jax.block_until_ready(call())  # warm, and what fails, fails here
    return call


@functools.cache
def compiled(contender: Contender, case: Case, passes: str):
    """(q, k, v, do) -> (o,) or (o, dq, dk, dv), compiled."""
    attend = lambda q, k, v: contender.attend(q, k, v, case.causal)

    def program(q, k, v, do):
        if passes == "forward":
            return (attend(q, k, v),)
        o, vjp = jax.vjp(attend, q, k, v)
        return o, *vjp(do)

    return jax.jit(program).lower(*case.shapes()).compile()


@functools.lru_cache(maxsize=2)  # a case, and its first tokens
def inputs(case: Case):
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, case.shapes(), strict=True))


@functools.lru_cache(maxsize=1)
def expected(case: Case) -> list[np.ndarray]:
    """o, dq, dk, dv by dense attention in float32."""
    with jax.default_matmul_precision("highest"):
        program = compiled(Contender("dense", head_by_head), case._replace(dtype="float32"), PASSES[1])
    return [np.asarray(x) for x in program(*(x.astype(jnp.float32) for x in inputs(case)))]


def head_by_head(q, k, v, causal):
    """jax.nn's attention of one head after the other, lest the scores of all take the memory."""
    B, T, N, H = q.shape
    k, v = (jnp.repeat(x, N // k.shape[2], axis=2) for x in (k, v))
    heads = [jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], 1, H) for x in (q, k, v)]
    o = lax.map(jax.checkpoint(lambda x: jax_nn("xla")(*x, causal)), heads)
    return jnp.moveaxis(o.reshape(B, N, T, H), 1, 2)


def check(contender: Contender, case: Case, passes: str) -> tuple[float, str]:
    """The largest error, and what is wrong, if anything."""
    case = case._replace(T=min(case.T, CHECK_LENGTH), S=min(case.S, CHECK_LENGTH))
    results = compiled(contender, case, passes)(*inputs(case))
    errors = {name: error(x, want) for name, x, want in zip(("o", "dq", "dk", "dv"), results, expected(case), strict=False)}
    tolerance = TOLERANCE[case.dtype]
    wrong = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= tolerance]  # nan is not
    return float(np.max([*errors.values()])), ", ".join(wrong) and f"{', '.join(wrong)}; the tolerance is {tolerance:g}"


def error(x, want) -> float:
    """The largest relative error of a block of neighbouring rows of one head."""
    x = np.asarray(x.astype(jnp.float32))
    if x.shape != want.shape:
        raise ValueError(f"the shape must be {want.shape}; got {x.shape}.")
    starts = np.arange(0, want.shape[1], CHECK_BLOCK)
    size = lambda x: np.sqrt(np.add.reduceat(np.square(x).sum(-1), starts, axis=1))  # [B, blocks, heads]
    return float(np.max(size(x - want) / np.maximum(size(want), 1e-3)))


def interleave(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """The seconds of a call. A round has a turn of each, in an order that rotates, so that a slow minute slows all alike."""
    names = list(calls)
    number = dict.fromkeys(names, 1)
    if jax.default_backend() == "gpu":
        number = {name: min(200, math.ceil(GPU_SAMPLE / seconds(call, 1))) for name, call in calls.items()}
    times = {name: [] for name in names}
    for r in range(repeats):
        first = r % max(1, len(names))
        for name in names[first:] + names[:first]:
            times[name].append(seconds(calls[name], number[name]))
    return times


def seconds(call: Callable, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / number


def memory(contender: Contender, case: Case) -> Row:
    """Compiles forward+backward and runs nothing."""
    row = Row(case, PASSES[1], contender.name)
    try:
        if reason := contender.why_not(case):
            row.status, row.reason = "not run", reason
        else:
            row.temporary_bytes = compiled(contender, case, row.passes).memory_analysis().temp_size_in_bytes
    except Exception as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
    return row


def memory_limit() -> int:
    """Bytes that a program may take: all that JAX has of a GPU, or half the machine's."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# ---- reporting ----


def print_header(args) -> dict[str, str]:
    first, mask = args.implementations[0], "causal" if args.causal else "full"
    batch = f"B{args.batch}" if args.batch else f"B*T {args.tokens}" if args.tokens > 1 else "B1"
    facts = dict(
        device=device(),
        versions=f"jax {jax.__version__}, Python {platform.python_version()}, pallas_flash {pallas_flash.__version__}",
        commit=commit(),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        inputs=f"random normal, {args.dtype}, {mask}, {batch} N{args.heads} K{args.kv_heads} H{args.head_size}, S = T",
        times=f"median of {args.repeats} rounds, interleaved: each contender once a round, in rotating order",
        ratio=f"its time / time of {first}: above 1, {first} is faster",
        flops="forward 4 B N T S H, half of it if causal; backward 2.5 times the forward",
        memory="temporaries of the compiled program, as XLA counts them: without inputs and outputs",
        error=f"of output and gradients against dense float32, relative, the worst {CHECK_BLOCK} rows of the first"
        f" {CHECK_LENGTH}; up to {TOLERANCE[args.dtype]:g} is right",
    )
    for name, text in facts.items():
        print(f"{name:<11}{text}", flush=True)
    return facts


def device() -> str:
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """With "-dirty" where files were changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def first_of(rows: list[Row], row: Row) -> Row:
    """The row that this one is compared with: of the first contender, in the same case."""
    return next(other for other in rows if (other.case, other.passes) == (row.case, row.passes))


def print_times(rows: list[Row]):
    header = ("T", "pass", "implementation", "ms", "fastest to slowest", "ratio", "TFLOP/s", "temporaries, MB", "error")
    table = []
    for row in rows:
        megabytes = "" if row.temporary_bytes is None else f"{row.temporary_bytes / 1e6:,.1f}"
        off = "" if row.error is None else f"{row.error:.0e}" if row.error else "0"
        times = (row.status, "", "", "")
        if row.median:
            base = first_of(rows, row).median
            spread = f"{milliseconds(min(row.seconds))} to {milliseconds(max(row.seconds))}"
            rate = row.case.flops(row.passes) / row.median / 1e12
            times = (milliseconds(row.median), spread, f"{row.median / base:.2f}" if base else "", f"{rate:.3g}")
        table.append((row.case.T, row.passes, row.name, *times, megabytes, off))
    print_table(header, table)


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def print_memory(rows: list[Row], names: list[str]):
    if not rows:
        return
    print("\nTemporaries of forward+backward at B1 N1, compiled and not run, MB")
    table = {}
    for row in rows:
        cell = row.status if row.temporary_bytes is None else f"{row.temporary_bytes / 1e6:,.1f}"
        table.setdefault(row.case.T, [row.case.T]).append(cell)
    print_table(("T", *names), table.values())


def print_table(header, rows):
    """In Markdown."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    print()
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def print_reasons(rows: list[Row]):
    reasons = [row for row in rows if row.reason]
    if reasons:
        print()
    for row in reasons:
        print(f"{row.status:<11}{row.name}, {row.passes}, {row.case}: {row.reason}")


def write_json(path: pathlib.Path, facts, timed: list[Row], compiled_only: list[Row]):
    entry = lambda row: dataclasses.asdict(row) | dict(case=row.case._asdict(), median=row.median)
    results = facts | dict(timed=[*map(entry, timed)], compiled=[*map(entry, compiled_only)])
    path.write_text(json.dumps(results, indent=1) + "\n")


def write_png(path: pathlib.Path, facts, timed: list[Row], compiled_only: list[Row], args):
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(args.implementations):
        look = dict(color=f"C{number}", marker="o", markersize=4)
        for passes, line in zip(PASSES, ("--", "-"), strict=True):
            rows = [row for row in timed if (row.name, row.passes) == (name, passes) and row.median]
            label = f"{name}, {passes}"
            left.plot([row.case.T for row in rows], [row.median * 1e3 for row in rows], line, label=label, **look)
        rows = [row for row in compiled_only if row.name == name and row.temporary_bytes]
        right.plot([row.case.T for row in rows], [row.temporary_bytes / 1e6 for row in rows], label=name, **look)
        if rows:
            last = rows[-1]
            at = dict(xytext=(-6, 5), textcoords="offset points", ha="right", color=f"C{number}")
            at |= dict(bbox=dict(color="white", pad=0.5))  # over the grid
            right.annotate(f"{last.temporary_bytes / 1e6:,.0f}", (last.case.T, last.temporary_bytes / 1e6), **at)
    left.set_title(facts["inputs"], fontsize=10)
    right.set_title(f"forward+backward, {args.dtype}, B1 N1 H{args.head_size}, compiled only", fontsize=10)
    left.set_ylabel("time of a call, ms")
    right.set_ylabel("temporary memory, MB")
    for axes, lengths in ((left, args.lengths), (right, args.memory_lengths)):
        if any(len(line.get_xdata()) for line in axes.lines):  # nothing has no logarithm
            axes.set(xlabel="length T", xscale="log", yscale="log")
            axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
            axes.xaxis.minorticks_off()
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("")  # or a short axis mixes 10 with 6 x 10^1
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{facts['device']}; {facts['versions']}; {facts['commit']}; {facts['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
