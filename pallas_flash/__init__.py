"""FlashAttention in Pallas: exact attention in O(T) memory, for JAX."""

from pallas_flash import context_parallel, masks, scores
from pallas_flash.attention import flash_attention, flash_attention_jvp
from pallas_flash.caches.paged import paged_attention
from pallas_flash.caches.pages import PagedCache, paged_cache
from pallas_flash.dropout import dropout_mask
from pallas_flash.explanation import Explanation, explain, explain_paged
from pallas_flash.merge import merge_attention
from pallas_flash.signatures import Options
from pallas_flash.weights import attention_weights

__all__ = [
    "Explanation",
    "Options",
    "PagedCache",
    "attention_weights",
    "context_parallel",
    "dropout_mask",
    "explain",
    "explain_paged",
    "flash_attention",
    "flash_attention_jvp",
    "masks",
    "merge_attention",
    "paged_attention",
    "paged_cache",
    "scores",
]
__version__ = "0.1.0"
