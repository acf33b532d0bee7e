"""For Flax: `attention_fn`, the hook of its attention modules, and `FlashAttention`, a layer with RoPE and a KV cache."""

from pallas_flash.flax.hook import attention_fn
from pallas_flash.flax.layer import FlashAttention, KVCache, rope

__all__ = ["FlashAttention", "KVCache", "attention_fn", "rope"]
