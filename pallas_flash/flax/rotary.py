"""RoPE: positions as rotations of queries and keys."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_flash.checks import sums


def rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], base: float
) -> Float[Array, "B T N H"]:
    """Rotary position embedding, RoFormer's (arXiv:2104.09864): turns pair i by the angle position
    * base^(-2i / H).

    Pairs are (x[i], x[i + H/2]), the two halves of the head, as in GPT-NeoX and LLaMA; the paper
    pairs neighbours. Computed in float32. The scores depend on the difference of two positions
    alone.
    """
    H = x.shape[-1]
    frequency = base ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    # [B | 1, T, 1, H / 2]
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    wide = sums(x.dtype)
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
