"""The walks over lists of keys, each whatever its costs."""

from pallas_flash.tiled import blockwise
from pallas_flash.tiled.lists.tuning import DENSE
from pallas_flash.tiled.lists.walks import WALKS

EVERY_WALK = (*WALKS, DENSE)


def walking(monkeypatch, walk: str) -> str:
    """Blockwise, which goes by this walk over lists."""
    tiles = blockwise.tiles

    def by_walk(problem):
        found = tiles(problem)
        return found._replace(lists=found.lists and found.lists._replace(walk=walk))

    monkeypatch.setattr(blockwise, "tiles", by_walk)
    return "blockwise"
