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

# models/ and scripts/ are not installed packages
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# what imports jax is imported where it is used: --help and errors come at once
from scripts.bench.options import Help
from scripts.gpt_run.console import (
    UserError,
    check_installed,
    one_line_errors,
    print_texts,
    run,
)
from scripts.gpt_run.options import (
    ATTENTION,
    COUNT,
    HELP_ATTENTION,
    HELP_TEMPERATURE,
    INTEGER,
    NOT_NEGATIVE,
    TEXT,
    add_options,
    real,
    run_settings,
)

OPTIONS = {
    "prompt": (
        TEXT | dict(action="append"),
        None,
        "what the text starts with; repeat it to continue several in one batch (default: stdin)",
    ),
    "max-bytes": (COUNT, 500, "the most to write after each prompt"),
    "stop": (TEXT, None, "end before this string"),
    "temperature": (NOT_NEGATIVE, 0.7, HELP_TEMPERATURE),
    "top-k": (COUNT, None, "sample from the N most likely bytes (default: all)"),
    "top-p": (
        real("above 0 and at most 1", lambda x: 0 < x <= 1),
        1.0,
        "sample from the fewest bytes whose probabilities add up to X",
    ),
    "seed": (INTEGER, 0, "random seed"),
    "attention": (ATTENTION, None, HELP_ATTENTION),
}


def main(argv=None):
    with one_line_errors("generate.py", "Try fewer prompts, or a smaller --max-bytes."):
        args = parse(argv)
        check_installed()
        settings = run_settings(args.run)
        settings.attention = args.attention
        prompts = read_prompts(args.prompt)
        tell(f"loads jax and the checkpoint of {args.run}")
        write(args, settings, prompts)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        formatter_class=Help,
        usage="%(prog)s RUN [--prompt TEXT]... [options]",
        description="Writes text with the last checkpoint of a run of train_gpt.py, as it is "
        "generated, and its speed to stderr. The text may be longer than the context: the model "
        "looks back as far as in training.",
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of the run")
    add_options(parser, OPTIONS)
    return parser.parse_args(argv)


def read_prompts(given: list[str] | None) -> list[bytes]:
    if given is None and sys.stdin.isatty():
        raise UserError("give --prompt TEXT, or the prompt on stdin.")
    prompts = [sys.stdin.buffer.read()] if given is None else [text.encode() for text in given]
    if not all(prompts):
        raise UserError("a prompt must be at least a byte long, from stdin or --prompt.")
    return prompts


def tell(text: str):
    print(text, file=sys.stderr, flush=True)


def write(args, settings, prompts: list[bytes]):
    from scripts.gpt_run.folder import load
    from scripts.gpt_run.model import Sampling, abstract_state, generate, generator_structure

    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    times = [time.perf_counter()]

    def timed(generated):
        for new in generated:
            times.append(time.perf_counter())
            yield new

    several = len(prompts) > 1
    headings = [f"--- prompt {i}\n" if several else "" for i in range(1, len(prompts) + 1)]
    try:
        structure = generator_structure(settings)
        parameters = load(args.run, abstract_state(settings))["parameters"]
        tell("compiles the model, for the prompts and for a byte")
        generated = generate(structure, parameters, prompts, args.max_bytes, sampling, args.seed)
        count = print_texts(prompts, headings, timed(generated), args.stop or "")
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--attention: {error}") from None
    start, first, *_, last = *times, time.perf_counter()
    tell(f"first byte after {first - start:.1f} s, {count / (last - first):,.0f} bytes/s")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly with the reader, e.g. head
    run(main)
