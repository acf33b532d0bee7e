"""Which blocks a tile of queries, or of keys, visits."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.scheduler import WorkTile
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule


class BlockLists(NamedTuple):
    """The blocks that each tile visits, of a mask with an array or a mask_mod."""

    lists: Any  # int32 [B or 1, N or 1, tiles, 2 + blocks]: schedule.block_lists
    # int32 [B or 1, N, tiles], of tiles of keys: how many blocks the heads before, which share the
    # keys, visit
    before: Any = None

    def blocks(self, batch: IntLike, head: IntLike, tile: IntLike) -> schedule.Blocks:
        """The blocks of a tile of a head, from refs."""
        return schedule.Blocks.from_list(
            self.lists, *broadcast_index(self.lists, batch, head), tile
        )


def intervals(
    p: Problem, resolved_mask: ResolvedMask, block_q: int, block_k: int
) -> tuple[ResolvedMask, jax.Array | None]:
    """The mask without its mask_mod, and the blocks of each tile of queries, as
    schedule.by_query_tile has both."""
    return schedule.by_query_tile(
        dataclasses.replace(resolved_mask, mask_mod=None), p.queries, block_q, block_k
    )


def by_query_tile(
    p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int
) -> jax.Array | BlockLists | None:
    """The blocks of keys that each tile of queries visits, a table as of schedule.by_query_tile, or
    lists of at least one; None where the kernel computes them."""
    if mask is None and resolved_mask.mask_mod is None:
        return intervals(p, resolved_mask, block_q, block_k)[1]
    return BlockLists(
        schedule.block_lists(_block_types(p, resolved_mask, mask, block_q, block_k), least=1)
    )


def by_key_tile(
    p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int
) -> jax.Array | BlockLists | None:
    """The blocks of queries that see each tile of keys, perhaps none, as `by_query_tile` has blocks
    of keys."""
    if mask is None and resolved_mask.mask_mod is None:
        has_data = resolved_mask.has_data
        return (
            schedule.query_blocks(resolved_mask, p.queries, block_q, block_k) if has_data else None
        )
    lists = schedule.block_lists(
        _block_types(p, resolved_mask, mask, block_q, block_k).swapaxes(2, 3)
    )
    B, _, tiles, _ = lists.shape
    count = jnp.broadcast_to(lists[..., 1], (B, p.heads, tiles)).reshape(
        B, p.kv_heads, p.group, tiles
    )
    before = jnp.cumsum(count, 2, dtype=jnp.int32) - count
    return BlockLists(lists, before.reshape(B, p.heads, tiles))


def block_types(
    p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int
) -> jax.Array:
    """Whether each tile of queries sees each block of keys in part or in full, or it is empty:
    int32 [B or 1, N or 1, tiles, blocks]."""
    return jnp.asarray(_block_types(p, resolved_mask, mask, block_q, block_k), jnp.int32)


def _block_types(p: Problem, resolved_mask: ResolvedMask, mask, block_q: int, block_k: int):
    return schedule.block_types(resolved_mask, p.batch, p.heads, p.queries, block_q, block_k, mask)


def broadcast_index(ref, *indices: IntLike) -> tuple[IntLike, ...]:
    """The index of a batch row, or of a batch row and a head, in data for each of them, or for
    all."""
    return tuple(n if size > 1 else 0 for n, size in zip(indices, ref.shape, strict=False))


def key_blocks(
    by_tile,
    resolved_mask: ResolvedMask,
    work: WorkTile,
    tile: IntLike,
    queries: int,
    size: int,
    block_k: int,
) -> schedule.Blocks:
    """The blocks of keys that a tile of `size` queries visits, by what `by_query_tile` returned; at
    least one: where no row sees a key it is masked."""
    if isinstance(by_tile, BlockLists):
        return by_tile.blocks(work.batch, work.head, tile)
    if by_tile is None:
        rows = tile * size, jnp.minimum((tile + 1) * size, queries) - 1
        blocks = schedule.known_blocks(resolved_mask, *rows, block_k)
    else:
        blocks = schedule.Blocks.from_table(by_tile, *broadcast_index(by_tile, work.batch), tile)
    if isinstance(blocks.last, int):
        return blocks
    return blocks._replace(last=jnp.maximum(blocks.last, blocks.first + 1))


def visited(x, work: WorkTile, p: Problem, t) -> schedule.Blocks:
    """The blocks of keys that a program's tile of queries visits; x: a kernel's Inputs, t: its
    Tiles."""
    mask = x.logits.resolved_mask
    return key_blocks(x.blocks, mask, work, work.tile, p.queries, t.block_q, t.block_k)


def descend(by_tile, blocks: schedule.Blocks) -> schedule.Blocks:
    """The blocks from the last to the first; a list stays as it is."""
    return blocks if isinstance(by_tile, BlockLists) else blocks.reverse()


def query_blocks(
    by_tile, resolved_mask: ResolvedMask, work: WorkTile, queries: int, block_q: int, size: int
) -> Callable:
    """A function of g: the blocks of queries of the g-th head that see the tile's `size` keys, by
    what `by_key_tile` returned, and a function of t: how many blocks come before position t,
    with the blocks of earlier heads. No block is full where the tile hangs over the last key."""
    if isinstance(by_tile, BlockLists):

        def listed(g):
            head = work.head + g
            before = lambda head: by_tile.before[
                (*broadcast_index(by_tile.before, work.batch), head, work.tile)
            ]
            start = before(head) - before(work.head)
            return by_tile.blocks(work.batch, head, work.tile), lambda t: start + t

        return listed
    if by_tile is None:
        blocks = _known_query_blocks(resolved_mask, work.tile, queries, block_q, size)
    else:
        blocks = schedule.Blocks.from_table(
            by_tile, *broadcast_index(by_tile, work.batch), work.tile
        )
    return lambda g: (blocks, lambda t: g * blocks.count + t - blocks.first)


def _known_query_blocks(
    resolved_mask: ResolvedMask, tile: IntLike, queries: int, block_q: int, size: int
) -> schedule.Blocks:
    keys, stop = resolved_mask.keys, (tile + 1) * size
    by_key = resolved_mask.transposed(schedule.ceil_div(queries, block_q) * block_q)
    blocks = schedule.known_blocks(by_key, tile * size, jnp.minimum(stop, keys) - 1, block_q)
    if keys % size == 0:
        return blocks
    return blocks._replace(full_last=jnp.where(stop > keys, blocks.full_first, blocks.full_last))
