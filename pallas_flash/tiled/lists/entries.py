"""The entries of a tile's lists, by which its keys are gathered and their gradients added."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.tiled import schedule
from pallas_flash.tiled.blockwise.derivatives import Slices
from pallas_flash.tiled.lists.list_heads import KeyBlocks, Sums
from pallas_flash.tiled.lists.tile import Tile


class Entries(NamedTuple):
    """The entries of a few lists, int32 [l, n]."""

    index: jax.Array
    in_order: bool

    def keys(self, block: int):
        """The keys that they name, int32 [l, n * block]."""
        keys = self.index[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None]
        return keys.reshape(keys.shape[0], -1)

    def gather(self, tile: Tile, x: KeyBlocks):
        """Keys or values of a tile, [l, n * block, h]; keys that no query sees are 0 (they may
        hold NaN)."""
        return jnp.where(tile.visible.any((1, 2))[..., None], x.gather(self.index), 0)

    def slices(self, tile: Tile, x: Slices, query) -> Slices:
        """The differentiable arrays of a tile: its list head's, and its rows of the query."""
        key, value = (None if a is None else self.gather(tile, a) for a in (x.key, x.value))
        return Slices(query, key, value, tile.of_pairs(x.bias), x.captured)

    def add(self, tile: Tile, sums: Sums, dk, dv, dbias, captured) -> Sums:
        """The sums with a tile's gradients of keys, values and bias added."""
        return Sums(
            self.scatter_add(sums.key, dk),
            self.scatter_add(sums.value, dv),
            tile.add_bias_gradient(sums.bias, dbias),
            captured,
        )

    def scatter_add(self, x, new):
        """x [blocks, block, h] with new [l, n * block, h] added."""
        new = new.reshape(*self.index.shape, *x.shape[1:])
        if not self.in_order:
            return x.at[self.index].add(new, mode="drop")
        # the entries of one list are distinct
        add = lambda i, x: x.at[self.index[i]].add(new[i], mode="drop", unique_indices=True)
        return schedule.loop(0, new.shape[0], add, x)
