"""Takes the steps: the bar, the lines of losses, evaluation, checkpoints, and the end."""

import collections
import contextlib
import math
import sys
import time

import numpy as np
import tqdm

from scripts.gpt_run.curves import curves
from scripts.gpt_run.hosts import are_several
from scripts.gpt_run.stops import Refused, stop_signals


def run(args, state, step, evaluate, save, words):
    """Takes the steps that are left; returns the state, tokens/s, and the signal that stopped it,
    after a checkpoint."""
    first, tokens, begin = int(state["step"]), args.batch * args.context, time.perf_counter()
    size = dict(total=args.steps * tokens, initial=first * tokens)
    bar = tqdm.tqdm(
        **size, unit=" tokens", unit_scale=True, disable=None, dynamic_ncols=True, leave=False
    )
    # losses that are not fetched yet, lest the device waits for Python
    flying, speed = collections.deque(), 0.0
    # several processes go in step: there the first signal ends one at once
    with bar, contextlib.nullcontext([]) if are_several() else stop_signals() as stopped:
        for done in range(first + 1, args.steps + 1):
            state, loss = step(state)
            flying.append(loss)
            if len(flying) > 4:
                bar.set_postfix(step=done, loss=f"{finite(flying.popleft()):.3f}", refresh=False)
            bar.update(tokens)
            signals = stopped[:1]  # read once: a later signal waits for the next step
            last = done == args.steps or bool(signals)
            if done % args.eval_every == 0 or done == args.steps:
                state = evaluate(state)
                print_losses(args, state, first, begin, words)
            if done % args.save_every == 0 or last:
                save(state)
            speed = (done - first) * tokens / (time.perf_counter() - begin)
            if last:
                return state, speed, signals
    return state, speed, []


def finite(loss) -> float:
    if not math.isfinite(loss := float(loss)):
        raise Refused(f"the loss became {loss}; try a smaller --learning-rate.")
    return loss


def print_losses(args, state, first: int, begin: float, words):
    steps, train, held_out = curves(state)
    train = finite(np.mean(train[-args.eval_every :]))
    pace = (time.perf_counter() - begin) / (len(steps) - first)
    left = tqdm.tqdm.format_interval(pace * (args.steps - len(steps)))
    speed = words(args.batch * args.context / pace)
    tqdm.tqdm.write(
        f"step {len(steps):>6}/{args.steps}  training {train:.4f}  held out {held_out[-1]:.4f}  "
        f"{speed}  {left} left"
    )
    sys.stdout.flush()
