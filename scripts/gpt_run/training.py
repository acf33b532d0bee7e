"""What train_gpt.py does: trains, evaluates a run, or checks an attention."""

import argparse
import collections
import contextlib
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import tqdm

from pallas_flash import explain, flash_attention
from scripts.gpt_run.console import UserError, deferred_signals, print_texts, report
from scripts.gpt_run.devices import check_memory, shardings, speed_format, unused_gpu
from scripts.gpt_run.folder import (
    Curves,
    Events,
    load,
    open_checkpoints,
    read_config,
    restore,
    save,
    to_csv,
    to_png,
    write_atomically,
    write_config,
)
from scripts.gpt_run.model import (
    Sampling,
    abstract_state,
    evaluation,
    generate,
    generator_structure,
    initial_state,
    learning_rate,
    model_structure,
    train_step,
)
from scripts.gpt_run.options import CHECK_TOLERANCE, SETTINGS
from scripts.gpt_run.text import Text, bigram_loss, held_out_windows

IN_FLIGHT = 4  # losses that are not fetched yet, so that the device does not wait for Python


def train(args, text: Text, folder: pathlib.Path):
    attention = resolve(args)
    is_first = jax.process_index() == 0
    windows = held_out_windows(text, args.context)
    bigram = bigram_loss(text, windows)
    structure = model_structure(args)
    shapes = abstract_state(args)
    describe_speed = speed_format(args, shapes["parameters"])
    report_model(args, attention, shapes["parameters"])
    sizes = f"{len(text.train):,} bytes to train on, {len(text.held_out):,} held out"
    report("text", f"{text.source}: {sizes}")
    report("bigram", f"{bigram:.4f} nats per byte on {windows[:, 1:].size:,} held-out bytes")
    data = jax.device_put(text.train, shardings(text.train))
    report("compiles", "the training step")
    step = train_step(args, structure).lower(shapes, data).compile()
    check_memory(step)
    evaluate = evaluation(structure, windows)

    with open_checkpoints(folder) as checkpoints:
        state, curves = restore(checkpoints, shapes) or (initial_state(args), Curves([], []))
        report("run", f"{folder}, after step {state['step']}" if args.resume else folder)
        if args.resume:
            report_changes(folder, args, text, attention, int(state["step"]))
        if is_first:
            settings = {name: getattr(args, name) for name in SETTINGS}
            write_config(folder, settings, attention, text)
        events = Events(folder) if args.tensorboard and is_first else None

        def save_all(state, curves):
            if is_first:  # before the checkpoint: a full disk has room for what is small
                write_atomically(folder / "loss.csv", to_csv(curves))
            save(checkpoints, state, curves)
            if events:
                events.write(curves)

        state, speed, signals = run_steps(
            args, state, curves, step, data, evaluate, save_all, describe_speed
        )
    if is_first:
        write_atomically(folder / "loss.png", to_png(curves, bigram))
    if signals and state["step"] < args.steps:
        report(
            "stopped",
            f"after step {state['step']} of {args.steps}; continue with --resume {folder}",
        )
        raise SystemExit(128 + signals[0])
    if jax.process_count() > 1:
        report("samples", f"print them with scripts/generate.py {folder}, in one process")
    else:
        print_samples(args, state["parameters"])
    report_loss(curves.held_out[-1][1], bigram)
    if speed:
        report("speed", describe_speed(speed))
    events = ", tensorboard" if args.tensorboard else ""
    report("files", f"{folder}: loss.png, loss.csv, checkpoints{events}")


def run_steps(args, state, curves: Curves, step, text, evaluate, save, describe_speed):
    """Takes the steps that are left, and notes their losses in `curves`. Returns the state, the
    speed, and the signals that ended it early, after a checkpoint."""
    first = len(curves.training)
    tokens = args.batch * args.context
    start = time.perf_counter()
    seconds = 0.0  # per step
    pending = collections.deque()
    signals = []
    size = dict(total=args.steps * tokens, initial=first * tokens)
    style = dict(unit=" tokens", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)
    # several processes stay in step: there the first signal ends one at once
    handler = deferred_signals() if jax.process_count() == 1 else contextlib.nullcontext([])
    with tqdm.tqdm(**size, **style) as bar, handler as received:
        for done in range(first + 1, args.steps + 1):
            state, loss = step(state, text)
            pending.append(loss)
            bar.update(tokens)
            signals = received[:1]  # read once: a later signal waits for the next step
            evaluates = done == args.steps or done % args.eval_every == 0
            saves = done == args.steps or done % args.save_every == 0 or signals
            while len(pending) > (0 if evaluates or saves else IN_FLIGHT):
                curves.training.append(finite(pending.popleft()))
                bar.set_postfix(loss=f"{curves.training[-1]:.3f}", refresh=False)
            if evaluates:
                curves.held_out.append([done, float(evaluate(state["parameters"]))])
            seconds = (time.perf_counter() - start) / (done - first)
            if evaluates:
                recent = curves.training[-args.eval_every :]
                left = tqdm.tqdm.format_interval(seconds * (args.steps - done))
                bar.write(
                    f"step {done:>6}/{args.steps}  training {sum(recent) / len(recent):.4f}  held "
                    f"out {curves.held_out[-1][1]:.4f}  {describe_speed(tokens / seconds)}  {left} "
                    "left"
                )
                sys.stdout.flush()
            if saves:
                save(state, curves)
            if signals:
                break
    return state, seconds and tokens / seconds, signals


def finite(loss) -> float:
    if not math.isfinite(loss := float(loss)):
        raise UserError(f"the loss became {loss}; try a smaller --learning-rate.")
    return loss


