"""Arrays in device memory, and what is loaded from them and stored to them."""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_flash.accounting.observation.walk import UNKNOWN, Walk, known


class Kernel(NamedTuple):
    """What all programs of a kernel did, by the names of its arrays."""

    reads: Counter  # bytes
    writes: Counter  # bytes
    results: Counter  # bytes of the arrays it makes
    # FLOPs of products under "matrix", exponentials under "exponentials", other FLOPs under "other"
    operations: Counter


class Array(NamedTuple):
    """An array in device memory."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Any  # a NumPy array, or unknown


class Ref(NamedTuple):
    """A part of an array: for each axis a coordinate, or a vector of them."""

    array: Array
    at: tuple[np.ndarray, ...]

    def narrow(self, indexer) -> "Ref":
        """What an indexer of Pallas takes of it."""
        indices, at = iter(self._each(indexer.indices)), []
        for axis in self.at:
            at.append(self._along(axis, next(indices)) if axis.ndim else axis)
        return self._replace(at=tuple(at))

    def _each(self, indices) -> list:
        """The indices, each of its own axis: vectors are one index together, of which here all but
        one repeat a number."""
        is_vector = lambda i: (
            not hasattr(i, "stride") and np.ndim(known(i, f"an index into {self.array.name}")) > 0
        )
        vectors = [n for n, i in enumerate(indices) if is_vector(i)]
        moving = [n for n in vectors if np.ptp(indices[n])] or vectors[-1:]
        if len(moving) > 1:
            raise NotImplementedError(
                f"{self.array.name}: several vectors of indices that move are not walked through."
            )
        return [
            np.ravel(i)[0] if n in vectors and n not in moving else i for n, i in enumerate(indices)
        ]

    def _along(self, axis, index):
        if not hasattr(index, "stride"):
            return axis[np.asarray(known(index, f"an index into {self.array.name}"))]
        start = int(known(index.start, f"a slice of {self.array.name}"))
        stop = start + index.size * index.stride
        if not 0 <= start <= stop <= axis.size:
            raise IndexError(
                f"{self.array.name}: a slice from {start} to {stop} of a block of {axis.size}"
            )
        return axis[start : stop : index.stride]

    @property
    def shape(self):
        return tuple(axis.size for axis in self.at if axis.ndim)

    def inside(self):
        """Which of its elements the array has."""
        grids = np.meshgrid(*self.at, indexing="ij", sparse=True)
        inside = np.ones((), bool)
        for grid, size in zip(grids, self.array.shape, strict=True):
            inside = inside & (0 <= grid) & (grid < size)
        return np.broadcast_to(inside, [axis.size for axis in self.at]).reshape(self.shape)

    def touched(self, mask):
        """Which of its elements an access touches; raises where these are beyond the array."""
        touched = np.broadcast_to(
            True if mask is None else known(mask, f"a mask of {self.array.name}"), self.shape
        )
        if np.any(touched & ~self.inside()):
            raise IndexError(f"{self.array.name}: an access beyond its shape {self.array.shape}")
        return touched

    def indices(self):
        """To index the array's data with, whatever lies outside moved to the last entry."""
        return np.ix_(
            *(
                np.minimum(np.atleast_1d(axis), n - 1)
                for axis, n in zip(self.at, self.array.shape, strict=True)
            )
        )


class Memory(Walk):
    """A walk that counts, in `kernel`, what a kernel loads, stores and computes."""

    def __init__(self, watch):
        self.kernels: dict[str, Kernel] = {}
        self.watch = watch
        self.kernel, self.name, self.program, self.grid = None, None, (), ()

    def _plain(self, eqn, args, params):
        if any(isinstance(x, Ref) for x in args):
            raise NotImplementedError(
                f"{eqn.primitive.name} of an array in device memory is not known to be a load or a "
                "store."
            )
        if self.kernel is not None:
            self._count(eqn)
        return super()._plain(eqn, args, params)

    def _count(self, eqn):
        name, operations = eqn.primitive.name, self.kernel.operations
        (x, *_), out = (v.aval for v in eqn.invars or eqn.outvars), eqn.outvars[0].aval
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            operations["matrix"] += 2 * out.size * math.prod(x.shape[axis] for axis in contracted)
        elif name in ("exp", "exp2"):
            operations["exponentials"] += out.size
        elif name in _ARITHMETIC and out.dtype == np.float32:
            operations["other"] += x.size if name.startswith("reduce") else out.size

    def _get(self, eqn, args, params):
        ref, *indices = args
        return [self.loaded(ref, jax.tree.unflatten(params["tree"], indices))]

    def _swap(self, eqn, args, params):
        ref, value, *indices = args
        return [self.stored(ref, jax.tree.unflatten(params["tree"], indices), value)]

    def _masked_load(self, eqn, args, params):
        return [self.loaded(*jax.tree.unflatten(params["args_tree"], args))]

    def _masked_swap(self, eqn, args, params):
        return [self.stored(*jax.tree.unflatten(params["args_tree"], args))]

    def loaded(self, ref: Ref, indexers, mask=None, other=0):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.touched(mask)
        self.kernel.reads[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is UNKNOWN:
            return UNKNOWN
        return np.where(touched, array.data[ref.indices()].reshape(ref.shape), other).astype(
            array.dtype
        )

    def stored(self, ref: Ref, indexers, value, mask=None):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.touched(mask)
        self.kernel.writes[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is not UNKNOWN:
            at = np.broadcast_arrays(*(grid.reshape(grid.shape) for grid in ref.indices()))
            at = tuple(grid.reshape(ref.shape)[touched] for grid in at)
            array.data[at] = np.broadcast_to(
                known(value, f"what is stored to {array.name}"), ref.shape
            )[touched]
            if self.watch:
                self.watch(self.name, array.name, np.asarray(value)[touched])
        return UNKNOWN  # the old value, which no kernel here looks at


_ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "neg",
    "tanh",
    "log",
    "rsqrt",
    "square",
    "reduce_max",
    "reduce_sum",
}
