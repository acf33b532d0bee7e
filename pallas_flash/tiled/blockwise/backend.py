"""Blockwise as a Backend, and its passes in place of those that kernels lack."""

import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.backend import Backend, PagedKernel, no_empty_axis
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled import blockwise
from pallas_flash.tiled.lists import pages as pages_of_lists
from pallas_flash.tiled.lists.costs import BY_QUERY
from pallas_flash.tiled.online_softmax import RowLse


def _paged_tiles(problem: Problem, pages: Pages):
    if problem.resolved_mask.lists is not None:
        tiles, wide = blockwise.tiles(problem, BY_QUERY), jnp.dtype(sums(problem.dtype)).name
        # 16 bits would round the products of keys and their scales
        return tiles._replace(dtype=wide) if pages.stored else tiles
    return blockwise.decode_tiles(problem, pages.page)


def _paged_forward(problem: Problem, *args):
    has_lists = problem.resolved_mask.lists is not None
    return (pages_of_lists if has_lists else blockwise.decode).forward(problem, *args)


BLOCKWISE = Backend(
    "blockwise",
    no_empty_axis,
    lambda p: None,
    lambda p: blockwise.tiles(p),
    blockwise.forward,
    blockwise.backward,
    tangent=lambda *args: blockwise.tangent(*args),
    paged=PagedKernel(
        lambda *_: None,
        _paged_tiles,
        _paged_forward,
        # it reads no page that no query sees, and a table may be much longer than its rows
        copies_prompts=lambda p: p.keys <= p.queries * p.group,
        takes_lists=lambda p: True,
    ),
    takes_row_scale=True,
    for_gradient=lambda tiles: tiles.for_gradient(),
    for_calls=lambda *args: blockwise.for_calls(*args),
    takes_lists=lambda p: blockwise.takes_lists(p),
    results_like=blockwise.results_like,
)


def blockwise_backward(log_base: LogBase, problem: Problem, x: Operands, lse, *rows) -> Gradients:
    """Gradients by blockwise, in place of kernels whose scores are in this log base."""
    scale = RowLse(lse, None).row_scale(log_base)
    return blockwise.backward(problem, blockwise.tiles(problem).for_gradient(), x, scale, *rows)


def blockwise_tangent(log_base: LogBase, problem: Problem, x: Operands, dx, rows, o, dlse):
    """Tangents by blockwise, in place of kernels whose scores are in this log base."""
    tiles, scale = blockwise.tiles(problem).for_gradient(), rows.row_scale(log_base)
    do, dlse = blockwise.tangent(problem, tiles, x, dx, scale, o, dlse)
    return do.astype(o.dtype), dlse
