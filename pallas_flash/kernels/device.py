"""The GPU that a call is for."""

from typing import Any

import jax

interpret: Any = None  # parameters of jax's GPU interpreter: tests put them here, and a Hopper GPU is simulated

# By words of the device's kind, the first that it has.
CAPABILITIES = {"A100": (8, 0), "A10": (8, 6), "GeForce RTX 30": (8, 6), "L4": (8, 9), "GeForce RTX 40": (8, 9)}
CAPABILITIES |= {"H100": (9, 0), "H200": (9, 0), "B200": (10, 0), "GeForce RTX 50": (12, 0), "RTX PRO": (12, 0)}
PROCESSORS = {"A100": 108, "H100": 132, "H200": 132, "B200": 148}


def compute_capability() -> float | None:
    """Of the GPU that the abstract mesh names, for code that is compiled on another machine, else of the default GPU; None where
    that is not NVIDIA's."""
    named = jax.sharding.get_abstract_mesh().abstract_device
    try:
        here = jax.devices("cuda")[0]
    except RuntimeError:
        here = None
    if named is None or (here and here.device_kind == named.device_kind):
        return float(here.compute_capability) if here else None
    return next((major + minor / 10 for word, (major, minor) in CAPABILITIES.items() if word in named.device_kind), None)


def processors() -> int:
    """How many multiprocessors it has, of which a part of a GPU has fewer; where there is none, as many as an H100."""
    named = jax.sharding.get_abstract_mesh().abstract_device
    if named is not None:
        of_kind = (n for word, n in PROCESSORS.items() if word in named.device_kind)
        return named.num_cores or next(of_kind, PROCESSORS["H100"])
    here = jax.devices()[0]
    return here.core_count if here.platform == "gpu" else PROCESSORS["H100"]
