"""Attention by lists of keys in plain JAX: O(T n) work for lists of n keys, and beside copies of
the operands the memory of a chunk of lists.

The query heads that share a list and a key/value head are a list head. On a CPU one goes after the
other, else all go at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import by_key, by_query
from pallas_flash.tiled.lists.list_heads import ListHead, each_list_head, from_list_heads
from pallas_flash.tiled.online_softmax import RowScale

WALKS = {"by query": by_query, "by key": by_key}


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]."""
    x, walk = _sorted(x), WALKS[tiles.lists.walk]

    def one_head(number, sums):
        return walk.forward(ListHead.take(problem, tiles, x, number), tiles, x, sums)

    (o, state), _, _ = each_list_head(problem, tiles.lists.at_once, one_head, (), ())
    return from_list_heads(o), jax.tree.map(_by_head, state)


def backward(
    problem: Problem, tiles: Tiles, x: Operands, row_scale: RowScale, do, delta
) -> Gradients:
    """Gradients of the operands, given the RowScale and delta of each row."""
    p, x, walk = problem, _sorted(x), WALKS[tiles.lists.walk]
    zeros = functools.partial(_zeros, x, sums(tiles.dtype))

    def one_head(number, sums):
        head = ListHead.take(p, tiles, x, number)
        return walk.backward(head, tiles, x, row_scale, do, delta, sums)

    shared = (
        None if x.bias is None else zeros(*x.bias.shape),
        tuple(zeros(*a.shape) for a in x.differentiable.captured),
    )
    dq, (dk, dv), (dbias, captured) = each_list_head(
        p, tiles.lists.at_once, one_head, _sums_by_key(p, zeros), shared
    )
    factor = ListHead.take(p, tiles, x, 0).logits.query_factor
    return Gradients(
        (from_list_heads(dq) * p.scale).astype(x.query.dtype),
        _from_blocks(p, dk * (p.scale / factor)).astype(x.key.dtype),
        _from_blocks(p, dv).astype(x.value.dtype),
        None if dbias is None else dbias.astype(x.bias.dtype),
        captured=captured,
    )


def _sorted(x: Operands) -> Operands:
    mask = x.resolved_mask
    return x._replace(resolved_mask=dataclasses.replace(mask, lists=mask.lists.sorted()))


def _sums_by_key(p: Problem, zeros):
    """Zeros for sums by keys and by values, [blocks, block, n]."""
    lists = p.resolved_mask.lists
    return tuple(zeros(lists.blocks, lists.block, n) for n in (p.head_size, p.value_size))


def _from_blocks(p: Problem, x):
    """[B, K, blocks, block, n] -> [B, S, K, n]"""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, : p.keys], 1, 2)


def _by_head(x):
    """[B, list heads, T, G] -> [B, N, T]"""
    return jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2])


def _zeros(x: Operands, dtype, *shape):
    """Zeros that vary over the same devices as the operands do."""
    return jnp.zeros_like(x.query, shape=shape, dtype=dtype)
