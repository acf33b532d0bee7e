"""python scripts/inspect_kernels.py ['CALL'] [--gpu NAME] [--forward | --jvp] [--units] [--json]

Says what a call of flash_attention runs on a GPU, which need not be here: the implementation and
why not the others, its tiles, the least work and time, and what the compiler made of each kernel,
forward and backward, or forward mode. Nothing is run.

CALL has the sizes B, T, S, N, K, H and Hv, the dtype, and arguments of flash_attention, as Python:

  'K=4, is_causal=True'
  'B=2, T=1, S=8192, N=64, K=8, key_value_seq_lengths=[8000, 10]'
  'Hv=64, mask=Window(512, 512) | GlobalTokens(64), implementation="hopper", deterministic=False'
  'is_causal=True, query_segment_ids=np.tile(np.arange(T) // 512, (B, 1))'
  'bias=array(1, N, T, S), mask=array(1, 1, T, S, dtype=bool), sinks=array(N, dtype="float32")'

By default B=1, T=4096, S=T, N=16, K=N, H=128, Hv=H, dtype="bfloat16". What pallas_flash.masks and
.scores define is known by its name; array(...) is an array of any values.
"""

import argparse
import ast
import functools
import json
import math
import operator
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# jax and the package, which imports it, are imported where they are used, after gpu_code.prepare
from scripts.bench import gpu_code


