"""The steps of a run: progress, evaluations, checkpoints, and the end."""

import collections
import contextlib
import math
import sys
import time

import jax
import tqdm

from scripts.gpt_run.console import UserError, deferred_signals
from scripts.gpt_run.curves import Curves

IN_FLIGHT = 4  # losses that are not fetched yet, so that the device does not wait for Python


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
