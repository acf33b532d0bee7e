"""Checks a user's arguments and brings them into one form, a `Problem` and its `Operands`.

Every error that a user can cause is raised here, before anything is traced into a kernel.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import checks, dropout, masks, scores
from pallas_flash.checks.sizes import HEADS_FIRST, Sizes
from pallas_flash.jax_support import options
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem.call import Call
from pallas_flash.problem.log_base import LogBase

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Gradients(NamedTuple):
    """The gradients of a call's operands, or the operands that have one. A backward omits sinks:
    autodiff.py computes their gradient of lse and delta."""

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    captured: tuple[jax.Array, ...] = ()  # the float arrays that a score_mod reads


class Operands(NamedTuple):
    """The arrays of a call, in the one form that the implementations take."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array | None  # [B, S, K, Hv]; None until `with_values`, where values are keys
    bias: jax.Array | None  # [B | 1, N | 1, T | 1, S | 1], floating
    sinks: jax.Array | None  # [N], in the dtype of sums
    mask: jax.Array | None  # as the bias, bool
    resolved_mask: ResolvedMask  # with its int32 arrays
    seeds: jax.Array | None = None  # uint32 [B, N, 2], of dropout
    score: BoundScoreMod | None = None  # with its arrays

    def with_values(self, problem: "Problem") -> "Operands":
        """The operands with values: a copy of the keys' first columns where there are none."""
        if self.value is not None:
            return self
        return self._replace(value=self.key[..., : problem.value_size])

    @property
    def differentiable(self) -> Gradients:
        """The operands that have a gradient."""
        captured = () if self.score is None else self.score.tables
        return Gradients(self.query, self.key, self.value, self.bias, self.sinks, captured)

    def with_differentiable(self, new: Gradients) -> "Operands":
        """The operands with `new` in place of the ones that have a gradient."""
        arrays = new._asdict()
        captured = arrays.pop("captured")
        score = None if self.score is None else self.score.with_tables(captured)
        return self._replace(**arrays, score=score)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of a call: hashable, so that it can be the key of compiled code."""

    batch: int  # B
    queries: int  # T
    keys: int  # S
    heads: int  # N
    kv_heads: int  # K
    head_size: int  # H
    value_size: int  # Hv
    dtype: str
    scale: float
    soft_cap: float | None
    bias: tuple[int, ...] | None  # shape
    mask: tuple[int, ...] | None  # shape
    resolved_mask: ResolvedMask  # with shapes in place of its arrays
    deterministic: bool  # bitwise, in the backward too
    sinks: bool = False  # whether each head has one more logit
    dropped: int = 0  # of 256 weights
    score: BoundScoreMod | None = None  # with shapes in place of its arrays
    max_logits: bool = False  # whether the largest logit of each row is returned
    values_are_keys: bool = False  # whether the values are the keys' first columns
    # whether no kernel relies on the order in which it begins products
    waits_for_reads: bool = False

    def for_part(self, x: Operands) -> "Problem":
        """The problem of operands with other batch rows and heads."""
        sizes = dict(batch=x.query.shape[0], heads=x.query.shape[2], kv_heads=x.key.shape[2])
        resolved_mask, score = shapes((x.resolved_mask, x.score))
        bias, mask = (None if a is None else a.shape for a in (x.bias, x.mask))
        return dataclasses.replace(
            self,
            **sizes,
            bias=bias,
            mask=mask,
            resolved_mask=resolved_mask,
            score=score,
            sinks=x.sinks is not None,
        )

    @functools.cached_property
    def with_table(self) -> "Problem":
        """The problem with a table of blocks in place of lists of keys."""
        to_table = lambda mask: masks.with_table(mask, self.heads, self.queries)
        mask = jax.eval_shape(to_table, self.resolved_mask)
        return dataclasses.replace(self, resolved_mask=mask)

    @property
    def without_lists(self) -> "Problem":
        """The problem without its lists of keys."""
        mask = dataclasses.replace(self.resolved_mask, lists=None)
        return dataclasses.replace(self, resolved_mask=mask)

    @property
    def scope(self) -> str:
        """The name of the call in a profile: "flash_attention causal T=1024 S=1024 H=128"."""
        mask = str(self.resolved_mask).replace("/", " ")  # which parts scopes
        mask += ", dense mask" if self.mask is not None else ""
        return f"flash_attention {mask} T={self.queries} S={self.keys} H={self.head_size}"

    @property
    def kept(self) -> float:
        """The fraction of the weights that dropout keeps."""
        return 1 - self.dropped / dropout.LEVELS

    @property
    def log_base(self) -> LogBase:
        """The log base of the kernels' scores."""
        return LogBase.TWO if self.bias is None and self.score is None else LogBase.E

    @property
    def with_top(self) -> bool:
        """Whether rows have a largest score beside the running maximum, which may be a sink."""
        return self.max_logits and self.sinks

    @property
    def statistics(self) -> int:
        """The number of fields of the SoftmaxState."""
        return 2 + self.with_top

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def is_static(self) -> bool:
        """Whether the sizes are ints: jax.export may have symbols in their place."""
        return all(isinstance(n, int) for n in (self.batch, self.queries, self.keys))

    def __str__(self):
        p = self
        head = (
            f"B={p.batch} T={p.queries} S={p.keys} N={p.heads} K={p.kv_heads} H={p.head_size} "
            f"Hv={p.value_size} {p.dtype}"
        )
        extras = [f"mask: {p.resolved_mask}", f"scale {p.scale:.4g}"]
        extras += [f"soft cap {p.soft_cap:g}"] if p.soft_cap is not None else []
        extras += [f"score_mod {p.score.mod}"] if p.score is not None else []
        extras += [f"bias {p.bias}"] if p.bias is not None else []
        extras += [f"dense mask {p.mask}"] if p.mask is not None else []
        extras += ["sinks"] if p.sinks else []
        extras += [f"dropout {1 - p.kept:.4g}"] if p.dropped else []
        extras += ["the largest logits"] if p.max_logits else []
        extras += ["values: the keys' first columns"] if p.values_are_keys else []
        return ", ".join([head, *extras])


