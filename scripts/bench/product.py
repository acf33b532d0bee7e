"""A plain matrix product of this machine: the mark beside which the FLOP/s of attention are read."""

import functools
import statistics

import jax

from scripts.bench import clock, machine
from scripts.bench.programs import Program


@functools.cache
def measure(dtype: str, time_by: str) -> tuple[float, str]:
    """FLOP/s, and in words."""
    size = 8192 if machine.on_gpu() else 2048
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda x: x @ x).lower(x).compile()
    jax.block_until_ready(multiply(x))
    program = Program(functools.partial(multiply, x), jax.block_until_ready, list)
    seconds = clock.timing({"product": program}, 3, time_by).seconds["product"]
    speed = 2 * size**3 / statistics.median(seconds)
    return speed, f"{in_words(speed)}: {size} x {size} by {size} x {size}, {dtype}, by XLA"


def in_words(speed: float) -> str:
    unit, scale = unit_and_scale()
    return f"{speed / scale:.3g} {unit}"


def unit_and_scale() -> tuple[str, float]:
    return ("TFLOP/s", 1e12) if machine.on_gpu() else ("GFLOP/s", 1e9)
