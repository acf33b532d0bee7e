"""The indices that a mask_mod or a score_mod is asked for, of some heads."""

import dataclasses

import jax.numpy as jnp

from pallas_flash.mods.bound import BoundMod
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled.blockwise.slices import Block, HeadRange, each_row


def of_heads(mod: BoundMod | None, p: Problem, heads: HeadRange) -> BoundMod | None:
    """A mod with the indices of some batch rows and heads [1, K, G, 1]."""
    if mod is None:
        return None
    batch, head = mod.indices(p.batch, p.heads)
    batch = heads.take(batch) if mod.mod.uses_batch else batch
    shape = (1, heads.heads, -1, 1) if mod.mod.uses_head else (1, 1, 1, 1)
    head = heads.take(head[None], 1).reshape(shape)
    offset = mod.offset if isinstance(mod.offset, int) else heads.take(mod.offset)[:, None]
    return dataclasses.replace(mod, batch=batch, head=head, offset=offset)


def pairs(mod: BoundMod, rows: Block, keys: Block, group: int):
    """Batch row, head, position and key of each pair, to broadcast against [B, K, rows, keys]."""
    position, head = each_row(rows.index[None] + mod.offset, group), mod.head
    if mod.mod.uses_head:
        head = jnp.broadcast_to(head, (*head.shape[:3], rows.size)).reshape(1, head.shape[1], -1, 1)
    return mod.batch[:, None, None, None], head, position, keys.index
