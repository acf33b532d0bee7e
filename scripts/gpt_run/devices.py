"""The devices of a run, of one process or several, and how its arrays are sharded over them."""

import contextlib
import io
import math

import jax
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import context_parallel
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
    """Of each array of a state; the optimizer's are those of the parameters."""
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
