"""FlashAttention in Pallas: exact attention in O(T) memory, for JAX."""

from pallas_flash import masks
from pallas_flash.attention import Explanation, explain, flash_attention, flash_attention_jvp

__all__ = ["Explanation", "explain", "flash_attention", "flash_attention_jvp", "masks"]
__version__ = "0.1.0"
