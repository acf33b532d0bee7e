"""A gather: rows of a matrix in global memory, by their numbers, to shared memory by cp.async."""

import functools
from typing import NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mma.tile_sizes import WARPS
from pallas_flash.kernels.mosaic.elements import SWIZZLES, TILE_ROWS, columns, row_bytes

CHUNK, LANES = 16, 32  # bytes that a lane copies at a time; of a warp


class Lanes(NamedTuple):
    """Which chunks of a block of rows the lanes of a warp copy at once: those of `tiles` tiles that
    lie side by side, of `rows` rows, `chunks` of each. Eight neighbouring lanes write 128 bytes of
    a tile, without bank conflicts."""

    tiles: int
    rows: int
    chunks: int

    @classmethod
    def of(cls, rows: int, swizzle: int) -> "Lanes":
        """As few tiles as leave no lane of four warps without one of the `rows` of a block."""
        chunks = swizzle // CHUNK
        tiles = max(WARPS * LANES // (rows * chunks), 1)
        return cls(tiles, LANES // (tiles * chunks), chunks)

    @property
    def layout(self):
        """The layout of a number for each row of a block: a lane has those of its rows."""
        replicated = mgpu.fragmented_array.Replicated
        dims = (replicated(self.tiles), -2, replicated(self.chunks))
        return plgpu.Layout.TILED(
            mgpu.fragmented_array.Tiling(((WARPS * self.rows,), (self.rows,), (1,))),
            warp_dims=(-3,),
            lane_dims=dims[self.tiles == 1 :],
            vector_dim=-1,
        )


def copy_rows(source, numbers, slot, swizzle: int):
    """Begins to copy the rows of a matrix that have these numbers, which are in the layout of
    `Lanes`, to the rows of a slot of this swizzle, as one copy by cp.async."""
    rows, width = slot.shape
    lanes, dtype = Lanes.of(rows, swizzle), np.dtype(slot.dtype)
    tiling = plgpu.TilingTransform((TILE_ROWS, columns(dtype, swizzle)))
    slot_type = plgpu.RefType((tiling, plgpu.SwizzleTransform(swizzle)))
    row_size, tile_size = row_bytes(dtype, width), TILE_ROWS * swizzle
    tiles = row_size // swizzle

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lanes.layout, slot_type))
    def copy_rows(_, source, numbers, slot):  # a name that the interpreter in tests/ knows
        arith, ir, llvm, nvvm, vector = (
            getattr(mgpu.utils, name) for name in ("arith", "ir", "llvm", "nvvm", "vector")
        )
        i8, i32, i64 = (ir.IntegerType.get_signless(n) for n in (8, 32, 64))
        c = lambda n: arith.constant(i32, n)
        divmod_ = lambda n, by: (arith.divui(n, c(by)), arith.remui(n, c(by)))
        advance = lambda pointer, n: mgpu.utils.getelementptr(pointer, [n], i8)

        def offset(*terms):
            """The sum of numbers times bytes."""
            return functools.reduce(arith.addi, (arith.muli(n, c(size)) for n, size in terms))

        thread = arith.remui(mgpu.utils.thread_idx(), c(WARPS * LANES))
        warp, lane = divmod_(thread, LANES)
        lane, chunk = divmod_(lane, lanes.chunks)
        tile, row = divmod_(lane, lanes.rows)
        row = offset((warp, lanes.rows), (row, 1))
        rows_of_tiles, tile_row = divmod_(row, TILE_ROWS)
        # the chunks of 128 bytes of a tile are exchanged by the number of these
        exchanged = arith.xori(chunk, divmod_(tile_row, SWIZZLES[0] // swizzle)[0])
        to = (rows_of_tiles, TILE_ROWS * row_size), (tile, tile_size), (tile_row, swizzle)
        smem = advance(mgpu.utils.memref_ptr(slot), offset(*to, (exchanged, CHUNK)))
        gmem = advance(mgpu.utils.memref_ptr(source), offset((tile, swizzle), (chunk, CHUNK)))
        gmem = llvm.addrspacecast(llvm.PointerType.get(address_space=1), gmem)
        (stride, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
        stride = arith.constant(i64, stride * dtype.itemsize)

        def copy(source, target):
            nvvm.cp_async_shared_global(target, source, CHUNK, nvvm.LoadCacheModifierKind.CG)

        for n, number in enumerate(numbers.registers.flat):
            number = arith.extui(i64, vector.extract(number, [], [0]))
            from_row = advance(gmem, arith.muli(number, stride))
            to_row = n * WARPS * lanes.rows * row_size
            for first in range(0, tiles, lanes.tiles):
                ends = advance(from_row, first * swizzle), advance(smem, to_row + first * tile_size)
                if first + lanes.tiles <= tiles:
                    copy(*ends)
                else:
                    is_inside = arith.cmpi(arith.CmpIPredicate.ult, tile, c(tiles - first))
                    with mgpu.utils.when(is_inside):
                        copy(*ends)
        nvvm.cp_async_commit_group()

    copy_rows(source, numbers, slot)
