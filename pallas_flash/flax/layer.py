"""`FlashAttention`, a layer with RoPE, grouped heads and a KV cache."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from pallas_flash.attention import AnyArray, Implementation, explain, flash_attention
from pallas_flash.flax.hook import as_mask
from pallas_flash.masks import Mask

LECUN_NORMAL = nnx.initializers.lecun_normal()
Rngs = nnx.Rngs | Array | None


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
    """Attention with projections: grouped heads, RoPE, QK norm, packed documents, a KV cache that is passed in and handed back.

    For cross-attention make it with is_causal=False, rope_base=None and no window, and give it inputs_k.

    The submodules query, key, value and out are `nnx.LinearGeneral`, with the names and shapes of `nnx.MultiHeadAttention`;
    query_norm and key_norm are `nnx.RMSNorm`.

    Args:
      num_heads: query heads N.
      in_features: size of the last axis of inputs_q.
      num_kv_heads: key/value heads K, a divisor of num_heads; num_heads by default.
      head_size: H; in_features / num_heads by default.
      out_features: in_features by default.
      in_kv_features: size of the last axis of inputs_k and inputs_v in cross-attention; in_features by default.
      rope_base: of `rope`; None: no RoPE.
      qk_norm: RMSNorm over the head, with a learned scale, on queries and keys, before RoPE (arXiv:2302.05442, there LayerNorm).
      is_causal: a token sees itself and those before it.
      local_window_size, logits_soft_cap, implementation: as in `flash_attention`.
      dropout_rate: as in `flash_attention`, where the attribute `deterministic` is False, as it is until `eval()`.
      sinks: learn a sink for each query head, which begins as 0.
      use_bias: of the four projections.
      dtype: of the computation; None: what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init, out_kernel_init: of the four projections, Flax's default by default, and of the last one, by default the same.
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
        in_kv_features: int | None = None,
        rope_base: float | None = 10_000.0,
        qk_norm: bool = False,
        is_causal: bool = True,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        dropout_rate: float = 0.0,
        sinks: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
        kernel_init: Callable = LECUN_NORMAL,
        out_kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ):
        N, K, H = _heads(num_heads, num_kv_heads, head_size, in_features, rope_base)
        self.in_features, self.num_kv_heads, self.head_size = in_features, K, H
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.rope_base, self.is_causal, self.local_window_size = rope_base, is_causal, local_window_size
        self.logits_soft_cap, self.dropout_rate, self.deterministic = logits_soft_cap, dropout_rate, False
        self.implementation = implementation
        self.cache_dtype = param_dtype if dtype is None else dtype
        self._check_options(N)

        types = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(nnx.LinearGeneral, use_bias=use_bias, **types)
        self.query = linear(in_features, (N, H), kernel_init=kernel_init)
        self.key = linear(self.in_kv_features, (K, H), kernel_init=kernel_init)
        self.value = linear(self.in_kv_features, (K, H), kernel_init=kernel_init)
        self.out = linear((N, H), out_features or in_features, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init)
        self.query_norm = nnx.RMSNorm(H, **types) if qk_norm else None
        self.key_norm = nnx.RMSNorm(H, **types) if qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(N, param_dtype)) if sinks else None

    @overload
    def __call__(
        self,
        inputs_q: Float[AnyArray, "B T D"],
        inputs_k: Float[AnyArray, "B S Dkv"] | None = None,
        inputs_v: Float[AnyArray, "B S Dkv"] | None = None,
        *,
        mask: Shaped[AnyArray, "*#B #N #T #S"] | Mask | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        lengths: Int[AnyArray, "B"] | None = None,
        kv_lengths: Int[AnyArray, "B"] | None = None,
        cache: None = None,
        rngs: Rngs = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T Dout"]: ...
    @overload
    def __call__(
        self,
        inputs_q: Float[AnyArray, "B T D"],
        *,
        mask: Shaped[AnyArray, "*#B #N #T #S"] | Mask | None = None,
        lengths: Int[AnyArray, "B"] | None = None,
        cache: KVCache,
        rngs: Rngs = None,
        deterministic: bool | None = None,
    ) -> tuple[Float[Array, "B T Dout"], KVCache]: ...
    def __call__(
        self,
        inputs_q,
        inputs_k=None,
        inputs_v=None,
        *,
        mask=None,
        segment_ids=None,
        lengths=None,
        kv_lengths=None,
        cache=None,
        rngs=None,
        deterministic=None,
    ):
        """The T tokens of inputs_q attend to each other; to those of a cache, to which they are added; or to inputs_k.

        Args:
          inputs_q: [B, T, in_features].
          inputs_k: [B, S, in_kv_features], cross-attention: the keys are made of it. The queries' own inputs by default.
          inputs_v: [B, S, in_kv_features]: the values are made of it; inputs_k by default.
          mask: as in `attention_fn`, joined with is_causal and the rest. With a cache, its S axis is the cache's slots.
          segment_ids: int32 [B, T], packed documents: tokens see those with their own id. RoPE's positions count on from
            document to document, which changes nothing: only differences within a document matter. Not with a cache, and not
            with inputs_k, where masks.Documents says the ids of both.
          lengths: int32 [B]: only the first lengths[b] tokens of row b are real, and only they stay in a cache. The
            attention of the others is 0. Prompts of different lengths fill a cache in one call so.
          kv_lengths: int32 [B]: only the first kv_lengths[b] of inputs_k are real.
          cache: of `init_cache` or of the call before. Row b's tokens are at positions length[b], length[b] + 1, ...
          rngs: for dropout, nnx.Rngs or a key; needed unless deterministic, by default the layer's attribute, is True.

        Returns:
          y [B, T, out_features]; with a cache, (y, the new cache). A token at position max_length or later finds no room:
          it is not stored, and as tracing cannot raise, its y is NaN; rows and tokens that fit stay right.
        """
        x, is_cross = inputs_q, inputs_k is not None
        self._check(x, segment_ids, cache)
        self._check_cross(x, inputs_k, inputs_v, segment_ids, kv_lengths, cache)
        inputs_k = inputs_k if is_cross else x
        start = jnp.zeros(1, jnp.int32) if cache is None else cache.length
        positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)  # [1 | B, T]
        query, key, value = self._project(x, inputs_k, inputs_k if inputs_v is None else inputs_v, positions)
        attend = functools.partial(
            flash_attention,
            query,
            mask=as_mask(mask),
            is_causal=self.is_causal,
            query_seq_lengths=lengths,
            local_window_size=self.local_window_size,
            implementation=self.implementation,
            logits_soft_cap=self.logits_soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            **self._dropout(rngs, self.deterministic if deterministic is None else deterministic),
        )
        if cache is None:
            kv_lengths = kv_lengths if is_cross else lengths
            return self.out(attend(key=key, value=value, key_value_seq_lengths=kv_lengths, query_segment_ids=segment_ids))

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

    def _dropout(self, rngs, deterministic) -> dict:
        if deterministic or self.dropout_rate == 0:
            return {}
        if rngs is None:
            raise ValueError("dropout needs rngs in training, nnx.Rngs(dropout=key) or a key; for evaluation call layer.eval().")
        return dict(dropout_rate=self.dropout_rate, dropout_rng=rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs)

    def _project(self, inputs_q, inputs_k, inputs_v, positions):
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rope_base is not None:
            query, key = rope(query, positions, self.rope_base), rope(key, positions, self.rope_base)
        return query, key, value

    def _check(self, x, segment_ids, cache):
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q must be [B, T, in_features] = (B, T, {self.in_features}); got {x.shape}.")
        if cache is None:
            return
        B, T, _ = x.shape
        slots = (B, *cache.key.shape[1:2], self.num_kv_heads, self.head_size)
        if cache.key.shape != slots:
            raise ValueError(
                f"cache.key must be [B, max_length, K, H] = ({B}, max_length, {self.num_kv_heads}, {self.head_size}) to match "
                f"inputs_q {x.shape} and the layer; got {cache.key.shape}. Make it with init_cache({B}, max_length)."
            )
        if T > cache.key.shape[1]:
            raise ValueError(f"the {T} tokens of inputs_q must fit into the cache's max_length; got {cache.key.shape[1]}.")
        if segment_ids is not None:
            raise ValueError("segment_ids cannot go with a cache: give each document a row of its own.")

    def _check_cross(self, x, inputs_k, inputs_v, segment_ids, kv_lengths, cache):
        if inputs_k is None:
            if inputs_v is not None or kv_lengths is not None:
                raise ValueError("inputs_v and kv_lengths belong to inputs_k: give inputs_k too, or lengths for self-attention.")
            if self.in_kv_features != self.in_features:
                raise ValueError(f"a layer with in_kv_features = {self.in_kv_features} beside {self.in_features} needs inputs_k.")
            return
        if self.is_causal or self.rope_base is not None or self.local_window_size is not None:
            raise ValueError(
                "inputs_k has positions of its own, that those of inputs_q cannot be compared with: for cross-attention make "
                "the layer with is_causal=False, rope_base=None and no local_window_size."
            )
        if segment_ids is not None:
            raise ValueError(
                "segment_ids are those of self-attention: with inputs_k give mask=masks.Documents(query_ids, key_ids)."
            )
        if cache is not None:
            raise ValueError(
                "a cache cannot go with inputs_k: it holds the tokens of self-attention. Give inputs_k at each step."
            )
        for name, y in dict(inputs_k=inputs_k, inputs_v=inputs_k if inputs_v is None else inputs_v).items():
            if y.ndim != 3 or y.shape != (x.shape[0], inputs_k.shape[1], self.in_kv_features):
                shape = f"({x.shape[0]}, {'S' if name == 'inputs_k' else inputs_k.shape[1]}, {self.in_kv_features})"
                raise ValueError(f"{name} must be [B, S, in_kv_features] = {shape} to match inputs_q {x.shape}; got {y.shape}.")

    def _check_options(self, N):
        """Raises here what flash_attention would raise in the first call."""
        query, key = (jax.ShapeDtypeStruct((1, 1, heads, self.head_size), jnp.float32) for heads in (N, self.num_kv_heads))
        options = dict(local_window_size=self.local_window_size, logits_soft_cap=self.logits_soft_cap)
        options |= dict(dropout_rate=self.dropout_rate, dropout_rng=jax.eval_shape(lambda: jax.random.key(0)))
        # whether an implementation can run a call is a matter of the call
        with contextlib.suppress(NotImplementedError):
            explain(query, key, key, is_causal=self.is_causal, implementation=self.implementation, **options)


def _heads(num_heads, num_kv_heads, head_size, in_features, rope_base) -> tuple[int, int, int]:
    """N, K and H, with the defaults filled in."""
    N, K = num_heads, num_heads if num_kv_heads is None else num_kv_heads
    if N < 1 or K < 1 or N % K:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, both above 0; got {N} and {K}.")
    if head_size is None and in_features % N:
        raise ValueError(f"in_features must be a multiple of num_heads = {N}; got {in_features}. Or give head_size.")
    H = in_features // N if head_size is None else head_size
    if rope_base is not None and not rope_base > 0:
        raise ValueError(f"rope_base must be a number above 0, or None for no RoPE; got {rope_base}.")
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
