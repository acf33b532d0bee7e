"""The command line of train_gpt.py. An option is one row of OPTIONS, which its group makes a part
of the model, a setting that a run keeps, or neither."""

import argparse
import pathlib
import re

from scripts.bench.options import Help
from scripts.gpt_run.console import UserError
from scripts.gpt_run.folder import read_config

BYTES = 256
# of flash_attention, which cannot be asked before jax is there
IMPLEMENTATIONS = (
    "hopper blackwell ampere triton blockwise reference flash1 standard xla cudnn".split()
)
AXES = ("data", "model", "context")  # of a mesh
PRESETS = dict(
    tiny=dict(layers=2, heads=2, features=64, context=64, batch=8, steps=800, eval_every=200),
    gpt2=dict(
        layers=12,
        heads=12,
        features=768,
        vocabulary=50304,
        context=1024,
        dtype="bfloat16",
        batch=64,
        accumulate=4,
        steps=5000,
        learning_rate=6e-4,
        save_every=250,
    ),
)
# of --check: several blocks of keys, and a length that is a multiple of no block
CHECK = dict(layers=2, heads=2, features=64, context=300, batch=2, steps=50, dtype="float32")
CHECK_TOLERANCE = dict(float32=1e-4, bfloat16=4e-3)  # of the loss


def bounded(kind: type, bounds: str, holds):
    """A `type` of argparse: numbers for which `holds`."""

    def convert(text: str):
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {bounds}; got {text}")
        return value

    convert.__name__ = kind.__name__  # in argparse's own message for other text
    return convert


def integer(least: int) -> dict:
    return dict(type=bounded(int, f"at least {least}", lambda n: n >= least), metavar="N")


def real(bounds: str, holds) -> dict:
    return dict(type=bounded(float, bounds, holds), metavar="X")


def mesh_sizes(text: str) -> dict[str, int]:
    items = [re.fullmatch(rf"({'|'.join(AXES)})=([1-9]\d*)", item) for item in text.split(",")]
    sizes = {item[1]: int(item[2]) for item in items if item}
    if len(sizes) < len(items):
        raise argparse.ArgumentTypeError(
            f"must give each of {', '.join(AXES)} at most one size, e.g. data=2,context=4; got "
            f"{text!r}"
        )
    return sizes


def host_addresses(text: str) -> dict[str, str | int]:
    """The arguments of jax.distributed.initialize."""
    found = re.fullmatch(r"(.*:.*),(\d+),(\d+)", text)
    if not found or int(found[3]) >= int(found[2]):
        raise argparse.ArgumentTypeError(
            "must be an address, the number of processes, and this process's index, e.g. "
            f"host:1234,2,0; got {text!r}"
        )
    return dict(coordinator_address=found[1], num_processes=int(found[2]), process_id=int(found[3]))


def absolute(path: str) -> str:
    return str(pathlib.Path(path).resolve())  # the run may be resumed from another directory


COUNT, INTEGER, FLAG = integer(1), dict(type=int, metavar="N"), dict(action="store_true")
POSITIVE = real("above 0", lambda x: x > 0)
NOT_NEGATIVE = real("at least 0", lambda x: x >= 0)
RATE = real("at least 0 and below 1", lambda x: 0 <= x < 1)
RUN = dict(type=pathlib.Path, metavar="RUN")
TEXT, ATTENTION = dict(metavar="TEXT"), dict(metavar="NAME", choices=IMPLEMENTATIONS)

