"""A block mask: a mask with the types of its blocks, computed once for many calls, or drawn."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.checks.sizes import Sizes
from pallas_flash.jax_support import pytrees
from pallas_flash.masks import block_types
from pallas_flash.masks.key_lists import KeyLists
from pallas_flash.masks.mask import And, BlockTypes, Mask, conjuncts, leaves, split, with_leaves
from pallas_flash.masks.resolution import resolve, split_lists

LARGEST_DRAWING = 2**20  # characters, 1024 x 1024


@pytrees.dataclass(repr=False)
class BlockMask(And):
    """A mask with the type of each block of queries and keys: empty, partial or full. A pytree,
    made by `create_block_mask`.

    Examples:
      >>> from pallas_flash import masks
      >>> mask = masks.create_block_mask(masks.Causal(), 6, 8, block=2)
      >>> mask
      BlockMask(Causal(), 6 x 8 in blocks of 2: 6 skipped, 3 full, 3 partial)
      >>> print(masks.draw(mask, 6, 8))
      1 . . . . . . .
      1 1 . . . . . .
      1 1 1 . . . . .
      1 1 1 1 . . . .
      1 1 1 1 1 . . .
      1 1 1 1 1 1 . .
      >>> print(masks.draw(mask, 6, 8, block=2))
      / . . .
      1 / . .
      1 1 / .
    """

    def counts(self) -> dict[str, int]:
        """How many blocks are skipped, full and partial, over all batch rows and heads."""
        kind = np.asarray(self.second.block_types)
        names = dict(skipped=block_types.EMPTY, full=block_types.FULL, partial=block_types.PARTIAL)
        return {name: int(np.sum(kind == number)) for name, number in names.items()}

    def __repr__(self):
        types = self.second
        size = f"{types.queries} x {types.keys} in blocks of {types.block_size}"
        if isinstance(types.block_types, jax.core.Tracer):
            return f"BlockMask({self.first!r}, {size})"
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items())
        return f"BlockMask({self.first!r}, {size}: {counts})"


@unexpected.refused
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
    """Computes the types of a mask's blocks, as in FlexAttention. Create a block mask once, outside
    of layers, jit and scan, for all the calls that take it.

    These calls must have this number of queries and keys, and this query_offset. `batch` and
    `heads` are needed where the mask depends on them. Without a block mask, a call computes the
    types of a MaskMod that reads no arrays while it is traced, if there are not too many blocks.

    Raises:
      TypeError: mask is no object of `pallas_flash.masks`, or query_offset is not static.
      ValueError: a size is no static int from 1 on, or `batch` is not the rows of the arrays.

    Examples:
      >>> from pallas_flash import masks
      >>> dilated = masks.Dilated(8) & masks.Window(128, 0)
      >>> masks.create_block_mask(dilated, 512, 512).counts()
      {'skipped': 43, 'full': 0, 'partial': 21}
    """
    if mask is None:
        raise TypeError(
            "mask must be an object of pallas_flash.masks, as masks.Causal(); got None."
        )
    queries, keys = checks.count("queries", queries), checks.count("keys", keys)
    block, batch = checks.count("block", block), checks.count("batch", batch)
    heads, query_offset = checks.count("heads", heads), _static("query_offset", query_offset)
    whole = (_as_arrays(x.canonical((queries, keys))) for x in leaves(mask))
    whole = with_leaves(mask, (_fitting(x, queries, heads) for x in whole))
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
    types = block_types.compute(resolved_mask, batch, heads, queries, block, block)
    count = len(split_lists(split(conjuncts(whole))[1])[1])
    uses = False, False
    if (bound := resolved_mask.mask_mod) is not None:
        uses = bound.mod.uses_batch, bound.mod.uses_head
    return BlockMask(mask, BlockTypes(types, count, uses, queries, keys, block, query_offset))


@unexpected.refused
def draw(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    block: int = 1,
    query_offset: int = 0,
    batch: int = 1,
    heads: int = 1,
) -> str:
    """The mask as text: a line for each query, with 1 where it sees a key and a dot where it does
    not. Batch rows and heads that differ stand side by side.

    With `block` each character is a block of so many queries and keys: 1 if it is full, / partial,
    a dot if it is empty. Arguments and errors are as for `create_block_mask`; besides, a drawing
    of more than 2^20 characters raises, and one under jax.jit.

    Examples:
      >>> from pallas_flash import masks
      >>> by_head = masks.MaskMod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= h)
      >>> print(masks.draw(by_head, 6, 8, query_offset=2, heads=2))
      . . 1 1 1 1 1 1   . 1 1 1 1 1 1 1
      . . . 1 1 1 1 1   . . 1 1 1 1 1 1
      . . . . 1 1 1 1   . . . 1 1 1 1 1
      . . . . . 1 1 1   . . . . 1 1 1 1
      . . . . . . 1 1   . . . . . 1 1 1
      . . . . . . . 1   . . . . . . 1 1
      >>> print(masks.draw(masks.Causal(), 600, 800, block=100))
      / . . . . . . .
      1 / . . . . . .
      1 1 / . . . . .
      1 1 1 / . . . .
      1 1 1 1 / . . .
      1 1 1 1 1 / . .
    """
    sizes = dict(block=block, query_offset=query_offset, batch=batch, heads=heads)
    _check_drawable(**sizes | dict(queries=queries, keys=keys))
    types = create_block_mask(mask, queries, keys, **sizes).second.block_types
    if isinstance(types, jax.core.Tracer):
        raise TypeError("draw prints values, which are not known under jax.jit: call it outside.")
    types = np.asarray(types)
    matrices = np.array(list("./1"))[types].reshape(-1, *types.shape[2:])
    return "\n".join("   ".join(map(" ".join, line)) for line in matrices.swapaxes(0, 1))


def _check_drawable(*, queries, keys, block, batch, heads, **_):
    """Raises where a drawing would be too large."""
    sizes = dict(queries=queries, keys=keys, block=block, batch=batch, heads=heads)
    for name, size in sizes.items():
        checks.count(name, size)
    characters = batch * heads * -(-queries // block) * -(-keys // block)
    if characters > LARGEST_DRAWING:
        less = 2 ** math.ceil(math.log2(max(queries, keys) / 64))
        raise ValueError(
            f"draw makes a character for each block of queries and keys, {LARGEST_DRAWING} at "
            f"most; got {characters}. Draw larger blocks: block={less}."
        )


def _static(name: str, x) -> int:
    offset = checks.ints(name, x)
    if not checks.is_int(x):
        raise TypeError(
            f"{name} must be a static int, the same for all batch rows; got "
            f"{checks.description(x)}."
        )
    return int(offset)


def _fitting(part: Mask, queries: int, heads: int) -> Mask:
    if not isinstance(part, KeyLists):
        return part
    lists = part.indices.shape[-2]
    sizes = dict(T=queries, N=heads, K=math.gcd(heads, lists))
    return part.fitting(Sizes(part.indices.shape[:-3], sizes))


def _as_arrays(part: Mask) -> Mask:
    arrays = {
        name: jnp.array(x, ndmin=len(c))
        for name, c in part.ARRAYS.items()
        if (x := getattr(part, name)) is not None
    }
    return dataclasses.replace(part, **arrays) if arrays else part
