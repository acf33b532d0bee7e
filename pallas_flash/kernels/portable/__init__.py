"""FlashAttention-2 as Pallas kernels for any GPU that Pallas' Triton lowering knows."""

import jax

from pallas_flash.arguments import Problem
from pallas_flash.gpus import CAPABILITIES
from pallas_flash.kernels.portable.backward import backward
from pallas_flash.kernels.portable.forward import forward
from pallas_flash.kernels.portable.tuning import tiles

__all__ = ["backward", "forward", "tiles", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    if max(problem.head_size, problem.value_size) > 256:
        return f"head sizes above 256 do not fit into registers; got H = {problem.head_size}, Hv = {problem.value_size}"
    capability = compute_capability()
    if capability and capability < 8.0:
        return f"the kernels need an NVIDIA GPU of compute capability 8.0 or higher; this one has {capability}"
    return None


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
