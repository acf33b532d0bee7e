"""`attention_fn`, for Flax's own attention modules, of nnx and of linen."""

from __future__ import annotations  # help() shows annotations as they stand here

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Shaped

from pallas_flash import checks
from pallas_flash.attention import flash_attention
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.dropout import Shared
from pallas_flash.masks import Mask
from pallas_flash.problem.call import ImplementationName, ScoreMod, in_lines


# every parameter has a name: linen passes on only what it finds in the signature
@unexpected.refused
def attention_fn(
    query: Shaped[AnyArray, "*B T N H"],
    key: Shaped[AnyArray, "*B S K H"],
    value: Shaped[AnyArray, "*B S K Hv"],
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    mask: Shaped[AnyArray, "*#BNTS"] | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    promote_dtype: Callable = dtypes.promote_dtype,
    is_causal: bool = False,
    input_positions: Array | None = None,
    *,
    implementation: ImplementationName | None = None,
    score_mod: ScoreMod | None = None,
    deterministic_gradients: bool | None = None,
) -> Float[Array, "*B T N Hv"]:
    """`flash_attention` with the signature of Flax's `dot_product_attention`, of nnx and of linen.

    `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`, and the same for
    `linen.MultiHeadDotProductAttention`. Another implementation is `functools.partial(attention_fn,
    implementation="triton")`.

    One result differs from Flax's: a query that sees no key gets 0, where Flax gives the mean of
    the values.

    Args:
      query, key, value, bias: as in `flash_attention`; any number of leading axes.
      mask: an array in which True or 1 lets a query see a key (Flax makes the numbers 0 and 1), or
        an object of `pallas_flash.masks`.
      dropout_rate, deterministic: dropout is on when the rate is above 0 and deterministic is
        False.
      dropout_rng, dropout_rate: as in `flash_attention`. Flax keeps other weights.
      broadcast_dropout: True, Flax's default: one mask for all batch rows and heads,
        `dropout_mask(dropout_rng, dropout_rate, (T, S))`. False: each has its own, as in
        `flash_attention`.
      dtype: query, key and value are cast to it; None: to the dtype that they promote to.
      precision: a `jax.lax.Precision`, its name, or a pair of them. Each is met and none changes
        anything: float32 is multiplied in float32, 16-bit numbers exactly, and sums are float32. An
        algorithm of `jax.lax.DotAlgorithm` cannot be chosen.
      module: must be None: the weights are never in memory, so none can be sown;
        `pallas_flash.attention_weights` has some.
      force_fp32_for_softmax: True or False, without effect; the softmax is always float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None: there is
        no einsum to replace.
      promote_dtype: nnx's; called as promote_dtype((query, key, value), dtype=dtype).
      is_causal: top-left aligned; joined with the mask.
      input_positions: must be None: `FlashAttention` has RoPE.
      implementation, score_mod: as in `flash_attention`; `functools.partial` gives them.
      deterministic_gradients: `deterministic` of `flash_attention`, given in the same way.

    Raises:
      NotImplementedError: an argument that cannot be honoured.
      TypeError, ValueError: as in `flash_attention`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from pallas_flash.flax import attention_fn
      >>> options = dict(decode=False, attention_fn=attention_fn)
      >>> layer = nnx.MultiHeadAttention(4, 32, **options, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 10, 32)), is_causal=True).shape
      (2, 10, 32)
    """
    _refuse_module(module)
    _refuse_einsums(einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    _check_precision(precision)
    if input_positions is not None:
        raise NotImplementedError(
            "attention_fn takes no input_positions, as it has no RoPE: "
            "pallas_flash.flax.FlashAttention has."
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    rng = Shared(dropout_rng) if broadcast_dropout else dropout_rng
    dropout = (
        {}
        if deterministic or dropout_rate == 0
        else dict(dropout_rate=dropout_rate, dropout_rng=rng)
    )
    options = dict(
        is_causal=is_causal,
        implementation=implementation,
        score_mod=score_mod,
        deterministic=checks.optional_flag("deterministic_gradients", deterministic_gradients),
        **dropout,
    )
    return flash_attention(query, key, value, bias, as_mask(mask), **options)


in_lines(attention_fn)


def _refuse_module(module):
    if module is not None:
        raise NotImplementedError(
            f"attention_fn cannot sow attention weights into {type(module).__name__}, since it "
            "never has them in memory: "
            "leave sow_weights False; pallas_flash.attention_weights computes those of chosen "
            "queries."
        )


def _refuse_einsums(*einsums):
    if any(einsum is not None for einsum in einsums):
        raise NotImplementedError(
            "attention_fn has no einsum to replace: leave einsum_dot_general, "
            "qk_attn_weights_einsum and "
            "attn_weights_value_einsum (in linen's module: the same with _cls) None, or use Flax's "
            "own attention_fn."
        )


def _check_precision(precision):
    for each in precision if isinstance(precision, tuple | list) else [precision]:
        try:
            jax.lax.Precision(each)
        except ValueError:
            raise NotImplementedError(
                "precision must be None, a jax.lax.Precision or its name, or a pair of them; got "
                f"{each!r}: the kernels choose "
                "their own algorithm, which is at least as precise."
            ) from None


def as_mask(mask):
    """The mask as flash_attention takes it: Flax's numbers 0 and 1 become bool. Traced numbers are
    not checked."""
    if mask is None or isinstance(mask, Mask):
        return mask
    checks.like_array("mask", mask, " or a pallas_flash.masks object")
    if not isinstance(mask, jax.core.Tracer) and getattr(mask, "is_fully_addressable", True):
        other = (values := np.asarray(mask))[(values != 0) & (values != 1)]
        if other.size:
            raise ValueError(
                f"mask must be bool, or 0 and 1 as Flax makes it; got {other.flat[0]}. Pass "
                "numbers to add to the logits as "
                "bias; to make a mask of 0 and -1e9, pass mask > -1."
            )
    return jnp.asarray(mask).astype(bool)
