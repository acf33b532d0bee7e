"""How blockwise cuts a problem: into blocks of queries and keys, and on a CPU into a few heads at a time."""

from typing import NamedTuple

import jax

from pallas_flash.arguments import Problem


class Tiles(NamedTuple):
    block_q: int
    block_k: int
    heads: int | None  # key/value heads at a time, of all B * K; None: all, which a partitioner can spread over devices
    dtype: str  # of the products' operands

    def __str__(self):
        heads = "all" if self.heads is None else self.heads
        return f"{self.block_q} queries of {heads} key/value heads by {self.block_k} keys, multiplied in {self.dtype}"


SCORES = 2**20  # that are in flight at a time on a CPU: what its caches hold, with what is made of them


def tiles(problem: Problem) -> Tiles:
    p = problem
    if not _is_one_cpu():
        return Tiles(_at_most(512, p.queries), _at_most(256, p.keys), None, p.dtype)
    block_q, block_k = _at_most(max(128 // p.group, 16), p.queries), _at_most(2048, p.keys)
    dtype = "float64" if p.dtype == "float64" else "float32"  # its products of 16 bits are slow
    if not all(isinstance(n, int) for n in (p.batch, p.queries, p.keys)):
        return Tiles(block_q, block_k, None, dtype)
    return Tiles(block_q, block_k, max(SCORES // (p.group * block_q * block_k), 1), dtype)


def _at_most(size: int, length: int) -> int:
    """A symbol of jax.export is one block."""
    return min(size, length) if isinstance(length, int) else length


def _is_one_cpu() -> bool:
    """Whether a loop over heads is no loop over devices: that would gather what a partitioner has spread."""
    types = jax.sharding.get_abstract_mesh().axis_types
    alone = jax.device_count() == 1 or (types and all(t == jax.sharding.AxisType.Manual for t in types))
    return jax.default_backend() == "cpu" and bool(alone)
