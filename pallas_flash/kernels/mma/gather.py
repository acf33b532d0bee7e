"""A gather: rows of a matrix in global memory, by their numbers, to shared memory by cp.async."""

import functools

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.mma.tile_sizes import WARPS
from pallas_flash.kernels.mosaic.elements import SWIZZLES, TILE_ROWS, columns, row_bytes

LANES, CHUNK = 32, 16  # of a warp; bytes that a lane copies at a time
THREADS = WARPS * LANES


def lanes_of_row(rows: int, swizzle: int) -> int:
    """How many neighbouring lanes copy a row together: at least those that a row of a tile takes,
    and so many that all have one of the `rows`."""
    return max(swizzle // CHUNK, THREADS // rows)


def layout(rows: int, swizzle: int):
    """The layout of a number for each of the rows of a block, of which a lane has those of the rows
    that it copies."""
    lanes = lanes_of_row(rows, swizzle)
    of_warp = LANES // lanes
    return plgpu.Layout.TILED(
        mgpu.fragmented_array.Tiling(((WARPS * of_warp,), (of_warp,), (1,))),
        warp_dims=(-3,),
        lane_dims=(-2, mgpu.fragmented_array.Replicated(lanes)),
        vector_dim=-1,
    )


def copy_rows(source, numbers, slot, swizzle: int):
    """Begins to copy the rows of a matrix that have these numbers, which are in `layout`, to the
    rows of a slot of this swizzle, as one copy by cp.async."""
    rows, width = slot.shape
    dtype = np.dtype(slot.dtype)
    tiling = plgpu.TilingTransform((TILE_ROWS, columns(dtype, swizzle)))
    slot_type = plgpu.RefType((tiling, plgpu.SwizzleTransform(swizzle)))
    lanes, of_tile, tile_bytes = lanes_of_row(rows, swizzle), swizzle // CHUNK, swizzle * TILE_ROWS
    chunks = row_bytes(dtype, width) // CHUNK
    at_once = THREADS // lanes  # rows

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(rows, swizzle), slot_type))
    def copy_rows(_, source, numbers, slot):  # a name that the interpreter in tests/ knows
        arith, ir, llvm, nvvm, vector = (
            getattr(mgpu.utils, name) for name in ("arith", "ir", "llvm", "nvvm", "vector")
        )
        i8, i32, i64 = (ir.IntegerType.get_signless(n) for n in (8, 32, 64))
        constant = lambda n: arith.constant(i32, n)
        divmod_ = lambda a, b: (arith.divui(a, constant(b)), arith.remui(a, constant(b)))
        advance = lambda pointer, n: mgpu.utils.getelementptr(pointer, [n], i8)

        def bytes_(*terms):
            """The sum of products of numbers and their sizes."""
            products = [arith.muli(n, constant(size)) for n, size in terms]
            return functools.reduce(arith.addi, products)

        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        row, lane = divmod_(thread, lanes)
        tile_row, row_of_tile = divmod_(row, TILE_ROWS)
        tile, chunk = divmod_(lane, of_tile)
        # the rows of 128 bytes in a tile exchange their chunks
        exchanged = arith.xori(chunk, divmod_(row_of_tile, SWIZZLES[0] // swizzle)[0])
        place = bytes_(
            (tile_row, chunks * CHUNK * TILE_ROWS),
            (tile, tile_bytes),
            (row_of_tile, swizzle),
            (exchanged, CHUNK),
        )
        smem = advance(mgpu.utils.memref_ptr(slot), place)
        gmem = advance(mgpu.utils.memref_ptr(source), bytes_((lane, CHUNK)))
        gmem = llvm.addrspacecast(llvm.PointerType.get(address_space=1), gmem)
        (stride, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
        stride = arith.constant(i64, stride * dtype.itemsize)

        for block, number in enumerate(numbers.registers.flat):
            number = arith.extui(i64, vector.extract(number, [], [0]))
            from_row = advance(gmem, arith.muli(number, stride))
            to_row = block * at_once * chunks * CHUNK
            for first in range(0, chunks, lanes):
                source_chunk = advance(from_row, first * CHUNK)
                target = advance(smem, to_row + first // of_tile * tile_bytes)
                copy = lambda: nvvm.cp_async_shared_global(
                    target, source_chunk, CHUNK, nvvm.LoadCacheModifierKind.CG
                )
                if first + lanes <= chunks:
                    copy()
                else:
                    is_inside = arith.cmpi(arith.CmpIPredicate.ult, lane, constant(chunks - first))
                    with mgpu.utils.when(is_inside):
                        copy()
        nvvm.cp_async_commit_group()

    copy_rows(source, numbers, slot)
