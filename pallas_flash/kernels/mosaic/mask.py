"""What the queries of a tile see of a block of keys, as far as their interval and their document
say; a packed mask or a mask_mod comes on top."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.registers import (
    Layouts,
    ScoreTile,
    iota,
    load,
    per_column,
    per_row,
)
from pallas_flash.masks.resolved_mask import ResolvedMask


class TileMask(NamedTuple):
    """Of some queries. Their intervals are in registers, which a loop over blocks keeps."""

    resolved_mask: ResolvedMask  # its data by row are in registers, those by key are refs
    batch: IntLike
    start: IntLike  # [queries]
    stop: IntLike
    more: Any  # packed_mask.HeadMask, mods.HeadMod or None

    def visible(self, tile: ScoreTile):
        """Whether each query sees each key."""
        allowed = None if self.more is None else self.more.visible(tile)
        seen, ids = self._in_interval(tile), self.resolved_mask.query_ids
        if ids is not None:
            key_ids = tile.load_per_key(
                lambda keys: self.resolved_mask.key_ids.at[self.batch, keys]
            )
            seen = seen & (tile.per_query(ids) == key_ids)
        return seen if allowed is None else seen & allowed

    def _in_interval(self, tile: ScoreTile):
        visible = self.resolved_mask.visible
        # where all rows see all keys, what follows would spill beside a mask_mod
        if tile.transposed or isinstance(self.stop, int):
            return visible(tile.per_query(self.start), tile.per_query(self.stop), tile.key_index())
        # `columns` keys at a time: relative to the first of them the ends of an interval are
        # compared with a number that the program knows
        columns = tile.layouts.columns
        shape = tile.shape[0], columns
        key = per_column(tile.first_key + iota(columns, tile.layouts.column), shape)
        relative = lambda end: per_row(end, shape) - key
        start = 0 if isinstance(self.start, int) and self.start == 0 else relative(self.start)
        stop = relative(self.stop)
        seen = lambda first: visible(start, stop, jnp.full(shape, first, jnp.int32))
        return jnp.concatenate([seen(n) for n in range(0, tile.shape[1], columns)], axis=1)


def load_mask(
    layouts: Layouts,
    resolved_mask: ResolvedMask,
    batch: IntLike,
    first_query: IntLike,
    size: int,
    more,
    transposed: bool = False,
) -> TileMask:
    """The TileMask of `size` queries from `first_query` on; transposed: they are the columns."""
    queries = pl.ds(first_query, size)
    layout = layouts.column if transposed else layouts.row
    at = resolved_mask.narrow(
        ("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, queries], layout)
    )
    return TileMask(at, batch, *at.interval(first_query + iota(size, layout)), more)
