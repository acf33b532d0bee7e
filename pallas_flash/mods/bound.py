"""A traced mod together with all that a call evaluates it for: its arrays, batch rows, heads and
positions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash.mods.traced import TracedMod, vectorize
from pallas_flash.pytrees import IntLike


@dataclasses.dataclass(frozen=True)
class BoundMod:
    """A rule with all that it is asked about.

    `offset` is what makes a row a position, an int or [B]. `batch` [B] and `head` [N] number the
    batch rows and the heads, None from 0 on.
    """

    mod: TracedMod
    arrays: tuple
    offset: IntLike = 0
    batch: Any = None
    head: Any = None

    def indices(self, batch: IntLike, heads: IntLike) -> tuple[IntLike, IntLike]:
        """The numbers of `batch` batch rows [B] and `heads` heads [N]; 0 where the rule does not
        ask."""
        of = lambda known, n: jnp.arange(n, dtype=jnp.int32) if known is None else known
        b = of(self.batch, batch) if self.mod.uses_batch else jnp.zeros(1, jnp.int32)
        return b, of(self.head, heads) if self.mod.uses_head else jnp.zeros(1, jnp.int32)

    def pairs(self, batch: IntLike, heads: IntLike, row, key) -> tuple[jax.Array, ...]:
        """Batch row, head, position and key of the pairs of some rows and keys, to broadcast
        against [B, N, rows, keys]."""
        b, h = self.indices(batch, heads)
        position = row[None] + (
            self.offset if isinstance(self.offset, int) else self.offset[:, None]
        )
        return b[:, None, None, None], h[:, None, None], position[:, None, :, None], key

    def slice_chunks(self, size: int, first):
        """The same where each of `size` batch rows is cut into chunks, whose first rows these are
        [C]: [B * C]."""
        offset = (jnp.broadcast_to(self.offset, size)[:, None] + first.reshape(1, -1)).reshape(-1)
        batch = jnp.repeat(self.indices(size, 1)[0], first.size) if self.mod.uses_batch else None
        return dataclasses.replace(self, offset=offset, batch=batch)

    def take_rows(self, pick: Callable):
        """The same of some of its batch rows, those that `pick` takes of an array [B]."""
        return dataclasses.replace(self, offset=pick(self.offset), batch=pick(self.batch))

    def slice_keys(self, first):
        """The same where keys count from 0 at the one numbered `first`, an array of the rule's from
        now on."""
        return dataclasses.replace(
            self, mod=self.mod.with_first_key, arrays=(*self.arrays, jnp.asarray(first, jnp.int32))
        )

    @property
    def primitives(self) -> set[str]:
        """The names of the primitives that a kernel needs."""
        return self.mod.primitives

    @property
    def why_not_flat(self) -> str | None:
        """Why its arrays cannot lie in memory as vectors, or None."""
        shapes = [self.mod.arrays[at.array].aval.shape for at in self.mod.reads]
        large = next((shape for shape in shapes if math.prod(shape) >= 2**31), None)
        return (
            large
            and f"{self.mod} reads an array of 2^31 numbers or more, which no int32 counts; got "
            f"{large}"
        )

    def read_captured(self, read: Callable, *numbers: IntLike) -> list[tuple[tuple, jax.Array]]:
        """For each read the index, and what `read(array, index)` finds there, no larger than the
        `numbers` b, h, position and key that it is made of."""
        found = []
        for at in self.mod.reads:
            asked = [x if n in at.depends_on else 0 for n, x in enumerate(numbers)]
            values = [value for _, value in found]
            index = vectorize(self.mod.index, *asked, *values) if at.by_axis else ()
            found.append(
                (index, read(at.array, index).astype(self.mod.arrays[at.array].aval.dtype))
            )
        return found

    def evaluate(self, values, *numbers) -> jax.Array:
        """What the rule makes of `numbers`, which broadcast, where it reads these `values`."""
        return vectorize(
            lambda *x: self.mod.result(x[: len(numbers)], x[len(numbers) :]), *numbers, *values
        )
