"""The GPU that a call is for."""

import jax

# By a word of the device's kind.
CAPABILITIES = {"A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}


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
