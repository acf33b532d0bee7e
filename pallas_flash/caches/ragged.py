"""Ragged tokens: those of all rows of a batch, one row behind the other; and tiles of them, a row's
own, which decoding takes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_flash.problem.call import PagedCall


def within(cu_seqlens: Int[Array, "B+1"], tokens: int) -> Int[Array, "B+1"]:
    """The same, where it cannot be checked, in order and no end beyond the tokens."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, tokens))


class Places(NamedTuple):
    """Where each token is."""

    row: Int[Array, "tokens"]
    number: Int[Array, "tokens"]  # among the row's tokens
    is_real: Bool[Array, "tokens"]  # else it is of no row

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
    """Tiles of `size` tokens: as many as any cu_seqlens could need, of which the last may be
    empty."""

    row: Int[Array, "tiles"]
    first: Int[Array, "tiles"]  # token, by its number among the row's
    count: Int[Array, "tiles"]
    source: Int[Array, "tiles size"]  # the token's place among all
    tile: Int[Array, "tokens"]
    slot: Int[Array, "tokens"]  # of each token in its tile
    is_real: Bool[Array, "tokens"]

    @classmethod
    def of(cls, cu_seqlens: Int[Array, "B+1"], tokens: int, size: int) -> "Tiles":
        B, counts = len(cu_seqlens) - 1, jnp.diff(cu_seqlens)
        most = (tokens + min(B, tokens) * (size - 1)) // size
        # the number of tiles up to a row's end
        stop = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), stop[:-1]])
        tile = jnp.arange(most, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(stop, tile, side="right").astype(jnp.int32), B - 1)
        first = (tile - start[row]) * size
        source = (cu_seqlens[row] + first)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        of, number, is_real = Places.of(cu_seqlens, tokens)
        count = jnp.clip(counts[row] - first, 0, size)
        return cls(
            row,
            first,
            count,
            jnp.clip(source, 0, tokens - 1),
            start[of] + number // size,
            number % size,
            is_real,
        )

    def rows_of(self, call: PagedCall) -> PagedCall:
        """The call with a batch row for each tile. Its query_offset is that of each row's first
        token."""
        offset, score = jnp.broadcast_to(call.query_offset, call.lengths.shape), call.score_mod
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
            score_mod=score,
        )

    def tokens(self, x, empty):
        """[tokens, ...] of [tiles, size, ...], `empty` for a token of no row."""
        found = x[jnp.clip(self.tile, 0, len(x) - 1), jnp.clip(self.slot, 0, x.shape[1] - 1)]
        return jnp.where(self.is_real.reshape(-1, *(1,) * (x.ndim - 2)), found, empty)