def shapes(tree: Any) -> Any:
    """The tree with shapes in place of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def normalise(call: Call) -> tuple[Problem, Operands]:
    """A call as a Problem and Operands; raises TypeError or ValueError."""
    query, key, value = arrays(call)
    lead, (T, N, H) = query.shape[:-3], query.shape[-3:]
    (S, K), B = key.shape[-3:-1], math.prod(query.shape[:-3])
    Hv = call.value_size if value is None else value.shape[-1]
    sizes = Sizes(lead or (1,), dict(B=B, T=T, S=S, N=N, K=K))

    resolved_mask = visible(sizes, call) if call.resolved_mask is None else call.resolved_mask
    scale, factors = checks.scale(call.scale, H**-0.5 if H else 1.0, N)
    bias = sizes.dense("bias", call.bias, query.dtype)
    mask = sizes.dense("mask", None if isinstance(call.mask, masks.Mask) else call.mask, bool)

    flat = lambda x: x if len(lead) == 1 else x.reshape(B, *x.shape[-3:])
    sinks = call.sinks
    if sinks is not None:
        sinks = checks.sinks(sinks, N).astype(checks.sums(query.dtype))
    dropped, seeds = dropout.dropped(call.dropout_rate), None
    if dropped:
        seeds = call.dropout_seeds
        seeds = dropout.seeds(call.dropout_rng, *lead, N) if seeds is None else seeds
        seeds = seeds.reshape(B, N, 2)
    score = None if call.score_mod is None else bind_score_mod(sizes, call, query.dtype)
    deterministic = call.deterministic
    if deterministic is None:
        deterministic = options.determinism() is not None
    operands = Operands(
        query=_times(flat(query), factors, resolved_mask),
        key=flat(key),
        value=None if value is None else flat(value),
        bias=bias,
        sinks=sinks,
        mask=mask,
        resolved_mask=resolved_mask,
        seeds=seeds,
        score=score,
    )
    problem = Problem(
        batch=B,
        queries=T,
        keys=S,
        heads=N,
        kv_heads=K,
        head_size=H,
        value_size=Hv,
        dtype=str(query.dtype),
        scale=scale,
        soft_cap=call.logits_soft_cap,
        bias=None if bias is None else bias.shape,
        mask=None if mask is None else mask.shape,
        resolved_mask=shapes(resolved_mask),
        deterministic=deterministic,
        sinks=sinks is not None,
        dropped=dropped,
        score=shapes(score),
        max_logits=call.return_max_logits,
        values_are_keys=value is None,
    )
    return problem, operands


def with_table(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The problem and operands with a table of blocks in place of lists of keys."""
    mask = masks.with_table(operands.resolved_mask, problem.heads, problem.queries)
    problem = dataclasses.replace(problem, resolved_mask=shapes(mask))
    return problem, operands._replace(resolved_mask=mask)


def visible(sizes: Sizes, call: Call) -> ResolvedMask:
    """The conjunction of all masks but a dense one: the keys that queries see."""
    parts: list[masks.Mask] = [masks.Causal()] if call.is_causal else []
    if call.local_window_size is not None:
        parts.append(call.local_window_size)
    if call.query_seq_lengths is not None:
        lengths = sizes.ints("query_seq_lengths", call.query_seq_lengths, "B")
        parts.append(masks.QueryLengths(lengths))
    if call.key_value_seq_lengths is not None:
        lengths = sizes.ints("key_value_seq_lengths", call.key_value_seq_lengths, "B")
        parts.append(masks.KeyLengths(lengths))
    B, T, S = map(sizes.of.get, "BTS")
    parts += _documents(sizes, call.query_segment_ids, call.key_value_segment_ids, T == S)
    parts += _mask_parts(sizes, call)
    return masks.resolve(parts, B, T, S, sizes.offset(call.query_offset))


