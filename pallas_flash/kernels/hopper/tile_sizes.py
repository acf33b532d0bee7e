"""What describes a Hopper kernel: how it tiles a problem, and what else may vary."""

from typing import Literal, NamedTuple

from pallas_flash.kernels.mma.tuning import DecodeTiles
from pallas_flash.kernels.mosaic.tiling import Tiling

ROWS = 64  # queries or keys of a warpgroup: the rows of one wgmma
# bytes of a row, of 16 bits a column, that are one column of tiles in shared memory; TMA copies by
# them
SWIZZLES = 128, 64, 32


class Tiles(NamedTuple):
    """Of a kernel that owns queries: `warpgroups` x 64 of them by `block_k` keys, with `stages`
    blocks of keys and `value_stages` blocks of values in shared memory; or, if `split`, 64 for two
    warpgroups, of which each owns half of the columns of the output or of dQ; the first computes P,
    or both compute dS."""

    # of queries and keys in shared memory, with zeros in the columns that heads do not have
    width: int
    value_width: int  # of values and the output
    warpgroups: int
    block_k: int
    stages: int = 2
    value_stages: int = 2
    # where a block of K is waited for; early, a block of V is still held, and there must be two
    k_wait: Literal["at use", "early"] = "at use"
    # how far scores may exceed the maximum they are taken from; O is rescaled only beyond
    rescale_threshold: float = 0.0
    swizzle: int = SWIZZLES[0]
    q_stages: int = 1  # tiles of queries that shared memory has room for
    tiles_per_program: int = 1  # of queries, one after another
    split: bool = False
    section: int = 0  # pairs of batch row and key/value head to a section; 0: as many as L2 holds
    sums_delta: bool = False  # the kernel of dQ, for that of dK and dV too

    @property
    def row_tiles(self) -> int:
        """How many times 64 queries there are."""
        return 1 if self.split else self.warpgroups

    @property
    def block_q(self) -> int:
        return self.row_tiles * ROWS

    @property
    def column_slices(self) -> int:
        """Into how many slices the columns of values and output, or of dQ, are cut."""
        return self.warpgroups // self.row_tiles

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, self.block_k)

    @property
    def key_bytes(self) -> int:
        """Of a key and its value."""
        return 2 * (self.width + self.value_width)

    @property
    def forward_bytes(self) -> int:
        """Of shared memory, for the matrices of the forward."""
        queries = self.q_stages * self.block_q * max(self.width, self.value_width)
        keys = self.stages * self.width + self.value_stages * self.value_width
        p = ROWS if self.split else 0
        return 2 * (queries + self.block_k * (keys + p))

    @property
    def dq_bytes(self) -> int:
        """The same for dQ."""
        row = self.width + (1 + self.sums_delta) * self.value_width  # of q, do and o
        keys = self.stages * self.width + self.value_stages * self.value_width
        return 2 * (self.block_q * row + self.block_k * keys)

    def __str__(self):
        return _describe(self)


class KeyTiles(NamedTuple):
    """Of a kernel that owns keys: `block_q` queries at a time by 64 keys for each of `warpgroups`;
    or, if `split`, by 64 keys for both: one computes P and dS, the other dP, and each owns half of
    the columns of dK and dV. Half of 192 columns are 128, of which some are both's."""

    width: int
    value_width: int
    warpgroups: int
    block_q: int
    stages: int
    split: bool = False
    # S and dP one after the other: registers hold one of them beside the sums
    s_before_dp: bool = False
    swizzle: int = SWIZZLES[0]
    sums: tuple[Literal["dk", "dv"], ...] = ("dk", "dv")  # what the kernel computes
    # into so many parts the heads that share keys are split: each has a program for a tile of keys,
    # and they add up dk and dv in float32, as all do dq; fused alone
    group_parts: int = 1
    section: int = 0  # pairs of batch row and part to a section; 0: as many as L2 holds
    # whether the producer adds dq, under its loads, or each consumer; fused alone. Of programs with
    # several heads ptxas serializes the products then
    dq_by_producer: bool = False

    @property
    def block_k(self) -> int:
        return ROWS if self.split else self.warpgroups * ROWS

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, min(self.block_q, ROWS), transposed=True)

    def owned_columns(self, width: int) -> int:
        """How many of the columns of dK or dV a warpgroup owns: whole tiles."""
        return -(-width // self.swizzle) * self.swizzle // 2 if self.split else width

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, for the matrices of a kernel that splits the columns."""
        has_dk, has_dv = (name in self.sums for name in ("dk", "dv"))
        keys = self.block_k * (self.width + has_dk * self.value_width)
        queries = self.stages * self.block_q * (self.width + self.value_width)
        exchanged = 2 * (has_dk + has_dv) * self.block_k * self.block_q
        return 2 * (keys + queries + exchanged)

    @property
    def dq_column_slices(self) -> int:
        """Into how many slices the columns of a block's dQ are cut, each for another warpgroup; its
        rows are cut into 64 each."""
        return self.warpgroups * ROWS // self.block_q

    def query_bytes(self, fused: bool) -> int:
        """Of a query and its do, and of its dq in float32, if that is added to."""
        return 2 * (self.width + self.value_width) + 4 * self.width * fused

    def __str__(self):
        return _describe(self)


def _describe(t: Tiles | KeyTiles) -> str:
    size = f"{t.block_q} x {t.block_k}, {t.warpgroups} warpgroups, {t.stages} stages"
    count = t.tiles_per_program if isinstance(t, Tiles) else 1
    several = f", {count} tiles of queries to a program" if count > 1 else ""
    if isinstance(t, KeyTiles) and t.group_parts > 1:
        several = f", a group of heads in {t.group_parts} parts"
    return f"{size}, widths {t.width}/{t.value_width}{several}"


class AllTiles(NamedTuple):
    """Of the backward in two kernels or three, or in one that adds in any order; None for those
    that do not run, or do not know heads so wide."""

    forward: Tiles | None
    dq: Tiles | None
    dkv: KeyTiles | None
    # in its place, where registers do not hold both sums
    dk: KeyTiles | None
    dv: KeyTiles | None
    fused: KeyTiles | None
    tangent: Tiles | None  # of forward mode
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


def checked(t: Tiles) -> Tiles:
    """The forward's, which scripts/tune.py may have drawn."""
    if t.k_wait == "early" and t.value_stages < 2:
        raise ValueError(
            "to wait for K early, while a block of V is held, takes value_stages of 2 or more, "
            f"or it waits for ever; got {t.value_stages}."
        )
    if t.split and (t.warpgroups != 2 or t.value_width % t.swizzle):
        raise ValueError(
            "split must be by 2 warpgroups, of values whose halves are whole tiles of "
            f"{t.swizzle // 2} columns; got {t.warpgroups}, {t.value_width}."
        )
    return t
