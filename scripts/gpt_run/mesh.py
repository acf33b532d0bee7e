"""The mesh of a run: which devices it takes, and what lies where on them."""

import contextlib
import math

from scripts.gpt_run.options import AXES
from scripts.gpt_run.stops import Refused

# of a parameter, by the module that it is in: which axis lies on `data`, and which on `model`:
# heads, hidden features
PLACES = dict(
    query=(0, 1),
    key=(0, 1),
    value=(0, 1),
    out=(2, 0),
    up=(0, 1),
    down=(1, 0),
    embedding=(1, None),
    head=(0, 1),
)


def on_mesh(args):
    """A context: the mesh is that of all that jax does in it. Refuses what does not fit on it."""
    sizes = args.mesh or {}
    of = dict(
        data=("--batch / --accumulate", args.batch // args.accumulate),
        model=("--kv-heads", args.kv_heads),
        context=("--context", args.context),
    )
    for axis, (option, n) in of.items():
        if n % sizes.get(axis, 1):
            raise Refused(
                f"{option} must be a multiple of {axis} in --mesh, {sizes[axis]}; got {n}."
            )
    if not (args.mesh or args.simulate_devices):
        return contextlib.nullcontext()
    import jax
    from jax.sharding import AxisType

    if args.simulate_devices and args.hosts is None:
        jax.config.update("jax_num_cpu_devices", args.simulate_devices)
    needed, devices = math.prod(sizes.values()), jax.devices()
    if needed > len(devices):
        hint = f"On a CPU --simulate-devices {needed} makes them."
        raise Refused(f"--mesh needs {needed} devices; there are {len(devices)}. {hint}")
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices[:needed]
    )
    return jax.set_mesh(mesh) if sizes else contextlib.nullcontext()


def context_of(args):
    """How the devices that a sequence lies on work together; None where it is whole on one."""
    from pallas_flash import context_parallel

    axes = {
        name: axis
        for name, axis in dict(batch="data", heads="model").items()
        if axis in (args.mesh or {})
    }
    return context_parallel.Ring("context", **axes) if "context" in (args.mesh or {}) else None


def specs(state):
    """The PartitionSpec of each array of a state, the optimizer's like those of the parameters they
    are for."""
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.get_abstract_mesh()

    def spec(path, x):
        named = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        places = next((PLACES[name] for name in named if name in PLACES and x.ndim > 1), ())
        axes = [None] * x.ndim
        for name, at in zip(AXES, places, strict=False):
            if at is not None and name in mesh.shape and x.shape[at] % mesh.shape[name] == 0:
                axes[at] = name
        return P(*axes)

    return jax.tree_util.tree_map_with_path(spec, state)


def shardings(state):
    """Where each array of a state lies."""
    import jax
    from jax.sharding import NamedSharding, SingleDeviceSharding

    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[0]), state)
    return jax.tree.map(lambda x, spec: NamedSharding(mesh, spec), state, specs(state))


def placed(state):
    """A new state, where it lies; of several processes each has all of it, and puts there its
    part."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return jax.device_put(state, shardings(state))
    part = lambda x, sharding: jax.make_array_from_callback(
        x.shape, sharding, np.asarray(x).__getitem__
    )
    return jax.tree.map(part, state, shardings(state))


def kept(state):
    """The state of a jitted step, where it lay before it."""
    import jax

    if jax.sharding.get_abstract_mesh().empty:
        return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, specs(state))


def spread(tokens):
    """Tokens [B, T], over the axes of the mesh."""
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tokens
    axes = dict(zip(("data", "context"), tokens.shape, strict=True))
    fits = [
        name if name in mesh.shape and n % mesh.shape[name] == 0 else None
        for name, n in axes.items()
    ]
    return jax.lax.with_sharding_constraint(tokens, P(*fits))
