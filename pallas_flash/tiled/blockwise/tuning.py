"""How blockwise cuts a problem: into blocks of queries and keys, and on a CPU into a few heads at a
time."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv
from pallas_flash.tiled.blockwise.key_blocks import (
    EXTRA,
    UNROLLED,
    count_scores,
    find_band,
    static_key_blocks,
)
from pallas_flash.tiled.schedule import ceil_div, key_range


class DecodeTiles(NamedTuple):
    block_k: int
    batch: int | None  # rows of the batch at a time; None: all
    dtype: str  # of the products' operands


class Tiles(NamedTuple):
    block_q: int
    block_k: int
    # key/value heads at a time, of all B * K; None: all, which a partitioner can spread over
    # devices
    heads: int | None
    dtype: str  # of the products' operands
    forward_heads: int | None = None  # the same of a forward that no backward follows
    # of a forward that decodes; False: it may not, a backward follows
    decode: DecodeTiles | Literal[False] | None = None
    why: str | None = None

    @property
    def is_wide(self) -> bool:
        return self.dtype in ("float32", "float64")

    def __str__(self):
        if self.decode:
            rows = "all batch rows" if self.decode.batch is None else "a batch row"
            forward = (
                f"decoding: {rows} at a time by {self.decode.block_k} keys, multiplied in "
                f"{self.decode.dtype}"
            )
            return f"{forward}; backward {self._replace(decode=None)}"
        queries = "1 query" if self.block_q == 1 else f"{self.block_q} queries"
        heads = "1 key/value head" if self.heads == 1 else f"{self.heads or 'all'} key/value heads"
        more = f" ({self.forward_heads or 'all'} where no backward follows)"
        heads += " at a time" + (more if self.heads != self.forward_heads else "")
        why = f" ({self.why})" if self.why else ""
        size = f"blocks of {queries} by {self.block_k} keys"
        return f"{size}, {heads}, in {self.dtype}{why}"

    def of_gradient(self) -> "Tiles":
        """Those of a forward that the backward follows, which does not decode: its products round
        as the backward's do, and XLA may see them once."""
        return self._replace(forward_heads=self.heads, decode=False)


# What these are worth: results.md#cpu-tiles. A score has ten bytes in the backward, six in a
# forward alone, and malloc maps new memory in each call for what is larger than 32 MiB.
SCORES = 5 * 2**18  # of a block, and of the heads that go at a time
CALL = 3 * 2**20  # of all heads, if they go at once
ROWS = 128  # of a block of which a mask hides much
KEYS = 256  # of a block, where a loop or a mask_mod may skip some
MANY = 2048  # keys, from which on the regular forward copies those of each head
COPIED = 2**25  # bytes of keys and values in the order of the heads, that malloc maps in each call
STEP = 2**20  # bytes of keys and values, too few for a step of a loop over batch rows
BLOCK = 512  # keys of all heads that are in the caches at a time, in decoding


def tiles(problem: Problem) -> Tiles:
    return _tiles(problem)._replace(decode=decode_tiles(problem) if _decodes(problem) else None)


def _decodes(p: Problem) -> bool:
    """Whether the forward reads keys where they lie, all rows at once: on a CPU it gains where a
    copy of them is large, or where few rows see some of many. It goes by batch rows, which gains
    nothing where each has few keys for many rows."""
    if not split_kv.is_decoding(p) or not _on_cpu():
        return split_kv.is_decoding(p)
    rows, has_data = p.queries * p.group, p.resolved_mask.has_data
    dtype = "float32" if rows == 1 else _tiles(p).dtype  # XLA multiplies a single row in float32
    of_batch_row = p.keys * p.kv_heads * (p.head_size + p.value_size) * jnp.dtype(dtype).itemsize
    if p.keys > MANY:
        return (_is_masked(p) and rows <= 8) or p.batch * of_batch_row >= COPIED
    # else nothing is copied
    gains = (rows < 8 or of_batch_row > STEP) if has_data else (p.kv_heads > 1 or dtype != p.dtype)
    return gains and p.batch * of_batch_row >= COPIED


