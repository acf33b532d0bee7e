"""The devices of a run: those of one process or several, how arrays are sharded over them, why a
GPU is not used, memory and speed."""

import contextlib
import io
import math
import os
import pathlib
import re

import jax
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import context_parallel
from pallas_flash.accounting import GPUS
from scripts.gpt_run.console import UserError

# the axes of a matrix, by its module: FSDP on `data`; heads and hidden features on `model`
AXES_OF = dict(
    query=("data", "model", None),
    key=("data", "model", None),
    value=("data", "model", None),
    out=("model", None, "data"),
    up=("data", "model"),
    down=("model", "data"),
    embedding=(None, "data"),
    head=("data", "model"),
)


@contextlib.contextmanager
def open_devices(args):
    """Runs what is inside on the devices of --hosts, --simulate-devices and --mesh; only the first
    process prints."""
    if args.simulate_devices:
        jax.config.update("jax_num_cpu_devices", args.simulate_devices)
        # XLA restores a CPU's program without the order of its collectives: devices that begin with
        # different ones wait for each other for ever (jax 0.11.2)
        jax.config.update("jax_enable_compilation_cache", False)
    if args.hosts is not None:
        trains = not (args.check or args.eval_only)
        if not (args.mesh and trains and (args.resume or args.out)):
            raise UserError(
                "--hosts is for training on a --mesh, in a folder that all processes see: give "
                "--out or --resume."
            )
        try:
            jax.distributed.initialize(**args.hosts)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--hosts: {error}") from None
    silent = contextlib.redirect_stdout(io.StringIO())
    with contextlib.nullcontext() if jax.process_index() == 0 else silent, set_mesh(args.mesh):
        yield
    if args.hosts is not None:
        jax.distributed.shutdown()  # waits for the others, so not after an error


def set_mesh(sizes: dict[str, int] | None):
    if not sizes:
        return contextlib.nullcontext()
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        raise UserError(
            f"--mesh needs {needed} devices; there are {len(devices)}. On a CPU, "
            f"--simulate-devices {needed} emulates them."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.set_mesh(
        jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices[:needed])
    )


def context_parallelism(args):
    """How devices share a sequence; None where each has whole ones."""
    sizes = args.mesh or {}
    axes = {name: a for name, a in dict(batch="data", heads="model").items() if a in sizes}
    return context_parallel.Ring("context", **axes) if "context" in sizes else None


def spec(shape: tuple[int, ...], axes) -> P:
    """Each dimension on its axis, where the mesh has it and it divides the dimension."""
    mesh = jax.sharding.get_abstract_mesh().shape
    return P(
        *(a if a in mesh and n % mesh[a] == 0 else None for n, a in zip(shape, axes, strict=False))
    )


def shardings(state):
    """A sharding for each array of a state; the optimizer's are those of the parameters."""
    mesh = jax.sharding.get_mesh()

    def sharding(path, x):
        if mesh.empty:
            return SingleDeviceSharding(jax.devices()[0])
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        axes = next((AXES_OF[name] for name in names if name in AXES_OF), ())
        return NamedSharding(mesh, spec(x.shape, axes if x.ndim > 1 else ()))

    return jax.tree_util.tree_map_with_path(sharding, state)


def shard_tokens(tokens):
    """Tokens [B, T]: B on `data`, T on `context`."""
    if jax.sharding.get_abstract_mesh().empty:
        return tokens
    return jax.lax.with_sharding_constraint(tokens, spec(tokens.shape, ("data", "context")))


# ---- the machine ----

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
    """Dense 16-bit operations per second of a GPU, None for other devices."""
    return next((gpu.products for gpu in GPUS.values() if gpu.kind == kind), None)
