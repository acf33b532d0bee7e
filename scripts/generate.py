"""python scripts/generate.py RUN [--prompt TEXT]... [--temperature X] [--top-k N] [--top-p X]
[--stop TEXT]

Writes text with the model that scripts/train_gpt.py left in the folder RUN, byte by byte as it
comes. `--help` lists the rest.
"""

import argparse
import pathlib
import signal
import sys
import time

# jax and what stands on it are imported where they are used: --help and errors come at once
# models/ and scripts/ are no installed packages
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.bench.options import Help
from scripts.gpt_run.folder import open_checkpoints, read_config, restore, saved_steps
from scripts.gpt_run.generation import Row, Sampling, compiled, generate, printable
from scripts.gpt_run.options import count_type, not_negative, share
from scripts.gpt_run.steps import new_model, new_optimizer, new_state
from scripts.gpt_run.stops import Refused, one_line


def main(argv=None):
    with one_line("generate.py", "Try fewer prompts, or a smaller --max-bytes."):
        args = make_parser().parse_args(argv)
        settings = argparse.Namespace(
            **read_config(args.run, "RUN")["settings"] | dict(attention=args.attention)
        )
        prompts = read_prompts(args)
        write(args, settings, prompts)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        formatter_class=Help,
        usage="%(prog)s RUN [--prompt TEXT]... [options]",
        description="Writes text with the last checkpoint of a run of train_gpt.py. Each byte is "
        "written as it comes; stderr "
        "tells the speed. The model sees as many bytes back as in training; the text may be "
        "longer.",
    )
    add = parser.add_argument
    add(
        "run",
        type=pathlib.Path,
        metavar="RUN",
        help="a folder that train_gpt.py wrote, as runs/gpt-1",
    )
    add("--prompt", action="append", metavar="TEXT", help=HELP_PROMPT)
    add(
        "--max-bytes",
        type=count_type,
        default=500,
        metavar="N",
        help="the most to write after a prompt",
    )
    add("--stop", metavar="TEXT", help="end before this string, if the model writes it")
    add(
        "--temperature",
        type=not_negative,
        default=0.7,
        metavar="X",
        help="0 takes the likeliest byte every time",
    )
    add(
        "--top-k",
        type=count_type,
        metavar="N",
        help="draw from the N likeliest bytes alone (default: all)",
    )
    add(
        "--top-p",
        type=share,
        default=1.0,
        metavar="X",
        help="draw from the fewest bytes whose probabilities add up to X",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random draws")
    add(
        "--attention",
        metavar="NAME",
        help="implementation of flash_attention (default: the best that runs here)",
    )
    return parser


HELP_PROMPT = """what the text begins with; given several times, all are continued in one batch, and
equal ones differ (default: what comes on stdin)"""


def read_prompts(args) -> list[bytes]:
    if args.prompt is None and sys.stdin.isatty():
        raise Refused("--prompt TEXT must say what the text begins with, or stdin must bring it.")
    prompts = (
        [sys.stdin.buffer.read()]
        if args.prompt is None
        else [text.encode() for text in args.prompt]
    )
    if not all(prompts):
        raise Refused(
            "a prompt must hold a byte or more; "
            f"{'stdin' if args.prompt is None else 'one --prompt'} is empty."
        )
    return prompts


def write(args, settings, prompts: list[bytes]):
    """The text of each prompt to stdout: the first as it comes, the others as far as they are when
    theirs is the turn."""
    structure, parameters = read_model(args, settings)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    times = [time.perf_counter()]
    try:
        programs = compiled(structure, parameters, prompts, args.max_bytes, sampling, args.seed)
    except NotImplementedError as error:
        raise Refused(f"--attention: {error}") from None
    times.append(time.perf_counter())
    rows, steps = (
        [Row((args.stop or "").encode()) for _ in prompts],
        generate(programs, parameters, args.max_bytes),
    )
    show = lambda text: print(text, end="", flush=True)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True), 1):
        show(
            f"--- prompt {number}\n" * (len(prompts) > 1)
            + printable(prompt.decode(errors="replace"))
            + row.take()
        )
        while not row.is_done and (token := next(steps, None)) is not None:
            for each, byte in zip(rows, token, strict=True):
                each.add(int(byte))
            show(row.take())
            times.append(time.perf_counter())
        row.finish()
        show(row.take() + "\n")
    print(speed(times, sum(row.count for row in rows)), file=sys.stderr)


def read_model(args, settings):
    """Structure and parameters of the last checkpoint; it looks as far back as in training."""
    import jax

    if not saved_steps(args.run):
        raise Refused(f"RUN must have a checkpoint; {args.run} has none yet.")
    try:
        structure, parameters = new_model(settings, window=settings.context)
    except ValueError as error:
        raise Refused(f"--attention: {error}") from None
    with open_checkpoints(args.run, read_only=True) as checkpoints:
        new = jax.eval_shape(lambda: new_state(settings, parameters, new_optimizer(settings)))
        return structure, restore(args.run, checkpoints, new, read_only=True)["parameters"]


def speed(times: list[float], count: int) -> str:
    begun, ready, first, *_, last = times
    return (
        f"compiled in {ready - begun:.1f} s, first byte after {first - ready:.3f} s, "
        f"{count / (last - ready):,.0f} bytes/s"
    )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly with what reads it, as `head`
    main()
