"""python scripts/train_gpt.py [--data PATH] [--resume RUN] [--check]

Trains a small GPT on bytes of text with pallas_flash. Without an argument the text is the source of Python's standard library,
and a few minutes on two cores are enough. `--help` lists the rest.
"""

import argparse
import collections
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import pathlib
import signal
import sys
import sysconfig
import time
from typing import Any, NamedTuple

import numpy as np
import tqdm

# jax and what stands on it are imported where they are used: --help and errors come at once
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # models/ is no installed package

VOCABULARY = 256  # bytes
HELD_OUT_BYTES = 65_536  # that the held-out loss is measured on
NOT_TEXT = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}  # tests, and tables of numbers
NOT_SETTINGS = {"out", "resume", "check", "prompt", "samples", "sample_length", "temperature"}  # may differ when a run is resumed
# a context of several key blocks, and a length that no block divides
CHECK_SETTINGS = dict(layers=2, heads=2, features=64, context=300, batch=2, steps=50, warmup=10, dtype="float32")
CHECK_TOLERANCE = dict(float32=1e-4, bfloat16=4e-3)  # of the loss


def main(argv=None):
    args = parse(argv)
    if args.check:
        check(args)
    else:
        train(args)


def fail(message: str):
    """Ends with exit status 1 and one line on stderr."""
    raise SystemExit(f"train_gpt.py: error: {message}")


def report(name: str, text: Any):
    print(f"{name:<11}" + str(text).replace("\n", "\n" + " " * 11), flush=True)


