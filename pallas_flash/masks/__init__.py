"""Which keys a query may see, as a user writes it: `Causal() & Window(128, 0)`.

Almost every mask in use lets query row i see a half-open interval of keys, [start(i), stop(i)); a
`MaskMod` is any other rule, and so is what | and ~ make. `resolve` turns several `Mask`s into one
`ResolvedMask`, which is all that the implementations know. To add a mask, write one class here with
one method, `interval`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.masks import block_types
from pallas_flash.masks.expression import RULES, Place, as_where
from pallas_flash.masks.mask import (
    REACH,
    BlockTypes,
    Both,
    Either,
    Mask,
    MaskMod,
    Not,
    both,
    conjuncts,
    leaves,
    positive,
)
from pallas_flash.masks.mask import Dilated as Dilated
from pallas_flash.masks.mask import GlobalTokens as GlobalTokens
from pallas_flash.masks.mask import with_leaves as with_leaves
from pallas_flash.masks.mask import without_block_types as without_block_types
from pallas_flash.masks.packed import Documents, Varlen
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.mask_mod import BoundMaskMod
from pallas_flash.pytrees import IntLike, register, smaller


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """The query at position p sees the keys p - left to p + right, both inclusive; None is no limit
    on that side."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        for name, side in (("left", self.left), ("right", self.right)):
            if side is None:
                continue
            if (
                isinstance(side, bool)
                or not isinstance(side, int | np.integer)
                or not 0 <= side < 2**31
            ):
                got = f"({self.left!r}, {self.right!r})"
                raise ValueError(
                    f"a window is (left, right), each an int from 0 to {2**31 - 1} or None; got "
                    f"{got}."
                )
            object.__setattr__(self, name, int(side))

    def interval(self, row, position):
        left, right = self._near
        return (
            0 if left is None else position - left,
            ResolvedMask.ALL if right is None else position + right + 1,
        )

    @property
    def _near(self) -> tuple[int | None, int | None]:
        return tuple(None if side is None else min(side, REACH) for side in (self.left, self.right))

    def mask_mod(self):
        left, right = self._near
        from_left = lambda q, k: True if left is None else k >= q - left
        return lambda b, h, q, k: jnp.logical_and(
            from_left(q, k), True if right is None else k <= q + right
        )


def Causal() -> Window:
    """A query sees the keys up to its own position."""
    return Window(None, 0)


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Positions are cut into chunks of `size`, and a query sees its own chunk; with Causal() only
    what comes before it there."""

    size: int

    def __post_init__(self):
        positive("a chunk's size", self.size)

    def interval(self, row, position):
        start = position // self.size * self.size
        return start, start + self.size

    def mask_mod(self):
        return lambda b, h, q, k: q // self.size == k // self.size


@dataclasses.dataclass(frozen=True)
class KeyLengths(Mask):
    """Only the first lengths[b] keys are seen; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}


@dataclasses.dataclass(frozen=True)
class KeyStarts(Mask):
    """Keys before starts[b] are not seen, as where prompts are padded on the left; starts is int32
    [B]."""

    starts: Any
    ARRAYS = {"starts": "B"}

    def interval(self, row, position):
        return self.starts[:, None], ResolvedMask.ALL


