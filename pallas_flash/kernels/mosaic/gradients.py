"""The arrays that the kernels of gradients read, in all families."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.kernels.mosaic import block_info, logits
from pallas_flash.kernels.mosaic.ragged_tail import RaggedRows
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled.online_softmax import DeltaTerms


class Inputs(NamedTuple):
    """The arrays of a kernel, and what the mask comes to for rows, tiles and blocks."""

    queries: RaggedRows  # q, do
    keys: RaggedRows  # k, v
    # [B, N, whole tiles of T]: in the problem's log base, less what the logits omit; +inf: P = 0
    lse: jax.Array
    delta: jax.Array | DeltaTerms  # the same; the terms where the kernel sums delta
    # of block_info.by_query_tile, or by_key_tile
    blocks: jax.Array | block_info.BlockLists | None
    logits: logits.Arrays

    @classmethod
    def make(cls, rows: Callable, p: Problem, t, blocks, x: Operands, lse, do, delta) -> "Inputs":
        """rows(arrays, widths, block size, lengths or None): a family's RaggedRows."""
        pad = lambda x, value: jnp.pad(
            x, ((0, 0), (0, 0), (0, -x.shape[2] % t.block_q)), constant_values=value
        )
        widths, (query_lengths, key_lengths) = (t.width, t.value_width), x.resolved_mask.lengths
        return cls(
            rows([x.query, do], widths, t.block_q, query_lengths),
            rows([x.key, x.value], widths, t.block_k, key_lengths),
            pad(lse - logits.soft_cap_constant(p), jnp.inf),
            pad(delta, 0.0),
            blocks,
            logits.arrays(p, x, t.tiling),
        )
