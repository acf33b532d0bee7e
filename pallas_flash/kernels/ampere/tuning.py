"""How the forward and the backward by mma tile a problem."""

from typing import NamedTuple

from pallas_flash.arguments import Problem
from pallas_flash.kernels.mma.tuning import (
    DecodeTiles,
    Tiles,
    row_of,
    tangent_tiles,
    tiles_if_decoding,
)

WIDEST = 512  # head size


class AllTiles(NamedTuple):
    forward: Tiles | None  # None: decoding alone knows such heads
    # None: shared memory does not hold them
    dq: Tiles | None
    dkv: Tiles | None
    tangent: Tiles | None  # of forward mode
    decode: DecodeTiles | None = None

    @property
    def has_backward(self) -> bool:
        return self.dq is not None

    def __str__(self):
        forward = f"forward {self.forward}" if self.decode is None else f"decoding {self.decode}"
        others = {"dq": self.dq, "dk, dv": self.dkv, "forward mode": self.tangent}
        return "; ".join([forward, *(f"{name} {t}" for name, t in others.items() if t)])


# By what the tables of kernels/mma/tuning.py were made by.
_FORWARD = (
    Tiles(width=64, value_width=64, block_q=128, block_k=64),
    Tiles(width=64, value_width=64, block_q=64, block_k=64),
    Tiles(width=128, value_width=128, block_q=64, block_k=64),
    Tiles(width=192, value_width=128, block_q=64, block_k=32),
    Tiles(width=256, value_width=256, block_q=64, block_k=32),
    Tiles(width=512, value_width=512, block_q=64, block_k=32, warpgroups=2, swizzle=64),
    Tiles(width=512, value_width=512, block_q=64, block_k=16, warpgroups=2, swizzle=64),
)
_DQ = (
    Tiles(width=64, value_width=64, block_q=128, block_k=32),
    Tiles(width=128, value_width=128, block_q=64, block_k=32),
    Tiles(width=256, value_width=256, block_q=64, block_k=16),
)
_DKV = (
    Tiles(width=64, value_width=64, block_q=64, block_k=64, owns_keys=True),
    Tiles(width=64, value_width=64, block_q=32, block_k=64, owns_keys=True),
    Tiles(width=128, value_width=128, block_q=32, block_k=64, owns_keys=True),
    Tiles(width=192, value_width=128, block_q=16, block_k=64, owns_keys=True),
    Tiles(width=256, value_width=256, block_q=16, block_k=64, owns_keys=True, separate_dk_dv=True),
)


def tiles(problem: Problem) -> AllTiles:
    """The cheapest row of each table that holds the problem's heads, as narrow as they are; but for
    the very first where segment ids, or the words of dropout, would spill beside it."""
    p = problem
    has_ids = p.resolved_mask.query_ids is not None
    return AllTiles(
        row_of(_FORWARD[1 if has_ids or p.dropped else 0 :], p, lambda t: t.forward_bytes),
        row_of(_DQ, p),
        row_of(_DKV[1 if has_ids else 0 :], p),
        tangent_tiles(p),
        tiles_if_decoding(p),
    )
