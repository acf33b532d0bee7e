"""python scripts/train_gpt.py [--data PATH] [--resume RUN] [--eval-only RUN] [--preset NAME]
[--check]

Trains a small GPT on bytes of text with pallas_flash. Without an argument the text is the source of
Python's standard library, and a few minutes on two cores are enough. `--help` lists the rest.
"""

import argparse
import pathlib
import sys

# jax and what stands on it are imported where they are used: --help and errors come at once
# models/ and scripts/ are no installed packages
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.gpt_run.curves import Events, csv_of, png_of
from scripts.gpt_run.folder import (
    held,
    open_checkpoints,
    read_config,
    restore,
    save,
    saved_steps,
    write_config,
    write_whole,
    writing,
)
from scripts.gpt_run.generation import Row, Sampling, compiled, generate, printable
from scripts.gpt_run.hosts import are_several, everywhere, is_first, joined
from scripts.gpt_run.loop import run
from scripts.gpt_run.machine import keep_memory, must_fit, speed_in_words, why_no_gpu
from scripts.gpt_run.mesh import context_of, on_mesh, placed
from scripts.gpt_run.options import (
    CHECK_SETTINGS,
    CHECK_TOLERANCE,
    MODEL,
    PRESETS,
    make_parser,
    report,
)
from scripts.gpt_run.steps import (
    evaluation,
    learning_rate,
    new_model,
    new_optimizer,
    new_state,
    train_step,
)
from scripts.gpt_run.stops import Refused, one_line
from scripts.gpt_run.text import bigram_loss, held_out_windows, read_text


def main(argv=None):
    with one_line("train_gpt.py", "Try a smaller --batch or --context, or a larger --accumulate."):
        args = parse(argv)
        check_sizes(args)
        what = check if args.check else evaluate if args.eval_only else train
        with joined(args), on_mesh(args):
            what(args)


