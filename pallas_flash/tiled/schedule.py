"""Which key blocks a query block visits, which of them need no mask, and the transpose: which query
blocks a key block visits.

A tile visits a range of blocks, or a list of them if its mask is no interval. A block of which
every row sees every key needs no mask, and its loads no bounds.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support.pytrees import IntLike, larger
from pallas_flash.masks import block_types as types
from pallas_flash.masks.resolved_mask import ResolvedMask


class Blocks(NamedTuple):
    """Blocks in the order of a loop: index(t) is the number of the block at position t, for t in
    [first, last). Blocks at [full_first, full_last) need no mask."""

    first: IntLike
    full_first: IntLike
    full_last: IntLike
    last: IntLike
    index: Callable[[IntLike], IntLike] = lambda t: t

    @classmethod
    def from_table(cls, table, *row: IntLike) -> "Blocks":
        """The Blocks in a row of `by_query_tile` or `query_blocks`."""
        return cls(*(table[(*row, i)] for i in range(4)))

    @classmethod
    def from_row(cls, visited, *row: IntLike) -> "Blocks":
        """The Blocks in a row of `visited_blocks`."""
        masked, last = (visited[(*row, i)] for i in range(2))
        return cls(0, masked, last, last, lambda t: visited[(*row, 2 + t)])

    def resize(self, size: int) -> "Blocks":
        """These blocks of one key, as blocks of `size` keys."""
        # rounds to 0: no block lies below it
        div = lambda n: n // size if isinstance(n, int) else lax.div(n, jnp.int32(size))
        up = lambda n: div(n + size - 1)
        first, full_first, full_last, last = self.ends
        return Blocks(div(first), up(full_first), div(full_last), up(last)).clip()

    @property
    def ends(self) -> tuple[IntLike, IntLike, IntLike, IntLike]:
        return self[:4]

    @property
    def count(self) -> IntLike:
        return self.last - self.first

    def clip(self) -> "Blocks":
        """These blocks, with 0 <= first <= full_first <= full_last <= last."""
        last = larger(self.last, 0)
        first = between(self.first, 0, last)
        full_first = between(self.full_first, first, last)
        full_last = between(self.full_last, full_first, last)
        return Blocks(first, full_first, full_last, last, self.index)

    def reverse(self, end: IntLike | None = None) -> "Blocks":
        """These blocks from the last to the first: position t was end - 1 - t. By default positions
        begin at 0."""
        end = self.last if end is None else end
        down = lambda n: end if isinstance(n, int) and n == 0 else end - n
        return Blocks(*map(down, reversed(self.ends)), lambda t: self.index(end - 1 - t))

    def split(self, number: IntLike, count: int) -> "Blocks":
        """Number `number` of `count` splits of equal length."""
        end = lambda n: self.first + lax.div((self.last - self.first) * n, jnp.int32(count))
        first, last = end(number), end(number + 1)
        full = (between(n, first, last) for n in (self.full_first, self.full_last))
        return Blocks(first, *full, last, self.index)

    def without_first(self) -> "Blocks":
        """These blocks, at least one, without the first."""
        first = self.first + 1
        full_first = larger(self.full_first, first)
        full_last = (
            self.full_last if self.full_last is self.last else larger(self.full_last, full_first)
        )
        return Blocks(first, full_first, full_last, self.last, self.index)

    def visit(self, step, carry, masked_first: bool = False):
        """carry = step(position, carry, masked=...) over all blocks, in order, or blocks that need
        their mask before the others."""
        masked, full = (functools.partial(_step, step, m) for m in (True, False))
        carry = loop(self.first, self.full_first, masked, carry)
        if masked_first:
            carry = loop(self.full_last, self.last, masked, carry)
        carry = loop(self.full_first, self.full_last, full, carry)
        return carry if masked_first else loop(self.full_last, self.last, masked, carry)


def _step(step, masked: bool, t, carry):
    return step(t, carry, masked=masked)


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(most, 1))


def loop(start: IntLike, stop: IntLike, step, carry):
    """carry = step(j, carry) for j in [start, stop), j an int32. Traces nothing if that is known to
    be empty."""
    if start is stop or (isinstance(start, int) and isinstance(stop, int) and start >= stop):
        return carry
    # + 0: inside of a shard_map a number that a kernel reads varies, by jax 0.11.2, and one that it
    # computes does not: an index that begins at the one would change its type
    start, stop = (jnp.asarray(n + 0, jnp.int32) for n in (start, stop))
    return lax.fori_loop(start, stop, step, carry)


def key_blocks(start: IntLike, stop: IntLike, contiguous, size: int, axis=None) -> Blocks:
    """The key blocks of `size` that the rows with intervals [start, stop) visit; reduces over
    `axis` (None: all axes).

    `contiguous` (or None) marks rows that see every key of their interval; the others need a mask
    everywhere.
    """
    if contiguous is None:
        whole = start, stop
    else:
        whole = jnp.where(contiguous, start, ResolvedMask.ALL), jnp.where(contiguous, stop, 0)
    if not isinstance(stop, int):  # a row that sees nothing asks for no block
        sees_keys = start < stop
        # an int stays one: jax's Triton lowering takes a choice between two constants for a bool
        start = start if isinstance(start, int) else jnp.where(sees_keys, start, ResolvedMask.ALL)
        stop = jnp.where(sees_keys, stop, 0)
    return Blocks(
        _reduce(jnp.min, start, axis) // size,
        ceil_div(_reduce(jnp.max, whole[0], axis), size),
        _reduce(jnp.min, whole[1], axis) // size,
        ceil_div(_reduce(jnp.max, stop, axis), size),
    ).clip()


def known_blocks(resolved_mask: ResolvedMask, first: IntLike, last: IntLike, size: int) -> Blocks:
    """key_blocks of the rows from `first` to `last`, as of `known_keys`."""
    return known_keys(resolved_mask, first, last).resize(size)


def known_keys(resolved_mask: ResolvedMask, first: IntLike, last: IntLike) -> Blocks:
    """The keys that the rows from `first` to `last` may see, and the keys that each sees, as blocks
    of one key. The mask has no data by row: the interval of a row begins and ends no earlier than
    that of the row before, up to `query_stop`, of one batch row."""
    end = resolved_mask.query_stop
    last_seeing = last if end is None else between(end - 1, first, last)
    (start, whole_stop), (whole_start, stop) = map(resolved_mask.interval, (first, last_seeing))
    whole_stop = whole_stop if end is None else jnp.where(last < end, whole_stop, 0)
    return Blocks(start, whole_start, whole_stop, stop)


def key_ranges(resolved_mask: ResolvedMask, queries: int, block_q: int) -> list[Blocks]:
    """`key_range` of every query block; the last may have fewer rows."""
    return [
        key_range(resolved_mask, i, min(i + block_q, queries) - 1)
        for i in range(0, queries, block_q)
    ]


def key_range(resolved_mask: ResolvedMask, first: int, last: int) -> Blocks:
    """The keys that the rows from `first` to `last` may see, and the keys that each sees, as blocks
    of one key, by the static part of the mask."""
    known = without_data(resolved_mask)
    (start, whole_start), (whole_stop, stop) = zip(*map(known.interval, (first, last)), strict=True)
    return Blocks(start, whole_start, whole_stop, max(start, stop))


def without_data(resolved_mask: ResolvedMask) -> ResolvedMask:
    """The static part of the mask."""
    mask = resolved_mask
    has_band = isinstance(mask.offset, int)
    band = (mask.left, mask.right, mask.offset) if has_band else ()
    return ResolvedMask(mask.keys, *band)


def by_query_tile(resolved_mask: ResolvedMask, queries: int, block_q: int, block_k: int):
    """The mask and the blocks to visit, for kernels that own tiles of queries.

    The mask's data by row is extended to whole tiles, its data by key to whole blocks; a row beyond
    the last counts as the last. The blocks are int32 [B or 1, query tiles, 4], `Blocks` for each
    tile; None if the mask has no data: `known_blocks`.
    """
    if not resolved_mask.has_data:
        return resolved_mask, None
    row, at = _whole_tiles(resolved_mask, queries, block_q)
    start, stop, _ = jnp.broadcast_arrays(*at.interval(jnp.minimum(row, queries - 1)), row)
    blocks = _by_tile(start, stop, at.contiguous, block_q, block_k)
    blocks = jnp.stack(blocks.ends, -1).astype(jnp.int32)
    ids = at.key_ids
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, -resolved_mask.keys % block_k)))
    return ResolvedMask(
        resolved_mask.keys, start=start, stop=stop, query_ids=at.query_ids, key_ids=ids
    ), blocks


def query_blocks(
    resolved_mask: ResolvedMask, queries: int, block_q: int, block_k: int
) -> jax.Array:
    """The Blocks of queries that each key block visits, int32 [B or 1, ceil(S / block_k), 4]:
    key_blocks transposed.

    The last query block is masked where it hangs over the end of the queries.
    """
    row, at = _whole_tiles(resolved_mask, queries, block_q)
    start, stop = at.interval(jnp.minimum(row, queries - 1))
    stop = jnp.where(row < queries, stop, 0)
    keys = _by_tile(start, stop, at.contiguous, block_q, block_k)
    keys = Blocks(*(x[:, None, :] for x in keys.ends))  # [B, 1, query blocks]
    j = jnp.arange(ceil_div(resolved_mask.keys, block_k), dtype=jnp.int32)[None, :, None]
    i = jnp.arange(keys.first.shape[-1], dtype=jnp.int32)[None, None]
    visited = (keys.first <= j) & (j < keys.last)
    full = (keys.full_first <= j) & (j < keys.full_last)
    end = i.size
    full_first = jnp.min(jnp.where(full, i, end), -1, keepdims=True)
    blocks = Blocks(
        jnp.min(jnp.where(visited, i, end), -1),
        full_first[..., 0],
        jnp.min(jnp.where(~full & (i > full_first), i, end), -1),
        jnp.max(jnp.where(visited, i + 1, 0), -1),
    )
    return jnp.stack(blocks.clip().ends, -1).astype(jnp.int32)


# pairs of a query and a key up to which a mask_mod is evaluated while tracing; else in the program
MAX_PAIRS_AT_TRACE = 2**26


def block_types(
    resolved_mask: ResolvedMask, batch, heads, queries: int, block_q: int, block_k: int, mask=None
):
    """The type of each block, empty, partial or full, int8 [B | 1, N | 1, query tiles, key tiles],
    as a NumPy array if it is static. `mask` is a dense one, bool [B | 1, N | 1, T | 1, S | 1]."""
    many = queries * resolved_mask.keys > MAX_PAIRS_AT_TRACE
    if mask is not None or resolved_mask.has_data or many:
        return _block_types(resolved_mask, batch, heads, queries, block_q, block_k, mask)
    return _known_block_types(resolved_mask, batch, heads, queries, block_q, block_k)


def _eval_at_trace_time(f: Callable, *args) -> np.ndarray:
    """f(*args), evaluated while tracing: in a new thread, which traces no function and has no mesh.
    jax_transfer_guard is for arrays of the program, not for these."""

    def known():
        with jax.transfer_guard("allow"):
            return np.asarray(f(*args))

    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(known).result()


@functools.lru_cache(64)
def _known_block_types(*args) -> np.ndarray:
    return _eval_at_trace_time(_block_types, *args)


def _block_types(resolved_mask, batch, heads, queries, block_q, block_k, mask=None):
    mod = resolved_mask.mask_mod
    if mask is not None:
        mod_types = types.from_array(mask, queries, resolved_mask.keys, block_q, block_k)
    elif mod is None:
        tiles = ceil_div(queries, block_q), ceil_div(resolved_mask.keys, block_k)
        mod_types = jnp.full((1, 1, *tiles), types.FULL, jnp.int8)
    elif mod.block_types is None:
        only_mod = ResolvedMask(resolved_mask.keys, mask_mod=mod)
        mod_types = types.compute(only_mod, batch, heads, queries, block_q, block_k)
    else:
        mod_types = types.resize(
            mod.block_types, mod.block_size, queries, resolved_mask.keys, block_q, block_k
        )
    row, at = _whole_tiles(resolved_mask, queries, block_q)
    start, stop, _ = jnp.broadcast_arrays(*at.interval(jnp.minimum(row, queries - 1)), row)
    keys = _by_tile(start, stop, at.contiguous, block_q, block_k)
    first, full_first, full_last, last = (x[:, None, :, None] for x in keys.ends)
    j = jnp.arange(mod_types.shape[3], dtype=jnp.int32)[None, None, None]
    within = lambda first, last: ((first <= j) & (j < last)).astype(jnp.int8)
    return jnp.minimum(mod_types, within(first, last) + within(full_first, full_last))


def visited_blocks(block_types, least: int = 0) -> jax.Array:
    """The lists of blocks that tiles visit, int32 [.., tiles, 2 + blocks], from block types
    [.., tiles, blocks]. A list says how many blocks are masked and how many are visited, then their
    numbers: partial blocks, then full ones. If these are fewer than `least`, empty ones follow,
    which are masked."""
    if not isinstance(block_types, np.ndarray):
        return _visited_blocks(block_types, least)
    known = _eval_at_trace_time(_visited_blocks, block_types, least)
    return jnp.asarray(known[..., : 2 + int(known[..., 1].max())])


def _visited_blocks(block_types, least: int) -> jax.Array:
    count = lambda which: jnp.sum(which, -1, dtype=jnp.int32, keepdims=True)
    order = jnp.argsort((block_types + 2) % 3, axis=-1, stable=True).astype(jnp.int32)
    visited = jnp.maximum(count(block_types > types.EMPTY), least)
    return jnp.concatenate([visited - count(block_types == types.FULL), visited, order], -1)


def _whole_tiles(resolved_mask: ResolvedMask, queries: int, block_q: int):
    """The rows of whole query tiles [1, n], and the mask with its data for each of them. A row
    beyond the last has the last one's."""
    row = jnp.arange(ceil_div(queries, block_q) * block_q, dtype=jnp.int32)[None]
    at = resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda x: x[:, None])
    return row, at.narrow(ResolvedMask.BY_QUERY, lambda x: x[:, jnp.minimum(row[0], queries - 1)])


def _by_tile(start, stop, contiguous, block_q: int, block_k: int) -> Blocks:
    """The Blocks of each query tile, [B or 1, query tiles], from the intervals of its rows."""

    def tiled(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), stop.shape).reshape(
            stop.shape[0], -1, block_q
        )

    return key_blocks(
        tiled(start),
        tiled(stop),
        None if contiguous is None else tiled(contiguous),
        block_k,
        axis=-1,
    )


def _reduce(reduction, x, axis):
    return x if isinstance(x, int) else reduction(x, axis=axis)


def ceil_div(a, b: int):
    return (a + b - 1) // b


def between(x, low, high):
    """x clipped to [low, high]; an int if possible, so that loops known to be empty are not
    traced."""
    if isinstance(x, int) and isinstance(low, int) and x <= low:
        return low
    if isinstance(x, int) and isinstance(high, int) and (isinstance(low, int) or x >= high):
        return min(x, high)
    return jnp.minimum(jnp.maximum(x, low), high)
