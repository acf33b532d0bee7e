"""Blockwise as a Backend, and its passes in place of those that kernels lack."""

from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.backend import Backend, PagedKernel, no_empty_axis
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import blockwise
from pallas_flash.tiled.online_softmax import RowLse

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
        lambda p, pages: blockwise.paged_tiles(p, pages.page),
        lambda *args: blockwise.paged_forward(*args),
        # it reads no page that no query sees, and a table may be much longer than its rows
        copies_prompts=lambda p: p.keys <= p.queries * p.group,
        takes_lists=lambda p: True,
    ),
    takes_row_scale=True,
    for_gradient=lambda tiles: tiles.for_gradient(),
    for_calls=lambda *args: blockwise.for_calls(*args),
    takes_lists=lambda p: True,
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
