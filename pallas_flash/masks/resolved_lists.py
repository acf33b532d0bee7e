"""Resolved lists of keys, which all implementations read: entries without what names nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import pytrees, xla_cpu
from pallas_flash.masks import block_types

AT_A_TIME = 8  # lists whose repeats a CPU finds in a step of a loop
LEAST_TABLE = 64  # pairs of a query and a key for an entry of a table of blocks


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
    def of(cls, indices, block: int, query_block: int, keys: int) -> "ResolvedLists":
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

    def of_keys(self, table):
        """A table [.., blocks] for each key, [.., S]."""
        if self.block == 1:
            return table
        return jnp.repeat(table, self.block, axis=-1)[..., : self.keys]

    def any_names(self):
        """Whether any list of a head names each key: bool [B | 1, L, S]."""
        x = self.entries.reshape(*self.entries.shape[:2], -1)
        return self.of_keys(self._name_blocks(x))

    def _name_blocks(self, x):
        """Whether entries [.., n] name each block: bool [.., blocks]."""

        def of_list(x):
            table = jnp.zeros_like(x, shape=self.blocks, dtype=bool)
            return table.at[x].set(True, mode="drop", wrap_negative_indices=False)

        # mapped: XLA sends nothing between the devices of a mesh that hold other lists
        return jnp.vectorize(of_list, signature="(n)->(m)")(x)

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
        n, of_query = self.entries.shape[-1], self.query_block
        names = f"{n} keys" if self.block == 1 else f"{n} blocks of {self.block} keys"
        return f"lists of {names}" + (f" for {of_query} queries" if of_query > 1 else "")
