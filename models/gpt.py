"""A small GPT in flax.nnx: pre-norm blocks, rotary positions, FlashAttention, and decoding with a
cache.

The letters: B batch, T tokens, D features, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_flash import context_parallel
from pallas_flash.flax import FlashAttention, KVCache, RollingCache


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `features` is a multiple of `num_heads`, which is a multiple of
    `num_kv_heads`."""

    vocab_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as num_heads
    features: int = 128
    hidden_features: int = 512
    # a token sees itself and the window - 1 before it; None: all before it
    window: int | None = None
    tied: bool = True  # the head's weights are the embedding's
    # in training: of the attention's weights, the embeddings, and what each branch adds
    dropout: float = 0.0
    implementation: str | None = None  # of flash_attention; None chooses
    # of flash_attention, where sequences lie on several devices
    context: context_parallel.Context | None = None
    dtype: str = "float32"  # of activations; parameters are float32


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = config
        # Both branches end in a small matrix, so that a new model starts close to the identity at
        # any depth.
        small = nnx.initializers.normal(0.02 / (2 * c.num_layers) ** 0.5)
        self.attention_norm = nnx.RMSNorm(c.features, dtype=c.dtype, rngs=rngs)
        self.attention = FlashAttention(
            c.num_heads,
            c.features,
            num_kv_heads=c.num_kv_heads,
            local_window_size=c.window and (c.window - 1, 0),
            dropout_rate=c.dropout,
            implementation=c.implementation,
            context=c.context,
            dtype=c.dtype,
            out_kernel_init=small,
            rngs=rngs,
            keep_rngs=False,  # the model's state is its parameters; training passes rngs
        )
        self.mlp_norm = nnx.RMSNorm(c.features, dtype=c.dtype, rngs=rngs)
        self.up = nnx.Linear(
            c.features, c.hidden_features, use_bias=False, dtype=c.dtype, rngs=rngs
        )
        self.down = nnx.Linear(
            c.hidden_features,
            c.features,
            use_bias=False,
            dtype=c.dtype,
            kernel_init=small,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(c.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: KVCache | RollingCache | None = None,
        rngs: nnx.Rngs | None = None,
        lengths=None,
    ):
        training = dict(rngs=rngs, deterministic=rngs is None)
        y = self.attention(self.attention_norm(x), cache=cache, lengths=lengths, **training)
        if cache is not None:
            y, cache = y
        x = x + self.dropout(y, **training)
        # without the barrier XLA's CPU compiler computes the derivative of gelu and its transpose,
        # which the gradient of up's weights takes, in one slow loop; that of jax 0.10 drops it
        hidden = nnx.gelu(jax.lax.optimization_barrier(self.up(self.mlp_norm(x))))
        return x + self.dropout(self.down(hidden), **training), cache


class GPT(nnx.Module):
    """Next-token logits. A model on bytes has V = 256 and needs no tokenizer."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        small = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(
            c.vocab_size, c.features, embedding_init=small, dtype=c.dtype, rngs=rngs
        )
        self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = nnx.RMSNorm(c.features, dtype=c.dtype, rngs=rngs)
        self.dropout = nnx.Dropout(c.dropout)
        if not c.tied:
            self.head = nnx.Linear(
                c.features,
                c.vocab_size,
                use_bias=False,
                dtype=c.dtype,
                kernel_init=small,
                rngs=rngs,
            )

    def init_cache(self, batch: int, max_length: int) -> list[KVCache]:
        """Empty caches, one a block, for `batch` sequences of up to `max_length` tokens."""
        return [block.attention.init_cache(batch, max_length) for block in self.blocks]

    def init_rolling_cache(self, batch: int, tokens: int) -> list[RollingCache]:
        """Caches that keep the tokens of a window, for sequences of any length; a call has up to
        `tokens` of them."""
        return [block.attention.init_rolling_cache(batch, tokens) for block in self.blocks]

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: list[KVCache] | list[RollingCache] | None = None,
        rngs: nnx.Rngs | None = None,
        lengths: Int[Array, "B"] | None = None,
    ):
        """float32 logits [B, T, V]; with caches (logits, caches), where tokens are the next T of
        each sequence.

        With lengths only the first lengths[b] tokens of row b are real: the logits of the others
        mean nothing. With rngs, of which the stream `dropout` is read, it is training; without
        there is no dropout.
        """
        x = self.dropout(self.embedding(tokens), rngs=rngs, deterministic=rngs is None)
        new_caches = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, cache, rngs, lengths)
            new_caches.append(cache)
        x = self.norm(x)
        logits = (self.embedding.attend(x) if self.config.tied else self.head(x)).astype(
            jnp.float32
        )
        return logits if caches is None else (logits, new_caches)
