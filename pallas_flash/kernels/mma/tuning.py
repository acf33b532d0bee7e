"""How kernels by mma tile a problem: tables, and which row a problem takes."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pallas_flash.jax_support import hardware
from pallas_flash.kernels.mosaic.tiling import Tiling, cheapest
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv

SLICE = 256  # columns of a sum of 64 rows that the registers of four warps hold
ROWS = 64  # of the four warps of a program: 16 each, the rows of one mma
WIDE = 16  # keys of a block in decoding, with values wider than 128
# bytes of a row, of 16 bits a column, that are one column of tiles in shared memory
SWIZZLES = 128, 64, 32
REDUCTION = 2048  # bytes of shared memory in which warps of `ScoreTiles.by_query` add up columns


class Tiles(NamedTuple):
    """Of a kernel: `block_q` queries by `block_k` keys, of which a program owns the ones, and walks
    over blocks of the others in `stages` slots of shared memory: with one slot a block is copied
    while no product runs but those of the multiprocessor's other program."""

    width: int  # of queries and keys in shared memory
    value_width: int  # of values and the output
    block_q: int
    block_k: int
    owns_keys: bool = False
    stages: int = 2
    # at most; the narrower it is, the fewer addresses a row of tiles takes
    swizzle: int = SWIZZLES[0]
    tma: bool = False  # blocks are copied by TMA, not by cp.async
    separate_dk_dv: bool = False  # dK and dV have a kernel each
    keeps_owned: bool = False  # registers hold the keys and values of dK and dV beside these
    warpgroups: int = 1  # which share the columns of all arrays

    @property
    def copies_q(self) -> bool:
        """Whether queries come to shared memory, or straight to registers."""
        return self.warpgroups == 1

    @property
    def keeps_q(self) -> bool:
        """Whether registers hold queries beside the sums: a thread has 32 of them."""
        return self.block_q * self.width <= 64 * 128

    @property
    def tiling(self) -> Tiling:
        columns = self.block_q if self.owns_keys else self.block_k
        return Tiling(self.block_q, self.block_k, columns, transposed=self.owns_keys)

    @property
    def row_bytes(self) -> int:
        """Of a key and its value, or of a query and its do."""
        return 2 * (self.width + self.value_width)

    @property
    def forward_bytes(self) -> int:
        """Of shared memory, but for the mbarriers, in the forward."""
        passing = self.stages * self.block_k * self.row_bytes
        if self.copies_q:
            return passing + 2 * self.block_q * self.width
        return passing + 4 * 2 * self.warpgroups * self.block_q * self.block_k  # of tile.SumOfParts

    @property
    def shared_bytes(self) -> int:
        """The same of gradients: both matrices of the tile that a program owns, and those of the
        blocks that pass by."""
        owned, passing = (self.block_q, self.block_k)[:: -1 if self.owns_keys else 1]
        return (owned + self.stages * passing) * self.row_bytes

    def __str__(self):
        copies = "TMA" if self.tma else "cp.async"
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        size = f"{self.block_q} x {self.block_k}, {stages} by {copies}"
        shared = f" of {self.warpgroups} warpgroups" if self.warpgroups > 1 else ""
        return f"{size}, widths {self.width}/{self.value_width}{shared}"


