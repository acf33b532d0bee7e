"""`attention_weights`: the softmax of chosen queries, to look at."""

from __future__ import annotations  # help() shows annotations as they stand here

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_flash import attention, checks
from pallas_flash.attention import Options
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.choose import dispatch
from pallas_flash.masks import Mask
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Operands
from pallas_flash.problem.call import Call, WeightsCall, in_lines
from pallas_flash.tiled import reference


@unexpected.refused
def attention_weights(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    mask: Bool[AnyArray, "*#BNTS"] | Mask | None = None,
    *,
    rows: Sequence[int] | Int[AnyArray, "rows"],
    **options: Unpack[Options],
) -> Float[Array, "*B N rows S"]:
    """The softmax weights of chosen queries, in O(rows S) memory, in plain JAX; differentiable in
    every float argument.

    A row sums to 1; to less with sinks, which take the rest; and to 0 where the query sees no key.

    Args:
      query, key, bias, mask: as in `flash_attention`, of all queries.
      rows: the numbers of the queries, from 0 to T - 1; an array may be traced, and is then not
        checked.
      **options: the other arguments of `flash_attention`. They are the weights before dropout;
        dropout_rate, dropout_rng, deterministic and implementation change nothing.

    Returns:
      [*B, N, rows, S], float32, or float64 for float64.

    Raises:
      TypeError, ValueError: as in `flash_attention`, or rows are not such numbers.
      NotImplementedError: a context, or queries or keys that are spread over several devices.

    Examples:
      >>> import jax
      >>> from pallas_flash import attention_weights
      >>> query = key = jax.random.normal(jax.random.key(0), (1, 100, 4, 16))
      >>> last = attention_weights(query, key, is_causal=True, rows=[99])
      >>> last.shape  # [B, N, rows, S]
      (1, 4, 1, 100)
    """
    if "value" in options:
        raise TypeError(f"{_NO_VALUE}.")
    call, return_residual = attention.make_call(query, key, key, bias, mask, **options)
    _refuse_value(call)
    if return_residual or call.return_max_logits:
        raise TypeError(
            "attention_weights returns the weights alone; leave return_residual and "
            "return_max_logits to flash_attention."
        )
    call = call.replace(dropout_rate=0.0, dropout_rng=None)
    rows = _rows(rows, jnp.shape(call.query))
    weights, *_ = dispatch.map_over_mesh(_attend, WeightsCall(**call.arguments(), rows=rows))
    return jnp.moveaxis(weights, -2, -3)


in_lines(attention_weights)


_NO_VALUE = "attention_weights takes no value: (query, key, bias, mask, *, rows)"


def _refuse_value(call: Call):
    """Raises if the bias has the shape of a value, [*B, S, K, Hv], and can be no bias."""
    key, bias = jnp.shape(call.key), call.bias
    if checks.is_array(bias) and len(key) > 2 and bias.shape[:-1] == key[:-1]:
        if bias.shape[-1] not in (1, key[-3]):
            raise TypeError(f"{_NO_VALUE}; got a bias of the shape of values, {bias.shape}.")


def _rows(rows, shape) -> jax.Array:
    is_empty = isinstance(rows, Sequence) and not len(rows)
    rows = checks.ints("rows", np.asarray(rows, np.int64) if is_empty else rows)
    if rows.ndim != 1:
        raise ValueError(
            f"rows must be the numbers of some queries, [rows]; got shape {rows.shape}."
        )
    if (
        checks.is_constant(rows)
        and len(shape) > 2
        and any(not 0 <= n < shape[-3] for n in np.asarray(rows))
    ):
        raise ValueError(
            f"rows must be from 0 to T - 1 = {shape[-3] - 1}; got {np.asarray(rows).tolist()}."
        )
    return jnp.asarray(rows)


def _attend(call: WeightsCall):
    """The weights [*B, rows, N, S] of a device's part of the call, in place of the output and the
    two arrays by row that dispatch.map_over_mesh expects."""
    if call.context is not None:
        raise NotImplementedError(
            "attention_weights is for sequences that are whole on a device; got "
            f"context={call.context}."
        )
    problem, x = arguments.normalise(call)
    rows = call.rows
    weights = reference.weights(
        dataclasses.replace(problem, queries=rows.size), _take_rows(x, rows), rows
    )
    lead = call.query.shape[:-3]
    return (
        jnp.swapaxes(weights, 1, 2).reshape(*lead, rows.size, problem.heads, problem.keys),
        None,
        None,
    )


def _take_rows(x: Operands, rows: jax.Array) -> Operands:
    """The operands of these queries alone, whose numbers tell what they see."""
    take = lambda y: y if y is None or y.shape[2] == 1 else y[:, :, rows]
    return x._replace(query=x.query[:, rows], bias=take(x.bias), mask=take(x.mask))
