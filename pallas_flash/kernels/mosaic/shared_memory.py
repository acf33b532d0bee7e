"""The shared memory of a program, as arrays and mbarriers that `launch` allocates."""

import math

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mosaic.elements import TILE_ROWS, columns, round_up

_ALIGNMENT, _MBARRIER = 1024, 8  # bytes: where Mosaic lets an array begin, and of one mbarrier


def matrix(dtype, *shape: int, swizzle: int):
    """An array of matrices, in the order in which copies, products and stores from registers meet
    without bank conflicts."""
    tiling = plgpu.TilingTransform((TILE_ROWS, columns(dtype, swizzle)))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def size(scratch) -> int:
    """Bytes that a pytree of arrays and mbarriers takes."""
    return sum(map(_size, jax.tree.leaves(scratch)))


def _size(x) -> int:
    if isinstance(x, plgpu.Barrier):
        return _MBARRIER * math.prod(x.num_barriers)
    return round_up(math.prod(x.shape) * np.dtype(x.dtype).itemsize, _ALIGNMENT)
