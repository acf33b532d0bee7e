"""The arrays of a call that devices share: in canonical form, each with its path in the call and a
letter for each axis."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import checks, dropout, masks, scores
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem import arguments
from pallas_flash.problem.call import AXES, Call, is_data

OPERAND_AXES = AXES | dict(seeds="BN")  # the fields of arguments.Operands
# the fields of a score_mod; the arrays that it captures are whole on each device
SCORE_AXES = {"batch": "B", "head": "N"}


def canonicalize(call: Call) -> Call:
    """The call with matching query, key and value, arrays that jax takes without loss, scalars
    broadcast to heads or rows, and in place of the dropout key the seeds of all batch rows and
    heads."""
    query, key, value = arguments.arrays(call)
    dropout_rng = call.dropout_rng
    call = call.canonicalize().replace(query=query, key=key, value=value, dropout_rng=None)
    lead, N = query.shape[:-3], query.shape[-2]
    each = {}
    for name, shape in dict(scale=(N,), query_offset=lead).items():
        x = getattr(call, name)
        if isinstance(x, jax.Array) and x.size == 1:
            each[name] = jnp.broadcast_to(jnp.reshape(x, ()), shape)
    if dropout.dropped(call.dropout_rate):
        each["dropout_seeds"] = dropout.seeds(dropout_rng, *lead, N)
    if call.score_mod is not None:
        score_mod = scores.fitting(call.score_mod, N, (*lead, key.shape[-3]))
        score = BoundScoreMod.bind(score_mod, checks.sums(query.dtype))
        each["score_mod"] = score.with_indices(lead, N)
    if isinstance(call.mask, masks.Mask):
        # with a context, the call may have this device's rows alone
        tokens = (query.shape[-3], key.shape[-3]) if call.context is None else None
        each_part = masks.leaves(call.mask)
        new = (part.for_mesh(lead, N, key.shape[-2]).canonical(tokens) for part in each_part)
        each["mask"] = masks.with_leaves(call.mask, new)
    return call.replace(**each)


def collect_arrays(call: Call) -> dict[tuple, Any]:
    """The arrays of a call by their paths: (name,), ("mask", index of the leaf, field) or
    ("score_mod", field). A captured array has its number in place of a field."""
    arrays = {
        (name,): x
        for name, x in call.arguments().items()
        if name in AXES and not isinstance(x, masks.Mask)
    }
    for index, part in enumerate(_mask_parts(call)):
        arrays |= {("mask", index, field): getattr(part, field) for field in part.ARRAYS}
        captured = part.arrays if isinstance(part, masks.MaskMod) else ()
        arrays |= {("mask", index, n): x for n, x in enumerate(captured)}
    if isinstance(score := call.score_mod, BoundScoreMod):
        arrays |= {("score_mod", name): getattr(score, name) for name in SCORE_AXES}
        arrays |= {("score_mod", n): x for n, x in enumerate(score.arrays)}
    return {path: x for path, x in arrays.items() if x is not None and is_data(x)}


def _mask_parts(call: Call) -> list[masks.Mask]:
    return list(masks.leaves(call.mask)) if isinstance(call.mask, masks.Mask) else []


def array_axes(path, call: Call) -> str:
    """A letter for each axis of the array at a path of `collect_arrays`; the last ones if it has
    fewer axes."""
    if path[0] == "score_mod":
        return SCORE_AXES.get(path[1], "")
    if len(path) == 1:
        return call.axes(path[0])
    return _mask_parts(call)[path[1]].ARRAYS.get(path[2], "")


def with_arrays(call: Call, arrays: dict[tuple, Any]) -> Call:
    """The call with these arrays at the paths of `collect_arrays`."""
    new, parts, score = {}, _mask_parts(call), call.score_mod
    for path, x in arrays.items():
        if len(path) == 1:
            new[path[0]] = x
        elif path[0] == "score_mod":
            score = _replaced(score, path[1], x)
        else:
            parts[path[1]] = _replaced(parts[path[1]], path[2], x)
    if parts:
        new["mask"] = masks.with_leaves(call.mask, iter(parts))
    return call.replace(**new, score_mod=score)


def _replaced(rule, name: str | int, x):
    """A leaf of a mask, or a score_mod, with another array in a field, or at a number among the
    arrays that it captures."""
    if isinstance(name, str):
        return dataclasses.replace(rule, **{name: x})
    return dataclasses.replace(rule, arrays=(*rule.arrays[:name], x, *rule.arrays[name + 1 :]))


def operand_axes(problem: arguments.Problem, operands: arguments.Operands) -> arguments.Operands:
    """The operands with the letters of its axes in place of each array."""
    full = dict(B=problem.batch, N=problem.heads, K=problem.kv_heads)
    axes_of = lambda x, letters: "".join(
        c if n == full.get(c, n) else "."
        for c, n in zip(letters.ljust(x.ndim, "."), x.shape, strict=True)
    )
    resolved_mask = operands.resolved_mask.by_letters(axes_of, problem.heads)

    def mod_axes(mod):
        fields = dict(batch="B", head="N", block_types="BN", offset="B")
        given = {name: getattr(mod, name, None) for name in fields}
        axes = {name: axes_of(x, fields[name]) for name, x in given.items() if hasattr(x, "ndim")}
        return dataclasses.replace(mod, arrays=tuple(axes_of(x, "") for x in mod.arrays), **axes)

    arrays = {name: x for name, x in operands._asdict().items() if hasattr(x, "ndim")}
    axes = {name: axes_of(x, OPERAND_AXES[name]) for name, x in arrays.items()}
    return _map_mods(mod_axes, operands._replace(resolved_mask=resolved_mask, **axes))


def _map_mods(f: Callable, operands: arguments.Operands) -> arguments.Operands:
    """The operands with f(bound) in place of their bound mask_mod and score_mod."""
    resolved_mask, score = operands.resolved_mask, operands.score
    if resolved_mask.mask_mod is not None:
        resolved_mask = dataclasses.replace(resolved_mask, mask_mod=f(resolved_mask.mask_mod))
    score = None if score is None else f(score)
    return operands._replace(resolved_mask=resolved_mask, score=score)


def with_indices(operands: arguments.Operands, **indices: jax.Array) -> arguments.Operands:
    """The operands with the indices of batch rows or heads in the mods that use and lack them."""

    def indexed(bound):
        lacks = lambda name: getattr(bound, name) is None and getattr(bound.mod, f"uses_{name}")
        return dataclasses.replace(bound, **{k: x for k, x in indices.items() if lacks(k)})

    return _map_mods(indexed, operands)


def rows_axes(axes: arguments.Operands, rows: tuple) -> tuple:
    """The axes of what a pass takes beside the operands: a tangent has the axes of its primal,
    other arrays have `row_axes`."""
    is_none = lambda x: x is None

    def axes_of(x):
        if isinstance(x, arguments.Gradients):
            like_primal = lambda dx, letters: None if dx is None else letters
            return jax.tree.map(like_primal, x, axes.differentiable, is_leaf=is_none)
        return jax.tree.map(lambda a: row_axes(a.ndim), x)

    return tuple(map(axes_of, rows))


def row_axes(ndim: int) -> str:
    """The axes of o or do, [B, T, N, H], or of statistics, [B, N, T]."""
    return "BTNH" if ndim == 4 else "BNT"
