"""The machine of a run: why its GPU is not used, its memory, and its speed."""

import math
import os
import pathlib
import re

import jax

from pallas_flash.accounting import GPUS

DRIVER = pathlib.Path("/proc/driver/nvidia/version")
NO_GPU = """this machine's NVIDIA GPU (driver {}) is not used, but the CPU. Install jax[cuda13] for
driver 580 or newer, jax[cuda12] for 525 or newer; if it is installed, see what jax logged above"""


def unused_gpu() -> str | None:
    """What to do where jax does not use the machine's NVIDIA GPU although it was not told so."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if jax.config.jax_platforms or hidden or not DRIVER.exists() or jax.default_backend() != "cpu":
        return None
    version = re.search(r"\b\d+\.\d+(\.\d+)?", DRIVER.read_text())
    return NO_GPU.format(version[0] if version else "of unknown version")


def check_memory(program):
    """Refuses a compiled program that the memory cannot hold: on a CPU the process would be
    killed without a word."""
    stats = jax.local_devices()[0].memory_stats()
    pages = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    memory = stats["bytes_limit"] if stats else math.prod(map(os.sysconf, pages))
    sizes = program.memory_analysis()
    needed = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
    needed += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    if needed > memory:
        raise MemoryError(f"a step needs {needed / 1e9:,.1f} GB of {memory / 1e9:,.1f}")


def speed_format(args, parameters):
    """format(tokens per second): with the MFU, where the GPU's peak is known."""
    peak = None
    if args.dtype == "bfloat16" and jax.default_backend() == "gpu":
        peak = peak_flops(jax.devices()[0].device_kind)
    flops = flops_per_token(args, jax.tree.leaves(parameters))
    return lambda speed: (
        f"{speed:,.0f} tokens/s" + (f", {speed * flops / peak:.1%} MFU" if peak else "")
    )


def flops_per_token(args, parameters) -> float:
    """Forward and backward, which is twice it: 6 for each weight that multiplies, and 6 T D a layer
    for causal attention."""
    weights = sum(p.size for p in parameters if p.ndim > 1)
    weights -= args.vocabulary * args.features if args.untied else 0
    return 6 * weights + 6 * args.layers * args.context * args.features


def peak_flops(kind: str) -> float | None:
    """Of dense 16-bit products, per second."""
    return next((gpu.products for gpu in GPUS.values() if gpu.kind == kind), None)
