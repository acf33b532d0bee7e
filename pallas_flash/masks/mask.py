"""The base class of masks, and their `&`, `|` and `~`: `&` keeps intervals of keys; all else
becomes a `MaskMod`, at once or in a call."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks
from pallas_flash.checks import unexpected
from pallas_flash.checks.sizes import Sizes
from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.bound import trace_mask_mod
from pallas_flash.mods.traced import TracedMod


class Mask:
    """Which keys each query may see: `a & b` shows the keys that both show, `a | b` the keys that
    at least one shows, `~a` the keys that a hides. Lengths within | or ~ mask as any rule does: NaN
    behind them may reach the output.

    For a mask of your own take `MaskMod`, or a subclass that defines `interval`: which blocks to
    skip is then known without evaluating the mask.

    Examples:
      >>> from pallas_flash import masks
      >>> print(masks.draw(masks.Causal() & masks.Chunked(4), 6, 8))
      1 . . . . . . .
      1 1 . . . . . .
      1 1 1 . . . . .
      1 1 1 1 . . . .
      . . . . 1 . . .
      . . . . 1 1 . .
      >>> print(masks.draw(~masks.Window(1, 1) | masks.GlobalTokens(1), 6, 8))
      1 1 1 1 1 1 1 1
      1 . . 1 1 1 1 1
      1 . . . 1 1 1 1
      1 1 . . . 1 1 1
      1 1 1 . . . 1 1
      1 1 1 1 . . . 1
    """

    # int32 arrays: field name -> letters of the shape, B, T, S, or C for any size
    ARRAYS = {}
    is_interval = True  # of keys, for each query
    has_ids = False  # document ids, of which a ResolvedMask holds one set
    is_divisible = True  # into chunks of queries and keys, as a ring divides them

    def __post_init__(self):
        """Raises if an array of integers has another dtype; a PartitionSpec may stand for it."""
        for name in self.ARRAYS:
            x = getattr(self, name, None)
            if checks.is_array(x) or isinstance(x, list | bool | float):
                checks.integers(f"{type(self).__name__}.{name}", x)

    def canonical(self, tokens: tuple[IntLike, IntLike] | None = None) -> "Mask":
        """The mask with its arrays as int32; an int that stands for all batch rows stays. Raises if
        they are no integers, or do not fit `tokens`, (T, S), if given."""
        arrays = self._arrays()
        return dataclasses.replace(self, **arrays) if arrays else self

    def fitting(self, sizes: Sizes) -> "Mask":
        """The canonical mask with its arrays as [B, ..]. Raises if they do not fit a call of these
        sizes."""
        arrays = {}
        for field, letters in self.ARRAYS.items():
            if (x := getattr(self, field)) is None:
                continue
            name = f"{type(self).__name__}.{field}"
            if letters == "B" and np.ndim(x) == 0:
                x = jnp.broadcast_to(checks.ints(name, x), sizes.lead)
            arrays[field] = sizes.ints(name, sizes.broadcast_rows(x, letters), letters)
        return dataclasses.replace(self, **arrays) if arrays else self

    def for_mesh(self, lead: tuple[int, ...], heads: int, kv_heads: int) -> "Mask":
        """The mask as a mesh shards it: ARRAYS has a letter for each axis, and the indices of batch
        rows and heads that it uses are arrays, by row with the leading axes `lead`."""
        return self

    def _arrays(self) -> dict[str, Any]:
        """The fields of ARRAYS as int32."""
        has_default = lambda name: hasattr(type(self), name)
        given = {
            name: x
            for name in self.ARRAYS
            if (x := getattr(self, name)) is not None or not has_default(name)
        }
        is_number = lambda x: checks.is_int(x) and not isinstance(x, bool)
        to_int32 = lambda name, x: checks.ints(f"{type(self).__name__}.{name}", x)
        return {name: int(x) if is_number(x) else to_int32(name, x) for name, x in given.items()}

    def interval(self, row: IntLike, position: IntLike) -> tuple[IntLike | None, IntLike | None]:
        """The keys [start, stop) that queries see; both broadcast against [B, T], and None is no
        limit on that side.

        `row` [1, T] counts the queries; `position` [B, T] or [1, T] is the key position of each,
        row + query_offset.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method interval(self, row, position)."
        )

    def mask_mod(self) -> Callable | None:
        """The mask as a mask_mod(b, h, q_idx, kv_idx), which | and ~ take; None where only a call
        tells what it shows, by its rows."""
        return None

    def band(self) -> tuple[IntLike | None, IntLike | None] | None:
        """How many keys a query sees before and after its position, None: all; None if the mask is
        no such band. One with arrays has `narrow` too."""
        return None

    @property
    def has_positions(self) -> bool:
        """Whether the mask defines the key position of each row, in place of query_offset."""
        return False

    def positions(self, row: jax.Array) -> jax.Array:
        """The key positions [B, T] of the rows [1, T], if the mask defines them."""
        raise NotImplementedError

    def narrow(self, mask: ResolvedMask, rows) -> ResolvedMask:
        """The resolved mask, narrowed by this mask; `rows` are resolution.QueryRows."""
        return mask.with_interval(rows.shape, *rows.interval_of(self))

    def in_words(self) -> str:
        """The mask as it was written, without the values of its arrays."""
        if type(self).__repr__ is object.__repr__:
            return type(self).__name__
        return repr(pytrees.shown(self))

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"& joins two objects of pallas_flash.masks; got {checks.description(other)}. Pass "
                "an array alone as mask=; is_causal, local_window_size, lengths and segment ids "
                "may stand beside it."
            )
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"| joins two objects of pallas_flash.masks; got {checks.description(other)}. An "
                "array x becomes one as "
                "masks.MaskMod(lambda b, h, q_idx, kv_idx: jnp.asarray(x)[q_idx, kv_idx])."
            )
        a, b = without_block_types(self), without_block_types(other)
        has_mods = a.mask_mod() is not None and b.mask_mod() is not None
        return joined(operator.or_, a, b) if has_mods else Or(a, b)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is not a bool: combine masks with &, | and ~; `and`, `or` and `not` would drop "
            "one."
        )

    def __invert__(self) -> "Mask":
        mask = without_block_types(self)
        if (f := mask.mask_mod()) is None:
            return Not(mask)
        return MaskMod(lambda *at: jnp.logical_not(f(*at)), f"~({mask!r})")

    def __eq__(self, other) -> bool:
        """Whether both masks have one type and equal fields; a traced array equals itself alone."""
        if type(self) is not type(other) or not dataclasses.is_dataclass(self):
            return self is other
        return all(map(pytrees.are_equal, self._compared(), other._compared()))

    def __hash__(self) -> int:
        if not dataclasses.is_dataclass(self):
            return id(self)
        return hash((type(self), *map(pytrees.without_values, self._compared())))

    def _compared(self) -> list:
        return [getattr(self, field.name) for field in dataclasses.fields(self) if field.compare]

    __rand__ = __and__  # raises: the left operand is no mask
    __ror__ = __or__
    __array_ufunc__ = None  # or numpy would apply & to each entry of an array


