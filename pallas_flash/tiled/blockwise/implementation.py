"""Blockwise as an implementation, and its passes in place of passes that kernels lack."""

import jax.numpy as jnp

from pallas_flash.checks import sums
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import PageReader, no_empty_axis
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled import blockwise, lists
from pallas_flash.tiled.lists.tuning import BY_QUERY
from pallas_flash.tiled.online_softmax import RowLse


class Blockwise(PageReader):
    """FlashAttention-2 in plain JAX, on any device."""

    name = "blockwise"
    takes_row_scale = True

    def why_not(self, problem):
        return no_empty_axis(problem)

    def tiles(self, problem):
        return blockwise.tiles(problem)

    def has_tangent(self, tiles):
        return True

    def for_gradient(self, tiles):
        return tiles.for_gradient()

    forward = staticmethod(blockwise.forward)
    backward = staticmethod(blockwise.backward)
    tangent = staticmethod(blockwise.tangent)
    for_calls = staticmethod(blockwise.for_calls)
    results_like = staticmethod(blockwise.results_like)
    takes_lists = staticmethod(blockwise.tuning.takes_lists)

    # ---- pages ----

    def why_no_pages(self, problem, pages):
        return None

    def page_tiles(self, problem: Problem, pages: Pages):
        if problem.resolved_mask.lists is None:
            return blockwise.decode_tiles(problem, pages.page)
        tiles, wide = blockwise.tiles(problem, BY_QUERY), jnp.dtype(sums(problem.dtype)).name
        # 16 bits would round the products of keys and their scales
        return tiles._replace(dtype=wide) if pages.stored else tiles

    def forward_from_pages(self, problem, tiles, x, table, scales):
        has_lists = problem.resolved_mask.lists is not None
        by = lists.forward_from_pages if has_lists else blockwise.decode.forward
        return by(problem, tiles, x, table, scales)

    def copies_prompts(self, problem):
        # it reads no page that no query sees, and a table may be much longer than its rows
        return problem.keys <= problem.queries * problem.group

    def takes_lists_of_pages(self, problem):
        return True


BLOCKWISE = Blockwise()


def blockwise_backward(log_base: LogBase, problem: Problem, x: Operands, lse, *rows) -> Gradients:
    """Gradients by blockwise, in place of kernels whose scores are in this log base."""
    scale = RowLse(lse, None).row_scale(log_base)
    return blockwise.backward(problem, blockwise.tiles(problem).for_gradient(), x, scale, *rows)


def blockwise_tangent(log_base: LogBase, problem: Problem, x: Operands, dx, rows, o, dlse):
    """Tangents by blockwise, in place of kernels whose scores are in this log base."""
    tiles, scale = blockwise.tiles(problem).for_gradient(), rows.row_scale(log_base)
    do, dlse = blockwise.tangent(problem, tiles, x, dx, scale, o, dlse)
    return do.astype(o.dtype), dlse
