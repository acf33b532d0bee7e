"""Ragged tokens: the tokens of all rows of a batch, one row behind the other. Decoding takes them
as tiles, each with tokens of one row."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_flash.problem.call import PagedCall


def within(cu_seqlens: Int[Array, "B+1"], tokens: int) -> Int[Array, "B+1"]:
    """Clips traced cu_seqlens, which nothing can check, to ends in order and within the tokens."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, tokens))


class Places(NamedTuple):
    """The row of each token, and its number in the row."""

    row: Int[Array, "tokens"]
    number: Int[Array, "tokens"]
    is_real: Bool[Array, "tokens"]  # whether it belongs to a row at all

    @classmethod
    def of(cls, cu_seqlens: Int[Array, "B+1"], tokens: int) -> "Places":
        token, last = jnp.arange(tokens, dtype=jnp.int32), len(cu_seqlens) - 2
        row = jnp.minimum(
            jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32), last
        )
        return cls(
            row, token - cu_seqlens[row], (cu_seqlens[0] <= token) & (token < cu_seqlens[-1])
        )


class Tiles(NamedTuple):
    """Tiles of `size` tokens of one row: as many as any cu_seqlens could need; the last may be
    empty."""

    row: Int[Array, "tiles"]
    first: Int[Array, "tiles"]  # the first token, by its number in the row
    count: Int[Array, "tiles"]
    source: Int[Array, "tiles size"]  # the index of each token among all
    tile: Int[Array, "tokens"]
    slot: Int[Array, "tokens"]  # the place of each token in its tile
    is_real: Bool[Array, "tokens"]

    @classmethod
    def of(cls, cu_seqlens: Int[Array, "B+1"], tokens: int, size: int) -> "Tiles":
        B, counts = len(cu_seqlens) - 1, jnp.diff(cu_seqlens)
        most = (tokens + min(B, tokens) * (size - 1)) // size
        # how many tiles the rows up to each one have
        stop = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), stop[:-1]])
        tile = jnp.arange(most, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(stop, tile, side="right").astype(jnp.int32), B - 1)
        first = (tile - start[row]) * size
        source = (cu_seqlens[row] + first)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        row_of_token, number, is_real = Places.of(cu_seqlens, tokens)
        count = jnp.clip(counts[row] - first, 0, size)
        return cls(
            row,
            first,
            count,
            jnp.clip(source, 0, tokens - 1),
            start[row_of_token] + number // size,
            number % size,
            is_real,
        )

    def rows_of(self, call: PagedCall) -> PagedCall:
        """The call with a batch row for each tile; in `call` query_offset is the position of each
        row's first token."""
        offset, score = jnp.broadcast_to(call.query_offset, call.lengths.shape), call.score_mod
        mask = call.mask
        if mask is not None:
            mask = dataclasses.replace(mask, indices=mask.indices[0, self.source])
        of_tiles = lambda x: jnp.asarray(x)[self.row]
        if score is not None and score.mod.uses_batch:
            batch = score.indices(len(call.lengths), 1)[0][self.row]
            score = dataclasses.replace(score, batch=batch)
        return call.replace(
            query=call.query[self.source],
            page_table=of_tiles(call.page_table),
            lengths=of_tiles(call.lengths),
            query_offset=offset[self.row] + self.first,
            query_seq_lengths=self.count,
            mask=mask,
            score_mod=score,
        )

    def tokens(self, x, empty):
        """The tokens [tokens, ..] of x [tiles, size, ..]; `empty` for tokens of no row."""
        by_token = x[jnp.clip(self.tile, 0, len(x) - 1), jnp.clip(self.slot, 0, x.shape[1] - 1)]
        return jnp.where(self.is_real.reshape(-1, *(1,) * (x.ndim - 2)), by_token, empty)
