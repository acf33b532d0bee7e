"""Masks as the mask_mod of a call: those that | and ~ join are an expression whose leaves read
their arrays by row and by key, and lists of blocks are a table of these blocks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.masks import block_types
from pallas_flash.masks.key_lists import ListTable
from pallas_flash.masks.mask import And, Mask, MaskMod, Not, Or, conjuncts, split
from pallas_flash.masks.resolved_mask import ResolvedMask
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
    lists, others = ListTable.of(mask.lists, heads), mask.mask_mod
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
