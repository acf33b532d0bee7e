"""Which keys a query may see, as a user writes it: `Causal() & Window(128, 0)`.

Almost every mask in use lets query row i see a half-open interval of keys, [start(i), stop(i)); a
`MaskMod` is any other function of positions, and so is what | and ~ make. `resolve` turns several
masks into one `ResolvedMask`, which is all that the implementations know.

To add a kind of mask, write one class here and a case in tests/cases.py. Its `interval` is enough;
with a `mask_mod` too, | and ~ need no call to know what it shows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.jax_support import pytrees
from pallas_flash.masks.block_mask import BlockMask as BlockMask
from pallas_flash.masks.block_mask import create_block_mask as create_block_mask
from pallas_flash.masks.mask import BlockTypes as BlockTypes
from pallas_flash.masks.mask import Mask as Mask
from pallas_flash.masks.mask import MaskMod as MaskMod
from pallas_flash.masks.mask import conjuncts as conjuncts
from pallas_flash.masks.mask import leaves as leaves
from pallas_flash.masks.mask import with_leaves as with_leaves
from pallas_flash.masks.mask import without_block_types as without_block_types
from pallas_flash.masks.resolution import positions_of as positions_of
from pallas_flash.masks.resolution import resolve as resolve
from pallas_flash.masks.resolution import within_reach as within_reach
from pallas_flash.masks.resolved_mask import REACH


@pytrees.dataclass
class Window(Mask):
    """The query at position p sees the keys p - left to p + right, both inclusive; None is no limit
    on that side. local_window_size=4 is Window(4, 4)."""

    left: int | None
    right: int | None

    def __post_init__(self):
        for name, side in (("left", self.left), ("right", self.right)):
            if side is None:
                continue
            if not checks.is_int(side) or isinstance(side, bool) or not 0 <= side < 2**31:
                raise ValueError(
                    f"a window is (left, right), each an int from 0 to {2**31 - 1} or None; got "
                    f"({self.left!r}, {self.right!r})."
                )
            object.__setattr__(self, name, int(side))

    def _near(self) -> tuple[int | None, int | None]:
        return tuple(None if side is None else min(side, REACH) for side in (self.left, self.right))

    def band(self):
        return self.left, self.right

    def interval(self, row, position):
        left, right = self._near()
        return (
            None if left is None else position - left,
            None if right is None else position + right + 1,
        )

    def mask_mod(self):
        left, right = self._near()
        from_left = lambda q, k: True if left is None else k >= q - left
        return lambda b, h, q, k: jnp.logical_and(
            from_left(q, k), True if right is None else k <= q + right
        )


def Causal() -> Window:
    """A query sees the keys up to its own position."""
    return Window(None, 0)


@pytrees.dataclass
class Chunked(Mask):
    """Positions are cut into chunks of `size`, and a query sees its own chunk; with Causal() only
    what comes before it there."""

    size: int

    def __post_init__(self):
        object.__setattr__(self, "size", checks.count("Chunked.size", self.size, REACH))

    def interval(self, row, position):
        start = position // self.size * self.size
        return start, start + self.size

    def mask_mod(self):
        return lambda b, h, q, k: q // self.size == k // self.size


@pytrees.dataclass
class KeyLengths(Mask):
    """Only the first lengths[b] keys are seen; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def narrow(self, mask, rows):
        return mask.with_lengths("key_stop", self.lengths)


@pytrees.dataclass
class KeyStarts(Mask):
    """Keys before starts[b] are not seen, as where prompts are padded on the left; starts is int32
    [B]."""

    starts: Any
    ARRAYS = {"starts": "B"}

    def interval(self, row, position):
        return self.starts[:, None], None


