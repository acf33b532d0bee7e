"""What Pallas kernels load, store and compute: counted by running their jaxprs program by program, load by load.

A load counts what it reads of an array in device memory, under its mask; so do stores. Whether a cache holds the bytes already
is the GPU's own affair. Integers are computed, for loops, masks and indices depend on them; what is made of floats is computed
only where the floats are given.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np


class Kernel(NamedTuple):
    """What all programs of a kernel did, by the names of its arrays."""

    reads: Counter  # bytes
    writes: Counter  # bytes
    results: Counter  # bytes of the arrays it makes
    operations: Counter  # FLOPs of products under "matrix", exponentials under "exponentials", other FLOPs under "other"


def observe(function, *args: Any, watch=None) -> dict[str, Kernel]:
    """The kernels that function(*args) launches, by name. args are pytrees of arrays or of `jax.ShapeDtypeStruct`s.

    Where all arrays are given, watch(kernel, array, value) sees each value that a kernel stores, in order.
    """
    leaves = jax.tree.leaves(args)
    jaxpr = jax.make_jaxpr(function)(*args)
    walk = _Walk(watch)
    walk.run(jaxpr.jaxpr, jaxpr.consts, [_UNKNOWN if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves])
    return walk.kernels


class _Unknown:
    """A value that is not computed."""

    def __repr__(self):
        return "unknown"


_UNKNOWN = _Unknown()


class _Array(NamedTuple):
    """An array in device memory."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Any  # a NumPy array, or unknown


class _Ref(NamedTuple):
    """A part of an array: for each axis a coordinate, or a vector of them."""

    array: _Array
    at: tuple[np.ndarray, ...]

    def narrow(self, indexer) -> "_Ref":
        """What an indexer of Pallas takes of it."""
        indices, at = iter(indexer.indices), []
        for axis in self.at:
            at.append(self._along(axis, next(indices)) if axis.ndim else axis)
        return self._replace(at=tuple(at))

    def _along(self, axis, index):
        if not hasattr(index, "stride"):
            return axis[np.asarray(_known(index, f"an index into {self.array.name}"))]
        start = int(_known(index.start, f"a slice of {self.array.name}"))
        stop = start + index.size * index.stride
        if not 0 <= start <= stop <= axis.size:
            raise IndexError(f"{self.array.name}: a slice from {start} to {stop} of a block of {axis.size}")
        return axis[start : stop : index.stride]

    @property
    def shape(self):
        return tuple(axis.size for axis in self.at if axis.ndim)

    def places(self, mask):
        """The coordinates of the access, and where it touches the array; raises where that is outside of it."""
        grids = np.meshgrid(*self.at, indexing="ij", sparse=True)
        inside = np.ones((), bool)
        for grid, size in zip(grids, self.array.shape, strict=True):
            inside = inside & (0 <= grid) & (grid < size)
        inside = np.broadcast_to(inside, [axis.size for axis in self.at]).reshape(self.shape)
        touched = np.broadcast_to(True if mask is None else _known(mask, f"a mask of {self.array.name}"), self.shape)
        if np.any(touched & ~inside):
            raise IndexError(f"{self.array.name}: an access beyond its shape {self.array.shape}")
        return touched

    def indices(self):
        """To index the array's data with, whatever lies outside moved to the last entry."""
        return np.ix_(*(np.minimum(np.atleast_1d(axis), n - 1) for axis, n in zip(self.at, self.array.shape, strict=True)))


def _known(x, what: str):
    if x is _UNKNOWN:
        raise ValueError(f"{what} depends on data that is not given: pass arrays, not their shapes.")
    return np.asarray(x)


