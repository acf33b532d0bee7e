"""The sizes that a call's arrays beside query, key and value must have."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_flash import checks

HEADS_FIRST = (
    " Do the heads come before the length? Here they come after it: jnp.swapaxes(x, -3, -2)."
)
ENDS = "sequences + 1"  # an axis of any size, in words


class Sizes(NamedTuple):
    """The sizes that further arrays must have: the leading axes of query, at least one, and the
    letters of features. C is an axis of any size, of the ends of sequences."""

    lead: tuple[int, ...]
    of: dict[str, int]

    def ints(self, name: str, x, letters: str):
        """x as an int32 array of the shape that `letters` spell; the leading axes of query stand
        for B."""
        x = jnp.asarray(checks.ints(name, x))
        if "B" not in letters:
            return x
        tail = tuple(self.of.get(c, x.shape[-1] if x.shape else 0) for c in letters[1:])
        if x.shape != (*self.lead, *tail) and not (self.lead == (1,) and x.shape == tail):
            hint = " Packed rows are a query [T, N, H], without a batch."
            axes = [c if c in self.of else ENDS for c in letters]
            sizes = *self.lead, *(self.of.get(axis, axis) for axis in axes[1:])
            raise ValueError(
                f"{name} must be int32 [{', '.join(axes)}] = {sizes}; got "
                f"{x.shape}.{hint * (letters == 'BC' and x.ndim == 1)}".replace(f"'{ENDS}'", ENDS)
            )
        return x.reshape(self.of["B"], *tail)

    def broadcast_rows(self, x, letters: str):
        """x with the leading axes of query, where it has as many of size 1 in place of B."""
        lead, tail = (1,) * len(self.lead), len(letters) - 1
        if letters[0] != "B" or x.shape[: x.ndim - tail] != lead:
            return x
        return jnp.broadcast_to(x, (*self.lead, *x.shape[x.ndim - tail :]))

    def offset(self, x):
        """query_offset as an int, or as int32 [B]: an array is data, and serves every value with
        one compiled program."""
        offset = checks.ints("query_offset", x)
        if checks.is_int(x):
            return int(offset)
        return self.ints(
            "query_offset",
            jnp.broadcast_to(offset, self.lead) if offset.shape == () else offset,
            "B",
        )

    def dense(self, name: str, x, dtype):
        """A bias or mask as [B | 1, N | 1, T | 1, S | 1]; axes of size 1 stay so, since the kernels
        sum or repeat over them."""
        if x is None:
            return None
        x = checks.dense(name, x, dtype)
        full = (*self.lead, *(self.of[c] for c in "NTS"))
        if x.ndim == 0:
            hint = "flash_attn's dropout_p is dropout_rate" if name == "bias" else "see is_causal"
            raise ValueError(
                f"{name} must have axes, broadcastable to [..., N, T, S] = {full}; got one value "
                f"for all: {hint}."
            )
        if not _fits(x.shape, full):
            hint = HEADS_FIRST * _fits(x.shape, (*self.lead, *(self.of[c] for c in "TNK")))
            hint += " To hide keys of rows, as padding does, pass x[..., None, None, :]." * (
                x.shape == (*self.lead, full[-1])
            )
            hint += " For the same in all heads, pass x[..., None, :, :]." * (
                x.ndim == len(full) - 1 and _fits(x.shape, (*self.lead, *full[-2:]))
            )
            raise ValueError(
                f"{name} must be broadcastable to [..., N, T, S] = {full}; got {x.shape}.{hint}"
            )
        x = x.reshape((1,) * (len(full) - x.ndim) + x.shape)
        lead = x.shape[:-3]
        # some leading axes broadcast, some do not: dispatch.py leaves few such calls
        if any(n != 1 for n in lead) and lead != self.lead:
            x = jnp.broadcast_to(x, self.lead + x.shape[-3:])
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _fits(shape, full) -> bool:
    """Whether an array broadcasts to `full`."""
    tail = full[len(full) - len(shape) :]
    return len(shape) <= len(full) and all(n in (1, m) for n, m in zip(shape, tail, strict=True))
