"""Resolves the masks of a call into one `ResolvedMask`.

Masks that are no intervals become a mask_mod. Masks that | and ~ join become an expression whose
leaves read their arrays by row and by key, and lists of blocks, for what reads no lists, a table.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike, is_data
from pallas_flash.masks import block_types
from pallas_flash.masks.key_lists import KeyLists, ListTable
from pallas_flash.masks.mask import (
    And,
    BlockTypes,
    Mask,
    MaskMod,
    Not,
    Or,
    both,
    conjuncts,
    leaves,
    split,
    with_leaves,
)
from pallas_flash.masks.resolved_mask import LEAST_TABLE, REACH, ResolvedLists, ResolvedMask, clip
from pallas_flash.mods.bound import BoundMaskMod
from pallas_flash.mods.traced import INDEX, TracedMod, any_mesh

BLOCK = 64  # queries and keys of a block of lists whose type is told


@pytrees.dataclass
class Place:
    """Maps the q_idx of a mask_mod to its row, and to its position if a mask defines positions."""

    offset: IntLike  # int or int32 [B]
    positions: Any  # int32 [B, T]


def as_mask_mod(mask: Mask, place: Place, resolve: Callable) -> MaskMod:
    """The mask as a MaskMod that counts batch rows and heads of this call from 0. `resolve` makes a
    ResolvedMask of intervals."""
    arrays, tree = jax.tree.flatten((place, _expression(mask, resolve)))
    shapes, name = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays), mask.in_words()
    return MaskMod(_traced(tree, shapes, name), name, arrays=tuple(arrays))


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once for calls that are alike
def with_table(mask: ResolvedMask, heads: int, queries: int) -> ResolvedMask:
    """The mask of so many heads and queries, with a table of blocks in place of its lists."""
    lists, others = ListTable.from_lists(mask.lists, heads), mask.mask_mod
    parts: list[Mask] = [lists]
    if others is not None:
        parts.append(
            MaskMod(
                others.mod,
                others.mod.name,
                arrays=others.arrays,
                batch=others.batch,
                head=others.head,
            )
        )
    joined, offset = functools.reduce(And, parts), 0 if others is None else others.offset
    one = as_mask_mod(joined, Place(offset, None), lambda _: None)
    bound = BoundMaskMod(one.function, one.arrays, offset, None, None)
    if isinstance(queries, int) and isinstance(mask.keys, int):  # else symbols of jax.export
        types = mask.lists.block_types(lists.table, queries, BLOCK)
        if 1 < types.shape[1] < heads:
            types = jnp.repeat(types, lists.group, axis=1)
        if others is not None:  # they may hide pairs of any block
            types = jnp.minimum(types, block_types.PARTIAL)
        bound = dataclasses.replace(bound, block_types=types, block_size=BLOCK)
    return dataclasses.replace(mask, lists=None, mask_mod=bound)


def _expression(mask: Mask, resolve: Callable):
    """The mask as And, Or and Not of MaskMods and ResolvedMasks."""
    inner = lambda part: _expression(part, resolve)
    match mask:
        case Or(first, second):
            return Or(inner(first), inner(second))
        case Not(inside):
            return Not(inner(inside))
        case MaskMod() | ListTable():
            return mask
    intervals, others = split(conjuncts(mask))
    parts = list(map(inner, others))
    if intervals:
        parts.append(dataclasses.replace(resolve(intervals), contiguous=None))
    return functools.reduce(And, parts)


@functools.lru_cache(256)
def _traced(tree, shapes, name: str) -> TracedMod:
    """Traces the Place and expression that as_mask_mod flattened."""

    def visible(arrays, *at):
        place, expression = jax.tree.unflatten(tree, arrays)
        return _visible(expression, place, *at)

    with any_mesh():
        program = jax.make_jaxpr(visible)(shapes, *[INDEX] * 4)
    return TracedMod(program.jaxpr, len(shapes), name)


def _visible(expression, place: Place, b, h, q, k):
    """Whether the query at position q sees key k."""
    visible = lambda inside: _visible(inside, place, b, h, q, k)
    offset = place.offset if isinstance(place.offset, int) else _at(place.offset, b)
    row = q if isinstance(offset, int) and offset == 0 else q - offset
    match expression:
        case And(first, second):
            return visible(first) & visible(second)
        case Or(first, second):
            return visible(first) | visible(second)
        case Not(inside):
            return ~visible(inside)
        case MaskMod(function, arrays=arrays, batch=batch, head=head):
            b, h = (n if known is None else _at(known, n) for known, n in ((batch, b), (head, h)))
            q = q if place.positions is None else _at(place.positions, b, row)
            return function(arrays, b, h, q, k)
        case ListTable():
            return expression.visible(b, h, row, k)
    mask = expression.narrow(ResolvedMask.BY_BATCH, lambda x: _at(x, b))
    mask = mask.narrow(ResolvedMask.BY_QUERY, lambda x: _at(x, b, row))
    mask = mask.narrow(ResolvedMask.BY_KEY, lambda x: _at(x, b, k))
    return mask.visible(*mask.interval(row), k, mask.query_ids, mask.key_ids)


def _at(x, *index):
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class QueryRows:
    """The rows of a call, and their key positions."""

    shape: tuple[Any, Any]  # (B, T)
    offset: IntLike  # int or int32 [B], as the call has it
    positions: Any = None  # int32 [B, T], if a mask defines them in place of the offset

    @functools.cached_property
    def row(self):
        """int32 [1, T]"""
        return _rows(self.shape[1])

    @property
    def position(self):
        if self.positions is not None:
            return self.positions
        near = within_reach(self.offset)
        return self.row + (near if isinstance(near, int) else near[:, None])

    def interval_of(self, mask: Mask):
        """The mask's intervals for these rows: int32 that broadcast to [B, T], from 0 to
        ResolvedMask.ALL."""
        name, ends = f"{type(mask).__name__}.interval()", mask.interval(self.row, self.position)
        if not (isinstance(ends, tuple | list) and len(ends) == 2):
            raise TypeError(f"{name} must return (start, stop); got {type(ends).__name__}.")
        no_limit = (0, ResolvedMask.ALL)
        ends = (x if x is not None else end for x, end in zip(ends, no_limit, strict=True))
        return [self._checked(name, x if hasattr(x, "dtype") else np.asarray(x)) for x in ends]

    def _checked(self, name: str, end):
        if not jnp.issubdtype(end.dtype, jnp.integer):
            raise TypeError(
                f"{name} must return integers, the keys [start, stop) of each query; got "
                f"{end.dtype}."
            )
        sizes = zip(end.shape[::-1], self.shape[::-1], strict=False)
        if len(end.shape) > 2 or any(n not in (1, m) for n, m in sizes):
            raise ValueError(
                f"{name} must return what broadcasts to [B, T] = {self.shape}; got {end.shape}."
            )
        end = end.astype(np.int32) if np.can_cast(end.dtype, np.int32) else end  # int8 holds no ALL
        return end.clip(0, ResolvedMask.ALL).astype(np.int32)


def resolve(
    masks: list[Mask], batch: int, queries: int, keys: int, offset: IntLike
) -> ResolvedMask:
    """One ResolvedMask for all of `masks`, with the largest start and the smallest stop. `offset`
    is an int or int32 [B]."""
    positions = positions_of(masks, queries, offset)
    return _resolve(masks, QueryRows((batch, queries), offset, positions), keys)


def _resolve(masks: list[Mask], rows: QueryRows, keys: int) -> ResolvedMask:
    resolved, left, right = ResolvedMask(keys), None, None
    intervals, mods = split(masks)
    for mask in intervals:
        band = mask.band() if rows.positions is None else None
        if band is not None:
            left, right = map(_least, (left, right), band)
        if band is None or any(map(is_data, band)):
            resolved = mask.narrow(resolved, rows)
    lists, mods = split_lists(mods)
    if lists:
        first, *others = (mask.resolve(keys) for mask in lists)
        joined = functools.reduce(ResolvedLists.within, others, first)
        resolved = dataclasses.replace(resolved, lists=joined)
    mods = [_with_tables(mask, keys) for mask in mods]
    if mods:
        types = [mask for mask in masks if isinstance(mask, BlockTypes)]
        resolved = dataclasses.replace(resolved, mask_mod=_mask_mod(mods, types, rows, keys))
    return resolved.with_band(rows, left, right)


def split_lists(mods: list[Mask]) -> tuple[list[KeyLists], list[Mask]]:
    """The lists whose keys may be gathered, and the masks that become a mask_mod beside them."""
    lists = [mask for mask in mods if isinstance(mask, KeyLists)]
    # lists without a table cannot be in a mask_mod
    lists = [mask for mask in lists if not mask.has_table] or lists[:1]
    sizes = sorted({(mask.block, mask.query_block) for mask in lists})
    if len(sizes) > 1:
        raise TypeError(
            "& joins KeyLists of equal block and query_block, or with block * query_block >= "
            f"{LEAST_TABLE}; got (block, query_block) = {', '.join(map(str, sizes))}."
        )
    return lists, [mask for mask in mods if not any(mask is x for x in lists)]


def _with_tables(mask: Mask, keys: int) -> Mask:
    """The mask with tables in place of its lists."""
    as_table = lambda x: x.as_table(keys) if isinstance(x, KeyLists) else x
    return with_leaves(mask, map(as_table, leaves(mask)))


def _least(a: int | None, b: IntLike | None) -> int | None:
    """The smallest int of the two, if there is one."""
    return min((x for x in (a, b) if isinstance(x, int)), default=None)


def _rows(queries: int):
    return jnp.arange(queries, dtype=jnp.int32)[None]


def positions_of(masks: list[Mask], queries: int, offset: IntLike):
    """The key positions [B, T] of the queries if one of the masks defines them; None: each has its
    own index + offset."""
    defining = [part for mask in masks for part in leaves(mask) if part.has_positions]
    if len(defining) > 1 or (defining and not (isinstance(offset, int) and offset == 0)):
        raise ValueError(
            "Varlen with cu_seqlens_k already fixes query positions; it cannot be combined with "
            "query_offset or another Varlen with cu_seqlens_k."
        )
    return defining[0].positions(_rows(queries)) if defining else None


def _mask_mod(
    mods: list[Mask], types: list[BlockTypes], rows: QueryRows, keys: int
) -> BoundMaskMod:
    """All of `mods` as one mask_mod, with its block types if they are known for exactly these."""
    block_types = block_size = None
    for known in types:
        made = known.queries, known.keys, known.offset
        call = rows.shape[1], keys, rows.offset if isinstance(rows.offset, int) else "an array"
        if made != call:
            raise ValueError(
                f"the block mask was made for (T, S, query_offset) = {made}; the call's are "
                f"({', '.join(map(str, call))})."
            )
        if known.count == len(mods):  # of its own mask alone, which is always among them
            block_types, block_size = known.block_types, known.block_size
    offset = within_reach(rows.offset)
    if rows.positions is None and all(isinstance(mask, MaskMod) for mask in mods):
        one = functools.reduce(both, mods)
    else:
        # keys that do not exist are hidden by the call's mask
        resolve_part = lambda intervals: _resolve(intervals, rows, ResolvedMask.ALL)
        one = as_mask_mod(functools.reduce(And, mods), Place(offset, rows.positions), resolve_part)
    bound = one.function, one.arrays, offset, one.batch, one.head
    return BoundMaskMod(*bound, block_types, block_size)


def within_reach(offset: IntLike) -> IntLike:
    """The offset from a row to its position, within REACH."""
    return clip(offset, -REACH, REACH)
