"""A walk over the tiles of a list head."""

from collections.abc import Callable
from typing import NamedTuple


class Walk(NamedTuple):
    """A way over the tiles of a list head.

    each_tile(head, tiles, step, sums, start, *by_row) runs sums, of_rows = step(sums, of_rows,
    tile, entries, *by_row) for all tiles, and returns the last sums and of_rows. In a step
    arrays by row, [T, ..], have the tile's rows, [l, r, ..]. Results by row begin as `start`; if
    tiles have whole rows, a step gets None in their place.
    """

    each_tile: Callable
    has_whole_rows: bool  # whether a tile has all keys of its rows
