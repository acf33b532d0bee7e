"""What describes a Hopper kernel: how it tiles a problem, and what else may vary."""

from typing import Literal, NamedTuple

from pallas_flash.kernels.mma.tile_sizes import DecodeTiles
from pallas_flash.kernels.mosaic.elements import SWIZZLES, Tiling, columns, round_up, row_bytes

ROWS = 64  # queries or keys of a warpgroup: the rows of one wgmma


class QueryTiles(NamedTuple):
    """A kernel that owns queries: `warpgroups` x 64 of them, by `block_k` keys at a time. Shared
    memory has `stages` blocks of keys and `value_stages` blocks of values. If `split`, two
    warpgroups own the same 64 queries, each half of the columns of the output or of dQ; the first
    computes P, or both compute dS."""

    # of queries and keys in shared memory, with zeros in the columns that heads do not have
    width: int
    value_width: int  # of values and the output
    warpgroups: int = 2
    block_k: int = 64
    stages: int = 2
    value_stages: int = 2
    # where a block of K is waited for; early, a block of V is still held, and there must be two
    k_wait: Literal["at use", "early"] = "at use"
    # how far scores may exceed the maximum they are taken from; O is rescaled only beyond
    rescale_threshold: float = 0.0
    swizzle: int = SWIZZLES[0]  # at most
    q_stages: int = 1  # tiles of queries that shared memory has room for
    tiles_per_program: int = 1  # of queries, one after another
    # whether the heads of a program lie apart, so that programs read neighbouring heads at a time
    heads_apart: bool = False
    split: bool = False
    sums_delta: bool = False  # the kernel of dQ, for that of dK and dV too

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 queries in a program."""
        return 1 if self.split else self.warpgroups

    @property
    def block_q(self) -> int:
        return self.row_tiles * ROWS

    @property
    def column_slices(self) -> int:
        """Slices of the columns of values and output, or of dQ: one for each consumer that owns the
        same queries."""
        return self.warpgroups // self.row_tiles

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, self.block_k)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of a key and its value."""
        return row_bytes(dtype, self.width, self.value_width)

    def __str__(self):
        return _describe(self)


class KeyTiles(NamedTuple):
    """A kernel that owns keys: `block_q` queries at a time by 64 keys for each of `warpgroups`, or,
    if `split`, by 64 keys for both. Then one computes P and dS, the other dP, and each owns half of
    the columns of dK and dV. Of 192 columns each consumer owns 128, so 64 are computed twice."""

    width: int
    value_width: int
    warpgroups: int = 2
    block_q: int = 64
    stages: int = 2
    split: bool = False
    # S and dP one after the other: registers hold one of them beside the sums
    s_before_dp: bool = False
    swizzle: int = SWIZZLES[0]  # at most
    sums: tuple[Literal["dk", "dv"], ...] = ("dk", "dv")  # what the kernel computes
    fused: bool = False  # the kernel adds to dq too
    # how many programs share a tile of keys, each for part of the query heads; they add dk and dv
    # in float32. Fused kernel only
    group_parts: int = 1
    # whether the producer adds dq, under its loads, or each consumer; fused alone. Of programs with
    # several heads ptxas serializes the products then
    dq_by_producer: bool = False

    @property
    def widths(self) -> dict[str, int]:
        return dict(dk=self.width, dv=self.value_width)

    @property
    def has_dk(self) -> bool:
        return "dk" in self.sums

    @property
    def has_dv(self) -> bool:
        return "dv" in self.sums

    @property
    def block_k(self) -> int:
        return ROWS if self.split else self.warpgroups * ROWS

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, min(self.block_q, ROWS), transposed=True)

    def owned_columns(self, dtype: str, width: int) -> int:
        """Columns of dK or dV that a warpgroup owns: whole tiles."""
        return round_up(width // 2, columns(dtype, self.swizzle)) if self.split else width

    @property
    def dq_column_slices(self) -> int:
        """Slices of the columns of a block's dQ, each for another warpgroup; its rows are cut into
        64 each."""
        return self.warpgroups * ROWS // self.block_q

    def row_bytes(self, dtype: str) -> int:
        """Bytes of a query and its do, and of its dq in float32 if the kernel adds to it."""
        dq = row_bytes("float32", self.width) if self.fused else 0
        return row_bytes(dtype, self.width, self.value_width) + dq

    def __str__(self):
        return _describe(self)


def _describe(t: QueryTiles | KeyTiles) -> str:
    size = f"{t.block_q} x {t.block_k}, {t.warpgroups} warpgroups, {t.stages} stages"
    count = t.tiles_per_program if isinstance(t, QueryTiles) else 1
    several = f", {count} tiles of queries to a program" if count > 1 else ""
    if isinstance(t, KeyTiles) and t.group_parts > 1:
        several = f", a group of heads in {t.group_parts} parts"
    return f"{size}, widths {t.width}/{t.value_width}{several}"


class HopperTiles(NamedTuple):
    """The kernels of a problem: its backward in two kernels or three, or in one that adds in any
    order. None for a kernel that does not run, or does not know heads so wide."""

    forward: QueryTiles | None
    dq: QueryTiles | None
    dkv: KeyTiles | None
    # in its place, where registers do not hold both sums
    dk: KeyTiles | None
    dv: KeyTiles | None
    fused: KeyTiles | None
    tangent: QueryTiles | None  # of forward mode
    decode: DecodeTiles | None = None

    @property
    def has_backward(self) -> bool:
        return self.dq is not None or self.fused is not None

    def __str__(self):
        forward = f"forward {self.forward}" if self.decode is None else f"decoding {self.decode}"
        others = {
            "dq": self.dq,
            "dk, dv": self.dkv,
            "dk": self.dk,
            "dv": self.dv,
            "dq, dk, dv": self.fused,
            "forward mode": self.tangent,
        }
        return "; ".join([forward, *(f"{name} {t}" for name, t in others.items() if t)])
