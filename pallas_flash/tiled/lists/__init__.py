"""Attention by lists of keys in plain JAX: O(T n) work for lists of n keys, and beside copies of
the operands the memory of a chunk of lists.

The query heads that share a list and a key/value head are a list head. On a CPU one goes after the
other, else all go at once.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.blockwise.logits import ScalePlacement
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import passes
from pallas_flash.tiled.lists.list_heads import (
    ListHead,
    Sums,
    by_head,
    each_list_head,
    from_blocks,
    from_list_heads,
)
from pallas_flash.tiled.lists.walks import WALKS
from pallas_flash.tiled.online_softmax import RowScale


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]."""
    (o, state), _ = _run(passes.forward, problem, tiles, x, (), Sums())
    return from_list_heads(o).astype(x.query.dtype), jax.tree.map(by_head, state)


def backward(
    problem: Problem, tiles: Tiles, x: Operands, row_scale: RowScale, do, delta
) -> Gradients:
    """Gradients of the operands, given the RowScale and delta of each row."""
    p, factor = problem, ScalePlacement.choose(problem, tiles).query_factor(problem)
    dq, new = _gradients(passes.backward, p, tiles, x, row_scale, do, delta)
    dq, dk = from_list_heads(dq) * p.scale, new.key * (p.scale / factor)
    like = x.differentiable._replace(sinks=None)
    return jax.tree.map(lambda a, b: a.astype(b.dtype), new._replace(query=dq, key=dk), like)


def tangent(
    problem: Problem, tiles: Tiles, x: Operands, dx: Gradients, row_scale: RowScale, o, dlse
):
    """The tangents of o [B, T, N, Hv] and lse [B, N, T], as `derivatives.tangent`."""
    (do, dlse), _ = _run(passes.tangent, problem, tiles, x, (dx, row_scale, o, dlse), Sums())
    return from_list_heads(do), by_head(dlse)


def second(problem: Problem, tiles: Tiles, x: Operands, *args):
    """The gradients of the operands and of row_scale.inverse_sum, as `derivatives.second`."""
    factor = ScalePlacement.choose(problem, tiles).query_factor(problem)
    (dq, of_sum), new = _gradients(passes.second, problem, tiles, x, *args)
    return new._replace(query=from_list_heads(dq) * factor), by_head(of_sum)


def _gradients(one_pass: Callable, p: Problem, tiles: Tiles, x: Operands, *args):
    """What `_run` returns of a pass that sums gradients, these as Gradients."""
    zeros = lambda *shape: jnp.zeros_like(x.query, shape=shape, dtype=sums(tiles.dtype))
    lists = p.resolved_mask.lists
    of_keys = (zeros(lists.blocks, lists.block, n) for n in (p.head_size, p.value_size))
    bias = None if x.bias is None else zeros(*x.bias.shape)
    captured = tuple(zeros(*a.shape) for a in x.differentiable.captured)
    of_rows, new = _run(one_pass, p, tiles, x, args, Sums(*of_keys, bias, captured))
    of_keys = (from_blocks(p, a) for a in (new.key, new.value))
    return of_rows, Gradients(None, *of_keys, new.bias, captured=new.captured)


def _run(one_pass: Callable, p: Problem, tiles: Tiles, x: Operands, args: tuple, start: Sums):
    """The results of a pass by row, [B, list heads, T, ..], and its sums."""
    walk, mask = WALKS[tiles.lists.walk], x.resolved_mask
    if walk.has_whole_rows:  # the other finds repeats where it sorts all lists together
        x = x._replace(resolved_mask=dataclasses.replace(mask, lists=mask.lists.distinct()))

    def one_head(number, sums: Sums):
        head, whole = ListHead.take(p, tiles, x, number), sums.bias
        sums = sums._replace(bias=head.dense(whole))
        sums, of_rows = one_pass(walk, head, tiles, x, *args, sums)
        return sums._replace(bias=head.put_dense(whole, sums.bias)), of_rows

    return each_list_head(p, tiles.lists.at_once, one_head, start)
