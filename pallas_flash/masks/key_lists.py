"""Attention by lists: the keys that each query, or block of queries, names."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.checks.sizes import HEADS_FIRST
from pallas_flash.jax_support import pytrees
from pallas_flash.masks.mask import Mask
from pallas_flash.masks.resolved_mask import LEAST_TABLE, ResolvedLists


@unexpected.refused
@pytrees.dataclass(static=("heads_letter",), repr=False)
class KeyLists(Mask):
    """A query sees the keys that its list names, as in DeepSeek's sparse attention, NSA and MoBA.

    indices are integers [*B, ceil(T / query_block), L, n], or with 1 in place of *B for all batch
    rows. Query row t has the list indices[b, t // query_block, l]. An entry i in it names the keys
    from i * block up to, not including, (i + 1) * block. L is 1, if all heads share a list; K, if
    the query heads of a key/value head do; or N, if each has its own.

    Entries outside of [0, ceil(S / block)) name nothing, anywhere in a list: write -1. Repeated
    entries count once, and their order means nothing. n may exceed the number of blocks. There is
    no gradient to indices.

    Other masks narrow the lists by &. With | and ~ block * query_block must be at least 64.

    Examples:
      >>> from pallas_flash import masks
      >>> lists = [[[0, -1]], [[0, 2]], [[3, 1]]]  # [3 blocks of queries, L = 1, n = 2]
      >>> print(masks.draw(masks.KeyLists(lists, block=2, query_block=2), 6, 8))
      1 1 . . . . . .
      1 1 . . . . . .
      1 1 . . 1 1 . .
      1 1 . . 1 1 . .
      . . 1 1 . . 1 1
      . . 1 1 . . 1 1
    """

    indices: Any
    block: int = 1
    query_block: int = 1
    # the letter of the axis L of a call, C, K or N, and N
    heads_letter: str = dataclasses.field(default="C", compare=False, repr=False, kw_only=True)
    heads: int = dataclasses.field(default=1, compare=False, repr=False, kw_only=True)
    is_interval = is_divisible = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("block", "query_block"):
            size = checks.count(f"KeyLists.{name}", getattr(self, name), ResolvedLists.NONE)
            object.__setattr__(self, name, size)

    def __repr__(self):
        lists = type(self.indices).__name__
        if checks.is_array(self.indices):
            lists = f"{self.indices.dtype}{list(self.indices.shape)}"
        return f"KeyLists({lists}, block={self.block}, query_block={self.query_block})"

    @property
    def ARRAYS(self) -> dict[str, str]:
        return {"indices": f"BC{self.heads_letter}C"}

    @property
    def has_table(self) -> bool:
        """Whether a mask_mod can read a table of the blocks."""
        return self.block * self.query_block >= LEAST_TABLE

    def fitting(self, sizes):
        lead, (queries, heads, kv_heads) = sizes.lead, (sizes.of[letter] for letter in "TNK")
        x = jnp.asarray(checks.ints("KeyLists.indices", self.indices))
        blocks = -(-queries // self.query_block)
        fits = x.ndim > 2 and x.shape[:-3] in (lead, (1,) * len(lead), (1,), ())
        if not fits or x.shape[-3] != blocks or x.shape[-2] not in (1, kv_heads, heads):
            rows = "T" if self.query_block == 1 else f"ceil(T / {self.query_block})"
            hint = " For one list for all heads pass x[..., None, :]."
            hint *= x.shape[:-1] in ((*lead, blocks), (blocks,))
            heads_first = x.ndim > 2 and x.shape[-2] == blocks and x.shape[-3] in (kv_heads, heads)
            raise ValueError(
                f"KeyLists.indices must be integers [*B or 1, {rows}, L, n] = "
                f"({', '.join(map(str, (*lead, blocks)))}, L, n), with L = 1, K = {kv_heads} or "
                f"N = {heads}; got {x.shape}.{hint or HEADS_FIRST * heads_first}"
            )
        if x.shape[-1] == 0:
            raise ValueError(
                f"KeyLists.indices must be [.., L, n] with n from 1 on; got {x.shape}. A list that "
                "names nothing has an entry of -1."
            )
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
        return dataclasses.replace(self, indices=x, heads=heads)

    def for_mesh(self, lead, heads, kv_heads):
        letters = {kv_heads: "K", heads: "N"}
        return dataclasses.replace(self, heads_letter=letters.get(self.indices.shape[-2], "C"))

    def resolve(self, keys: int) -> ResolvedLists:
        """The lists of a call, which `fitting` returned."""
        return ResolvedLists.from_indices(
            jnp.swapaxes(self.indices, 1, 2), self.block, self.query_block, keys
        )

    def as_table(self, keys: int) -> "ListTable":
        """The mask that a mask_mod can read."""
        if self.has_table:
            return ListTable.from_lists(self.resolve(keys), self.heads)
        raise TypeError(
            f"| and ~ take KeyLists with block * query_block >= {LEAST_TABLE}; got block "
            f"{self.block} and query_block {self.query_block}. Add the keys to the lists, or "
            "attend in two calls over disjoint keys and join them by merge_attention."
        )


@pytrees.dataclass(static=("name",), repr=False)
class ListTable(Mask):
    """Shows the keys that lists name, by the table of their blocks."""

    table: Any  # bool [B | 1, L, T / query_block, blocks]
    group: int  # query heads that share a list
    block: int
    query_block: int
    name: str
    is_interval = False

    @classmethod
    def from_lists(cls, lists: ResolvedLists, heads: int) -> "ListTable":
        # XLA would compute a table of constants while it compiles
        entries = lax.optimization_barrier(lists.entries)
        table = dataclasses.replace(lists, entries=entries).table()
        group = heads // table.shape[1]
        return cls(table, group, lists.block, lists.query_block, str(lists))

    def __repr__(self):
        return self.name

    def visible(self, b, h, row, key):
        B, L, _, _ = self.table.shape
        index = 0 if B == 1 else b, 0 if L == 1 else h // self.group
        return self.table.at[*index, row // self.query_block, key // self.block].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