HELP_RESUME = """continue from the last checkpoint in this folder, with its settings. A larger
--steps extends the run, and --attention may change the implementation. The curves are those of an
uninterrupted run, bit for bit on a CPU, and on a GPU with
XLA_FLAGS=--xla_gpu_deterministic_ops=true. A finished run only prints its samples"""
HELP_EVAL = """measure the held-out loss of this run's last checkpoint, on the run's text or that of
--data, and print samples; writes nothing"""
HELP_CHECK = f"""train a smaller model in lockstep with the chosen attention and with the reference,
and fail if their losses differ by more than {CHECK_TOLERANCE["float32"]:g}, relative (bfloat16:
{CHECK_TOLERANCE["bfloat16"]:g}). Defaults: {", ".join(f"{k} {v}" for k, v in CHECK.items())}"""
HELP_PRESET = """defaults for the options not given. tiny: a first try,
well below the bigram model in under a minute on two CPU cores; gpt2: GPT-2's 124 million
parameters and context of 1024 in bfloat16, for a GPU. It has GPT-2's vocabulary too, although the
text is bytes"""
HELP_MESH = """train on several devices, e.g. data=2,model=2,context=2 (any of the three, in any
order). data shards the batch, the parameters and the optimizer state (FSDP); model shards the heads
and the hidden features; context shards each sequence. A run may be resumed on another mesh"""
HELP_HOSTS = """train on the devices of N processes together; this is process I, counted from 0, and
process 0 listens at ADDRESS, e.g. host:1234. Without a value, the cluster provides all three
(jax.distributed.initialize). Start every process with the same options except for I; all must see
the folder of --out or --resume, which process 0 writes. A signal ends them at once; --resume
continues from the last checkpoint"""
HELP_DATA = """a file, or a folder of which every text file is read. Of ten or more files every
tenth is held out; of fewer, the last tenth of the text (default: the standard library of this
Python, without its tests and encodings)"""
HELP_ATTENTION = "implementation of flash_attention (default: the best that runs here)"
HELP_TEMPERATURE = "sampling temperature; 0 always takes the most likely byte"

MODES = {  # that exclude each other
    "out": (
        RUN | dict(metavar="FOLDER"),
        None,
        "new folder for the results (default: runs/gpt-1, runs/gpt-2, ...)",
    ),
    "resume": (RUN, None, HELP_RESUME),
    "eval-only": (RUN, None, HELP_EVAL),
    "check": (FLAG, False, HELP_CHECK),
}
OPTIONS = {
    "run": {
        "preset": (dict(choices=list(PRESETS)), None, HELP_PRESET),
        "mesh": (dict(type=mesh_sizes, metavar="AXIS=N,..."), None, HELP_MESH),
        "simulate-devices": (COUNT, None, "emulate N devices on the CPU, to try --mesh"),
        "hosts": (
            dict(type=host_addresses, nargs="?", const={}, metavar="ADDRESS,N,I"),
            None,
            HELP_HOSTS,
        ),
        "tensorboard": (FLAG, False, "also write TensorBoard events; repeat it with --resume"),
        "verbose": (
            FLAG,
            False,
            "print which attention runs, its tile sizes, and why the others do not",
        ),
    },
    "text": {"data": (dict(type=absolute, metavar="PATH"), None, HELP_DATA)},
    "model": {
        "layers": (COUNT, 4, "transformer blocks"),
        "heads": (COUNT, 4, "query heads"),
        "kv-heads": (COUNT, None, "key/value heads (default: as many as query heads)"),
        "features": (COUNT, 128, "model width"),
        "untied": (FLAG, False, "do not tie the input and output embeddings"),
        "vocabulary": (integer(BYTES), BYTES, "rows of the embedding; bytes use the first 256"),
    },
    "training": {
        "attention": (ATTENTION, None, HELP_ATTENTION),
        "dtype": (
            dict(choices=list(CHECK_TOLERANCE)),
            None,
            "dtype of the activations (default: bfloat16 on a GPU, otherwise float32)",
        ),
        "steps": (COUNT, 1500, "optimizer steps"),
        "batch": (COUNT, 4, "sequences per step"),
        "accumulate": (COUNT, 1, "gradient-accumulation steps per batch, to save memory"),
        "context": (COUNT, 128, "bytes per sequence"),
        "learning-rate": (POSITIVE, 3e-3, "peak learning rate; a cosine decays it to a tenth"),
        "warmup": (integer(0), None, "steps of linear warmup (default: a fifteenth of --steps)"),
        "dropout": (
            RATE,
            0.0,
            "dropout rate of attention weights, embeddings and residual branches",
        ),
        "weight-decay": (NOT_NEGATIVE, 0.1, "AdamW weight decay, of matrices only"),
        "clip": (POSITIVE, 1.0, "maximum global norm of the gradient"),
        "seed": (INTEGER, 0, "random seed of parameters, batches, dropout and samples"),
        "eval-every": (COUNT, 250, "steps between evaluations of the held-out loss"),
        "save-every": (COUNT, 100, "steps between checkpoints: the most that a killed run loses"),
    },
    "sample": {
        "prompt": (TEXT, "def ", "what each sample starts with"),
        "samples": (COUNT, 3, "number of samples"),
        "sample-length": (COUNT, None, "bytes per sample (default: what the context has room for)"),
        "temperature": (NOT_NEGATIVE, 0.7, HELP_TEMPERATURE),
    },
}


