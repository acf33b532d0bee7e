"""The elements of the matrices that are multiplied: what follows from how many bytes one takes; how
a kernel tiles the scores, and which row of a table of tiles a problem takes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from pallas_flash.problem.arguments import Problem

OPERANDS = "bfloat16", "float16"  # dtypes that the kernels multiply
# Matrices lie in shared memory as tiles, by which TMA copies: rows of a tile, bytes of a row
TILE_ROWS, SWIZZLES = 8, (128, 64, 32)
_STRIDE = 16  # bytes, of which TMA asks for whole ones between the rows of an array


def row_bytes(dtype, *widths: int) -> int:
    """Bytes of a row of matrices of these widths, side by side."""
    return np.dtype(dtype).itemsize * sum(widths)


def columns(dtype, swizzle: int) -> int:
    """Columns of a tile in shared memory."""
    return swizzle // np.dtype(dtype).itemsize


def widest_swizzle(dtype, fits: Callable[[int], bool]) -> int:
    """The first of the SWIZZLES whose tiles have a number of columns that fits."""
    return next(swizzle for swizzle in SWIZZLES if fits(columns(dtype, swizzle)))


def swizzle_of_rows(dtype, rows: int, swizzle: int) -> int:
    """A swizzle no wider than the rows that a product sums over: Mosaic takes no other."""
    return min(row_bytes(dtype, rows), swizzle)


def padded_size(dtype, size: int, swizzle: int) -> int:
    """Columns of a global array for heads of `size`: whole tiles, or one that hangs over."""
    step = columns(dtype, _STRIDE if size <= columns(dtype, swizzle) else swizzle)
    return round_up(size, step)


def round_up(n: int, step: int) -> int:
    """The next multiple of step."""
    return -(-n // step) * step


class Tiling(NamedTuple):
    """Blocks of queries and keys. Transposed: scores have a row for each key."""

    block_q: int
    block_k: int
    columns: int  # of the scores that are computed at once
    transposed: bool = False


def cheapest(
    table: Iterable,
    problem: Problem,
    fits: Callable = lambda row: True,
    narrow: Callable = lambda row: row,
):
    """The row with the fewest multiplications, the first of several, among rows that hold the
    problem's heads and that fit once they are narrow(row); None where there is none."""
    p = problem
    rows = [row for row in table if p.head_size <= row.width and p.value_size <= row.value_width]
    cost = lambda row: row.width + row.value_width
    return next(filter(fits, map(narrow, sorted(rows, key=cost))), None)
