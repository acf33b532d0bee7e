"""A plain matrix product and a plain copy of this machine: the marks beside which attention's
FLOP/s and bytes/s are read."""

import functools
import statistics

import jax
import jax.numpy as jnp

from scripts.bench import clock, machine
from scripts.bench.programs import Program


@functools.cache
def measure(dtype: str, time_by: str) -> tuple[float, str]:
    """FLOP/s, and in words."""
    size = 8192 if machine.on_gpu() else 2048
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    speed = 2 * size**3 / _seconds(lambda x: x @ x, x, time_by)
    return speed, f"{in_words(speed)}: {size} x {size} by {size} x {size}, {dtype}, by XLA"


@functools.cache
def measure_copy(time_by: str) -> tuple[float, str]:
    """Bytes/s, read and written, and in words."""
    size = 2**30 if machine.on_gpu() else 2**28
    x = jnp.ones(size // 4, jnp.float32)
    speed = 2 * size / _seconds(lambda x: x + 1, x, time_by)
    return speed, f"{speed / 1e9:.3g} GB/s read and written: {size / 2**20:.0f} MiB plus 1, by XLA"


def _seconds(f, x, time_by: str) -> float:
    ready = jax.jit(f).lower(x).compile()
    jax.block_until_ready(ready(x))
    program = Program(functools.partial(ready, x), jax.block_until_ready, list)
    return statistics.median(clock.timing({"mark": program}, 3, time_by).seconds["mark"])


def in_words(speed: float) -> str:
    unit, scale = unit_and_scale()
    return f"{speed / scale:.3g} {unit}"


def unit_and_scale() -> tuple[str, float]:
    return ("TFLOP/s", 1e12) if machine.on_gpu() else ("GFLOP/s", 1e9)
