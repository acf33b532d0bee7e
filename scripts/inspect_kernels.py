"""python scripts/inspect_kernels.py [--gpu NAME] [--causal] [--length T] [--heads N] [--head-size
H] ...

Says what a call of flash_attention runs on a GPU, which need not be here: the implementation and
why not the others, its tiles, the least work and time, and what the compiler made of each kernel,
forward and backward. Nothing is run.

`--help` lists the rest.
"""

import argparse
import functools
import json
import math
import operator
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

# jax and the package, which imports it, are imported where they are used: gpu_code.prepare comes
# before. scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts import gpu_code
from scripts.typed_mask import typed_mask


def main(argv=None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gpu_code.prepare(pathlib.Path(folder))
        parser = make_parser()
        args = parse(parser, argv)
        call = call_of(args)
        report = explained(args, call, parser)
        if "implementation" in report:
            report |= compiled(args, call, pathlib.Path(folder))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    return int("refused" in report or "failed" in report)


# ---- the command line ----


def make_parser() -> argparse.ArgumentParser:
    from pallas_flash.accounting import GPUS

    parser = argparse.ArgumentParser(
        usage="%(prog)s [--gpu NAME] [options]",
        description=__doc__.split("\n\n")[1],
        epilog="Exit status 1: flash_attention refuses the call, or a kernel does not compile.",
    )
    add = parser.add_argument_group("where").add_argument
    help = (
        "the GPU to compile for; A100 is the one with 80 GB (default: the one in this machine, "
        "else H200)"
    )
    add("--gpu", choices=GPUS, type=lambda name: "A100-80GB" if name == "A100" else name, help=help)
    add(
        "--implementation",
        metavar="NAME",
        help="of flash_attention (default: the one that it chooses on that GPU)",
    )
    help = "whether each run must give the same bits (default: as in flash_attention)"
    add("--deterministic", action=argparse.BooleanOptionalAction, help=help)
    add(
        "--forward", action="store_true", help="compile the forward alone, not forward and backward"
    )
    add("--json", action="store_true", help="print everything as JSON")
    add = parser.add_argument_group("shapes").add_argument
    add("--batch", type=positive, metavar="B", default=1, help="sequences (default: %(default)s)")
    add("--length", type=positive, metavar="T", default=4096, help="queries (default: %(default)s)")
    add("--keys", type=positive, metavar="S", help="keys and values (default: T)")
    add(
        "--heads", type=positive, metavar="N", default=16, help="query heads (default: %(default)s)"
    )
    add(
        "--kv-heads",
        type=positive,
        metavar="K",
        help="key/value heads, shared by the query heads (default: N)",
    )
    add(
        "--head-size",
        type=positive,
        metavar="H",
        default=128,
        help="head size of queries and keys (default: %(default)s)",
    )
    add("--value-size", type=positive, metavar="Hv", help="head size of values (default: H)")
    add(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of the inputs (default: %(default)s)",
    )
    add = parser.add_argument_group("what a query sees, and its logits").add_argument
    add("--causal", action="store_true", help="the keys up to its own position")
    help = "W keys before its own and W after it; two numbers: LEFT before and RIGHT after"
    add("--window", type=int, nargs="+", metavar="W", help=help)
    add(
        "--query-offset",
        type=int,
        metavar="P",
        default=0,
        help="the key position of query 0 (default: %(default)s)",
    )
    add(
        "--key-lengths",
        type=int,
        nargs="+",
        metavar="L",
        help="only the first L keys, for each batch row",
    )
    add(
        "--query-lengths",
        type=int,
        nargs="+",
        metavar="L",
        help="only the first L queries see anything, for each batch row",
    )
    add(
        "--documents",
        type=positive,
        metavar="D",
        help="the keys of its own document, of D packed documents of equal length",
    )
    help = (
        "an expression of the names in pallas_flash.masks, as 'Window(128, 128) | GlobalTokens(4)'"
    )
    add("--rule", type=typed_mask, metavar="MASK", help=help)
    help = (
        "a dense bool mask: BNTS, with a 1 for each axis that it broadcasts, as in B1TS; all of "
        "it counts as work"
    )
    add("--mask", type=axes, metavar="AXES", help=help)
    add("--bias", type=axes, metavar="AXES", help="a bias, with its axes written as for --mask")
    add("--soft-cap", type=float, metavar="C", help="logits become C tanh(logits / C)")
    add(
        "--alibi",
        action="store_true",
        help="a score_mod that subtracts a slope for each head times the distance",
    )
    add("--sinks", action="store_true", help="one more logit for each head")
    add("--max-logits", action="store_true", help="the largest logit of each row is returned too")
    add(
        "--dropout",
        type=float,
        default=0.0,
        metavar="RATE",
        help="rate of dropout on the softmax's weights",
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv) -> argparse.Namespace:
    from pallas_flash.accounting import GPUS

    args = parser.parse_args(argv)
    args.gpu = GPUS[args.gpu or gpu_here() or "H200"]
    args.keys = args.keys or args.length
    args.kv_heads = args.kv_heads or args.heads
    args.value_size = args.value_size or args.head_size
    if args.window and len(args.window) > 2:
        parser.error(f"--window takes one number or two; got {len(args.window)}.")
    for name in ("key_lengths", "query_lengths"):
        given = getattr(args, name)
        if given and len(given) != args.batch:
            parser.error(
                f"--{name.replace('_', '-')} takes one number for each of the {args.batch} batch "
                f"rows; got {len(given)}."
            )
    if args.mask and args.rule is not None:
        parser.error("a call has one mask: --mask or --rule.")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def axes(text: str) -> str:
    if len(text) != 4 or any(c not in (axis, "1") for c, axis in zip(text, "BNTS", strict=True)):
        raise argparse.ArgumentTypeError(
            f"must be BNTS, with a 1 in place of each axis that is broadcast; got {text!r}"
        )
    return text


def gpu_here() -> str | None:
    """The name in GPUS of this machine's first GPU, if it is one of them."""
    from pallas_flash.accounting import name_of

    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return name_of(run.stdout.partition("\n")[0])


# ---- the call ----


def call_of(args) -> dict:
    """The arguments of flash_attention: shapes of what is large, the values of lengths and ids."""
    import jax

    from pallas_flash import scores

    sizes = dict(B=args.batch, N=args.heads, T=args.length, S=args.keys)
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, args.dtype)
    dense = lambda letters: tuple(sizes.get(c, 1) for c in letters)
    call = dict(
        query=floats(args.batch, args.length, args.heads, args.head_size),
        key=floats(args.batch, args.keys, args.kv_heads, args.head_size),
        value=floats(args.batch, args.keys, args.kv_heads, args.value_size),
        bias=args.bias and floats(*dense(args.bias)),
        mask=jax.ShapeDtypeStruct(dense(args.mask), bool) if args.mask else args.rule,
        is_causal=args.causal,
        local_window_size=window(args),
        query_offset=args.query_offset,
        key_value_seq_lengths=lengths(args.key_lengths),
        query_seq_lengths=lengths(args.query_lengths),
        query_segment_ids=documents(args),
        logits_soft_cap=args.soft_cap,
        sinks=jax.ShapeDtypeStruct((args.heads,), "float32") if args.sinks else None,
        score_mod=scores.Alibi([2**-n for n in range(1, args.heads + 1)]) if args.alibi else None,
        dropout_rate=args.dropout,
        dropout_rng=jax.ShapeDtypeStruct((2,), "uint32") if args.dropout else None,
        return_max_logits=args.max_logits,
        implementation=args.implementation,
    )
    return call if args.deterministic is None else call | dict(deterministic=args.deterministic)


