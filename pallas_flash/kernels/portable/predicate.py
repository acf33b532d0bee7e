"""A mask that is a rule in the portable kernels: its operands, their blocks, and the question."""

import dataclasses

import numpy as np
from jax.experimental import pallas as pl

from pallas_flash import schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.portable.tuning import Tiles
from pallas_flash.masks import Ints
from pallas_flash.rule import Predicate

FIRST = np.int32(0)


def plain(x: Operands) -> Operands:
    """The operands for kernels that mask every block: a Predicate without its blocks' kinds, with its numbers as arrays [1]."""
    where = x.visibility.where
    if where is None:
        return x
    where = dataclasses.replace(where, arrays=tuple(a.reshape(1) for a in where.arrays), kinds=None, block=None)
    return x._replace(visibility=dataclasses.replace(x.visibility, where=where))


def listed(p: Problem, tiles: Tiles, x: Operands, by_key: bool = False) -> Operands:
    """The operands for kernels that go over the blocks of a tile of queries, or of keys: a Predicate with `schedule.lists`."""
    if x.visibility.where is None:
        return x
    found = schedule.block_kinds(x.visibility, p.batch, p.heads, p.queries, tiles.block_q, tiles.block_k)
    visibility = plain(x).visibility
    where = dataclasses.replace(visibility.where, kinds=schedule.lists(found.swapaxes(2, 3) if by_key else found))
    return x._replace(visibility=dataclasses.replace(visibility, where=where))


def specs(layout, where: Predicate | None) -> Predicate | None:
    """The BlockSpecs of a Predicate's arrays in a tile.Layout."""
    if where is None:
        return None
    whole = lambda x: None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
    offset = where.offset if isinstance(where.offset, int) else layout.spec("B")
    own = dict(arrays=tuple(map(whole, where.arrays)), batch=whole(where.batch), head=whole(where.head))
    return dataclasses.replace(where, offset=offset, kinds=_lists(layout, where.kinds), **own)


def _lists(layout, lists) -> pl.BlockSpec | None:
    """Of `schedule.lists` those of the tile and head that a program owns, or of the heads."""
    if lists is None:
        return None

    def index(*grid):
        at = layout.index(*grid)
        number = lambda letter, n: at[letter] if n > 1 else 0
        return number("b", lists.shape[0]), number("n", lists.shape[1]), at["t"] if "t" in at else at["s"], 0

    return pl.BlockSpec((None, layout.sizes["n"] if lists.shape[1] > 1 else None, None, lists.shape[3]), index)


def allowed(where: Predicate, pair: tuple[Ints, Ints], batch: Ints, row, key):
    """Whether the rows see the keys, from refs; `pair` is the (batch row, head), `batch` the entry of the data by batch."""
    of = lambda numbers, n: n if numbers is None else numbers[n]
    position = row + (where.offset if isinstance(where.offset, int) else where.offset[batch])
    where = dataclasses.replace(where, arrays=tuple(ref[FIRST] for ref in where.arrays))
    return where.sees_tile(of(where.batch, pair[0]), of(where.head, pair[1]), position, key)
