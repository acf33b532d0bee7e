"""Masks of which | and ~ make a rule in a call: an expression of what each shows, which reads its
arrays row by row and key by key."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_flash.masks.mask import Both, Either, Mask, MaskMod, Not, conjuncts, shown
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.traced import INDEX, TracedMod, any_mesh
from pallas_flash.pytrees import IntLike, register

RULES = MaskMod, Either, Not  # what is no interval


@dataclasses.dataclass(frozen=True)
class Place:
    """From the position that a rule is given to the row, and to the position where no offset says
    it."""

    near: IntLike  # int or int32 [B]
    apart: Any  # int32 [B, T]


def as_where(mask: Mask, place: Place, resolved: Callable) -> MaskMod:
    """The mask as a MaskMod that counts batch rows and heads of this call from 0. `resolved` makes
    a ResolvedMask of intervals."""
    arrays, tree = jax.tree.flatten((place, _expression(mask, resolved)))
    shapes, name = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays), shown(mask)
    return MaskMod(_rule(tree, shapes, name), name, tuple(arrays))


def _expression(mask: Mask, resolved: Callable):
    """The mask as Both, Either and Not of MaskMod and of ResolvedMask."""
    of = lambda part: _expression(part, resolved)
    match mask:
        case Either(first, second):
            return Either(of(first), of(second))
        case Not(inside):
            return Not(of(inside))
        case MaskMod():
            return mask
    found = [of(part) for part in conjuncts(mask) if isinstance(part, RULES)]
    if intervals := [part for part in conjuncts(mask) if not isinstance(part, RULES)]:
        found.append(dataclasses.replace(resolved(intervals), contiguous=None))
    return functools.reduce(Both, found)


@functools.lru_cache(256)
def _rule(tree, shapes, name: str) -> TracedMod:
    """The rule of what as_where has flattened."""

    def sees(arrays, *at):
        place, expression = jax.tree.unflatten(tree, arrays)
        return _sees(expression, place, *at)

    with any_mesh():
        program = jax.make_jaxpr(sees)(shapes, *[INDEX] * 4)
    return TracedMod(program.jaxpr, len(shapes), name)


def _sees(expression, place: Place, b, h, q, k):
    """Whether the query at position q sees key k."""
    sees = lambda inside: _sees(inside, place, b, h, q, k)
    near = place.near if isinstance(place.near, int) else _at(place.near, b)
    row = q if isinstance(near, int) and near == 0 else q - near
    match expression:
        case Both(first, second):
            return sees(first) & sees(second)
        case Either(first, second):
            return sees(first) | sees(second)
        case Not(inside):
            return ~sees(inside)
        case MaskMod(function, arrays=arrays, batch=batch, head=head):
            b, h = (n if known is None else _at(known, n) for known, n in ((batch, b), (head, h)))
            return function(arrays, b, h, q if place.apart is None else _at(place.apart, b, row), k)
    seen = expression.narrow(ResolvedMask.BY_BATCH, lambda x: _at(x, b)).narrow(
        ResolvedMask.BY_QUERY, lambda x: _at(x, b, row)
    )
    seen = seen.narrow(ResolvedMask.BY_KEY, lambda x: _at(x, b, k))
    return seen.visible(*seen.interval(row), k, seen.query_ids, seen.key_ids)


def _at(x, *index):
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


register(Place)
