"""Tiles of blockwise: the blocks of queries and keys, and on a CPU the heads at a time."""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware, xla_cpu
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv
from pallas_flash.tiled.blockwise.mask import (
    EXTRA,
    UNROLLED,
    count_scores,
    find_band,
    static_key_blocks,
)
from pallas_flash.tiled.lists.tuning import DENSE, ListTiles, list_tiles
from pallas_flash.tiled.schedule import ceil_div, key_range


class DecodeTiles(NamedTuple):
    """Tiles of a forward that decodes."""

    block_k: int
    batch: int | None  # batch rows at a time; None: all
    dtype: str  # that of the products' operands


class Tiles(NamedTuple):
    """Tiles of the regular passes, and of decoding where the forward does."""

    block_q: int
    block_k: int
    # key/value heads at a time, of B * K; None: all, which a partitioner can spread over devices
    heads: int | None
    dtype: str  # that of the products' operands
    forward_heads: int | None = None  # heads at a time in a forward that no backward follows
    decode: DecodeTiles | Literal[False] | None = None  # False: a backward follows the forward
    why: str | None = None  # the reason for block_q
    lists: ListTiles | None = None  # of lists of keys, which all passes walk over
    chunk: "Tiles | None" = None  # of a forward of few queries that no backward follows
    in_place: bool = False  # keys and values are read where they lie, and copied by block

    @property
    def walks_lists(self) -> bool:
        """Whether all passes walk over lists of keys; else these are a mask of the blocks."""
        return self.lists is not None and self.lists.walk != DENSE

    @property
    def is_wide(self) -> bool:
        return self.dtype in ("float32", "float64")

    def __str__(self):
        if self.walks_lists:
            return f"{self.lists}, in {self.dtype}"
        if self.lists:
            return f"{self.lists}: {self._replace(lists=None)}"
        if self.decode:
            rows = "all batch rows" if self.decode.batch is None else "a batch row"
            forward = (
                f"decoding: {rows} at a time by {self.decode.block_k} keys, multiplied in "
                f"{self.decode.dtype}"
            )
            return f"{forward}; backward {self._replace(decode=None)}"
        if self.chunk:
            backward = self._replace(chunk=None, forward_heads=self.heads)
            return f"{self.chunk}, keys read where they lie; backward {backward}"
        queries = "1 query" if self.block_q == 1 else f"{self.block_q} queries"
        heads = "1 key/value head" if self.heads == 1 else f"{self.heads or 'all'} key/value heads"
        forward = f" ({self.forward_heads or 'all'} where no backward follows)"
        heads += " at a time" + (forward if self.heads != self.forward_heads else "")
        why = f" ({self.why})" if self.why else ""
        size = f"blocks of {queries} by {self.block_k} keys"
        return f"{size}, {heads}, in {self.dtype}{why}"

    def for_gradient(self) -> "Tiles":
        """The tiles of a forward that the backward follows. It does not decode: its products round
        as the backward's do, and XLA may compute them once for both."""
        return self._replace(forward_heads=self.heads, decode=False, chunk=None)


# Limits on a CPU; measurements: results.md#cpu-tiles and #decoding. A score takes ten bytes in a
# backward and six in a forward alone. malloc maps new memory in each call for more than 32 MiB.
SCORES = 5 * 2**18  # scores of a block, and of the heads at a time: 13 MB, which the caches hold
CALL_SCORES = 3 * 2**20  # scores of all heads, if these go at once: 30 MiB
ROWS = 128  # rows of a block under a mask that hides much of it: smaller blocks compute less
STEP_SCORES = 2**18  # scores of a step of a loop: fewer leave cores idle
KEYS = 256  # keys of a block in a loop, or under a mask_mod: blocks of 512 skip fewer
FEW_KEYS = 6 * KEYS  # up to which loops would skip too little
MANY_KEYS = 8192  # from which on loops are as fast as large blocks, for few queries too
MAPPED_BYTES = 2**25  # keys and values that a copy by heads would map anew in each call
COPIED_KEYS = 2048  # the regular forward copies keys and values by heads where there are more
STEP_BYTES = 2**20  # keys and values of a batch row, to be worth a step of a loop over batch rows
# jax 0.10 takes 1.2 to 1.5 times as long as blocks for a forward in loops, if no heads are grouped
LOOPS_ARE_FAST = not xla_cpu.JAX_0_10
DECODE_KEYS = 512  # keys of all heads in a block of decoding: the caches hold them


