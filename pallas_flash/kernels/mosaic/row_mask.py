"""What the queries of a tile see of a block of keys, where each thread holds a row: a bit for each
of its columns."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import row_bits
from pallas_flash.kernels.mosaic.registers import ScoreTile, gather, iota, load
from pallas_flash.masks.resolved_mask import ResolvedMask


class RowMask(NamedTuple):
    """The mask of a batch row and head. Where rows are queries, their data are in registers, which
    a loop over blocks keeps; others are refs."""

    resolved_mask: ResolvedMask
    batch: IntLike
    start: IntLike | None  # [queries], where they are rows
    stop: IntLike | None
    bits: Any  # mask.HeadBits or None
    rule: Any  # mods.HeadMod or None

    @classmethod
    def load(
        cls,
        resolved_mask: ResolvedMask,
        batch: IntLike,
        first_query: IntLike,
        size: int,
        bits,
        rule,
        transposed: bool,
    ) -> "RowMask":
        """The mask of `size` queries from `first_query` on."""
        if transposed:
            return cls(resolved_mask, batch, None, None, bits, rule)
        queries = pl.ds(first_query, size)
        at = resolved_mask.narrow(
            ("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, queries], row_bits.ROW)
        )
        return cls(at, batch, *at.interval(first_query + iota(size, row_bits.ROW)), bits, rule)

    def select(self, tile: ScoreTile) -> Callable:
        """A function of x and `other`: x where each query sees each key, and `other` elsewhere."""
        words = [self._words(part) for part in tile.split(row_bits.WORD)]
        if self.bits is not None:
            words = list(map(operator.and_, words, self.bits.words_of_rows(tile)))
        if self.rule is None:
            return lambda x, other: row_bits.select(x, words, other)
        visible = self.rule.visible(tile)
        return lambda x, other: row_bits.select(jnp.where(visible, x, other), words, other)

    def _words(self, tile: ScoreTile):
        """The columns, at most 32, that each row sees by its interval and its id."""
        mask = self.resolved_mask
        words = self._visible_to_keys(tile) if tile.transposed else self._keys_in_interval(tile)
        if mask.query_ids is None:
            return words
        if tile.transposed:
            keys = pl.ds(tile.first_key, tile.shape[0])
            ids = load(mask.key_ids.at[self.batch, keys], row_bits.ROW)
            others = self._at_lane(tile.first_query, tile)(mask.query_ids)
        else:
            ids, others = mask.query_ids, self._at_lane(tile.first_key, tile)(mask.key_ids)
        return words & row_bits.equal(ids, others)

    def _keys_in_interval(self, tile: ScoreTile):
        relative = lambda end: plgpu.layout_cast(
            jnp.broadcast_to(end - tile.first_key, tile.shape[:1]), row_bits.ROW
        )
        return row_bits.interval(relative(self.start), relative(self.stop))

    def _visible_to_keys(self, tile: ScoreTile):
        """The queries that see each key."""
        mask, row = self.resolved_mask, iota(tile.shape[0], row_bits.ROW)
        if not mask.has_data:  # an interval of queries
            key = tile.first_key + row
            start, stop = mask.transposed(ResolvedMask.ALL).interval(key)
            stop = jnp.where(key < mask.keys, stop, 0) - tile.first_query
            return row_bits.interval(jnp.zeros_like(key) + start - tile.first_query, stop)
        # each lane computes which of the warp's keys one query sees
        lane = row_bits.lane(tile.shape[0])
        at = mask.narrow(("start", "stop"), self._at_lane(tile.first_query, tile))
        first_key = tile.first_key + row - lane
        start, stop = (
            jnp.zeros_like(row) + end - first_key for end in at.interval(tile.first_query + lane)
        )
        return row_bits.transpose(row_bits.interval(start, stop))

    def _at_lane(self, first: IntLike, tile: ScoreTile) -> Callable:
        """A function of a ref: its data of 32 queries or keys, in each warp one in each lane."""
        index = first + row_bits.lane(tile.shape[0])
        return lambda ref: gather(ref, self.batch, index=index, layout=row_bits.ROW)
