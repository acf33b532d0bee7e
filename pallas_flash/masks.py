"""Which keys a query may see: the only file that compares positions.

Almost every mask in use is, for each query row i, a half-open interval of keys [start(i), stop(i)). A `Mask` is what a user
writes: `Causal() & Window(128, 0)`. `resolve` turns any of them into one `Visibility`, which is all that the implementations
know. A new mask is one class here with one method, `interval`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Ints = Any  # an int, or an int32 array


class Mask:
    """A rule that says which keys each query may see. `a & b` lets a query see what both let it see."""

    ARRAYS = {}  # its int32 arrays: field name -> letters of its shape, out of B, T and S

    def interval(self, row: Ints, position: Ints) -> tuple[Ints, Ints]:
        """The keys [start, stop) that queries see; both broadcast against [B, T].

        `row` [1, T] counts the queries; `position` [B, T] or [1, T] is the key position of each, row + query_offset.
        """
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)


@dataclasses.dataclass(frozen=True)
class Both(Mask):
    """What two masks both let a query see."""

    first: Mask
    second: Mask


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """The query at position p sees keys p - left to p + right, both inclusive; None is no limit on that side."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        for side in (self.left, self.right):
            if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 0):
                raise ValueError(f"a window is (left, right), each an int >= 0 or None; got ({self.left!r}, {self.right!r}).")


def Causal() -> Window:
    """A query sees the keys up to its own position."""
    return Window(None, 0)


@dataclasses.dataclass(frozen=True)
class KeyLengths(Mask):
    """Only the first lengths[b] keys are seen; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def interval(self, row, position):
        return 0, self.lengths[:, None]


@dataclasses.dataclass(frozen=True)
class QueryLengths(Mask):
    """Only the first lengths[b] queries see anything; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def interval(self, row, position):
        return 0, jnp.where(row < self.lengths[:, None], Visibility.ALL, 0)


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, and every query sees the first prefix[b] keys; prefix is int32 [B]."""

    prefix: Any
    ARRAYS = {"prefix": "B"}

    def interval(self, row, position):
        return 0, jnp.maximum(position + 1, self.prefix[:, None])


@dataclasses.dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: a query sees the keys with its own id. query_ids is int32 [B, T], key_ids int32 [B, S]."""

    query_ids: Any
    key_ids: Any
    ARRAYS = {"query_ids": "BT", "key_ids": "BS"}

    def interval(self, row, position):
        return self.runs()[:2]

    def runs(self):
        """First and one past the last key with each query's id, and whether no other id lies between: 3 x [B, T]."""
        return jax.vmap(_runs)(self.query_ids, self.key_ids)


def _runs(query_ids, key_ids):
    order = jnp.argsort(key_ids, stable=True).astype(jnp.int32)
    ids = key_ids[order]
    low, high = (jnp.searchsorted(ids, query_ids, side).astype(jnp.int32) for side in ("left", "right"))
    found = low < high
    start = jnp.where(found, order[jnp.minimum(low, ids.size - 1)], 0)
    stop = jnp.where(found, order[jnp.maximum(high - 1, 0)] + 1, 0)
    return start, stop, stop - start == high - low


