"""The arrays of a call as devices share them: in exact form, by their place in the call, with a
letter for each axis."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import arguments, checks, dropout, masks, scores
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.score_mod import BoundScoreMod

AXES = {  # of the arrays of a call; P pages, C an axis that is whole on each device
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKH",
    "bias": "BNTS",
    "mask": "BNTS",
    "scale": "N",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_offset": "B",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
    "sinks": "N",
    "rows": "C",
    "dropout_seeds": "BNC",
    "k_pages": "PCKH",
    "v_pages": "PCKH",
    "k_scales": "PCK",
    "v_scales": "PCK",
    "page_table": "BC",
    "lengths": "B",
    "cu_seqlens_q": "C",
}
CACHE_AXES = AXES | dict(length="B", key_scale="BSK", value_scale="BSK", table="BC", users="P")
CACHE_AXES |= dict(count="B", cu_seqlens="C")  # beside a cache
# of a score_mod; the arrays that rules read are whole on each device
SCORE_AXES = {"batch": "B", "head": "N"}


def exact(call: dict[str, Any]) -> dict[str, Any]:
    """The call with query, key and value that fit each other, lists as arrays, and all integers as
    int32: before jax takes them, which would cut off what is wider. For the key of dropout it has
    the seeds of all batch rows and heads."""
    names, ids = ("query", "key", "value"), ("query_segment_ids", "key_value_segment_ids")
    call = call | dict(zip(names, arguments.arrays(*(call[name] for name in names)), strict=True))
    lead, N = call["query"].shape[:-3], call["query"].shape[-2]
    for name in ("bias", "mask", "scale", "sinks"):
        call[name] = jnp.asarray(call[name]) if isinstance(call[name], list) else call[name]
    for name in ("query_seq_lengths", "key_value_seq_lengths", "query_offset"):
        if call[name] is not None and not checks.is_int(call[name]):
            call[name] = checks.ints(name, call[name])
    for name, shape in dict(scale=(N,), query_offset=lead).items():
        # one for all is one for each, to spread over devices
        if isinstance(call[name], jax.Array) and call[name].size == 1:
            call[name] = jnp.broadcast_to(jnp.reshape(call[name], ()), shape)
    if dropout.dropped(checks.rate("dropout_rate", call["dropout_rate"])):
        call["dropout_seeds"] = dropout.seeds(call["dropout_rng"], *lead, N)
    call["dropout_rng"] = None
    if call["score_mod"] is not None:
        score = BoundScoreMod.bind(
            scores.fitting(call["score_mod"], N), checks.sums(call["query"].dtype)
        )
        call["score_mod"] = score.with_indices(lead, N)
    there = {name: call[name] for name in ids if call[name] is not None}
    call |= zip(there, checks.ids(there), strict=True)
    if isinstance(call["mask"], masks.Mask):
        numbered = lambda part: (
            part.with_indices(lead, N)
            if isinstance(part, masks.MaskMod | masks.BlockTypes)
            else part
        )
        exact = (arguments.exact_part(numbered(part)) for part in masks.leaves(call["mask"]))
        call["mask"] = masks.with_leaves(call["mask"], exact)
    return call


def arrays_of(call) -> dict[tuple, Any]:
    """The arrays of a call by where they are: (name,), or ("mask", number of the part, field)."""
    found = {
        (name,): call[name]
        for name in AXES
        if name in call and not isinstance(call[name], masks.Mask)
    }
    for number, part in (
        enumerate(masks.leaves(call["mask"])) if isinstance(call["mask"], masks.Mask) else ()
    ):
        found |= {("mask", number, field): getattr(part, field) for field in part.ARRAYS}
        found |= {
            ("mask", number, n): x
            for n, x in enumerate(part.arrays if isinstance(part, masks.MaskMod) else ())
        }
    if isinstance(score := call.get("score_mod"), BoundScoreMod):
        found |= {("score_mod", name): getattr(score, name) for name in SCORE_AXES}
        found |= {("score_mod", n): x for n, x in enumerate(score.arrays)}
    # NumPy's numbers stay outside: they are known while tracing
    return {
        path: x
        for path, x in found.items()
        if isinstance(x, jax.Array) or (hasattr(x, "dtype") and len(x.shape))
    }


def axes_of(path, call) -> str:
    """One for each axis of an array of `arrays_of`, the last ones if it may have fewer axes."""
    if path[0] == "score_mod":
        return SCORE_AXES.get(path[1], "")
    return (
        AXES[path[0]]
        if len(path) == 1
        else masks.leaves(call["mask"])[path[1]].ARRAYS.get(path[2], "")
    )


def with_arrays(call, arrays: dict[tuple, Any]) -> dict[str, Any]:
    """The call with other arrays where `arrays_of` found some."""
    call, rules = (
        dict(call),
        masks.leaves(call["mask"]) if isinstance(call["mask"], masks.Mask) else [],
    )
    for path, x in arrays.items():
        if len(path) == 1:
            call[path[0]] = x
        elif path[0] == "score_mod":
            call["score_mod"] = _replaced(call["score_mod"], path[1], x)
        else:
            rules[path[1]] = _replaced(rules[path[1]], path[2], x)
    return call | (dict(mask=masks.with_leaves(call["mask"], iter(rules))) if rules else {})


def _replaced(rule, name: str | int, x):
    """A part of a mask or a score_mod with another array: of a field, or with a number of those
    that it reads."""
    if isinstance(name, str):
        return dataclasses.replace(rule, **{name: x})
    return dataclasses.replace(rule, arrays=(*rule.arrays[:name], x, *rule.arrays[name + 1 :]))


def operand_axes(problem: arguments.Problem, operands: arguments.Operands) -> arguments.Operands:
    """The operands with a letter for each axis in place of each array."""
    full = dict(B=problem.batch, N=problem.heads, K=problem.kv_heads)
    of = lambda x, letters: "".join(
        c if n == full.get(c, n) else "."
        for c, n in zip(letters.ljust(x.ndim, "."), x.shape, strict=True)
    )
    resolved_mask = operands.resolved_mask
    for fields, letters in (
        (ResolvedMask.BY_BATCH, "B"),
        (ResolvedMask.BY_QUERY, "BT"),
        (ResolvedMask.BY_KEY, "BS"),
    ):
        resolved_mask = resolved_mask.narrow(fields, lambda x, letters=letters: of(x, letters))

    def of_rule(asked):
        if asked is None:
            return None
        by = dict(batch="B", head="N", block_types="BN", offset="B")
        known = {
            name: of(x, by[name]) for name in by if hasattr(x := getattr(asked, name, None), "ndim")
        }
        return dataclasses.replace(asked, arrays=tuple(of(x, "") for x in asked.arrays), **known)

    resolved_mask = dataclasses.replace(resolved_mask, mask_mod=of_rule(resolved_mask.mask_mod))
    there = {name: x for name, x in operands._asdict().items() if hasattr(x, "ndim")}
    there = {name: of(x, AXES.get(name, "BN")) for name, x in there.items()}
    return operands._replace(resolved_mask=resolved_mask, score=of_rule(operands.score), **there)


def row_axes(ndim: int) -> str:
    """The axes of o or do [B, T, N, H], or of what each row has one of, [B, N, T]."""
    return "BTNH" if ndim == 4 else "BNT"
