"""How a kernel cuts the scores, for what it reads of masks and biases."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """Blocks of queries and keys. Transposed: scores have a row for each key."""

    block_q: int
    block_k: int
    columns: int  # of the scores that are computed at once
    transposed: bool = False
