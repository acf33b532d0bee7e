"""How the Hopper kernels tile a problem. Data only; a new row is a new line in the table."""

from typing import NamedTuple

from pallas_flash.arguments import Problem

ROWS = 64  # queries of a warpgroup: the rows of one wgmma
L2 = 32 * 2**20  # bytes of the L2 cache (50 MB) that keys and values may take


class Tiles(NamedTuple):
    """`warpgroups` x 64 queries by `block_k` keys, with `stages` blocks of keys and values in shared memory."""

    width: int  # of queries and keys; head sizes are zero-padded to this
    value_width: int  # of values and the output
    warpgroups: int
    block_k: int
    stages: int

    @property
    def block_q(self) -> int:
        return self.warpgroups * ROWS

    def __str__(self):
        size = f"forward {self.block_q} x {self.block_k}, {self.warpgroups} warpgroups, {self.stages} stages"
        return f"{size}, widths {self.width}/{self.value_width}"


# By registers, spills, shared memory and instructions of the code compiled for an H200: three warpgroups hide more latency at
# value width 64 and spill at 128; blocks of 128 keys spill at 256 and do not fit twice at 192. Not yet timed.
_TABLE = (
    Tiles(width=64, value_width=64, warpgroups=3, block_k=128, stages=2),
    Tiles(width=64, value_width=128, warpgroups=2, block_k=128, stages=2),
    Tiles(width=128, value_width=64, warpgroups=3, block_k=128, stages=2),
    Tiles(width=128, value_width=128, warpgroups=2, block_k=128, stages=2),
    Tiles(width=192, value_width=128, warpgroups=2, block_k=128, stages=2),
    Tiles(width=192, value_width=192, warpgroups=2, block_k=64, stages=2),
    Tiles(width=128, value_width=256, warpgroups=2, block_k=64, stages=2),
    Tiles(width=256, value_width=256, warpgroups=2, block_k=64, stages=2),
)


def tiles(problem: Problem) -> Tiles:
    """Of the rows that hold the problem's heads the one with the fewest multiplications."""
    p = problem
    rows = [row for row in _TABLE if p.head_size <= row.width and p.value_size <= row.value_width]
    return min(rows, key=lambda row: row.width + row.value_width)


def heads_together(problem: Problem, tiles: Tiles) -> int:
    """Of how many heads (of all batch rows) the programs run side by side."""
    p, t = problem, tiles
    pairs, size = p.batch * p.kv_heads, 2 * p.keys * (t.width + t.value_width)  # of keys and values: how many, and bytes of one
    return p.group * max(n for n in range(1, pairs + 1) if pairs % n == 0 and (n == 1 or n * size <= L2))
