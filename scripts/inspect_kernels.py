"""python scripts/inspect_kernels.py ['CALL'] [--gpu NAME] [--forward | --jvp] [--units] [--json]

Says what a call of flash_attention runs on a GPU, which need not be here: the implementation and
why not the others, its tiles, and what the compiler made of each kernel, forward and backward, or
forward mode. Nothing is run.

CALL has the sizes B, T, S, N, K, H and Hv, the dtype, and arguments of flash_attention, as Python:

  'K=4, is_causal=True'
  'B=2, T=1, S=8192, N=64, K=8, key_value_seq_lengths=[8000, 10]'
  'Hv=64, mask=Window(512, 512) | GlobalTokens(64), implementation="hopper", deterministic=False'
  'is_causal=True, query_segment_ids=np.tile(np.arange(T) // 512, (B, 1))'
  'K=1, H=576, value=None, value_size=512, mask=KeyLists(array(1, T, 1, 2048, dtype="int32"))'
  'bias=array(1, N, T, S), mask=array(1, 1, T, S, dtype=bool), sinks=array(N, dtype="float32")'

By default B=1, T=4096, S=T, N=16, K=N, H=128, Hv=H, dtype="bfloat16". What pallas_flash.masks and
.scores define is known by its name; array(...) is an array of any values.
"""

import argparse
import ast
import json
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
    """The options, and as `call` the arguments of flash_attention, with shapes of its arrays."""
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
    return dict(call=str(choice.problem), gpu=args.gpu._asdict()) | report


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
    from pallas_flash.masks import KeyLists

    floats, others, static = {}, {}, {}
    for name, x in args.call.items():
        if not hasattr(x, "shape") and not isinstance(x, KeyLists):
            static[name] = x
        elif name in ("query", "key", "value", "bias", "sinks"):
            floats[name] = x
        else:
            others[name] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
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
    if "not_compiled" in report:
        print(f"\nNothing was compiled for the {kind}: {report['not_compiled']}")
    if "failed" in report:
        print(f"\nIt does not compile for the {kind}: {report['failed']}")
    if "kernels" in report:
        print_kernels(report)


def print_kernels(report: dict):
    from scripts.bench.report import print_table

    kernels, megabytes = report["kernels"], f"{report['temporary_bytes'] / 1e6:,.3g}"
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
operand from shared memory, and the left one where that is not in registers. The products of tcgen05
have no sizes in the code: kernels/blackwell/NOTES.md has the units of those kernels."""


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
    print(UNITS if rows else "\nNo loop multiplies by mma or wgmma: no units to compare.")
    if rows:
        columns = "in registers", "shared memory", "issue", "exponentials", "bound by"
        print_table(["", *columns], rows)


if __name__ == "__main__":
    raise SystemExit(main())