class DecodeTiles(NamedTuple):
    """Of split-KV decoding: 64 rows by `block_k` keys, with a program for each of `num_splits` of
    the keys. Each of its warpgroups owns a slice of the columns of O, and adds up a slice of those
    that the scores are sums over."""

    width: int
    value_width: int
    num_splits: int
    stages: int
    block_k: int
    copies: int = 1  # that a block of keys takes
    swizzle: int = SWIZZLES[0]
    swizzle_in_slots: int = SWIZZLES[0]
    tma: bool = False
    stored: str | None = None  # the dtype of keys and values of 8 bits
    values_are_keys: bool = False  # blocks are of keys alone
    widened: int = 0  # columns of a block in 8 bits that are also in shared memory in 16

    block_q = ROWS
    keeps_q = Tiles.keeps_q

    @property
    def warpgroups(self) -> int:
        return -(-self.value_width // SLICE)

    @property
    def row_width(self) -> int:
        """Of a key and its value in shared memory."""
        return self.width + (0 if self.values_are_keys else self.value_width)

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, but for the mbarriers."""
        scores = 4 * 2 * 2 * ROWS * self.block_k if self.warpgroups > 1 else 0  # tile.SumOfParts
        in_use = 2 * self.block_k * self.widened
        slots = self.stages * self.block_k * self.row_width * (1 if self.stored else 2)
        return 2 * ROWS * self.width + scores + in_use + slots

    def __str__(self):
        size = f"{ROWS} x {self.block_k}, {self.num_splits} splits, {self.stages} stages"
        stored = f" of {self.stored}" if self.stored else ""
        several = f", {self.warpgroups} warpgroups" if self.warpgroups > 1 else ""
        return f"{size}{stored}{several}, widths {self.width}/{self.value_width}"


class ScoreTiles(NamedTuple):
    """Of kernels/mma/score_gradients.py."""

    by_query: Tiles
    by_key: Tiles  # for sums over queries


# By registers, spills, shared memory and instructions of the code compiled for an A100, an RTX 4090
# and an RTX 5090; timed on an H100 alone (results.md#by-mma-by-the-clock).
_TANGENT = (
    Tiles(width=64, value_width=64, block_q=64, block_k=64),
    Tiles(width=128, value_width=128, block_q=64, block_k=32),
    Tiles(width=256, value_width=256, block_q=64, block_k=16, swizzle=64),
)
# of dS, whose sums are one tile: for Hopper's kernels too, which know wider heads. The last row of
# each is for GPUs with 99 KB of shared memory, and for heads above 256 on all.
_SCORES = (
    Tiles(width=64, value_width=64, block_q=64, block_k=64),
    Tiles(width=512, value_width=512, block_q=64, block_k=32),
    Tiles(width=512, value_width=512, block_q=64, block_k=16),
)
_KEY_SCORES = (
    Tiles(width=64, value_width=64, block_q=64, block_k=64, owns_keys=True),
    Tiles(width=512, value_width=512, block_q=32, block_k=64, owns_keys=True),
    Tiles(width=512, value_width=512, block_q=16, block_k=64, owns_keys=True),
)


def tangent_tiles(problem: Problem) -> Tiles | None:
    """Queries, keys and values with their tangents."""
    size = lambda t: 2 * t.block_q * t.width * 2 + 2 * t.stages * t.block_k * t.row_bytes
    return row_of(_TANGENT, problem, size)


def decode_tiles(
    problem: Problem, page: int = ROWS, stored: str | None = None
) -> DecodeTiles | None:
    """As many stages as shared memory holds beside q, and beside a block in 16 bits where keys and
    values are stored in 8, of blocks so large that there are three, or else two. None where it
    holds none of these, or registers no O."""
    sizes = _decode_tiles(problem, page, stored)
    return next((t for t in sizes if t.shared_bytes <= _shared_memory()), None)


def why_no_decoding(problem: Problem, page: int = ROWS, stored: str | None = None) -> str | None:
    """Why `decode_tiles` are None; None where they are not, or where there is no GPU to ask."""
    p, sizes = problem, f"got H = {problem.head_size}, Hv = {problem.value_size}"
    if decode_tiles(p, page, stored) is not None:
        return None
    needed = min((t.shared_bytes for t in _decode_tiles(p, page, stored)), default=None)
    if needed is None:
        return f"values of more than {2 * SLICE} columns do not fit into registers; {sizes}"
    if not (hardware.compute_capability() or hardware.interpret):
        return None
    needed_kb, kb = (-(-n // 1024) for n in (needed + 1024, hardware.shared_memory()))
    return (
        f"split-KV decoding needs {needed_kb} KB of shared memory, and this GPU has {kb}; {sizes}"
    )


def _decode_tiles(problem: Problem, page: int, stored: str | None) -> Iterator[DecodeTiles]:
    """What registers hold, the best first."""
    p, size = problem, 1 if stored else 2
    width, value_width = widths(p)
    count = -(-value_width // SLICE)
    sliced, row = (width // count, value_width // count), width + value_width
    # float16 holds no weights times scales: then the values' columns are widened to bfloat16 too
    once = p.values_are_keys and p.dtype != "float16"

    def tiles(block_k: int, stages: int) -> DecodeTiles:
        rows = ROWS if hardware.has_tma() else min(page, block_k)
        in_slots = _swizzle(*sliced, rows * count, size)
        return DecodeTiles(
            width,
            value_width,
            split_kv.num_splits(p, block_k, hardware.processors()),
            stages,
            block_k,
            max(block_k // page, 1),
            _swizzle(*sliced, block_k) if stored else in_slots,
            in_slots,
            hardware.has_tma(),
            stored,
            p.values_are_keys,
            0 if not stored else width if once else row,
        )

    # registers hold o beside it, and what is made of 8 bits
    is_wide = width > 128 or (stored and row > 128)
    most = 32 if count > 1 else WIDE if sliced[1] > 128 else 32 if is_wide else ROWS
    sizes = [block_k for block_k in (ROWS, 32, WIDE) if block_k <= most and count <= 2]
    of_stages = itertools.product(((6, 5, 4, 3), (2,)), sizes)
    return (tiles(block_k, n) for each, block_k in of_stages for n in each)


def tiles_if_decoding(problem: Problem) -> DecodeTiles | None:
    return decode_tiles(problem) if split_kv.is_decoding(problem) else None


def page_columns(problem: Problem, page: int, stored: str | None = None) -> int:
    """Of how many columns, or a multiple, heads must be whose pages of so many keys are copied one
    by one: a copy by cp.async, by the four warps, is of four tiles of 8 rows, side by side or
    not."""
    p, tile = problem, SWIZZLES[-1] // (1 if stored else 2)
    rows = page if p.value_size <= 128 else min(page, WIDE)
    tiles = 1 if hardware.has_tma() else max(32 // rows, 1)
    return max(tiles * tile, _column_step(p))


def _shared_memory(programs: int = 1) -> int:
    """Bytes for the matrices of each of so many programs of a multiprocessor, which has 1 KB more
    than one of them can have: CUDA keeps 1 KB of each, and mbarriers take less than another."""
    return (hardware.shared_memory() + 1024) // programs - 2048


def score_tiles(problem: Problem) -> ScoreTiles | None:
    """None where shared memory does not hold them."""
    by_query = row_of(_SCORES, problem, lambda t: t.shared_bytes + REDUCTION)
    by_key = row_of(_KEY_SCORES, problem, lambda t: t.shared_bytes)
    return None if by_query is None or by_key is None else ScoreTiles(by_query, by_key)


def row_of(
    table, problem: Problem, size: Callable[[Tiles], int], programs: int = 1
) -> Tiles | None:
    """The cheapest row that holds the problem's heads, as narrow as they are, and whose `size` in
    bytes a multiprocessor's shared memory holds for so many programs."""
    width, value_width = widths(problem)

    def narrow(row: Tiles) -> Tiles:
        columns = width // row.warpgroups, value_width // row.warpgroups
        swizzle = min(_swizzle(*columns, min(row.block_q, row.block_k)), row.swizzle)
        of_heads = dict(width=width, value_width=value_width, swizzle=swizzle)
        return row._replace(**of_heads, tma=hardware.has_tma())

    row = cheapest(table, problem, lambda row: size(narrow(row)) <= _shared_memory(programs))
    return row and narrow(row)


def _swizzle(width: int, value_width: int, page: int = ROWS, size: int = 2) -> int:
    """The widest of which these, in tiles for copies of so many rows, are multiples; in numbers of
    `size` bytes."""
    tiles = max(32 // page, 1)
    fits = lambda n, swizzle: n % (swizzle // size * tiles) == 0
    return next(x for x in SWIZZLES if fits(width, x) and fits(value_width, x))


def widths(problem: Problem) -> tuple[int, int]:
    """How many columns queries and keys have, and values."""
    p, step = problem, _column_step(problem)
    return tuple(-(-size // step) * step for size in (p.head_size, p.value_size))


def _column_step(problem: Problem) -> int:
    """Heads have whole steps of an mma; two at a time where blocks may be of 16 rows, which four
    warps copy; and as many for each of two warpgroups."""
    widest = max(problem.head_size, problem.value_size)
    return 16 if widest <= 128 else 32 if widest <= 256 else 64


def padded_length(length: int, block: int = 1) -> int:
    """How many rows: whole blocks; TMA copies from whole tiles of 8."""
    step = max(block, 8 if hardware.has_tma() else 1)
    return -(-length // step) * step
