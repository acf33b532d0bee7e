"""The command line of train_gpt.py, what generate.py's shares with it, and how they speak to their
user."""

import argparse
import pathlib
from typing import Any

from scripts.bench.options import Help

BYTES = 256
# not kept with a run
NOT_SETTINGS = """
mesh simulate_devices hosts out resume eval_only check preset verbose tensorboard
prompt samples sample_length temperature taken
""".split()
# what the parameters' shapes follow from
MODEL = ("layers", "heads", "kv_heads", "features", "untied", "vocabulary")
PRESETS = dict(
    tiny=dict(layers=2, heads=2, features=64, context=64, batch=4, steps=300, eval_every=100),
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
# a context of several key blocks, and a length that no block divides
CHECK_SETTINGS = dict(
    layers=2, heads=2, features=64, context=300, batch=2, steps=50, dtype="float32"
)
CHECK_TOLERANCE = dict(float32=1e-4, bfloat16=4e-3)  # of the loss


def report(name: str, text: Any):
    print(f"{name:<11}" + str(text).replace("\n", "\n" + " " * 11), flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        formatter_class=Help,
        usage="%(prog)s [--data PATH] [--out FOLDER | --resume RUN | --eval-only RUN | --check] "
        "[options]",
        description="Trains a small GPT on bytes of text, with the attention of pallas_flash. "
        "Writes checkpoints and the loss "
        "curves (loss.csv, loss.png), and prints samples. Without options: on the source of "
        "Python's standard library, in a few minutes.",
    )
    group = parser.add_argument_group("run")
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="a new folder for the results (default: runs/gpt-1, -2, ...)",
    )
    add("--resume", type=pathlib.Path, metavar="RUN", help=HELP_RESUME)
    add("--eval-only", type=pathlib.Path, metavar="RUN", help=HELP_EVAL)
    add("--check", action="store_true", help=HELP_CHECK)
    add = group.add_argument
    add("--preset", choices=list(PRESETS), help=HELP_PRESET)
    add("--mesh", type=mesh_type, metavar="AXIS=N,...", help=HELP_MESH)
    add(
        "--simulate-devices",
        type=count_type,
        metavar="N",
        help="split this machine's CPU into N devices, to try a --mesh",
    )
    add("--hosts", type=hosts_type, nargs="?", const={}, metavar="ADDRESS,N,I", help=HELP_HOSTS)
    add(
        "--tensorboard",
        action="store_true",
        help="also write the curves for TensorBoard; give it again with --resume",
    )
    add(
        "--verbose",
        action="store_true",
        help="say which attention runs, with which tiles, and why not the others",
    )

    add = parser.add_argument_group("text").add_argument
    add("--data", type=absolute, metavar="PATH", help=HELP_DATA)

    add = parser.add_argument_group("model").add_argument
    add(
        "--attention",
        metavar="NAME",
        help="implementation of flash_attention (default: the best that runs here)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of the activations (default: bfloat16 on a GPU, else float32)",
    )
    add("--layers", type=count_type, default=4, metavar="N", help="blocks")
    add("--heads", type=count_type, default=4, metavar="N", help="query heads")
    add(
        "--kv-heads",
        type=count_type,
        metavar="N",
        help="key/value heads, shared by the query heads (default: one for each)",
    )
    add("--features", type=count_type, default=128, metavar="N", help="width of the model")
    add(
        "--untied",
        action="store_true",
        help="give the head weights of its own, not the embedding's",
    )
    add(
        "--vocabulary",
        type=whole(BYTES),
        default=BYTES,
        metavar="N",
        help="rows of the embedding; bytes use the first 256",
    )

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=count_type, default=1500, metavar="N", help="steps of the optimizer")
    add("--batch", type=count_type, default=4, metavar="N", help="sequences in a step")
    add(
        "--accumulate",
        type=count_type,
        default=1,
        metavar="N",
        help="parts into which a step cuts its batch, to save memory",
    )
    add("--context", type=count_type, default=128, metavar="N", help="bytes in a sequence")
    add(
        "--learning-rate",
        type=positive,
        default=3e-3,
        metavar="X",
        help="the peak, from which a cosine falls to a tenth",
    )
    add(
        "--warmup",
        type=whole(0),
        metavar="N",
        help="steps to the peak (default: a fifteenth of all)",
    )
    add(
        "--dropout",
        type=rate,
        default=0.0,
        metavar="X",
        help="rate of dropout: attention weights, embeddings, branches",
    )
    add(
        "--weight-decay",
        type=not_negative,
        default=0.1,
        metavar="X",
        help="weight decay of AdamW, for matrices alone",
    )
    add("--clip", type=positive, default=1.0, metavar="X", help="largest norm of the gradient")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the parameters, the batches and the sample",
    )
    add(
        "--eval-every",
        type=count_type,
        default=250,
        metavar="N",
        help="steps between measurements of the held-out loss",
    )
    add(
        "--save-every",
        type=count_type,
        default=100,
        metavar="N",
        help="steps between checkpoints: the most that a killed run loses",
    )

    add = parser.add_argument_group("sample").add_argument
    add("--prompt", default="def ", metavar="TEXT", help="what the sample begins with")
    add("--samples", type=count_type, default=3, metavar="N", help="how many samples")
    add(
        "--sample-length",
        type=count_type,
        metavar="N",
        help="bytes to write (default: as many as the context holds)",
    )
    add(
        "--temperature",
        type=not_negative,
        default=0.7,
        metavar="X",
        help="0 takes the likeliest byte every time",
    )
    return parser


