"""In which order the programs of a one-dimensional grid run, and which tile each of them owns.

Programs are in sections of heads whose inputs fit into the L2 cache together, and of enough of them
for most processors. In a section programs come first whose tile is likely to see most, and heads
that share keys and values are neighbours.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import hardware
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

# of the L2 cache, what the inputs of a section may take: of an H100's 50 MB 35 are read from there,
# 69 are not (results.md#hopper-by-the-clock)
L2_SHARE = 0.72


class WorkTile(NamedTuple):
    """A tile of queries of one head, or a tile of keys of one key/value head."""

    batch: IntLike
    head: IntLike
    kv_head: IntLike
    tile: IntLike


def query_programs(p: Problem, block_q: int, tiles_per_program: int = 1) -> int:
    """How many programs there are, if each owns `tiles_per_program` tiles of queries, of one head
    or all of several heads."""
    count, tiles = schedule.ceil_div(p.queries, block_q), tiles_per_program
    if not divide_evenly(p, count, tiles):
        raise ValueError(
            f"each program owns as many tiles of a head, or all of as many of {p.batch * p.heads} "
            f"heads; got {tiles} to a program, of {count} to a head."
        )
    return p.batch * p.heads * count // tiles


def divide_evenly(p: Problem, count: int, tiles: int) -> bool:
    """Whether programs of `tiles` tiles divide heads of `count` tiles: as many programs share each
    head, or each program has as many whole heads."""
    return count % tiles == 0 or (tiles % count == 0 and p.batch * p.heads * count % tiles == 0)


def key_programs(p: Problem, block_k: int, group_parts: int = 1) -> int:
    """How many programs there are that each own a tile of keys, for one of so many parts of the
    heads that share them."""
    return p.batch * p.kv_heads * group_parts * schedule.ceil_div(p.keys, block_k)


def query_tile(
    program: IntLike,
    p: Problem,
    t,
    tiles_per_program: int = 1,
    number: IntLike = 0,
    section_mb: int | None = None,
) -> WorkTile:
    """Tile `number` of a program's tiles t of queries, all of one head and as far from each other
    as can be, or tiles of several heads. The last tiles, as a rule, see most. A section has as many
    pairs of batch row and key/value head as L2 holds, or so many MB."""
    count = schedule.ceil_div(p.queries, t.block_q)
    if tiles_per_program > count:
        if t.heads_apart:
            nth, tile = divmod_(number, count)
            index = nth * query_programs(p, t.block_q, tiles_per_program) + program
        else:
            index, tile = divmod_(program * tiles_per_program + number, count)
        return _query_tile(p, index, count - 1 - tile)
    programs = count // tiles_per_program
    pairs, size = p.batch * p.kv_heads, p.keys * t.row_bytes(p.dtype)
    section = _section(pairs, size, p.group * programs, section_mb and section_mb * 2**20)
    index, tile = _pair(program, p.group * section, programs)
    return _query_tile(p, index, count - 1 - tile - number * programs)


def _query_tile(p: Problem, index: IntLike, tile: IntLike) -> WorkTile:
    """The tile of a head, which has this index among the heads of all batch rows."""
    batch, head = divmod_(index, p.heads)
    return WorkTile(batch, head, divmod_(head, p.group)[0], tile)


def key_tile(program: IntLike, p: Problem, t, group_parts: int = 1) -> WorkTile:
    """The tile t of keys that a program owns, and the first of its heads: one of `group_parts`
    parts of the heads that share these keys. The first tiles, as a rule, are seen by most. A
    section has as many pairs of batch row and part as L2 holds."""
    heads, count = p.group // group_parts, schedule.ceil_div(p.keys, t.block_k)
    parts = p.kv_heads * group_parts
    section = _section(p.batch * parts, p.queries * heads * t.row_bytes(p.dtype), count)
    pair, tile = _pair(program, section, count)
    batch, part = divmod_(pair, parts)
    return WorkTile(batch, part * heads, divmod_(part, group_parts)[0], tile)


def section_bytes() -> float:
    """Bytes of the inputs of a section that the L2 cache holds, on the GPU that a call is for."""
    return L2_SHARE * hardware.l2_cache()


def _section(pairs: int, bytes_: int, programs: int, most: float | None = None) -> int:
    """How many of all pairs of batch and head, each of so many bytes and programs, make a section:
    as many as L2 or `most` bytes hold, but enough for three quarters of the processors. With fewer,
    programs of several sections run at a time, long ones beside short ones, which are soon at other
    heads."""
    divisors = [n for n in range(1, pairs + 1) if pairs % n == 0]
    busy = (n for n in divisors if 4 * n * programs >= 3 * hardware.processors())
    most = most or section_bytes()
    return max(next(busy, pairs), max((n for n in divisors if n * bytes_ <= most), default=1))


def _pair(program: IntLike, section: int, count: int):
    """The pair of batch and head, and the number of the tile in its order."""
    number, within = divmod_(program, section * count)
    tile, pair = divmod_(within, section)
    return number * section + pair, tile


def divmod_(a: IntLike, b: int):
    """Quotient and remainder; // and % do not lower."""
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))
