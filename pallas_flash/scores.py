"""Ready score_mods: what a model adds to its logits, or makes of them, before the softmax."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.jax_support import pytrees


class _ScoreMod:
    """A score_mod(score, b, h, q_idx, kv_idx) that prints itself; scalars are part of the program,
    arrays are data."""

    heads = None  # how many query heads it has values for, None: any

    @property
    def __name__(self):
        return repr(self)

    def __repr__(self):
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        shown = ", ".join(_shown(x) for x in values if x is not None)
        return f"{type(self).__name__}({shown})"


def fitting(score_mod: Any, heads: int, keys: tuple[Any, ...] | None = None) -> Any:
    """The score_mod as it is. Raises if it is one of this file with values for another number of
    heads, or with ids of other keys than [*B, S]: jax would clamp the index."""
    if not isinstance(score_mod, _ScoreMod):
        return score_mod
    if score_mod.heads not in (None, heads):
        raise ValueError(
            f"{score_mod!r} has values for {score_mod.heads} query heads; the call has N = {heads}."
        )
    ids = getattr(score_mod, "key_value_segment_ids", None)
    if ids is not None and keys is not None and _shape(ids) not in (keys, keys[-1:]):
        raise ValueError(
            f"key_value_segment_ids of Alibi must be [*B, S] = {keys}, or [S] for all batch rows; "
            f"got {_shape(ids)}."
        )
    return score_mod


def _check_ids(ids, sequences: int):
    """Raises where these are no integers, or known and no indices of sequences or of padding."""
    name = "Alibi.key_value_segment_ids"
    checks.like_array(name, ids)
    ids = jnp.asarray(ids) if _has_tracers(ids) else checks.integers(name, ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        checks.integers(name, ids)
    if checks.is_known(ids) and ids.size:
        first, last = int(ids.min()), int(ids.max())
        if first < 0 or last > sequences:
            raise ValueError(
                f"{name} must be from 0 to {sequences - 1}, the indices of the sequences that "
                f"slopes are of, or {sequences} for padding; got {first if first < 0 else last}."
            )


def _has_tracers(x) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def _shown(x) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)


def _as_tuples(x):
    """Lists as tuples, which compare and hash."""
    return tuple(map(_as_tuples, x)) if isinstance(x, list | tuple) else x


def _shape(x) -> tuple[int, ...]:
    """The shape, also of tuples that jax.jit filled with traced scalars."""
    return (len(x), *_shape(x[0])) if isinstance(x, tuple) and x else np.shape(x)


@unexpected.refused
@pytrees.dataclass(repr=False)
class Alibi(_ScoreMod):
    """Attention with linear biases (arXiv:2108.12409): score - slopes[h] * |q_idx - kv_idx|.

    slopes are [N], floats or an array, which may be learned. The paper's for N = 8 are 2^-1, 2^-2,
    ..., 2^-8.

    Each packed sequence may have other slopes: [sequences, N], with key_value_segment_ids, int32
    [*B, S] or [S], the index of each key's sequence, as `masks.Varlen.key_value_segment_ids` gives
    it. Padding has the index `sequences`; any other raises, unless it is traced. In pages S counts
    the keys of all pages that the table has for a row.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_flash import flash_attention, scores
      >>> q = k = v = jnp.ones((1, 20, 8, 16))
      >>> alibi = scores.Alibi(2.0 ** -jnp.arange(1.0, 9.0))
      >>> flash_attention(q, k, v, is_causal=True, score_mod=alibi).shape
      (1, 20, 8, 16)
    """

    slopes: Any
    key_value_segment_ids: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _as_tuples(getattr(self, field.name)))
        checks.like_array("Alibi.slopes", self.slopes)
        shape, has_ids = _shape(self.slopes), self.key_value_segment_ids is not None
        if len(shape) != 1 + has_ids:
            raise ValueError(
                "Alibi takes slopes [N], one for each query head, or [sequences, N] with "
                f"key_value_segment_ids; got {shape}{', with these' * has_ids}."
            )
        if has_ids:
            _check_ids(self.key_value_segment_ids, shape[0])

    @property
    def heads(self) -> int:
        return _shape(self.slopes)[-1]

    def __call__(self, score, b, h, q_idx, kv_idx):
        slopes = jnp.asarray(self.slopes)
        if self.key_value_segment_ids is not None:
            ids = jnp.asarray(self.key_value_segment_ids)
            rows = ids.reshape(-1, ids.shape[-1])
            slopes = slopes[rows[0 if ids.ndim == 1 else b, kv_idx]]
        return score - slopes[h].astype(score.dtype) * jnp.abs(q_idx - kv_idx).astype(score.dtype)


@unexpected.refused
@pytrees.dataclass(repr=False)
class T5Bias(_ScoreMod):
    """T5's relative position bias (arXiv:1910.10683): score + table[h, bucket of kv_idx - q_idx].

    Small distances have a bucket each. Larger ones share buckets, whose widths grow as a logarithm
    up to max_distance; all beyond it share one. `bidirectional`, as in an encoder, gives half of
    the buckets to keys on the right of the query; without it these keys are all in bucket 0.

    table: [N, buckets], or [buckets] for all heads; scalars, or an array, which may be learned.
    Transpose an embedding that is [buckets, N]. T5 has 32 buckets and no scale: call
    flash_attention(scale=1.0).
    """

    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self):
        object.__setattr__(self, "table", _as_tuples(self.table))
        checks.like_array("T5Bias.table", self.table)
        checks.flag("T5Bias.bidirectional", self.bidirectional)
        checks.count("T5Bias.max_distance", self.max_distance)
        shape = _shape(self.table)
        buckets = shape[-1] if shape else 0
        if (
            len(shape) not in (1, 2)
            or buckets < (4 if self.bidirectional else 2)
            or buckets % (1 + self.bidirectional)
        ):
            raise ValueError(
                "T5Bias takes a table [N, buckets] or [buckets], of an even number of buckets; "
                f"got {shape}."
            )
        if self.max_distance <= (exact := buckets // (1 + self.bidirectional) // 2):
            raise ValueError(
                f"max_distance must be above {exact}, how many distances have a bucket; got "
                f"{self.max_distance}."
            )

    @property
    def heads(self) -> int | None:
        return _shape(self.table)[0] if len(_shape(self.table)) == 2 else None

    def __call__(self, score, b, h, q_idx, kv_idx):
        table = jnp.asarray(self.table)
        bucket = self.bucket(kv_idx - q_idx)
        return score + (table[bucket] if table.ndim == 1 else table[h, bucket]).astype(score.dtype)

    def bucket(self, distance):
        """The bucket of a key that is `distance` positions to the right of the query."""
        buckets = _shape(self.table)[-1] // (1 + self.bidirectional)
        away = jnp.abs(distance) if self.bidirectional else jnp.maximum(-distance, 0)
        bucket = jnp.minimum(away, buckets // 2)
        # no logarithm, which GPUs round differently
        for first in _first_of_buckets(buckets, self.max_distance):
            bucket = bucket + (away >= first).astype(bucket.dtype)
        return jnp.where(distance > 0, bucket + buckets, bucket) if self.bidirectional else bucket


def _first_of_buckets(buckets: int, max_distance: int) -> list[int]:
    """The first distance of each bucket behind the first shared one, from T5's formula in
    float32."""
    exact = buckets // 2
    distance = np.arange(exact, max_distance + 1)
    steps = (
        np.log(distance.astype(np.float32) / exact)
        / math.log(max_distance / exact)
        * (buckets - exact)
    )
    number = np.minimum(exact + steps.astype(np.int32), buckets - 1)
    return [int(distance[np.argmax(number >= n)]) for n in range(exact + 1, buckets)]


@unexpected.refused
@pytrees.dataclass(repr=False)
class SoftCap(_ScoreMod):
    """cap * tanh(score / cap), as logits_soft_cap, to be used in your own score_mod. cap is a
    number or an array."""

    cap: Any

    def __post_init__(self):
        if not checks.is_array(self.cap):
            checks.number("SoftCap.cap", self.cap, None, positive=True, or_what=", or an array")
        if self.cap is None:
            raise TypeError("SoftCap.cap must be a static number, or an array; got NoneType.")

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.cap * jnp.tanh(score / self.cap)
