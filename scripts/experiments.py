"""python scripts/experiments.py [NAME ...] [--dry | --once] [--budget S] [--out DIR] ...

Decides between variants of the kernels on an H100, H200, B200 or B300. Each experiment times fields
of their tiles beside peers, interleaved, and says what it decides; the one that may gain most comes
first. It is measured as a case of scripts/benchmark.py is: results are checked, each experiment has
a process of its own, and none begins to run after the budget. A variant whose field the tiles do
not have, or that a kernel refuses, is reported and left out.

A further experiment is a row of HOPPER or BLACKWELL.
"""

import argparse
import functools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash.accounting import GPU, GPUS
from pallas_flash.choose import implementations
from scripts.bench import gpu_code, machine, programs
from scripts.bench.cases import Case, all_tokens, one_token
from scripts.bench.peers import Contender, contender
from scripts.bench.run import Run, Task, add_options, share_gpu


class Experiment(NamedTuple):
    case: Case
    passes: str
    contenders: list[str]  # what runs by default, variants, peers
    decides: str


DEFAULT, ONE, TWO = "hopper", "hopper fused", "hopper deterministic"  # kernels backward
BY_PRODUCER = f"{ONE}: fused.dq_by_producer=True"  # dQ is added by the producer
PRODUCER = (
    "dq_by_producer: on, if that gains 1% by the product of times without groups. "
    "ONE_KERNEL_KEYS of hopper/tuning.py: as many keys as one kernel needs to be no slower than two"
)
TILES, APART = "forward.tiles_per_program", "forward.heads_apart=True"
OF_PROGRAMS = "the tiles of queries of a program, and whether its heads lie apart: what gains 1%"
PEERS = "nothing; it is beside peers"


def backward(case: Case, *peers: str) -> Experiment:
    return Experiment(case, "backward", [DEFAULT, ONE, BY_PRODUCER, TWO, *peers], PRODUCER)


def forward(case: Case, *peers: str, changes: tuple[str, ...] = ()) -> Experiment:
    variants = (f"{DEFAULT}: {change}" for change in changes)
    decides = OF_PROGRAMS if changes else PEERS
    return Experiment(case, "forward", [DEFAULT, *variants, *peers], decides)


causal = functools.partial(all_tokens, 128)
long = functools.partial(all_tokens, 128, 16384)
grouped = functools.partial(all_tokens, 128, N=64, K=8)
HOPPER = {
    "backward-16384": backward(long(), "fa3", "jla fused"),
    "backward-1024": backward(causal(1024), "fa3", "tokamax"),
    "backward-4096": backward(causal(4096), "fa3"),
    "backward-512": backward(causal(512), "fa3", "tokamax", "torch"),
    "backward-2048": backward(causal(2048), "fa3"),
    "groups-8192": backward(grouped(8192), "fa3", "jax.nn/cudnn"),
    "groups-2048": backward(grouped(2048), "fa3"),
    "latent-8192": Experiment(
        all_tokens(192, 8192, N=16, Hv=128), "backward", [DEFAULT, "jla", "torch"], PEERS
    ),
    "window-16384": backward(long(window=1024), "fa3"),
    "documents-16384": backward(long(documents=16), "fa3"),
    "64-16384": backward(all_tokens(64, 16384), "jla fused"),
    "full-16384": backward(long(causal=False), "jax.nn/cudnn"),
    "forward-1024": forward(causal(1024), "fa3", "torch", changes=(f"{TILES}=2", f"{TILES}=8")),
    "forward-512": forward(
        causal(512),
        *("tokamax", "torch"),
        changes=(f"{TILES}=4", f"{TILES}=16", APART, f"{TILES}=16, {APART}"),
    ),
    "forward-documents": forward(long(documents=16), "hopper varlen", "fa3"),
    "decode-1": forward(one_token(1, 32768), "jax.nn/cudnn", "decode_attention"),
    "decode-8": forward(one_token(8, 8192), "jax.nn/cudnn", "decode_attention"),
}

TCGEN05 = "blackwell"
IN_FORWARD = (
    # by a model of the waits each of these two gains little alone
    *("forward.in_order=False", "forward.in_order=False, forward.exp2_columns=0"),
    *(f"forward.exp2_columns={columns}" for columns in (0, 4, 12, 16)),
    *("forward.first_columns=96", "forward.first_columns=96, forward.exp2_columns=12"),
    *("forward.rescale_threshold=0", "forward.columns=64"),
)
IN_BACKWARD = (
    *("dkv.stages=2", "dkv.columns=64", "dq.stages=2", "dq.columns=64"),
    *("dq.sums_delta=False", "dq.sums_delta=True"),
    *(f"{kernel}.exp2_columns={n}" for kernel in ("dkv", "dq") for n in (0, 4, 8, 16)),
)
PARTS = tuple(f"dkv.group_parts={n}" for n in (1, 2, 4, 8))
FIELDS = "each field: the value that is faster by 1% at heads of 64 and 128, if results stay right"