def tiles(problem: Problem, walk: str | None = None) -> Tiles:
    """The tiles of a problem, and of its lists of keys by the `walk` that takes the least time, or
    by this one."""
    if problem.resolved_mask.lists is not None:
        return _with_lists(problem, walk)
    choose = _choose if problem.resolved_mask.mask_mod is not None else _remembered
    return choose(problem, xla_cpu.on_cpu(), _one_at_a_time())


def _choose(p: Problem, *device: bool) -> Tiles:
    """The tiles of a problem without lists, on this kind of device."""
    if _decodes(p):
        return _tiles(p)._replace(decode=decode_tiles(p))
    return _tiles(p)._replace(chunk=_chunk(p))


_remembered = functools.lru_cache(256)(_choose)


def takes_lists(p: Problem) -> bool:
    """Whether a forward and its derivatives attend by lists of keys. Else a table of their blocks
    says which to skip, as for kernels: on one CPU, lists alone take less time."""
    return not p.resolved_mask.lists.has_table or (_one_at_a_time() and p.is_static)


def _one_at_a_time() -> bool:
    return xla_cpu.on_cpu() and _is_one_device()


def _with_lists(p: Problem, walk: str | None) -> Tiles:
    tiles = _tiles(p.without_lists)
    lists = list_tiles(p, tiles.dtype, _one_at_a_time(), walk)
    return tiles._replace(lists=lists)


def _dtype(p: Problem) -> str:
    """The dtype of the products' operands: a CPU multiplies float16 slowly."""
    keeps_dtype = p.dtype == "float64" or (p.dtype == "bfloat16" and _rounds_maxima_safely(p))
    return p.dtype if keeps_dtype or not xla_cpu.on_cpu() else "float32"


def _decodes(p: Problem) -> bool:
    """Whether the forward decodes, which reads keys where they lie. On a CPU it gains where a copy
    of them is large, or where few rows see a part of many keys. There it loops over batch rows,
    which gains nothing where each has few keys for many rows."""
    if not split_kv.is_decoding(p) or not xla_cpu.on_cpu():
        return split_kv.is_decoding(p)
    rows, has_data = p.queries * p.group, p.resolved_mask.has_data
    dtype = "float32" if rows == 1 else _tiles(p).dtype  # XLA multiplies a single row in float32
    row_bytes = p.keys * p.kv_heads * (p.head_size + p.value_size) * jnp.dtype(dtype).itemsize
    copies_much = p.batch * row_bytes >= MAPPED_BYTES
    if p.keys > COPIED_KEYS:
        return copies_much or (_is_masked(p) and rows <= 8)
    if has_data:
        return copies_much and (rows < 8 or row_bytes > STEP_BYTES)
    return copies_much and (p.kv_heads > 1 or dtype != p.dtype)  # else nothing is copied


