"""python scripts/train_gpt.py [--data PATH] [--resume RUN] [--eval-only RUN] [--preset NAME]
[--check]

Trains a small GPT on bytes of text with pallas_flash. Without options, trains on the source of
Python's standard library, in a few minutes on two CPU cores. `--help` lists the rest.
"""

import contextlib
import ctypes
import pathlib
import sys

# models/ and scripts/ are not installed packages
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# those that import jax are imported where they are used: --help and errors come at once
from scripts.gpt_run.console import UserError, check_installed, one_line_errors, report, run
from scripts.gpt_run.folder import open_folder
from scripts.gpt_run.options import describe, parse
from scripts.gpt_run.text import read_text


def main(argv=None):
    hint = "Try a smaller --batch or --context, or a larger --accumulate."
    with one_line_errors("train_gpt.py", hint):
        args = parse(argv)
        check_installed()
        report("start", f"{describe(args)}: reads the text and loads jax")
        text = read_text_or_report(args)
        with open_devices(args), contextlib.ExitStack() as stack:
            trains = not (args.check or args.eval_only)
            folder = stack.enter_context(open_folder(args)) if trains else None
            from scripts.gpt_run import training

            if args.check:
                training.check(args, text)
            elif args.eval_only:
                training.evaluate(args, text)
            else:
                training.train(args, text, folder)


def read_text_or_report(args):
    try:
        return read_text(args.data, args.context)
    except (UserError, OSError) as error:
        if not args.eval_only:
            raise
        report("text", f"{error} Without it there is no held-out loss.")


def open_devices(args):
    if args.hosts is None and not args.mesh and not args.simulate_devices:
        return contextlib.nullcontext()
    from scripts.gpt_run import devices

    return devices.open_devices(args)


def keep_memory():
    """Keeps glibc's malloc from giving large arrays back to the system, which costs a page fault
    for each page in every step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, -1)  # M_TRIM_THRESHOLD


if __name__ == "__main__":
    keep_memory()  # here, since a caller of main() manages its own memory
    run(main)
