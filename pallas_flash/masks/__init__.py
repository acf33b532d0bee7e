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
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.masks.block_mask import BlockMask as BlockMask
from pallas_flash.masks.block_mask import create_block_mask as create_block_mask
from pallas_flash.masks.block_mask import draw as draw
from pallas_flash.masks.key_lists import KeyLists as KeyLists
from pallas_flash.masks.mask import BlockTypes as BlockTypes
from pallas_flash.masks.mask import Mask as Mask
from pallas_flash.masks.mask import MaskMod as MaskMod
from pallas_flash.masks.mask import conjuncts as conjuncts
from pallas_flash.masks.mask import leaves as leaves
from pallas_flash.masks.mask import with_leaves as with_leaves
from pallas_flash.masks.mask import without_block_types as without_block_types
from pallas_flash.masks.resolution import positions_of as positions_of
from pallas_flash.masks.resolution import resolve as resolve
from pallas_flash.masks.resolution import with_table as with_table
from pallas_flash.masks.resolution import within_reach as within_reach
from pallas_flash.masks.resolved_mask import REACH, clip
from pallas_flash.masks.sequences import Documents as Documents
from pallas_flash.masks.sequences import Varlen as Varlen


@unexpected.refused
@pytrees.dataclass
class Window(Mask):
    """The query at position p sees the keys p - left to p + right, both inclusive; None is no limit
    on that side. local_window_size=4 is Window(4, 4).

    A side is a static int, or an int32 array: [] for all batch rows, or [B]. Arrays may be traced,
    so that one body of jax.lax.scan has local layers and global ones, whose side is S or more.
    Blocks out of sight are skipped in both forms; with ints they are known when the call is
    compiled. Values below 0 raise; traced ones cannot, and hide the query's own key.

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

    left: Any
    right: Any

    def __post_init__(self):
        for name, side in (("left", self.left), ("right", self.right)):
            if checks.is_int(side) and not isinstance(side, bool) and 0 <= side < 2**31:
                object.__setattr__(self, name, int(side))
            elif isinstance(side, int | float | str | np.generic):
                raise ValueError(
                    f"a window is (left, right), each an int from 0 to {2**31 - 1}, an array of "
                    f"such ints or None; got ({self.left!r}, {self.right!r})."
                )
        super().__post_init__()

    def __repr__(self):
        if self.left is None and isinstance(self.right, int) and self.right == 0:
            return "Causal()"
        left, right = pytrees.shown((self.left, self.right))
        return f"Window(left={left}, right={right})"

    @property
    def ARRAYS(self) -> dict[str, str]:
        sides = dict(left=self.left, right=self.right)
        return {name: "B" for name, x in sides.items() if x is not None and not checks.is_int(x)}

    def _arrays(self):
        """left and right as int32; what is traced, at a distance from which no key is seen."""
        arrays = super()._arrays()
        for name, x in arrays.items():
            checks.from_zero(f"Window.{name}", x)
        return {
            name: x if checks.is_known(x) else jnp.maximum(x, -REACH) for name, x in arrays.items()
        }

    def _near(self) -> tuple[IntLike | None, IntLike | None]:
        return tuple(None if x is None else clip(x, -REACH, REACH) for x in (self.left, self.right))

    def band(self):
        return self.left, self.right

    def interval(self, row, position):
        by_row = lambda x: x if x is None or isinstance(x, int) else jnp.reshape(x, (-1, 1))
        left, right = map(by_row, self._near())
        return (
            None if left is None else position - left,
            None if right is None else position + right + 1,
        )

    def narrow(self, mask, rows):
        if rows.positions is not None:
            return super().narrow(mask, rows)
        return mask.with_window(rows, self.left, self.right)

    def mask_mod(self):
        if self.ARRAYS:
            return None
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
    """A query sees the keys of its own chunk of `size` positions; with Causal() the keys up to its
    own position.

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
    """Every query sees the first prefix[b] keys, and the keys up to its own position; prefix is
    int32 [B].

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
