"""A block mask: a mask with the types of its blocks, found once for many calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.jax_support import pytrees
from pallas_flash.masks import block_types
from pallas_flash.masks.mask import And, BlockTypes, Mask, conjuncts, leaves, split, with_leaves
from pallas_flash.masks.resolution import resolve


@pytrees.dataclass(repr=False)
class BlockMask(And):
    """A mask and the type of each block of queries and keys: empty, partial or full. A pytree,
    made by `create_block_mask`."""

    def counts(self) -> dict[str, int]:
        """How many blocks are skipped, full and partial, over all batch rows and heads."""
        kind = np.asarray(self.second.block_types)
        of = dict(skipped=block_types.EMPTY, full=block_types.FULL, partial=block_types.PARTIAL)
        return {name: int(np.sum(kind == number)) for name, number in of.items()}

    def __repr__(self):
        of = self.second
        size = f"{of.queries} x {of.keys} in blocks of {of.block_size}"
        if isinstance(of.block_types, jax.core.Tracer):
            return f"BlockMask({self.first!r}, {size})"
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items())
        return f"BlockMask({self.first!r}, {size}: {counts})"


@unexpected.refused()
def create_block_mask(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    block: int = 64,
    query_offset: int = 0,
    batch: int = 1,
    heads: int = 1,
) -> BlockMask:
    """The mask with the types of its blocks, as in FlexAttention. Create it once, outside of
    layers, jit and scan, for all the calls that take it.

    These calls must have this number of queries and keys, and this query_offset. `batch` and
    `heads` are needed where the mask depends on them. Without it a call finds the types of a
    MaskMod that reads no arrays while it is traced, if the blocks are not too many.

    Raises:
      TypeError: no mask of `pallas_flash.masks`, or an offset that is not static.
      ValueError: a size that is no static int from 1 on, or arrays of other rows than `batch`.

    Examples:
      >>> from pallas_flash import masks
      >>> dilated = masks.Dilated(8) & masks.Window(128, 0)
      >>> masks.create_block_mask(dilated, 512, 512).counts()
      {'skipped': 43, 'full': 0, 'partial': 21}
    """
    queries, keys = checks.count("queries", queries), checks.count("keys", keys)
    block, batch = checks.count("block", block), checks.count("batch", batch)
    heads, query_offset = checks.count("heads", heads), _static("query_offset", query_offset)
    whole = with_leaves(mask, (_as_arrays(x.canonical((queries, keys))) for x in leaves(mask)))
    rows = {
        len(x)
        for part in leaves(whole)
        for name in part.ARRAYS
        if (x := getattr(part, name)) is not None
    }
    if len({batch, *rows} - {1}) > 1:
        raise ValueError(
            f"batch must be the rows of the mask's arrays, {max(rows)}, or 1; got {batch}."
        )
    batch = max({batch, *rows})
    resolved_mask = resolve(conjuncts(whole), batch, queries, keys, query_offset)
    found = block_types.compute(resolved_mask, batch, heads, queries, block, block)
    count = len(split(conjuncts(whole))[1])
    uses = False, False
    if (bound := resolved_mask.mask_mod) is not None:
        uses = bound.mod.uses_batch, bound.mod.uses_head
    return BlockMask(mask, BlockTypes(found, count, uses, queries, keys, block, query_offset))


def _static(name: str, x) -> int:
    offset = checks.ints(name, x)
    if not checks.is_int(x):
        raise TypeError(
            f"{name} must be a static int, the same for all batch rows; got "
            f"{checks.description(x)}."
        )
    return int(offset)


def _as_arrays(part: Mask) -> Mask:
    arrays = {
        name: jnp.array(x, ndmin=len(c))
        for name, c in part.ARRAYS.items()
        if (x := getattr(part, name)) is not None
    }
    return dataclasses.replace(part, **arrays) if arrays else part
