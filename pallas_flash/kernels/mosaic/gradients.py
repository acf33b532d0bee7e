"""What the kernels of gradients read, in all families."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.mosaic import block_info, logits
from pallas_flash.kernels.mosaic.ragged_tail import RaggedRows


class Inputs(NamedTuple):
    """The arrays of a kernel, and what the mask comes to for rows, tiles and blocks."""

    queries: RaggedRows  # q, do
    keys: RaggedRows  # k, v
    # [B, N, whole tiles of T]: in the problem's log base, less what the logits omit; +inf: P = 0
    lse: jax.Array
    delta: jax.Array  # the same shape
    # of block_info.by_query_tile, or by_key_tile
    blocks: jax.Array | block_info.BlockLists | None
    logits: logits.Arrays

    @classmethod
    def make(cls, rows: Callable, p: Problem, t, blocks, x: Operands, lse, do, delta) -> "Inputs":
        """rows(arrays, widths, block size, lengths or None): a family's RaggedRows."""
        more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
        widths, (query_lengths, key_lengths) = (t.width, t.value_width), x.resolved_mask.lengths
        return cls(
            rows([x.query, do], widths, t.block_q, query_lengths),
            rows([x.key, x.value], widths, t.block_k, key_lengths),
            jnp.pad(lse - logits.soft_cap_constant(p), more, constant_values=jnp.inf),
            jnp.pad(delta, more),
            blocks,
            logits.arrays(p, x, t.tiling),
        )