@pytrees.dataclass
class QueryLengths(Mask):
    """Only the first lengths[b] queries see anything; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def narrow(self, mask, rows):
        return mask.with_lengths("query_stop", self.lengths)


@pytrees.dataclass
class PrefixLM(Mask):
    """Causal, but every query also sees the first prefix[b] keys; prefix is int32 [B]."""

    prefix: Any
    ARRAYS = {"prefix": "B"}

    def interval(self, row, position):
        return None, jnp.maximum(position + 1, self.prefix[:, None])


@pytrees.dataclass
class Documents(Mask):
    """Packed documents: a query sees the keys with its own id. query_ids is int32 [B, T], key_ids
    int32 [B, S]."""

    query_ids: Any
    key_ids: Any
    ARRAYS = {"query_ids": "BT", "key_ids": "BS"}
    has_ids = True

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
        """First and one past the last key with each query's id, and whether no other id lies
        between: 3 x [B, T]."""
        keys = self.key_ids.shape[1]
        # no search takes a symbol of jax.export, or nothing: nothing is skipped
        if not isinstance(keys, int) or keys == 0:
            start = jnp.zeros(self.query_ids.shape, jnp.int32)
            return start, start + keys, start > 0
        return jax.vmap(_runs_of_row)(self.query_ids, self.key_ids)


@pytrees.dataclass
class Varlen(Mask):
    """Sequences of any lengths, one behind the other. Sequence i has the queries and keys from
    cu_seqlens[i] up to, not including, cu_seqlens[i + 1], which see each other alone. Queries and
    keys behind the last sequence are padding.

    cu_seqlens_q is int32 [B, sequences + 1], or [sequences + 1] for one row, ascending from 0 to
    the tokens at most; a call with others raises, unless they are traced. Give cu_seqlens_k as well
    where the keys have other lengths than the queries: the last query of a sequence is then at the
    position of its last key, and is_causal, windows and the q_idx of rules and scores count from
    there.

    For a rule or a score_mod b is still the batch row, and kv_idx the key's place in it:
    `key_value_segment_ids` says in which sequence that is.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_flash import masks
      >>> packed = masks.Varlen(jnp.array([0, 2, 5]))
      >>> packed.key_value_segment_ids(6).tolist()
      [0, 0, 1, 1, 1, 1]
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any = None
    ARRAYS = {"cu_seqlens_q": "BC", "cu_seqlens_k": "BC"}

    def __post_init__(self):
        super().__post_init__()
        ends = self.cu_seqlens_q, self.cu_seqlens_k
        # without a wait for what a device computes
        are_known = all(isinstance(x, np.ndarray | list | tuple) for x in ends)
        if ends[0] is ends[1] or (are_known and np.array_equal(*ends)):
            object.__setattr__(self, "cu_seqlens_k", None)

    def canonical(self, tokens=None):
        mask = super().canonical()
        T, S = tokens or (None, None)
        checks.ends("Varlen.cu_seqlens_q", mask.cu_seqlens_q, T)
        of_keys = "Varlen.cu_seqlens_q" if mask.cu_seqlens_k is None else "Varlen.cu_seqlens_k"
        checks.ends(of_keys, mask._key_ends, S)
        return mask

    @property
    def _key_ends(self):
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    def key_value_segment_ids(self, length: int) -> jax.Array:
        """The number of the sequence that each of `length` keys is in, int32 [B, length], or
        [length] of ends [sequences + 1]. Keys behind the last sequence have its number.

        A rule or a score_mod looks a pair's sequence up by kv_idx, which is in the query's too
        where the query sees the key.
        """
        ends, key = jnp.asarray(self._key_ends), jnp.arange(length, dtype=jnp.int32)
        of_row = lambda ends: _search(ends[1:-1], key, "right")
        found = jax.vmap(of_row)(ends.reshape(-1, ends.shape[-1]))
        return found.reshape(*ends.shape[:-1], length)

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
            after = jax.vmap(lambda own: _search(own, row[0], "right"))(self.cu_seqlens_q)
        else:  # no search takes a symbol of jax.export
            after = jnp.sum(self.cu_seqlens_q[:, None] <= row[..., None], axis=2, dtype=jnp.int32)
        last = ends.shape[1] - 1
        at = lambda number: jnp.take_along_axis(ends, jnp.clip(number, 0, last), 1)
        return tuple(
            jnp.where((0 < after) & (after <= last), at(number), 0) for number in (after - 1, after)
        )


def Dilated(stride: int) -> MaskMod:
    """A query sees every stride-th key, counted from its own position."""
    stride = checks.count("Dilated.stride", stride, REACH)
    return MaskMod(lambda b, h, q, k: (q - k) % stride == 0, f"Dilated({stride})")


def GlobalTokens(n: int) -> MaskMod:
    """The first n positions see all keys, and all queries see the first n keys: `Window(128, 128) |
    GlobalTokens(4)`."""
    n = checks.count("GlobalTokens.n", n, REACH)
    return MaskMod(lambda b, h, q, k: (q < n) | (k < n), f"GlobalTokens({n})")


def _runs_of_row(query_ids, key_ids):
    """Documents._runs of one batch row, by a table of buckets of ids, since a sort of the keys and
    searches in them are many kernels: results.md#documents. Ids that share a bucket share a range,
    which is then too wide."""
    keys, bits = key_ids.size, max((key_ids.size - 1).bit_length(), MIN_BUCKET_BITS)
    key, differ = jnp.arange(keys, dtype=jnp.int32), key_ids[1:] != key_ids[:-1]
    is_first, is_last = (jnp.pad(differ, side, constant_values=True) for side in ((1, 0), (0, 1)))
    of_query, of_key = (_bucket(ids, bits) for ids in (query_ids, key_ids))
    # of the ends of runs alone: many keys of one id would wait for each other
    of_key = jnp.where(is_first | is_last, of_key, 1 << bits)
    ends = [(is_first, -key), (is_first, key), (is_last, key + 1)]
    ends = jnp.stack([jnp.where(which, end, -keys) for which, end in ends], 1)
    table = jnp.full_like(key_ids, -keys, shape=(1 << bits, 3)).at[of_key].max(ends, mode="drop")
    first, last_run, stop = jnp.moveaxis(table[of_query], 1, 0)
    stop = jnp.maximum(stop, 0)
    start = jnp.minimum(-first, stop)  # 0 of an empty bucket
    return start, stop, (start == last_run) & (key_ids[start] == query_ids)


MIN_BUCKET_BITS = 12


def _bucket(ids, bits: int):
    """The ids from 0 to 2^bits - 1 as they are; of others the upper bits are added as a Fibonacci
    hash."""
    upper = (ids >> bits).astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    return (ids + (upper >> (32 - bits)).astype(jnp.int32)) & ((1 << bits) - 1)


def _search(a, x, side: str):
    """jnp.searchsorted as int32, without a loop: on a GPU each step of one is a kernel of its own,
    and all were half the time of a forward over documents: results.md#documents."""
    return jnp.searchsorted(a, x, side, method="scan_unrolled").astype(jnp.int32)
