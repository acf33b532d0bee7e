"""Masks of packed sequences: by the id of each token, and by the ends of each sequence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.jax_support import pytrees
from pallas_flash.masks.mask import Mask


@unexpected.refused
@pytrees.dataclass
class Documents(Mask):
    """Packed documents: a query sees the keys with its id. query_ids is int32 [B, T], key_ids int32
    [B, S]; default: query_ids, if T == S. A 1 in place of B is all batch rows.

    Examples:
      >>> from pallas_flash import masks
      >>> query_ids, key_ids = [0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 1, 2, 2, 2]
      >>> print(masks.draw(masks.Documents(query_ids, key_ids), 6, 8))
      1 1 . . . . . .
      1 1 . . . . . .
      . . 1 1 1 . . .
      . . 1 1 1 . . .
      . . 1 1 1 . . .
      . . . . . 1 1 1
    """

    query_ids: Any
    key_ids: Any = None
    ARRAYS = {"query_ids": "BT", "key_ids": "BS"}
    has_ids = True

    def __post_init__(self):
        super().__post_init__()
        if self.key_ids is None:
            object.__setattr__(self, "key_ids", self.query_ids)

    def canonical(self, tokens=None):
        T, S = tokens or (None, None)
        if self.key_ids is self.query_ids and T != S:
            raise ValueError(
                f"Documents(ids) alone is enough only where T == S; got T = {T}, S = {S}. Pass "
                "key_ids too."
            )
        return super().canonical(tokens)

    def _arrays(self):
        ids = checks.ids({f"Documents.{name}": getattr(self, name) for name in self.ARRAYS})
        return dict(zip(self.ARRAYS, ids, strict=True))

    def narrow(self, mask, rows):
        start, stop, contiguous = self._runs()
        return dataclasses.replace(
            mask.with_interval(rows.shape, start, stop),
            contiguous=contiguous,
            query_ids=self.query_ids,
            key_ids=self.key_ids,
        )

    def _runs(self):
        """The first key with each query's id, the key after the last one, and whether all keys
        between them have that id: 3 x [B, T]."""
        keys = self.key_ids.shape[1]
        # a search needs a static number of keys; without it no key is skipped
        if not isinstance(keys, int) or keys == 0:
            start = jnp.zeros(self.query_ids.shape, jnp.int32)
            return start, start + keys, start > 0
        return jax.vmap(_runs_of_row)(self.query_ids, self.key_ids)


@unexpected.refused
@pytrees.dataclass
class Varlen(Mask):
    """Packed sequences of any lengths. Sequence i has the queries and keys from cu_seqlens[i] up
    to, not including, cu_seqlens[i + 1], which see each other alone. Queries and keys behind the
    last sequence are padding.

    cu_seqlens_q is int32 [B, sequences + 1], [1, sequences + 1] for the same in all batch rows, or
    [sequences + 1] for one row, ascending from 0 to the tokens at most. A call with others raises,
    unless they are traced. Give cu_seqlens_k as well where the keys have other lengths than the
    queries. The last query of a sequence is then at the position of its last key, and is_causal,
    windows and the q_idx of rules and scores count from there.

    For a rule or a score_mod b is still the batch row, and kv_idx the key's place in it:
    `key_value_segment_ids` says in which sequence that is.

    Examples:
      >>> from pallas_flash import masks
      >>> packed = masks.Varlen([0, 2, 5], [0, 3, 8])
      >>> print(masks.draw(packed & masks.Causal(), 6, 8))
      1 1 . . . . . .
      1 1 1 . . . . .
      . . . 1 1 1 . .
      . . . 1 1 1 1 .
      . . . 1 1 1 1 1
      . . . . . . . .
      >>> packed.key_value_segment_ids(8).tolist()
      [0, 0, 0, 1, 1, 1, 1, 1]
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any = None
    ARRAYS = {"cu_seqlens_q": "BC", "cu_seqlens_k": "BC"}

    def __post_init__(self):
        super().__post_init__()
        ends = self.cu_seqlens_q, self.cu_seqlens_k
        for name, x in zip(self.ARRAYS, ends, strict=True):
            if checks.is_int(x):
                raise ValueError(
                    f"Varlen.{name} must be int32 [B, sequences + 1] or [sequences + 1], the ends "
                    f"of sequences, as [0, {x}] for one; got {checks.description(x)}."
                )
        # compares no array of a device: it would wait for it
        are_known = all(isinstance(x, np.ndarray | list | tuple) for x in ends)
        if ends[0] is ends[1] or (are_known and np.array_equal(*ends)):
            object.__setattr__(self, "cu_seqlens_k", None)

    def canonical(self, tokens=None):
        mask = super().canonical()
        T, S = tokens or (None, None)
        checks.ends("Varlen.cu_seqlens_q", mask.cu_seqlens_q, T)
        key_ends = "Varlen.cu_seqlens_q" if mask.cu_seqlens_k is None else "Varlen.cu_seqlens_k"
        checks.ends(key_ends, mask._key_ends, S)
        return mask

    @property
    def _key_ends(self):
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    @unexpected.refused
    def key_value_segment_ids(self, length: int) -> jax.Array:
        """The index of each key's sequence, int32 [B, length], or [length] for ends [sequences +
        1]. Keys behind the last sequence count as one more.

        A rule or a score_mod looks up the sequence of a pair by kv_idx: a query sees keys of its
        own sequence alone.
        """
        if not jax.export.is_symbolic_dim(length):
            checks.count("length", length, least=0)
        ends, key = jnp.asarray(self._key_ends), jnp.arange(length, dtype=jnp.int32)
        each_row = lambda ends: _search(ends[1:-1], key, "right")
        ids = jax.vmap(each_row)(ends.reshape(-1, ends.shape[-1]))
        return ids.reshape(*ends.shape[:-1], length)

    def _compared(self):
        return [self.cu_seqlens_q, self._key_ends]

    def interval(self, row, position):
        return self._sequence(row, self._key_ends)

    def narrow(self, mask, rows):
        mask = mask.with_lengths("query_stop", self.cu_seqlens_q[:, -1])
        return super().narrow(mask.with_lengths("key_stop", self._key_ends[:, -1]), rows)

    @property
    def has_positions(self):
        return self.cu_seqlens_k is not None

    def positions(self, row):
        if (query_shape := self.cu_seqlens_q.shape) != (key_shape := self.cu_seqlens_k.shape):
            raise ValueError(
                "Varlen takes as many ends of queries as of keys; got cu_seqlens_q "
                f"{query_shape} and cu_seqlens_k {key_shape}."
            )
        (_, stop_q), (_, stop_k) = (
            self._sequence(row, ends) for ends in (self.cu_seqlens_q, self.cu_seqlens_k)
        )
        return row + stop_k - stop_q

    def _sequence(self, row, ends):
        """The start and the end of each row's sequence, from `ends`: 2 x [B, T]. Both are 0 for
        rows behind the last sequence."""
        if isinstance(self.cu_seqlens_q.shape[1], int):  # the index of its end
            after = jax.vmap(lambda ends: _search(ends, row[0], "right"))(self.cu_seqlens_q)
        else:  # a symbol of jax.export, which no search takes
            after = jnp.sum(self.cu_seqlens_q[:, None] <= row[..., None], axis=2, dtype=jnp.int32)
        last = ends.shape[1] - 1
        end_at = lambda index: jnp.take_along_axis(ends, jnp.clip(index, 0, last), 1)
        return tuple(
            jnp.where((0 < after) & (after <= last), end_at(i), 0) for i in (after - 1, after)
        )