def window(args) -> tuple[int, int] | None:
    return args.window and (args.window[0], args.window[-1])


def lengths(given: list[int] | None):
    return given and np.array(given, np.int32)


def documents(args):
    """Document ids [B, T]."""
    if args.documents is None:
        return None
    ids = np.arange(args.length, dtype=np.int32) * args.documents // args.length
    return np.broadcast_to(ids, (args.batch, args.length))


def visible_pairs(args) -> int:
    """How many pairs there are of a query and a key that it sees, over all batch rows and heads,
    but for a dense mask."""
    from pallas_flash import masks

    rules = [masks.Causal()] if args.causal else []
    if args.window:
        rules.append(masks.Window(*window(args)))
    if args.key_lengths:
        rules.append(masks.KeyLengths(lengths(args.key_lengths)))
    if args.query_lengths:
        rules.append(masks.QueryLengths(lengths(args.query_lengths)))
    if args.documents:
        rules.append(masks.Documents(documents(args), documents(args)))
    B, N, T, S = args.batch, args.heads, args.length, args.keys
    if args.rule is not None:
        rule = functools.reduce(operator.and_, rules, args.rule)
        count = masks.create_block_mask(
            rule, T, S, block=1, query_offset=args.query_offset, batch=B, heads=N
        ).counts()
        return count["full"] * (B * N * T * S // sum(count.values()))
    seen = masks.resolve(rules, B, T, S, args.query_offset)
    start, stop = seen.narrow(seen.BY_BATCH, lambda x: x[:, None]).interval(np.arange(T)[None])
    count = np.maximum(np.asarray(stop) - np.asarray(start), 0)
    return int(np.broadcast_to(count, (B, T)).sum(dtype=np.int64)) * N


# ---- the least that must be done ----


def works(call: dict, pairs: int) -> dict:
    """The least `Cost` of each pass, by name: products for the `pairs` of a query and a key that it
    sees, an exponential for each of them in each kernel, each array moved once in each kernel,
    whatever the mask. An implementation does more: whole tiles, and arrays moved again for each
    tile that needs them.

    The forward has two products, Q K^T and P V; a backward in one kernel has five, Q K^T, dO V^T,
    P^T dO, dS K and dS^T Q, and in two, for dQ and for dK with dV, seven, since both need the first
    two.
    """
    from pallas_flash.accounting import Cost

    q, k, v, bias, mask = (call[name] for name in ("query", "key", "value", "bias", "mask"))
    H, Hv = q.shape[-1], v.shape[-1]
    bytes_of = lambda x: math.prod(x.shape) * x.dtype.itemsize if hasattr(x, "shape") else 0
    inputs, mask = sum(map(bytes_of, (q, k, v, bias))), bytes_of(mask)
    o, row = bytes_of(q) // H * Hv, math.prod(q.shape[:-1]) * 4  # lse and delta are float32
    # what each kernel of the backward reads; delta takes o beside it
    once = inputs + mask + o + 2 * row
    return {
        "forward": Cost(2 * pairs * (H + Hv), pairs, reads=inputs + mask, writes=o + row),
        "backward, 5 products": Cost(
            2 * pairs * (3 * H + 2 * Hv), pairs, reads=once + o, writes=inputs
        ),
        "backward, 7 products": Cost(
            2 * pairs * (4 * H + 3 * Hv), 2 * pairs, reads=2 * once + o, writes=inputs
        ),
    }


def least(name: str, cost, args) -> dict:
    """A pass with the seconds that each part of it takes alone at the GPU's peaks; all of it takes
    no less than the slowest."""
    seconds = args.gpu.seconds(cost, args.dtype)
    amounts = dict(name=name, flops=cost.matrix, exponentials=cost.exponentials, bytes=cost.bytes)
    return amounts | dict(seconds=seconds, least_seconds=max(seconds.values()))


# ---- the report ----


def explained(args, call: dict, parser: argparse.ArgumentParser) -> dict:
    """What is known of a call without compiling it."""
    from pallas_flash import explain

    with gpu_code.as_if_on(args.gpu):
        try:
            chosen = explain(**call)
            found = dict(
                implementation=chosen.implementation,
                tiles=chosen.tiles and str(chosen.tiles),
                why_not=chosen.why_not,
            )
        except NotImplementedError as error:
            chosen = explain(**call | dict(implementation=None, deterministic=True))
            found = dict(refused=str(error))
        except (TypeError, ValueError) as error:  # about its arguments
            parser.error(str(error))
    gpu = args.gpu._asdict() | dict(exponentials=args.gpu.exponentials)
    work = [least(name, cost, args) for name, cost in works(call, visible_pairs(args)).items()]
    return dict(call=str(chosen.problem), gpu=gpu, work=work) | found


def compiled(args, call: dict, folder: pathlib.Path) -> dict:
    """What the compiler made of it."""
    if reason := gpu_code.missing():
        return dict(not_compiled=reason)
    try:
        program = gpu_code.compiled(args.gpu, *program_of(args, call))
        kernels = gpu_code.kernels(folder, "flash_attention")
    except Exception as error:  # a kernel that does not fit, say: the rest is still of use
        return dict(failed=f"{type(error).__name__}: {error}")
    return dict(
        compiler=gpu_code.compiler(),
        temporary_bytes=program.memory_analysis().temp_size_in_bytes,
        kernels=[
            kernel._asdict() | dict(loops=[loop._asdict() for loop in kernel.loops])
            for kernel in kernels
        ],
    )


def program_of(args, call: dict):
    """Forward, or forward and backward, and the shapes of its arguments."""
    import jax

    from pallas_flash import flash_attention

    is_array = lambda x: hasattr(x, "shape")
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items() if is_array(x)
    }
    static = {name: x for name, x in call.items() if not is_array(x)}
    floats = {
        name: arrays.pop(name)
        for name in ("query", "key", "value", "bias", "sinks")
        if name in arrays
    }
    attend = lambda floats, arrays: flash_attention(**floats, **arrays, **static)
    if args.forward:
        return attend, floats, arrays

    def both(floats, arrays, do):
        found, vjp = jax.vjp(lambda floats: attend(floats, arrays), floats)
        return found, vjp((do, jax.numpy.zeros_like(found[1])) if args.max_logits else do)

    do = jax.ShapeDtypeStruct((args.batch, args.length, args.heads, args.value_size), args.dtype)
    return both, floats, arrays, do