def names(*groups: str) -> list[str]:
    return [name.replace("-", "_") for group in groups for name in OPTIONS[group]]


SETTINGS = names("text", "model", "training")  # that a run keeps


def add_options(group, rows: dict):
    for name, (kind, default, help) in rows.items():
        group.add_argument(f"--{name}", **kind, default=default, help=help)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        formatter_class=Help,
        usage="%(prog)s [--data PATH] [--out FOLDER | --resume RUN | --eval-only RUN | --check] "
        "[options]",
        description="Trains a small GPT on bytes of text with pallas_flash. Writes checkpoints and "
        "loss curves (loss.csv, loss.png), and prints samples. Without options, trains on the "
        "source of Python's standard library, in a few minutes on two CPU cores.",
    )
    for title, rows in OPTIONS.items():
        group = parser.add_argument_group(title)
        if title == "run":
            add_options(group.add_mutually_exclusive_group(), MODES)
        add_options(group, rows)
    return parser


def parse(argv=None) -> argparse.Namespace:
    """The command line; what it leaves out comes from the run to continue or to evaluate, else from
    --check and --preset."""
    parser = make_parser()
    args = parser.parse_args(argv)
    run = args.resume or args.eval_only
    fixed = []
    defaults = PRESETS.get(args.preset, {})
    if args.check:
        defaults = CHECK | defaults | dict(steps=CHECK["steps"])
    if run and args.preset:
        raise UserError("--preset is for new runs; a run keeps its settings. Leave it out.")
    if run:
        # this machine may lack the attention of the run
        defaults = read_config(run)["settings"] | (dict(attention=None) if args.eval_only else {})
        fixed = names("model") if args.eval_only else [n for n in SETTINGS if n != "attention"]
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    for name in fixed:
        given = getattr(args, name)
        saved = parser.get_default(name)
        extends = name == "steps" and given > saved
        if given != saved and not extends:
            raise UserError(
                f"--{name.replace('_', '-')} must be {saved}{' or more,' * (name == 'steps')} as "
                f"in {run}; got {given}. Leave it out, or start a new run."
            )
    return validate(args)


def run_settings(run: pathlib.Path) -> argparse.Namespace:
    """The settings of a run, for another program."""
    parser = make_parser()
    parser.set_defaults(**read_config(run)["settings"])
    return parser.parse_args([])


def describe(args) -> str:
    """What it is about to do."""
    if args.eval_only:
        return f"evaluates {args.eval_only}"
    if args.check:
        return f"compares {args.steps} steps with those of the reference"
    size = f"{args.steps:,} steps of {args.batch} x {args.context} bytes"
    return f"continues {args.resume} to {size}" if args.resume else f"trains {size}"


def validate(args) -> argparse.Namespace:
    """Adds defaults that follow from other settings; refuses sizes that do not fit together."""
    args.kv_heads = args.kv_heads or args.heads
    mesh = dict.fromkeys(AXES, 1) | (args.mesh or {})
    preset = f", with --preset {args.preset}" if args.preset else ""
    if args.features % (2 * args.heads):
        raise UserError(
            f"--features must be a multiple of twice --heads; got {args.features} and {args.heads} "
            f"heads{preset}."
        )
    for option, size, other, divisor in (
        ("--heads", args.heads, "--kv-heads", args.kv_heads),
        ("--batch", args.batch, "--accumulate", args.accumulate),
        ("--batch / --accumulate", args.batch // args.accumulate, "data in --mesh", mesh["data"]),
        ("--kv-heads", args.kv_heads, "model in --mesh", mesh["model"]),
        ("--context", args.context, "context in --mesh", mesh["context"]),
    ):
        if size % divisor:
            raise UserError(
                f"{option} must be a multiple of {other}; got {size} and {divisor}{preset}."
            )
    args.warmup = args.steps // 15 if args.warmup is None else args.warmup
    if args.warmup >= args.steps:
        raise UserError(
            f"--warmup must be below --steps = {args.steps}; got {args.warmup}. Left out, it is a "
            "fifteenth of them."
        )
    prompt = len(args.prompt.encode())
    args.sample_length = args.sample_length or max(1, args.context - prompt)
    if not 0 < prompt <= args.context - args.sample_length:
        raise UserError(
            "--prompt and --sample-length must be at least a byte each and fit in --context = "
            f"{args.context} together; got {prompt} and {args.sample_length}."
        )
    return args
