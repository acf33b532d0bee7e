"""What a mask is, and what &, | and ~ make of it: `&` keeps intervals of keys, and all else becomes
a `MaskMod`, at once or in a call."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.mods.mask_mod import trace_mask_mod
from pallas_flash.mods.traced import TracedMod
from pallas_flash.pytrees import IntLike, register

# no query and key lie further apart: offsets and windows are cut there, and no sum of positions
# leaves int32
REACH = 2**28


class Mask:
    """A rule that says which keys each query may see: `a & b` shows the keys that both show, `a |
    b` those that at least one shows, `~a` those that a does not. Lengths within | or ~ are a rule
    like any other: NaN behind them is not kept out."""

    # its int32 arrays: field name -> letters of its shape, out of B, T, S and C, any size
    ARRAYS = {}

    def interval(self, row: IntLike, position: IntLike) -> tuple[IntLike, IntLike]:
        """The keys [start, stop) that queries see; both broadcast against [B, T].

        `row` [1, T] counts the queries; `position` [B, T] or [1, T] is the key position of each,
        row + query_offset.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method interval(self, row, position)."
        )

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"& joins two objects of pallas_flash.masks; got {type(other).__name__}. Pass an "
                "array alone as mask=: "
                "is_causal, local_window_size, lengths and segment ids may stand beside it."
            )
        return Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _either(self, other)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is not a bool: combine masks with &, | and ~; `and`, `or` and `not` would drop "
            "one."
        )

    def __invert__(self) -> "Mask":
        mask = without_block_types(self)
        f = mask.mask_mod()
        return (
            Not(mask) if f is None else MaskMod(lambda *at: jnp.logical_not(f(*at)), f"~({mask!r})")
        )

    def mask_mod(self) -> Callable | None:
        """The mask as a mask_mod(b, h, q_idx, kv_idx); None where only a call tells what it shows,
        by its rows."""
        return None

    __rand__ = __and__  # of what is no mask
    __ror__ = __or__
    __array_ufunc__ = None  # or numpy would ask for each of its entries


class Joined(Mask):
    """Made of other masks, its fields."""


@dataclasses.dataclass(frozen=True, repr=False)
class Both(Joined):
    """Lets a query see the keys that both masks let it see."""

    first: Mask
    second: Mask

    def __repr__(self):
        return f"{self.first!r} & {self.second!r}"

    def mask_mod(self):
        f, g = self.first.mask_mod(), self.second.mask_mod()
        return None if f is None or g is None else lambda *at: jnp.logical_and(f(*at), g(*at))


@dataclasses.dataclass(frozen=True, repr=False)
class Either(Joined):
    """Lets a query see the keys that at least one of the masks lets it see; a call makes a rule of
    it."""

    first: Mask
    second: Mask

    def __repr__(self):
        return f"({self.first!r} | {self.second!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class Not(Joined):
    """Lets a query see the keys that the mask does not let it see; a call makes a rule of it."""

    mask: Mask

    def __repr__(self):
        return f"~({self.mask!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class MaskMod(Mask):
    """Any rule: mask_mod(b, h, q_idx, kv_idx), given four int32 numbers, returns a bool that jax
    can trace.

    b and h count batch rows (over all leading axes) and query heads; q_idx is the query's key
    position, its row + query_offset. mask_mod may close over jax arrays, traced ones too. Two
    MaskMods are equal if they compute the same.
    """

    function: Any  # a TracedMod, once made
    name: str | None = dataclasses.field(default=None, compare=False)
    arrays: tuple | None = None  # that it closes over
    batch: Any = None  # the numbers of batch rows and heads, where these are not all
    head: Any = None
    ARRAYS = {"batch": "B", "head": "N"}

    def __post_init__(self):
        if not isinstance(self.function, TracedMod):
            function, arrays = trace_mask_mod(self.function, self.name)
            object.__setattr__(self, "function", function)
            object.__setattr__(self, "arrays", arrays)

    def __repr__(self):
        return self.function.name if self.name else f"MaskMod({self.function.name})"

    def mask_mod(self):
        return lambda *at: self.function(self.arrays, *at)

    def with_indices(self, batch: tuple[int, ...], heads: int) -> "MaskMod":
        """The same with the batch rows' and heads' numbers as arrays, where it asks for them."""
        return dataclasses.replace(self, **self.function.index_arrays(batch, heads))