@dataclasses.dataclass(frozen=True)
class Visibility:
    """A resolved mask: a diagonal band, lengths, one more interval per row, and document ids.

    Static: `keys` = S, and the band's `left` and `right`. The rest is data, None where there is none: by batch `offset`,
    `key_stop` and `query_stop` [B]; by query `start`, `stop`, `solid` (the ids fill the interval) and `query_ids` [B, T];
    by key `key_ids` [B, S]. A kernel narrows the data to its own batch and rows, and then asks for the interval.
    """

    keys: int
    left: int | None = None
    right: int | None = None
    offset: Ints = 0
    key_stop: Ints | None = None
    query_stop: Ints | None = None
    start: Ints | None = None
    stop: Ints | None = None
    solid: Ints | None = None
    query_ids: Ints | None = None
    key_ids: Ints | None = None

    ALL = np.iinfo(np.int32).max // 2  # a stop that hides nothing
    BY_BATCH = ("offset", "key_stop", "query_stop")
    BY_QUERY = ("start", "stop", "solid", "query_ids")
    BY_KEY = ("key_ids",)

    def narrow(self, fields, pick) -> "Visibility":
        """The same mask with `pick` applied to the data in `fields`."""
        values = {name: getattr(self, name) for name in fields}
        return dataclasses.replace(self, **{name: pick(x) for name, x in values.items() if _is_data(x)})

    def interval(self, row: Ints) -> tuple[Ints, Ints]:
        """The keys [start, stop) that the queries `row` see, within [0, S); start >= stop where a query sees none.

        The data must have been narrowed to shapes that broadcast against `row`. Ends that are the same for all rows and
        known while tracing are ints.
        """
        position = row + self.offset
        start, stop = 0, self.keys
        if self.left is not None:
            start = jnp.maximum(start, position - self.left)
        if self.right is not None:
            stop = jnp.minimum(stop, position + self.right + 1)
        if self.start is not None:
            start, stop = jnp.maximum(start, self.start), jnp.minimum(stop, self.stop)
        if self.key_stop is not None:
            stop = jnp.minimum(stop, self.key_stop)
        if self.query_stop is not None:
            stop = jnp.where(row < self.query_stop, stop, 0)
        return start, stop

    def sees(self, start: Ints, stop: Ints, key: Ints, query_ids=None, key_ids=None) -> jax.Array:
        """Whether each query sees each key, from the query's interval; all arguments broadcast against the result."""
        if isinstance(start, int) and start == 0:
            seen = key < stop
        else:  # one comparison for both ends: what lies before the start wraps around
            seen = (key - start).astype(jnp.uint32) < jnp.maximum(stop - start, 0).astype(jnp.uint32)
        return seen if query_ids is None else seen & (query_ids == key_ids)

    def reached(self, key: Ints):
        """Which of the keys [n] any query of a batch row may see by its lengths, bool [B, n]; None where there are none."""
        return None if self.key_stop is None else key[None] < self.key_stop[:, None]

    def live(self, row: Ints):
        """Which of the queries [n] of a batch row may see a key by their lengths, bool [B, n]; None where there are none."""
        return None if self.query_stop is None else row[None] < self.query_stop[:, None]

    def __str__(self):
        words = []
        if self.left is not None or self.right is not None:
            causal = self.left is None and self.right == 0
            words.append("causal" if causal else f"window ({self.left}, {self.right})")
        if words and not (isinstance(self.offset, int) and self.offset == 0):
            words.append(f"query offset {self.offset if isinstance(self.offset, int) else 'by batch'}")
        words += [text for name, text in _WORDS.items() if getattr(self, name) is not None]
        return ", ".join(words) or "full"


_WORDS = {
    "key_stop": "key lengths",
    "query_stop": "query lengths",
    "start": "an interval by row",
    "query_ids": "document ids",
}


def parts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` put together."""
    if mask is None:
        return []
    return parts(mask.first) + parts(mask.second) if isinstance(mask, Both) else [mask]


def resolve(masks: list[Mask], batch: int, queries: int, keys: int, offset: Ints) -> Visibility:
    """One Visibility for all of `masks`: starts are joined by max, stops by min. `offset` is an int or int32 [B]."""
    seen, shape = Visibility(keys, offset=offset), (batch, queries)
    row = jnp.arange(queries, dtype=jnp.int32)[None]
    position = row + (offset if isinstance(offset, int) else offset[:, None])
    for mask in masks:
        match mask:
            case Window(left, right):
                seen = dataclasses.replace(seen, left=_least(seen.left, left), right=_least(seen.right, right))
            case KeyLengths(lengths):
                seen = dataclasses.replace(seen, key_stop=_least(seen.key_stop, lengths))
            case QueryLengths(lengths):
                seen = dataclasses.replace(seen, query_stop=_least(seen.query_stop, lengths))
            case Documents(query_ids, key_ids):
                if seen.query_ids is not None:
                    raise ValueError("one call takes one set of document ids; got several Documents masks or segment ids.")
                start, stop, solid = mask.runs()
                seen = _meet(seen, shape, start, stop)
                seen = dataclasses.replace(seen, solid=solid, query_ids=query_ids, key_ids=key_ids)
            case _:
                seen = _meet(seen, shape, *mask.interval(row, position))
    if seen.left is None and seen.right is None:
        seen = dataclasses.replace(seen, offset=0)  # nothing asks for a position any more
    return seen


def _least(a, b):
    if a is None or b is None:
        return b if a is None else a
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _meet(seen: Visibility, shape, start: Ints, stop: Ints) -> Visibility:
    start, stop = (jnp.broadcast_to(jnp.asarray(end, jnp.int32), shape) for end in (start, stop))
    if seen.start is not None:
        start, stop = jnp.maximum(start, seen.start), jnp.minimum(stop, seen.stop)
    return dataclasses.replace(seen, start=start, stop=stop)


def _is_data(value) -> bool:
    return value is not None and not isinstance(value, int)


def _register(cls):
    """Makes a mask a pytree: arrays are its leaves, ints and None belong to its structure."""
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(mask):
        values = [getattr(mask, name) for name in names]
        data = [x if _is_data(x) else None for x in values]
        return data, tuple(None if _is_data(x) else x for x in values)

    def unflatten(static, data):
        mask = object.__new__(cls)
        for name, s, d in zip(names, static, data, strict=True):
            object.__setattr__(mask, name, s if d is None else d)
        return mask

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


for _cls in (Both, Window, KeyLengths, QueryLengths, PrefixLM, Documents, Visibility):
    _register(_cls)
