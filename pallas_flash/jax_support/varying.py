"""The axes of the mesh over which an array varies inside of a shard_map."""

from typing import Any

import jax
from jax import lax


def vary_alike(tree: Any) -> Any:
    """Lets all arrays vary over every axis of the mesh that one of them varies over, as operations
    and loops inside of shard_map need. An array that was the same on all devices gets the sum of
    its gradients."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x):
        missing = tuple(axes - varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def varying_axes(x) -> frozenset[str]:
    """The axes of the mesh over which an array varies inside of a shard_map that checks this."""
    return jax.typeof(x).manual_axis_type.varying
