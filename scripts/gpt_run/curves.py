"""The curves of a run: loss.csv, loss.png, and events for TensorBoard."""

import csv
import io
import math
import pathlib

import numpy as np

CURVES = ("train_losses", "held_out_losses")  # in the state


def curves(state: dict):
    """(step, train loss, held-out loss or nan), one row for each step so far."""
    number = int(state["step"])
    return np.arange(1, number + 1), *(np.asarray(state[name])[:number] for name in CURVES)


def csv_of(state: dict) -> bytes:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["step", "train_loss", "held_out_loss"])
    rows.writerows(
        (step, train, "" if math.isnan(held_out) else held_out)
        for step, train, held_out in zip(*curves(state), strict=True)
    )
    return file.getvalue().encode()


def png_of(state: dict, bigram: float) -> bytes:
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
    axes.set(
        xlabel="step",
        ylabel="loss [nats per byte]",
        xlim=(0, steps[-1]),
        ylim=interesting(train, smooth, held_out, bigram),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def interesting(train, smooth, held_out, bigram: float) -> tuple[float, float]:
    """Of the losses: the first tenth of the steps falls from so high that nothing would be seen of
    the others."""
    late = np.concatenate([train[len(train) // 10 :], [smooth[-1], bigram]])
    low, high = np.nanmin([*late, *held_out]), max(np.quantile(late, 0.99), bigram)
    return low - 0.05 * (high - low), high + 0.1 * (high - low)


class Events:
    """The curves for TensorBoard, written anew by each process that goes on with a run, which tells
    TensorBoard so."""

    def __init__(self, folder: pathlib.Path):
        # not its SummaryWriter: that hangs where the disk is full
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        (folder / "tensorboard").mkdir(exist_ok=True)
        self.writer, self.written = EventsWriter(str(folder / "tensorboard" / "events")), 0
        self.writer.write_event(Event(step=1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, state: dict):
        """What has come since the last time."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for step, train, held_out in list(zip(*curves(state), strict=True))[self.written :]:
            for name, loss in (("loss/training", train), ("loss/held_out", held_out)):
                if not math.isnan(loss):
                    self.writer.write_event(
                        Event(step=int(step), summary=scalar(name, float(loss)))
                    )
            self.written = int(step)
        self.writer.flush()
