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


def cheapest(table: Iterable, problem: Problem, fits: Callable = lambda row: True):
    """Of the rows that hold the problem's heads, and fit, the one with the fewest multiplications,
    the first of several; None where there is none."""
    p = problem
    rows = [row for row in table if p.head_size <= row.width and p.value_size <= row.value_width]
    return next(filter(fits, sorted(rows, key=lambda row: row.width + row.value_width)), None)
