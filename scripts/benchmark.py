"""python scripts/benchmark.py [--quick] [--cases NAME] [--implementations NAME ...] ...

Times implementations of attention side by side: forward, backward, and both together. Also reports
the temporary memory of the compiled programs. Every result is checked before it is timed. Prints
tables, and writes benchmark.json, with every single time, into a new folder. On a GPU each case has
a process of its own: they compile at the same time, and run one after the other.

A further peer is a row of PEERS in bench/peers.py, a further list of cases one of CASES below.
"""

import argparse
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench import cases, machine, workers
from scripts.bench.cases import JVP, PASSES, RESULTS, Case, telling
from scripts.bench.options import positive
from scripts.bench.peers import DETERMINISTIC, PEERS, VARLEN, contender
from scripts.bench.programs import TOLERANCE
from scripts.bench.run import Run, Task, add_options, share_gpu


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
# the suite has its own
SHAPE = "lengths", "batch", "heads", "kv_heads", "head_size", "causal", "features"
ANYWHERE = dict(kv_heads=None, causal=True, features=[])
ANYWHERE |= dict(repeats=9, budget=None, out=None, quick=False)
SLOW = ["blockwise", "jax.nn/xla"]
FAST = ["hopper", f"hopper {DETERMINISTIC}", f"hopper {VARLEN}", "blackwell", "ampere", "triton"]
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


def main(argv=None) -> int:
    share_gpu()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [workers.CASE]:
        workers.serve(argv[1])
        return 0
    args = parse(argv)
    contenders = [contender(name) for name in args.implementations]
    cases = CASES[args.cases].make(args)
    run = Run(args, [Task(case, telling(case, args), contenders) for case in cases])
    return run.all()


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
    if len(mods := [name for name in args.features if "score_mod" in name]) > 1:
        parser.error(f"a call has one score_mod; --features names {' and '.join(mods)}.")
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
    """The parser, without defaults: they differ by --cases and --quick."""
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
    help = f"of {', '.join(cases.FEATURES)}: of pallas_flash alone"
    add("--features", nargs="+", choices=cases.FEATURES, metavar="NAME", help=help)
    add("--dtype", choices=list(TOLERANCE), help="of the inputs")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="the default")
    mask.add_argument("--full", action="store_false", dest="causal", help="no mask")
    add_options(add)
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