@dataclasses.dataclass(frozen=True)
class QueryLengths(Mask):
    """Only the first lengths[b] queries see anything; lengths is int32 [B]."""

    lengths: Any
    ARRAYS = {"lengths": "B"}


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, but every query also sees the first prefix[b] keys; prefix is int32 [B]."""

    prefix: Any
    ARRAYS = {"prefix": "B"}

    def interval(self, row, position):
        return 0, jnp.maximum(position + 1, self.prefix[:, None])


@dataclasses.dataclass(frozen=True, repr=False)
class BlockMask(Both):
    """A mask and the type of each block of queries and keys: empty, partial or full. A pytree."""

    def counts(self) -> dict[str, int]:
        """How many blocks are skipped, full and partial, over all batch rows and heads."""
        kind = np.asarray(self.second.block_types)
        of = dict(skipped=block_types.EMPTY, full=block_types.FULL, partial=block_types.PARTIAL)
        return {name: int(np.sum(kind == number)) for name, number in of.items()}

    def __repr__(self):
        of = self.second
        size = f"{of.queries} x {of.keys} in blocks of {of.block_size}"
        if isinstance(of.block_types, jax.core.Tracer):
            return f"BlockMask({self.first!r}, {size})"
        return (
            f"BlockMask({self.first!r}, {size}: "
            f"{', '.join(f'{n} {name}' for name, n in self.counts().items())})"
        )


def create_block_mask(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    block: int = 64,
    query_offset: int = 0,
    batch: int = 1,
    heads: int = 1,
) -> BlockMask:
    """The mask with a map of its blocks. Make it once, outside of layers, jit and scan, for all the
    calls that take it.

    These calls must have so many queries and keys, and this query_offset. `batch` and `heads` are
    needed where the mask depends on them. A call finds the block types of a MaskMod without arrays
    while it is traced, if there are not too many blocks.
    """
    whole = with_leaves(mask, map(_as_arrays, leaves(mask)))
    rows = {
        len(x)
        for part in leaves(whole)
        for name in part.ARRAYS
        if (x := getattr(part, name)) is not None
    }
    batch = max({batch, *rows})
    resolved_mask = resolve(conjuncts(whole), batch, queries, keys, query_offset)
    found = block_types.compute(resolved_mask, batch, heads, queries, block, block)
    rules, where = sum(isinstance(part, RULES) for part in conjuncts(whole)), resolved_mask.mask_mod
    asks = (False, False) if where is None else (where.mod.uses_batch, where.mod.uses_head)
    return BlockMask(mask, BlockTypes(found, rules, asks, queries, keys, block, query_offset))


def _as_arrays(part: Mask) -> Mask:
    arrays = {
        name: jnp.array(x, ndmin=len(c))
        for name, c in part.ARRAYS.items()
        if (x := getattr(part, name)) is not None
    }
    return dataclasses.replace(part, **arrays) if arrays else part


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a call, and the position that each of them is at."""

    shape: tuple[Any, Any]  # (B, T)
    row: Any  # int32 [1, T]
    offset: IntLike  # int or int32 [B], as the call has it
    apart: Any = None  # int32 [B, T], the positions where no offset says them

    @property
    def position(self):
        near = within_reach(self.offset)
        return (
            self.row + (near if isinstance(near, int) else near[:, None])
            if self.apart is None
            else self.apart
        )


def resolve(
    masks: list[Mask], batch: int, queries: int, keys: int, offset: IntLike
) -> ResolvedMask:
    """One ResolvedMask for all of `masks`, with the largest start and the smallest stop. `offset`
    is an int or int32 [B]."""
    row, apart = jnp.arange(queries, dtype=jnp.int32)[None], _apart(masks, offset)
    return _resolved(
        masks,
        Rows((batch, queries), row, offset, None if apart is None else apart.position(row)),
        keys,
    )


def _resolved(masks: list[Mask], rows: Rows, keys: int) -> ResolvedMask:
    seen, left, right = ResolvedMask(keys), None, None
    where, known, position = [], [], rows.position
    for mask in masks:
        match mask:
            case MaskMod() | Either() | Not():
                where.append(mask)
            case BlockTypes():
                known.append(mask)
            case Window() if rows.apart is None:
                left, right = _least(left, mask.left), _least(right, mask.right)
            case KeyLengths(lengths):
                seen = dataclasses.replace(
                    seen, key_stop=_least(seen.key_stop, jnp.maximum(lengths, 0))
                )
            case QueryLengths(lengths):
                seen = dataclasses.replace(
                    seen, query_stop=_least(seen.query_stop, jnp.maximum(lengths, 0))
                )
            case Documents(query_ids, key_ids):
                if seen.query_ids is not None:
                    raise ValueError(
                        "one call takes one set of document ids; got several Documents masks or "
                        "segment ids."
                    )
                start, stop, contiguous = mask.runs()
                seen = _meet(seen, rows.shape, start, stop)
                seen = dataclasses.replace(
                    seen, contiguous=contiguous, query_ids=query_ids, key_ids=key_ids
                )
            case _:
                seen = _meet(seen, rows.shape, *_ends(mask, rows.row, position, rows.shape))
    if where:
        seen = dataclasses.replace(seen, mask_mod=_mask_mod(where, known, rows, keys))
    return _band(seen, rows.shape, rows.row, left, right, rows.offset)


def _apart(masks: list[Mask], offset: IntLike) -> Varlen | None:
    """The Varlen whose sequences each have an offset of their own, if there is one."""
    found = [
        part
        for mask in masks
        for part in leaves(mask)
        if isinstance(part, Varlen) and part.cu_seqlens_k is not None
    ]
    if len(found) > 1 or (found and not (isinstance(offset, int) and offset == 0)):
        raise ValueError(
            "Varlen with cu_seqlens_k says where each query is: no query_offset and no second one "
            "go with it."
        )
    return found[0] if found else None


def score_mod_offset(masks: list[Mask], offset: IntLike) -> IntLike:
    """The offset from a row to the position that a score_mod beside these masks is asked about."""
    if _apart(masks, 0) is not None:
        raise ValueError(
            "score_mod counts queries from one query_offset, and in Varlen with cu_seqlens_k each "
            "sequence has its own: they do "
            "not go together. With cu_seqlens_q alone they do."
        )
    return within_reach(offset)


