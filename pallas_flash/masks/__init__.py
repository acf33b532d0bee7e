"""Which keys a query may see, as a user writes it: `Causal() & Window(128, 0)`.

Almost every mask in use lets query row i see a half-open interval of keys, [start(i), stop(i)); a
`MaskMod` is any other function of positions, and so is what | and ~ make. `resolve` turns several
masks into one `ResolvedMask`, which is all that the implementations know.

To add a kind of mask, write one class here, with a drawing in its docstring, and a case in
tests/cases.py. `interval` is all that it must define; with a `mask_mod` too, | and ~ need no call
to know what it shows.
"""

from typing import Any

import jax.numpy as jnp

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.jax_support import pytrees
from pallas_flash.masks.block_mask import BlockMask as BlockMask
from pallas_flash.masks.block_mask import create_block_mask as create_block_mask
from pallas_flash.masks.block_mask import draw as draw
from pallas_flash.masks.key_lists import KeyLists as KeyLists
from pallas_flash.masks.list_table import with_table as with_table
from pallas_flash.masks.mask import BlockTypes as BlockTypes
from pallas_flash.masks.mask import Mask as Mask
from pallas_flash.masks.mask import MaskMod as MaskMod
from pallas_flash.masks.mask import conjuncts as conjuncts
from pallas_flash.masks.mask import leaves as leaves
from pallas_flash.masks.mask import with_leaves as with_leaves
from pallas_flash.masks.mask import without_block_types as without_block_types
from pallas_flash.masks.resolution import positions_of as positions_of
from pallas_flash.masks.resolution import resolve as resolve
from pallas_flash.masks.resolution import within_reach as within_reach
from pallas_flash.masks.resolved_mask import REACH
from pallas_flash.masks.sequences import Documents as Documents
from pallas_flash.masks.sequences import Varlen as Varlen


@unexpected.refused
@pytrees.dataclass
class Window(Mask):
    """The query at position p sees the keys p - left to p + right, both inclusive; None is no limit
    on that side. local_window_size=4 is Window(4, 4).

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.Window(1, 0), 6, 8))
      1 . . . . . . .
      1 1 . . . . . .
      . 1 1 . . . . .
      . . 1 1 . . . .
      . . . 1 1 . . .
      . . . . 1 1 . .
    """

    left: int | None
    right: int | None

    def __post_init__(self):
        for name, side in (("left", self.left), ("right", self.right)):
            if side is None:
                continue
            if not checks.is_int(side) or isinstance(side, bool) or not 0 <= side < 2**31:
                raise ValueError(
                    f"a window is (left, right), each an int from 0 to {2**31 - 1} or None; got "
                    f"({self.left!r}, {self.right!r})."
                )
            object.__setattr__(self, name, int(side))

    def __repr__(self):
        is_causal = self.left is None and self.right == 0
        return "Causal()" if is_causal else f"Window(left={self.left}, right={self.right})"

    def _near(self) -> tuple[int | None, int | None]:
        return tuple(None if side is None else min(side, REACH) for side in (self.left, self.right))

    def band(self):
        return self.left, self.right

    def interval(self, row, position):
        left, right = self._near()
        return (
            None if left is None else position - left,
            None if right is None else position + right + 1,
        )

    def mask_mod(self):
        left, right = self._near()
        from_left = lambda q, k: True if left is None else k >= q - left
        return lambda b, h, q, k: jnp.logical_and(
            from_left(q, k), True if right is None else k <= q + right
        )


@unexpected.refused
def Causal() -> Window:
    """A query sees the keys up to its own position.

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.Causal(), 6, 8))
      1 . . . . . . .
      1 1 . . . . . .
      1 1 1 . . . . .
      1 1 1 1 . . . .
      1 1 1 1 1 . . .
      1 1 1 1 1 1 . .
    """
    return Window(None, 0)


