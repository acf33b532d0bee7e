"""What an unexpected argument is told: its name here, if another library's call has it."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import TypeVar

from pallas_flash.checks import tracebacks

F = TypeVar("F", bound=Callable)
Hints = dict[str, str | tuple[str, ...]]

_VARLEN = "mask=masks.Varlen(cu_seqlens_q, cu_seqlens_k)"
_LENGTHS = "lengths", "key_value_seq_lengths"
_PADDING = "mask? Padding is bool [B, 1, 1, S], or pass key_value_seq_lengths."
_RATE = "dropout_rate? It goes with dropout_rng, a key of jax.random."
_RNG = "dropout_rng? It is a key of jax.random."
_RESIDUAL = "return_residual? It returns the log-sum-exp."
# Names of other libraries, as docs/migrating.md has them, and the argument here; of several the
# first that the function has.
OURS: Hints = {
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal? Where it is aligned bottom-right, add query_offset=S - T.",
    "assume_sequential_positions": "is_causal",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "softcap": ("logits_soft_cap", "score_mod=scores.SoftCap(cap)"),
    "logits_soft_cap": "score_mod=scores.SoftCap(logits_soft_cap)",
    "window_size": ("local_window_size? None is no limit.", "mask=masks.Window(left, right)"),
    "sliding_window": "local_window_size=(sliding_window - 1, 0)",
    "local_window_size": "mask=masks.Window(left, right)",
    "alibi_slopes": "score_mod=scores.Alibi(slopes)",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "attention_mask": _PADDING,
    "key_padding_mask": _PADDING,
    "block_mask": "mask",
    "indices": "mask=masks.KeyLists(indices)",
    "block_indices": "mask=masks.KeyLists(block_indices, block)",
    "mask_mod": "mask=masks.MaskMod(mask_mod)",
    "segment_ids": ("query_segment_ids", "mask=masks.Documents(query_ids, key_ids)"),
    "kv_segment_ids": "key_value_segment_ids",
    "cu_seqlens": ("mask=masks.Varlen(cu_seqlens)", "cu_seqlens_q"),
    "cu_seqlens_q": _VARLEN,
    "cu_seqlens_k": _VARLEN,
    "cache_seqlens": _LENGTHS,
    "seqused_k": _LENGTHS,
    "kv_lens": _LENGTHS,
    "block_table": "page_table",
    "page_indices": "page_table",
    "dropout": _RATE,
    "dropout_p": _RATE,
    "dropout_seed": _RNG,
    "return_attn_probs": _RESIDUAL,
    "return_lse": _RESIDUAL,
    "return_softmax_lse": _RESIDUAL,
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "attn_sink": "sinks",
    # of create_block_mask
    "B": "batch",
    "H": "heads",
    "Q_LEN": "queries",
    "KV_LEN": "keys",
    "BLOCK_SIZE": "block",
}
_COUNTS = "an index of -1 names no key, anywhere in a list"
_TILES = "tiles are chosen; explain says which"
NEEDLESS = {
    "attention_specs": "the arrays' own shardings count, and context=Ring(axis) splits a sequence",
    "block_counts": _COUNTS,
    "block_q": _TILES,
    "block_sizes": _TILES,
    "block_table": "paged_attention takes it, as page_table",
    "device": "the types of blocks are where jax computes them",
    "enable_gqa": "grouped heads need no flag",
    "kernel_options": _TILES,
    "logits_dtype": "logits are float32, or float64 for float64",
    "max_seqlen_k": "no maxima are needed",
    "max_seqlen_q": "no maxima are needed",
    "num_splits": "it is chosen; explain says how",
    "pack_gqa": "it is chosen; explain says how",
    "precision": "float32 is multiplied in float32, 16-bit floats exactly, and sums are float32",
    "q_sharding": "the arrays' own shardings count",
    "topk_length": _COUNTS,
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


# Of the constructor of `flax.FlashAttention`, and of its call. What is no name of an argument is a
# whole sentence.
LAYER: Hints = {
    "attention_fn": "Leave attention_fn out: the layer calls flash_attention.",
    "bias": "use_bias",
    "broadcast_dropout": "Leave broadcast_dropout out: each batch row and head has its own mask.",
    "causal": "is_causal",
    "decode": "Leave decode out: init_cache makes a cache, which a call takes and returns.",
    "deterministic": (
        "deterministic_gradients? layer.eval() turns dropout off, or deterministic=True in a call."
    ),
    "dropout": "dropout_rate",
    "dropout_p": "dropout_rate",
    "dropout_rng": "rngs? Its stream dropout is used.",
    "embed_dim": "in_features",
    "head_dim": "head_size",
    "hidden_size": "in_features",
    "n_kv_heads": "num_kv_heads",
    "normalize_qk": "qk_norm",
    "num_key_value_heads": "num_kv_heads",
    "query_pre_attn_scalar": "scale? It is query_pre_attn_scalar**-0.5.",
    "qkv_features": "head_size? It is qkv_features / num_heads.",
    "rope_scaling": "rope? It is a function of x and positions.",
    "rope_theta": "rope_base",
    "use_rope": "rope_base? None is no RoPE.",
    **{name: f"{name} belongs in the call." for name in "cache lengths mask segment_ids".split()},
}
_OF_LAYER = (
    "context deterministic_gradients dropout_rate dtype implementation is_causal local_window_size "
    "logits_soft_cap qk_norm rope rope_base scale score_mod sinks"
).split()
LAYER_CALL: Hints = {
    "attention_mask": "mask? Padding is bool [B, 1, 1, T], or pass lengths.",
    "bias": "Leave bias out: a score_mod in the constructor adds to the logits.",
    "decode": "cache? init_cache makes one.",
    "dropout_rng": "rngs",
    "inputs_kv": "inputs_k",
    "key_padding_mask": "mask? Padding is bool [B, 1, 1, T], or pass lengths.",
    "key_value_seq_lengths": "kv_lengths? In self-attention it is lengths.",
    "kv_cache": "cache",
    "input_positions": "positions",
    "position_ids": "positions",
    "query_segment_ids": "segment_ids",
    "query_seq_lengths": "lengths",
    "sow_weights": "Leave sow_weights out: pallas_flash.attention_weights computes weights.",
    **{name: f"{name} belongs in the constructor." for name in _OF_LAYER},
}


def refuse(
    function: str,
    given: Collection[str],
    known: Collection[str],
    hints: Hints | None = None,
):
    """Raises where a name is none of the function's arguments. `hints` come before OURS."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    listed = " and ".join(map(repr, unknown))
    text = f"{function}() got {'an ' * (len(unknown) == 1)}unexpected keyword argument"
    text += f"{'s' * (len(unknown) > 1)} {listed}"
    if hints is None and FLAX.intersection(unknown):
        text += ". For Flax's modules pass attention_fn=pallas_flash.flax.attention_fn"
    told = dict.fromkeys(filter(None, (_hint(name, known, hints or {}) for name in unknown)))
    raise TypeError(" ".join([f"{text}.", *told]))


