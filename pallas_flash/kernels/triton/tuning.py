"""The tiles of the Triton kernels: a table, and which row a problem takes."""

from typing import NamedTuple

from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.pallas_call import power_of_two
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv


class Tiles(NamedTuple):
    """Tile sizes of one kernel, in rows of queries and keys."""

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2


class DecodeTiles(NamedTuple):
    """Tile sizes of a forward that decodes: all rows by `block_k` keys; each of `num_splits` splits
    of the keys has a program."""

    block_q: int
    block_k: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3


class TritonTiles(NamedTuple):
    forward: Tiles
    dkv: Tiles
    dq: Tiles
    tangent: Tiles | None = None  # forward mode; None in the tables: the tiles of dq
    decode: DecodeTiles | None = None

    def __str__(self):
        show = lambda t: f"{t.block_q} x {t.block_k}, {t.num_warps} warps, {t.num_stages} stages"
        d = self.decode
        forward = (
            f"forward {show(self.forward)}"
            if d is None
            else f"decoding {show(d)}, {d.num_splits} splits"
        )
        backward = f"dkv {show(self.dkv)}; dq {show(self.dq)}"
        return f"{forward}; {backward}; forward mode {show(self.tangent)}"


# By (widest head, bytes of an element). Chosen by registers and spills of the code compiled for an
# A100 and an H200; not yet timed.
_TABLE = {
    (64, 2): TritonTiles(Tiles(128, 64), Tiles(64, 64), Tiles(64, 64)),
    (128, 2): TritonTiles(
        Tiles(128, 64, num_warps=8), Tiles(64, 64, num_warps=8), Tiles(64, 64, num_warps=8)
    ),
    (256, 2): TritonTiles(
        Tiles(64, 32, num_warps=8), Tiles(32, 32, num_warps=8), Tiles(32, 32, num_warps=8)
    ),
    (64, 4): TritonTiles(
        Tiles(64, 32, num_warps=8), Tiles(32, 32, num_warps=8), Tiles(64, 32, num_warps=8)
    ),
    (128, 4): TritonTiles(
        Tiles(64, 32, num_warps=8),
        Tiles(16, 16, num_warps=8),
        Tiles(32, 32, num_warps=8),
        Tiles(16, 16, num_warps=8),
    ),
    (256, 4): TritonTiles(
        Tiles(32, 16, num_warps=8),
        Tiles(16, 16, num_warps=8),
        Tiles(16, 16, num_warps=8),
        Tiles(16, 16, num_warps=8, num_stages=1),
    ),
}
# The table where a program has at most 99 KB of shared memory: all features together fit.
_TABLE_OF_99_KB = _TABLE | {
    (128, 2): TritonTiles(Tiles(64, 64), Tiles(32, 64, num_warps=8), Tiles(64, 32, num_warps=8)),
    (256, 2): TritonTiles(
        Tiles(64, 32, num_warps=8),
        Tiles(16, 32, num_warps=8),
        Tiles(32, 32, num_warps=8),
        Tiles(32, 32, num_warps=8, num_stages=1),
    ),
}


def tiles(problem: Problem) -> TritonTiles:
    """The narrowest row of the table that fits the problem's heads, with tiles no longer than its
    lengths."""
    p, row = problem, _row(problem)
    fit = lambda block, length: min(block, power_of_two(length))
    kernels = [row.forward, row.dkv, row.dq, row.tangent or row.dq]
    capability = hardware.compute_capability()
    # a CPU's products round by how many keys they take, and P at large logits with them
    if capability is None:
        kernels = [t._replace(block_k=row.forward.block_k) for t in kernels]
        # Triton copies the next block over what a wgmma still reads (mma/NOTES.md#executed)
    elif capability >= 9:
        kernels[1] = kernels[1]._replace(num_stages=1)
    decoding = decode_tiles(p) if split_kv.is_decoding(p) else None
    return TritonTiles(
        *(
            t._replace(block_q=fit(t.block_q, p.queries), block_k=fit(t.block_k, p.keys))
            for t in kernels
        ),
        decoding,
    )


def decode_tiles(problem: Problem) -> DecodeTiles:
    """The tiles of decoding, from pages of any size."""
    p, block_k = problem, _row(problem).forward.block_k
    return DecodeTiles(
        power_of_two(p.queries * p.group),
        block_k,
        split_kv.num_splits(p, block_k, hardware.processors()),
    )


def _row(problem: Problem) -> TritonTiles:
    p = problem
    width, size = max(p.head_size, p.value_size), 4 if p.dtype == "float32" else 2
    is_gpu = hardware.compute_capability() is not None
    has_99_kb = is_gpu and hardware.shared_memory() <= gpus.SM86.program_bytes
    table = _TABLE_OF_99_KB if has_99_kb else _TABLE
    return next(
        tiles for (widest, bytes_), tiles in table.items() if width <= widest and size == bytes_
    )