def print_report(report: dict):
    line = lambda name, text: print(f"{name:<16}{text}")
    kind = report["gpu"]["kind"]
    line("call", report["call"])
    line("GPU", kind)
    for name in ("refused", "implementation", "tiles"):
        if report.get(name):
            line(name, report[name])
    for name, reason in report.get("why_not", {}).items():
        line(f"not {name}", reason)
    print_work(report["work"], report["gpu"])
    if "not_compiled" in report:
        print(f"\nNothing was compiled for the {kind}: {report['not_compiled']}")
    if "failed" in report:
        print(f"\nIt does not compile for the {kind}: {report['failed']}")
    if "kernels" in report:
        print_kernels(report)


def print_work(work: list[dict], gpu: dict):
    print(
        "\nThe least that must be done, and its time at the peaks of the datasheet: "
        f"{gpu['products'] / 1e12:g} TFLOP/s dense "
        f"({gpu['float32'] / 1e12:g} in\nfloat32), {gpu['bandwidth'] / 1e12:g} TB/s; "
        f"{gpu['exponentials'] / 1e12:.2g} T "
        f"exponentials/s are 16 a clock in each of {gpu['cores']} cores at {gpu['clock'] / 1e9:g} "
        "GHz.\n"
        "Arrays move once for a kernel. The backward is one kernel of 5 products, or two of 7 in "
        "all: dQ; dK and dV.\n"
    )
    header = [
        "pass",
        "GFLOP",
        "G exp2",
        "MB",
        "products, ms",
        "exp2, ms",
        "memory, ms",
        "at least, ms",
        "by",
    ]
    rows = []
    for w in work:
        amounts = w["flops"] / 1e9, w["exponentials"] / 1e9, w["bytes"] / 1e6
        times = (1e3 * s for s in (*w["seconds"].values(), w["least_seconds"]))
        rows.append(
            [w["name"], *map(short, (*amounts, *times)), max(w["seconds"], key=w["seconds"].get)]
        )
    print_table(header, rows)