class Joined(Mask):
    """A mask made of other masks, its fields."""


@pytrees.dataclass(repr=False)
class And(Joined):
    """Shows the keys that both masks show."""

    first: Mask
    second: Mask

    def __repr__(self):
        return f"{self.first!r} & {self.second!r}"

    def mask_mod(self):
        f, g = self.first.mask_mod(), self.second.mask_mod()
        return None if f is None or g is None else lambda *at: jnp.logical_and(f(*at), g(*at))


@pytrees.dataclass(repr=False)
class Or(Joined):
    """Shows the keys that at least one of the masks shows; a call makes a mask_mod of it."""

    first: Mask
    second: Mask
    is_interval = False

    def __repr__(self):
        return f"({self.first!r} | {self.second!r})"


@pytrees.dataclass(repr=False)
class Not(Joined):
    """Shows the keys that the mask hides; a call makes a mask_mod of it."""

    mask: Mask
    is_interval = False

    def __repr__(self):
        return f"~({self.mask!r})"


@unexpected.refused
@pytrees.dataclass(static=("function", "name"), repr=False)
class MaskMod(Mask):
    """Any function mask_mod(b, h, q_idx, kv_idx) that jax can trace: given four int32 scalars, it
    returns a bool, as in FlexAttention.

    b and h count batch rows (over all leading axes) and query heads; q_idx is the query's key
    position, its row + query_offset. mask_mod may close over jax arrays, traced ones too. Two
    MaskMods are equal if they compute the same.

    Args:
      function (Callable): the mask_mod.
      name: what the mask prints as; the function's name by default.

    Examples:
      >>> from pallas_flash import masks
      >>> strided = masks.MaskMod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 1) == 0)
      >>> print(masks.draw(strided & masks.Causal(), 6, 8, heads=3))
      1 . . . . . . .   1 . . . . . . .   1 . . . . . . .
      1 1 . . . . . .   . 1 . . . . . .   . 1 . . . . . .
      1 1 1 . . . . .   1 . 1 . . . . .   . . 1 . . . . .
      1 1 1 1 . . . .   . 1 . 1 . . . .   1 . . 1 . . . .
      1 1 1 1 1 . . .   1 . 1 . 1 . . .   . 1 . . 1 . . .
      1 1 1 1 1 1 . .   . 1 . 1 . 1 . .   . . 1 . . 1 . .
    """

    function: Any  # as given, then a TracedMod
    name: str | None = dataclasses.field(default=None, compare=False)
    _: dataclasses.KW_ONLY
    arrays: tuple | None = None  # captured by the function
    batch: Any = None  # indices of the batch rows and heads, None: all
    head: Any = None
    ARRAYS = {"batch": "B", "head": "N"}
    is_interval = False

    def __post_init__(self):
        if not isinstance(self.name, str | None):
            raise TypeError(f"MaskMod.name must be a text; got {checks.description(self.name)}.")
        if not isinstance(self.function, TracedMod):
            function, arrays = trace_mask_mod(self.function, self.name)
            object.__setattr__(self, "function", function)
            object.__setattr__(self, "arrays", arrays)

    def __repr__(self):
        return self.function.name if self.name else f"MaskMod({self.function.name})"

    def mask_mod(self):
        return lambda *at: self.function(self.arrays, *at)

    def for_mesh(self, lead, heads, kv_heads):
        return dataclasses.replace(self, **self.function.index_arrays(lead, heads))