def by_tcgen05(case: Case, passes: str, changes: tuple[str, ...]) -> Experiment:
    variants = (f"{TCGEN05}: {change}" for change in changes)
    return Experiment(case, passes, [TCGEN05, *variants, "jax.nn/cudnn", "tokamax"], FIELDS)


BLACKWELL = {
    f"{TCGEN05}-{passes}-{name}": by_tcgen05(case, passes, changes)
    for name, case in {
        "128": causal(4096),
        "64": all_tokens(64, 4096),
        "full": long(causal=False),
        "documents": long(documents=16),
    }.items()
    for passes, changes in dict(forward=IN_FORWARD, backward=IN_BACKWARD).items()
} | {
    f"{TCGEN05}-parts-{T}": by_tcgen05(all_tokens(128, T, N=64, K=1), "backward", PARTS)
    for T in (2048, 16384)
}
BLACKWELL[f"{TCGEN05}-forward-few"] = by_tcgen05(
    Case(1, 2048, 2048, 8, 8, 128, "bfloat16", causal=True), "forward", ("forward.row_tiles=2",)
)
# 32 heads of 4 MB: a section of 16 by 126 MB of L2, of 8 by what one die has
BLACKWELL[f"{TCGEN05}-l2"] = Experiment(
    all_tokens(128, 8192, causal=False),
    "forward",
    [TCGEN05, f"{TCGEN05}: forward.section_mb=45", "jax.nn/cudnn"],
    "what a section may take of the L2 of a B200, if that is faster by 1%",
)
EXPERIMENTS = HOPPER | BLACKWELL
WIDTH = max(map(len, EXPERIMENTS)) + 2  # of the column of their names


def main(argv=None) -> int:
    share_gpu()
    args = parse(argv)
    chosen = {
        name: EXPERIMENTS[name]
        for name in args.names or (EXPERIMENTS if args.dry else of_this_machine())
    }
    if args.dry or args.once:
        return each(lower if args.dry else run_twice, chosen)
    if not machine.on_gpu():
        raise SystemExit("experiments.py: error: there is no GPU here; --dry goes without.")
    for name, one in chosen.items():
        print(f"{name:<{WIDTH}}{one.case}, {one.passes}; it decides: {one.decides}")
    tasks = [Task(e.case, [e.passes], [*map(contender, e.contenders)]) for e in chosen.values()]
    return Run(args, tasks, "experiments").all()


def of_this_machine() -> list[str]:
    """The experiments but those of another GPU's kernels."""
    others = {
        family.name for family in implementations.AMPERE.others if not family.is_for_this_gpu()
    }
    return [name for name, one in EXPERIMENTS.items() if one.contenders[0] not in others]


def each(act: Callable[[Contender, Case, str], str], chosen: dict[str, Experiment]) -> int:
    """Acts on each contender of each experiment; returns the exit status."""
    has_failed = False
    for name, experiment in chosen.items():
        for one in map(contender, experiment.contenders):
            begun = time.monotonic()
            try:
                said = act(one, experiment.case, experiment.passes)
            except NotImplementedError as error:
                said = f"not run: {error}"
            except Exception as error:  # whatever a contender raises
                said, has_failed = f"failed: {type(error).__name__}: {error}", True
            seconds = time.monotonic() - begun
            print(f"{name:<{WIDTH}}{one.name}: {said}; {seconds:.0f} s", flush=True)
    return int(has_failed)


def lower(one: Contender, case: Case, passes: str) -> str:
    """Lowers a contender as on a GPU with its kernels, which need not be here."""
    if one.is_peer:
        return one.missing() or "a peer, which is installed"
    with gpu_code.as_if_on(gpu_for(one.name)):
        if reason := one.why_not(case):
            raise NotImplementedError(reason)
        for program in programs.traced(one, case, passes):
            program.lower(lowering_platforms=("cuda",))
    return "lowers"


def gpu_for(contender: str) -> GPU:
    return GPUS["B200" if contender.startswith(TCGEN05) else "H200"]


def run_twice(one: Contender, case: Case, passes: str) -> str:
    """Runs a contender here, under whatever profiles this process."""
    if reason := one.missing():
        raise NotImplementedError(reason)
    one.load()
    if reason := one.why_not(case):
        raise NotImplementedError(reason)
    program = programs.program(one, case, passes)
    for _ in range(2):
        program.wait(program.call())
    return "ran twice"


# ---- the command line ----


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[2],
        epilog="Exit status 1: something was wrong or failed, or nothing ran.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join(EXPERIMENTS)
    add("names", nargs="*", metavar="NAME", help=f"experiments (default: all): {names}")
    mode = parser.add_mutually_exclusive_group()
    help = "lower every variant as on an H200 or B200, without a GPU, and run nothing"
    mode.add_argument("--dry", action="store_true", help=help)
    help = "run each contender twice, in this process, untimed and unchecked: for a profiler"
    mode.add_argument("--once", action="store_true", help=help)
    add_options(add)
    parser.set_defaults(repeats=5, jobs=min(12, os.cpu_count() or 1), budget=380)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in EXPERIMENTS]:
        parser.error(f"NAME must be one of {names}; got {', '.join(unknown)}.")
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout`
    raise SystemExit(main())
