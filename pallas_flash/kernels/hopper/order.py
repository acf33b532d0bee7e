"""In which order the programs of a Hopper kernel run: a one-dimensional grid, and what each program
owns.

Programs are in sections of heads whose inputs fit into the L2 cache together. In a section those
come first whose tile is likely to see most, and heads that share keys and values are neighbours.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.pytrees import IntLike

L2 = 32 * 2**20  # bytes of the L2 cache (50 MB) that a section may take


class Place(NamedTuple):
    """A tile of queries of one head, or a tile of keys of one key/value head."""

    batch: IntLike
    head: IntLike
    kv_head: IntLike
    tile: IntLike


def query_tiles(p: Problem, block_q: int, rounds: int = 1) -> int:
    """The number of programs that each own `rounds` tiles of queries."""
    count = schedule.ceil_div(p.queries, block_q)
    if count % rounds:
        raise ValueError(
            f"each program owns as many tiles of a head; got {rounds} to a program, of {count} to "
            "a head."
        )
    return p.batch * p.heads * (count // rounds)


def key_tiles(p: Problem, block_k: int) -> int:
    """The number of programs that each own a tile of keys."""
    return p.batch * p.kv_heads * schedule.ceil_div(p.keys, block_k)


def query_tile(
    program: IntLike, p: Problem, block_q: int, key_bytes: int, rounds: int = 1, turn: IntLike = 0
) -> Place:
    """Tile number `turn` of the `rounds` of a program that owns queries, all of one head and as far
    from each other as can be; a key and its value take `key_bytes`. The last tiles, as a rule, see
    most."""
    count = schedule.ceil_div(p.queries, block_q)
    pair, tile = _pair(
        program, p.group * _together(p.batch * p.kv_heads, p.keys * key_bytes), count // rounds
    )
    batch, head = _div(pair, p.heads)
    return Place(batch, head, _div(head, p.group)[0], count - 1 - tile - turn * (count // rounds))


def key_tile(program: IntLike, p: Problem, block_k: int, query_bytes: int) -> Place:
    """Of a program that owns keys; a query and its do take `query_bytes`. The first tiles, as a
    rule, are seen by most."""
    together = _together(p.batch * p.kv_heads, p.queries * p.group * query_bytes)
    pair, tile = _pair(program, together, schedule.ceil_div(p.keys, block_k))
    batch, kv_head = _div(pair, p.kv_heads)
    return Place(batch, kv_head * p.group, kv_head, tile)


def _together(pairs: int, bytes_: int) -> int:
    """How many of all pairs of batch and head, each of so many bytes, make a section."""
    return max(n for n in range(1, pairs + 1) if pairs % n == 0 and (n == 1 or n * bytes_ <= L2))


def _pair(program: IntLike, together: int, count: int):
    """The pair of batch and head, and the number of the tile in its order."""
    section, within = _div(program, together * count)
    tile, pair = _div(within, together)
    return section * together + pair, tile


def _div(a: IntLike, b: int):
    """Quotient and remainder; // and % do not lower."""
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))
