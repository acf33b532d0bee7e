"""The primitives of decoding with at most 16 rows. All four warps have the same rows, and each a
quarter of the keys of a block (sliced-K), so a block is read from shared memory once.

Up to the softmax scores are a tile [16, keys]. From there on each warp has the online softmax of
its keys, with 16 rows of arrays of 64: of the scores [64, keys / 4], of O [64, Hv]. At the end
the four are merged, as splits are.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.tile_sizes import ROWS, WARP_ROWS, WARPS, swizzle_of
from pallas_flash.kernels.mosaic import registers
from pallas_flash.kernels.mosaic.launch import shared_matrix
from pallas_flash.kernels.mosaic.registers import Layouts, per_row
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.online_softmax import SoftmaxState

LAYOUTS = None
if tile.LAYOUTS:  # of operands of 16 bits, as in tile.py
    LHS, RHS, ACC = (
        layout(jnp.bfloat16, m_warps=1)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    LAYOUTS = Layouts(
        tile=ACC, row=ACC.reduce(1), column=ACC.reduce(0), columns=WARPS * 8, broadcast=ACC
    )
    # of values: each warp has the rows that are its columns of ACC
    VALUES = plgpu.Layout.TILED(
        mgpu.fragmented_array.Tiling(((64, 8), (32, 8), (8, 8), (2, 1))),
        warp_dims=(-6,),
        lane_dims=(-3, -4),
        vector_dim=-2,
    )


def load(smem):
    """A left operand [16, n], from shared memory."""
    return plgpu.load(smem, layout=LHS)


def load_global(gmem):
    """A left operand, from global memory."""
    return registers.load(gmem, LHS)


def dot_t(a, b):
    """a b^T [16, keys], of a left operand and shared memory [keys, n]."""
    acc = plgpu.layout_cast(jnp.zeros((a.shape[0], b.shape[0]), jnp.float32), ACC)
    return plgpu.mma(acc, a, plgpu.load(b.transpose((1, 0)), layout=RHS))


def by_warp(x):
    """Reinterprets x [16, keys] as the columns that each warp has, [64, keys / 4]."""
    shape = WARPS * x.shape[0], x.shape[1] // WARPS

    @plgpu.inline_mgpu(
        arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=tile.ACC)
    )
    def columns_by_warp(_, x):  # a name that the interpreter in tests/ knows
        return _reinterpret(x, tile.ACC, shape)

    return columns_by_warp(x)


def dot(acc, a, b):
    """acc + a b [64, Hv], of a left operand [64, keys / 4], and of the rows that each warp has of
    shared memory b [keys, Hv]."""
    return _dot(acc, a, plgpu.load(b, layout=VALUES))


def dot_of_rows(acc, a, b, first, last):
    """acc + a b by the rows [first, last) of b; the others may hold NaN."""
    return _dot(acc, a, tile.load_rows(b, VALUES, first, last))


def _dot(acc, a, b):

    @plgpu.inline_mgpu(
        arg_types=(tile.ACC, tile.LHS, VALUES),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=tile.ACC),
    )
    def dot_by_warp(_, acc, a, b):  # a name that the interpreter in tests/ knows
        return mgpu.mma(acc, a, _reinterpret(b, tile.RHS, (a.shape[1], b.shape[1])))

    return dot_by_warp(acc, a, b)


def _reinterpret(x, layout, shape):
    """The registers of x as an array of another shape, whose layout has them in the same order."""
    layout = layout.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=x.registers.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=x.is_signed,
    )


class Merge(NamedTuple):
    """The shared memory by which the four softmaxes are merged."""

    o: Any  # float32 [64, Hv]
    m: Any  # float32 [64]
    l: Any

    @classmethod
    def allocate(cls, value_width: int) -> "Merge":
        swizzle = swizzle_of("float32", (value_width,), WARP_ROWS)
        stats = plgpu.SMEM((ROWS,), jnp.float32)
        return cls(shared_matrix("float32", ROWS, value_width, swizzle=swizzle), stats, stats)

    def __call__(self, o, stats: SoftmaxState, log_base: LogBase):
        """o [16, Hv] and the SoftmaxState [16] of all keys, from O [64, Hv], not yet divided by l,
        and the state [64] of each warp's."""
        tile.release(tma=False)  # the blocks, whose place this takes
        for ref, x in zip(self, (online_softmax.finish(o, stats.l), stats.m, stats.l), strict=True):
            tile.store(ref, x)
        tile.release(tma=False)
        size = WARP_ROWS, o.shape[1]
        layout = plgpu.Layout.SMEM_GMEM_COPY(
            size, jnp.float32, swizzle_of("float32", size[1:], WARP_ROWS)
        )
        warp_rows = [pl.ds(n, WARP_ROWS) for n in range(0, ROWS, WARP_ROWS)]
        each = lambda ref, layout: [registers.load(ref.at[rows], layout) for rows in warp_rows]
        states = map(SoftmaxState, *(each(ref, layout.reduce(1)) for ref in (self.m, self.l)))
        shares, stats = online_softmax.merge([*states], log_base, differentiable=False)
        parts = zip(each(self.o, layout), shares, strict=True)
        return sum(o * per_row(share, size, layout) for o, share in parts), stats
