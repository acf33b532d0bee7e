"""`FlashAttention`, a layer with RoPE, grouped heads and a KV cache."""

from __future__ import annotations  # help() shows annotations as they stand here

import contextlib
import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from pallas_flash import checks
from pallas_flash.attention import flash_attention
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.context_parallel import Context
from pallas_flash.explanation import explain
from pallas_flash.flax import cache as caches
from pallas_flash.flax import rotary, validation
from pallas_flash.flax.cache import Cache, KVCache, RollingCache, SomeCache
from pallas_flash.flax.hook import as_mask
from pallas_flash.masks import Mask
from pallas_flash.problem.call import ImplementationName, ScoreMod, in_lines

LECUN_NORMAL = nnx.initializers.lecun_normal()
Rngs = nnx.Rngs | nnx.RngStream | Array | None


class FlashAttention(nnx.Module):
    """Attention with projections: grouped heads, RoPE, QK norm, packed documents, and a KV cache
    that is passed in and returned.

    For cross-attention make the layer with is_causal=False, rope_base=None and no window, and call
    it with inputs_k.

    The submodules query, key, value and out are `nnx.LinearGeneral`, with the names and shapes of
    `nnx.MultiHeadAttention`; query_norm and key_norm are `nnx.RMSNorm`.

    Args:
      num_heads: query heads N.
      in_features: size of the last axis of inputs_q.
      num_kv_heads: key/value heads K, a divisor of num_heads; num_heads by default.
      head_size: H; in_features / num_heads by default.
      out_features: in_features by default.
      in_kv_features: size of the last axis of inputs_k and inputs_v in cross-attention; in_features
        by default.
      rope_base: the base of `rope`; None: no RoPE.
      rope: in place of it, a function of queries or keys [B, T, N or K, H] and positions int32
        [B or 1, T], which returns them rotated. Define it once, outside of the step.
      qk_norm: RMSNorm over the head, with a learned scale, on queries and keys, before RoPE
        (arXiv:2302.05442, there LayerNorm).
      is_causal: a token sees itself and earlier tokens.
      scale: as in `flash_attention`, a number or an array; H^-0.5 by default. For Gemma 2 and 3 it
        is query_pre_attn_scalar^-0.5. An nnx.Param learns; another array is state that does not.
      local_window_size, logits_soft_cap, implementation: as in `flash_attention`.
      score_mod, context: as in `flash_attention`. An nnx.Module as score_mod learns; arrays of
        another, as scores.Alibi(array), are state that does not. With a cache, context is not used.
      dropout_rate: as in `flash_attention`; used while the attribute `deterministic` is False, that
        is, until `eval()`.
      deterministic_gradients: `deterministic` of `flash_attention`.
      sinks: whether to learn a sink for each query head, which begins as 0.
      use_bias: whether the four projections have a bias.
      dtype: of the computation; None: what the inputs and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: of the four projections; Flax's default by default.
      out_kernel_init: of the last projection, out; kernel_init by default.
      rngs: its stream `params` makes the parameters. With dropout the layer keeps a fork of
        `dropout`, if there is one, as state.
      keep_rngs: False: it keeps none, and calls with dropout need rngs.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from pallas_flash.flax import FlashAttention
      >>> layer = FlashAttention(8, 64, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 10, 64))).shape
      (2, 10, 64)
      >>> cache = layer.init_cache(batch=2, max_length=32)
      >>> y, cache = layer(jnp.ones((2, 10, 64)), cache=cache)
    """

    @unexpected.refused
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
        rope: Callable[[Array, Array], Array] | None = None,
        qk_norm: bool = False,
        scale: float | Float[AnyArray, "..."] | None = None,
        is_causal: bool = True,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        dropout_rate: float = 0.0,
        sinks: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: ImplementationName | None = None,
        score_mod: ScoreMod | None = None,
        context: Context | None = None,
        deterministic_gradients: bool | None = None,
        kernel_init: Callable = LECUN_NORMAL,
        out_kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        validation.check_constructor(dict(locals()))
        N, K, H = validation.heads(num_heads, num_kv_heads, head_size, in_features)
        self.in_features, self.num_kv_heads, self.head_size = in_features, K, H
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.rope = rotary.choose(rope, rope_base, H)
        self.scale = validation.scale(scale)
        self.is_causal, self.local_window_size = is_causal, local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.dropout_rate, self.deterministic = checks.rate("dropout_rate", dropout_rate), False
        self.implementation, self.context = implementation, context
        self.deterministic_gradients = deterministic_gradients
        has_arrays = any(map(checks.is_array, jax.tree.leaves(score_mod)))
        self.score_mod = nnx.data(score_mod) if has_arrays else score_mod
        self.cache_dtype = param_dtype if dtype is None else dtype
        self._check_options(N)

        types = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        linear = functools.partial(nnx.LinearGeneral, use_bias=use_bias, **types)
        self.query = linear(in_features, (N, H), kernel_init=kernel_init)
        self.key = linear(self.in_kv_features, (K, H), kernel_init=kernel_init)
        self.value = linear(self.in_kv_features, (K, H), kernel_init=kernel_init)
        self.out = linear(
            (N, H),
            out_features or in_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
        )
        self.query_norm = nnx.RMSNorm(H, **types) if qk_norm else None
        self.key_norm = nnx.RMSNorm(H, **types) if qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(N, param_dtype)) if sinks else None
        has_stream = "dropout" in rngs or "default" in rngs
        self.rngs = (
            rngs.dropout.fork() if keep_rngs and self.dropout_rate > 0 and has_stream else None
        )

    @overload
    def __call__(
        self,
        inputs_q: Float[AnyArray, "B T D"],
        inputs_k: Float[AnyArray, "B S Dkv"] | None = None,
        inputs_v: Float[AnyArray, "B S Dkv"] | None = None,
        *,
        mask: Shaped[AnyArray, "*#BNTS"] | Mask | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        lengths: Int[AnyArray, "B"] | None = None,
        kv_lengths: Int[AnyArray, "B"] | None = None,
        positions: Int[AnyArray, "#B T"] | None = None,
        cache: None = None,
        rngs: Rngs = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T Dout"]: ...
    @overload
    def __call__(
        self,
        inputs_q: Float[AnyArray, "B T D"],
        *,
        mask: Shaped[AnyArray, "*#BNTS"] | Mask | None = None,
        lengths: Int[AnyArray, "B"] | None = None,
        positions: Int[AnyArray, "#B T"] | None = None,
        cache: SomeCache,
        rngs: Rngs = None,
        deterministic: bool | None = None,
    ) -> tuple[Float[Array, "B T Dout"], SomeCache]: ...
    @unexpected.refused
    def __call__(
        self,
        inputs_q: Float[AnyArray, "B T D"],
        inputs_k: Float[AnyArray, "B S Dkv"] | None = None,
        inputs_v: Float[AnyArray, "B S Dkv"] | None = None,
        *,
        mask: Shaped[AnyArray, "*#BNTS"] | Mask | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        lengths: Int[AnyArray, "B"] | None = None,
        kv_lengths: Int[AnyArray, "B"] | None = None,
        positions: Int[AnyArray, "#B T"] | None = None,
        cache: Cache | None = None,
        rngs: Rngs = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "B T Dout"] | tuple[Float[Array, "B T Dout"], Cache]:
        """Attention of the T tokens of inputs_q: to each other; to the tokens of a cache and each
        other; or to inputs_k.

        Args:
          inputs_q: [B, T, in_features].
          inputs_k: [B, S, in_kv_features], for cross-attention: the keys are made of it. By default
            they are made of inputs_q.
          inputs_v: [B, S, in_kv_features]: the values are made of it; inputs_k by default.
          mask: as in `attention_fn`, joined with is_causal and the rest. With a cache, its S axis
            counts the cache's slots; a PagedCache takes a masks.KeyLists alone, a RollingCache
            none.
          segment_ids: int32 [B, T], for packed documents: tokens see tokens of their own id.
            RoPE's positions count on from document to document, which changes nothing, since only
            differences within a document matter. Cannot go with a cache, nor with inputs_k, for
            which masks.Documents takes the ids of both.
          lengths: int32 [B]: only the first lengths[b] tokens of row b are real, and only they are
            kept in a cache. The attention of the others is 0. So prompts of different lengths can
            fill a cache in one call.
          kv_lengths: int32 [B]: only the first kv_lengths[b] of inputs_k are real.
          positions: int32 [B, T] or [1, T], for RoPE alone; by default they count on, with a cache
            from its length. Masks and windows go by the order of the tokens.
          cache: from `init_cache`, `init_rolling_cache` or `pallas_flash.paged_cache`, or from the
            call before. The new tokens are added to it; in row b they are at the positions
            lengths[b], lengths[b] + 1, ...
          rngs: for dropout, nnx.Rngs, a stream of them or a key; by default the stream that the
            layer keeps.
          deterministic: whether to leave out dropout; by default the layer's attribute.

        Returns:
          y [B, T, out_features]; with a cache, (y, the new cache). A token at position max_length
          or later, or for which no page is free, does not fit: it is not stored, and, as traced
          code cannot raise, its y is NaN. The rows and tokens that fit are right all the same.
          Outside of jax.jit a `PagedCache` raises, and inside it counts such tokens in `lost`; its
          row gets NaN until it is released.
        """
        x, is_cross = checks.array("inputs_q", inputs_q), inputs_k is not None
        rows = dict(segment_ids=segment_ids, lengths=lengths, kv_lengths=kv_lengths)
        validation.check_call(self, x, inputs_k, inputs_v, **rows, cache=cache)
        inputs_k = inputs_k if is_cross else x
        start = jnp.zeros(1, jnp.int32) if cache is None else cache.lengths
        positions = rotary.positions(self.rope, x, start, positions)
        query, key, value = self._project(
            x, inputs_k, inputs_k if inputs_v is None else inputs_v, positions
        )
        mask = as_mask(mask)
        options = dict(
            scale=_value(self.scale),
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            implementation=self.implementation,
            logits_soft_cap=self.logits_soft_cap,
            score_mod=self.score_mod,
            sinks=_value(self.sinks),
            deterministic=self.deterministic_gradients,
            **self._dropout(rngs, self.deterministic if deterministic is None else deterministic),
        )
        if cache is not None:
            o, cache = caches.attend(cache, query, key, value, self._left, mask, lengths, options)
            return self._out(o), cache
        ends = dict(
            query_seq_lengths=lengths, key_value_seq_lengths=kv_lengths if is_cross else lengths
        )
        options |= dict(mask=mask, query_segment_ids=segment_ids, context=self.context)
        return self._out(flash_attention(query, key, value, **ends, **options))

    @property
    def _left(self) -> int | None:
        """How many tokens before its own a token sees; None: all."""
        window = self.local_window_size
        return window if window is None or checks.is_int(window) else window[0]

    def set_view(self, deterministic: bool | None = None):
        """For nnx.view(model, deterministic=True), which returns a model without dropout, as for
        nnx.Dropout."""
        if deterministic is not None:
            self.deterministic = deterministic

    @unexpected.refused
    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> KVCache:
        """An empty cache for `batch` rows of up to max_length tokens. Its dtype is by default the
        layer's dtype, or else param_dtype. A cache of another dtype than the computation's is cast
        whole in each call. A cache of int8 or float8 is not: it is quantised as in
        `paged_cache`. It takes no mask, and its max_length is rounded up to a multiple of 64
        tokens."""
        return self._empty(KVCache, batch, max_length, dtype)

    @unexpected.refused
    def init_rolling_cache(self, batch: int, tokens: int = 1, dtype: Any = None) -> RollingCache:
        """An empty cache for the tokens in a causal layer's window alone: texts of any length take
        O(local_window_size) memory. A call may add up to `tokens` tokens; give a longer prompt in
        pieces. dtype is as in `init_cache`."""
        if self._left is None or not self.is_causal:
            raise ValueError(
                "a rolling cache holds a window's tokens: it needs a causal layer with "
                "local_window_size."
            )
        slots = caches.rolling_slots(self._left, checks.count("tokens", tokens))
        return self._empty(RollingCache, batch, slots, dtype)

    def _empty(self, kind, batch: int, slots: int, dtype):
        batch, slots = checks.count("batch", batch), checks.count("max_length", slots)
        dtype = self.cache_dtype if dtype is None else dtype
        return caches.empty(kind, batch, slots, self.num_kv_heads, self.head_size, dtype)

    def _dropout(self, rngs, deterministic) -> dict:
        if checks.flag("deterministic", deterministic) or self.dropout_rate == 0:
            return {}
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            how = (
                "give them to the call or, with a stream `dropout`, to the constructor. For "
                "evaluation call layer.eval()."
            )
            raise ValueError(
                f"dropout needs rngs in training, nnx.Rngs(dropout=key) or a key: {how}"
            )
        rngs = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return dict(
            dropout_rate=self.dropout_rate,
            dropout_rng=rngs() if isinstance(rngs, nnx.RngStream) else rngs,
        )

    def _project(self, inputs_q, inputs_k, inputs_v, positions):
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        rotate = functools.partial(rotary.rotate, self.rope, positions=positions)
        return rotate(query), rotate(key), value

    def _out(self, o):
        """The last projection. Where explicit axes of a mesh shard the heads, each device gets the
        sum over all of them."""
        mesh, spec = jax.typeof(o).sharding.mesh, jax.typeof(o).sharding.spec
        return self.out(o, None if spec[2] is None else NamedSharding(mesh, P(*spec[:2], None)))

    def _check_options(self, N):
        """Raises what flash_attention would raise in the first call."""
        query, key = (
            jax.ShapeDtypeStruct((1, 1, heads, self.head_size), jnp.float32)
            for heads in (N, self.num_kv_heads)
        )
        names = "is_causal local_window_size logits_soft_cap score_mod dropout_rate implementation"
        options = {name: getattr(self, name) for name in names.split()}
        options |= dict(scale=_value(self.scale))
        options["dropout_rng"] = jax.eval_shape(lambda: jax.random.key(0))
        # only a call shows whether an implementation can run it
        with contextlib.suppress(NotImplementedError):
            explain(query, key, key, **options)


in_lines(FlashAttention.__init__)
in_lines(FlashAttention.__call__)


def _value(x):
    """The array of a Variable; else x."""
    return x[...] if isinstance(x, nnx.Variable) else x