class _Walk:
    """Runs jaxprs, with unknown values where floats are."""

    def __init__(self, watch):
        self.kernels: dict[str, Kernel] = {}
        self.watch = watch
        self.kernel, self.name, self.program, self.grid = None, None, (), ()

    def run(self, jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            rule = getattr(self, f"_{eqn.primitive.name}", self._plain)
            results = rule(eqn, [read(v) for v in eqn.invars], eqn.params)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _plain(self, eqn, args, params):
        if any(isinstance(x, _Ref) for x in args):
            raise NotImplementedError(f"{eqn.primitive.name} of an array in device memory is not known to be a load or a store.")
        if self.kernel is not None:
            self._count(eqn)
        if any(x is _UNKNOWN for x in args):
            return [_UNKNOWN] * len(eqn.outvars)
        result = eqn.primitive.bind(*args, **params)
        return result if eqn.primitive.multiple_results else [result]

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

    # Calls and control flow

    def _call(self, eqn, args, params):
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)

    _jit = _pjit = _closed_call = _core_call = _custom_jvp_call = _custom_vjp_call = _checkpoint = _call

    def _platform_index(self, eqn, args, params):
        return [len(params["platforms"]) - 1]  # the default: the same kernel, for the interpreter

    def _cond(self, eqn, args, params):
        branches = params["branches"]
        index = int(_known(args[0], "a condition"))
        branch = branches[min(max(index, 0), len(branches) - 1)]
        return self.run(branch.jaxpr, branch.consts, args[1:])

    def _while(self, eqn, args, params):
        cond, body, n = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
        cond_consts, body_consts, carry = args[:n], args[n : n + params["body_nconsts"]], args[n + params["body_nconsts"] :]
        while _known(self.run(cond.jaxpr, cond.consts, [*cond_consts, *carry])[0], "the end of a loop"):
            carry = self.run(body.jaxpr, body.consts, [*body_consts, *carry])
        return carry

    def _scan(self, eqn, args, params):
        body, consts, length = params["jaxpr"], args[: params["num_consts"]], params["length"]
        end = params["num_consts"] + params["num_carry"]
        carry, xs, rows = args[params["num_consts"] : end], args[end:], []
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            x = [x if x is _UNKNOWN else x[i] for x in xs]
            out = self.run(body.jaxpr, body.consts, [*consts, *carry, *x])
            carry = out[: params["num_carry"]]
            rows.append(out[params["num_carry"] :])
        rows = rows[:: -1 if params["reverse"] else 1]
        stack = lambda ys: _UNKNOWN if any(y is _UNKNOWN for y in ys) else np.stack(ys)
        return [*carry, *(stack(ys) for ys in zip(*rows, strict=True))]

    # Kernels

    def _pallas_call(self, eqn, args, params):
        mapping, self.name = params["grid_mapping"], params["name"]
        if mapping.num_index_operands or mapping.num_scratch_operands or params["input_output_aliases"]:
            raise NotImplementedError(f"{self.name}: scalar prefetch, scratch memory and aliases are not walked through.")
        self.kernel = self.kernels.setdefault(self.name, Kernel(Counter(), Counter(), Counter(), Counter()))
        self.grid, known = mapping.grid, all(x is not _UNKNOWN for x in args)
        results = [np.zeros(x.shape, x.dtype) if known else _UNKNOWN for x in params["out_avals"]]
        data = [x if x is _UNKNOWN else np.asarray(x) for x in args] + results
        arrays = [
            _Array(block.origin, block.array_aval.shape, np.dtype(block.array_aval.dtype), x)
            for block, x in zip(mapping.block_mappings, data, strict=True)
        ]
        for array in arrays[len(args) :]:
            self.kernel.results[array.name] += math.prod(array.shape) * array.dtype.itemsize
        for self.program in np.ndindex(*mapping.grid):
            blocks = zip(arrays, mapping.block_mappings, strict=True)
            self.run(params["jaxpr"], (), [self._block(array, block) for array, block in blocks])
        self.kernel = None
        return results

    def _block(self, array: _Array, block) -> _Ref:
        index_map, at = block.index_map_jaxpr, []
        self.kernel, kernel = None, self.kernel  # which block it is, is not the kernel's arithmetic
        for i, size in zip(self.run(index_map.jaxpr, index_map.consts, self.program), block.block_shape, strict=True):
            n = getattr(size, "block_size", None)
            at.append(np.asarray(i) if n is None else int(i) * n + np.arange(n))
        self.kernel = kernel
        return _Ref(array, tuple(at))

    def _program_id(self, eqn, args, params):
        return [np.int32(self.program[params["axis"]])]

    def _num_programs(self, eqn, args, params):
        return [np.int32(self.grid[params["axis"]])]

    def _debug_barrier(self, eqn, args, params):
        return []

    _debug_barrier_p = _debug_barrier

    def _get(self, eqn, args, params):
        ref, *indices = args
        return [self._load(ref, jax.tree.unflatten(params["tree"], indices))]

    def _swap(self, eqn, args, params):
        ref, value, *indices = args
        return [self._store(ref, jax.tree.unflatten(params["tree"], indices), value)]

    def _masked_load(self, eqn, args, params):
        return [self._load(*jax.tree.unflatten(params["args_tree"], args))]

    def _masked_swap(self, eqn, args, params):
        return [self._store(*jax.tree.unflatten(params["args_tree"], args))]

    def _load(self, ref: _Ref, indexers, mask=None, other=0):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.places(mask)
        self.kernel.reads[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is _UNKNOWN:
            return _UNKNOWN
        return np.where(touched, array.data[ref.indices()].reshape(ref.shape), other).astype(array.dtype)

    def _store(self, ref: _Ref, indexers, value, mask=None):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.places(mask)
        self.kernel.writes[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is not _UNKNOWN:
            at = np.broadcast_arrays(*(grid.reshape(grid.shape) for grid in ref.indices()))
            at = tuple(grid.reshape(ref.shape)[touched] for grid in at)
            array.data[at] = np.broadcast_to(_known(value, f"what is stored to {array.name}"), ref.shape)[touched]
            if self.watch:
                self.watch(self.name, array.name, np.asarray(value)[touched])
        return _UNKNOWN  # the old value, which no kernel here looks at


_ARITHMETIC = {"add", "sub", "mul", "div", "max", "min", "neg", "tanh", "log", "rsqrt", "square", "reduce_max", "reduce_sum"}
