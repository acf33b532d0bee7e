"""What a plain matrix product and a plain copy reach on this machine: the ceilings beside which
attention's FLOP/s and bytes/s are read."""

import functools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.bench import clock, machine
from scripts.bench.cases import Case
from scripts.bench.programs import Program


class Ceiling(NamedTuple):
    name: str
    speed: float  # a second, measured
    unit: str
    scale: float
    work: Callable[[Case, str], float]  # of a case's passes, in what `speed` counts
    size: str

    def __str__(self):
        return f"{self.speed / self.scale:.3g} {self.unit}: {self.size}, by XLA"

    def columns(self, row) -> dict[str, str]:
        """A row's speed, and how much of the ceiling it reaches."""
        speed = self.work(row.case, row.passes) / row.median if row.median else None
        return {
            self.unit: f"{speed / self.scale:.3g}" if speed else "",
            f"of a {self.name}'s": f"{speed / self.speed:.0%}" if speed else "",
        }


def of(case: Case, dtype: str, time_by: str) -> Ceiling:
    """The ceiling of a case: a copy's bytes for one new token, a product's FLOP for all else."""
    return (copy if case.T == 1 else matmul)(dtype, time_by)


@functools.cache
def matmul(dtype: str, time_by: str) -> Ceiling:
    size = 8192 if machine.on_gpu() else 2048
    unit, scale = ("TFLOP/s", 1e12) if machine.on_gpu() else ("GFLOP/s", 1e9)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    speed = 2 * size**3 / _seconds(lambda x: x @ x, x, time_by)
    return Ceiling("matmul", speed, unit, scale, Case.flops, f"{size} x {size}, {dtype}")


@functools.cache
def copy(dtype: str, time_by: str) -> Ceiling:
    size = 2**30 if machine.on_gpu() else 2**28
    x = jnp.ones(size // jnp.dtype(dtype).itemsize, dtype)
    speed = 2 * size / _seconds(lambda x: x + 1, x, time_by)
    words = f"{size / 2**20:.0f} MiB read and written"
    return Ceiling("copy", speed, "GB/s", 1e9, lambda case, passes: case.bytes(), words)


def _seconds(f, x, time_by: str) -> float:
    program = Program(functools.partial(jax.jit(f), x), jax.block_until_ready, list)
    program.wait(program.call())
    return statistics.median(clock.timing({"ceiling": program}, 3, time_by).seconds["ceiling"])
