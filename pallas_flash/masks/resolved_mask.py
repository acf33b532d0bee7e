"""A resolved mask, which all implementations read: intervals, document ids, lists of keys and a
mask_mod."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support import pytrees, xla_cpu
from pallas_flash.jax_support.pytrees import IntLike, is_data, larger, smaller
from pallas_flash.masks import block_types

# the largest distance of a query and a key: offsets and windows are clipped to it, so that no sum
# of positions leaves int32
REACH = 2**28
AT_A_TIME = 8  # lists whose repeats a CPU finds in a step of a loop
LEAST_TABLE = 64  # pairs of a query and a key for an entry of a table of blocks


@pytrees.dataclass(static=("keys",))  # which jax.export may make a symbol
class ResolvedMask:
    """Which keys each query sees: a diagonal band, lengths, an interval for each row, document ids,
    lists of keys, and a mask_mod.BoundMaskMod.

    Static: `keys` = S, and the band's `left` and `right`. The rest is data, or None: by batch
    `offset`, `key_stop` and `query_stop` [B]; by query `start`, `stop`, `contiguous` (the ids fill
    the interval) and `query_ids` [B, T]; by key `key_ids` [B, S]. A kernel narrows the data to its
    batch row and queries, and then asks for the interval.
    """

    keys: int
    left: int | None = None
    right: int | None = None
    offset: IntLike = 0
    key_stop: IntLike | None = None
    query_stop: IntLike | None = None
    start: IntLike | None = None
    stop: IntLike | None = None
    contiguous: IntLike | None = None
    query_ids: IntLike | None = None
    key_ids: IntLike | None = None
    mask_mod: Any = None  # a BoundMaskMod
    lists: "ResolvedLists | None" = None

    ALL = np.iinfo(np.int32).max // 2  # a stop that hides nothing
    BY_BATCH = ("offset", "key_stop", "query_stop")
    BY_QUERY = ("start", "stop", "contiguous", "query_ids")
    BY_KEY = ("key_ids",)

    def narrow(self, fields, pick) -> "ResolvedMask":
        """This mask with `pick` applied to the data in `fields`."""
        values = {name: getattr(self, name) for name in fields}
        return dataclasses.replace(
            self, **{name: pick(x) for name, x in values.items() if is_data(x)}
        )

    def by_letters(self, convert, heads: int) -> "ResolvedMask":
        """This mask of so many query heads with convert(x, letters) in place of the arrays of its
        intervals, ids and lists, whose leading axes have these letters."""
        mask = self
        letters = {self.BY_BATCH: "B", self.BY_QUERY: "BT", self.BY_KEY: "BS"}
        for fields, axes in letters.items():
            mask = mask.narrow(fields, lambda x, letters=axes: convert(x, letters))
        if self.lists is None:
            return mask
        return dataclasses.replace(mask, lists=self.lists.by_letters(convert, heads))

    def for_key_heads(self, heads, query_heads: int) -> "ResolvedMask":
        """This mask with the lists of these key heads alone, if each key head has its own."""
        if self.lists is None:
            return self
        return dataclasses.replace(self, lists=self.lists.for_key_heads(heads, query_heads))

    def with_interval(self, shape, start: IntLike, stop: IntLike) -> "ResolvedMask":
        """This mask, narrowed to an interval of keys for each row; [B, T] = `shape`."""
        start, stop = (
            jnp.broadcast_to(jnp.asarray(end, jnp.int32), shape) for end in (start, stop)
        )
        if self.start is not None:
            start, stop = jnp.maximum(start, self.start), jnp.minimum(stop, self.stop)
        return dataclasses.replace(self, start=start, stop=stop)

    def with_lengths(self, field: str, lengths) -> "ResolvedMask":
        """This mask, narrowed by a `query_stop` or `key_stop`."""
        stop, lengths = getattr(self, field), jnp.maximum(lengths, 0)
        new = lengths if stop is None else jnp.minimum(stop, lengths)
        return dataclasses.replace(self, **{field: new})

    def with_band(self, rows, left: int | None, right: int | None) -> "ResolvedMask":
        """This mask, narrowed to the keys from position - left to position + right of each row;
        `rows` are resolution.QueryRows."""
        if left is None and right is None:
            return self
        offset = rows.offset
        if isinstance(offset, int):
            near = clip(offset, -REACH, REACH)
            left = None if left is None else near - clip(offset - left, -REACH, REACH)
            right = None if right is None else clip(offset + right, -REACH, REACH) - near
            return dataclasses.replace(self, offset=near, left=left, right=right)
        if max(left or 0, right or 0) > REACH:  # the offset may be as large
            return self.with_window(rows, left, right)
        near = clip(offset, -REACH - (right or 0), REACH + (left or 0))
        return dataclasses.replace(self, offset=near, left=left, right=right)

    def with_window(self, rows, left: IntLike | None, right: IntLike | None) -> "ResolvedMask":
        """`with_band`, with the ends of each row: left and right may be int32 [B] or []."""
        start = 0 if left is None else rows.row + _distance(left, rows.offset)
        stop = ResolvedMask.ALL
        if right is not None:
            stop = rows.row + _distance(-right, rows.offset) + 1
        return self.with_interval(rows.shape, start, stop)

    def interval(self, row: IntLike) -> tuple[IntLike, IntLike]:
        """The keys [start, stop) that the queries `row` see, within [0, S); start >= stop where a
        query sees none.

        The data must have been narrowed to shapes that broadcast against `row`. Static ends that
        are the same for all rows are ints; so are, without data, the ends of one row, an int.
        """
        position = row + self.offset
        start, stop = 0, self.keys
        if not isinstance(stop, int):  # a symbol of jax.export
            stop = jnp.broadcast_to(jnp.asarray(stop, jnp.int32), jnp.shape(row))
        if self.left is not None:
            start = larger(start, position - self.left)
        if self.right is not None:
            stop = smaller(stop, position + self.right + 1)
        if self.start is not None:
            start, stop = jnp.maximum(start, self.start), jnp.minimum(stop, self.stop)
        if self.key_stop is not None:
            stop = jnp.minimum(stop, self.key_stop)
        if self.query_stop is not None:
            stop = jnp.where(row < self.query_stop, jnp.asarray(stop, jnp.int32), 0)
        return start, stop

    def visible(
        self, start: IntLike, stop: IntLike, key: IntLike, query_ids=None, key_ids=None
    ) -> jax.Array:
        """Whether each query sees each key, from the query's interval; all arguments broadcast
        against the result."""
        key = jnp.reshape(
            key, (1,) * (max(jnp.ndim(start), jnp.ndim(stop)) - jnp.ndim(key)) + jnp.shape(key)
        )
        if isinstance(start, int) and start == 0:
            inside = key < stop
        else:  # one comparison for both ends: a key before the start wraps around
            inside = (key - start).astype(jnp.uint32) < jnp.maximum(stop - start, 0).astype(
                jnp.uint32
            )
        return inside if query_ids is None else inside & (query_ids == key_ids)

    def slice_chunks(self, batch: int, chunks: jax.Array, queries: int) -> "ResolvedMask":
        """This mask for the chunks of `queries` rows with the indices [C]; each chunk becomes a
        batch row: [B * C]."""
        first, has_band = chunks[None] * queries, self.left is not None or self.right is not None
        each = lambda x: (x[:, None] + jnp.zeros_like(first)).reshape(-1)
        chunked = self.narrow(
            ("query_stop",), lambda x: jnp.maximum(x[:, None] - first, 0).reshape(-1)
        ).narrow(("key_stop",), each)
        rows = lambda x: x.reshape(x.shape[0], -1, queries)[:, chunks].reshape(-1, queries)
        offset = (
            (jnp.broadcast_to(self.offset, batch)[:, None] + first).reshape(-1) if has_band else 0
        )
        mod = None if self.mask_mod is None else self.mask_mod.slice_chunks(batch, first)
        return dataclasses.replace(chunked.narrow(self.BY_QUERY, rows), offset=offset, mask_mod=mod)

    def shift_rows(self, first: jax.Array) -> "ResolvedMask":
        """This mask with lengths for rows that count from 0 at row `first`."""
        return self.narrow(("query_stop",), lambda x: x - first)

    def slice_keys(self, first: jax.Array, keys: int) -> "ResolvedMask":
        """This mask for `keys` keys, which count from 0 at key `first`."""
        mask = self.narrow(("offset", "start", "stop"), lambda x: x - first)
        mask = mask.narrow(("key_stop",), lambda x: jnp.maximum(x - first, 0))
        mask = mask.narrow(self.BY_KEY, lambda x: jax.lax.dynamic_slice_in_dim(x, first, keys, 1))
        mod = None if self.mask_mod is None else self.mask_mod.slice_keys(first)
        return dataclasses.replace(mask, keys=keys, mask_mod=mod)

    def any_visible(self, queries: int):
        """Whether any query may see a key, by the intervals alone: a bool, or an array of one."""
        by_row = self.narrow(self.BY_BATCH, lambda x: x[:, None])
        start, stop = by_row.interval(jnp.arange(queries, dtype=jnp.int32)[None])
        return (
            start < stop
            if isinstance(start, int) and isinstance(stop, int)
            else jnp.any(start < stop)
        )

    def transposed(self, queries: int) -> "ResolvedMask":
        """This mask from the keys' side, if it has no data: `interval` of a key is the queries that
        see it."""
        return ResolvedMask(queries, self.right, self.left, -self.offset)

    @property
    def shows_intervals(self) -> bool:
        """Whether each query sees all keys of an interval, or of its document in one."""
        return self.mask_mod is None and self.lists is None

    @property
    def has_data(self) -> bool:
        """Whether the mask depends on arrays."""
        return bool(jax.tree.leaves(self))

    @property
    def lengths(self) -> tuple[IntLike | None, IntLike | None]:
        """The number of queries and of keys of each batch row, int32 [B]; None: all."""
        return self.query_stop, self.key_stop

    def valid(self, row: IntLike):
        """Whether the queries [n] lie within the lengths of each batch row, bool [B, n]; None: all
        do."""
        return None if self.query_stop is None else row[None] < self.query_stop[:, None]

    def __str__(self):
        words = []
        if self.left is not None or self.right is not None:
            causal = self.left is None and self.right == 0
            words.append("causal" if causal else f"window ({self.left}, {self.right})")
        if words and not (isinstance(self.offset, int) and self.offset == 0):
            words.append(
                f"query offset {self.offset if isinstance(self.offset, int) else 'by batch'}"
            )
        words += [text for name, text in _WORDS.items() if getattr(self, name) is not None]
        words += [] if self.lists is None else [str(self.lists)]
        words += [] if self.mask_mod is None else [f"where {self.mask_mod.mod}"]
        return ", ".join(words) or "full"


_WORDS = {
    "key_stop": "key lengths",
    "query_stop": "query lengths",
    "start": "an interval by row",
    "query_ids": "document ids",
}


def clip(x: IntLike, low: int, high: int) -> IntLike:
    if isinstance(x, int):
        return min(max(x, low), high)
    return jnp.clip(x, max(low, -(2**31)), min(high, 2**31 - 1))


def _distance(a: IntLike, b: IntLike) -> IntLike:
    """b - a, within REACH, an int or int32 [B, 1]. No sum leaves int32."""
    low, high = larger(a, REACH - 2**31) - REACH, smaller(a, 2**31 - 1 - REACH) + REACH
    distance = smaller(larger(b, low), high) - a
    return distance if isinstance(distance, int) else jnp.reshape(distance, (-1, 1))


@pytrees.dataclass(static=("keys",))
class ResolvedLists:
    """The keys that lists name: entry i the `block` keys from i * block on. List t of a head is
    that of the `query_block` query rows from t * query_block on."""

    entries: Any  # int32 [B | 1, L, T / query_block, n], NONE for what names nothing
    block: int
    query_block: int
    keys: int  # S

    NONE: ClassVar[int] = 2**30  # it follows all entries

    @classmethod
    def from_indices(cls, indices, block: int, query_block: int, keys: int) -> "ResolvedLists":
        lists = cls(indices, block, query_block, keys)
        names_keys = (0 <= indices) & (indices < lists.blocks)
        return dataclasses.replace(lists, entries=jnp.where(names_keys, indices, cls.NONE))

    @property
    def blocks(self) -> int:
        """The number of blocks of keys, the last of which may hang over their end."""
        return -(-self.keys // self.block)

    @property
    def has_table(self) -> bool:
        """Whether a table of all blocks is small beside the scores."""
        return self.block * self.query_block >= LEAST_TABLE

    def by_letters(self, convert: Callable, heads: int) -> "ResolvedLists":
        """These lists of so many query heads with convert(entries, letters) in place of entries,
        whose leading axes have these letters."""
        letters = "BN" if self.entries.shape[1] == heads else "BK"
        return dataclasses.replace(self, entries=convert(self.entries, letters))

    def for_key_heads(self, heads, query_heads: int) -> "ResolvedLists":
        """The lists of these key heads, if each key head has its own."""
        if self.entries.shape[1] in (1, query_heads):
            return self
        return dataclasses.replace(self, entries=self.entries[:, heads])

    def sorted(self) -> "ResolvedLists":
        """These lists in ascending order, with NONE in place of repeated entries."""
        # XLA sorts constants while it compiles, in a loop
        x = jnp.sort(lax.optimization_barrier(self.entries), axis=-1)
        repeats = x[..., 1:] == x[..., :-1]
        repeats = jnp.pad(repeats, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return dataclasses.replace(self, entries=jnp.where(repeats, self.NONE, x))

    def distinct(self) -> "ResolvedLists":
        """These lists in any order, with NONE in place of repeated entries. A CPU sorts slowly: it
        writes the position of each entry to a table of all blocks, and the last one stays."""
        has_symbols = not all(isinstance(n, int) for n in self.entries.shape)  # of jax.export
        if has_symbols or not xla_cpu.on_cpu():
            return self.sorted()
        at = jnp.arange(self.entries.shape[-1], dtype=jnp.int32)[None]
        row = jnp.arange(AT_A_TIME, dtype=jnp.int32)[:, None]

        def step(position, entries):
            place = row, jnp.minimum(entries, self.blocks)
            position = position.at[place].set(jnp.broadcast_to(at, entries.shape))
            return position, jnp.where(position[place] == at, entries, self.NONE)

        flat = self.entries.reshape(-1, at.size)
        count = -(-len(flat) // AT_A_TIME)
        whole = jnp.pad(flat, ((0, count * AT_A_TIME - len(flat)), (0, 0)))
        position = jnp.zeros_like(flat, shape=(AT_A_TIME, self.blocks + 1))
        _, whole = lax.scan(step, position, whole.reshape(count, AT_A_TIME, -1))
        entries = whole.reshape(-1, at.size)[: len(flat)].reshape(self.entries.shape)
        return dataclasses.replace(self, entries=entries)

    def within(self, other: "ResolvedLists") -> "ResolvedLists":
        """The entries that `other`, lists of the same blocks, has too."""
        lists, known = self.entries, jnp.sort(lax.optimization_barrier(other.entries), axis=-1)
        heads = max(lists.shape[1], known.shape[1])
        # query heads have the lists of their key/value head
        lists, known = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (lists, known))
        shape = jnp.broadcast_shapes(lists.shape[:3], known.shape[:3])
        lists, known = (jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (lists, known))
        find = jnp.vectorize(jnp.searchsorted, signature="(m),(n)->(n)")
        at = jnp.minimum(find(known, lists), known.shape[-1] - 1)
        is_in_both = jnp.take_along_axis(known, at, -1) == lists
        return dataclasses.replace(self, entries=jnp.where(is_in_both, lists, self.NONE))

    def table(self, rows=None):
        """Whether each list names each block of keys: bool [B | 1, L, lists, blocks], of all lists
        or of the lists of query rows [rows]."""
        x = self.entries if rows is None else self.entries[:, :, rows // self.query_block]
        return self._name_blocks(x)

    def by_key(self, table):
        """A table [.., blocks] for each key, [.., S]."""
        if self.block == 1:
            return table
        return jnp.repeat(table, self.block, axis=-1)[..., : self.keys]

    def any_names(self):
        """Whether any list of a head names each key: bool [B | 1, L, S]."""
        x = self.entries.reshape(*self.entries.shape[:2], -1)
        return self.by_key(self._name_blocks(x))

    def _name_blocks(self, x):
        """Whether entries [.., n] name each block: bool [.., blocks]."""

        def names(x):
            table = jnp.zeros_like(x, shape=self.blocks, dtype=bool)
            return table.at[x].set(True, mode="drop", wrap_negative_indices=False)

        # mapped: XLA sends nothing between the devices of a mesh that hold other lists
        return jnp.vectorize(names, signature="(n)->(m)")(x)

    def visible_pairs(self, heads: int, row, key):
        """Whether the lists of query rows [rows] name the keys [keys]: bool [B | 1, N | 1, rows,
        keys]."""
        x = self.table(row)[..., key // self.block]
        return x if x.shape[1] == 1 else jnp.repeat(x, heads // x.shape[1], axis=1)

    def block_types(self, table, queries: int, size: int):
        """The types of the blocks of `size` queries and keys, int8 [B | 1, L, query blocks, key
        blocks], from the table of all lists."""
        types = table.astype(jnp.int8) * block_types.FULL
        ends = (2, queries, self.query_block), (3, self.keys, self.block)
        for axis, length, known in ends:
            count = -(-length // size)
            types = block_types.resize_axis(types, axis, known, count, size)
            if length % size:  # a block that hangs over an end is not full
                last = lax.slice_in_dim(types, count - 1, count, axis=axis)
                last = jnp.minimum(last, block_types.PARTIAL)
                types = lax.dynamic_update_slice_in_dim(types, last, count - 1, axis)
        return types

    def __str__(self):
        n, queries = self.entries.shape[-1], self.query_block
        names = f"{n} keys" if self.block == 1 else f"{n} blocks of {self.block} keys"
        return f"lists of {names}" + (f" for {queries} queries" if queries > 1 else "")