@pytrees.dataclass(static=("uses",))
class BlockTypes(Mask):
    """The types of the blocks of the mask that it is joined with, int8 as in block_types.py. It
    hides nothing by itself."""

    block_types: Any  # [B | 1, N | 1, query blocks, key blocks]
    count: int  # of masks joined into the mask_mod that has these types
    uses: tuple[bool, bool]  # whether that mask_mod depends on the batch row, on the head
    queries: int
    keys: int
    block_size: int
    offset: int
    ARRAYS = {"block_types": "BNTS"}

    def canonical(self, tokens=None):
        return self

    def narrow(self, mask, rows):
        return mask

    def fitting(self, sizes):
        return self._for_rows(sizes.of["B"], sizes.of["N"])

    def _for_rows(self, batch: int, heads: int) -> "BlockTypes":
        """These types, reshaped to [B | 1, N | 1, ..]. Raises if they were made for other batch
        rows or heads, and depend on them."""
        shape = self.block_types.shape
        block_types = self.block_types.reshape(math.prod(shape[:-3]), *shape[-3:])
        made = block_types.shape[:2]
        sizes = zip(made, (batch, heads), self.uses, strict=True)
        if any(n != m and (n > 1 or is_used) for n, m, is_used in sizes):
            raise ValueError(
                f"the block mask was made for (batch, heads) = {made}; the call's are "
                f"{(batch, heads)}."
            )
        return dataclasses.replace(self, block_types=block_types)

    def for_mesh(self, lead, heads, kv_heads):
        types = self._for_rows(math.prod(lead), heads).block_types
        if types.shape[0] == 1:
            return self
        return dataclasses.replace(self, block_types=types.reshape(*lead, *types.shape[1:]))


def joined(join: Callable, a: Mask, b: Mask) -> MaskMod:
    """Joins two masks that are functions of positions."""
    f, g = a.mask_mod(), b.mask_mod()
    sign = {operator.or_: "|", operator.and_: "&"}[join]
    return MaskMod(lambda *at: join(f(*at), g(*at)), f"({a!r} {sign} {b!r})")


def both(a: MaskMod, b: MaskMod) -> MaskMod:
    """The & of two MaskMods that have the same indices of batch rows and heads, or none."""
    given = lambda x, y: y if x is None else x
    return dataclasses.replace(
        joined(operator.and_, a, b), batch=given(a.batch, b.batch), head=given(a.head, b.head)
    )


def without_block_types(mask: Mask) -> Mask:
    """The mask without its BlockTypes."""
    return functools.reduce(
        And, [part for part in conjuncts(mask) if not isinstance(part, BlockTypes)]
    )


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joined, in order."""
    return _leaves(mask, And)


def split(masks: list[Mask]) -> tuple[list[Mask], list[Mask]]:
    """The masks that one ResolvedMask holds as intervals, and the masks that become its mask_mod:
    masks that are no intervals, and document ids after the first."""
    intervals, others = [], []
    for mask in masks:
        is_held = mask.is_interval and not (mask.has_ids and any(x.has_ids for x in intervals))
        (intervals if is_held else others).append(mask)
    return intervals, others


def leaves(mask: Mask | None) -> list[Mask]:
    """The masks that &, | and ~ joined, in order."""
    return _leaves(mask, Joined)


def _leaves(mask: Mask | None, of: type) -> list[Mask]:
    if mask is None:
        return []
    if not isinstance(mask, Mask):
        raise TypeError(
            "mask must be an object of pallas_flash.masks, as masks.Causal(); got "
            f"{checks.description(mask)}.{checks.MASK_HINT * callable(mask)}"
        )
    if not isinstance(mask, of):
        return [mask]
    return [leaf for part in _inside(mask).values() for leaf in _leaves(part, of)]


def with_leaves(mask: Mask | None, new: Iterator[Mask]) -> Mask | None:
    """The mask with the masks of `new` in place of its leaves, in order."""
    if mask is None:
        return None
    if not isinstance(mask, Joined):
        return next(new)
    return dataclasses.replace(
        mask, **{name: with_leaves(part, new) for name, part in _inside(mask).items()}
    )


def _inside(mask: Joined) -> dict[str, Mask]:
    return {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