def _mask_mod(where: list[Mask], known: list[BlockTypes], rows: Rows, keys: int) -> BoundMaskMod:
    """All of `where` as one mask_mod, with its block types, if they are known for just these."""
    found = block = None
    for of in known:
        made = of.queries, of.keys, of.offset
        asked = rows.shape[1], keys, rows.offset if isinstance(rows.offset, int) else "an array"
        if made != asked:
            of_what = "(T, S, query_offset)"
            raise ValueError(
                f"the block mask was made for {of_what} = {made}; the call's are "
                f"({', '.join(map(str, asked))})."
            )
        if of.rules == len(where):  # those of its own mask, which is always beside it
            found, block = of.block_types, of.block_size
    if rows.apart is None and all(isinstance(mask, MaskMod) for mask in where):
        one = functools.reduce(both, where)
    else:
        # the call's own hides keys that are not there
        resolved = lambda intervals: _resolved(intervals, rows, ResolvedMask.ALL)
        one = as_where(
            functools.reduce(Both, where), Place(within_reach(rows.offset), rows.apart), resolved
        )
    return BoundMaskMod(
        one.function, one.arrays, within_reach(rows.offset), one.batch, one.head, found, block
    )


def _ends(mask: Mask, row, position, shape):
    """mask.interval, as int32 [B, T] from 0 to ResolvedMask.ALL."""
    name, ends = f"{type(mask).__name__}.interval()", mask.interval(row, position)
    if not (isinstance(ends, tuple | list) and len(ends) == 2):
        raise TypeError(f"{name} must return (start, stop); got {type(ends).__name__}.")
    for end in (x if hasattr(x, "dtype") else np.asarray(x) for x in ends):
        if not jnp.issubdtype(end.dtype, jnp.integer):
            raise TypeError(
                f"{name} must return integers, the keys [start, stop) of each query; got "
                f"{end.dtype}."
            )
        if len(end.shape) > 2 or any(
            n not in (1, m) for n, m in zip(end.shape[::-1], shape[::-1], strict=False)
        ):
            raise ValueError(
                f"{name} must return what broadcasts to [B, T] = {shape}; got {end.shape}."
            )
        end = end.astype(np.int32) if np.can_cast(end.dtype, np.int32) else end  # int8 holds no ALL
        yield end.clip(0, ResolvedMask.ALL).astype(np.int32)


def _band(
    seen: ResolvedMask, shape, row, left: int | None, right: int | None, offset: IntLike
) -> ResolvedMask:
    """Of the keys that are seen, those from position - left to position + right."""
    if left is None and right is None:
        return seen
    if isinstance(offset, int):
        near = _clip(offset, -REACH, REACH)
        left = None if left is None else near - _clip(offset - left, -REACH, REACH)
        right = None if right is None else _clip(offset + right, -REACH, REACH) - near
        return dataclasses.replace(seen, offset=near, left=left, right=right)
    if max(left or 0, right or 0) > REACH:  # the offset may be as far away: the ends of each row
        from_ = lambda at: row + (_clip(offset, at - REACH, at + REACH) - at)[:, None]
        start, stop = (
            0 if left is None else from_(left),
            ResolvedMask.ALL if right is None else from_(-right) + 1,
        )
        return _meet(seen, shape, start, stop)
    near = _clip(offset, -REACH - (right or 0), REACH + (left or 0))
    return dataclasses.replace(seen, offset=near, left=left, right=right)


def within_reach(offset: IntLike) -> IntLike:
    """The offset from a row to its position."""
    return _clip(offset, -REACH, REACH)


def _clip(x: IntLike, low: int, high: int) -> IntLike:
    if isinstance(x, int):
        return min(max(x, low), high)
    return jnp.clip(x, max(low, -(2**31)), min(high, 2**31 - 1))


def _least(a, b):
    if a is None or b is None:
        return b if a is None else a
    return smaller(a, b)


def _meet(seen: ResolvedMask, shape, start: IntLike, stop: IntLike) -> ResolvedMask:
    start, stop = (jnp.broadcast_to(jnp.asarray(end, jnp.int32), shape) for end in (start, stop))
    if seen.start is not None:
        start, stop = jnp.maximum(start, seen.start), jnp.minimum(stop, seen.stop)
    return dataclasses.replace(seen, start=start, stop=stop)


for _cls in (BlockMask, Window, Chunked, KeyLengths, KeyStarts, QueryLengths, PrefixLM):
    register(_cls)
