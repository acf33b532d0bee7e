"""What an unexpected keyword argument is told: its name here, if another library's call has it."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import TypeVar

F = TypeVar("F", bound=Callable)

_VARLEN = "mask=masks.Varlen(cu_seqlens_q, cu_seqlens_k)"
_LENGTHS = "lengths", "key_value_seq_lengths"
_RATE = "dropout_rate? It goes with dropout_rng, a key of jax.random."
_RESIDUAL = "return_residual? It returns the log-sum-exp."
# Names of other libraries, as docs/migrating.md has them, and the argument here; of several the
# first that the function has.
OURS: dict[str, str | tuple[str, ...]] = {
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal? Where it is aligned bottom-right, add query_offset=S - T.",
    "assume_sequential_positions": "is_causal",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "softcap": "logits_soft_cap",
    "window_size": "local_window_size? None is no limit.",
    "sliding_window": "local_window_size=(sliding_window - 1, 0)",
    "alibi_slopes": "score_mod=scores.Alibi(slopes)",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "block_mask": "mask",
    "mask_mod": "mask=masks.MaskMod(mask_mod)",
    "segment_ids": "query_segment_ids",
    "kv_segment_ids": "key_value_segment_ids",
    "cu_seqlens_q": _VARLEN,
    "cu_seqlens_k": _VARLEN,
    "cache_seqlens": _LENGTHS,
    "seqused_k": _LENGTHS,
    "block_table": "page_table",
    "page_indices": "page_table",
    "mask": "lengths, local_window_size or score_mod",
    "dropout": _RATE,
    "dropout_p": _RATE,
    "return_attn_probs": _RESIDUAL,
    "return_lse": _RESIDUAL,
    "learnable_sink": "sinks",
    "s_aux": "sinks",
}
NEEDLESS = {
    "attention_specs": "the arrays' own shardings count, and context=Ring(axis) splits a sequence",
    "block_table": "paged_attention takes it, as page_table",
    "enable_gqa": "grouped heads need no flag",
    "kernel_options": "tiles are chosen; explain says which",
    "max_seqlen_k": "no maxima are needed",
    "max_seqlen_q": "no maxima are needed",
    "num_splits": "it is chosen; explain says how",
    "pack_gqa": "it is chosen; explain says how",
    "q_sharding": "the arrays' own shardings count",
}
# Those that Flax's modules give every attention_fn.
FLAX = {
    "attn_weights_value_einsum",
    "broadcast_dropout",
    "dtype",
    "einsum_dot_general",
    "force_fp32_for_softmax",
    "input_positions",
    "module",
    "precision",
    "promote_dtype",
    "qk_attn_weights_einsum",
}


def refuse(function: str, given: Collection[str], known: Collection[str]):
    """Raises where a name is none of the function's arguments."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    listed = " and ".join(map(repr, unknown))
    text = f"{function}() got {'an ' * (len(unknown) == 1)}unexpected keyword argument"
    text += f"{'s' * (len(unknown) > 1)} {listed}"
    if FLAX.intersection(unknown):
        text += ". For Flax's modules pass attention_fn=pallas_flash.flax.attention_fn"
    hints = dict.fromkeys(filter(None, (_hint(name, known) for name in unknown)))
    raise TypeError(" ".join([f"{text}.", *hints]))


def _hint(name: str, known: Collection[str]) -> str | None:
    close = () if name in NEEDLESS or name in FLAX else difflib.get_close_matches(name, known, 1)
    ours = OURS.get(name, close)
    for text in (ours,) if isinstance(ours, str) else ours:
        if re.match(r"\w+", text)[0] in known:
            return f"Did you mean {text}" + ("" if "?" in text else "?")
    return f"Leave {name} out: {NEEDLESS[name]}." if name in NEEDLESS else None


def refused(f: F) -> F:
    """f, which tells an unexpected keyword argument what it is called here."""
    known = inspect.signature(f).parameters

    @functools.wraps(f)
    def checked(*args, **kwargs):
        if not kwargs.keys() <= known.keys():
            refuse(f.__name__, kwargs, known)
        return f(*args, **kwargs)

    return checked  # type: ignore[return-value]