def _hint(name: str, known: Collection[str], hints: Hints) -> str | None:
    of_name = hints.get(name, OURS.get(name, ()))
    if name not in (*hints, *OURS, *NEEDLESS, *FLAX):
        of_name = tuple(difflib.get_close_matches(name.lower(), known, 1))
    for text in (of_name,) if isinstance(of_name, str) else of_name:
        if re.match(r"\w+", text)[0] in known:
            return f"Did you mean {text}" + ("" if "?" in text else "?")
        if name in hints:
            return text
    return f"Leave {name} out: {NEEDLESS[name]}." if name in NEEDLESS else None


def refused(hints: Hints | None = None) -> Callable[[F], F]:
    """Decorates a function: an unexpected keyword argument is told what it is called here, and too
    many arguments without a name which ones need theirs."""
    return functools.partial(_refused, hints)


def _refused(hints: Hints | None, f: F) -> F:
    known = inspect.signature(f).parameters
    named = [name for name, x in known.items() if x.kind == x.KEYWORD_ONLY]
    places = [name for name in known if name not in named]
    is_method = places[0] == "self"
    function = f.__qualname__.removesuffix(".__init__") if is_method else f.__name__

    @functools.wraps(f)
    def checked(*args, **kwargs):
        try:
            if not kwargs.keys() <= known.keys():
                refuse(function, kwargs, known, hints)
            if len(args) > len(places):
                raise TypeError(
                    f"{function}() takes {', '.join(places[is_method:])}; got "
                    f"{len(args) - is_method} arguments without a name. Pass the others by name: "
                    f"{', '.join(named)}."
                )
            return f(*args, **kwargs)
        except Exception as error:
            tracebacks.hide_frames(error)
            raise

    return checked  # type: ignore[return-value]
