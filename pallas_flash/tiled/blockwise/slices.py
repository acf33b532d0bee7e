"""Slices of arrays, to take out and to put back: a block of neighbouring rows or keys, and a range
of batch rows and heads. They have the indices at which a mask_mod or a score_mod is evaluated
there."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods.bound import BoundMod
from pallas_flash.problem.arguments import Problem


class Block(NamedTuple):
    """`size` neighbouring rows or keys. What is before `first_new` (None: nothing) is in the
    block before it too."""

    start: IntLike
    size: int
    first_new: IntLike | None = None

    @property
    def index(self):
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def take(self, x, axis: int):
        """The block of x, or all of an axis that broadcasts."""
        return _take(x, {axis % x.ndim: (self.start, self.size)})

    def put(self, x, block, axis: int):
        return _put(x, block, {axis % x.ndim: self.start})

    def add(self, x, block, axis: int):
        return self.put(x, self.take(x, axis) + block, axis)


def block_at(index: IntLike, size: int, length: int) -> Block:
    """The block of an array of this length with this index. The last of a ragged array is moved
    back until it ends with the array."""
    if isinstance(length, int) and length % size == 0:
        return Block(index * size, size)
    start = jnp.minimum(index * size, length - size)
    return Block(start, size, index * size)


class HeadRange(NamedTuple):
    """`batch` batch rows from `row` on, and of them `heads` key/value heads of K from `head` on. An
    axis of size 1 broadcasts."""

    row: IntLike
    batch: int
    head: IntLike
    heads: int
    K: int

    def take(self, x, axis: int | None = None):
        """The range of batch rows of x [B | 1, ..], and of the query heads or key/value heads on
        `axis`."""
        return _take(x, self._ranges(x, axis))

    def put(self, x, part, axis: int):
        return _put(x, part, {at: start for at, (start, _) in self._ranges(x, axis).items()})

    def add(self, x, part, axis: int):
        return self.put(x, self.take(x, axis) + part, axis)

    def _ranges(self, x, axis):
        ranges = {0: (self.row, self.batch)}
        if axis is not None:
            each = x.shape[axis] // self.K  # 0 where the heads broadcast
            ranges[axis] = self.head * each, self.heads * each
        return ranges


def each_row(x, group: int):
    """[B | 1, block_q | 1] -> [B | 1, 1, rows | 1, 1], with the rows of all query heads of a
    group"""
    return jnp.tile(x[:, None, :, None], (1, 1, group if x.shape[1] != 1 else 1, 1))


def _take(x, ranges):
    sizes = {axis: size for axis, (_, size) in ranges.items() if x.shape[axis] not in (1, size)}
    if not sizes:
        return x
    starts = [ranges[axis][0] if axis in sizes else 0 for axis in range(x.ndim)]
    shape = [sizes.get(axis, n) for axis, n in enumerate(x.shape)]
    if all(isinstance(n, int) for n in (*starts, *shape)):
        return lax.slice(x, starts, [start + n for start, n in zip(starts, shape, strict=True)])
    return xla_cpu.dynamic_slice(x, _int32(starts), shape)


def _put(x, part, starts):
    part = part.astype(x.dtype)
    if part.shape == x.shape:
        return part
    starts = [
        starts.get(axis, 0) if part.shape[axis] != x.shape[axis] else 0 for axis in range(x.ndim)
    ]
    return lax.dynamic_update_slice(x, part, _int32(starts), allow_negative_indices=False)


def _int32(starts) -> list:
    return [np.int32(i) if isinstance(i, int) else jnp.asarray(i, jnp.int32) for i in starts]


def for_heads(mod: BoundMod | None, p: Problem, heads: HeadRange) -> BoundMod | None:
    """The mod with the indices of a range of batch rows [B] and heads [1, K, G, 1]."""
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