@dataclasses.dataclass(frozen=True)
class BlockTypes(Mask):
    """What is known of the blocks of a mask that this stands beside: int8 `block_types` as in
    block_types.py."""

    block_types: Any  # [B | 1, N | 1, query blocks, key blocks]
    rules: int  # how many parts of the mask that are no intervals it knows
    asks: tuple[bool, bool]  # whether one of these tells batch rows, and heads, apart
    queries: int
    keys: int
    block_size: int
    offset: int
    ARRAYS = {"block_types": "BNTS"}

    def fitting(self, batch: int, heads: int) -> "BlockTypes":
        """The same, if it was made for so many batch rows and heads, or for any."""
        shape = self.block_types.shape
        block_types = self.block_types.reshape(math.prod(shape[:-3]), *shape[-3:])
        made = block_types.shape[:2]
        if any(
            n != m and (n > 1 or asked)
            for n, m, asked in zip(made, (batch, heads), self.asks, strict=True)
        ):
            raise ValueError(
                f"the block mask was made for (batch, heads) = {made}; the call's are "
                f"{(batch, heads)}."
            )
        return dataclasses.replace(self, block_types=block_types)

    def with_indices(self, batch: tuple[int, ...], heads: int) -> "BlockTypes":
        """The same with these leading axes in place of all batch rows, where it tells them
        apart."""
        block_types = self.fitting(math.prod(batch), heads).block_types
        return (
            self
            if block_types.shape[0] == 1
            else dataclasses.replace(
                self, block_types=block_types.reshape(*batch, *block_types.shape[1:])
            )
        )


def Dilated(stride: int) -> MaskMod:
    """A query sees every stride-th key, counted from its own position."""
    positive("a stride", stride)
    return MaskMod(lambda b, h, q, k: (q - k) % stride == 0, f"Dilated({stride})")


def GlobalTokens(n: int) -> MaskMod:
    """The first n positions see all keys, and all queries see the first n keys: `Window(128, 128) |
    GlobalTokens(4)`."""
    positive("the number of global tokens", n)
    return MaskMod(lambda b, h, q, k: (q < n) | (k < n), f"GlobalTokens({n})")


def positive(what: str, n):
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 < n <= REACH:
        raise ValueError(f"{what} must be an int from 1 to {REACH}; got {n!r}.")


def _either(a: Mask, b: Mask) -> Mask:
    if not isinstance(b, Mask):
        raise TypeError(
            f"| joins two objects of pallas_flash.masks; got {type(b).__name__}. An array x "
            "becomes one as "
            "masks.MaskMod(lambda b, h, q_idx, kv_idx: jnp.asarray(x)[q_idx, kv_idx])."
        )
    a, b = without_block_types(a), without_block_types(b)
    return (
        Either(a, b) if a.mask_mod() is None or b.mask_mod() is None else joined(operator.or_, a, b)
    )


def joined(join: Callable, a: Mask, b: Mask) -> MaskMod:
    """Of two masks that are functions of positions."""
    f, g = a.mask_mod(), b.mask_mod()
    sign = {operator.or_: "|", operator.and_: "&"}[join]
    return MaskMod(lambda *at: join(f(*at), g(*at)), f"({a!r} {sign} {b!r})")


def both(a: MaskMod, b: MaskMod) -> MaskMod:
    """Of two whose numbers of batch rows and heads are the same, where they have any."""
    known = lambda x, y: y if x is None else x
    return dataclasses.replace(
        joined(operator.and_, a, b), batch=known(a.batch, b.batch), head=known(a.head, b.head)
    )


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` put together."""
    return [] if mask is None else _leaves(mask, Both)


class _Shown:
    """An array by its type."""

    def __init__(self, x):
        self.text = f"{x.dtype}{list(x.shape)}"

    def __repr__(self):
        return self.text


def shown(mask: Mask) -> str:
    """The mask in words, without the numbers of its arrays."""
    return repr(jax.tree.map(lambda x: _Shown(x) if hasattr(x, "dtype") else x, mask))


def without_block_types(mask: Mask) -> Mask:
    """The mask without what is known of its blocks."""
    return functools.reduce(
        Both, [part for part in conjuncts(mask) if not isinstance(part, BlockTypes)]
    )


def leaves(mask: Mask | None) -> list[Mask]:
    """The masks that &, | and ~ put together, in order."""
    return [] if mask is None else _leaves(mask, Joined)


def _leaves(mask: Mask, of: type) -> list[Mask]:
    if not isinstance(mask, Mask):
        raise TypeError(
            "mask must be an object of pallas_flash.masks, as masks.Causal(); got "
            f"{type(mask).__name__}."
        )
    return (
        [x for part in _inside(mask).values() for x in _leaves(part, of)]
        if isinstance(mask, of)
        else [mask]
    )


def with_leaves(mask: Mask | None, new: Iterator[Mask]) -> Mask | None:
    """The mask with the next ones of `new` in place of its leaves."""
    if mask is None:
        return None
    if not isinstance(mask, Joined):
        return next(new)
    return dataclasses.replace(
        mask, **{name: with_leaves(part, new) for name, part in _inside(mask).items()}
    )


def _inside(mask: Joined) -> dict[str, Mask]:
    return {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}


for _cls in (Both, Either, Not):
    register(_cls)
register(MaskMod, "function", "name")
register(BlockTypes, "asks")
