"""For Flax: `attention_fn`, the hook of its attention modules, and `FlashAttention`, a layer with RoPE and a KV cache."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float, Int, Shaped

from pallas_flash.attention import flash_attention
from pallas_flash.masks import Mask

LECUN_NORMAL = nnx.initializers.lecun_normal()


def attention_fn(  # every parameter has a name: linen passes on only those that it finds in the signature
    query: Shaped[Array, "*B T N H"],
    key: Shaped[Array, "*B S K H"],
    value: Shaped[Array, "*B S K Hv"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Shaped[Array, "*#B #N #T #S"] | Mask | None = None,
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
    implementation: str | None = None,
) -> Float[Array, "*B T N Hv"]:
    """`flash_attention` with the signature of Flax's `dot_product_attention`, of nnx and of linen.

    `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`, and the same for `linen.MultiHeadDotProductAttention`. Another
    implementation is `functools.partial(attention_fn, implementation="portable")`.

    Differs from Flax in one result: a query that sees no key gets 0, where Flax gives the mean of the values.

    Args:
      query, key, value, bias: as in `flash_attention`; any number of leading axes.
      mask: True, or any number but 0, lets a query see a key; Flax makes float32. Or an object of `pallas_flash.masks`.
      broadcast_dropout, dropout_rng: read only where dropout is on, which is not implemented yet.
      dropout_rate, deterministic: dropout is on when the rate is above 0 and deterministic is False.
      dtype: query, key and value are cast to it; None: to the dtype that they promote to.
      precision: a `jax.lax.Precision`, its name, or a pair. All are met and none changes anything: float32 is multiplied in
        float32, 16-bit numbers exactly, and sums are float32. An algorithm of `jax.lax.DotAlgorithm` cannot be chosen.
      module: must be None: the weights are never in memory, so that none can be sown.
      force_fp32_for_softmax: either; the softmax is always float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None: there is no einsum to replace.
      promote_dtype: nnx's; called as promote_dtype((query, key, value), dtype=dtype).
      is_causal: top-left aligned; joined with the mask.
      input_positions: must be None: `FlashAttention` has RoPE.
      implementation: as in `flash_attention`.

    Raises:
      NotImplementedError: an argument that cannot be honoured.
      TypeError, ValueError: as `flash_attention`.
    """
    _refuse_module(module)
    _refuse_einsums(einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    _check_precision(precision)
    if input_positions is not None:
        raise NotImplementedError("attention_fn takes no input_positions, it has no RoPE: pallas_flash.flax.FlashAttention has.")
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    dropout = {} if deterministic or dropout_rate == 0 else dict(dropout_rate=dropout_rate, dropout_rng=dropout_rng)
    # Flax's `deterministic` means no dropout; that of flash_attention means the same bits twice, which is its default
    return flash_attention(query, key, value, bias, _as_mask(mask), is_causal=is_causal, implementation=implementation, **dropout)


def _refuse_module(module):
    if module is not None:
        raise NotImplementedError(
            f"attention_fn cannot sow attention weights into {type(module).__name__}, it never has them in memory: "
            "leave sow_weights False, or use Flax's own attention_fn to look at weights."
        )


def _refuse_einsums(*einsums):
    if any(einsum is not None for einsum in einsums):
        raise NotImplementedError(
            "attention_fn has no einsum to replace: leave einsum_dot_general, qk_attn_weights_einsum and "
            "attn_weights_value_einsum (in linen's module: the same with _cls) None, or use Flax's own attention_fn."
        )


def _check_precision(precision):
    for each in precision if isinstance(precision, tuple | list) else [precision]:
        try:
            jax.lax.Precision(each)
        except ValueError:
            raise NotImplementedError(
                f"precision must be None, a jax.lax.Precision or its name, or a pair of them; got {each!r}: the kernels choose "
                "their own algorithm, which is at least as precise."
            ) from None


def _as_mask(mask):
    return mask if mask is None or isinstance(mask, Mask) else jnp.asarray(mask).astype(bool)


def rope(x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], base: float) -> Float[Array, "B T N H"]:
    """Rotary position embedding, RoFormer's (arXiv:2104.09864): turns pair i by the angle position * base^(-2i / H).

    Pairs are (x[i], x[i + H/2]), the two halves of the head, as in GPT-NeoX and LLaMA; the paper pairs neighbours. Computed
    in float32. The scores depend on the difference of two positions alone.
    """
    H = x.shape[-1]
    frequency = base ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B | 1, T, 1, H / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class KVCache(NamedTuple):
    """The keys (normalised and rotated) and values of the tokens so far; row b holds length[b] of them, from slot 0 on."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    length: Int[Array, "B"]


