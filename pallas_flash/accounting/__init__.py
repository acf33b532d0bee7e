"""What each generation of attention costs: FLOPs, exponentials, bytes, memory, and the time at a
GPU's peaks.

`forward` and `backward` are the formulas of `costs`, by kernel; `observe` counts the same on the
kernels themselves; `published` holds what the paper of FlashAttention compared, as formulas and as
it printed them; `GPUS` the facts of GPUs.
"""

from pallas_flash.accounting import published
from pallas_flash.accounting.costs import Cost, total
from pallas_flash.accounting.generations import (
    GENERATIONS,
    attention,
    backward,
    default_tiles,
    extra_memory,
    forward,
    lower_bound,
)
from pallas_flash.accounting.gpus import GPU, GPUS, name_of
from pallas_flash.accounting.observation import observe

__all__ = [
    "GENERATIONS",
    "GPU",
    "GPUS",
    "Cost",
    "attention",
    "backward",
    "default_tiles",
    "extra_memory",
    "forward",
    "lower_bound",
    "name_of",
    "observe",
    "published",
    "total",
]
