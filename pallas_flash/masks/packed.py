"""Masks of packed sequences: a row holds several, and each attends to itself alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.masks.mask import Mask
from pallas_flash.pytrees import register


@dataclasses.dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: a query sees the keys with its own id. query_ids is int32 [B, T], key_ids
    int32 [B, S]."""

    query_ids: Any
    key_ids: Any
    ARRAYS = {"query_ids": "BT", "key_ids": "BS"}

    def runs(self):
        """First and one past the last key with each query's id, and whether no other id lies
        between: 3 x [B, T]."""
        keys = self.key_ids.shape[1]
        # no search takes a symbol of jax.export, or nothing: nothing is skipped
        if not isinstance(keys, int) or keys == 0:
            start = jnp.zeros(self.query_ids.shape, jnp.int32)
            return start, start + keys, start > 0
        return jax.vmap(_runs)(self.query_ids, self.key_ids)


def _runs(query_ids, key_ids):
    order = jnp.argsort(key_ids, stable=True).astype(jnp.int32)
    ids = key_ids[order]
    low, high = (
        jnp.searchsorted(ids, query_ids, side).astype(jnp.int32) for side in ("left", "right")
    )
    found = low < high
    start = jnp.where(found, order[jnp.minimum(low, ids.size - 1)], 0)
    stop = jnp.where(found, order[jnp.maximum(high - 1, 0)] + 1, 0)
    return start, stop, stop - start == high - low


@dataclasses.dataclass(frozen=True)
class Varlen(Mask):
    """Sequences of any lengths, one behind the other. Sequence i has the queries and keys from
    cu_seqlens[i] up to, not including, cu_seqlens[i + 1], which see each other alone. Rows beyond
    the last sequence see nothing.

    cu_seqlens_q is int32 [B, sequences + 1], or [sequences + 1] for one row, ascending. Give
    cu_seqlens_k as well where the keys have other lengths than the queries: the last query of a
    sequence is then at the position of its last key, and is_causal and windows count from there.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any = None
    ARRAYS = {"cu_seqlens_q": "BC", "cu_seqlens_k": "BC"}

    def __post_init__(self):
        if self.cu_seqlens_k is self.cu_seqlens_q:
            object.__setattr__(self, "cu_seqlens_k", None)

    def interval(self, row, position):
        return self._sequence(
            row, self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        )

    def position(self, row):
        """The key positions [B, T] of the rows [1, T]."""
        if (of_q := self.cu_seqlens_q.shape) != (of_k := self.cu_seqlens_k.shape):
            raise ValueError(
                f"Varlen takes as many ends of queries as of keys; got cu_seqlens_q {of_q} and "
                f"cu_seqlens_k {of_k}."
            )
        (_, stop_q), (_, stop_k) = (
            self._sequence(row, ends) for ends in (self.cu_seqlens_q, self.cu_seqlens_k)
        )
        return row + stop_k - stop_q

    def _sequence(self, row, ends):
        """Where the sequence that each row is in begins and ends among `ends`: 2 x [B, T]. Beyond
        the last both are 0."""
        if isinstance(self.cu_seqlens_q.shape[1], int):  # the number of its end
            after = jax.vmap(lambda own: jnp.searchsorted(own, row[0], side="right"))(
                self.cu_seqlens_q
            )
        else:  # no search takes a symbol of jax.export
            after = jnp.sum(self.cu_seqlens_q[:, None] <= row[..., None], axis=2, dtype=jnp.int32)
        last = ends.shape[1] - 1
        at = lambda number: jnp.take_along_axis(ends, jnp.clip(number, 0, last), 1)
        return tuple(
            jnp.where((0 < after) & (after <= last), at(number), 0) for number in (after - 1, after)
        )


for _cls in (Documents, Varlen):
    register(_cls)
