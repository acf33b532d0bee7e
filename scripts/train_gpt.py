"""python scripts/train_gpt.py [--data PATH] [--resume RUN] [--check]

Trains a small GPT on bytes of text with pallas_flash. Without an argument the text is the source of Python's standard library,
and a few minutes on two cores are enough. `--help` lists the rest.
"""

import argparse
import collections
import contextlib
import math
import pathlib
import signal
import sys
import time

import numpy as np
import tqdm

# jax and what stands on it are imported where they are used: --help and errors come at once
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # models/ and scripts/ are no installed packages

from scripts.gpt_run.folder import (
    curves,
    new_folder,
    open_checkpoints,
    read_config,
    restore,
    resumed_folder,
    save,
    write_csv,
    write_png,
)
from scripts.gpt_run.options import CHECK_SETTINGS, CHECK_TOLERANCE, fail, make_parser, report
from scripts.gpt_run.steps import decoder, evaluation, new_model, new_optimizer, new_state, train_step
from scripts.gpt_run.text import bigram_loss, held_out_windows, read_text


def main(argv=None):
    args = parse(argv)
    if args.check:
        check(args)
    else:
        train(args)


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


if __name__ == "__main__":
    main()
