"""The arrays of the kernels of the Hopper backward."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import tile
from pallas_flash.kernels.hopper.tuning import KeyTiles, Tiles
from pallas_flash.kernels.mosaic import block_info, logits, ragged_tail


class Inputs(NamedTuple):
    """Of sizes that TMA can take, and what the mask comes to for rows, tiles and blocks."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    do: jax.Array  # [B, T, N, Hv]
    tails: ragged_tail.Tails | None  # of k and v
    query_tails: ragged_tail.Tails | None  # of q and do
    # [B, N, whole tiles of T]: in the problem's log base, less what the logits omit; +inf: P = 0
    lse: jax.Array
    delta: jax.Array  # the same shape
    logits: logits.Arrays
    # of block_info.by_query_tile, or by_key_tile
    blocks: jax.Array | block_info.BlockLists | None


def inputs(p: Problem, t: Tiles | KeyTiles, blocks, x: Operands, lse, do, delta) -> Inputs:
    more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
    q, k, v, do = (tile.pad(a, t.swizzle) for a in (x.query, x.key, x.value, do))
    query_lengths, key_lengths = x.resolved_mask.lengths
    return Inputs(
        q,
        k,
        v,
        do,
        ragged_tail.copy_tails(key_lengths, t.block_k, k, v),
        ragged_tail.copy_tails(query_lengths, t.block_q, q, do),
        jnp.pad(lse - logits.soft_cap_constant(p), more, constant_values=jnp.inf),
        jnp.pad(delta, more),
        logits.arrays(p, x, t.tiling),
        blocks,
    )
