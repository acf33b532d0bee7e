"""Kernels of `pl.pallas_call`: blocks are pointers, and each load in the body reads device
memory."""

import math
from collections import Counter

import numpy as np

from pallas_flash.accounting.observation.memory import Array, Kernel, Memory, Ref
from pallas_flash.accounting.observation.walk import UNKNOWN


class PallasCalls(Memory):
    """Runs every program of a grid."""

    def _pallas_call(self, eqn, args, params):
        mapping, self.name = params["grid_mapping"], params["name"]
        if (
            mapping.num_index_operands
            or mapping.num_scratch_operands
            or params["input_output_aliases"]
        ):
            raise NotImplementedError(
                f"{self.name}: scalar prefetch, scratch memory and aliases are not walked through."
            )
        self.kernel = self.kernels.setdefault(
            self.name, Kernel(Counter(), Counter(), Counter(), Counter())
        )
        self.grid, known = mapping.grid, all(x is not UNKNOWN for x in args)
        results = [np.zeros(x.shape, x.dtype) if known else UNKNOWN for x in params["out_avals"]]
        data = [x if x is UNKNOWN else np.asarray(x) for x in args] + results
        arrays = [
            Array(block.origin, block.array_aval.shape, np.dtype(block.array_aval.dtype), x)
            for block, x in zip(mapping.block_mappings, data, strict=True)
        ]
        for array in arrays[len(args) :]:
            self.kernel.results[array.name] += math.prod(array.shape) * array.dtype.itemsize
        for self.program in np.ndindex(*mapping.grid):
            blocks = zip(arrays, mapping.block_mappings, strict=True)
            self.run(params["jaxpr"], (), [self._block(array, block) for array, block in blocks])
        self.kernel = None
        return results

    def _block(self, array: Array, block) -> Ref:
        index_map, at = block.index_map_jaxpr, []
        self.kernel, kernel = None, self.kernel  # which block it is, is not the kernel's arithmetic
        for i, size in zip(
            self.run(index_map.jaxpr, index_map.consts, self.program),
            block.block_shape,
            strict=True,
        ):
            n = getattr(size, "block_size", None)
            at.append(np.asarray(i) if n is None else int(i) * n + np.arange(n))
        self.kernel = kernel
        return Ref(array, tuple(at))

    def _program_id(self, eqn, args, params):
        return [np.int32(self.program[params["axis"]])]

    def _num_programs(self, eqn, args, params):
        return [np.int32(self.grid[params["axis"]])]

    def _debug_barrier(self, eqn, args, params):
        return []

    _debug_barrier_p = _debug_barrier
