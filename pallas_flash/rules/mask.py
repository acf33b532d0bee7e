"""What a mask is, and what &, | and ~ make of it: intervals of keys stay intervals where they can, and all else is a `Where`."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_flash.rules import rule
from pallas_flash.rules.visibility import Ints, register

REACH = 2**28  # no query and key lie further apart: offsets and windows are cut there, and no sum of positions leaves int32


class Mask:
    """A rule that says which keys each query may see: `a & b` shows the keys that both show, `a | b` those that at least one
    shows, `~a` those that a does not."""

    ARRAYS = {}  # its int32 arrays: field name -> letters of its shape, out of B, T, S and C, any size

    def interval(self, row: Ints, position: Ints) -> tuple[Ints, Ints]:
        """The keys [start, stop) that queries see; both broadcast against [B, T].

        `row` [1, T] counts the queries; `position` [B, T] or [1, T] is the key position of each, row + query_offset.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method interval(self, row, position).")

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"& joins two objects of pallas_flash.masks; got {type(other).__name__}. Pass an array alone as mask=: "
                "is_causal, local_window_size, lengths and segment ids may stand beside it."
            )
        return Both(self, other)

    def __or__(self, other: "Mask") -> "Where":
        return joined(operator.or_, self, other)

    def __bool__(self) -> bool:
        raise TypeError("a mask is not a bool: combine masks with &, | and ~; `and`, `or` and `not` would drop one.")

    def __invert__(self) -> "Where":
        f = self.mask_mod()
        return Where(lambda *at: jnp.logical_not(f(*at)), f"~({self!r})")

    def mask_mod(self) -> Callable:
        """The mask as a mask_mod(b, h, q_idx, kv_idx), which `|` and `~` make theirs from."""
        raise TypeError(
            f"| and ~ take masks that depend on positions alone: Where, Causal, Window, Chunked, Dilated and GlobalTokens; got "
            f"{type(self).__name__}. Write the whole mask as one masks.Where(mask_mod)."
        )

    __rand__ = __and__  # of what is no mask
    __ror__ = __or__
    __array_ufunc__ = None  # or numpy would ask for each of its entries


@dataclasses.dataclass(frozen=True, repr=False)
class Both(Mask):
    """Lets a query see the keys that both masks let it see."""

    first: Mask
    second: Mask

    def __repr__(self):
        return f"{self.first!r} & {self.second!r}"

    def mask_mod(self):
        f, g = self.first.mask_mod(), self.second.mask_mod()
        return lambda *at: jnp.logical_and(f(*at), g(*at))


@dataclasses.dataclass(frozen=True, repr=False)
class Where(Mask):
    """Any rule: mask_mod(b, h, q_idx, kv_idx), given four int32 numbers, returns a bool that jax can trace.

    b and h count batch rows (over all leading axes) and query heads; q_idx is the query's key position, its row + query_offset.
    mask_mod may close over jax arrays, traced ones too. Two Where are equal if they compute the same.
    """

    function: Any  # a rule.Rule, once made
    name: str | None = dataclasses.field(default=None, compare=False)
    arrays: tuple | None = None  # that it closes over
    batch: Any = None  # the numbers of batch rows and heads, where these are not all
    head: Any = None
    ARRAYS = {"batch": "B", "head": "N"}

    def __post_init__(self):
        if not isinstance(self.function, rule.Rule):
            function, arrays = rule.trace(self.function, self.name)
            object.__setattr__(self, "function", function)
            object.__setattr__(self, "arrays", arrays)

    def __repr__(self):
        return self.function.name if self.name else f"Where({self.function.name})"

    def mask_mod(self):
        return lambda *at: self.function(self.arrays, *at)

    def numbered(self, batch: tuple[int, ...], heads: int) -> "Where":
        """The same with the batch rows' and heads' numbers as arrays, where it asks for them."""
        return dataclasses.replace(self, **self.function.numbered(batch, heads))


@dataclasses.dataclass(frozen=True)
class Kinds(Mask):
    """What is known of the blocks of a mask that this stands beside: int8 `kinds` as in kinds.py."""

    kinds: Any  # [B | 1, N | 1, query blocks, key blocks]
    rules: tuple  # of the Where that it knows
    queries: int
    keys: int
    block: int
    offset: int
    ARRAYS = {"kinds": "BNTS"}

    def fitting(self, batch: int, heads: int) -> "Kinds":
        """The same, if it was made for so many batch rows and heads, or for any."""
        shape = self.kinds.shape
        kinds = self.kinds.reshape(math.prod(shape[:-3]), *shape[-3:])
        asks = [any(getattr(rule, name) for rule in self.rules) for name in ("reads_batch", "reads_head")]
        made = kinds.shape[:2]
        if any(n != m and (n > 1 or asked) for n, m, asked in zip(made, (batch, heads), asks, strict=True)):
            raise ValueError(f"the block_map was made for (batch, heads) = {made}; the call's are {(batch, heads)}.")
        return dataclasses.replace(self, kinds=kinds)

    def numbered(self, batch: tuple[int, ...], heads: int) -> "Kinds":
        """The same with these leading axes in place of all batch rows, where it tells them apart."""
        kinds = self.fitting(math.prod(batch), heads).kinds
        return self if kinds.shape[0] == 1 else dataclasses.replace(self, kinds=kinds.reshape(*batch, *kinds.shape[1:]))


def Dilated(stride: int) -> Where:
    """A query sees every stride-th key, counted from its own position."""
    positive("a stride", stride)
    return Where(lambda b, h, q, k: (q - k) % stride == 0, f"Dilated({stride})")


def GlobalTokens(n: int) -> Where:
    """The first n positions see all keys, and all queries see the first n keys: `Window(128, 128) | GlobalTokens(4)`."""
    positive("the number of global tokens", n)
    return Where(lambda b, h, q, k: (q < n) | (k < n), f"GlobalTokens({n})")


def positive(what: str, n):
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 < n <= REACH:
        raise ValueError(f"{what} must be an int from 1 to {REACH}; got {n!r}.")


def joined(join: Callable, a: Mask, b: Mask) -> Where:
    if not isinstance(b, Mask) or not isinstance(a, Mask):
        raise TypeError(
            f"| joins two objects of pallas_flash.masks; got {type(b).__name__}. An array x becomes one as "
            "masks.Where(lambda b, h, q_idx, kv_idx: jnp.asarray(x)[q_idx, kv_idx])."
        )
    f, g = a.mask_mod(), b.mask_mod()
    sign = {operator.or_: "|", operator.and_: "&"}[join]
    return Where(lambda *at: join(f(*at), g(*at)), f"({a!r} {sign} {b!r})")


def parts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` put together."""
    if mask is None:
        return []
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be an object of pallas_flash.masks, as masks.Causal(); got {type(mask).__name__}.")
    return parts(mask.first) + parts(mask.second) if isinstance(mask, Both) else [mask]


register(Both)
register(Where, "function", "name")
register(Kinds, "rules")
