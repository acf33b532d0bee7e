"""How a kernel cuts the scores, for what it reads of masks and biases; and which row of a table of
tiles a problem takes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pallas_flash.problem.arguments import Problem


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
