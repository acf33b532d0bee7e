"""Softmax weights: `attention_weights` of chosen queries, to look at, and `listed_weights` of the
keys that lists name, which an indexer learns."""

from __future__ import annotations  # help() shows annotations as they stand here

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_flash import attention, checks, masks
from pallas_flash.attention import Options
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.choose import dispatch
from pallas_flash.jax_support import hardware
from pallas_flash.masks import Mask
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.call import Call, ListedWeightsCall, WeightsCall, in_lines
from pallas_flash.problem.implementation import no_empty_axis
from pallas_flash.tiled import reference
from pallas_flash.tiled.blockwise import tuning
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import entry_weights
from pallas_flash.tiled.lists.tuning import BY_QUERY


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


@unexpected.refused
def listed_weights(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    lists: Mask,
    lse: Float[AnyArray, "*B T N"],
    *,
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    **options: Unpack[Options],
) -> Float[Array, "*B T L keys"]:
    """The softmax weights of the keys that lists name, exp(s - lse), summed over the query heads
    that share a list: what the indexer of DeepSeek's sparse attention is trained on
    (arXiv:2512.02556, equation 4). O(T n) work and memory, in plain JAX.

    No gradient flows through them: to the indexer they are constants. They are not normalised:
    divided by their sum they are a distribution over the keys of a list. The sum is the number of
    heads where lse is of these keys alone, and less where other keys or a sink share the softmax.

    Args:
      query, key: as in `flash_attention`.
      lists: a `masks.KeyLists`, or one joined with other masks by &.
      lse: [*B, T, N], the log-sum-exp of the whole softmax: the residual of `flash_attention`, or
        of `merge_attention` where keys of several calls share a softmax.
      bias, **options: the other arguments of `flash_attention`, as in the call that lse is of:
        with the lse of a causal call and no is_causal, weights of later keys are too large, up to
        inf. sinks, which lse includes, dropout, value_size, deterministic and implementation change
        nothing.

    Returns:
      [*B, T, L, n * block], float32, or float64 for float64, in the order of `KeyLists.indices`:
      key i * block + j of a list's entry e is at e * block + j. 0 where an entry names nothing, or
      a key that the query does not see. An entry that is repeated has its weights in each place.

    Raises:
      TypeError, ValueError: as in `flash_attention`; lists, lse or their shapes do not fit; or,
        outside of jit, lse is -inf where lists name keys that the query sees.
      NotImplementedError: a context.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import flash_attention, listed_weights, masks
      >>> query, key = (jax.random.normal(jax.random.key(n), (1, 9, 4, 16)) for n in range(2))
      >>> scores = jax.random.normal(jax.random.key(2), (1, 9, 9))  # an indexer's
      >>> scores, indices = jax.lax.top_k(jnp.where(jnp.tri(9), scores, -jnp.inf), 3)
      >>> lists = masks.KeyLists(indices[:, :, None])  # one for all heads
      >>> options = dict(mask=lists, is_causal=True, return_residual=True)
      >>> o, lse = flash_attention(query, key, key, **options)
      >>> weights = listed_weights(query, key, lists, lse, is_causal=True)[:, :, 0]
      >>> target = weights / weights.sum(-1, keepdims=True)
      >>> target.shape  # [B, T, n]
      (1, 9, 3)
    """
    indices = _indices(lists)
    if "value" in options:
        raise TypeError("listed_weights takes no value: (query, key, lists, lse).")
    if "mask" in options:
        raise TypeError("listed_weights takes other masks joined with lists: lists & mask.")
    options["value_size"] = 1  # the values, which nobody reads, are columns of the keys
    call, return_residual = attention.make_call(query, key, None, bias, lists, **options)
    if return_residual or call.return_max_logits:
        raise TypeError(
            "listed_weights returns the weights alone; leave return_residual and return_max_logits "
            "to flash_attention."
        )
    call = call.replace(dropout_rate=0.0, dropout_rng=None)
    lse = _lse(lse, jnp.shape(call.query))
    call = ListedWeightsCall(**call.arguments(), lse=lse)
    with hardware.at(call.arguments().values()):
        weights, *_ = dispatch.map_over_mesh(_listed_weights, call)
    if weights.shape[-2] != indices.shape[-2]:  # each device had some of the heads of one list
        weights = jnp.sum(weights, -2, keepdims=True)
    _refuse_lse_of_other_keys(lse, weights)
    return weights


in_lines(listed_weights)


def _indices(lists) -> Any:
    parts = masks.conjuncts(lists) if isinstance(lists, Mask) else []
    named = [part.indices for part in parts if isinstance(part, masks.KeyLists)]
    if len(named) == 1:
        return named[0]
    got = f"{len(named)} joined by &" if len(named) > 1 else checks.description(lists)
    raise TypeError(
        f"lists must be a masks.KeyLists, alone or joined with other masks by &; got {got}."
    )


def _lse(lse, query: tuple[int, ...]):
    lse, shape = checks.array("lse", lse), query[:-1]
    if query[-1:] == (0,):
        raise ValueError(f"listed_weights takes heads of size 1 and up; got query {query}.")
    if lse.shape != shape or not jnp.issubdtype(lse.dtype, jnp.floating):
        raise ValueError(
            f"lse must be floats [*B, T, N] = {shape}, as flash_attention returns it with "
            f"return_residual=True; got {lse.dtype} {lse.shape}."
        )
    return lse


def _refuse_lse_of_other_keys(lse, weights):
    """Raises, outside of jit, where lse is that of no key and a list names visible ones."""
    if not (checks.is_known(lse) and checks.is_known(weights)) or not jnp.isneginf(lse).any():
        return
    if jnp.isinf(weights).any():
        raise ValueError(
            "lse is -inf, that of a query without keys, where lists name keys that the query sees. "
            "Pass listed_weights the masks and scores of the call that lse is of, such as "
            "is_causal=True."
        )


def _listed_weights(call: ListedWeightsCall):
    """The weights [*B, T, L, n * block] of a device's part of the call, in place of the output and
    the two arrays by row that dispatch.map_over_mesh expects."""
    problem, x = arguments.normalise(call)
    problem, x = dataclasses.replace(problem, sinks=False), x._replace(sinks=None)
    lse = call.lse.reshape(problem.batch, problem.queries, problem.heads)
    arrays = lax.stop_gradient((x, lse.astype(wide := checks.sums(problem.dtype))))
    if no_empty_axis(problem) is None:
        weights = _jitted_weights(problem, tuning.tiles(problem, BY_QUERY), *arrays)
    else:
        lists = problem.resolved_mask.lists
        _, L, _, n = lists.entries.shape
        weights = jnp.zeros_like(
            x.query, shape=(problem.batch, problem.queries, L, n * lists.block), dtype=wide
        )
    return weights.reshape(*call.query.shape[:-2], *weights.shape[2:]), None, None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted_weights(problem: Problem, tiles: Tiles, x: Operands, lse):
    weights = entry_weights(problem, tiles, x, jnp.swapaxes(lse, 1, 2))
    return jnp.swapaxes(weights, 1, 2)
