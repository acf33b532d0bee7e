"""Meshes of the devices that conftest asks for, and arrays on them."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding

needs_devices = pytest.mark.skipif(
    len(jax.devices()) < 8, reason="needs eight devices; conftest asks for eight on a CPU"
)


def make_mesh(kind=AxisType.Explicit, **axes: int):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def put(mesh, spec, *arrays):
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays)
