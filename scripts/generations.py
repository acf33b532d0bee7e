"""python scripts/generations.py [--counts] [--lengths T ...] [--blocks B ...] [--out DIR]

Counts, and on a GPU times, the generations from standard attention to FlashAttention-3: the table
of FlashAttention's paper beside the kernels here, and why they differ; speed and memory by length,
with and without a mask; flash1 by tiles. Prints tables, and writes generations.json,
generations.svg, which shows counts alone, and on a GPU generations-times.png.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys

import jax

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import pallas_flash
from pallas_flash.accounting import published
from scripts.bench import clock, machine
from scripts.bench.options import Help, positive
from scripts.history import compiled, counts, figure, tables, times
from scripts.history.counts import SECOND


def main(argv=None) -> int:
    args = parse(argv)
    p = published.gpt2_medium()
    facts = print_header(args, p)
    table, ways, units = counts.table(p), counts.ways(p), counts.least_by_unit(p)
    lengths, blocks = counts.by_length(p, args.lengths), counts.by_block(p, args.blocks)
    timed = {} if "no times" in facts else measured(p, args, facts["clock"])
    tables.print_paper(p, table, timed.get("shape", []))
    tables.print_ways(ways)
    found, where = temporaries(p, args, timed)
    tables.print_memory(table, found, where)
    tables.print_lengths(lengths, timed.get("lengths", []))
    tables.print_blocks(blocks, timed.get("tiles", []))
    tables.print_times(timed)
    counted = dict(table=table, units=units, lengths=lengths, blocks=blocks)
    written = write(
        args, p, facts, timed, counted, dict(ways=ways, temporaries=dict(where=where, bytes=found))
    )
    print(f"\nwritten    {', '.join(map(str, written))}")
    return int(any(is_bad(row, name) for name, rows in timed.items() for row in rows))


def is_bad(row, part: str) -> bool:
    """Tiles that a GPU has no room for are no failure, but an answer."""
    return row.status == "wrong" or (row.status == "failed" and part != "tiles")


def measured(p, args, timed_by: str) -> dict[str, list]:
    parts = dict(shape=times.at_the_shape, lengths=times.by_length, tiles=times.by_tiles)
    rows = {}
    for name, part in parts.items():
        print(f"measuring  {name}", file=sys.stderr, flush=True)
        rows[name] = part(p, args, timed_by)
    return rows


def temporaries(p, args, timed) -> tuple[dict, str]:
    """As XLA counts them, by generation, and on what; or none, and why."""
    if timed:
        rows = times.as_the_paper(timed["shape"])
        return {
            row.name: row.temporary_bytes for row in rows if row.temporary_bytes is not None
        }, machine.device()
    return ({}, "--counts") if args.counts else compiled.temporaries(SECOND, p)


def write(
    args, p, facts: dict, timed: dict[str, list], counted: dict, more: dict
) -> list[pathlib.Path]:
    args.out.mkdir(parents=True, exist_ok=True)
    picture, pictures = args.figure or args.out / "generations.svg", []
    figure.write(picture, figure.counted(p, **counted))
    if timed:
        pictures.append(args.out / "generations-times.png")
        title = f"{facts['device']}; {facts['versions']}; {facts['commit']}; {facts['date']}"
        figure.write(
            pictures[0],
            figure.timed(
                title, timed["shape"], timed["lengths"], counted["blocks"], timed["tiles"]
            ),
        )
    data = args.out / "generations.json"
    results = dict(facts=facts, published=_published(), **counted, **more)
    results |= {f"timed, {name}": rows for name, rows in timed.items()}
    data.write_text(json.dumps(_plain(results), indent=1) + "\n")
    return [data, picture, *pictures]


def _published() -> dict:
    return {
        name: getattr(published, name.upper()) for name in ("gflops", "gigabytes", "milliseconds")
    }


def _plain(x):
    """For JSON: tuples with names as objects."""
    if dataclasses.is_dataclass(x):
        return _plain(vars(x) | dict(median=x.median))
    if hasattr(x, "_asdict"):
        return _plain(x._asdict())
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    return [_plain(one) for one in x] if isinstance(x, list | tuple) else x


# ---- what is asked, and what it says first ----


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        epilog="Exit status 1: a generation's results were wrong, or it failed.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--counts", action="store_true", help="counts alone: nothing is compiled or timed")
    add(
        "--lengths",
        nargs="+",
        type=positive,
        metavar="T",
        default=[128, 256, 512, 1024, 2048, 4096],
        help="sequence lengths",
    )
    add(
        "--blocks",
        nargs="+",
        type=_block,
        metavar="B",
        default=[16, 32, 64, 128, 256, 512],
        help="keys of flash1's tiles",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        default=16384,
        help="in all, at each length that is timed",
    )
    add(
        "--repeats",
        type=positive,
        metavar="R",
        default=5,
        help="rounds, each of which times each generation once",
    )
    add(
        "--jobs",
        type=positive,
        metavar="J",
        default=min(8, os.cpu_count() or 1),
        help="how many programs compile at a time",
    )
    add(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        default=pathlib.Path("runs/generations"),
        help="folder of the results",
    )
    add(
        "--figure",
        type=pathlib.Path,
        metavar="FILE",
        help="the picture of the counts, .svg or .png; in DIR if left out",
    )
    return parser.parse_args(argv)


def _block(text: str) -> int:
    block = positive(text)
    if block < 16 or block & (block - 1):
        raise argparse.ArgumentTypeError(
            f"must be a power of two from 16 on, as Triton wants tiles; got {block}"
        )
    return block


def print_header(args, p) -> dict[str, str]:
    facts = dict(
        device=machine.device(),
        versions=f"jax {jax.__version__}, Python {platform.python_version()}, pallas_flash "
        f"{pallas_flash.__version__}",
        commit=machine.commit(),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        shape=f"GPT-2 medium: B{p.batch} T{p.queries} N{p.heads} H{p.head_size} {p.dtype}, forward "
        "and backward; the paper's"
        " had a mask and dropout",
        bytes="asked of device memory; a cache may serve some of them",
        roofline="each kernel as long as its busiest unit at its peak rate, if no cache serves a "
        "load: computed, not measured",
    )
    if args.counts:
        facts["no times"] = "--counts"
    elif machine.on_gpu():
        facts |= dict(
            times=f"median of {args.repeats} rounds, interleaved",
            clock=clock.detect(),
            gpu=machine.limits(),
        )
    else:
        facts["no times"] = "there is no GPU, and Pallas' interpreter tells nothing of one"
    for name, text in facts.items():
        print(f"{name:<11}{text}", flush=True)
    return facts


if __name__ == "__main__":
    raise SystemExit(main())
