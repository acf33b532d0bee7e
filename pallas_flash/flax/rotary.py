"""RoPE: rotations of queries and keys by their positions."""

from __future__ import annotations  # help() shows annotations as they stand here

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_flash import checks
from pallas_flash.checks import AnyArray, sums, unexpected


@unexpected.refused
def rope(
    x: Float[AnyArray, "B T N H"],
    positions: Int[AnyArray, "#B T"],
    base: float = 10_000.0,
    *,
    frequencies: Float[AnyArray, "H/2"] | None = None,
) -> Float[Array, "B T N H"]:
    """Rotary position embedding, RoFormer's (arXiv:2104.09864): turns pair i by the angle position
    * frequencies[i], by default base^(-2i / H).

    Pairs are (x[i], x[i + H/2]), the two halves of the head, as in GPT-NeoX and LLaMA; the paper
    pairs neighbours. Computed in float32. The scores depend on the difference of two positions
    alone.

    Raises:
      TypeError, ValueError: an argument is no array or number, or shapes do not fit.
    """
    x, positions = checks.array("x", x), checks.array("positions", positions)
    lead, H = x.shape[:-2], x.shape[-1] if x.ndim > 1 else 0
    if x.ndim < 3 or H % 2:
        raise ValueError(f"x must be [B, T, N, H] with an even H; got {x.shape}.")
    sizes = zip(positions.shape[::-1], lead[::-1], strict=False)
    if not 0 < positions.ndim <= len(lead) or any(n not in (1, m) for n, m in sizes):
        raise ValueError(
            f"positions must be [B, T] = {lead}, or [1, T] for all rows; got {positions.shape}."
        )
    if frequencies is None:
        if not checks.is_array(base):
            checks.number("base", base, 0.0, positive=True)
        frequencies = base ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    frequencies = checks.array("frequencies", frequencies)
    if frequencies.shape != (H // 2,):
        raise ValueError(f"frequencies must be [H/2] = ({H // 2},); got {frequencies.shape}.")
    # [B | 1, T, 1, H / 2]
    angle = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    wide = sums(x.dtype)
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def choose(function: Callable | None, base: float | None, head_size: int):
    """The rotation of a layer's queries and keys: a function, a base for `rope`, or None."""
    if function is not None:
        if not callable(function):
            raise TypeError(
                f"rope must be a function of x and positions; got {function!r}. A base "
                "is rope_base."
            )
        return function
    checks.number("rope_base", base, None, positive=True)
    if base is not None and head_size % 2:
        raise ValueError(
            f"head_size must be even, since RoPE turns pairs; got {head_size}. Or leave RoPE out "
            "with rope_base=None."
        )
    return base


def rotate(how: Callable | float | None, x, positions):
    """Rotates queries or keys by what `choose` returned."""
    if how is None:
        return x
    return how(x, positions) if callable(how) else rope(x, positions, how)


def positions(how, x, start, given) -> Int[Array, "#B T"]:
    """The positions that were given; by default T of them from `start` [1 | B] on."""
    B, T = x.shape[:2]
    if given is None:
        return start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    if how is None:
        raise ValueError("positions are for RoPE, which this layer leaves out: rope_base is None.")
    given = checks.ints("positions", given)
    if given.shape not in ((B, T), (1, T)):
        raise ValueError(
            f"positions must be int32 [B, T] = {(B, T)}, or [1, T] for all rows; got {given.shape}."
        )
    return jnp.asarray(given)