def train(args):
    import jax
    import jax.numpy as jnp

    text = read_text(args.data, args.context)
    check_sample(args)
    resolve(args)
    windows = held_out_windows(text, args.context)
    bigram = bigram_loss(text, windows)
    structure, parameters = new_model(args)
    optimizer = new_optimizer(args)
    folder = resumed_folder(args.resume, text) if args.resume else new_folder(args, text)
    size = sum(p.size for p in jax.tree.leaves(parameters))
    report("model", f"{size:,} parameters, {args.dtype}, on {jax.devices()[0].device_kind}")
    report("text", f"{text.source}\n{len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    report("bigram", f"{bigram:.4f} nats per byte on {windows[:, 1:].size:,} held-out bytes")

    with open_checkpoints(folder) as checkpoints:
        state = restore(checkpoints, new_state(args, parameters, optimizer))
        report("run", f"{folder}, from step {state['step']} on" if args.resume else folder)
        write_csv(folder, state)  # without the steps after the checkpoint
        data = jnp.asarray(text.train)
        step = train_step(args, structure, optimizer).lower(state, data).compile()  # now, lest it counts in the speed
        evaluate = evaluation(structure, jnp.asarray(windows))
        state, speed = run(args, state, lambda s: step(s, data), evaluate, lambda s: save(folder, checkpoints, s))
    write_png(folder, state, bigram)
    if state["step"] < args.steps:
        report("stopped", f"after step {state['step']} of {args.steps}; go on with --resume {folder}")
        raise SystemExit(128 + signal.SIGINT)
    print_samples(args, structure, state["parameters"])
    loss = float(state["held_out_losses"][-1])
    below = 1 - loss / bigram
    report(
        "held out",
        f"{loss:.4f} nats per byte, {abs(below):.1%} {'below' if below > 0 else 'ABOVE'} the bigram model's {bigram:.4f}",
    )
    if speed:
        report("speed", f"{speed:,.0f} tokens/s")
    report("files", f"{folder}: loss.png, loss.csv, checkpoints")


def check(args):
    """The same model, seed and batches with two implementations of attention: every step's losses must agree."""
    import jax
    import jax.numpy as jnp

    text = read_text(args.data, args.context)
    resolve(args)
    data, tolerance, worst = jnp.asarray(text.train), CHECK_TOLERANCE[args.dtype], 0.0
    report("check", f"{args.steps} steps in {args.dtype}; the losses must agree to {tolerance:g} of their size")
    print(f"step       {args.attention:<14}reference     difference")
    with jax.default_matmul_precision("highest"):  # else a GPU's rounding of inputs magnifies the smallest change
        sides = [trainer(argparse.Namespace(**vars(args) | dict(attention=name)), data) for name in (args.attention, "reference")]
        for number in range(1, args.steps + 1):
            loss, expected = (next(side) for side in sides)
            difference = abs(loss - expected) / abs(expected)
            worst, agree = max(worst, difference), difference <= tolerance  # nan does not agree
            if not agree or number % 5 == 0 or number == 1:
                print(f"{number:<11}{loss:<14.7f}{expected:<14.7f}{difference:.1e}", flush=True)
            if not agree:
                fail(
                    f"the losses of {args.attention} and reference part at step {number}: {difference:.1e} is over {tolerance:g}"
                )
    report("passed", f"largest difference {worst:.1e} of the loss")


def trainer(args, data):
    """Yields the loss of one step after the other."""
    structure, parameters = new_model(args)
    optimizer = new_optimizer(args)
    state, step = new_state(args, parameters, optimizer), train_step(args, structure, optimizer)
    while True:
        state, loss = step(state, data)
        yield float(loss)


def resolve(args):
    """Replaces the defaults that depend on the machine or on each other; prints what attention runs and why."""
    import jax
    import jax.numpy as jnp

    from pallas_flash import explain

    args.dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    args.kv_heads = args.kv_heads or args.heads
    N, K, H = args.heads, args.kv_heads, args.features // args.heads
    if args.features % (2 * N) or N % K:
        fail(f"--features must be a multiple of twice --heads, and --heads of --kv-heads; got {args.features}, {N} and {K}.")
    q, kv = (jax.ShapeDtypeStruct((args.batch, args.context, heads, H), jnp.dtype(args.dtype)) for heads in (N, K))
    try:
        explanation = explain(q, kv, kv, is_causal=True, implementation=args.attention)
    except (ValueError, NotImplementedError) as error:
        fail(f"--attention: {error}")
    args.attention = explanation.implementation
    report("attention", explanation)


def run(args, state, step, evaluate, save):
    """Takes the steps that are left; returns the state and tokens/s. Ctrl-C and SIGTERM stop it after a checkpoint."""
    first, tokens, begin = int(state["step"]), args.batch * args.context, time.perf_counter()
    size = dict(total=args.steps * tokens, initial=first * tokens)
    bar = tqdm.tqdm(**size, unit=" tokens", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)
    flying, speed = collections.deque(), 0.0  # losses that are not fetched yet, lest the device waits for Python
    with bar, stop_signals() as stopped:
        for done in range(first + 1, args.steps + 1):
            state, loss = step(state)
            flying.append(loss)
            if len(flying) > 4:
                bar.set_postfix(step=done, loss=f"{finite(flying.popleft()):.3f}", refresh=False)
            bar.update(tokens)
            last = done == args.steps or bool(stopped)  # read once: a later signal waits for the next step
            if done % args.eval_every == 0 or done == args.steps:
                state = evaluate(state)
                print_losses(args, state, first, begin)
            if done % args.save_every == 0 or last:
                save(state)
            speed = (done - first) * tokens / (time.perf_counter() - begin)
            if last:
                break
    return state, speed


def finite(loss) -> float:
    if not math.isfinite(loss := float(loss)):
        fail(f"the loss became {loss}; try a smaller --learning-rate.")
    return loss


def print_losses(args, state, first: int, begin: float):
    steps, train, held_out = curves(state)
    train = finite(np.mean(train[-args.eval_every :]))
    pace = (time.perf_counter() - begin) / (len(steps) - first)
    left = tqdm.tqdm.format_interval(pace * (args.steps - len(steps)))
    speed = f"{args.batch * args.context / pace:,.0f} tokens/s"
    tqdm.tqdm.write(f"step {len(steps):>6}/{args.steps}  training {train:.4f}  held out {held_out[-1]:.4f}  {speed}  {left} left")
    sys.stdout.flush()


@contextlib.contextmanager
def stop_signals():
    """A list that holds the first SIGINT or SIGTERM once it has come; a second one ends the process."""
    stopped, old = [], {}

    def stop(number, frame):
        stopped.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        old[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# --- the command line


def parse(argv) -> argparse.Namespace:
    """The settings: of the command line, else of the run to resume, or of --check, else the defaults."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.resume is None:
        return parser.parse_args(argv, argparse.Namespace(**(CHECK_SETTINGS if args.check else {})))
    saved = read_config(args.resume)["settings"]
    args = parser.parse_args(argv, argparse.Namespace(**saved))
    for name, value in saved.items():
        if getattr(args, name) != value:
            option = "--" + name.replace("_", "-")
            fail(f"{option} must be {value} as in {args.resume}; got {getattr(args, name)}. Leave it out, or start a new run.")
    return args


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        formatter_class=Help,
        usage="%(prog)s [--data PATH] [--out FOLDER | --resume RUN | --check] [options]",
        description="Trains a small GPT on bytes of text, with the attention of pallas_flash. Writes checkpoints and the loss "
        "curves (loss.csv, loss.png), and prints samples. Without options: on the source of "
        "Python's standard library, in a few minutes.",
    )
    add = parser.add_argument_group("run").add_mutually_exclusive_group().add_argument
    add("--out", type=pathlib.Path, metavar="FOLDER", help="a new folder for the results (default: runs/gpt-1, -2, ...)")
    add("--resume", type=pathlib.Path, metavar="RUN", help=HELP_RESUME)
    add("--check", action="store_true", help=HELP_CHECK)

    add = parser.add_argument_group("text").add_argument
    add("--data", type=absolute, metavar="PATH", help=HELP_DATA)

    add = parser.add_argument_group("model").add_argument
    add("--attention", metavar="NAME", help="implementation of flash_attention (default: the best that runs here)")
    add("--dtype", choices=["float32", "bfloat16"], help="of activations (default: bfloat16 on a GPU, else float32)")
    add("--layers", type=count_type, default=4, metavar="N", help="blocks")
    add("--heads", type=count_type, default=4, metavar="N", help="query heads")
    add("--kv-heads", type=count_type, metavar="N", help="key/value heads, shared by the query heads (default: one for each)")
    add("--features", type=count_type, default=128, metavar="N", help="width of the model")
    add("--untied", action="store_true", help="give the head weights of its own, not the embedding's")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=count_type, default=1500, metavar="N", help="steps of the optimizer")
    add("--batch", type=count_type, default=4, metavar="N", help="sequences a step")
    add("--context", type=count_type, default=128, metavar="N", help="bytes a sequence")
    add("--learning-rate", type=positive, default=3e-3, metavar="X", help="its peak, from which a cosine falls to a tenth")
    add("--warmup", type=count_type, default=100, metavar="N", help="steps to the peak")
    add("--weight-decay", type=not_negative, default=0.1, metavar="X", help="AdamW's, for matrices")
    add("--clip", type=positive, default=1.0, metavar="X", help="largest norm of the gradient")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters, the batches and the sample")
    add("--eval-every", type=count_type, default=250, metavar="N", help="steps from one held-out loss to the next")
    add(
        "--save-every",
        type=count_type,
        default=100,
        metavar="N",
        help="steps between checkpoints: the most that a killed run loses",
    )

    add = parser.add_argument_group("sample").add_argument
    add("--prompt", default="def ", metavar="TEXT", help="what the sample begins with")
    add("--samples", type=count_type, default=3, metavar="N", help="how many")
    add("--sample-length", type=count_type, metavar="N", help="bytes to write (default: as many as the context holds)")
    add("--temperature", type=not_negative, default=0.7, metavar="X", help="0 takes the likeliest byte every time")
    return parser


HELP_RESUME = """go on from the last checkpoint in this folder, with its settings. On a CPU the curves are those of an unbroken
run, bit for bit; on a GPU with XLA_FLAGS=--xla_gpu_deterministic_ops=true. A run that is complete only writes its sample"""
HELP_CHECK = f"""train a smaller model in lock-step with the attention and with "reference", and fail where their losses differ by
more than {CHECK_TOLERANCE["float32"]:g} of their size, or in bfloat16 by {CHECK_TOLERANCE["bfloat16"]:g}. Unless given:
{", ".join(f"{name} {value}" for name, value in CHECK_SETTINGS.items())}"""
HELP_DATA = """a file, or a folder: every file in it that holds text. Of ten files one is held out; of fewer, the last tenth of
the text (default: the standard library of this Python, without its tests and encodings)"""


def number_type(kind, least, above):
    def convert(text: str):
        number = kind(text)
        if not (number > least or (number == least and not above)):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {least}; got {text}")
        return number

    convert.__name__ = kind.__name__  # argparse names it where text is no number
    return convert


count_type, positive, not_negative = number_type(int, 1, False), number_type(float, 0, True), number_type(float, 0, False)


def absolute(path: str) -> str:
    return str(pathlib.Path(path).resolve())  # the run may be resumed from elsewhere


# --- the text


class Text(NamedTuple):
    train: Any  # uint8
    held_out: Any  # uint8
    source: str

    def fingerprint(self) -> str:
        return hashlib.sha256(self.train.tobytes() + b"|" + self.held_out.tobytes()).hexdigest()


def read_text(path: str | None, context: int) -> Text:
    root = pathlib.Path(path or sysconfig.get_paths()["stdlib"])
    if not root.exists():
        fail(f"--data must be a file or a folder; {root} does not exist.")
    files = [root] if root.is_file() else sorted(text_files(root, python_only=path is None))
    try:
        texts = [text for file in files if b"\0" not in (text := file.read_bytes())]
    except OSError as error:
        fail(f"--data: {error}")
    train, held_out = b"".join(t for i, t in enumerate(texts) if i % 10 != 9), b"".join(texts[9::10])
    if len(texts) < 10:
        cut = len(train) - len(train) // 10
        train, held_out = train[:cut], train[cut:]
    if min(len(train), len(held_out)) <= context:
        fail(
            f"--context {context} needs more than {context} bytes of training text and as many held out; the text of {root} has "
            f"{len(train):,} and {len(held_out):,}. Give more text or a smaller --context."
        )
    source = f"{root}, {len(texts):,} file{'s' if len(texts) > 1 else ''}"
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), source)


def text_files(root: pathlib.Path, python_only: bool):
    for file in root.rglob("*.py" if python_only else "*"):
        folders = file.relative_to(root).parts[:-1]
        if (python_only and NOT_TEXT.intersection(folders)) or any(part.startswith(".") for part in (*folders, file.name)):
            continue
        if file.is_file():
            yield file


def held_out_windows(text: Text, context: int):
    """uint8 [windows, context + 1], evenly spread; the last byte of each is only predicted."""
    count = max(1, min(HELD_OUT_BYTES, len(text.held_out) - 1) // context)
    starts = np.linspace(0, len(text.held_out) - context - 1, count).astype(int)
    return text.held_out[starts[:, None] + np.arange(context + 1)]


def bigram_loss(text: Text, windows) -> float:
    """Nats a byte on the windows, of the frequencies of byte pairs in the training text, each counted once more than it is."""
    pairs = text.train[:-1].astype(np.int64) * VOCABULARY + text.train[1:]
    counts = 1.0 + np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    surprise = -np.log(counts / counts.sum(1, keepdims=True))
    return float(surprise[windows[:, :-1], windows[:, 1:]].mean())


# --- the model and its training step, pure functions of a state


def new_model(args):
    """(structure, parameters) of a GPT from the seed."""
    from flax import nnx

    from models.gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        features=args.features,
        hidden_features=4 * args.features,
        tied=not args.untied,
        implementation=args.attention,
        dtype=args.dtype,
    )
    return nnx.split(GPT(config, rngs=nnx.Rngs(args.seed)))


def new_optimizer(args):
    import jax
    import optax

    warmup = min(args.warmup, args.steps)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, max(args.steps, warmup + 1), args.learning_rate / 10
    )
    is_matrix = lambda parameters: jax.tree.map(lambda p: p.ndim > 1, parameters)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=args.weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(args.clip), adamw)


def new_state(args, parameters, optimizer) -> dict:
    """All that a checkpoint holds. The curves are a part of it, so that a resumed run continues them bit for bit."""
    import jax.numpy as jnp

    return dict(
        step=jnp.int32(0),
        parameters=parameters,
        optimizer=optimizer.init(parameters),
        train_losses=jnp.full(args.steps, jnp.nan),
        held_out_losses=jnp.full(args.steps, jnp.nan),  # where it was measured
    )


def loss_of(structure, parameters, windows):
    """Mean nats a byte of windows [B, context + 1]."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    windows = windows.astype(jnp.int32)
    logits = nnx.merge(structure, parameters)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def train_step(args, structure, optimizer):
    """step(state, text) -> state, loss. The batch follows from the seed and the number of the step alone."""
    import jax
    import jax.numpy as jnp
    import optax

    def step(state, text):
        key = jax.random.fold_in(jax.random.key(args.seed), state["step"])
        starts = jax.random.randint(key, (args.batch, 1), 0, text.size - args.context)
        windows = text[starts + jnp.arange(args.context + 1)]
        loss, gradients = jax.value_and_grad(lambda p: loss_of(structure, p, windows))(state["parameters"])
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["parameters"])
        new = dict(
            step=state["step"] + 1,
            parameters=optax.apply_updates(state["parameters"], updates),
            optimizer=optimizer_state,
            train_losses=state["train_losses"].at[state["step"]].set(loss),
            held_out_losses=state["held_out_losses"],
        )
        return new, loss

    return jax.jit(step, donate_argnums=0)


def evaluation(structure, windows):
    """evaluate(state) -> state, with the held-out loss after its last step noted."""
    import jax

    groups = windows.reshape(-1, math.gcd(len(windows), 16), windows.shape[-1])  # few at once need little memory

    def evaluate(state):
        losses = jax.lax.map(lambda group: loss_of(structure, state["parameters"], group), groups)
        return state | dict(held_out_losses=state["held_out_losses"].at[state["step"] - 1].set(losses.mean()))

    return jax.jit(evaluate, donate_argnums=0)


# --- the run's folder: config.json, checkpoints/, loss.csv, loss.png


def new_folder(args, text: Text) -> pathlib.Path:
    folder, number = args.out, 1
    while folder is None or (args.out is None and folder.exists()):
        folder, number = pathlib.Path("runs", f"gpt-{number}"), number + 1
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        fail(f"--out must be a new or an empty folder; {folder} is not. Choose another, or --resume it if it is a run.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out: {error}")
    settings = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    config = dict(settings=settings, text=dict(source=text.source, sha256=text.fingerprint()))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def resumed_folder(folder: pathlib.Path, text: Text) -> pathlib.Path:
    was = read_config(folder)["text"]
    if was["sha256"] != text.fingerprint():
        fail(f"--resume needs the text that the run began with ({was['source']}); {text.source} differs. Start a new run.")
    return folder


def read_config(folder: pathlib.Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text())
        return dict(settings=config["settings"], text=config["text"])
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--resume must be the folder of a run, as runs/gpt-1; {folder} has no config.json that can be read.")


def write_whole(path: pathlib.Path, text: str):
    """All of it or nothing, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def open_checkpoints(folder: pathlib.Path):
    import orbax.checkpoint as ocp

    # not in the background: the next step overwrites the state, which was donated to it
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)


def restore(checkpoints, state: dict) -> dict:
    """The last checkpoint, or `state` where there is none yet."""
    import jax
    import orbax.checkpoint as ocp

    if checkpoints.latest_step() is None:
        return state
    return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))


def save(folder: pathlib.Path, checkpoints, state: dict):
    import orbax.checkpoint as ocp

    checkpoints.save(int(state["step"]), args=ocp.args.StandardSave(state))
    write_csv(folder, state)


def curves(state: dict):
    """(step, train loss, held-out loss or nan), one row for each step so far."""
    number = int(state["step"])
    return np.arange(1, number + 1), *(np.asarray(state[name])[:number] for name in ("train_losses", "held_out_losses"))


def write_csv(folder: pathlib.Path, state: dict):
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["step", "train_loss", "held_out_loss"])
    rows.writerows(
        (step, train, "" if math.isnan(held_out) else held_out) for step, train, held_out in zip(*curves(state), strict=True)
    )
    write_whole(folder / "loss.csv", file.getvalue())


def write_png(folder: pathlib.Path, state: dict, bigram: float):
    from matplotlib.figure import Figure

    steps, train, held_out = curves(state)
    window = max(1, len(train) // 50)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, train, color="C0", alpha=0.25, linewidth=0.8)
    smooth = np.convolve(train, np.ones(window) / window, "valid")
    axes.plot(steps[window - 1 :], smooth, color="C0", label=f"training, mean of {window} steps")
    measured = ~np.isnan(held_out)
    axes.plot(steps[measured], held_out[measured], "o-", color="C1", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram model, held out")
    axes.set(xlabel="step", ylabel="loss [nats per byte]", xlim=(0, steps[-1]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)


# --- the sample


def check_sample(args):
    prompt = len(args.prompt.encode())
    args.sample_length = args.sample_length or max(1, args.context - prompt)
    if not 0 < prompt <= args.context - args.sample_length:
        fail(
            f"--prompt and --sample-length must hold a byte or more each, and at most --context = {args.context} together; got "
            f"{prompt} and {args.sample_length}."
        )


def print_samples(args, structure, parameters):
    import jax

    prompt = np.tile(np.frombuffer(args.prompt.encode(), np.uint8), (args.samples, 1))
    decode = jax.jit(decoder(structure, args.sample_length, args.temperature))
    tokens = np.concatenate([prompt, decode(parameters, prompt, jax.random.key(args.seed))], 1).astype(np.uint8)
    for number, row in enumerate(tokens, 1):
        text = row.tobytes().decode(errors="replace")
        print(f"--- sample {number}\n" + "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
    print("---")


def decoder(structure, length: int, temperature: float):
    """decode(parameters, prompt [B, T], key) -> the next `length` tokens [B, length]; keys and values are computed once."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def decode(parameters, prompt, key):
        model = nnx.merge(structure, parameters)

        def step(carry, key):
            logits, caches = carry
            greedy = temperature == 0
            token = jnp.argmax(logits, -1) if greedy else jax.random.categorical(key, logits / temperature)
            logits, caches = model(token[:, None], caches)
            return (logits[:, -1], caches), token

        logits, caches = model(prompt.astype(jnp.int32), model.init_cache(len(prompt), prompt.shape[1] + length))
        _, tokens = jax.lax.scan(step, (logits[:, -1], caches), jax.random.split(key, length))
        return tokens.T

    return decode


if __name__ == "__main__":
    main()
