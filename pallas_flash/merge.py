"""`merge_attention`: joins attention to parts of the keys into attention to all."""

from __future__ import annotations  # help() shows annotations as they stand here

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_flash import checks
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.problem.call import in_lines
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax
from pallas_flash.tiled.online_softmax import SoftmaxState, with_tangent_of


@unexpected.refused
def merge_attention(
    outputs: Sequence[Float[AnyArray, "*B T N Hv"]], lses: Sequence[Float[AnyArray, "*B T N"]]
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """The attention to all keys, from the attention of the same queries to parts of the keys;
    differentiable in every argument.

    With the shares p_i = exp(lse_i - lse), the output is the sum of p_i output_i, and lse the
    log-sum-exp of the lse_i. This is how split-KV decoding joins its splits (Flash-Decoding), and
    how a prefix that many rows share is read once (Hydragen, arXiv:2402.05099).

    Each key must be in one part, and sinks in the call of one part. The gradient of output_i is p_i
    times that of the output, in their dtype: float16 loses it below 6e-8, and a part with a small
    share has no exact gradient by sinks. Scale the loss, or pass bfloat16.

    Args:
      outputs: the output of each part, in one floating dtype.
      lses: the log-sum-exp of each part, in base e, as `flash_attention` returns it with
        return_residual=True. Where it is -inf, the query saw no key of this part, whose output then
        counts for nothing, NaN too; where it is inf, as of an infinite sink, this part is all.

    Returns:
      The output, in the dtype of outputs, and its log-sum-exp, float32, or float64 for float64. A
      query that saw no key of any part has the output 0, the log-sum-exp -inf, and no gradient.

    Raises:
      TypeError: these are no sequences of arrays, or dtypes are not floating or differ.
      ValueError: there is no part, not one lse for each output, or shapes do not match.

    Examples:
      >>> import jax
      >>> from pallas_flash import flash_attention, merge_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 8, 64))  # [B, T, N, H]
      >>> parts = slice(0, 70), slice(70, 100)
      >>> both = [flash_attention(q, k[:, i], v[:, i], return_residual=True) for i in parts]
      >>> o, lse = merge_attention(*zip(*both))
      >>> bool(abs(o - flash_attention(q, k, v)).max() < 1e-5)
      True
    """
    outputs, lses = _checked(outputs, lses)
    dtype = checks.sums(outputs[0].dtype)
    lses = [lse.astype(dtype) for lse in lses]
    most = jnp.finfo(dtype).max  # an infinite sink takes all: no inf - inf
    parts = [SoftmaxState(with_tangent_of(lse, jnp.minimum(lse, most)), None) for lse in lses]
    shares, stats = online_softmax.merge(parts, LogBase.E)
    shares = [share[..., None] for share in shares]
    o = sum(
        share * jnp.where(share > 0, o.astype(dtype), 0.0)
        for share, o in zip(shares, outputs, strict=True)
    )
    lse, highest = stats.lse(LogBase.E), functools.reduce(jnp.maximum, lses)
    lse = with_tangent_of(lse, jnp.where(highest == jnp.inf, jnp.inf, lse))
    return o.astype(outputs[0].dtype), lse


in_lines(merge_attention)


def _checked(outputs, lses):
    arrays = []
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if not isinstance(parts, Sequence) and not (checks.is_array(parts) and parts.shape):
            raise TypeError(
                f"{name} must be a sequence of arrays, one for each part of the keys; got "
                f"{checks.description(parts)}."
            )
        arrays.append([checks.array(f"{name}[{i}]", part) for i, part in enumerate(parts)])
    outputs, lses = arrays
    if not outputs or len(outputs) != len(lses):
        raise ValueError(
            "merge_attention takes one lse for each output, and at least one of each; got "
            f"{len(outputs)} outputs and {len(lses)} lses."
        )
    for i, (o, lse) in enumerate(zip(outputs, lses, strict=True)):
        if o.dtype != outputs[0].dtype or not jnp.issubdtype(o.dtype, jnp.floating):
            raise TypeError(
                f"outputs must have one floating dtype; got {outputs[0].dtype} and, in "
                f"outputs[{i}], {o.dtype}."
            )
        if not jnp.issubdtype(lse.dtype, jnp.floating):
            raise TypeError(f"lses[{i}] must be floating; got {lse.dtype}.")
        if o.shape != outputs[0].shape or o.ndim < 3 or lse.shape != o.shape[:-1]:
            raise ValueError(
                f"outputs must all be [*B, T, N, Hv] and lses [*B, T, N]; got {outputs[0].shape} "
                f"and, in part {i}, {o.shape} and {lse.shape}. Of pairs (output, lse) pass "
                "merge_attention(*zip(*pairs))."
            )
    return outputs, lses