def decode_tiles(problem: Problem, page: int = 1) -> DecodeTiles:
    """The tiles of decoding, with blocks of whole pages."""
    p, on_cpu = problem, xla_cpu.on_cpu()
    block_k = min(max(DECODE_KEYS // page, 1) * page, p.keys)
    wide = "float64" if p.dtype == "float64" else "float32"
    return DecodeTiles(
        block_k, 1 if on_cpu and _is_one_device() else None, wide if on_cpu else p.dtype
    )


def _tiles(problem: Problem) -> Tiles:
    """The tiles of the regular passes."""
    p = problem
    if not xla_cpu.on_cpu():
        return Tiles(_at_most(512, p.queries), _at_most(256, p.keys), None, p.dtype)
    dtype = _dtype(p)
    if not p.is_static:
        block_q, block_k = max(ROWS // p.group, 16), KEYS if _loops_over_keys(p) else COPIED_KEYS
        return Tiles(_at_most(block_q, p.queries), _at_most(block_k, p.keys), None, dtype)
    rows, why = _query_block(p)
    block_q = min(rows, p.queries)
    mask_mod = p.resolved_mask.mask_mod
    skips = _loops_over_keys(p) or mask_mod is not None
    band = None if skips else find_band(p, block_q, p.keys)
    tiles = Tiles(block_q, band.width if band else p.keys, None, dtype, why=why)
    # copies of queries, keys and values, in numbers that take as many bytes as scores
    copies = (2 * p.group * p.queries + p.keys) * (p.head_size + p.value_size) // 4
    if band:
        scores = p.group * block_q * band.width + copies
    elif not skips and static_key_blocks(p, tiles):
        scores = p.group * count_scores(p, block_q) + copies
    else:
        keys = KEYS if mask_mod is not None else _loop_block(p)[1]
        tiles = tiles._replace(block_k=min(keys, p.keys))
        # a step of a loop with a fifth of SCORES is faster (results.md#cpu-tiles)
        scores = 5 * p.group * block_q * tiles.block_k
    if not _is_one_device():
        return tiles
    rows = p.keys if tiles.block_k == p.keys or band else p.keys + p.group * p.queries
    copied = rows * (p.head_size + p.value_size) * jnp.dtype(dtype).itemsize
    heads, forward_heads = (_heads(p, scores * size // 10, copied) for size in (10, 6))
    return tiles._replace(heads=heads, forward_heads=forward_heads)


def _loop_block(p: Problem) -> tuple[int, int]:
    """Queries and keys of a block at most, where loops go over the keys: a step of fewer than four
    heads has larger ones."""
    larger = 2 if p.batch * p.heads < 4 and _one_at_a_time() else 1
    return min(max(UNROLLED * ROWS // p.group, 32), 2 * ROWS * larger), KEYS * larger


def _chunk(p: Problem) -> Tiles | None:
    """The tiles of a forward of few queries to many keys: loops that copy the keys of one block at
    a time. None for other problems, and for scores that are few at once."""
    mask = p.resolved_mask
    if not (_one_at_a_time() and p.is_static) or mask.mask_mod is not None:
        return None
    block_q, block_k = _loop_block(p)
    block_q = min(even(p.queries, block_q), p.queries)
    keys = key_range(mask, 0, p.queries - 1)
    visible = p.queries * (keys.last - keys.first)
    if mask.has_data:
        is_long = p.keys > FEW_KEYS
    else:
        is_long = keys.last - keys.first >= MANY_KEYS
        is_long = is_long and visible <= EXTRA * count_scores(p, ROWS // 8)
        is_long = is_long and (LOOPS_ARE_FAST or p.group > 1)
    # a block of queries copies all keys, which takes little time beside the products of many rows
    most_q = 4 * block_q if p.group * block_q < 2048 else p.queries
    if not is_long or p.queries > min(most_q, p.keys // 2):
        return None
    dtype, heads = _dtype(p), p.batch * p.heads
    copies_keys = p.kv_heads > 1 or dtype != p.dtype
    fewest = STEP_SCORES if copies_keys or mask.has_data else SCORES
    if heads * visible <= fewest:
        return None
    most_k = p.keys // UNROLLED if mask.has_data else p.keys  # lengths may hide most of them
    block_k = max(block_k, min(STEP_SCORES // (heads * block_q), most_k) // KEYS * KEYS)
    at_a_time = _heads(p, 3 * p.group * block_q * block_k)
    return Tiles(block_q, block_k, at_a_time, dtype, at_a_time, in_place=True)


def _query_block(p: Problem) -> tuple[int, str]:
    """How many queries a block has, and why: the first of five rules. Blocks with all keys that
    their rows see are the fastest if they are few, or alike. Where a mask hides much, small blocks
    compute less of it."""
    mask, length = p.resolved_mask, p.queries
    in_loops, _ = _loop_block(p)
    if _loops_over_keys(p) or mask.mask_mod is not None:
        size = in_loops if mask.mask_mod is None else ROWS
        return even(length, size), "small blocks, of which the mask hides some"
    is_causal = mask.right is not None and length < 2 * p.keys  # else it hides a quarter at most
    fewest = ceil_div(length * p.group * p.keys, SCORES)
    if not is_causal and mask.left is None:
        size = even(length, max(ceil_div(length, fewest), 16))
        return size, f"at most {SCORES / 1e6:.1f} million scores of a head"
    rows = ROWS if length > ROWS else ROWS // 2  # the first half sees half of the keys
    narrow = even(length, max(min(rows, ROWS // p.group), 16))
    if length > UNROLLED * ROWS:
        if mask.left is not None and find_band(p, narrow, p.keys):
            return narrow, "a loop over blocks that see equally many keys"
        heads = 1 if _is_one_device() else p.batch * p.kv_heads  # heads at a time
        # with a bias _loops_over_keys has the reason
        most = 3 * UNROLLED // 2 if LOOPS_ARE_FAST else 2 * UNROLLED
        if fewest * heads > most and p.bias is None:
            return even(length, in_loops), "loops over the keys that a block sees"
    # from four on, blocks of 128 rows take as long as of 256, and twice the time to compile
    least = max(2 * ROWS // p.group, 16) if length > 4 * ROWS else narrow
    few = even(length, max(ceil_div(length, UNROLLED), narrow, least))
    return few, f"up to {UNROLLED} blocks, each with the keys that it sees"


def scale_can_come_last(p: Problem) -> bool:
    """Whether 16-bit scores may be plain q k^T until their maximum is subtracted: a sink, bias,
    soft cap or score_mod would have to be divided by the scale."""
    return p.scale > 0 and not p.sinks and p.bias is None and p.soft_cap is None and p.score is None


def _rounds_maxima_safely(p: Problem) -> bool:
    """Whether no multiply-add combines the scale with the maximum, whose result would exceed 0: the
    scale comes last, or a bias or soft cap stands between the two."""
    return scale_can_come_last(p) or (
        p.score is None and (p.bias is not None or p.soft_cap is not None)
    )


def _loops_over_keys(p: Problem) -> bool:
    """Whether loops go over blocks of keys: the mask has data, or the queries follow a long cache,
    so that blocks with all keys that they see would be large and many. With few keys loops would
    skip too little, and with a bias each step would copy the sum of its gradient."""
    few = isinstance(p.keys, int) and (p.keys <= FEW_KEYS or p.bias is not None)
    return (p.resolved_mask.has_data or _is_behind_cache(p)) and not few


def _is_masked(p: Problem) -> bool:
    """Whether a mask other than a mask_mod hides keys."""
    mask = p.resolved_mask
    return mask.has_data or mask.left is not None or mask.right is not None


def _is_behind_cache(p: Problem) -> bool:
    """Whether a static mask shows nearly all queries nearly the same keys, and these have more
    scores than UNROLLED blocks hold."""
    if p.resolved_mask.has_data or not _is_masked(p):
        return False
    if not isinstance(p.queries, int) or not isinstance(p.keys, int):
        return False
    keys = key_range(p.resolved_mask, 0, p.queries - 1)
    visible = p.queries * (keys.last - keys.first)
    return visible * p.group > UNROLLED * SCORES and visible <= EXTRA * count_scores(p, ROWS // 8)


def even(length: int, most: int) -> int:
    """The size of equal blocks, at most `most` each and as few as that allows, rounded up to a
    multiple of 8."""
    return 8 * ceil_div(ceil_div(length, ceil_div(length, most)), 8)


def for_calls(tiles: Tiles, p: Problem, calls: int) -> Tiles:
    """The tiles of `calls` calls of a problem side by side, as under vmap: fewer heads of each go
    at a time."""
    if not (p.is_static and isinstance(calls, int)):
        return tiles
    scores = p.group * tiles.block_q * tiles.block_k
    if static_key_blocks(p, tiles):
        scores = p.group * count_scores(p, tiles.block_q)
    few = _heads(p, calls * scores) if xla_cpu.on_cpu() and _is_one_device() else None
    if few is None:
        return tiles
    fewer = lambda heads: few if heads is None else min(heads, few)
    chunk = tiles.chunk and for_calls(tiles.chunk, p, calls)
    heads, forward_heads = fewer(tiles.heads), fewer(tiles.forward_heads)
    return tiles._replace(heads=heads, forward_heads=forward_heads, chunk=chunk)


def _heads(p: Problem, scores: int, copied: int = 0) -> int | None:
    """Heads at a time, by a memory budget: a key/value head takes as much memory as `scores`
    scores, and `copied` bytes of operands; None: all."""
    heads = p.batch * p.kv_heads
    if heads * scores <= CALL_SCORES and heads * copied <= MAPPED_BYTES:
        return None
    return max(min(SCORES // scores, MAPPED_BYTES // copied if copied else heads), 1)


def serialize(tiles: Tiles, heads: tuple, keys: list | None) -> bool:
    """Whether static blocks of `heads` [B, K, G] wait for each other, so that a CPU has not the
    scores of all of them in memory at once."""
    if keys is None or not xla_cpu.on_cpu() or not all(isinstance(n, int) for n in heads):
        return False
    scores = math.prod(heads) * tiles.block_q
    scores *= sum(block.size for row in keys for block, *_ in row)
    return len(keys) > 1 and 2 * scores > 3 * SCORES


def unrolled(tiles: Tiles, heads: tuple) -> int:
    """How many steps of a Band's loop XLA may run at a time: a short step leaves cores of a CPU
    idle."""
    scores = math.prod(heads) * tiles.block_q * tiles.block_k
    return min(max(SCORES // (2 * scores), 1), UNROLLED) if xla_cpu.on_cpu() else 1


def _at_most(size: int, length: int) -> int:
    """The smaller of the two; a symbolic length of jax.export is one block."""
    return min(size, length) if isinstance(length, int) else length


def _is_one_device() -> bool:
    """Whether all heads are on one device. Else a loop over them would gather what a partitioner
    has spread."""
    types = jax.sharding.get_abstract_mesh().axis_types
    is_manual = bool(types) and all(t == jax.sharding.AxisType.Manual for t in types)
    return is_manual or jax.device_count(hardware.here().platform) == 1
