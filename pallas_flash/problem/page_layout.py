"""How pages lie in memory. What reads or writes pages of keys, values or scales asks a
PageLayout."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The order of the axes of pages: first P pages, last H columns, which scales lack, and between
    them C keys of a page and K heads."""

    axes: str = "PCKH"

    @property
    def without_heads(self) -> "PageLayout":
        """The layout of the pages of one head, which lack K."""
        return PageLayout(self.axes.replace("K", ""))

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each axis of pages of this shape, by its letter."""
        return dict(zip(self.axes, shape, strict=False))

    def arrange(self, **by_axis: Any) -> tuple:
        """What is given for each axis, in the order of the axes: a shape, or an index."""
        return tuple(by_axis[axis] for axis in self.axes if axis in by_axis)

    def join(self, x: jax.Array) -> jax.Array:
        """Keys, values or scales [B, S, K, ..] of rows whose pages are x, [B, pages of a row, ..]
        with the axes of a page."""
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def split(self, x: jax.Array, page: int) -> jax.Array:
        """Pages with `page` keys each of keys, values or scales [B, S, K, ..], row by row."""
        return x.reshape(-1, page, *x.shape[2:])

    def matrices(self, x: jax.Array, width: int) -> jax.Array:
        """Each page as a matrix, here [C, K width], of heads with zeros up to `width` columns."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3])))
        return x.reshape(*x.shape[:2], -1)

    def corner(self, key: IntLike, head: IntLike, page: int, width: int) -> tuple[IntLike, IntLike]:
        """The row and the first column of a key of a head in the matrix of its page."""
        return key, head * width


@pytrees.dataclass(static=("layout",))
class PageTable:
    """The pages that hold the keys of each batch row, and how they lie."""

    numbers: Int[Array, "B pages"]  # each that of a page
    page: int  # keys of a page
    layout: PageLayout

    def index(self, row: IntLike, key, head: IntLike) -> tuple:
        """The index of keys of a batch row and a key/value head in all pages."""
        page = self.numbers[row, key // self.page]
        return self.layout.arrange(P=page, C=key % self.page, K=head)


class Pages(NamedTuple):
    """The static description of a call's pages."""

    shapes: tuple[tuple[int, ...], ...]  # of keys, and of values that are not keys' columns
    stored: str | None  # the dtype of 8 bits, where there is one
    is_ragged: bool  # batch rows are tiles of tokens, and several have one table
    alone: str | None = None  # "keys" or "values", where only these are in 8 bits
    layout: PageLayout = PageLayout()

    @property
    def page(self) -> int:
        """Keys of a page."""
        return self.layout.sizes(self.shapes[0])["C"]

    def is_in_8_bits(self, name: str) -> bool:
        """Whether "keys" or "values" are."""
        return self.stored is not None and self.alone in (None, name)

    def itemsizes(self, dtype: str) -> list[int]:
        """Bytes of an element of keys and of values, where `dtype` is that of what is not in 8
        bits."""
        wide = jnp.dtype(dtype).itemsize
        return [1 if self.is_in_8_bits(name) else wide for name in ("keys", "values")]