def decode_tiles(problem: Problem, page: int = 1) -> DecodeTiles:
    """A block is of whole pages."""
    p, on_cpu = problem, _on_cpu()
    block_k = min(max(BLOCK // page, 1) * page, p.keys)
    wide = "float64" if p.dtype == "float64" else "float32"
    return DecodeTiles(
        block_k, 1 if on_cpu and _is_one_device() else None, wide if on_cpu else p.dtype
    )


def _tiles(problem: Problem) -> Tiles:
    p = problem
    if not _on_cpu():
        return Tiles(_at_most(512, p.queries), _at_most(256, p.keys), None, p.dtype)
    # products of float16 are slow
    in_own = p.dtype == "float64" or (p.dtype == "bfloat16" and _is_apart(p))
    dtype = p.dtype if in_own else "float32"
    if not all(isinstance(n, int) for n in (p.batch, p.queries, p.keys)):
        block_q, block_k = max(ROWS // p.group, 16), KEYS if _is_cut(p) else MANY
        return Tiles(_at_most(block_q, p.queries), _at_most(block_k, p.keys), None, dtype)
    rows, why = _query_block(p)
    block_q, skips = min(rows, p.queries), _is_cut(p) or p.resolved_mask.mask_mod is not None
    band = None if skips else find_band(p, block_q, p.keys)
    tiles = Tiles(block_q, band.width if band else p.keys, None, dtype, why=why)
    # what is made of queries and keys
    arrays = (2 * p.group * p.queries + p.keys) * (p.head_size + p.value_size) // 4
    if band:
        scores = p.group * block_q * band.width + arrays
    elif not skips and static_key_blocks(p, tiles):
        scores = p.group * count_scores(p, block_q) + arrays
    else:
        tiles = tiles._replace(block_k=min(KEYS, p.keys))
        scores = 5 * p.group * block_q * tiles.block_k  # caches had better hold a step of a loop
    if not _is_one_device():
        return tiles
    copied = p.keys * (p.head_size + p.value_size) * jnp.dtype(dtype).itemsize
    heads, forward_heads = (_heads(p, scores * size // 10, copied) for size in (10, 6))
    return tiles._replace(heads=heads, forward_heads=forward_heads)


def _query_block(p: Problem) -> tuple[int, str]:
    """How many queries a block has, and why. Blocks with all keys that they see are the fastest if
    they are few, or alike; where a mask hides much, small ones compute less of it."""
    mask = p.resolved_mask
    fewest = ceil_div(p.queries * p.group * p.keys, SCORES)
    is_causal = mask.right is not None and p.queries < 2 * p.keys  # else it hides a quarter at most
    of_loops = min(max(UNROLLED * ROWS // p.group, 32), 2 * ROWS)
    if _is_cut(p) or mask.mask_mod is not None:
        size = of_loops if mask.mask_mod is None else ROWS
        return even(p.queries, size), "small blocks, of which the mask hides some"
    if not is_causal and mask.left is None:
        size = max(ceil_div(p.queries, fewest), 16)
        return even(p.queries, size), f"at most {SCORES / 1e6:.1f} million scores of a head"
    rows = ROWS if p.queries > ROWS else ROWS // 2  # the first half sees half of the keys
    narrow = even(p.queries, max(min(rows, ROWS // p.group), 16))
    few = even(p.queries, max(ceil_div(p.queries, UNROLLED), narrow))
    if p.queries > UNROLLED * ROWS:
        if mask.left is not None and find_band(p, narrow, p.keys):
            return narrow, "a loop over blocks that see equally many keys"
        heads = 1 if _is_one_device() else p.batch * p.kv_heads  # that go at a time
        if fewest * heads > 2 * UNROLLED and p.bias is None:  # of a bias see _is_cut
            return even(p.queries, of_loops), "loops over the keys that a block sees"
    return few, f"up to {UNROLLED} blocks, each with the keys that it sees"


def scale_can_come_last(p: Problem) -> bool:
    """Whether scores of 16 bits may stay q k^T until their maximum is off: all else would have to
    be divided by the scale."""
    return p.scale > 0 and not p.sinks and p.bias is None and p.soft_cap is None and p.score is None


def _is_apart(p: Problem) -> bool:
    """Whether the scale and the maximum cannot meet in one multiply-add, whose result would exceed
    0: the scale comes last, or something stands between."""
    return scale_can_come_last(p) or (
        p.score is None and (p.bias is not None or p.soft_cap is not None)
    )


def _is_cut(p: Problem) -> bool:
    """Whether loops go over blocks of keys, since the mask has data, or since blocks with all keys
    that they see would be large and many, behind a long cache. Of few keys loops would skip too
    little, and with a bias the sum of its gradient would be copied in each step."""
    few = isinstance(p.keys, int) and (p.keys <= 6 * KEYS or p.bias is not None)
    return (p.resolved_mask.has_data or _is_behind_cache(p)) and not few


def _is_masked(p: Problem) -> bool:
    mask = p.resolved_mask
    return mask.has_data or mask.left is not None or mask.right is not None


def _is_behind_cache(p: Problem) -> bool:
    """Whether a static mask leaves nearly all queries nearly all keys that one of them sees, and
    these are more than few blocks hold."""
    if p.resolved_mask.has_data or not _is_masked(p):
        return False
    if not isinstance(p.queries, int) or not isinstance(p.keys, int):
        return False
    keys = key_range(p.resolved_mask, 0, p.queries - 1)
    visible = p.queries * (keys.last - keys.first)
    return visible * p.group > UNROLLED * SCORES and visible <= EXTRA * count_scores(p, ROWS // 8)


def even(length: int, most: int) -> int:
    """The size of as few equal parts as have at most so many each, but for what makes it a multiple
    of 8."""
    return 8 * ceil_div(ceil_div(length, ceil_div(length, most)), 8)


def of_calls(tiles: Tiles, p: Problem, calls: int) -> Tiles:
    """The tiles of so many calls of a problem side by side, as under vmap: fewer heads of each go
    at a time."""
    if not all(isinstance(n, int) for n in (calls, p.batch, p.queries, p.keys)):
        return tiles
    scores = p.group * tiles.block_q * tiles.block_k
    if static_key_blocks(p, tiles):
        scores = p.group * count_scores(p, tiles.block_q)
    few = _heads(p, calls * scores) if _on_cpu() and _is_one_device() else None
    if few is None:
        return tiles
    fewer = lambda heads: few if heads is None else min(heads, few)
    return tiles._replace(heads=fewer(tiles.heads), forward_heads=fewer(tiles.forward_heads))


def _heads(p: Problem, scores: int, copied: int = 0) -> int | None:
    """How many key/value heads go at a time, each of which takes so much memory as so many scores
    do, and so many bytes of keys and values; None: all."""
    heads = p.batch * p.kv_heads
    if heads * scores <= CALL and heads * copied <= COPIED:
        return None
    return max(min(SCORES // scores, COPIED // copied if copied else heads), 1)


def serialize(tiles: Tiles, heads: tuple, keys: list | None) -> bool:
    """Whether static blocks, of so many heads [B, K, G], are to wait for each other: a CPU has all
    their scores in memory where none does."""
    if keys is None or not _on_cpu() or not all(isinstance(n, int) for n in heads):
        return False
    scores = math.prod(heads) * tiles.block_q
    scores *= sum(key.size for of_rows in keys for key, *_ in of_rows)
    return len(keys) > 1 and 2 * scores > 3 * SCORES


def unrolled(tiles: Tiles, heads: tuple) -> int:
    """How many steps of a loop over blocks that see equally many keys XLA may run at a time, where
    a step has little for each of a CPU's cores."""
    scores = math.prod(heads) * tiles.block_q * tiles.block_k
    return min(max(SCORES // (2 * scores), 1), UNROLLED) if _on_cpu() else 1


def _at_most(size: int, length: int) -> int:
    """A symbol of jax.export is one block."""
    return min(size, length) if isinstance(length, int) else length


def _on_cpu() -> bool:
    return hardware.here().platform == "cpu"


def _is_one_device() -> bool:
    """Whether a loop over heads is no loop over devices: that would gather what a partitioner has
    spread."""
    types, devices = (
        jax.sharding.get_abstract_mesh().axis_types,
        jax.device_count(hardware.here().platform),
    )
    return devices == 1 or (bool(types) and all(t == jax.sharding.AxisType.Manual for t in types))