def bind_score_mod(sizes: Sizes, call: Call, dtype) -> BoundScoreMod:
    """The call's score_mod, bound to its batch rows, heads and positions."""
    offset = sizes.offset(call.query_offset)
    keys = (*sizes.lead, sizes.of["S"])
    score_mod = scores.fitting(call.score_mod, sizes.of["N"], keys)
    near = masks.within_reach(offset)
    score = BoundScoreMod.bind(score_mod, checks.sums(dtype), near, sizes.of["B"])
    positions = masks.positions_of(_mask_parts(sizes, call), sizes.of["T"], offset)
    return score if positions is None else score.with_positions(positions)


def _mask_parts(sizes: Sizes, call: Call) -> list[masks.Mask]:
    """The conjuncts of a mask object, with arrays of the call's sizes."""
    if not isinstance(call.mask, masks.Mask):
        return []
    tokens = sizes.of["T"], sizes.of["S"]
    whole = (part.canonical(tokens).fitting(sizes) for part in masks.leaves(call.mask))
    return masks.conjuncts(masks.with_leaves(call.mask, whole))


def arrays(call: Call):
    """query, key and value, with matching dtypes and shapes; the value is None where it is the
    keys' first columns."""
    query, key = checks.array("query", call.query), checks.array("key", call.key)
    named = dict(query=query, key=key)
    if not checks.values_are_keys(call.value_size, key, call.value):
        named["value"] = checks.array("value", call.value)
    value = named.get("value")
    for name, x in named.items():
        checks.one_of(DTYPES, name, x.dtype)
        if x.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one dtype; got query {query.dtype} and {name} "
                f"{x.dtype}."
            )
        if len(x.shape) < 3:
            raise ValueError(
                f"{name} must be [..., length, heads, head size], 3 axes or more; got {x.shape}."
            )
        if len(x.shape) != len(query.shape):
            raise ValueError(
                f"{name} must have as many axes as query {query.shape}; got {x.shape}."
            )
    lead, (N, H), (S, K) = query.shape[:-3], query.shape[-2:], key.shape[-3:-1]
    sizes = (N, K, H) if value is None else (N, K, H, value.shape[-1])
    if symbols := [str(n) for n in sizes if not isinstance(n, int)]:
        raise ValueError(
            "head counts and head sizes must be static; only batch and lengths may be symbolic "
            f"dimensions of jax.export; got {', '.join(symbols)}."
        )
    show = lambda *tail: "(" + ", ".join(map(str, (*lead, *tail))) + ")"
    if key.shape[:-3] != lead or key.shape[-1] != H:
        raise ValueError(
            f"key must be {show('S', 'K', H)} to match query {query.shape}; got {key.shape}."
            f"{_joined_heads(query.shape)}"
        )
    if value is not None and value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must be {show(S, K, 'Hv')} to match key {key.shape}; got {value.shape}."
        )
    if 0 in (N, K):
        raise ValueError(
            f"query must be {show('T', 'N', H)} and key {show('S', 'K', H)} with N and K from 1 "
            f"on; got {query.shape} and {key.shape}."
        )
    if N % K:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key/value heads; "
            f"got N = {N}, K = {K}."
            + HEADS_FIRST * _swapped(query.shape[-3], N, S, K)
            + _joined_heads(query.shape)
        )
    return query, key, value


def _joined_heads(shape: tuple[int, ...]) -> str:
    """A hint for a query of three axes, the last of which may be that of all heads."""
    return (
        f" A query {shape} is read as [T, N, H]; reshape [B, T, N * H] to [B, T, N, H]."
        if len(shape) == 3
        else ""
    )


def _swapped(T, N: int, S, K: int) -> bool:
    """Whether the axes of lengths and heads look swapped: T and S could be heads, fewer than N
    queries and K keys. In self-attention T % S says nothing."""
    are_static = isinstance(T, int) and isinstance(S, int)
    return are_static and 0 < S < K and T < N and T % S == 0


def _times(query, factors, resolved_mask: ResolvedMask):
    """The product of query [B, T, N, H] and factors [N], or one for all heads, rounded to query's
    dtype; factors None: query."""
    if factors is None:
        return query
    valid = resolved_mask.valid(jnp.arange(query.shape[1], dtype=jnp.int32))
    if valid is not None:  # there may be NaN, which would reach the gradient of the factors
        query = jnp.where(valid[:, :, None, None], query, 0)
    wide = checks.sums(query.dtype)
    return (query.astype(wide) * factors.astype(wide).reshape(1, 1, -1, 1)).astype(query.dtype)


def _documents(sizes, query_ids, key_ids, square) -> list[masks.Mask]:
    if query_ids is None and key_ids is None:
        return []
    if query_ids is None:
        raise ValueError("key_value_segment_ids needs query_segment_ids too.")
    if key_ids is None and not square:
        raise ValueError(
            f"query_segment_ids alone is enough only where T == S; got T = {sizes.of['T']}, S = "
            f"{sizes.of['S']}. Pass key_value_segment_ids too."
        )
    named = dict(
        query_segment_ids=query_ids, key_value_segment_ids=query_ids if key_ids is None else key_ids
    )
    return [masks.Documents(*map(sizes.ints, named, checks.ids(named), ("BT", "BS")))]