def _runs_of_row(query_ids, key_ids):
    """Computes Documents._runs for one batch row by a hash table of ids, since sorting the keys and
    searching them takes many kernels: results.md#documents. Ids that share a bucket share a range,
    which is then too wide."""
    keys, bits = key_ids.size, max((key_ids.size - 1).bit_length(), MIN_BUCKET_BITS)
    key, differ = jnp.arange(keys, dtype=jnp.int32), key_ids[1:] != key_ids[:-1]
    is_first, is_last = (jnp.pad(differ, side, constant_values=True) for side in ((1, 0), (0, 1)))
    query_bucket, key_bucket = (_bucket(ids, bits) for ids in (query_ids, key_ids))
    # scatters the ends of runs alone: many keys of one id would wait for each other
    key_bucket = jnp.where(is_first | is_last, key_bucket, 1 << bits)
    ends = [(is_first, -key), (is_first, key), (is_last, key + 1)]
    ends = jnp.stack([jnp.where(which, end, -keys) for which, end in ends], 1)
    table = jnp.full_like(key_ids, -keys, shape=(1 << bits, 3))
    table = table.at[key_bucket].max(ends, mode="drop")
    first, last_run, stop = jnp.moveaxis(table[query_bucket], 1, 0)
    stop = jnp.maximum(stop, 0)
    start = jnp.minimum(-first, stop)  # 0 for an empty bucket
    return start, stop, (start == last_run) & (key_ids[start] == query_ids)


MIN_BUCKET_BITS = 12


def _bucket(ids, bits: int):
    """The bucket of each id: an id from 0 to 2^bits - 1 is its own; the upper bits of another id
    are added as a Fibonacci hash."""
    upper = (ids >> bits).astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    return (ids + (upper >> (32 - bits)).astype(jnp.int32)) & ((1 << bits) - 1)


def _search(a, x, side: str):
    """jnp.searchsorted as int32, without a loop, whose steps are a GPU kernel each: they were half
    the time of a forward over documents: results.md#documents."""
    return jnp.searchsorted(a, x, side, method="scan_unrolled").astype(jnp.int32)