def parse(argv) -> argparse.Namespace:
    """The settings: of the command line, else of the run to go on with, else of --check or
    --preset, else the defaults."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.preset and (args.resume or args.eval_only):
        raise Refused(
            "--preset is for new runs; a run goes on with the settings that it began with. Leave "
            "it out."
        )
    if args.resume:
        saved = read_config(args.resume)["settings"]
        # a machine may lack the run's
        return parse_again(parser, argv, saved, args.resume, lambda name: name != "attention")
    if args.eval_only:
        saved = read_config(args.eval_only, "--eval-only")["settings"] | dict(attention=None)
        return parse_again(parser, argv, saved, args.eval_only, lambda name: name in MODEL)
    settings = PRESETS.get(args.preset, {})
    if args.check:
        settings = CHECK_SETTINGS | settings | dict(steps=CHECK_SETTINGS["steps"])
    return parser.parse_args(argv, argparse.Namespace(**settings))


def parse_again(parser, argv, saved: dict, run: pathlib.Path, fixed) -> argparse.Namespace:
    """With a run's settings as defaults; those that are `fixed` stay as they are, and steps may be
    added."""
    args = parser.parse_args(argv, argparse.Namespace(**saved))
    for name, value in saved.items():
        if (
            not fixed(name)
            or (got := getattr(args, name)) == value
            or (name == "steps" and got > value)
        ):
            continue
        option, more = "--" + name.replace("_", "-"), " or more," * (name == "steps")
        raise Refused(
            f"{option} must be {value}{more} as in {run}; got {got}. Leave it out, or start a new "
            "run."
        )
    return args


def check_sizes(args):
    """What can be told without jax; replaces the defaults that follow from other settings."""
    args.kv_heads = args.kv_heads or args.heads
    N, K = args.heads, args.kv_heads
    preset = f", with --preset {args.preset}" if args.preset else ""
    if args.features % (2 * N) or N % K:
        message = "--features must be a multiple of twice --heads, and --heads of --kv-heads"
        raise Refused(f"{message}; got {args.features}, {N} and {K}{preset}.")
    if args.batch % args.accumulate:
        raise Refused(
            f"--batch must be a multiple of --accumulate; got {args.batch} and "
            f"{args.accumulate}{preset}."
        )
    args.warmup = args.steps // 15 if args.warmup is None else args.warmup
    if args.warmup >= args.steps:
        raise Refused(
            f"--warmup must be below --steps = {args.steps}; got {args.warmup}. Left out, it is a "
            "fifteenth of them."
        )
    prompt = len(args.prompt.encode())
    args.sample_length = args.sample_length or max(1, args.context - prompt)
    if not 0 < prompt <= args.context - args.sample_length:
        raise Refused(
            "--prompt and --sample-length must hold a byte or more each, and at most --context = "
            f"{args.context} together; got "
            f"{prompt} and {args.sample_length}."
        )


def train(args):
    text = read_text(args.data, args.context)
    with held(args) as folder:
        resolve(args)
        train_in(folder, args, text)


def train_in(folder: pathlib.Path, args, text):
    import jax.numpy as jnp

    windows = held_out_windows(text, args.context)
    bigram = bigram_loss(text, windows)
    structure, parameters = new_model(args, context=context_of(args))
    optimizer = new_optimizer(args)
    words = speed_in_words(args, parameters)
    print_model(args, parameters)
    report(
        "text",
        f"{text.source}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out",
    )
    report("bigram", f"{bigram:.4f} nats per byte on {windows[:, 1:].size:,} held-out bytes")
    state, data = placed(new_state(args, parameters, optimizer)), everywhere(text.train)
    # now, lest it counts in the speed
    step = train_step(args, structure, optimizer).lower(state, data).compile()
    must_fit(step)
    evaluate = evaluation(structure, jnp.asarray(windows))
    if not args.resume:
        write_config(folder, args, text)

    with open_checkpoints(folder) as checkpoints:
        state = restore(folder, checkpoints, state)
        report("run", f"{folder}, from step {state['step']} on" if args.resume else folder)
        if args.resume:
            go_on(folder, args, text, int(state["step"]))
        with writing(folder):
            # without the steps after the checkpoint
            write_whole(folder / "loss.csv", csv_of(state))
            write_events = (
                Events(folder).write if args.tensorboard and is_first() else lambda state: None
            )

        def save_all(state):
            save(folder, checkpoints, state)
            with writing(folder):
                write_events(state)

        state, speed, stopped = run(args, state, lambda s: step(s, data), evaluate, save_all, words)
    with writing(folder):
        write_whole(folder / "loss.png", png_of(state, bigram))
    if stopped and state["step"] < args.steps:
        report(
            "stopped", f"after step {state['step']} of {args.steps}; go on with --resume {folder}"
        )
        raise SystemExit(128 + stopped[0])
    if are_several():
        report(
            "sample",
            f"scripts/generate.py {folder} writes some: the parameters lie with all processes",
        )
    else:
        print_samples(args, structure, state["parameters"])
    print_loss(state["held_out_losses"][-1], bigram)
    if speed:
        report("speed", words(speed))
    report(
        "files",
        f"{folder}: loss.png, loss.csv, checkpoints{', tensorboard' if args.tensorboard else ''}",
    )


def go_on(folder: pathlib.Path, args, text, done: int):
    """Whether the run may go on; says what changes with more steps, and on another machine."""
    was = read_config(folder)
    if done < args.steps and was["text"]["sha256"] != text.fingerprint():
        source = was["text"]["source"]
        raise Refused(
            f"--resume needs the text that the run began with ({source}); {text.source} differs. "
            "Start a new run."
        )
    before = argparse.Namespace(**was["settings"])
    is_longer, is_other = (
        before.steps < args.steps,
        done < args.steps and was["attention"] != args.taken,
    )
    if is_other:
        report(
            "attention",
            f"{args.taken} from here on, chosen anew; until now it was {was['attention']}",
        )
    if is_longer:
        rates = [float(learning_rate(settings)(done)) for settings in (before, args)]
        change = (
            f"{args.steps} steps in place of {before.steps}: the cosine of the learning rate "
            "is as long, which is now"
        )
        report("schedule", f"{change} {rates[1]:.2g} and not {rates[0]:.2g} at step {done + 1}")
    if is_longer or is_other:
        write_config(folder, args, text)


def evaluate(args):
    """A run's last checkpoint: the held-out loss, where the text is there, and samples. Writes
    nothing."""
    import jax
    import jax.numpy as jnp

    folder, text = args.eval_only, None
    if not saved_steps(folder):
        raise Refused(f"--eval-only needs a checkpoint; {folder} has none yet.")
    try:
        text = read_text(args.data, args.context)
    except (Refused, OSError) as error:
        report("text", f"{error} Without it there is no held-out loss.")
    resolve(args)
    structure, parameters = new_model(args, context=context_of(args))
    print_model(args, parameters)
    with open_checkpoints(folder, read_only=True) as checkpoints:
        new = jax.eval_shape(lambda: new_state(args, parameters, new_optimizer(args)))
        state = restore(folder, checkpoints, new, read_only=True)
    report("run", f"{folder}, after step {state['step']} of {args.steps}")
    print_samples(args, structure, state["parameters"])
    if text:
        changed = read_config(folder, "--eval-only")["text"]["sha256"] != text.fingerprint()
        report(
            "text",
            f"{text.source}{', which is not what the run was trained on' if changed else ''}",
        )
        windows = held_out_windows(text, args.context)
        measured = evaluation(structure, jnp.asarray(windows))(state)
        print_loss(measured["held_out_losses"][measured["step"] - 1], bigram_loss(text, windows))


def print_model(args, parameters):
    import jax

    size = sum(p.size for p in jax.tree.leaves(parameters))
    report(
        "model",
        f"{size:,} parameters, {args.dtype}, attention {args.taken}, on "
        f"{jax.devices()[0].device_kind}",
    )


def print_loss(loss, bigram: float):
    below = 1 - float(loss) / bigram
    against = (
        f"{abs(below):.1%} {'below' if below > 0 else 'ABOVE'} the bigram model's {bigram:.4f}"
    )
    report("held out", f"{float(loss):.4f} nats per byte, {against}")


def check(args):
    """The same model, seed and batches with two implementations of attention: every step's losses
    must agree."""
    import jax
    import jax.numpy as jnp

    text = read_text(args.data, args.context)
    resolve(args)
    data, tolerance, worst = jnp.asarray(text.train), CHECK_TOLERANCE[args.dtype], 0.0
    report(
        "check",
        f"{args.steps} steps in {args.dtype}; the losses must agree to {tolerance:g} of their size",
    )
    print(f"step       {args.taken:<14}reference     difference")
    # else a GPU's rounding of inputs magnifies the smallest change
    with jax.default_matmul_precision("highest"):
        sides = [
            trainer(argparse.Namespace(**vars(args) | dict(attention=name)), data)
            for name in (args.attention, "reference")
        ]
        for number in range(1, args.steps + 1):
            loss, expected = (next(side) for side in sides)
            difference = abs(loss - expected) / abs(expected)
            worst, agree = max(worst, difference), difference <= tolerance  # nan does not agree
            if not agree or number % 5 == 0 or number == 1:
                print(f"{number:<11}{loss:<14.7f}{expected:<14.7f}{difference:.1e}", flush=True)
            if not agree:
                raise Refused(
                    f"the losses of {args.taken} and reference part at step {number}: "
                    f"{difference:.1e} is over {tolerance:g}"
                )
    report("passed", f"largest difference {worst:.1e} of the loss")


def trainer(args, data):
    """Yields the loss of one step after the other."""
    structure, parameters = new_model(args, context=context_of(args))
    optimizer = new_optimizer(args)
    state, step = (
        placed(new_state(args, parameters, optimizer)),
        train_step(args, structure, optimizer),
    )
    while True:
        state, loss = step(state, data)
        yield float(loss)


def resolve(args):
    """Replaces the defaults that depend on the machine, and finds which attention is taken; with
    --verbose says why. The model's calls choose it again: named, it would not be checked."""
    import jax
    import jax.numpy as jnp

    from pallas_flash import explain, flash_attention

    if reason := why_no_gpu():
        report("no GPU", f"the NVIDIA GPU of this machine is not used, the CPU is: {reason}")
    args.dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    N, K, H = args.heads, args.kv_heads, args.features // args.heads
    q, kv = (
        jax.ShapeDtypeStruct(
            (args.batch // args.accumulate, args.context, heads, H), jnp.dtype(args.dtype)
        )
        for heads in (N, K)
    )
    call = dict(
        is_causal=True,
        implementation=args.attention,
        dropout_rate=args.dropout,
        dropout_rng=jax.random.key(args.seed),
    )
    try:
        # checks what it takes
        jax.eval_shape(lambda q, kv: flash_attention(q, kv, kv, **call), q, kv)
        explanation = explain(q, kv, kv, **call)
    except (ValueError, NotImplementedError) as error:
        raise Refused(f"--attention: {error}") from None
    args.taken = explanation.implementation
    if args.verbose:
        report("attention", explanation)


def print_samples(args, structure, parameters):
    prompts, sampling = [args.prompt.encode()] * args.samples, Sampling(args.temperature)
    programs = compiled(structure, parameters, prompts, args.sample_length, sampling, args.seed)
    rows = [Row() for _ in prompts]
    for token in generate(programs, parameters, args.sample_length):
        for row, byte in zip(rows, token, strict=True):
            row.add(int(byte))
    for number, row in enumerate(rows, 1):
        row.finish()
        print(f"--- sample {number}\n{printable(args.prompt)}{row.take()}")
    print("---")


if __name__ == "__main__":
    keep_memory()  # here, since a caller of main() has a memory of its own
    main()
