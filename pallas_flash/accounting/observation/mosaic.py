"""Kernels of Mosaic GPU: every warpgroup of a program, and what TMA copies between device memory
and shared memory."""

import math
from collections import Counter
from typing import Any

import jax
import numpy as np

from pallas_flash.accounting.observation.memory import Array, Kernel, Memory, Ref
from pallas_flash.accounting.observation.walk import UNKNOWN

_BEYOND = 512  # how far the last tile may reach over the end of an array


class _Cell:
    """Registers, shared memory or a barrier: what it holds is known where it was given, as a loop's
    number is."""

    def __init__(self, value: Any = UNKNOWN):
        self.value = value


class Warpgroups(Memory):
    """Runs the warpgroups of a program one after another: what one waits for does not change what
    another copies."""

    axes: dict[str, int] = {}

    def _mpmd_map(self, eqn, args, params):
        (mesh,), (jaxpr,), self.name = params["meshes"], params["jaxprs"], params["name"]
        self.kernel = self.kernels.setdefault(
            self.name, Kernel(Counter(), Counter(), Counter(), Counter())
        )
        results = list(params["out_avals"])
        names = [f"args[{i}]" for i in range(len(args))] + [
            f"outputs[{i}]" for i in range(len(results))
        ]
        avals = [v.aval for v in eqn.invars] + results
        data = [x if x is UNKNOWN else np.asarray(x) for x in args] + [UNKNOWN] * len(results)
        whole = lambda aval: tuple(np.arange(n + _BEYOND) for n in aval.shape)
        refs = [
            Ref(Array(name, aval.shape, np.dtype(aval.dtype), x), whole(aval))
            for name, aval, x in zip(names, avals, data, strict=True)
        ]
        for ref in refs[len(args) :]:
            self.kernel.results[ref.array.name] += (
                math.prod(ref.array.shape) * ref.array.dtype.itemsize
            )
        for program in np.ndindex(*mesh.grid, mesh.num_threads or 1):
            self.axes = dict(zip([*mesh.grid_names, mesh.thread_name], program, strict=True))
            self.run(jaxpr, (), refs)
        self.kernel = None
        return [UNKNOWN] * len(results)

    def _custom_vmap_call(self, eqn, args, params):
        return self.run(params["call"].jaxpr, params["call"].consts, args)

    def _axis_index(self, eqn, args, params):
        return [np.int32(self.axes[params["axis_name"]])]

    def _plain(self, eqn, args, params):
        if any(isinstance(x, _Cell) for x in args):  # barriers, and what is done with registers
            return [UNKNOWN] * len(eqn.outvars)
        return super()._plain(eqn, args, params)

    def _cond(self, eqn, args, params):
        """What is done if floats ask for it counts as done."""
        if args[0] is UNKNOWN:
            args = [np.int32(len(params["branches"]) - 1), *args[1:]]
        return super()._cond(eqn, args, params)

    # What registers hold

    def _run_scoped(self, eqn, args, params):
        return self.run(params["jaxpr"], args, [_Cell() for _ in params["jaxpr"].invars])

    def _run_state(self, eqn, args, params):
        cells = [x if isinstance(x, _Cell | Ref) else _Cell(x) for x in args]
        self.run(params["jaxpr"], (), cells)
        return [cell if cell is x else cell.value for cell, x in zip(cells, args, strict=True)]

    def _get(self, eqn, args, params):
        if isinstance(args[0], Ref):
            return super()._get(eqn, args, params)
        return [args[0].value if len(args) == 1 else UNKNOWN]

    def _swap(self, eqn, args, params):
        if isinstance(args[0], Ref):
            return super()._swap(eqn, args, params)
        args[0].value = args[1] if len(args) == 2 else UNKNOWN
        return [UNKNOWN]

    def _same(self, eqn, args, params):
        return args[: len(eqn.outvars)]

    _layout_cast = _multiple_of = _optimization_barrier = _same

    def _nothing(self, eqn, args, params):
        return [UNKNOWN] * len(eqn.outvars)

    _commit_smem = _wait_smem_to_gmem = _wgmma_wait = _set_max_registers_p = _set_max_registers = (
        _nothing
    )
    _inline_mgpu_p = _inline_mgpu = _wgmma_accumulator_deref_p = _wgmma_accumulator_deref = _nothing

    # Loads, copies, products

    def _load(self, eqn, args, params):
        ref, *indices = args
        return [
            self.loaded(ref, jax.tree.unflatten(params["tree"], indices))
            if isinstance(ref, Ref)
            else UNKNOWN
        ]

    def _copy_gmem_to_smem(self, eqn, args, params):
        self._copied(
            self.kernel.reads,
            args[0],
            args[2 + params["has_barrier"] :],
            params["src_transforms_treedef"],
        )
        return []

    def _copy_smem_to_gmem(self, eqn, args, params):
        transforms = args[2 + params["src_transforms_treedef"].num_leaves :]
        self._copied(self.kernel.writes, args[1], transforms, params["dst_transforms_treedef"])
        if params["reduction_op"] is not None:  # an addition in device memory
            self._copied(self.kernel.reads, args[1], transforms, params["dst_transforms_treedef"])
        return []

    def _copied(self, counter: Counter, ref: Ref, transforms, tree):
        """TMA leaves out what lies beyond an array."""
        for indexer in jax.tree.unflatten(tree, transforms[: tree.num_leaves]):
            ref = ref.narrow(indexer)
        counter[ref.array.name] += int(ref.inside().sum()) * ref.array.dtype.itemsize

    def _wgmma_ref(self, eqn, args, params):
        m, tree = eqn.invars[0].aval.shape[0], params["b_transforms_tree"]
        indexers = [
            x
            for x in jax.tree.unflatten(tree, [0] * tree.num_leaves)
            if hasattr(x, "get_indexer_shape")
        ]
        size = math.prod(indexers[-1].get_indexer_shape() if indexers else eqn.invars[2].aval.shape)
        self.kernel.operations["matrix"] += 2 * m * size  # [m, k] by [k, n], and b has k n elements
        return []
