"""What describes a Blackwell kernel: how it tiles a problem, and what else may vary."""

import math
from typing import NamedTuple

from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, DecodeTiles, MmaTiles
from pallas_flash.kernels.mosaic.elements import SWIZZLES, Tiling, row_bytes, swizzle_of_rows

ROWS = 128  # of a product, and of tensor memory
TENSOR_COLUMNS = 512  # of 32 bits
HALF = ROWS // 2  # columns of a consumer of the backward
CONSUMERS = 2  # of the backward: each computes half of a block's scores


class ForwardTiles(NamedTuple):
    """A kernel that owns `row_tiles` x 128 queries, and walks over blocks of 128 keys: `stages` of
    keys and `value_stages` of values in shared memory."""

    width: int  # columns of queries and keys in shared memory
    value_width: int  # columns of values and the output
    row_tiles: int = 2
    stages: int = 2
    value_stages: int = 2
    columns: int = 32  # of the scores that a thread computes at once
    exp2_columns: int = 8  # of these, whose exponentials are polynomials
    first_columns: int = HALF  # of P, with which P V begins; a product of the others follows
    # how far scores may exceed the maximum they are taken from; O is rescaled only beyond
    rescale_threshold: float = 8.0
    in_order: bool = True  # whether products read and write in the order in which they are begun
    # MB of keys and values of a section; None: what L2 holds. Each of two dies has half of L2
    section_mb: int | None = None

    swizzle = SWIZZLES[0]
    block_k = ROWS

    @property
    def block_q(self) -> int:
        return self.row_tiles * ROWS

    @property
    def p_over_s(self) -> bool:
        """Whether P lies over S, since tensor memory has no columns for both."""
        columns = self.row_tiles * (self.block_k + self.block_k // 2 + self.value_width)
        return columns > TENSOR_COLUMNS

    @property
    def p_columns(self) -> tuple[int, int]:
        """The columns of each part of P."""
        return self.first_columns, self.block_k - self.first_columns

    def value_swizzle(self, dtype: str) -> int:
        """The swizzle of values, of which products take a row for each column of a part of P."""
        return swizzle_of_rows(dtype, math.gcd(*self.p_columns), self.swizzle)

    @property
    def relies_on_order(self) -> bool:
        """Whether S overwrites the P that a product begun before it reads, without a wait."""
        return self.p_over_s and self.in_order

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, self.columns)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of a key and its value."""
        return row_bytes(dtype, self.width, self.value_width)

    def __str__(self):
        return _describe(self)


class GradientTiles(NamedTuple):
    """A kernel that owns 128 queries, or 128 keys if `owns_keys`, and walks over blocks of 128 of
    the others: `stages` of keys or queries and `value_stages` of values or do in shared memory."""

    width: int  # columns of queries and keys in shared memory
    value_width: int  # columns of values and do
    owns_keys: bool = False
    stages: int = 2
    value_stages: int = 2
    columns: int = 32  # of the scores that a thread computes at once
    exp2_columns: int = 0  # of these, whose exponentials are polynomials
    # of the heads that share keys: each has a program, whose sums XLA adds up
    group_parts: int = 1
    sums_delta: bool = False  # dQ's, from o in what is the last slot of values later

    swizzle = SWIZZLES[0]
    block_q = block_k = ROWS

    @property
    def p_over_dp(self) -> bool:
        """Whether P and dS of dK and dV lie over dP, since tensor memory has no columns for all."""
        return 3 * ROWS + self.width + self.value_width > TENSOR_COLUMNS

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.block_q, self.block_k, self.columns, transposed=self.owns_keys)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of a key and its value, or of a query and its do."""
        return row_bytes(dtype, self.width, self.value_width)

    def __str__(self):
        return _describe(self)


def _describe(t: ForwardTiles | GradientTiles) -> str:
    size = f"{t.block_q} x {t.block_k}, {t.stages} and {t.value_stages} stages"
    parts = t.group_parts if isinstance(t, GradientTiles) else 1
    several = f", a group of heads in {parts} parts" if parts > 1 else ""
    return f"{size}, widths {t.width}/{t.value_width}{several}, by tcgen05"


class BlackwellTiles(NamedTuple):
    """The kernels of a problem; None for those that are not by tcgen05 but `by_mma`."""

    forward: ForwardTiles | None  # None too for decoding
    dq: GradientTiles | None
    dkv: GradientTiles | None
    by_mma: AmpereTiles

    @property
    def tangent(self) -> MmaTiles | None:
        """The kernel of forward mode."""
        return self.by_mma.tangent

    @property
    def decode(self) -> DecodeTiles | None:
        """The forward's kernel where that is decoding."""
        return self.by_mma.decode

    @property
    def has_backward(self) -> bool:
        return None not in (self.dq or self.by_mma.dq, self.dkv or self.by_mma.dkv)

    def __str__(self):
        by_tcgen05 = {"forward": self.forward, "dq": self.dq, "dk, dv": self.dkv}
        names = dict(forward="forward", dq="dq", dkv="dk, dv")
        others = self.by_mma._replace(**{name: None for name in names if getattr(self, name)})
        own = [f"{name} {t}" for name, t in by_tcgen05.items() if t]
        return "; ".join([*own, f"by mma {others}"])
