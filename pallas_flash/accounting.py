"""Facts of GPUs, and the time that work takes at their peak rates (a roofline).

The facts are those of NVIDIA's datasheets, whitepapers and tuning guides.
"""

from collections.abc import Iterable
from typing import NamedTuple

from pallas_flash.checks import unexpected
from pallas_flash.jax_support.hardware import FAMILIES

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
    shared_memory: int  # bytes of a multiprocessor; a CTA can have 1024 less
    registers: int  # of a multiprocessor, 4 bytes each
    exponentials_per_clock: int = 16  # of a multiprocessor

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


_A100 = GPU(
    "NVIDIA A100-SXM4-80GB",
    *FAMILIES["A100"][:2],
    clock=1.41e9,
    products=312e12,
    float32=19.5e12,
    bandwidth=2.039e12,
    memory=80 << 30,
    l2=40 << 20,
    shared_memory=164 << 10,
    registers=65536,
)
_H100 = GPU(
    "NVIDIA H100 80GB HBM3",
    *FAMILIES["H100"][:2],
    clock=1.83e9,
    products=989.4e12,
    float32=66.9e12,
    bandwidth=3.35e12,
    memory=80 << 30,
    l2=50 << 20,
    shared_memory=228 << 10,
    registers=65536,
)
# 16-bit products are summed in float32, as the kernels need it, at half of GeForce's peak
_RTX_4090 = GPU(
    "NVIDIA GeForce RTX 4090",
    capability=(8, 9),
    cores=128,
    clock=2.52e9,
    products=165.2e12,
    float32=82.6e12,
    bandwidth=1.008e12,
    memory=24 << 30,
    l2=72 << 20,
    shared_memory=100 << 10,
    registers=65536,
)
_RTX_5090 = GPU(
    "NVIDIA GeForce RTX 5090",
    capability=(12, 0),
    cores=170,
    clock=2.407e9,
    products=209.5e12,
    float32=104.8e12,
    bandwidth=1.792e12,
    memory=32 << 30,
    l2=96 << 20,
    shared_memory=100 << 10,
    registers=65536,
)
# the clock is computed: a multiprocessor does 8192 FLOP a clock
_B200 = GPU(
    "NVIDIA B200",
    *FAMILIES["B200"][:2],
    clock=1.856e9,
    products=2.25e15,
    float32=75e12,
    bandwidth=8e12,
    memory=192 << 30,
    l2=FAMILIES["B200"].l2 << 20,
    shared_memory=228 << 10,
    registers=65536,
)
GPUS = {
    "A100-40GB": _A100._replace(kind="NVIDIA A100-SXM4-40GB", bandwidth=1.555e12, memory=40 << 30),
    "A100-80GB": _A100,
    "RTX-4090": _RTX_4090,
    "RTX-5090": _RTX_5090,
    "H100": _H100,
    "H200": _H100._replace(kind="NVIDIA H200", bandwidth=4.8e12, memory=141 << 30),
    "B200": _B200,
    "B300": _B200._replace(
        kind="NVIDIA B300", capability=(10, 3), memory=288 << 30, exponentials_per_clock=32
    ),
}


@unexpected.refused
def name_of(kind: str) -> str | None:
    """The key in GPUS of a device kind, a text as jax.Device.device_kind; None if it has none."""
    if not isinstance(kind, str):
        raise TypeError(f"kind must be a text, as device.device_kind; got {type(kind).__name__}.")
    return next((name for name in GPUS if all(word in kind for word in name.split("-"))), None)
