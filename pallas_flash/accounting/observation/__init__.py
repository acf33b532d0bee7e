"""What Pallas kernels load, store and compute: counted by running their jaxprs program by program,
load by load.

A load counts what it reads of an array in device memory, under its mask; a store counts what it
writes. Whether a cache holds the bytes already is not considered. Integers are computed, because
loops, masks and indices depend on them. Results of floats are computed only where the floats are
given.
"""

from typing import Any

import jax

from pallas_flash.accounting.observation.memory import Kernel
from pallas_flash.accounting.observation.mosaic import Warpgroups
from pallas_flash.accounting.observation.triton import PallasCalls
from pallas_flash.accounting.observation.walk import UNKNOWN

__all__ = ["Kernel", "observe"]


class _Observer(PallasCalls, Warpgroups):
    """Knows the kernels of both."""


def observe(function, *args: Any, watch=None) -> dict[str, Kernel]:
    """The kernels that function(*args) launches, by name. args are pytrees of arrays or of
    `jax.ShapeDtypeStruct`s.

    Where all arrays are given, watch(kernel, array, value) sees each value that a kernel stores, in
    order.
    """
    leaves = jax.tree.leaves(args)
    jaxpr = jax.make_jaxpr(function)(*args)
    walk = _Observer(watch)
    walk.run(
        jaxpr.jaxpr,
        jaxpr.consts,
        [UNKNOWN if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves],
    )
    return walk.kernels
