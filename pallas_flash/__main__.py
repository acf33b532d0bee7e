"""python -m pallas_flash: which implementations flash_attention takes on this machine and why, and
whether each is right here."""

import argparse
import collections
import importlib.metadata
import json
import math
import os
import platform
import sys

import jax
import jaxlib

import pallas_flash
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import comparison, records, trial, verdicts
from pallas_flash.explanation import explain
from pallas_flash.jax_support import hardware, options

DESCRIPTION = """
Prints which implementation flash_attention takes on this machine for typical calls, and why. Then
runs variants of the kernels, forward and backward: those that most calls need, which takes up to
three minutes on a GPU with four CPU cores or more, or with --all every one that can run here. Each
variant has a process of its own; on a GPU several compile at a time, and one runs. It is compared
with the reference on small ragged problems, and timed on a larger one. On a GPU the verdicts are
recorded, so that later calls need no check of these variants: kernels that are right are taken, and
kernels that are wrong, hang, crash or are refused by the compiler are not. What could not be
checked, for lack of memory say, is checked when a call needs it, and so are kernels that read
pages."""
EPILOG = f"""
environment:
  PALLAS_FLASH_IMPLEMENTATION=NAME  runs the calls that name no implementation:
                                    {", ".join(implementations.names())}
  PALLAS_FLASH_SELF_CHECK=0         kernels are taken unchecked
  XLA_FLAGS=--xla_gpu_deterministic_ops
                                    makes gradients bitwise deterministic, and so does
                                    --xla_gpu_exclude_nondeterministic_ops
  XDG_CACHE_HOME                    verdicts are recorded in pallas_flash under this folder
                                    (default: ~/.cache)
Exit status 1: something is wrong, hangs, crashes, fails or could not be checked, or nothing could
be run."""


def main(argv=None) -> int:
    # this process and those that it starts share a GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse(argv)
    if args.case:
        print(json.dumps(trial.run_case(trial.Case(*json.loads(args.case)), wait_for_turn)))
        return 0
    try:
        print_machine()
        print_choices()
        return int(not check_all(args))
    except KeyboardInterrupt:
        return 130


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_flash",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    help = (
        "every implementation, head size, dtype and option, as far as nothing below limits "
        "them; how long is said first"
    )
    add("--all", action="store_true", help=help)
    help = "implementations to check (default: those that this machine may select automatically)"
    add("--implementations", nargs="+", choices=implementations.names(), metavar="NAME", help=help)
    help = (
        "head sizes of queries and keys / of values (default: 32 64 128, with --all 192/128 256 "
        "512 too; without a GPU 64)"
    )
    add("--head-sizes", nargs="+", type=head_sizes, metavar="H[/Hv]", help=help)
    help = (
        "dtypes to check (default: bfloat16 on a GPU, else float32; with --all float32 and "
        "bfloat16, on a GPU float16 too)"
    )
    add("--dtypes", nargs="+", choices=sorted(comparison.TOLERANCE), metavar="DTYPE", help=help)
    help = (
        "seconds after which what has compiled and runs counts as hanging, and its process is "
        "ended (default: %(default)g)"
    )
    add("--limit", type=float, default=180, metavar="SECONDS", help=help)
    add(trial.CASE, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def wait_for_turn():
    """Says that this process has compiled, and waits until it may run."""
    print(trial.READY, flush=True)
    sys.stdin.readline()


def head_sizes(text: str) -> tuple[int, int]:
    size, _, value_size = text.partition("/")
    sizes = int(size), int(value_size or size)
    if not all(1 <= size <= 512 for size in sizes):
        raise argparse.ArgumentTypeError(f"must be H or H/Hv, each from 1 to 512; got {text!r}")
    return sizes


# ---- what would run ----


def typical_calls() -> dict[str, tuple[list, dict]]:
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    qkv = lambda B, T, S, N, K, H, **kw: [
        array(B, *size, H, **kw) for size in ((T, N), (S, K), (S, K))
    ]
    ints = lambda *shape: array(*shape, dtype="int32")
    return {
        "training": (qkv(4, 4096, 4096, 16, 16, 128), dict(is_causal=True)),
        "packed documents": (
            qkv(1, 8192, 8192, 32, 8, 128),
            dict(is_causal=True, query_segment_ids=ints(1, 8192)),
        ),
        "float32": (qkv(8, 512, 512, 8, 8, 64, dtype="float32"), dict(is_causal=True)),
        "a bias": (qkv(8, 512, 512, 12, 12, 64), dict(bias=array(1, 12, 512, 512))),
        "decoding": (qkv(8, 1, 4096, 32, 8, 128), dict(key_value_seq_lengths=ints(8))),
    }


def print_machine():
    ours, theirs = (
        f"pallas_flash {pallas_flash.__version__}",
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}",
    )
    print(f"{ours}, {theirs}, Python {platform.python_version()}", flush=True)
    kinds = collections.Counter(device.device_kind for device in jax.local_devices())
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    driver = f", driver {records.driver()}" if records.machine() else ""
    print(f"devices: {devices}{driver}; {os.cpu_count()} CPU cores")
    if reason := why_no_gpu():
        print(f"no GPU: {reason}")
    for name in ("PALLAS_FLASH_IMPLEMENTATION", "PALLAS_FLASH_SELF_CHECK"):
        if name in os.environ:
            print(f"{name}={os.environ[name]}")
    if flag := options.determinism():
        print(f"XLA_FLAGS has {flag}: gradients are bitwise deterministic by default")


