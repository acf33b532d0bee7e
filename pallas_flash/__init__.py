"""FlashAttention in Pallas: exact attention in O(T + S) memory, for JAX.

  flash_attention      attention, as jax.nn.dot_product_attention; flash_attention_jvp, forward mode
  masks, scores        what a query sees, and what is done to its logits
  paged_cache          keys and values in pages: append and attend; paged_attention of arrays
  flax                 FlashAttention, a layer, and attention_fn for Flax's own modules
  context_parallel     Ring, Zigzag and AllToAll: a sequence on several devices
  merge_attention      attention to all keys from attention to parts of them
  attention_weights    the softmax of chosen queries; listed_weights, of keys that lists name
  dropout_mask         the weights that dropout keeps
  explain              which implementation runs, and why; explain_paged, of pages

help(pallas_flash.flash_attention) has the arguments. `python -m pallas_flash` checks this machine.
"""

import sys
from typing import TYPE_CHECKING

from pallas_flash import context_parallel, masks, scores
from pallas_flash.attention import Options as Options  # for type checkers
from pallas_flash.attention import flash_attention, flash_attention_jvp
from pallas_flash.caches.paged import paged_attention
from pallas_flash.caches.pages import PagedCache, paged_cache
from pallas_flash.dropout import dropout_mask
from pallas_flash.explanation import Explanation, explain, explain_paged
from pallas_flash.merge import merge_attention
from pallas_flash.weights import attention_weights, listed_weights

__all__ = [
    "Explanation",
    "PagedCache",
    "attention_weights",
    "context_parallel",
    "dropout_mask",
    "explain",
    "explain_paged",
    "flash_attention",
    "flash_attention_jvp",
    "listed_weights",
    "masks",
    "merge_attention",
    "paged_attention",
    "paged_cache",
    "scores",
]
__version__ = "0.1.0"


def _module_of(name: str) -> str | None:
    """The public module that has a name which the package itself has not."""
    if name in ("FlashAttention", "KVCache", "RollingCache", "attention_fn", "rope"):
        return f"{__name__}.flax"  # without an import of Flax
    for module in (context_parallel, masks, scores):
        if getattr(getattr(module, name, None), "__module__", "").startswith(module.__name__):
            return module.__name__
    return None


if not TYPE_CHECKING:  # for type checkers the package has the names above, and no other

    def __getattr__(name: str):
        module, error = None if name.startswith("_") else _module_of(name), AttributeError
        if module is None:
            raise error(f"module {__name__!r} has no attribute {name!r}")
        # `from pallas_flash import name` drops an AttributeError and its text; hasattr needs one
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            error = ImportError
        raise error(f"{name} is in {module}: from {module} import {name}")
