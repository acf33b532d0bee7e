"""The facts of GPUs, as NVIDIA's datasheets, whitepapers and tuning guides state them, and times at
the peaks."""

from typing import NamedTuple

from pallas_flash.accounting.costs import Cost
from pallas_flash.kernels.device import CAPABILITIES


class GPU(NamedTuple):
    """Its times are at the peaks of its datasheet: no GPU is faster, but where a cache serves a
    load."""

    kind: str  # jax's name of the device
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock: float  # Hz, at which the peak of products is stated
    products: float  # FLOP/s of dense 16-bit products
    float32: float  # FLOP/s
    bandwidth: float  # bytes/s of device memory
    memory: int  # bytes
    l2: int  # bytes
    shared_memory: int  # bytes of a core; a program can have 1024 less
    registers: int  # of a core, 4 bytes each

    @property
    def exponentials(self) -> float:
        """A second: 16 a clock and core."""
        return 16 * self.cores * self.clock

    def seconds(self, cost: Cost, dtype: str) -> dict[str, float]:
        """How long each unit of the GPU is busy; float32 products are computed in float32 too."""
        return dict(
            products=cost.matrix / (self.float32 if dtype == "float32" else self.products),
            float32=cost.other / self.float32,
            exponentials=cost.exponentials / self.exponentials,
            memory=cost.bytes / self.bandwidth,
        )

    def roofline(self, kernels: dict[str, Cost], dtype: str) -> float:
        """The seconds that kernels take one after another, each as long as its busiest unit."""
        return sum(max(self.seconds(cost, dtype).values()) for cost in kernels.values())


_A100 = GPU(
    kind="NVIDIA A100-SXM4-80GB",
    capability=CAPABILITIES["A100"],
    cores=108,
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
    kind="NVIDIA H100 80GB HBM3",
    capability=CAPABILITIES["H100"],
    cores=132,
    clock=1.83e9,
    products=989.4e12,
    float32=66.9e12,
    bandwidth=3.35e12,
    memory=80 << 30,
    l2=50 << 20,
    shared_memory=228 << 10,
    registers=65536,
)
GPUS = {
    "A100-40GB": _A100._replace(kind="NVIDIA A100-SXM4-40GB", bandwidth=1.555e12, memory=40 << 30),
    "A100-80GB": _A100,
    "H100": _H100,
    "H200": _H100._replace(kind="NVIDIA H200", bandwidth=4.8e12, memory=141 << 30),
}


def name_of(kind: str) -> str | None:
    """The name in GPUS of a device, by its kind."""
    return next((name for name in GPUS if all(word in kind for word in name.split("-"))), None)
