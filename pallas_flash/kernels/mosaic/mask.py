"""What the queries of a tile see of a block of keys, as far as their interval and their document
say; a packed mask or a mask_mod comes on top."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_flash.kernels.mosaic.registers import Layouts, ScoreTile, iota, load
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.pytrees import IntLike


class TileMask(NamedTuple):
    """Of some queries. Their intervals are in registers, which a loop over blocks keeps."""

    resolved_mask: ResolvedMask  # its data by row are in registers, those by key are refs
    batch: IntLike
    start: IntLike  # [queries]
    stop: IntLike
    more: Any  # packed_mask.HeadMask, mods.HeadMod or None

    def visible(self, tile: ScoreTile):
        """Whether each query sees each key."""
        v, ids = self.resolved_mask, ()
        allowed = None if self.more is None else self.more.visible(tile)
        if v.query_ids is not None:
            key_ids = tile.load_per_key(lambda keys: v.key_ids.at[self.batch, keys])
            ids = tile.per_query(v.query_ids), key_ids
        keys = tile.key_index()
        inside = v.visible(tile.per_query(self.start), tile.per_query(self.stop), keys, *ids)
        return inside if allowed is None else inside & allowed


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
