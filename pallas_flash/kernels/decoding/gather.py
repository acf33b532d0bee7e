"""The blocks of keys and values that decoding copies: they lie in order, in pages, or row by row
where a list names their keys; then a gather copies rows by their numbers, by cp.async."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.decoding.listed_keys import ListedKeys
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.tile_sizes import WARPS, DecodeTiles
from pallas_flash.kernels.mosaic.elements import SWIZZLES, TILE_ROWS, columns, row_bytes
from pallas_flash.kernels.mosaic.registers import iota
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.problem.page_layout import PageTable

CHUNK, LANES = 16, 32  # bytes that a lane copies at a time; of a warp


class Lanes(NamedTuple):
    """Which chunks of a block of rows the lanes of a warp copy at once: `chunks` chunks of each of
    `rows` rows, in `tiles` tiles that lie side by side. Eight neighbouring lanes write 128 bytes of
    a tile, without bank conflicts."""

    tiles: int
    rows: int
    chunks: int

    @classmethod
    def make(cls, rows: int, swizzle: int) -> "Lanes":
        """As few tiles as leave no lane of four warps without one of the `rows` of a block."""
        chunks = swizzle // CHUNK
        tiles = max(WARPS * LANES // (rows * chunks), 1)
        return cls(tiles, LANES // (tiles * chunks), chunks)

    @property
    def layout(self):
        """The layout of a number for each row of a block: a lane has the numbers of its rows."""
        replicated = mgpu.fragmented_array.Replicated
        dims = (replicated(self.tiles), -2, replicated(self.chunks))
        return plgpu.Layout.TILED(
            mgpu.fragmented_array.Tiling(((WARPS * self.rows,), (self.rows,), (1,))),
            warp_dims=(-3,),
            lane_dims=dims[self.tiles == 1 :],
            vector_dim=-1,
        )


class Int(NamedTuple):
    """An int32 of a kernel that computes as an int does, with ints; all are at least 0."""

    value: Any

    @classmethod
    def convert(cls, n) -> "Int":
        """An int as a constant; an Int itself."""
        i32 = mgpu.utils.ir.IntegerType.get_signless(32)
        return n if isinstance(n, Int) else cls(mgpu.utils.arith.constant(i32, n))

    def _compute(self, operation: str, other) -> "Int":
        return Int(getattr(mgpu.utils.arith, operation)(self.value, Int.convert(other).value))

    def __add__(self, other):
        return self._compute("addi", other)

    def __mul__(self, other):
        return self._compute("muli", other)

    def __xor__(self, other):
        return self._compute("xori", other)

    def __divmod__(self, other):
        return self._compute("divui", other), self._compute("remui", other)


class Place(NamedTuple):
    """Where the first chunk that a thread copies lies, each an int or an Int."""

    tile: Any  # of the tiles that its warp copies at once
    chunk: Any  # of a row of the tile
    rows_of_tiles: Any  # before it in its slot
    tile_row: Any
    exchanged: Any  # where the swizzle puts the chunk


class Step(NamedTuple):
    """A copy by all threads: how far from the first chunk it is."""

    tiles: int  # that are left, fewer than a warp copies at once in the last step
    source: int  # bytes
    target: int


class Copy(NamedTuple):
    """How four warps copy rows of `row_bytes` to a slot of this swizzle."""

    lanes: Lanes
    swizzle: int
    row_bytes: int

    def place(self, thread) -> Place:
        """What a thread, an int or an Int, copies first."""
        lanes = self.lanes
        warp, lane = divmod(thread, LANES)
        lane, chunk = divmod(lane, lanes.chunks)
        tile, row = divmod(lane, lanes.rows)
        rows_of_tiles, tile_row = divmod(warp * lanes.rows + row, TILE_ROWS)
        # the chunks of 128 bytes of a tile are exchanged by the number of these
        exchanged = chunk ^ divmod(tile_row, SWIZZLES[0] // self.swizzle)[0]
        return Place(tile, chunk, rows_of_tiles, tile_row, exchanged)

    def target(self, place: Place):
        """Its bytes from the start of a slot."""
        tiles_offset = place.rows_of_tiles * (TILE_ROWS * self.row_bytes)
        tile_offset = tiles_offset + place.tile * (TILE_ROWS * self.swizzle)
        return tile_offset + place.tile_row * self.swizzle + place.exchanged * CHUNK

    def source(self, place: Place):
        """Its bytes from the start of its row."""
        return place.tile * self.swizzle + place.chunk * CHUNK

    def steps(self, n: int) -> Iterator[Step]:
        """The copies of a row: the n-th of the rows whose numbers a thread has."""
        tiles, to_row = self.row_bytes // self.swizzle, n * WARPS * self.lanes.rows * self.row_bytes
        for first in range(0, tiles, self.lanes.tiles):
            target = to_row + first * TILE_ROWS * self.swizzle
            yield Step(tiles - first, first * self.swizzle, target)


def copy_rows(source, numbers, slot, swizzle: int):
    """Begins to copy the rows of a matrix that have these numbers, which are in the layout of
    `Lanes`, to the rows of a slot of this swizzle, as one copy by cp.async."""
    rows, width = slot.shape
    dtype = np.dtype(slot.dtype)
    lanes = Lanes.make(rows, swizzle)
    slot_copy = Copy(lanes, swizzle, row_bytes(dtype, width))
    tiling = plgpu.TilingTransform((TILE_ROWS, columns(dtype, swizzle)))
    slot_type = plgpu.RefType((tiling, plgpu.SwizzleTransform(swizzle)))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lanes.layout, slot_type))
    def copy_rows(_, source, numbers, slot):  # a name that the interpreter in tests/ knows
        arith, ir, llvm, nvvm, vector = (
            getattr(mgpu.utils, name) for name in ("arith", "ir", "llvm", "nvvm", "vector")
        )
        i8, i64 = (ir.IntegerType.get_signless(n) for n in (8, 64))
        advance = lambda pointer, n: mgpu.utils.getelementptr(pointer, [n], i8)

        place = slot_copy.place(divmod(Int(mgpu.utils.thread_idx()), WARPS * LANES)[1])
        smem = advance(mgpu.utils.memref_ptr(slot), slot_copy.target(place).value)
        gmem = advance(mgpu.utils.memref_ptr(source), slot_copy.source(place).value)
        gmem = llvm.addrspacecast(llvm.PointerType.get(address_space=1), gmem)
        (stride, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
        stride = arith.constant(i64, stride * dtype.itemsize)

        def row(number):
            number = arith.extui(i64, vector.extract(number, [], [0]))
            return advance(gmem, arith.muli(number, stride))

        def copy(source, target):
            nvvm.cp_async_shared_global(target, source, CHUNK, nvvm.LoadCacheModifierKind.CG)

        for n, number in enumerate(numbers.registers.flat):
            from_row = row(number)
            for step in slot_copy.steps(n):
                ends = advance(from_row, step.source), advance(smem, step.target)
                if lanes.tiles <= step.tiles:
                    copy(*ends)
                else:
                    left = Int.convert(step.tiles).value
                    is_inside = arith.cmpi(arith.CmpIPredicate.ult, place.tile.value, left)
                    with mgpu.utils.when(is_inside):
                        copy(*ends)
        nvvm.cp_async_commit_group()

    copy_rows(source, numbers, slot)


class KeySource(NamedTuple):
    """The blocks of a batch row and head, in global memory."""

    matrices: tuple  # keys and values, or keys alone
    table: PageTable | ListedKeys | None
    tiles: DecodeTiles
    batch: IntLike
    head: IntLike

    def first_key(self, n: IntLike):
        """The first key of block n: a last block that would hang over the end of the keys begins
        earlier."""
        first, size = n * self.tiles.block_k, self.tiles.block_k
        if self.table is not None:
            return first
        return jnp.minimum(first, self.matrices[0].shape[1] - size)

    def look_up(self, n: IntLike):
        """What `copy` takes of block n, loaded from a list: the rows that hold its keys; else
        None."""
        t = self.tiles
        if not t.gathers:
            return None
        layout = Lanes.make(t.block_k, t.swizzle_in_slots).layout
        position = n * t.block_k + iota(t.block_k, layout)
        return self.table.rows(self.batch, position, self.matrices[0].shape[1], layout)

    def copy(self, n: IntLike, rows, slots, full):
        """Begins to copy block n to slots, by TMA that arrives at `full`, or by cp.async."""
        for matrix, slot in zip(self.matrices, slots, strict=True):
            if self.tiles.gathers:
                matrix = self.table.matrix(matrix, self.batch, slot.shape[1])
                copy_rows(matrix, rows, slot, self.tiles.swizzle_in_slots)
                continue
            for source, target in self._copies(matrix, slot, n):
                tile.copy(source, target, full)

    def _copies(self, matrix, slot, n: IntLike) -> list:
        """(source, target) of each copy that block n of keys or values takes: one for a page."""
        b, h, t, table, width = self.batch, self.head, self.tiles, self.table, slot.shape[1]
        if table is None:
            rows = pl.ds(self.first_key(n), t.block_k)
            return [(matrix.at[b, rows, pl.ds(h * width, width)], slot)]
        page, last = table.page, table.numbers.shape[1] - 1

        def source(i, first_key, size: int):
            row, column = table.layout.corner(first_key, h, page, width)
            number = table.numbers[b, jnp.minimum(i, last)]
            return matrix.at[number, pl.ds(row, size), pl.ds(column, width)]

        if page >= t.block_k:
            i, within = divmod_(n, page // t.block_k)
            return [(source(i, within * t.block_k, t.block_k), slot)]
        return [
            (source(n * t.copies + i, 0, page), slot.at[pl.ds(i * page, page)])
            for i in range(t.copies)
        ]
