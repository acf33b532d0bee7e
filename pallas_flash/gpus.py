"""The facts of GPUs, as NVIDIA's datasheets, whitepapers and tuning guides state them."""

from typing import NamedTuple


class GPU(NamedTuple):
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


_A100 = GPU(
    kind="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
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
    capability=(9, 0),
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

# By a word of the device's kind; of a B200 no more is needed.
CAPABILITIES = {name.partition("-")[0]: gpu.capability for name, gpu in GPUS.items()} | {"B200": (10, 0)}


def name_of(kind: str) -> str | None:
    """The name in GPUS of a device, by its kind."""
    return next((name for name in GPUS if all(word in kind for word in name.split("-"))), None)
