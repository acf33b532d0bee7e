"""What is asked: checks a user's arguments and brings them into one form, a `Problem` and its `Operands`.

Every error that a user can cause is raised here, before anything is traced into a kernel.
"""

import dataclasses
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks
from pallas_flash.masks import Visibility

DTYPES = ("float32", "bfloat16", "float16")


class Operands(NamedTuple):
    """The arrays of a call, in the one form that the implementations take."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    bias: jax.Array | None  # [B | 1, N | 1, T | 1, S | 1], floating
    mask: jax.Array | None  # the same, bool
    visibility: Visibility  # with its int32 arrays


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is asked, without the data: hashable, so that compiled code can be kept by it."""

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
    visibility: Visibility  # with shapes in place of its arrays
    deterministic: bool  # the same bits each time, in the backward too

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.heads // self.kv_heads

    def __str__(self):
        p = self
        head = f"B={p.batch} T={p.queries} S={p.keys} N={p.heads} K={p.kv_heads} H={p.head_size} Hv={p.value_size} {p.dtype}"
        extras = [f"mask: {p.visibility}", f"scale {p.scale:.4g}"]
        extras += [f"soft cap {p.soft_cap:g}"] if p.soft_cap is not None else []
        extras += [f"bias {p.bias}"] if p.bias is not None else []
        extras += [f"dense mask {p.mask}"] if p.mask is not None else []
        extras += ["a backward in any order"] if not p.deterministic else []
        return ", ".join([head, *extras])


def normalise(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    query_offset,
    query_segment_ids,
    key_value_segment_ids,
    logits_soft_cap,
    sinks,
    dropout_rate,
    dropout_rng,
    deterministic,
) -> tuple[Problem, Operands]:
    """The arguments of `flash_attention` as a Problem and Operands; raises TypeError or ValueError on what does not fit."""
    _not_yet(
        sinks=sinks is not None,
        dropout_rate=not (isinstance(dropout_rate, int | float) and dropout_rate == 0),
        dropout_rng=dropout_rng is not None,
    )
    query, key, value = _arrays(query, key, value)
    lead, (T, N, H) = query.shape[:-3], query.shape[-3:]
    (S, K, Hv), B = value.shape[-3:], math.prod(query.shape[:-3])
    sizes = _Sizes(lead, dict(B=B, T=T, S=S, N=N))

    rules: list[masks.Mask] = [masks.Causal()] if _flag("is_causal", is_causal) else []
    if local_window_size is not None:
        rules.append(_window(local_window_size))
    if query_seq_lengths is not None:
        rules.append(masks.QueryLengths(sizes.ints("query_seq_lengths", query_seq_lengths, "B")))
    if key_value_seq_lengths is not None:
        rules.append(masks.KeyLengths(sizes.ints("key_value_seq_lengths", key_value_seq_lengths, "B")))
    rules += _documents(sizes, query_segment_ids, key_value_segment_ids, T == S)
    if isinstance(mask, masks.Mask):
        rules += [_with_arrays(sizes, part) for part in masks.parts(mask)]
        mask = None
    offset = sizes.offset(query_offset)
    bias, mask = sizes.dense("bias", bias), sizes.dense("mask", mask)

    flat = lambda x: x.reshape(B, *x.shape[-3:])
    operands = Operands(flat(query), flat(key), flat(value), bias, mask, masks.resolve(rules, B, T, S, offset))
    problem = Problem(
        *(B, T, S, N, K, H, Hv),
        dtype=str(query.dtype),
        scale=_number("scale", scale, H**-0.5 if H else 1.0),
        soft_cap=_number("logits_soft_cap", logits_soft_cap, None, positive=True),
        bias=None if bias is None else bias.shape,
        mask=None if mask is None else mask.shape,
        visibility=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands.visibility),
        deterministic=_flag("deterministic", deterministic),
    )
    return problem, operands


def _not_yet(**asked: bool):
    for name, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(f"{name} is not implemented yet: leave it at its default.")


def _arrays(query, key, value):
    named = dict(query=query, key=key, value=value)
    for name, x in named.items():
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array; got {type(x).__name__}.")
        if str(x.dtype) not in DTYPES:
            raise TypeError(f"{name} must be {', '.join(DTYPES)}; got {x.dtype}. Cast it with {name}.astype(...).")
        if x.dtype != query.dtype:
            raise TypeError(f"query, key and value must have one dtype; got query {query.dtype} and {name} {x.dtype}.")
        if len(x.shape) < 3 or len(x.shape) != len(query.shape):
            raise ValueError(
                f"{name} must be [..., length, heads, head size] with as many axes as query, at least 3; "
                f"got {name} {x.shape} and query {query.shape}."
            )
    lead, (N, H), (S, K) = query.shape[:-3], query.shape[-2:], key.shape[-3:-1]
    show = lambda *tail: "(" + ", ".join(map(str, (*lead, *tail))) + ")"
    if key.shape[:-3] != lead or key.shape[-1] != H:
        raise ValueError(f"key must be {show('S', 'K', H)} to match query {query.shape}; got {key.shape}.")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value must be {show(S, K, 'Hv')} to match key {key.shape}; got {value.shape}.")
    if K == 0 or N % K:
        raise ValueError(
            f"the query heads must be a multiple of the key/value heads, each serving N / K of them; got N = {N}, K = {K}."
        )
    return tuple(jnp.asarray(x) for x in named.values())