@unexpected.refused
@pytrees.dataclass
class Chunked(Mask):
    """A query sees the keys of its own chunk of `size` positions; with Causal() those up to its own
    position.

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.Chunked(3), 6, 8))
      1 1 1 . . . . .
      1 1 1 . . . . .
      1 1 1 . . . . .
      . . . 1 1 1 . .
      . . . 1 1 1 . .
      . . . 1 1 1 . .
    """

    size: int

    def __post_init__(self):
        object.__setattr__(self, "size", checks.count("Chunked.size", self.size, REACH))

    def interval(self, row, position):
        start = position // self.size * self.size
        return start, start + self.size

    def mask_mod(self):
        return lambda b, h, q, k: q // self.size == k // self.size


@unexpected.refused
@pytrees.dataclass
class KeyLengths(Mask):
    """A query sees only the first lengths[b] keys; lengths is int32 [B].

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.KeyLengths([5, 3]), 6, 8))
      1 1 1 1 1 . . .   1 1 1 . . . . .
      1 1 1 1 1 . . .   1 1 1 . . . . .
      1 1 1 1 1 . . .   1 1 1 . . . . .
      1 1 1 1 1 . . .   1 1 1 . . . . .
      1 1 1 1 1 . . .   1 1 1 . . . . .
      1 1 1 1 1 . . .   1 1 1 . . . . .
    """

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def narrow(self, mask, rows):
        return mask.with_lengths("key_stop", self.lengths)


@unexpected.refused
@pytrees.dataclass
class KeyStarts(Mask):
    """A query sees no key before starts[b], as where prompts are padded on the left; starts is
    int32 [B].

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.KeyStarts([2]) & masks.Causal(), 6, 8))
      . . . . . . . .
      . . . . . . . .
      . . 1 . . . . .
      . . 1 1 . . . .
      . . 1 1 1 . . .
      . . 1 1 1 1 . .
    """

    starts: Any
    ARRAYS = {"starts": "B"}

    def interval(self, row, position):
        return self.starts[:, None], None


@unexpected.refused
@pytrees.dataclass
class QueryLengths(Mask):
    """Only the first lengths[b] queries see keys; lengths is int32 [B].

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.QueryLengths([4]), 6, 8))
      1 1 1 1 1 1 1 1
      1 1 1 1 1 1 1 1
      1 1 1 1 1 1 1 1
      1 1 1 1 1 1 1 1
      . . . . . . . .
      . . . . . . . .
    """

    lengths: Any
    ARRAYS = {"lengths": "B"}

    def narrow(self, mask, rows):
        return mask.with_lengths("query_stop", self.lengths)


@unexpected.refused
@pytrees.dataclass
class PrefixLM(Mask):
    """Every query sees the first prefix[b] keys, and those up to its own position; prefix is int32
    [B].

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.PrefixLM([3]), 6, 8))
      1 1 1 . . . . .
      1 1 1 . . . . .
      1 1 1 . . . . .
      1 1 1 1 . . . .
      1 1 1 1 1 . . .
      1 1 1 1 1 1 . .
    """

    prefix: Any
    ARRAYS = {"prefix": "B"}

    def interval(self, row, position):
        return None, jnp.maximum(position + 1, self.prefix[:, None])


@unexpected.refused
def Dilated(stride: int) -> MaskMod:
    """A query sees every stride-th key, counted from its own position.

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.Dilated(3), 6, 8))
      1 . . 1 . . 1 .
      . 1 . . 1 . . 1
      . . 1 . . 1 . .
      1 . . 1 . . 1 .
      . 1 . . 1 . . 1
      . . 1 . . 1 . .
    """
    stride = checks.count("Dilated.stride", stride, REACH)
    return MaskMod(lambda b, h, q, k: (q - k) % stride == 0, f"Dilated({stride})")


@unexpected.refused
def GlobalTokens(n: int) -> MaskMod:
    """The first n positions see all keys, and all queries see the first n keys: `Window(128, 128) |
    GlobalTokens(4)`. n may be 0: none do.

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.GlobalTokens(1), 6, 8))
      1 1 1 1 1 1 1 1
      1 . . . . . . .
      1 . . . . . . .
      1 . . . . . . .
      1 . . . . . . .
      1 . . . . . . .
    """
    n = checks.count("GlobalTokens.n", n, REACH, least=0)
    return MaskMod(lambda b, h, q, k: (q < n) | (k < n), f"GlobalTokens({n})")