AXES = ("data", "model", "context")  # of a mesh
HELP_MESH = """train on several devices, as data=2,model=2,context=2: the batch lies on data, and so
do parameters and optimizer (FSDP); heads and hidden features on model; each sequence on context.
Any of them, in any order; a run may go on with another"""
HELP_HOSTS = """this process is number I, from 0, of N that train together on the devices of all.
The first listens at ADDRESS, as host:1234. Without a value, the cluster says which
(jax.distributed.initialize). Start all with the same options but for I; all must see the folder of
--out or --resume, and the first writes it. A signal ends them at once; --resume goes on from the
last checkpoint"""
HELP_RESUME = """go on from the last checkpoint in this folder, with its settings; a larger --steps
extends it, and --attention or another machine may change its implementation. On a CPU the curves
are those of an unbroken run, bit for bit; on a GPU with XLA_FLAGS=--xla_gpu_deterministic_ops=true.
A run that is complete only writes its sample"""
HELP_EVAL = """measure the held-out loss of this run's last checkpoint on its text, or on that of
--data, print samples, and write nothing"""
HELP_PRESET = """settings for the options that are not given. tiny: for a first try; gpt2: the 124
million parameters of GPT-2, with its vocabulary though the text is bytes, its context of 1024, in
bfloat16, for a GPU"""
HELP_CHECK = f"""train a smaller model in lock-step with the attention and with "reference", and
fail where their losses differ by more than {CHECK_TOLERANCE["float32"]:g} of their size, or in
bfloat16 by {CHECK_TOLERANCE["bfloat16"]:g}. Unless given:
{", ".join(f"{name} {value}" for name, value in CHECK_SETTINGS.items())}"""
HELP_DATA = """a file, or a folder: every file in it that holds text. Of ten files one is held out;
of fewer, the last tenth of the text (default: the standard library of this Python, without its
tests and encodings)"""


def number_type(kind, least, above):
    def convert(text: str):
        number = kind(text)
        if not (number > least or (number == least and not above)):
            raise argparse.ArgumentTypeError(
                f"must be {'above' if above else 'at least'} {least}; got {text}"
            )
        return number

    convert.__name__ = kind.__name__  # argparse names it where text is no number
    return convert


def whole(least: int):
    return number_type(int, least, False)


count_type, positive, not_negative = (
    whole(1),
    number_type(float, 0, True),
    number_type(float, 0, False),
)


def mesh_type(text: str) -> dict[str, int]:
    """data=2,model=2,context=2: any of them, in any order."""
    sizes = dict(part.partition("=")[::2] for part in text.split(","))
    if (
        len(sizes) <= text.count(",")
        or not set(sizes) <= set(AXES)
        or not all(n.isdecimal() and int(n) for n in sizes.values())
    ):
        named = ", ".join(AXES)
        raise argparse.ArgumentTypeError(
            f"must be sizes of {named}, each at most once, as data=2,context=4; got {text!r}"
        )
    return {name: int(size) for name, size in sizes.items()}


def hosts_type(text: str) -> dict[str, Any]:
    """The arguments of jax.distributed.initialize."""
    address, *numbers = text.split(",")
    if (
        ":" not in address
        or len(numbers) != 2
        or not all(map(str.isdecimal, numbers))
        or int(numbers[1]) >= int(numbers[0])
    ):
        raise argparse.ArgumentTypeError(
            "must be an address, how many processes, and which of them, as host:1234,2,0; got "
            f"{text!r}"
        )
    return dict(
        coordinator_address=address, num_processes=int(numbers[0]), process_id=int(numbers[1])
    )


def rate(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 up to, not including, 1; got {text}")
    return number


def share(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0, and at most 1; got {text}")
    return number


def absolute(path: str) -> str:
    return str(pathlib.Path(path).resolve())  # the run may be resumed from elsewhere