class FlashAttention(nnx.Module):
    """Self-attention: grouped heads, RoPE, QK norm, packed documents, and a KV cache that is passed in and handed back.

    The submodules query, key, value and out are `nnx.LinearGeneral`, with the names and shapes of `nnx.MultiHeadAttention`;
    query_norm and key_norm are `nnx.RMSNorm`.

    Args:
      num_heads: query heads N.
      in_features: size of the last axis of x.
      num_kv_heads: key/value heads K, a divisor of num_heads; num_heads by default.
      head_size: H; in_features / num_heads by default.
      out_features: in_features by default.
      rope_base: of `rope`; None: no RoPE.
      qk_norm: RMSNorm over the head, with a learned scale, on queries and keys, before RoPE (arXiv:2302.05442, there LayerNorm).
      is_causal: a token sees itself and those before it.
      local_window_size, logits_soft_cap, implementation: as in `flash_attention`.
      use_bias: of the four projections.
      dtype: of the computation; None: what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: of the four projections; Flax's default by default.
      out_kernel_init: of the last one; kernel_init by default.
      rngs: its `params` stream makes the parameters.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        out_features: int | None = None,
        rope_base: float | None = 10_000.0,
        qk_norm: bool = False,
        is_causal: bool = True,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        kernel_init: Callable = LECUN_NORMAL,
        out_kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        N, K, H = _heads(num_heads, num_kv_heads, head_size, in_features, rope_base)
        self.in_features, self.num_kv_heads, self.head_size = in_features, K, H
        self.rope_base, self.is_causal, self.local_window_size = rope_base, is_causal, local_window_size
        self.logits_soft_cap, self.implementation = logits_soft_cap, implementation
        self.cache_dtype = param_dtype if dtype is None else dtype

        types = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(nnx.LinearGeneral, use_bias=use_bias, **types)
        self.query = linear(in_features, (N, H), kernel_init=kernel_init)
        self.key = linear(in_features, (K, H), kernel_init=kernel_init)
        self.value = linear(in_features, (K, H), kernel_init=kernel_init)
        self.out = linear((N, H), out_features or in_features, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init)
        self.query_norm = nnx.RMSNorm(H, **types) if qk_norm else None
        self.key_norm = nnx.RMSNorm(H, **types) if qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        mask: Shaped[Array, "#B #N #T #S"] | Mask | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        lengths: Int[Array, "B"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Array, "B T Dout"] | tuple[Float[Array, "B T Dout"], KVCache]:
        """Without a cache, the T tokens attend to each other; with one, they come after its tokens and are added to it.

        Args:
          x: [B, T, in_features].
          mask: as in `attention_fn`, joined with is_causal and the rest. With a cache, its S axis is the cache's slots.
          segment_ids: int32 [B, T], packed documents: tokens see those with their own id. RoPE's positions count on from
            document to document, which changes nothing: only differences within a document matter. Not with a cache.
          lengths: int32 [B]: only the first lengths[b] tokens of row b are real, and only they stay in a cache. The
            attention of the others is 0. Prompts of different lengths fill a cache in one call so.
          cache: of `init_cache` or of the call before. Row b's tokens are at positions length[b], length[b] + 1, ...

        Returns:
          y [B, T, out_features]; with a cache, (y, the new cache). A token at position max_length or later finds no room:
          it is not stored, and as tracing cannot raise, its y is NaN; rows and tokens that fit stay right.
        """
        self._check(x, segment_ids, cache)
        start = jnp.zeros(1, jnp.int32) if cache is None else cache.length
        positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)  # [1 | B, T]
        query, key, value = self._project(x, positions)
        attend = functools.partial(
            flash_attention,
            query,
            mask=_as_mask(mask),
            is_causal=self.is_causal,
            query_seq_lengths=lengths,
            local_window_size=self.local_window_size,
            implementation=self.implementation,
            logits_soft_cap=self.logits_soft_cap,
        )
        if cache is None:
            return self.out(attend(key=key, value=value, key_value_seq_lengths=lengths, query_segment_ids=segment_ids))

        cache = _append(cache, key, value, positions, x.shape[1] if lengths is None else lengths)
        key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        o = attend(key=key, value=value, key_value_seq_lengths=cache.length, query_offset=start)
        has_room = positions < key.shape[1]
        return self.out(jnp.where(has_room[..., None, None], o, jnp.nan)), cache

    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> KVCache:
        """An empty cache for `batch` rows of up to max_length tokens; its dtype is by default dtype, or else param_dtype."""
        dtype = self.cache_dtype if dtype is None else dtype
        # two arrays, not one twice, so that a jitted step may be given the cache's memory (donate_argnums)
        empty = lambda: jnp.zeros((batch, max_length, self.num_kv_heads, self.head_size), dtype)
        return KVCache(empty(), empty(), jnp.zeros(batch, jnp.int32))

    def _project(self, x, positions):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rope_base is not None:
            query, key = rope(query, positions, self.rope_base), rope(key, positions, self.rope_base)
        return query, key, value

    def _check(self, x, segment_ids, cache):
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be [B, T, in_features] = (B, T, {self.in_features}); got {x.shape}.")
        if cache is None:
            return
        B, T, _ = x.shape
        slots = (B, *cache.key.shape[1:2], self.num_kv_heads, self.head_size)
        if cache.key.shape != slots:
            raise ValueError(
                f"cache.key must be [B, max_length, K, H] = ({B}, max_length, {self.num_kv_heads}, {self.head_size}) to match "
                f"x {x.shape} and the layer; got {cache.key.shape}. Make it with init_cache({B}, max_length)."
            )
        if T > cache.key.shape[1]:
            raise ValueError(f"the {T} tokens of x must fit into the cache's max_length; got {cache.key.shape[1]}.")
        if segment_ids is not None:
            raise ValueError("segment_ids cannot go with a cache: give each document a row of its own.")


def _heads(num_heads, num_kv_heads, head_size, in_features, rope_base) -> tuple[int, int, int]:
    """N, K and H, with the defaults filled in."""
    N, K = num_heads, num_heads if num_kv_heads is None else num_kv_heads
    if N < 1 or K < 1 or N % K:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, both above 0; got {N} and {K}.")
    if head_size is None and in_features % N:
        raise ValueError(f"in_features must be a multiple of num_heads = {N}; got {in_features}. Or give head_size.")
    H = in_features // N if head_size is None else head_size
    if rope_base is not None and H % 2:
        raise ValueError(f"head_size must be even, RoPE turns pairs; got {H}. Or leave RoPE out with rope_base=None.")
    return N, K, H


def _append(cache: KVCache, key, value, positions, count) -> KVCache:
    """The cache with key and value [B, T, K, H] written at positions [B, T], of which the first `count` are real.

    A position past the last slot is dropped. Those that are not real lie beyond the new length, where nobody looks.
    """
    row = jnp.arange(len(positions))[:, None]
    write = lambda slots, x: slots.at[row, positions].set(x.astype(slots.dtype), mode="drop", unique_indices=True)
    length = (cache.length + count).astype(cache.length.dtype)
    return KVCache(write(cache.key, key), write(cache.value, value), length)
