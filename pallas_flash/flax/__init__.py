"""For Flax: `attention_fn`, the hook of its attention modules, and `FlashAttention`, a layer with
RoPE and a KV cache."""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    text = f"pallas_flash.flax needs flax: {error}. Run pip install '.[flax]'."
    raise ModuleNotFoundError(text, name=error.name) from None

from pallas_flash.flax.cache import KVCache, RollingCache
from pallas_flash.flax.hook import attention_fn
from pallas_flash.flax.layer import FlashAttention
from pallas_flash.flax.rotary import rope

__all__ = ["FlashAttention", "KVCache", "RollingCache", "attention_fn", "rope"]
