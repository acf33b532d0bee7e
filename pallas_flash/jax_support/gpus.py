"""The table of GPUs: processors, memories and peak rates.

The facts are from NVIDIA's datasheets, whitepapers and tuning guides. A row for several GPUs
has the fewest processors and the smallest L2 cache of them.
"""

import functools
import re
from typing import NamedTuple

RESERVED = 1024  # bytes of a multiprocessor's shared memory that CUDA keeps of each program


class Architecture(NamedTuple):
    """What all GPUs of a compute capability have in common."""

    capability: tuple[int, int]
    shared_kb: int  # KB of shared memory of a multiprocessor

    @property
    def version(self) -> float:
        """The compute capability as a number."""
        major, minor = self.capability
        return major + minor / 10

    @property
    def program_bytes(self) -> int:
        """Bytes of shared memory that a program can have."""
        return (self.shared_kb << 10) - RESERVED


class Rates(NamedTuple):
    """The peaks of one GPU, and its memory."""

    kind: str  # jax.Device.device_kind
    clock: float  # Hz, at which the peak of the tensor cores is stated
    products: float  # FLOP/s of dense 16-bit matrix products
    float32: float  # FLOP/s
    bandwidth: float  # bytes/s of device memory
    memory: int  # bytes
    exponentials_per_clock: int = 16  # of a multiprocessor


class Kind(NamedTuple):
    """A kind of GPU, or several."""

    pattern: str  # a regular expression, which jax.Device.device_kind contains
    architecture: Architecture
    processors: int  # streaming multiprocessors
    l2_mb: float
    rates: Rates | None = None

    @property
    def l2(self) -> int:
        """Bytes of the L2 cache."""
        return int(self.l2_mb * 2**20)


SM80, SM87 = (Architecture(capability, 164) for capability in ((8, 0), (8, 7)))
SM90, SM100, SM103 = (Architecture(capability, 228) for capability in ((9, 0), (10, 0), (10, 3)))
SM86, SM89, SM120 = (Architecture(capability, 100) for capability in ((8, 6), (8, 9), (12, 0)))

_A100 = Rates("NVIDIA A100-SXM4-80GB", 1.41e9, 312e12, 19.5e12, 2.039e12, 80 << 30)
_H100 = Rates("NVIDIA H100 80GB HBM3", 1.83e9, 989.4e12, 66.9e12, 3.35e12, 80 << 30)
# 16-bit products are summed in float32, as the kernels need it, at half of GeForce's peak
_RTX_4090 = Rates("NVIDIA GeForce RTX 4090", 2.52e9, 165.2e12, 82.6e12, 1.008e12, 24 << 30)
_RTX_5090 = Rates("NVIDIA GeForce RTX 5090", 2.407e9, 209.5e12, 104.8e12, 1.792e12, 32 << 30)
# the clock is computed: a multiprocessor does 8192 FLOP a clock
_B200 = Rates("NVIDIA B200", 1.856e9, 2.25e15, 75e12, 8e12, 192 << 30)

# The first whose pattern matches describes a GPU; a name at the end keeps laptops' GPUs out, which
# have less.
KINDS = {
    "A100-40GB": Kind(
        r"\bA100\b.*40GB",
        *(SM80, 108, 40),
        _A100._replace(kind="NVIDIA A100-SXM4-40GB", bandwidth=1.555e12, memory=40 << 30),
    ),
    "A100-80GB": Kind(r"\bA100X?\b", SM80, 108, 40, _A100),
    "A800": Kind(r"\bA800\b", SM80, 108, 40),
    "A30": Kind(r"\bA30\b", SM80, 56, 24),
    "A10": Kind(r"\bA10G?\b", SM86, 72, 6),
    "A40": Kind(r"\bA40\b|RTX A6000$", SM86, 84, 6),
    "RTX-3090": Kind(r"RTX 3090( Ti)?$", SM86, 82, 6),
    # 512 KB of L2 for each 32 bits of the memory's bus: 96 bits of an RTX 3050, 64 of an A400
    "RTX-30": Kind(r"GeForce RTX 30", SM86, 16, 1.5),
    "A400": Kind(r"RTX A400$", SM86, 6, 1),
    "Orin": Kind(r"Orin", SM87, 4, 2),
    "L40": Kind(r"\bL40S?\b|RTX 6000 Ada", SM89, 142, 96),
    "L4": Kind(r"\bL4\b", SM89, 58, 48),
    "RTX-4090": Kind(r"RTX 4090$", SM89, 128, 72, _RTX_4090),
    "RTX-40": Kind(r"GeForce RTX 40", SM89, 20, 12),
    "RTX-5090": Kind(r"RTX 5090$", SM120, 170, 96, _RTX_5090),
    "RTX-PRO-6000": Kind(r"RTX PRO 6000\b", SM120, 188, 128),
    "RTX-50": Kind(r"GeForce RTX 50|RTX PRO", SM120, 20, 24),
    "H100-PCIe": Kind(r"H100 PCIe", SM90, 114, 50),
    "H100": Kind(r"H100", SM90, 132, 50, _H100),
    # and GH200, as the last two are GB200 and GB300 too
    "H200": Kind(
        r"H200",
        SM90,
        132,
        50,
        _H100._replace(kind="NVIDIA H200", bandwidth=4.8e12, memory=141 << 30),
    ),
    "B200": Kind(r"B200", SM100, 148, 126, _B200),
    "B300": Kind(
        r"B300",
        *(SM103, 148, 126),
        _B200._replace(kind="NVIDIA B300", memory=288 << 30, exponentials_per_clock=32),
    ),
}


@functools.lru_cache(256)
def find(device_kind: str) -> Kind | None:
    """The kind of a device by its name; None where no row has it."""
    return next((kind for kind in KINDS.values() if re.search(kind.pattern, device_kind)), None)


@functools.lru_cache(256)
def least(capability: float | None) -> Kind:
    """The least that GPUs of a compute capability have. Where no row has it, GPUs of its major
    version count, and where no row has that either, all rows."""
    same_major = lambda kind: capability and kind.architecture.capability[0] == int(capability)
    same = [kind for kind in KINDS.values() if kind.architecture.version == capability]
    kinds = same or list(filter(same_major, KINDS.values())) or list(KINDS.values())
    architecture = min((kind.architecture for kind in kinds), key=lambda of: of.shared_kb)
    return Kind(
        "", architecture, min(kind.processors for kind in kinds), min(kind.l2_mb for kind in kinds)
    )
