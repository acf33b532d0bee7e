"""What describes a kernel by mma: how it tiles a problem, and to what sizes arrays are padded."""

from collections.abc import Callable
from typing import NamedTuple

from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.mosaic.elements import (
    SWIZZLES,
    TILE_ROWS,
    Tiling,
    columns,
    round_up,
    row_bytes,
    widest_swizzle,
)
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

WARPS, WARP_ROWS = 4, 16  # of a warpgroup, and the rows of one mma
ROWS = WARPS * WARP_ROWS  # of a program's four warps
OUTPUT_COLUMNS = 256  # of ROWS rows, that the registers of four warps hold
WIDE_BLOCK = 16  # keys of a block in decoding, with values wider than 128


class Gpu(NamedTuple):
    """The properties of the GPU of a call on which tiles depend."""

    capability: float | None
    shared_memory: int  # bytes that a program can have
    has_tma: bool

    @classmethod
    def here(cls) -> "Gpu":
        return cls(hardware.compute_capability(), hardware.shared_memory(), hardware.has_tma())

    def has_fast_products(self) -> bool:
        """Whether products wait for shared memory, as on an A100; GPUs with no more of it multiply
        at half or a quarter of an A100's rate."""
        return self.shared_memory > gpus.SM86.program_bytes


class MmaTiles(NamedTuple):
    """A kernel whose programs own `block_q` queries, or `block_k` keys if `owns_keys`, and walk
    over blocks of the others in `stages` slots of shared memory. With one slot, only products
    of the multiprocessor's other program run while a block is copied."""

    width: int  # columns of queries and keys in shared memory
    value_width: int  # columns of values and the output
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
        return self.block_q * self.width <= ROWS * 128

    @property
    def tiling(self) -> Tiling:
        columns = self.block_q if self.owns_keys else self.block_k
        return Tiling(self.block_q, self.block_k, columns, transposed=self.owns_keys)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of a key and its value, or of a query and its do."""
        return row_bytes(dtype, self.width, self.value_width)

    def __str__(self):
        copies = "TMA" if self.tma else "cp.async"
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        size = f"{self.block_q} x {self.block_k}, {stages} by {copies}"
        shared = f" of {self.warpgroups} warpgroups" if self.warpgroups > 1 else ""
        return f"{size}, widths {self.width}/{self.value_width}{shared}"


class Row(NamedTuple):
    """A row of a kernel's table: tiles, and which problems and GPUs may take them."""

    tiles: MmaTiles
    # what leaves them too few registers: "ids" of segments, words of "dropout", or a "score" that a
    # score_mod or a soft cap modifies
    spills_beside: tuple[str, ...] = ()
    is_for: Callable[[Gpu], bool] = lambda gpu: True


class DecodeTiles(NamedTuple):
    """Split-KV decoding: 64 rows by `block_k` keys, with a program for each of `num_splits` of the
    keys. Each of its warpgroups owns a slice of the columns of O, and adds up a slice of the
    columns that the scores are sums over."""

    width: int
    value_width: int
    block_k: int
    stages: int
    num_splits: int = 1
    copies: int = 1  # that a block of keys takes
    swizzle: int = SWIZZLES[0]
    swizzle_in_slots: int = SWIZZLES[0]
    tma: bool = False
    stored: str | None = None  # the dtype of keys and values of 8 bits
    # whether all warps have the same 16 rows, and each a quarter of the keys of a block
    sliced_k: bool = False
    gathers: bool = False  # keys and values are copied row by row, as lists name them

    reads_values_in_keys = True  # where a problem's values are the keys' first columns

    @property
    def block_q(self) -> int:
        return WARP_ROWS if self.sliced_k else ROWS

    @property
    def keeps_q(self) -> bool:
        """Whether registers hold queries beside the sums: a thread has 32 of them."""
        return self.width <= 128

    @property
    def copies_q(self) -> bool:
        """Whether queries come to shared memory, or straight to registers, as few rows do."""
        return not (self.sliced_k and self.keeps_q)

    def swizzle_of_q(self, dtype: str) -> int:
        """The swizzle of queries in shared memory."""
        return min(self.swizzle, swizzle_of(dtype, (self.width,), self.block_q))

    @property
    def warpgroups(self) -> int:
        return schedule.ceil_div(self.value_width, OUTPUT_COLUMNS)

    def __str__(self):
        size = f"{self.block_q} x {self.block_k}, {self.num_splits} splits, {self.stages} stages"
        stored = f" of {self.stored}" if self.stored else ""
        several = f", {self.warpgroups} warpgroups" if self.warpgroups > 1 else ""
        gathered = ", keys gathered by lists" if self.gathers else ""
        return f"{size}{stored}{several}, widths {self.width}/{self.value_width}{gathered}"


class ScoreTiles(NamedTuple):
    """The kernels of score_gradients.py."""

    by_query: MmaTiles
    by_key: MmaTiles  # for sums over queries


class AmpereTiles(NamedTuple):
    """The kernels of a problem; None where registers or shared memory do not hold their tiles."""

    forward: MmaTiles | None  # None too where decoding alone knows such heads
    dq: MmaTiles | None
    dkv: MmaTiles | None
    tangent: MmaTiles | None  # of forward mode
    decode: DecodeTiles | None = None

    @property
    def has_backward(self) -> bool:
        return self.dq is not None

    def __str__(self):
        forward = {"forward": self.forward} if self.decode is None else {"decoding": self.decode}
        others = {"dq": self.dq, "dk, dv": self.dkv, "forward mode": self.tangent}
        return "; ".join(f"{name} {t}" for name, t in (forward | others).items() if t)


def widths(problem: Problem) -> tuple[int, int]:
    """Columns of queries and keys, and of values, in shared memory."""
    p, step = problem, _column_step(problem)
    return round_up(p.head_size, step), round_up(p.value_size, step)


def _column_step(problem: Problem) -> int:
    """Heads have whole steps of an mma; two at a time where blocks may be of 16 rows, which four
    warps copy; and as many for each of two warpgroups."""
    widest = max(problem.head_size, problem.value_size)
    return 16 if widest <= 128 else 32 if widest <= 256 else 64


def swizzle_of(dtype: str, widths: tuple[int, ...], rows: int = ROWS) -> int:
    """The widest swizzle of which matrices of these widths have whole tiles, in blocks of `rows`
    that four warps copy."""
    side_by_side = _tiles_side_by_side(rows)
    fits = lambda columns: all(width % (columns * side_by_side) == 0 for width in widths)
    return widest_swizzle(dtype, fits)


def _tiles_side_by_side(rows: int) -> int:
    """How many of the tiles that four warps copy at a time lie side by side."""
    return max(4 * TILE_ROWS // rows, 1)


def page_columns(problem: Problem, page: int, stored: str | None = None) -> int:
    """The number of columns of which heads must be a multiple, for pages of so many keys to be
    copied one by one."""
    p = problem
    rows = page if p.value_size <= 128 else min(page, WIDE_BLOCK)
    tiles = 1 if hardware.has_tma() else _tiles_side_by_side(rows)
    return max(tiles * columns(stored or p.dtype, SWIZZLES[-1]), _column_step(p))


def padded_length(length: int, block: int = 1) -> int:
    """Rows of an array in whole blocks, and in whole tiles where TMA copies."""
    return round_up(length, max(block, TILE_ROWS if hardware.has_tma() else 1))
