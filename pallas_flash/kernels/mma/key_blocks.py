"""The blocks of keys and values that decoding copies: they lie in order, in pages, or row by row
where a list names their keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mma import gather, tile
from pallas_flash.kernels.mma.listed_keys import ListTable
from pallas_flash.kernels.mma.tile_sizes import DecodeTiles
from pallas_flash.kernels.mosaic.registers import iota
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.problem.page_layout import PageTable


class KeyBlocks(NamedTuple):
    """The blocks of a batch row and head, in global memory."""

    matrices: tuple  # keys and values, or keys alone
    table: PageTable | ListTable | None
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
        layout = gather.Lanes.of(t.block_k, t.swizzle_in_slots).layout
        position = n * t.block_k + iota(t.block_k, layout)
        return self.table.rows(self.batch, position, self.matrices[0].shape[1], layout)

    def copy(self, n: IntLike, rows, slots, full):
        """Begins to copy block n to slots, by TMA that arrives at `full`, or by cp.async."""
        for matrix, slot in zip(self.matrices, slots, strict=True):
            if self.tiles.gathers:
                matrix = self.table.matrix(matrix, self.batch, slot.shape[1])
                gather.copy_rows(matrix, rows, slot, self.tiles.swizzle_in_slots)
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
