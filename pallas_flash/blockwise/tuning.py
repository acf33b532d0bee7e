"""How blockwise cuts a problem: into blocks of queries and keys, and on a CPU into a few heads at a
time."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import decode
from pallas_flash.arguments import Problem
from pallas_flash.blockwise import key_blocks
from pallas_flash.blockwise.key_blocks import UNROLLED, Band, find_band
from pallas_flash.kernels import device
from pallas_flash.schedule import ceil_div


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
        of = lambda heads: "1 head" if heads == 1 else f"{'all' if heads is None else heads} heads"
        heads = f"{of(self.heads)} of key and value"
        heads += (
            ""
            if self.heads == self.forward_heads
            else f" ({of(self.forward_heads)} where no backward follows)"
        )
        return f"{queries} of {heads} by {self.block_k} keys, multiplied in {self.dtype}"

    def of_gradient(self) -> "Tiles":
        """Those of a forward that the backward follows: its products round as the backward's do,
        and XLA may see them once."""
        return self._replace(forward_heads=self.heads, decode=False)


TRIANGLE = 256  # rows and keys of a block, in loops over keys of which a band hides many
# queries whose blocks are static where a mask hides many keys: two cores run several at once
SHORT = 1024
BLOCK = 512  # keys of all heads that are in the caches at a time, in decoding
FEW = 128  # keys under a mask_mod, too few to find blocks among them that it hides
# keys that are one block under a mask of data: a loop that may skip some of so few gains less than
# it costs
ONE = 768
MANY = 2048  # keys, the most of a block; and ONE of a small call
SCORES = 2**18  # of a head, which with what is made of them fill a cache
ALL_SEEN = 2**20  # of a block of one head, where no mask hides more than data tells
# of a head under a mask of data: from here on small blocks in loops, which skip some, are faster
DATA = 3 * ALL_SEEN
STEP = 2**20  # bytes of keys and values, too few for a step of a loop over batch rows
# bytes of keys and values in the order of the heads, for which malloc maps new memory in each call
COPIED = 2**25
WHOLE = 15 * 2**21  # bytes of all heads, to stay below the same
PART = 3 * 2**22  # bytes of heads at a time, where all would be more
# of all heads that go at a time on a CPU: its caches hold their scores, with what is made of them
KEYS = 2048
MOST = 3 * SCORES  # of the same
CALL = 3 * 2**20  # scores of a whole call: fewer are faster in all heads at once, and in all rows
# scores of known blocks: so many, each kept several times, are faster one block after the other
UNDER_WAY = 3 * 2**19
FORWARD = 2**22  # the same of a forward, which keeps each once or twice
WIDE_CALL = 9 * 2**18  # the same where all heads go at once, and in 32 bits only


def tiles(problem: Problem) -> Tiles:
    return _tiles(problem)._replace(decode=decode_tiles(problem) if _decodes(problem) else None)


def _decodes(p: Problem) -> bool:
    """Whether the forward reads keys where they lie, all rows at once: on a CPU it gains where a
    copy of them is large, or where few rows see some of many. It goes by batch rows, which gains
    nothing where each has few keys for many rows."""
    if not decode.takes(p) or not _on_cpu():
        return decode.takes(p)
    rows, has_data = p.queries * p.group, p.resolved_mask.has_data
    dtype = "float32" if rows == 1 else _tiles(p).dtype  # XLA multiplies a single row in float32
    of_batch_row = p.keys * p.kv_heads * (p.head_size + p.value_size) * jnp.dtype(dtype).itemsize
    if p.keys > MANY:
        return (has_data and rows <= 8) or p.batch * of_batch_row >= COPIED
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
    known = all(isinstance(n, int) for n in (p.batch, p.queries, p.keys))
    block_q = _at_most(_queries(p) if known else max(128 // p.group, 16), p.queries)
    one = None if _is_cut(p) else find_band(p, block_q, MANY)
    is_long = known and one is None and _is_window(p) and p.queries > SHORT
    in_loops = known and one is None and (is_long or ceil_div(p.queries, block_q) > UNROLLED)
    most = even(p.keys, TRIANGLE) if is_long else 512 if in_loops or _is_cut(p) else MANY
    block_k = _at_most(most if one is None else one.width, p.keys)
    heads, alone = None, None
    if known and _is_one_device():
        heads = alone = _heads(p, p.group * block_q, block_k)
        if not in_loops and not _is_cut(p):
            # with a backward, without one
            heads, alone = (_heads_in_memory(p, block_q, one, each, heads) for each in (10, 6))
    # products of float16 are slow
    in_own = p.dtype == "float64" or (p.dtype == "bfloat16" and _is_apart(p))
    return Tiles(block_q, block_k, heads, p.dtype if in_own else "float32", alone)


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
    """Whether loops go over blocks of keys, since the mask has data."""
    return p.resolved_mask.has_data and not (
        isinstance(p.keys, int) and p.keys <= (MANY if _is_small(p) else ONE)
    )


def _is_small(p: Problem) -> bool:
    sizes = p.batch, p.heads, p.queries, p.keys
    return (
        all(isinstance(n, int) for n in sizes)
        and math.prod(sizes) // (1 if p.resolved_mask.right is None else 2) < CALL
    )


def _queries(p: Problem) -> int:
    """Of a block: fewer, where a mask would hide much of it."""
    v, has_data = p.resolved_mask, p.resolved_mask.has_data
    # else it hides a quarter and more
    is_plain = v.left is None and (v.right is None or p.queries >= 2 * p.keys)
    if is_plain and v.mask_mod is None and _is_small(p) and not _is_cut(p):
        return p.queries
    if is_plain and p.keys <= (ONE if has_data else MANY if v.mask_mod is None else FEW):
        scores = p.queries * p.group * p.keys
        most = SCORES if v.mask_mod is not None or (has_data and scores > DATA) else ALL_SEEN
        return ceil_div(p.queries, ceil_div(scores, most))
    is_long = p.queries > SHORT
    if is_long and _is_window(p):
        queries = even(p.queries, max(128 // p.group, 16))
        return (
            queries
            if find_band(p, queries, MANY)
            else even(p.queries, max(TRIANGLE // p.group, 64))
        )
    sparse = (
        has_data
        or v.mask_mod is not None
        or v.left is not None
        or (v.right is not None and not is_long)
    )
    # 64: the first half sees half of the keys
    rows = 64 if v.right is not None and p.queries <= 128 else 128 if sparse else 256
    queries = max(min(rows, max(rows, 128) // p.group), 16)
    if v.right is None or is_long:
        return queries
    # no fewer: what a mask hides would not be static
    return max(queries, ceil_div(p.queries, UNROLLED))


def _is_window(p: Problem) -> bool:
    """Whether a static band hides keys on the left."""
    return (
        p.resolved_mask.left is not None
        and not p.resolved_mask.has_data
        and p.resolved_mask.mask_mod is None
    )


def even(length: int, most: int) -> int:
    """The size of as few equal parts as have at most so many each, but for what makes it a multiple
    of 8."""
    return 8 * ceil_div(ceil_div(length, ceil_div(length, most)), 8)


def _heads(p: Problem, rows: int, keys: int) -> int | None:
    """How many key/value heads go at a time, in blocks of so many rows and keys; a loop of few
    steps gains little, of small products less."""
    if _is_small(p):
        return None
    scores, most = rows * keys, min(max(rows, 128) * KEYS, MOST)
    few = 4 if scores < most // 8 else 2 if scores < SCORES else 1
    at_a_time = max(most // scores, 1) if scores < SCORES else 1
    return at_a_time if p.batch * p.kv_heads * scores > few * most else None


def _heads_in_memory(
    p: Problem, block_q: int, one: Band | None, each: int, least: int | None
) -> int | None:
    """The same where no loop goes over keys: as many as memory may hold, and at least so many.
    Memory then holds so many bytes for each score, and for each number of an array as large as q,
    or as q and k are on average where k is larger."""
    if one is None:
        total = p.group * key_blocks.count_scores(p, block_q)
    else:
        total = p.group * block_q * one.width
    elements = (
        max(2 * p.group * p.queries, p.group * p.queries + p.keys)
        * (p.head_size + p.value_size)
        // 4
    )
    if one is not None:  # a loop keeps its operands in the order of its blocks, and sums in float32
        elements = elements * (3 if p.dtype == "float32" else 5) // 2
    part = (total + elements) * (2 * each if p.dtype == "float64" else each)
    most = WHOLE if least is None else PART
    return max(PART // part, least or 1) if p.batch * p.kv_heads * part > most else None


def serialize_forward(tiles: Tiles, heads: tuple, keys: list | None) -> bool:
    """Whether static blocks, of so many heads [B, K, G], are to wait for each other."""
    return tiles.forward_heads is not None and _under_way(tiles, heads, keys) >= FORWARD


def serialize_backward(tiles: Tiles, heads: tuple, keys: list | None) -> bool:
    """The same in the backward."""
    scores = _under_way(tiles, heads, keys)
    return (
        scores >= UNDER_WAY
        if tiles.heads is not None
        else scores >= WIDE_CALL and tiles.is_wide and len(keys) > 2
    )


def _under_way(tiles: Tiles, heads: tuple, keys: list | None) -> int:
    """The scores that a CPU has in memory at a time, in what malloc maps anew in each call, where
    no block waits for another."""
    if (
        keys is None
        or len(keys) == 1
        or not _on_cpu()
        or not all(isinstance(n, int) for n in heads)
    ):
        return 0
    return (
        math.prod(heads) * tiles.block_q * sum(key.size for of_rows in keys for key, *_ in of_rows)
    )


def _at_most(size: int, length: int) -> int:
    """A symbol of jax.export is one block."""
    return min(size, length) if isinstance(length, int) else length


def _on_cpu() -> bool:
    return device.here().platform == "cpu"


def _is_one_device() -> bool:
    """Whether a loop over heads is no loop over devices: that would gather what a partitioner has
    spread."""
    types, devices = (
        jax.sharding.get_abstract_mesh().axis_types,
        jax.device_count(device.here().platform),
    )
    return devices == 1 or (bool(types) and all(t == jax.sharding.AxisType.Manual for t in types))
