"""The device that a call is for; a GPU's capability, shared memory and processors."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractDevice

from pallas_flash.jax_support import gpus

# platforms that a program is lowered for, each with that of its jax.Device, for which there may be
# kernels
PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
# parameters of jax's GPU interpreter, and the effects of kernels there: tests put them here, and a
# GPU of any family is simulated
interpret: Any = None
interpret_effects: frozenset = frozenset()


def here() -> jax.Device | AbstractDevice:
    """The device that a call is for, as far as that is known while it is traced. It is of the kind
    that the abstract mesh names, which need not be on this machine, else the default device in
    force."""
    named, default = jax.sharding.get_abstract_mesh().abstract_device, _default()
    if named is None or named.device_kind == default.device_kind:
        return default
    return next(iter(_devices_like(named)), named)


def gpu() -> jax.Device | None:
    """The device that a call is for, if it is a GPU of this machine, where kernels can be tried."""
    device = here()
    is_real = device.platform == "gpu" and not isinstance(device, AbstractDevice)
    return device if is_real else None


def at(values: Iterable) -> contextlib.AbstractContextManager:
    """A context in which the default device is the one that arrays among the values are committed
    to."""
    arrays = [x for x in values if isinstance(x, jax.Array)]
    devices, default = next(filter(None, map(_committed, arrays)), ()), _default()
    # CPUs are alike
    if not devices or default in devices or devices[0].platform == default.platform == "cpu":
        return contextlib.nullcontext()
    return jax.default_device(devices[0])


def on_cpu() -> contextlib.AbstractContextManager:
    """A context in which the default device is a CPU, unless jax was told to have none."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _committed(x) -> list[jax.Device]:
    """The devices that an array is committed to; within jit the type of an array on a mesh names
    them."""
    known = x.to_concrete_value() if isinstance(x, jax.core.Tracer) else x
    if known is None:
        named = jax.typeof(x).sharding.mesh.abstract_device
        return [] if named is None else _devices_like(named)
    is_committed = getattr(known, "committed", False)  # NumPy's are not
    return (
        sorted(known.sharding.addressable_devices, key=lambda device: device.id)
        if is_committed
        else []
    )


def _default() -> jax.Device:
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def _devices_like(named: AbstractDevice) -> list[jax.Device]:
    """The devices of this machine that are of a kind."""
    try:
        return [
            device
            for device in jax.local_devices(backend=named.platform)
            if device.device_kind == named.device_kind
        ]
    except RuntimeError:  # there is no such platform
        return []


def compute_capability() -> float | None:
    """The compute capability of the GPU that a call is for; None where that is not NVIDIA's."""
    device = here()
    if device.platform != "gpu":
        return None
    try:
        return float(device.compute_capability)
    except AttributeError:  # an AbstractDevice
        known = gpus.find(device.device_kind)
        return known and known.architecture.version
    except ValueError:  # AMD's have names
        return None


def has_tma() -> bool:
    """Whether the GPU that a call is for copies by TMA."""
    return (compute_capability() or 0.0) >= 9.0


def shared_memory() -> int:
    """Bytes of shared memory that a program can have on the GPU that a call is for."""
    known = getattr(here(), "shared_memory_per_block_optin", None)  # which Mosaic asks for too
    return known or gpus.least(compute_capability()).architecture.program_bytes


def mosaic_capability() -> float:
    """The compute capability that Mosaic lowers for. It asks the abstract mesh's device, and takes
    9.0 where that is an AbstractDevice that does not say."""
    named, default = jax.sharding.get_abstract_mesh().abstract_device, _default()
    is_default = named is None or named.device_kind == default.device_kind
    return float(getattr(default if is_default else named, "compute_capability", 9.0))


def processors() -> int:
    """The number of streaming multiprocessors of the GPU that a call is for, fewer for a part of a
    GPU; where there is none, an H100's."""
    device, known = here(), None
    if device.platform == "gpu":
        known = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return known or _kind().processors


def l2_cache() -> int:
    """Bytes of the L2 cache of the GPU that a call is for; where there is none, of an H100's."""
    return _kind().l2


def _kind() -> gpus.Kind:
    """What is known of the GPU that a call is for: the facts of its kind, or the least of its
    compute capability; an H100's where that is not known either."""
    device, capability = here(), compute_capability()
    known = gpus.find(device.device_kind) or (capability and gpus.least(capability))
    return known or gpus.KINDS["H100"]