def print_kernels(report: dict):
    kernels, megabytes = report["kernels"], short(report["temporary_bytes"] / 1e6)
    print(
        f"\nCompiled by {report['compiler']}: {megabytes} MB of temporaries beside inputs and "
        "outputs.\n"
    )
    if not kernels:
        print("It has no kernels of its own: XLA makes them.")
        return
    header = [
        "kernel",
        "registers",
        "shared memory, bytes",
        "stack, bytes",
        "spill stores, loads, bytes",
        "ptxas warns",
    ]
    rows, steps, warnings = [], [], []
    for k in kernels:
        spills = f"{k['spill_stores']}, {k['spill_loads']}"
        rows.append(
            [
                k["name"],
                k["registers"],
                f"{k['shared_memory']:,}",
                k["stack"],
                spills,
                ", ".join(k["warnings"]) or "no",
            ]
        )
        warnings += [f"{k['name']}: {code}: {text}\n" for code, text in k["warnings"].items()]
        for number, loop in enumerate(k["loops"], 1):
            under = "" if loop["under_products"] is None else f"{loop['under_products']:.0%}"
            steps.append(
                [
                    f"{k['name']}, loop {number}",
                    loop["instructions"],
                    *loop["kinds"].values(),
                    under,
                ]
            )
    print_table(header, rows)
    print("\n" + "".join(warnings) + "\n" * bool(warnings), end="")
    print(
        "Instructions of a warp in a step of each loop over tiles, in the order of the code; steps "
        "without a mask have fewest."
    )
    print(
        "The last column: the part of the exponentials that runs while products of wgmma are in "
        "flight.\n"
    )
    print_table(["", "all", *gpu_code.KINDS, "under products"], steps)


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def print_table(header, rows):
    """Text to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
