"""Counts what Pallas kernels load, store and compute, by running their jaxprs program by program.

A load counts what it reads of an array in device memory, under its mask; caches are not considered.
Integers are computed, since loops, masks and indices depend on them; floats only where the arrays
are given, not their shapes. The warpgroups of a Mosaic GPU program run one after another: what one
waits for does not change what another copies.
"""

import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_flash.attention import normalised
from pallas_flash.choose import selection
from pallas_flash.transforms import autodiff

WARPS = 4  # of a warpgroup
BEYOND = 512  # how far the last tile of a Mosaic kernel may reach over the end of an array
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "unknown"})()


class Kernel(NamedTuple):
    """What all programs of a kernel did: bytes by the names of its arrays, and operations."""

    reads: Counter
    writes: Counter
    operations: Counter  # FLOPs of products under "matrix", and "exponentials"


def observe(function, *args: Any, watch=None) -> dict[str, Kernel]:
    """The kernels that function(*args) launches, by name. args are pytrees of arrays or of
    `jax.ShapeDtypeStruct`s.

    Where all arrays are given, watch(kernel, array, value) sees each value that a kernel stores.
    """
    leaves, jaxpr = jax.tree.leaves(args), jax.make_jaxpr(function)(*args)
    observer = Observer(watch)
    values = [UNKNOWN if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    observer.run(jaxpr.jaxpr, jaxpr.consts, values)
    return observer.kernels


def attention(implementation: str, tiles: Any = None, **call: Any):
    """(q, k, v) -> o by an implementation, on any device, with these tiles; `call` is what
    `flash_attention` takes by name."""

    def attend(q, k, v):
        problem, operands = normalised(q, k, v, **call)
        _, choice = selection.first(problem, implementation)
        # the custom_vjp itself, of which nothing is traced later
        choice = choice._replace(tiles=tiles or choice.tiles, reverse_only=True)
        o, *_ = autodiff.attend(problem, choice, operands)
        return o

    return attend


def known(x, what: str):
    if x is UNKNOWN:
        raise ValueError(f"{what} depends on data that is not given: pass arrays, not shapes.")
    return np.asarray(x)


# ---- arrays in device memory ----


class Array(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Any  # a NumPy array, or UNKNOWN


class Ref(NamedTuple):
    """A slice of an array: for each axis a coordinate, or a vector of them."""

    array: Array
    axes: tuple[np.ndarray, ...]

    def narrow(self, indexer) -> "Ref":
        """What an indexer of Pallas takes of it."""
        indices = iter(self._scalars(indexer.indices))
        axes = [self._along(axis, next(indices)) if axis.ndim else axis for axis in self.axes]
        return self._replace(axes=tuple(axes))

    def _scalars(self, indices) -> list:
        """The indices, vectors that repeat a number as this number: together with another vector
        they are one index."""
        is_vector = lambda i: not hasattr(i, "stride") and np.ndim(known(i, self.array.name)) > 0
        vectors = [n for n, i in enumerate(indices) if is_vector(i)]
        moving = [n for n in vectors if np.ptp(indices[n])] or vectors[-1:]
        assert len(moving) <= 1, f"{self.array.name}: several vectors of indices that move"
        constant = {*vectors} - {*moving}
        return [np.ravel(i)[0] if n in constant else i for n, i in enumerate(indices)]

    def _along(self, axis, index):
        if not hasattr(index, "stride"):
            return axis[np.asarray(known(index, f"an index into {self.array.name}"))]
        start = int(known(index.start, f"a slice of {self.array.name}"))
        stop = start + index.size * index.stride
        if not 0 <= start <= stop <= axis.size:
            raise IndexError(f"{self.array.name}: [{start}:{stop}] of a block of {axis.size}")
        return axis[start : stop : index.stride]

    @property
    def shape(self):
        return tuple(axis.size for axis in self.axes if axis.ndim)

    def inside(self):
        """Which of its elements the array has."""
        grids = np.meshgrid(*self.axes, indexing="ij", sparse=True)
        sizes = zip(grids, self.array.shape, strict=True)
        inside = np.all(np.broadcast_arrays(*((x >= 0) & (x < n) for x, n in sizes)), axis=0)
        return inside.reshape(self.shape)

    def touched(self, mask):
        """Which of its elements an access touches; raises where these are beyond the array."""
        mask = True if mask is None else known(mask, f"a mask of {self.array.name}")
        touched = np.broadcast_to(mask, self.shape)
        if np.any(touched & ~self.inside()):
            raise IndexError(f"{self.array.name}: an access beyond its shape {self.array.shape}")
        return touched

    def grid(self):
        """Indices into the data; what lies outside is moved to the last entry."""
        axes = zip(self.axes, self.array.shape, strict=True)
        grids = np.broadcast_arrays(
            *np.ix_(*(np.minimum(np.atleast_1d(x), n - 1) for x, n in axes))
        )
        return tuple(grid.reshape(self.shape) for grid in grids)


class Cell:
    """Registers, shared memory or a barrier: what it holds is known where it was given, as the
    counter of a loop is."""

    def __init__(self, value: Any = UNKNOWN):
        self.value = value


# ---- jaxprs ----


class Walk:
    """Runs jaxprs on values of which some are unknown: a primitive called x by the method _x where
    there is one, else by jax where all its inputs are known."""

    def run(self, jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name.removesuffix("_p")  # jax changed some names
            rule = getattr(self, f"_{name}", self._plain)
            results = rule(eqn, [read(v) for v in eqn.invars], eqn.params)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _plain(self, eqn, args, params):
        if any(x is UNKNOWN for x in args):
            return [UNKNOWN] * len(eqn.outvars)
        result = eqn.primitive.bind(*args, **params)
        return result if eqn.primitive.multiple_results else [result]

    def _call(self, eqn, args, params):
        inner = next(params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in params)
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)

    _jit = _pjit = _closed_call = _custom_jvp_call = _custom_vjp_call = _checkpoint = _call
    _custom_vmap_call = _call

    def _platform_index(self, eqn, args, params):
        return [len(params["platforms"]) - 1]  # the default: the same kernel, for the interpreter

    def _cond(self, eqn, args, params):
        """A branch that depends on floats counts as taken."""
        last = len(params["branches"]) - 1
        branch = params["branches"][last if args[0] is UNKNOWN else min(max(int(args[0]), 0), last)]
        return self.run(branch.jaxpr, branch.consts, args[1:])

    def _while(self, eqn, args, params):
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = args[second:]
        proceed = lambda: self.run(cond.jaxpr, cond.consts, [*args[:first], *carry])[0]
        while known(proceed(), "the end of a loop"):
            carry = self.run(body.jaxpr, body.consts, [*args[first:second], *carry])
        return carry


class Observer(Walk):
    """Counts, in `kernel`, what a kernel loads, stores and computes."""

    def __init__(self, watch):
        self.watch, self.kernels = watch, {}
        self.kernel, self.name = None, None
        self.program, self.threads = (), {}  # the indices of a program, and of Mosaic's by axis

    def _launch(self, name: str):
        self.name = name
        self.kernel = self.kernels.setdefault(name, Kernel(*(Counter() for _ in range(3))))

    def _plain(self, eqn, args, params):
        if any(isinstance(x, Cell) for x in args):  # barriers, and what is done with registers
            return [UNKNOWN] * len(eqn.outvars)
        assert not any(isinstance(x, Ref) for x in args), f"{eqn.primitive.name} of device memory"
        name, operations = eqn.primitive.name, self.kernel and self.kernel.operations
        if self.kernel and name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            operations["matrix"] += 2 * eqn.outvars[0].aval.size * depth
        elif self.kernel and name in ("exp", "exp2"):
            operations["exponentials"] += eqn.outvars[0].aval.size
        return super()._plain(eqn, args, params)

    def loaded(self, ref: Ref, indexers, mask=None, other=0):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.touched(mask)
        self.kernel.reads[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is UNKNOWN:
            return UNKNOWN
        return np.where(touched, array.data[ref.grid()], other).astype(array.dtype)

    def stored(self, ref: Ref, indexers, value, mask=None):
        for indexer in indexers:
            ref = ref.narrow(indexer)
        array, touched = ref.array, ref.touched(mask)
        self.kernel.writes[array.name] += int(touched.sum()) * array.dtype.itemsize
        if array.data is not UNKNOWN:
            value = np.broadcast_to(known(value, f"what is stored to {array.name}"), ref.shape)
            array.data[tuple(grid[touched] for grid in ref.grid())] = value[touched]
            if self.watch:
                self.watch(self.name, array.name, value[touched])
        return UNKNOWN  # the old value, which no kernel here looks at

    def _get(self, eqn, args, params):
        first, *indices = args
        indexers = jax.tree.unflatten(params["tree"], indices)
        if isinstance(first, Ref):
            return [self.loaded(first, indexers)]
        return [UNKNOWN if indexers or not isinstance(first, Cell) else first.value]

    _load = _get

    def _swap(self, eqn, args, params):
        first, value, *indices = args
        if isinstance(first, Ref):
            return [self.stored(first, jax.tree.unflatten(params["tree"], indices), value)]
        first.value = UNKNOWN if indices else value
        return [UNKNOWN]

    # ---- pl.pallas_call: blocks are pointers, and each load reads device memory ----

    def _pallas_call(self, eqn, args, params):
        mapping = params["grid_mapping"]
        assert not (mapping.num_index_operands or mapping.num_scratch_operands)
        is_known = all(x is not UNKNOWN for x in args)
        results = [np.zeros(x.shape, x.dtype) if is_known else UNKNOWN for x in params["out_avals"]]
        data = [x if x is UNKNOWN else np.asarray(x) for x in args] + results
        arrays = [
            Array(block.origin, block.array_aval.shape, np.dtype(block.array_aval.dtype), x)
            for block, x in zip(mapping.block_mappings, data, strict=True)
        ]
        for self.program in np.ndindex(*mapping.grid):
            blocks = zip(arrays, mapping.block_mappings, strict=True)
            refs = [self._block(array, block) for array, block in blocks]
            if not any(self.program):
                self._launch(params["name"])
            self.run(params["jaxpr"], (), refs)
        self.kernel = None
        return results

    def _block(self, array: Array, block) -> Ref:
        index_map, kernel = block.index_map_jaxpr, self.kernel
        self.kernel = None  # which block it is, is not the kernel's arithmetic
        indices = self.run(index_map.jaxpr, index_map.consts, self.program)
        self.kernel, axes = kernel, []
        for i, size in zip(indices, block.block_shape, strict=True):
            n = getattr(size, "block_size", None)
            axes.append(np.asarray(i) if n is None else int(i) * n + np.arange(n))
        return Ref(array, tuple(axes))

    def _program_id(self, eqn, args, params):
        return [np.int32(self.program[params["axis"]])]

    def _masked_load(self, eqn, args, params):
        return [self.loaded(*jax.tree.unflatten(params["args_tree"], args))]

    def _masked_swap(self, eqn, args, params):
        return [self.stored(*jax.tree.unflatten(params["args_tree"], args))]

    def _debug_barrier(self, eqn, args, params):
        return []

    # ---- Mosaic GPU: TMA copies between device memory and shared memory ----

    def _mpmd_map(self, eqn, args, params):
        (mesh,), (jaxpr,), results = params["meshes"], params["jaxprs"], params["out_avals"]
        if self.kernel:  # of a warpgroup's warps
            for self.threads[mesh.axis_name] in range(WARPS):
                self.run(jaxpr, (), args)
            return []
        names = [f"args[{i}]" for i in range(len(args))]
        names += [f"outputs[{i}]" for i in range(len(results))]
        data = [x if x is UNKNOWN else np.asarray(x) for x in args] + [UNKNOWN] * len(results)
        avals = [v.aval for v in eqn.invars] + list(results)
        arrays = [
            Array(name, aval.shape, np.dtype(aval.dtype), x)
            for name, aval, x in zip(names, avals, data, strict=True)
        ]
        refs = [Ref(x, tuple(np.arange(n + BEYOND) for n in x.shape)) for x in arrays]
        self._launch(params["name"])
        for program in np.ndindex(*mesh.grid, mesh.num_threads or 1):
            self.threads = dict(zip([*mesh.grid_names, mesh.thread_name], program, strict=True))
            self.run(jaxpr, (), refs)
        self.kernel = None
        return [UNKNOWN] * len(results)

    def _axis_index(self, eqn, args, params):
        return [np.int32(self.threads[params["axis_name"]])]

    def _run_scoped(self, eqn, args, params):
        return self.run(params["jaxpr"], args, [Cell() for _ in params["jaxpr"].invars])

    def _run_state(self, eqn, args, params):
        cells = [x if isinstance(x, Cell | Ref) else Cell(x) for x in args]
        self.run(params["jaxpr"], (), cells)
        return [cell if cell is x else cell.value for cell, x in zip(cells, args, strict=True)]

    def _same(self, eqn, args, params):
        return args[: len(eqn.outvars)]

    _layout_cast = _multiple_of = _optimization_barrier = _same

    def _nothing(self, eqn, args, params):
        return [UNKNOWN] * len(eqn.outvars)

    _commit_smem = _wait_smem_to_gmem = _wgmma_wait = _set_max_registers = _nothing
    _inline_mgpu = _wgmma_accumulator_deref = _nothing
    _async_load = _async_store_tmem = _wait_load_tmem = _commit_tmem = _nothing
    _tcgen05_commit_arrive = _nothing

    def _copy_gmem_to_smem(self, eqn, args, params):
        transforms = args[2 + params["has_barrier"] :]
        self._copied(self.kernel.reads, args[0], transforms, params["src_transforms_treedef"])
        return []

    def _copy_smem_to_gmem(self, eqn, args, params):
        transforms = args[2 + params["src_transforms_treedef"].num_leaves :]
        is_addition = params["reduction_op"] is not None
        for counter in (self.kernel.writes, *([self.kernel.reads] if is_addition else [])):
            self._copied(counter, args[1], transforms, params["dst_transforms_treedef"])
        return []

    def _copied(self, counter: Counter, ref: Ref, transforms, tree):
        """TMA leaves out what lies beyond an array."""
        for indexer in jax.tree.unflatten(tree, transforms[: tree.num_leaves]):
            ref = ref.narrow(indexer)
        counter[ref.array.name] += int(ref.inside().sum()) * ref.array.dtype.itemsize

    def _mma(self, eqn, args, params):
        """[m, n] and [m, k] by [k, n]."""
        acc, a = (x.aval for x in eqn.invars[:2])
        self.kernel.operations["matrix"] += 2 * acc.size * a.shape[1]
        return [UNKNOWN]

    def _wgmma_ref(self, eqn, args, params):
        """[m, k] by [k, n]: b has k n elements."""
        tree = params["b_transforms_tree"]
        transforms = jax.tree.unflatten(tree, [0] * tree.num_leaves)
        shapes = [x.get_indexer_shape() for x in transforms if hasattr(x, "get_indexer_shape")]
        size = math.prod(shapes[-1] if shapes else eqn.invars[2].aval.shape)
        self.kernel.operations["matrix"] += 2 * eqn.invars[0].aval.shape[0] * size
        return []

    _tcgen05_mma = _wgmma_ref
