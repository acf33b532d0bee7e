"""Lists of blocks as a table, which a mask_mod reads, and the types of blocks, by which kernels
skip blocks that no list names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_flash.masks import block_types
from pallas_flash.masks.expression import Place, as_mask_mod
from pallas_flash.masks.key_lists import ListTable
from pallas_flash.masks.mask import And, Mask, MaskMod
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.mask_mod import BoundMaskMod

BLOCK = 64  # queries and keys of a block whose type is told


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once for calls that are alike
def with_table(mask: ResolvedMask, heads: int, queries: int) -> ResolvedMask:
    """The mask of so many heads and queries, with a table of blocks in place of its lists."""
    lists, others = ListTable.of(mask.lists, heads), mask.mask_mod
    parts: list[Mask] = [lists]
    if others is not None:
        parts.append(
            MaskMod(
                others.mod,
                others.mod.name,
                arrays=others.arrays,
                batch=others.batch,
                head=others.head,
            )
        )
    joined, offset = functools.reduce(And, parts), 0 if others is None else others.offset
    one = as_mask_mod(joined, Place(offset, None), lambda _: None)
    bound = BoundMaskMod(one.function, one.arrays, offset, None, None)
    if isinstance(queries, int) and isinstance(mask.keys, int):  # else symbols of jax.export
        types = mask.lists.block_types(lists.table, queries, BLOCK)
        if 1 < types.shape[1] < heads:
            types = jnp.repeat(types, lists.group, axis=1)
        if others is not None:  # they may hide pairs of any block
            types = jnp.minimum(types, block_types.PARTIAL)
        bound = dataclasses.replace(bound, block_types=types, block_size=BLOCK)
    return dataclasses.replace(mask, lists=None, mask_mod=bound)