class _Sizes(NamedTuple):
    """The sizes that further arrays must have: the leading axes of query, and the letters of features."""

    lead: tuple[int, ...]
    of: dict[str, int]

    def ints(self, name: str, x, letters: str):
        """x as an int32 array of the shape that `letters` spell; the leading axes of query stand for B."""
        x = _int_array(name, x)
        shape = self.lead + tuple(self.of[c] for c in letters[1:])
        if x.shape != shape:
            raise ValueError(f"{name} must be int32 [{', '.join(letters)}] = {shape}; got {x.shape}.")
        return x.reshape(self.of["B"], *shape[len(self.lead) :])

    def offset(self, x):
        """query_offset as an int, or as int32 [B]."""
        try:
            return operator.index(x)
        except TypeError:
            x = _int_array("query_offset", x)
        x = jnp.broadcast_to(x, self.lead) if x.shape == () else x
        return self.ints("query_offset", x, "B")

    def dense(self, name: str, x):
        """A bias or mask as [B | 1, N | 1, T | 1, S | 1]; axes of size 1 stay so, since the kernels sum or repeat over them."""
        if x is None:
            return None
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"{name} must be an array{' or a pallas_flash.masks object' * (name == 'mask')}; got {type(x).__name__}."
            )
        full = (*self.lead, *(self.of[c] for c in "NTS"))
        try:
            fits = np.broadcast_shapes(x.shape, full) == full
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{name} must be broadcastable to [..., N, T, S] = {full}; got {x.shape}.")
        x = jnp.asarray(x)
        if name == "mask":
            if not (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.floating)):
                raise TypeError(f"mask must be bool (True: attend) or floating (non-zero: attend); got {x.dtype}.")
            x = x.astype(bool)
        elif not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"bias must be floating, it is added to the logits; got {x.dtype}. A bool array goes to mask.")
        x = x.reshape((1,) * (len(full) - x.ndim) + x.shape)
        lead = x.shape[:-3]
        if any(n != 1 for n in lead) and lead != self.lead:  # some leading axes broadcast, some do not
            x = jnp.broadcast_to(x, self.lead + x.shape[-3:])
        return x.reshape(-1 if x.size else math.prod(x.shape[:-3]), *x.shape[-3:])


def _int_array(name, x):
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers; got {x.dtype}.")
    return jnp.asarray(x).astype(jnp.int32)


def _flag(name, x) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, known while tracing; got {type(x).__name__}.")
    return bool(x)


def _number(name, x, default, positive=False):
    if x is None:
        return default
    try:
        x = float(x)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(f"{name} must be a number known while tracing; got {type(x).__name__}.") from None
    if not math.isfinite(x) or (positive and x <= 0):
        raise ValueError(f"{name} must be a finite number{' above 0' if positive else ''}; got {x}.")
    return x


def _window(size) -> masks.Window:
    try:
        left, right = (size, size) if isinstance(size, int | np.integer) else size
        return masks.Window(left, right)
    except (TypeError, ValueError):
        raise ValueError(f"local_window_size must be an int or (left, right), ints >= 0; got {size!r}.") from None


def _documents(sizes, query_ids, key_ids, square) -> list[masks.Mask]:
    if query_ids is None and key_ids is None:
        return []
    if query_ids is None:
        raise ValueError("key_value_segment_ids needs query_segment_ids beside it.")
    query_ids = sizes.ints("query_segment_ids", query_ids, "BT")
    if key_ids is None:
        if not square:
            raise ValueError(
                f"query_segment_ids alone serves as many keys as queries; got T = {sizes.of['T']}, S = {sizes.of['S']}: "
                "give key_value_segment_ids too."
            )
        return [masks.Documents(query_ids, query_ids)]
    return [masks.Documents(query_ids, sizes.ints("key_value_segment_ids", key_ids, "BS"))]


def _with_arrays(sizes, part: masks.Mask) -> masks.Mask:
    name = type(part).__name__
    arrays = {}
    for field, letters in part.ARRAYS.items():
        x = getattr(part, field)
        if letters == "B" and isinstance(x, int):
            x = np.full(sizes.lead, x)
        arrays[field] = sizes.ints(f"{name}.{field}", x, letters)
    return dataclasses.replace(part, **arrays) if arrays else part


def problem_of(call: dict[str, Any]) -> Problem:
    """The Problem of a call of `normalise`, from arrays or from shapes; computes nothing."""
    leaves, tree = jax.tree.flatten(call)
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    problems = []

    def trace(arrays):
        arrays = iter(arrays)
        values = [next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)]
        problems.append(normalise(**jax.tree.unflatten(tree, values))[0])

    jax.eval_shape(trace, [x for x, a in zip(leaves, is_array, strict=True) if a])
    return problems[0]
