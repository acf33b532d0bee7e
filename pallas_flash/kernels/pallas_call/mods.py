"""A mask_mod and a score_mod in kernels by `pl.pallas_call`: their operands, their blocks, their
values."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods import captured
from pallas_flash.mods.bound import BoundMod
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

FIRST = np.int32(0)  # as an index; a plain int has no shape, which Pallas' interpreter asks for


def flatten(x: Operands) -> Operands:
    """The operands for kernels that mask every block: the mask_mod has no block types, and captured
    arrays are vectors."""
    flat = lambda bound: (
        bound and dataclasses.replace(bound, arrays=tuple(a.reshape(-1) for a in bound.arrays))
    )
    mask_mod = flat(x.resolved_mask.mask_mod)
    mask_mod = mask_mod and dataclasses.replace(mask_mod, block_types=None, block_size=None)
    return x._replace(
        resolved_mask=dataclasses.replace(x.resolved_mask, mask_mod=mask_mod), score=flat(x.score)
    )


def with_visited_blocks(p: Problem, tiles, x: Operands, by_key: bool = False) -> Operands:
    """The operands for kernels that visit the blocks of a tile of queries, or of keys: the
    mask_mod has `schedule.visited_blocks` in place of its block types."""
    flat = flatten(x)
    if x.resolved_mask.mask_mod is None:
        return flat
    types = schedule.block_types(
        x.resolved_mask, p.batch, p.heads, p.queries, tiles.block_q, tiles.block_k
    )
    mask_mod = dataclasses.replace(
        flat.resolved_mask.mask_mod,
        block_types=schedule.visited_blocks(types.swapaxes(2, 3) if by_key else types),
    )
    return flat._replace(resolved_mask=dataclasses.replace(flat.resolved_mask, mask_mod=mask_mod))


def specs(grid, bound: BoundMod | None) -> BoundMod | None:
    """The mod with the BlockSpecs of its arrays, in a tile.Grid."""
    if bound is None:
        return None
    whole = lambda x: None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
    blocks = dict(
        arrays=tuple(map(whole, bound.arrays)), batch=whole(bound.batch), head=whole(bound.head)
    )
    blocks |= (
        dict(block_types=_visited(grid, bound.block_types)) if hasattr(bound, "block_types") else {}
    )
    return dataclasses.replace(
        bound, offset=bound.offset if isinstance(bound.offset, int) else grid.spec("B"), **blocks
    )


def _visited(grid, visited) -> pl.BlockSpec | None:
    """The BlockSpec of `schedule.visited_blocks`: a tile's row, for the program's head or heads."""
    if visited is None:
        return None

    def index(*program):
        at = grid.index(*program)
        number = lambda letter, n: at[letter] if n > 1 else 0
        return (
            number("b", visited.shape[0]),
            number("n", visited.shape[1]),
            at["t"] if "t" in at else at["s"],
            0,
        )

    return pl.BlockSpec(
        (None, grid.sizes["n"] if visited.shape[1] > 1 else None, None, visited.shape[3]), index
    )


class TileMod(NamedTuple):
    """A mod for the rows of a tile and a block of keys; its arrays are refs."""

    bound: BoundMod
    indices: tuple  # batch row, head, positions [rows, 1], keys [1, keys]

    def read(self, array: int, index: tuple):
        """The element at this index of an array, which lies in memory as a vector."""
        shape = self.bound.mod.arrays[array].aval.shape
        return self.bound.arrays[array][captured.flat_index(index, shape)]

    def visible(self):
        """Whether the rows see the keys, [rows, keys]."""
        reads = self.bound.read_captured(self.read, *self.indices)
        return self.bound.evaluate([value for _, value in reads], *self.indices)

    def score(self, s):
        """The logits [rows, keys] that the score_mod makes of the logits s."""
        return self.bound.apply(s, self.read, *self.indices)

    def score_vjp(self, s):
        """`score(s)`, and its pullback."""
        return self.bound.vjp(s, self.read, *self.indices)


def bind(bound: BoundMod, pair: tuple[IntLike, IntLike], batch: IntLike, row, key) -> TileMod:
    """A mod for a tile of the (batch row, head) `pair`; `batch` is the entry of the data's refs."""
    b, h = (
        n if indices is None else indices[n]
        for n, indices in zip(pair, (bound.batch, bound.head), strict=True)
    )
    position = row + (bound.offset if isinstance(bound.offset, int) else bound.offset[batch])
    return TileMod(bound, (b, h, position[:, None], key[None, :]))
