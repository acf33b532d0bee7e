"""The bytes and operations of kernels, and the time that they take at a GPU's peak rates (a
roofline)."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pallas_flash.checks import unexpected
from pallas_flash.jax_support import gpus

__all__ = ["GPU", "GPUS", "Cost", "name_of", "total"]


class Cost(NamedTuple):
    """The work of one or more kernels."""

    matrix: int = 0  # FLOPs of matrix products
    exponentials: int = 0
    reads: int = 0  # bytes from device memory
    writes: int = 0

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


def token_bytes(columns: Iterable[int], itemsizes: Iterable[int]) -> int:
    """Bytes of a cache for each token and key/value head: a key of so many columns, and a value
    unless it is part of the key. Each in 8 bits has a float32 scale."""
    pairs = zip(columns, itemsizes, strict=True)
    return sum(count * size + 4 * (size == 1) for count, size in pairs)


@unexpected.refused
def total(kernels: dict[str, Cost]) -> Cost:
    """The cost of all kernels together."""
    return Cost(*map(sum, zip(*kernels.values(), strict=True)))


class GPU(NamedTuple):
    """One GPU. Its times are lower bounds, unless a cache serves some of the loads."""

    kind: str  # jax.Device.device_kind
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock: float  # Hz, at which the peak of the tensor cores is stated
    products: float  # FLOP/s of dense 16-bit matrix products
    float32: float  # FLOP/s
    bandwidth: float  # bytes/s of device memory
    memory: int  # bytes
    l2: int  # bytes
    shared_memory: int  # bytes of a multiprocessor
    registers: int  # of a multiprocessor, 4 bytes each
    exponentials_per_clock: int = 16  # of a multiprocessor

    @property
    def cta_memory(self) -> int:
        """Bytes of shared memory that a CTA can have."""
        return self.shared_memory - gpus.RESERVED

    @property
    def exponentials(self) -> float:
        """Exponentials per second."""
        return self.exponentials_per_clock * self.cores * self.clock

    def seconds(self, cost: Cost, dtype: str) -> dict[str, float]:
        """The seconds for which each unit is busy; float32 products are computed in float32, not
        TF32."""
        return dict(
            products=cost.matrix / (self.float32 if dtype == "float32" else self.products),
            exponentials=cost.exponentials / self.exponentials,
            memory=cost.bytes / self.bandwidth,
        )

    def roofline(self, kernels: dict[str, Cost], dtype: str) -> float:
        """Seconds of kernels that run one after another, each as long as its busiest unit."""
        return sum(max(self.seconds(cost, dtype).values()) for cost in kernels.values())


def _gpu(kind: gpus.Kind) -> GPU:
    capability, shared_kb = kind.architecture
    sizes = dict(l2=kind.l2, shared_memory=shared_kb << 10, registers=65536)
    return GPU(capability=capability, cores=kind.processors, **kind.rates._asdict(), **sizes)


GPUS = {name: _gpu(kind) for name, kind in gpus.KINDS.items() if kind.rates}


@unexpected.refused
def name_of(kind: str) -> str | None:
    """The key in GPUS of a device kind, a text as jax.Device.device_kind; None if it has none."""
    if not isinstance(kind, str):
        raise TypeError(f"kind must be a text, as device.device_kind; got {type(kind).__name__}.")
    return next((name for name in GPUS if re.search(gpus.KINDS[name].pattern, kind)), None)
