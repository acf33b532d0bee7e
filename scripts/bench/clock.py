"""How long a call takes: turns of back-to-back calls, by the device's own clock where it can be
read.

On a GPU jax's profiler (CUPTI) records when each kernel of the process ran, JAX's and torch's
alike. A turn is an annotated span of the trace, which begins and ends with an idle GPU; its device
time is the time in which any kernel or copy ran. The trace has their names too, by which the time
of a call is that of its kernels.
"""

import bisect
import collections
import contextlib
import math
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.bench import machine
from scripts.bench.programs import Program

# seconds of calls in a turn: back to back on a GPU, or dispatch is what is timed
SAMPLE = 0.03
# seconds between turns: the trace's clocks of host and GPU differ, and a CPU's idle threads spin
# for a while
PAUSE = 0.002
DEVICE, WALL = "device", "wall"
_MARK = "turn "  # and its index: the annotation in the trace


class Turn(NamedTuple):
    name: str  # of the program
    calls: int
    seconds: float  # wall time, of all calls


class NoDeviceTime(Exception):
    """Why the trace gives no device time."""


class Failed(Exception):
    """A program raised; its name is the first argument."""


def interleave(programs: dict[str, Program], rounds: int) -> list[Turn]:
    """A round has a turn of each program, so that a slow minute slows all alike, in random order: a
    rotation would put each behind the same one, whose arrays are then in the caches."""
    names = list(programs)
    once = {name: max(1e-6, _turn(programs, name, "warm-up", 1)) for name in names}
    calls = {name: max(1, min(100, math.ceil(SAMPLE / seconds))) for name, seconds in once.items()}
    turns, rng = [], random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(names, len(names)):
            time.sleep(PAUSE)
            # the first call after another program pays for what that did to caches and malloc
            if not machine.on_gpu():
                _turn(programs, name, "not timed", 1)
            seconds = _turn(programs, name, f"{_MARK}{len(turns)}", calls[name])
            turns.append(Turn(name, calls[name], seconds))
    return turns


def _turn(programs: dict[str, Program], name: str, mark: str, calls: int) -> float:
    try:
        with jax.profiler.TraceAnnotation(mark):
            return _calls(programs[name], calls)
    except Exception as error:
        raise Failed(name) from error


def _calls(program: Program, calls: int) -> float:
    start = time.perf_counter()
    for remaining in reversed(range(calls)):
        started = program.call()
        # on a CPU calls that are not awaited run at the same time
        if not (remaining and machine.on_gpu()):
            program.wait(started)
    return time.perf_counter() - start


class Timing(NamedTuple):
    seconds: dict[str, list[float]]  # of a call, by program and round
    clock: str  # DEVICE; WALL; or WALL and why not DEVICE
    sensors: dict[str, float]  # of the GPU meanwhile
    # seconds of each kernel of a call, by program and name; {} by the wall clock
    kernels: dict[str, dict[str, float]] = {}


def timing(programs: dict[str, Program], rounds: int, clock: str) -> Timing:
    """Times programs together, by `clock` if it is available; Failed if one raises."""
    if clock == DEVICE:
        try:
            return _by_device(programs, rounds)
        except Failed:
            raise
        except Exception as error:  # whatever a profiler raises
            clock = f"{WALL}: the profiler raised {type(error).__name__}: {error}"
    with machine.sensors() as sensed:
        turns = interleave(programs, rounds)
    return _timing(turns, [turn.seconds for turn in turns], clock, sensed())


def _by_device(programs: dict[str, Program], rounds: int) -> Timing:
    with trace() as traced, machine.sensors() as sensed:
        turns = interleave(programs, rounds)
    try:
        ran = by_turn(turns, *traced())
    except NoDeviceTime as error:
        return _timing(turns, [turn.seconds for turn in turns], f"{WALL}: {error}", sensed())
    times = [_union(spans) / 1e9 for spans in ran]
    return _timing(turns, times, DEVICE, sensed())._replace(kernels=by_kernel(turns, ran))


def _timing(turns: list[Turn], times: list[float], clock: str, sensed) -> Timing:
    seconds = {}
    for turn, all_calls in zip(turns, times, strict=True):
        seconds.setdefault(turn.name, []).append(all_calls / turn.calls)
    return Timing(seconds, clock, sensed)


class Span(NamedTuple):
    start: float  # nanoseconds
    stop: float
    name: str = ""  # of the kernel or the copy


@contextlib.contextmanager
def trace() -> Iterator[Callable]:
    """Yields a function that afterwards gives the turns' spans by index, and the spans in which the
    GPU was busy, in order of time."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 1
    options.python_tracer_level = 0
    read = []
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield lambda: read
        finally:
            jax.profiler.stop_trace()
            read += _read(pathlib.Path(folder))


def _read(folder: pathlib.Path) -> tuple[dict[int, Span], list[Span]]:
    turns, busy = {}, []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            is_gpu = plane.name.startswith("/device:GPU")
            for line in plane.lines:
                # other lines repeat the streams, by module or by operation
                if is_gpu and not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    span = Span(event.start_ns, event.start_ns + event.duration_ns, event.name)
                    if is_gpu:
                        busy.append(span)
                    elif plane.name.startswith("/host:CPU") and event.name.startswith(_MARK):
                        turns[int(event.name.removeprefix(_MARK))] = span
    return turns, sorted(busy)


def by_turn(turns: list[Turn], spans: dict[int, Span], busy: list[Span]) -> list[list[Span]]:
    """What ran on the GPU within each turn; NoDeviceTime where the trace is incomplete."""
    if not busy:
        raise NoDeviceTime("the profiler saw nothing run on a GPU; CUPTI may lack permission")
    ran, kernels, margin = [], {}, PAUSE / 4 * 1e9
    for i, turn in enumerate(turns):
        if i not in spans:
            raise NoDeviceTime(f"the trace lacks a turn of {turn.name}")
        first = bisect.bisect_left(busy, (spans[i].start - margin,))
        last = bisect.bisect_left(busy, (spans[i].stop + margin,))
        count = last - first
        if kernels.setdefault(turn.name, count) != count or count < turn.calls:
            raise NoDeviceTime(
                f"the trace lost kernels of {turn.name}: {count} in a turn of {turn.calls} calls"
            )
        ran.append(busy[first:last])
    return ran


def by_kernel(turns: list[Turn], ran: list[list[Span]]) -> dict[str, dict[str, float]]:
    """The seconds of each kernel of a call, by program and name: medians over turns, longest first.
    Kernels that overlap count in full."""
    times = {turn.name: {} for turn in turns}
    for turn, spans in zip(turns, ran, strict=True):
        of_turn = collections.Counter()
        for span in spans:
            of_turn[span.name] += (span.stop - span.start) / turn.calls / 1e9
        for name, seconds in of_turn.items():
            times[turn.name].setdefault(name, []).append(seconds)
    medians = lambda kernels: {name: statistics.median(each) for name, each in kernels.items()}
    by_time = lambda kernels: sorted(kernels.items(), key=lambda kernel: -kernel[1])
    return {program: dict(by_time(medians(kernels))) for program, kernels in times.items()}


def _union(spans: list[Span]) -> float:
    """The time that spans, ordered by their start, cover together."""
    total, end = 0.0, -math.inf
    for start, stop, _ in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def detect() -> str:
    """The clock of this machine: DEVICE if a short trial yields device times."""
    if not machine.on_gpu():
        return WALL
    x = jnp.ones(1024)
    double = jax.jit(lambda: x * 2)
    double()
    return timing({"trial": Program(double, jax.block_until_ready, list)}, 2, DEVICE).clock