def main(argv=None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gpu_code.prepare(pathlib.Path(folder))
        parser = make_parser()
        args = parse(parser, argv)
        report = explain_call(args, parser)
        if "implementation" in report:
            report |= compile_call(args, pathlib.Path(folder))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
        if args.units and report.get("kernels"):
            print_units(report["kernels"])
    return int("refused" in report or "failed" in report)


# ---- the command line ----


def make_parser() -> argparse.ArgumentParser:
    from pallas_flash.accounting import GPUS

    parser = argparse.ArgumentParser(
        usage="%(prog)s ['CALL'] [--gpu NAME] [--forward | --jvp] [--units] [--json]",
        description=__doc__.partition("\n\n")[2],
        epilog="Exit status 1: flash_attention refuses the call, or a kernel does not compile.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("call", nargs="?", default="", metavar="CALL", help="see above")
    help = "the GPU to compile for (default: the one in this machine, else H200)"
    add("--gpu", choices=GPUS, type=lambda name: "A100-80GB" if name == "A100" else name, help=help)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--forward", action="store_true", help="the forward alone, not forward and backward")
    add("--jvp", action="store_true", help="forward mode, by jax.jvp")
    add = parser.add_argument
    add("--units", action="store_true", help="what binds each loop: the cycles of each unit")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def parse(parser: argparse.ArgumentParser, argv) -> argparse.Namespace:
    """Beside the options, `call`: the arguments of flash_attention, with shapes of its arrays."""
    from pallas_flash.accounting import GPUS

    args = parser.parse_args(argv)
    args.gpu = GPUS[args.gpu or gpu_here() or "H200"]
    try:
        args.call = parse_call(args.call)
    except Exception as error:  # whatever Python makes of it
        parser.error(f"CALL must be keyword arguments, as K=4, is_causal=True; {error!r}")
    return args


SIZES = ("B", "T", "S", "N", "K", "H", "Hv", "dtype")


def parse_call(text: str) -> dict:
    import jax

    from pallas_flash import masks, scores

    def array(*shape, dtype=None):
        return jax.ShapeDtypeStruct(shape, dtype or values["dtype"])

    values = dict(B=1, T=4096, N=16, H=128, dtype="bfloat16")
    names = vars(masks) | vars(scores) | dict(np=np, array=array)
    call = ast.parse(f"dict({text})", mode="eval").body
    if call.args:
        raise ValueError(f"got {ast.unparse(call.args[0])} without a keyword")
    is_size = lambda keyword: keyword.arg in SIZES
    for keyword in sorted(call.keywords, key=is_size, reverse=True):
        sizes = dict(S=values["T"], K=values["N"], Hv=values["H"]) | values
        expression = compile(ast.Expression(keyword.value), "CALL", "eval")
        values[keyword.arg] = eval(expression, names | sizes)
    B, T, N, H = (values.pop(letter) for letter in "BTNH")
    S, K, Hv = values.pop("S", T), values.pop("K", N), values.pop("Hv", H)
    qkv = dict(query=array(B, T, N, H), key=array(B, S, K, H), value=array(B, S, K, Hv))
    del values["dtype"]
    for name, value in values.items():  # flash_attention takes arrays, not lists
        if name.endswith(("_seq_lengths", "_segment_ids")):
            values[name] = np.asarray(value, np.int32)
    if values.get("dropout_rate"):
        values.setdefault("dropout_rng", array(2, dtype="uint32"))
    return qkv | values


def gpu_here() -> str | None:
    """The name in GPUS of this machine's first GPU, if it is one of them."""
    from pallas_flash.accounting import name_of

    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return name_of(run.stdout.partition("\n")[0])


# ---- the least work ----


def count_pairs(call: dict) -> int:
    """Visible pairs of a query and a key, over all batch rows and heads; a dense mask hides
    none."""
    from pallas_flash import masks

    B, T, N, _ = call["query"].shape
    S, offset = call["key"].shape[1], call.get("query_offset", 0)
    rules = [masks.Causal()] if call.get("is_causal") else []
    if (window := call.get("local_window_size")) is not None:
        rules.append(masks.Window(*((window, window) if isinstance(window, int) else window)))
    if (lengths := call.get("key_value_seq_lengths")) is not None:
        rules.append(masks.KeyLengths(lengths))
    if (lengths := call.get("query_seq_lengths")) is not None:
        rules.append(masks.QueryLengths(lengths))
    if (ids := call.get("query_segment_ids")) is not None:
        rules.append(masks.Documents(ids, call.get("key_value_segment_ids", ids)))
    if isinstance(call.get("mask"), masks.Mask):
        rule = functools.reduce(operator.and_, rules, call["mask"])
        blocks = masks.create_block_mask(rule, T, S, block=1, query_offset=offset, batch=B, heads=N)
        count = blocks.counts()
        return count["full"] * (B * N * T * S // sum(count.values()))
    resolved = masks.resolve(rules, B, T, S, offset)
    by_row = resolved.narrow(resolved.BY_BATCH, lambda x: x[:, None])
    start, stop = by_row.interval(np.arange(T)[None])
    count = np.maximum(np.asarray(stop) - np.asarray(start), 0)
    return int(np.broadcast_to(count, (B, T)).sum(dtype=np.int64)) * N


def least_costs(call: dict, pairs: int) -> dict:
    """The least `Cost` of each pass, by name: the products of the visible `pairs`, an exponential
    for each of them in each kernel, and each array moved once in each kernel, whatever the mask.
    An implementation does more: whole tiles, and arrays moved again for each tile that needs
    them.

    The forward has two products, Q K^T and P V. A backward in one kernel has five, Q K^T, dO V^T,
    P^T dO, dS K and dS^T Q; in two kernels, for dQ and for dK with dV, seven, since both need the
    first two. Forward mode has five beside the forward's: Q K^T, dQ K^T, Q dK^T, (P dS) V and P dV.
    """
    from pallas_flash.accounting import Cost

    q, k, v, bias, mask = (call.get(name) for name in ("query", "key", "value", "bias", "mask"))
    H, Hv = q.shape[-1], call.get("value_size") or v.shape[-1]
    bytes_of = lambda x: math.prod(x.shape) * x.dtype.itemsize if hasattr(x, "shape") else 0
    inputs, mask = sum(map(bytes_of, (q, k, v, bias))), bytes_of(mask)
    o, row = bytes_of(q) // H * Hv, math.prod(q.shape[:-1]) * 4  # lse and delta are float32
    # what each kernel of the backward reads; delta takes o beside it
    once = inputs + mask + o + 2 * row
    forward, backward = 2 * pairs * (H + Hv), 2 * pairs * (3 * H + 2 * Hv)
    return {
        "forward": Cost(forward, pairs, reads=inputs + mask, writes=o + row),
        "backward, 5 products": Cost(backward, pairs, reads=once + o, writes=inputs),
        "backward, 7 products": Cost(
            backward + forward, 2 * pairs, reads=2 * once + o, writes=inputs
        ),
        "forward mode": Cost(backward, pairs, reads=2 * inputs + mask + o + row, writes=o + row),
    }


def least_work(name: str, cost, args) -> dict:
    """A pass with the seconds that each part of it takes alone at the GPU's peaks; all of it takes
    no less than the slowest."""
    seconds = args.gpu.seconds(cost, str(args.call["query"].dtype))
    amounts = dict(name=name, flops=cost.matrix, exponentials=cost.exponentials, bytes=cost.bytes)
    return amounts | dict(seconds=seconds, least_seconds=max(seconds.values()))


# ---- the report ----


def explain_call(args, parser: argparse.ArgumentParser) -> dict:
    """What is known of a call without compiling it."""
    from pallas_flash import explain

    with gpu_code.as_if_on(args.gpu):
        try:
            choice = explain(**args.call)
            shown = str(choice)  # without the earlier algorithms, which nobody selects by chance
            report = dict(
                implementation=choice.implementation,
                tiles=choice.tiles and str(choice.tiles),
                why_not={k: why for k, why in choice.why_not.items() if f"\nnot {k} " in shown},
            )
        except NotImplementedError as error:
            choice = explain(**args.call | dict(implementation=None))
            report = dict(refused=str(error))
        except (TypeError, ValueError) as error:  # about its arguments
            parser.error(str(error))
    gpu = args.gpu._asdict() | dict(exponentials=args.gpu.exponentials)
    costs = least_costs(args.call, count_pairs(args.call))
    work = [least_work(name, cost, args) for name, cost in costs.items()]
    return dict(call=str(choice.problem), gpu=gpu, work=work) | report


def compile_call(args, folder: pathlib.Path) -> dict:
    """What the compiler made of it."""
    if reason := gpu_code.missing():
        return dict(not_compiled=reason)
    try:
        program = gpu_code.compiled(args.gpu, *program_of_call(args))
        kernels = gpu_code.kernels(folder, "flash_attention")
    except Exception as error:  # a kernel that does not fit, say: the rest is still of use
        return dict(failed=f"{type(error).__name__}: {error}")
    return dict(
        compiler=gpu_code.compiler(),
        temporary_bytes=program.memory_analysis().temp_size_in_bytes,
        kernels=[
            kernel._asdict()
            | dict(
                loops=[
                    loop._asdict() | dict(units=gpu_code.units(args.gpu, loop))
                    for loop in kernel.loops
                ]
            )
            for kernel in kernels
        ],
    )


def program_of_call(args):
    """Forward, or forward and backward, and the shapes of its arguments."""
    import jax

    from pallas_flash import flash_attention

    floats, others, static = {}, {}, {}
    for name, x in args.call.items():
        if not hasattr(x, "shape"):
            static[name] = x
        elif name in ("query", "key", "value", "bias", "sinks"):
            floats[name] = x
        else:
            others[name] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    attend = lambda floats, others: flash_attention(**floats, **others, **static)
    if args.forward:
        return attend, floats, others
    if args.jvp:
        along = lambda floats, tangents, others: jax.jvp(
            lambda floats: attend(floats, others), (floats,), (tangents,)
        )
        return along, floats, floats, others

    def both(floats, others, do):
        results, vjp = jax.vjp(lambda floats: attend(floats, others), floats)
        if static.get("return_max_logits"):
            do = do, jax.numpy.zeros_like(results[1])
        return results, vjp(do)

    q, value_size = floats["query"], static.get("value_size") or floats["value"].shape[-1]
    do = jax.ShapeDtypeStruct((*q.shape[:-1], value_size), q.dtype)
    return both, floats, others, do


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
    from scripts.bench.report import print_table

    print(
        "\nThe least work, and its time at the GPU's peaks: dense products at "
        f"{gpu['products'] / 1e12:g} TFLOP/s ({gpu['float32'] / 1e12:g} in float32),\n"
        f"{gpu['bandwidth'] / 1e12:g} TB/s, and {gpu['exponentials'] / 1e12:.2g} T exponentials/s, "
        f"16 per clock in each of {gpu['cores']} SMs at {gpu['clock'] / 1e9:g} GHz.\n"
        "Each kernel moves its arrays once. The backward is one kernel of 5 products, or two, dQ "
        "and dK with dV, of 7 in all; of 8 where dK and dV are apart."
    )
    rows = []
    for w in work:
        amounts = w["flops"] / 1e9, w["exponentials"] / 1e9, w["bytes"] / 1e6
        times = (1e3 * s for s in (*w["seconds"].values(), w["least_seconds"]))
        bound = max(w["seconds"], key=w["seconds"].get)
        rows.append([w["name"], *map(_short, (*amounts, *times)), bound])
    units = [f"{unit}, ms" for unit in work[0]["seconds"]]
    print_table(["pass", "GFLOP", "G exp2", "MB", *units, "at least, ms", "bound by"], rows)


def print_kernels(report: dict):
    from scripts.bench.report import print_table

    kernels, megabytes = report["kernels"], _short(report["temporary_bytes"] / 1e6)
    print(
        f"\nCompiled by {report['compiler']}: {megabytes} MB of temporaries beside inputs and "
        "outputs."
    )
    if not kernels:
        print("XLA generates its kernels; there are no others to inspect.")
        return
    columns = ("registers", "shared_memory", "stack", "spill_stores", "spill_loads")
    rows, loops = [], []
    for k in kernels:
        warnings = "; ".join(f"{code}: {text}" for code, text in k["warnings"].items())
        rows.append([k["name"], *(f"{k[name]:,}" for name in columns), warnings or "none"])
        for i, loop in enumerate(k["loops"], 1):
            overlap = loop["under_products"]
            overlap = "" if overlap is None else f"{overlap:.0%}"
            name = f"{k['name']}, loop {i}"
            loops.append([name, loop["instructions"], *loop["kinds"].values(), overlap])
    sizes = "registers", "shared memory, bytes", "stack", "spill stores", "spill loads"
    print_table(["kernel", *sizes, "warnings of ptxas"], rows)
    print(
        "\nInstructions per warp in a step of each loop over tiles, in the order of the code; "
        "without a mask\na step has fewest. Overlapped: exponentials that run while wgmma products "
        "run."
    )
    print_table(["", "all", *gpu_code.KINDS, "overlapped"], loops)


UNITS = """
The cycles of each unit of a multiprocessor over those of its tensor cores, in a step of each loop
over tiles: a unit above 1 binds it. Counted, not timed: without latencies, barriers, bank conflicts
and what TMA writes, and on an H100 at wgmma's rate, which mma does not reach. wgmma reads its right
operand from shared memory, and the left one where that is not in registers."""


def print_units(kernels: list[dict]):
    from scripts.bench.report import print_table

    rows = []
    for kernel in kernels:
        for i, loop in enumerate(kernel["loops"], 1):
            if units := loop["units"]:
                worst = max(units, key=units.get)
                bound = worst if units[worst] > 1 else "tensor cores"
                each = [f"{x:.2f}" for x in units.values()]
                part = loop["from_registers"]
                left = "mma" if part is None else f"wgmma, {part:.0%} of the left"
                rows.append([f"{kernel['name']}, loop {i}", left, *each, bound])
    print(UNITS if rows else "\nNo loop multiplies by tensor cores: no units to compare.")
    if rows:
        columns = "in registers", "shared memory", "issue", "exponentials", "bound by"
        print_table(["", *columns], rows)


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
