"""The curves of a run: loss.csv, loss.png, and events for TensorBoard."""

import io
import pathlib
from typing import NamedTuple

import numpy as np


class Curves(NamedTuple):
    """Nats per byte."""

    training: list  # of each step so far
    held_out: list  # [step, loss]


def to_csv(curves: Curves) -> bytes:
    held_out = dict(curves.held_out)
    rows = [f"{i},{loss},{held_out.get(i, '')}\n" for i, loss in enumerate(curves.training, 1)]
    return "".join(["step,train_loss,held_out_loss\n", *rows]).encode()


def draw(curves: Curves, bigram: float):
    """A matplotlib figure of the losses after the first tenth, whose fall would hide the rest."""
    from matplotlib.figure import Figure

    count = len(curves.training)
    window = max(1, count // 50)
    smooth = np.convolve(curves.training, np.ones(window) / window, "valid")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, count + 1), curves.training, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(range(window, count + 1), smooth, "C0", label=f"training, mean of {window} steps")
    if curves.held_out:
        axes.plot(*zip(*curves.held_out, strict=True), "C1o-", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram model, held out")
    late = np.quantile(curves.training[count // 10 :], 0.99)
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.set_ylim(top=1.05 * max(late, bigram))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return figure


def to_png(curves: Curves, bigram: float) -> bytes:
    file = io.BytesIO()
    draw(curves, bigram).savefig(file, format="png", dpi=120)
    return file.getvalue()


class Events:
    """The curves for TensorBoard. Each process that continues a run writes them from the first step
    again, and TensorBoard forgets the earlier ones."""

    def __init__(self, folder: pathlib.Path):
        # not SummaryWriter, which hangs where the disk is full
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        (folder / "tensorboard").mkdir(exist_ok=True)
        self.writer = EventsWriter(str(folder / "tensorboard" / "events"))
        self.steps = 0
        self.writer.write_event(Event(step=1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, curves: Curves):
        """What has come since the last call."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        training = enumerate(curves.training, 1)
        for name, points in dict(training=training, held_out=curves.held_out).items():
            for step, loss in points:
                if step > self.steps:
                    summary = scalar(f"loss/{name}", loss)
                    self.writer.write_event(Event(step=step, summary=summary))
        self.steps = len(curves.training)
        self.writer.flush()
