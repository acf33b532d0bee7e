"""How the forward and the backward by mma tile a problem."""

from collections.abc import Callable
from typing import NamedTuple

from pallas_flash.jax_support import hardware
from pallas_flash.kernels.mma.tuning import (
    DecodeTiles,
    Tiles,
    row_of,
    tangent_tiles,
    tiles_if_decoding,
)
from pallas_flash.problem.arguments import Problem

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
    Tiles(width=128, value_width=128, block_q=64, block_k=64, stages=1),
    Tiles(width=192, value_width=128, block_q=64, block_k=32),
    Tiles(width=256, value_width=256, block_q=64, block_k=32, swizzle=64),
    Tiles(width=256, value_width=256, block_q=64, block_k=32, stages=1, swizzle=64),
    Tiles(width=512, value_width=512, block_q=64, block_k=32, warpgroups=2, swizzle=64),
    Tiles(width=512, value_width=512, block_q=64, block_k=16, warpgroups=2, swizzle=64),
)
_DQ = (
    Tiles(width=64, value_width=64, block_q=128, block_k=32),
    Tiles(width=128, value_width=128, block_q=64, block_k=32),
    Tiles(width=128, value_width=128, block_q=64, block_k=32, stages=1),
    Tiles(width=256, value_width=256, block_q=64, block_k=16, swizzle=64),
    Tiles(width=256, value_width=256, block_q=64, block_k=16, stages=1, swizzle=64),
)
_WIDEST_DKV = Tiles(
    width=256,
    value_width=256,
    block_q=16,
    block_k=64,
    owns_keys=True,
    separate_dk_dv=True,
    swizzle=64,
)
_DKV = (
    Tiles(width=64, value_width=64, block_q=64, block_k=64, owns_keys=True),
    Tiles(width=64, value_width=64, block_q=32, block_k=64, owns_keys=True),
    Tiles(width=128, value_width=128, block_q=32, block_k=64, owns_keys=True),
    Tiles(width=128, value_width=128, block_q=32, block_k=64, owns_keys=True, stages=1),
    Tiles(width=192, value_width=128, block_q=16, block_k=64, owns_keys=True),
    _WIDEST_DKV,
    _WIDEST_DKV._replace(stages=1),
)
# Before those where shared memory binds: for an mma a warp that owns twice the rows reads half as
# much of it, and one whose keys and values are in registers three fifths.
_TALL_FORWARD = (
    _FORWARD[0],
    Tiles(width=64, value_width=64, block_q=128, block_k=32),
    Tiles(width=128, value_width=128, block_q=128, block_k=32),
)
_TALL_DQ = (
    Tiles(width=128, value_width=128, block_q=128, block_k=32),
    Tiles(width=128, value_width=128, block_q=128, block_k=32, stages=1),
)
_TALL_DKV = (
    Tiles(width=64, value_width=64, block_q=32, block_k=128, owns_keys=True),
    Tiles(width=128, value_width=128, block_q=32, block_k=64, owns_keys=True, keeps_owned=True),
)


def tiles(problem: Problem) -> AllTiles:
    """The cheapest row of each table that holds the problem's heads, as narrow as they are, and
    leaves shared memory for two programs on a multiprocessor, if there is one; but for those
    beside which segment ids, the words of dropout, or what else makes logits, would spill."""
    p = problem
    has_ids = p.resolved_mask.query_ids is not None
    first = 1 if has_ids or p.dropped else 0
    forward, dq, dkv = _FORWARD[first:], _DQ, _DKV[1 if has_ids else 0 :]
    # GPUs with no more multiply at half or a quarter of an A100's rate
    if hardware.shared_memory() > hardware.LEAST_SHARED_KB << 10:
        if hardware.compute_capability() != 9.0:  # results.md#by-mma-by-the-clock
            forward = _TALL_FORWARD[first:] + forward
        if not p.dropped:
            dq = _TALL_DQ + dq
        if not (p.dropped or p.score or p.soft_cap):
            dkv = _TALL_DKV + dkv
    return AllTiles(
        _row(forward, p, lambda t: t.forward_bytes),
        _row(dq, p, lambda t: t.shared_bytes),
        _row(dkv, p, lambda t: t.shared_bytes),
        tangent_tiles(p),
        tiles_if_decoding(p),
    )


def _row(table, p: Problem, size: Callable[[Tiles], int]) -> Tiles | None:
    """Of which two programs fit, whose warps run in each other's waits, else one."""
    single = [row for row in table if row.warpgroups == 1]
    return row_of(single, p, size, programs=2) or row_of(table, p, size)
