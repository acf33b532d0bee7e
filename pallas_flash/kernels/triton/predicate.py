"""Rules in the Triton kernels, of a mask and of a score: their operands, their blocks, and how
they are asked."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_flash import schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.triton.tuning import Tiles
from pallas_flash.mods import captured
from pallas_flash.mods.bound import BoundMod
from pallas_flash.pytrees import IntLike

FIRST = np.int32(0)  # as an index; a plain int has no shape, which Pallas' interpreter asks for


def plain(x: Operands) -> Operands:
    """The operands for kernels that mask every block: a mask_mod without its blocks' kinds; the
    arrays of rules as vectors."""
    flat = lambda asked: (
        None
        if asked is None
        else dataclasses.replace(asked, arrays=tuple(a.reshape(-1) for a in asked.arrays))
    )
    where = flat(x.resolved_mask.mask_mod)
    where = where and dataclasses.replace(where, block_types=None, block_size=None)
    return x._replace(
        resolved_mask=dataclasses.replace(x.resolved_mask, mask_mod=where), score=flat(x.score)
    )


def listed(p: Problem, tiles: Tiles, x: Operands, by_key: bool = False) -> Operands:
    """The operands for kernels that go over the blocks of a tile of queries, or of keys: a
    BoundMaskMod with `schedule.lists`."""
    flat = plain(x)
    if x.resolved_mask.mask_mod is None:
        return flat
    found = schedule.block_kinds(
        x.resolved_mask, p.batch, p.heads, p.queries, tiles.block_q, tiles.block_k
    )
    where = dataclasses.replace(
        flat.resolved_mask.mask_mod,
        block_types=schedule.lists(found.swapaxes(2, 3) if by_key else found),
    )
    return flat._replace(resolved_mask=dataclasses.replace(flat.resolved_mask, mask_mod=where))


def specs(layout, asked: BoundMod | None) -> BoundMod | None:
    """The BlockSpecs of a rule's arrays in a tile.Layout."""
    if asked is None:
        return None
    whole = lambda x: None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
    own = dict(
        arrays=tuple(map(whole, asked.arrays)), batch=whole(asked.batch), head=whole(asked.head)
    )
    own |= (
        dict(block_types=_lists(layout, asked.block_types)) if hasattr(asked, "block_types") else {}
    )
    return dataclasses.replace(
        asked, offset=asked.offset if isinstance(asked.offset, int) else layout.spec("B"), **own
    )


def _lists(layout, lists) -> pl.BlockSpec | None:
    """Of `schedule.lists` those of the tile and head that a program owns, or of the heads."""
    if lists is None:
        return None

    def index(*grid):
        at = layout.index(*grid)
        number = lambda letter, n: at[letter] if n > 1 else 0
        return (
            number("b", lists.shape[0]),
            number("n", lists.shape[1]),
            at["t"] if "t" in at else at["s"],
            0,
        )

    return pl.BlockSpec(
        (None, layout.sizes["n"] if lists.shape[1] > 1 else None, None, lists.shape[3]), index
    )


class Question(NamedTuple):
    """A rule, from refs, about a tile's rows and some keys."""

    asked: BoundMod
    numbers: tuple  # batch row, head, positions [rows, 1], keys [1, keys]

    @classmethod
    def of(
        cls, asked: BoundMod, pair: tuple[IntLike, IntLike], batch: IntLike, row, key
    ) -> "Question":
        """`pair` is the (batch row, head), `batch` the entry of the data by batch."""
        of = lambda numbers, n: n if numbers is None else numbers[n]
        position = row + (asked.offset if isinstance(asked.offset, int) else asked.offset[batch])
        return cls(
            asked,
            (of(asked.batch, pair[0]), of(asked.head, pair[1]), position[:, None], key[None, :]),
        )

    def read(self, array: int, index: tuple):
        """The number at this index of an array, which lies in memory as a vector."""
        return plgpu.load(
            self.asked.arrays[array].at[
                captured.flat_index(index, self.asked.mod.arrays[array].aval.shape)
            ]
        )

    def allowed(self):
        """Whether the rows see the keys, [rows, keys]."""
        return self.asked.evaluate(
            [value for _, value in self.asked.read_captured(self.read, *self.numbers)],
            *self.numbers,
        )

    def score(self, s):
        """What the rule makes of the logits s."""
        return self.asked.apply(s, self.read, *self.numbers)

    def score_vjp(self, s):
        return self.asked.vjp(s, self.read, *self.numbers)
