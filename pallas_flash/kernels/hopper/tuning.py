"""How the Hopper kernels tile a problem. Data only; a new row is a new line in the table."""

from typing import NamedTuple

from pallas_flash.arguments import Problem

ROWS = 64  # queries of a warpgroup: the rows of one wgmma


class Tiles(NamedTuple):
    """`warpgroups` x 64 queries by `block_k` keys, with `stages` blocks of keys and values in shared memory."""

    width: int  # head sizes are zero-padded to this
    warpgroups: int
    block_k: int
    stages: int

    @property
    def block_q(self) -> int:
        return self.warpgroups * ROWS

    def __str__(self):
        return f"forward {self.block_q} x {self.block_k}, {self.warpgroups} warpgroups, {self.stages} stages, width {self.width}"


# By registers, spills and instructions of the code compiled for an H200: three warpgroups hide more latency at 64 and spill at
# 128; blocks of 128 keys spill at 256. Not yet timed.
_TABLE = (
    Tiles(width=64, warpgroups=3, block_k=128, stages=2),
    Tiles(width=128, warpgroups=2, block_k=128, stages=2),
    Tiles(width=256, warpgroups=2, block_k=64, stages=2),
)


def tiles(problem: Problem) -> Tiles:
    """The narrowest row of the table that holds the problem's heads."""
    return next(row for row in _TABLE if max(problem.head_size, problem.value_size) <= row.width)
