"""What the machine gives: a GPU, memory, whether a program fits into it, and how much of its peak a
speed is."""

import ctypes
import importlib.util
import os
import pathlib
import re
import sys

from scripts.gpt_run.stops import Refused

DRIVER = pathlib.Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = {13: 580, 12: 525}  # of NVIDIA, by the version of CUDA
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def why_no_gpu() -> str | None:
    """Why jax does not use the NVIDIA GPU that there is; None where it does, is not asked to, or
    there is none."""
    import jax

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if jax.config.jax_platforms or hidden or not DRIVER.exists() or jax.default_backend() != "cpu":
        return None
    cuda = next(
        (
            version
            for version in OLDEST_DRIVER
            if importlib.util.find_spec(f"jax_cuda{version}_plugin")
        ),
        None,
    )
    found = re.search(r"\b(\d+)\.\d+", DRIVER.read_text())
    driver = int(found.group(1)) if found else None
    if cuda is None:
        return (
            "jax has no plugin for it. Install "
            f"jax[cuda{12 if driver and driver < OLDEST_DRIVER[13] else 13}]."
        )
    if driver and driver < OLDEST_DRIVER[cuda]:
        instead = (
            "install jax[cuda12] in its place"
            if cuda == 13 and driver >= OLDEST_DRIVER[12]
            else "update the driver"
        )
        return (
            f"jax[cuda{cuda}] needs driver {OLDEST_DRIVER[cuda]} or newer, and this is "
            f"{driver}: {instead}."
        )
    return f"jax[cuda{cuda}] is there and did not start; what jax logged before says why."


def keep_memory():
    """glibc's malloc gives large arrays back to the system and gets new pages for them in each step
    on a CPU, a page fault each. Now it keeps them. Other libraries of C are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def must_fit(program):
    """Refuses a compiled program that the memory cannot hold: a CPU's process would be killed
    without a word."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    memory = (
        stats["bytes_limit"] if stats else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    sizes = program.memory_analysis()
    needed = (
        sizes.temp_size_in_bytes
        + sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
    )
    if needed > memory:
        raise Refused(
            f"out of memory: a step needs {needed / 1e9:,.1f} GB, and there are "
            f"{memory / 1e9:,.1f}. Try a smaller --batch or "
            "--context, or a larger --accumulate."
        )


def speed_in_words(args, parameters):
    """words(tokens a second): with the model FLOPs utilisation, where the GPU's peak is known."""
    import jax

    peak = (
        peak_of(jax.devices()[0].device_kind)
        if args.dtype == "bfloat16" and jax.default_backend() == "gpu"
        else None
    )
    each = flops_per_token(args, jax.tree.leaves(parameters))
    return lambda speed: (
        f"{speed:,.0f} tokens/s" + (f", {speed * each / peak:.1%} MFU" if peak else "")
    )


def flops_per_token(args, parameters) -> float:
    """Forward and backward, which is twice it: 6 for each weight that multiplies, and 6 T D a layer
    for causal attention."""
    weights = sum(p.size for p in parameters if p.ndim > 1) - (
        args.vocabulary * args.features if args.untied else 0
    )
    return 6 * weights + 6 * args.layers * args.context * args.features


def peak_of(kind: str) -> float | None:
    """FLOP/s of dense 16-bit products."""
    from pallas_flash.accounting import GPUS

    return next((gpu.products for gpu in GPUS.values() if gpu.kind == kind), None)