PLUGINS = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}  # the drivers that they need
INSTALL = "pip install 'jax[cuda13]' for driver 580 or newer, 'jax[cuda12]' for 525 or newer"


def why_no_gpu() -> str | None:
    """Why jax has no GPU here, and what to do; None where it has one."""
    platforms = jax.config.jax_platforms or ""
    if hardware.here().platform == "gpu":
        return None
    if platforms and not {"cuda", "gpu", "rocm"} & {*platforms.split(",")}:
        return f"JAX_PLATFORMS={platforms} names none; unset it to use one"
    driver = records.driver()
    if driver == "unknown":
        return f"no NVIDIA driver is loaded here; for an NVIDIA GPU {INSTALL}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all; unset it to use one"
    plugins = [name for name in PLUGINS if any(importlib.metadata.distributions(name=name))]
    if not plugins:
        return f"driver {driver} is loaded, but jax has no plugin for CUDA: {INSTALL}"
    if all(_major(driver) < PLUGINS[name] for name in plugins):
        return f"{' and '.join(plugins)} needs a newer driver than {driver}: {INSTALL}"
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{' and '.join(plugins)} did not start with driver {driver}: {reason}"
    return "the default device is a CPU (JAX_PLATFORMS, jax_default_device)"


def _major(driver: str) -> int:
    return int(driver.partition(".")[0])


def print_choices():
    """What `explain` says, without the implementations that come after the one taken."""
    print("\nWhat flash_attention takes", flush=True)
    for name, (arrays, call) in typical_calls().items():
        choice = explain(*arrays, **call)
        print(f"\n{name:<18}{choice.problem}")
        print(
            f"{'takes':>16}  {', '.join(filter(None, (choice.implementation, choice.condition)))}"
        )
        for other in implementations.names()[
            : implementations.names().index(choice.implementation)
        ]:
            print(f"{f'not {other}':>16}  {choice.why_not[other]}")


# ---- what is right ----

JOBS = 8  # processes at a time, at most: they share the memory of a GPU
COLUMNS = "{:<51}{:>15}{:>10}{:>12}   {}"


def check_all(args) -> bool:
    """Prints a row for each case as it ends; whether there is one, and all are right."""
    on_gpu = hardware.here().platform == "gpu"
    names = args.implementations or (implementations.names() if args.all else trial.default_names())
    every = ["bfloat16", "float16", "float32"] if on_gpu else ["float32", "bfloat16"]
    cases, refused = trial.cases(
        names, args.head_sizes, args.dtypes or (every if args.all else every[:1]), args.all
    )
    jobs = min(JOBS, os.cpu_count() or 1) if on_gpu else 1  # a CPU that compiles is slow to run
    minutes = f": about {math.ceil(len(cases) * trial.SECONDS / jobs / 60)} minutes" * on_gpu
    print(
        f"\nWhat is right here: {len(cases)} variants, each in a process of its own, {jobs} at a "
        f"time{minutes}\n"
    )
    head = "head sizes, dtype, the backward's order, options"
    print(COLUMNS.format(head, "largest error", "compile", "run", ""), flush=True)
    findings, right = trial.findings(cases.values(), args.limit, jobs), []
    for variant in cases:
        tell(f"{len(right)} of {len(cases)} done; compiles and runs {variant}")
        right.append(print_row(variant, next(findings)))
    for name, reason in refused.items():
        print(f"{name} is not here: {reason}")
    print(
        f"\n{sum(right)} of {len(right)} are right."
        + (f" Recorded in {records.folder()}." if records.machine() else "")
    )
    return bool(right) and all(right)


def tell(text: str):
    """On a terminal the next row is written over it."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(text, end=end, file=sys.stderr, flush=True)


def print_row(variant: verdicts.Variant, finding: trial.Finding) -> bool:
    errors = finding.verdict.errors
    largest = max(errors, key=errors.get, default=None)
    milliseconds = lambda seconds: "" if seconds is None else f"{seconds * 1e3:.3g} ms"
    cells = [
        f"{errors[largest]:.1e} of {largest}" if largest else "",
        "" if finding.compile is None else f"{finding.compile:.1f} s",
        milliseconds(finding.run),
    ]
    print(
        COLUMNS.format(str(variant), *cells, trial.record_verdict(variant, finding.verdict)),
        flush=True,
    )
    return finding.verdict.why_not is None


if __name__ == "__main__":
    raise SystemExit(main())
