"""FlashAttention in Pallas: exact attention in O(T) memory, for JAX."""

from pallas_flash import masks
from pallas_flash.attention import Explanation, explain, flash_attention, flash_attention_jvp
from pallas_flash.dropout import dropout_mask

__all__ = ["Explanation", "dropout_mask", "explain", "flash_attention", "flash_attention_jvp", "masks"]
__version__ = "0.1.0"