def report_changes(folder: pathlib.Path, args, text: Text, attention: str, done: int):
    """What is different in a run that continues; refuses another text."""
    config = read_config(folder)
    if done == args.steps:
        return
    if config["text"]["sha256"] != text.fingerprint():
        raise UserError(
            f"--resume needs the text that the run began with ({config['text']['source']}); "
            f"{text.source} differs. Start a new run."
        )
    if config["attention"] != attention:
        report("attention", f"{attention} from here on; until now it was {config['attention']}")
    before = argparse.Namespace(**config["settings"])
    if before.steps < args.steps:
        rates = [float(learning_rate(settings)(done)) for settings in (before, args)]
        report(
            "schedule",
            f"{args.steps} steps instead of {before.steps}: the cosine of the learning rate is "
            f"stretched, to {{1}} instead of {{0}} at step {done + 1}".format(*apart(*rates)),
        )


def apart(*numbers: float) -> list[str]:
    """The numbers in two digits, or in as many more as tell them apart."""
    digits = (n for n in range(2, 10) if len({f"{x:.{n}g}" for x in numbers}) == len({*numbers}))
    n = next(digits, 10)
    return [f"{x:.{n}g}" for x in numbers]


def evaluate(args, text: Text | None):
    """The held-out loss of a run's last checkpoint, if the text is there, and samples."""
    folder = args.eval_only
    attention = resolve(args)
    state = load(folder, abstract_state(args))
    report_model(args, attention, state["parameters"])
    report("run", f"{folder}, after step {state['step']} of {args.steps}")
    print_samples(args, state["parameters"])
    if text:
        changed = read_config(folder)["text"]["sha256"] != text.fingerprint()
        other = ", which is not what the run was trained on" if changed else ""
        report("text", f"{text.source}{other}")
        windows = held_out_windows(text, args.context)
        report("compiles", "the evaluation")
        loss = evaluation(model_structure(args), windows)(state["parameters"])
        report_loss(float(loss), bigram_loss(text, windows))


def report_model(args, attention: str, parameters):
    size = sum(p.size for p in jax.tree.leaves(parameters))
    device = jax.devices()[0].device_kind
    report("model", f"{size:,} parameters, {args.dtype}, attention {attention}, on {device}")


def report_loss(loss: float, bigram: float):
    side = "below" if loss < bigram else "ABOVE"
    percent = f"{abs(1 - loss / bigram):.1%}"
    report(
        "held out", f"{loss:.4f} nats per byte, {percent} {side} the bigram model's {bigram:.4f}"
    )


def print_samples(args, parameters):
    prompts = [args.prompt.encode()] * args.samples
    headings = [f"--- sample {i}\n" for i in range(1, args.samples + 1)]
    structure = generator_structure(args)
    sampling = Sampling(args.temperature)
    report("compiles", f"the model, for samples of {args.sample_length} bytes")
    generated = generate(structure, parameters, prompts, args.sample_length, sampling, args.seed)
    print_texts(prompts, headings, generated)
    print("---")


def check(args, text: Text):
    """Trains one model with two implementations of attention, by one seed and the same batches; the
    losses of every step must agree."""
    attention = resolve(args)
    tolerance = CHECK_TOLERANCE[args.dtype]
    largest = 0.0
    report("check", f"{args.steps} steps in {args.dtype}; relative tolerance {tolerance:g}")
    report("compiles", f"two training steps, with {attention} and with the reference")
    print(f"step       {attention:<14}reference     difference")
    # otherwise a GPU's rounding of inputs magnifies the smallest change
    with jax.default_matmul_precision("highest"):
        runs = [losses(args, text, name) for name in (args.attention, "reference")]
        for step, loss, expected in zip(range(1, args.steps + 1), *runs, strict=False):
            difference = abs(loss - expected) / abs(expected)
            largest = max(largest, difference)
            agrees = difference <= tolerance  # nan does not
            if not agrees or step % 5 == 0 or step == 1:
                print(f"{step:<11}{loss:<14.7f}{expected:<14.7f}{difference:.1e}", flush=True)
            if not agrees:
                raise UserError(
                    f"{attention} and reference differ at step {step}: {difference:.1e} of the "
                    f"loss is over {tolerance:g}"
                )
    report("passed", f"the losses differ by {largest:.1e} at most")


def losses(args, text: Text, attention: str | None):
    """Yields the loss of one step after the other."""
    args = argparse.Namespace(**vars(args) | dict(attention=attention))
    state = initial_state(args)
    step = train_step(args, model_structure(args))
    while True:
        state, loss = step(state, text.train)
        yield float(loss)


def resolve(args) -> str:
    """The implementation of attention that the model will choose, and --verbose says why. Replaces
    the defaults that depend on the machine."""
    if advice := unused_gpu():
        report("no GPU", advice)
    args.dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    if args.dtype == "bfloat16" and jax.default_backend() == "cpu":
        report(
            "dtype", "on a CPU float32 is faster: a default step took a third of bfloat16's time"
        )
    rows = args.batch // args.accumulate
    size = args.features // args.heads
    q, k = (
        jax.ShapeDtypeStruct((rows, args.context, heads, size), jnp.dtype(args.dtype))
        for heads in (args.heads, args.kv_heads)
    )
    call = dict(
        is_causal=True,
        implementation=args.attention,
        dropout_rate=args.dropout,
        dropout_rng=jax.random.key(args.seed),
    )
    try:
        # runs the check of kernels that explain does not
        jax.eval_shape(lambda q, k: flash_attention(q, k, k, **call), q, k)
        explanation = explain(q, k, k, **call)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--attention: {error}") from None
    if args.verbose:
        report("attention", explanation)
    return explanation.implementation
