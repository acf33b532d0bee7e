"""How the Hopper kernels tile a problem. Data only; a new row is a new line in the table."""

from typing import NamedTuple

from pallas_flash.arguments import Problem

ROWS = 64  # queries of a warpgroup: the rows of one wgmma
L2 = 32 * 2**20  # bytes of the L2 cache (50 MB) that keys and values may take


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


def heads_together(problem: Problem, tiles: Tiles) -> int:
    """Of how many heads (of all batch rows) the programs run side by side."""
    p = problem
    pairs, size = p.batch * p.kv_heads, 2 * 2 * p.keys * tiles.width  # of keys and values: how many, and bytes of one
    return p.group * max(n for n in range(1, pairs + 1) if pairs % n == 0 and (n == 1 or n * size <= L2))
