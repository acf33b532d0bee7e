"""What arguments are called elsewhere, and here: one table, by callable, which errors quote. {} in
a text stands for the names of a call that this text answers."""

Hints = dict[str, str | tuple[str, ...]]


def _each(names: str, text: str | tuple[str, ...]) -> Hints:
    """One text for several names."""
    return dict.fromkeys(names.split(), text)


_VARLEN = "mask=masks.Varlen(cu_seqlens_q, cu_seqlens_k)"
_LISTS = "mask=masks.KeyLists(block_indices, block_size)"
_LENGTHS = "lengths", "key_value_seq_lengths"
_PADDING = "mask? Padding is bool [B, 1, 1, S], or pass key_value_seq_lengths."
_RATE = "dropout_rate? It goes with dropout_rng, a key of jax.random."
_RNG = "dropout_rng? It is a key of jax.random."
_RESIDUAL = "return_residual? It returns the log-sum-exp."
# For every callable, as docs/migrating.md has them: of several texts the first that begins with an
# argument of the callable.
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
    **_each("attention_mask key_padding_mask", _PADDING),
    "block_mask": "mask",
    "indices": "mask=masks.KeyLists(indices)",
    "block_indices": _LISTS,
    "block_size": ("block", _LISTS),
    "mask_mod": "mask=masks.MaskMod(mask_mod)",
    "segment_ids": ("query_segment_ids", "mask=masks.Documents(segment_ids)"),
    "kv_segment_ids": "key_value_segment_ids",
    "cu_seqlens": "mask=masks.Varlen(cu_seqlens)",
    **_each("cu_seqlens_q cu_seqlens_k", _VARLEN),
    **_each("cache_seqlens seqused_k kv_lens", _LENGTHS),
    **_each("block_table page_indices", "page_table"),
    **_each("dropout dropout_p", _RATE),
    "dropout_seed": _RNG,
    **_each("return_attn_probs return_lse return_softmax_lse", _RESIDUAL),
    **_each("learnable_sink s_aux attn_sink", "sinks"),
    # of create_block_mask
    "B": "batch",
    "H": "heads",
    "Q_LEN": "queries",
    "KV_LEN": "keys",
    "BLOCK_SIZE": "block",
}
DEQUANTISE = (
    "dequantise: query.astype(bfloat16) * its scale; 8 bits are for caches (paged_attention)"
)
_COUNTS = "an index of -1 names no key, anywhere in a list"
_MAXIMA = "no maxima are needed"
_TILES = "tiles are chosen; explain says which"
NEEDLESS: dict[str, str] = {
    "attention_specs": "the arrays' own shardings count, and context=Ring(axis) splits a sequence",
    "block_counts": _COUNTS,
    "block_q": _TILES,
    "block_sizes": _TILES,
    "block_table": "paged_attention takes it, as page_table",
    "device": "the types of blocks are where jax computes them",
    "enable_gqa": "grouped heads need no flag",
    "kernel_options": _TILES,
    "logits_dtype": "logits are float32, or float64 for float64",
    "max_seqlen_k": _MAXIMA,
    "max_seqlen_q": _MAXIMA,
    "num_splits": "it is chosen; explain says how",
    "pack_gqa": "it is chosen; explain says how",
    "precision": "float32 is multiplied in float32, 16-bit floats exactly, and sums are float32",
    "q_sharding": "the arrays' own shardings count",
    "topk_length": _COUNTS,
    **dict.fromkeys(
        "q_descale k_descale v_descale descale_q descale_k descale_v fp8_params".split(), DEQUANTISE
    ),
}
# What Flax's modules give every attention_fn.
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

_LAYER: Hints = {
    "attention_fn": "Leave attention_fn out: the layer calls flash_attention.",
    "bias": "use_bias",
    "broadcast_dropout": "Leave broadcast_dropout out: each batch row and head has its own mask.",
    "causal": "is_causal",
    "decode": "Leave decode out: init_cache makes a cache, which a call takes and returns.",
    "deterministic": (
        "deterministic_gradients? layer.eval() turns dropout off, or deterministic=True in a call."
    ),
    **_each("dropout dropout_p", "dropout_rate"),
    "dropout_rng": "rngs? Its stream dropout is used.",
    "head_dim": "head_size",
    **_each("embed_dim hidden_size", "in_features"),
    **_each("n_kv_heads num_key_value_heads", "num_kv_heads"),
    "normalize_qk": "qk_norm",
    "qkv_features": "head_size? It is qkv_features / num_heads.",
    "query_pre_attn_scalar": "Pass scale=query_pre_attn_scalar ** -0.5.",
    "rope_scaling": "rope? It is a function of x and positions.",
    "rope_theta": "rope_base",
    "use_rope": "rope_base? None is no RoPE.",
    **_each("cache lengths mask segment_ids", "Pass {} in the call."),
}
_OF_LAYER = (
    "context deterministic_gradients dropout_rate dtype implementation is_causal local_window_size "
    "logits_soft_cap qk_norm rope rope_base scale score_mod sinks"
)
_PADDING_OF_LAYER = "mask? Padding is bool [B, 1, 1, T], or pass lengths."
_LAYER_CALL: Hints = {
    **_each("attention_mask key_padding_mask", _PADDING_OF_LAYER),
    "bias": "Leave bias out: a score_mod in the constructor adds to the logits.",
    "decode": "cache? init_cache makes one.",
    "dropout_rng": "rngs",
    "inputs_kv": "inputs_k",
    "key_value_seq_lengths": "kv_lengths? In self-attention it is lengths.",
    "kv_cache": "cache",
    **_each("input_positions position_ids", "positions"),
    "query_segment_ids": "segment_ids",
    "query_seq_lengths": "lengths",
    "sow_weights": "Leave sow_weights out: pallas_flash.attention_weights computes weights.",
    **_each(_OF_LAYER, "Pass {} to the constructor."),
}
_ROWS = "Leave {} out: each document is a row of the page table."
_LISTS_ALONE = "Leave {} out: lengths hide padding, mask takes a masks.KeyLists, and a score_mod"
_LISTS_ALONE += " of -inf hides keys by a rule."
_PAGED: Hints = {
    **_each("k key k_cache key_cache", "k_pages"),
    **_each("v value v_cache value_cache", "v_pages"),
    "block_tables": "page_table",
    **_each("seq_lens context_lens kv_lengths key_value_seq_lengths", "lengths"),
    **_each("cu_seqlens cu_q_lens qo_indptr", "cu_seqlens_q"),
    "cu_seqlens_k": "Leave cu_seqlens_k out: lengths has the number of each row's keys.",
    "causal": "is_causal? It is True by default, and the last query sees the last key.",
    **_each("attention_mask attn_mask block_mask key_padding_mask mask_mod", _LISTS_ALONE),
    **_each("bias attn_bias", "Leave {} out: a score_mod adds to the logits."),
    **_each("segment_ids query_segment_ids key_value_segment_ids kv_segment_ids", _ROWS),
    **_each(
        "dropout dropout_p dropout_rate dropout_rng dropout_seed",
        "Leave {} out: attention to pages is decoding, without dropout.",
    ),
    "deterministic": "Leave deterministic out: there is no gradient, and no order to choose.",
    "context": "Leave context out: a row's pages are whole on a device; heads may be sharded.",
    "attn_logits_soft_cap": "logits_soft_cap",
    "block_size": "Leave block_size out: k_pages [P, page, K, H] has the size of a page.",
    **_each("k_scale k_descale", "k_scales? It is float32 [P, page, K]."),
    **_each("v_scale v_descale", "v_scales? It is float32 [P, page, K]."),
}
_WINDOW = (
    "Leave {} out: Window(left, right) counts the keys before a position and after it; the last w "
    "keys are Window(w - 1, 0)."
)
_KEY_LENGTHS = "kv_lens kv_lengths key_value_seq_lengths seqused_k cache_seqlens seq_lens"
_BLOCK_MASK: Hints = {
    **_each("q_len Tq T", "queries"),
    **_each("kv_len S", "keys"),
    **_each("offset q_offset", "query_offset"),
}
_MESH: Hints = {
    **_each("axis_name mesh_axis seq_axis", "axis"),
    "batch_axis": "batch",
    **_each("head_axis heads_axis", "heads"),
}
_ENDS = {"axis_name": "axis", **_each("n num_devices device_count", "devices")}
_LENGTH = "max_len max_seq_len max_seq_length max_seqlen"
_CACHE: Hints = {**_each("batch_size max_batch_size", "batch"), "cache_dtype": "dtype"}
_CACHE_SIZES = _CACHE | _each(_LENGTH, "max_length")
_TOKENS = _each("count n num_tokens length lengths", "tokens")

# For one callable, before OURS. A text that begins with none of its arguments is a whole sentence.
BY_CALLABLE: dict[str, Hints] = {
    "attention_fn": {},
    "FlashAttention": _LAYER,
    "FlashAttention.__call__": _LAYER_CALL,
    "FlashAttention.init_cache": _CACHE_SIZES,
    "FlashAttention.init_rolling_cache": _CACHE
    | _each(f"max_length {_LENGTH}", "Leave {} out: a rolling cache holds a window, of any text."),
    "rope": {
        **_each("theta rope_theta rope_base max_wavelength", "base"),
        **_each("position_ids pos", "positions"),
        **_each("freqs inv_freq", "frequencies"),
    },
    "paged_attention": _PAGED,
    "paged_cache": {
        **_CACHE_SIZES,
        **_each("num_pages num_blocks", "pages"),
        **_each("page_size block_size", "page"),
        "head_dim": "head_size",
        **_each("heads num_heads num_kv_heads num_key_value_heads n_kv_heads", "kv_heads"),
    },
    "PagedCache.append": {
        **_each("keys new_key", "key"),
        **_each("values new_value", "value"),
        **_each("counts lengths query_seq_lengths tokens", "count"),
    },
    "PagedCache.reserve": _TOKENS,
    "PagedCache.shortage": _TOKENS,
    "PagedCache.release": _each("row mask done", "rows? They are bool [B], True: release."),
    "PagedCache.share": _each("src row", "source") | _each("dst to", "target"),
    "merge_attention": {
        **_each("o os out outs outputs_list", "outputs"),
        **_each("lse logsumexp residuals", "lses"),
    },
    "dropout_mask": {
        **_each("rng key seed", _RNG),
        **_each("rate p dropout dropout_p", "dropout_rate"),
        "size": "shape",
    },
    "Window": _each("window window_size size sliding_window local_window_size", _WINDOW),
    "Chunked": _each("chunk chunk_size chunk_length", "size"),
    "KeyLengths": _each(_KEY_LENGTHS, "lengths"),
    "KeyStarts": _each("start key_starts kv_starts left_padding", "starts"),
    "QueryLengths": _each("q_lens q_lengths query_seq_lengths seqused_q seq_lens", "lengths"),
    "PrefixLM": _each("prefix_len prefix_length prefix_lengths", "prefix"),
    "Documents": {
        **_each("ids document_ids segment_ids q_ids query_segment_ids", "query_ids"),
        **_each("kv_ids kv_segment_ids key_value_segment_ids", "key_ids"),
    },
    "Varlen": {
        **_each("cu_seqlens cu_seqlens_q_padded ends offsets", "cu_seqlens_q"),
        "cu_seqlens_kv": "cu_seqlens_k",
        **_each("max_seqlen max_seqlen_q max_seqlen_k", f"Leave {{}} out: {_MAXIMA}."),
        "segment_ids": "Leave segment_ids out: ids by token are masks.Documents(segment_ids).",
    },
    "Varlen.key_value_segment_ids": _each("keys n size tokens total_length", "length"),
    "KeyLists": {
        **_each("block_size blocks page_size kv_block_size BLOCK_SIZE", "block"),
        **_each("q_block_size query_block_size block_q", "query_block"),
        **_each("block_indices topk_indices kv_indices lists keys", "indices"),
        **_each("block_counts topk_length kv_num_blocks counts", f"Leave {{}} out: {_COUNTS}."),
    },
    "MaskMod": _each("mask_mod fn f mask rule", "function"),
    "Dilated": _each("dilation step", "stride"),
    "GlobalTokens": _each("tokens num_tokens num_global_tokens global_tokens", "n"),
    "create_block_mask": _BLOCK_MASK,
    "draw": _BLOCK_MASK,
    "Alibi": {
        **_each("alibi_slopes m", "slopes"),
        **_each("ids segment_ids kv_segment_ids", "key_value_segment_ids"),
    },
    "T5Bias": {
        **_each("bias weight embedding relative_attention_bias", "table"),
        "num_buckets": "Leave num_buckets out: it is the size of the table's last axis.",
    },
    "SoftCap": _each("soft_cap softcap logits_soft_cap", "cap"),
    "Ring": _MESH,
    "Zigzag": _MESH,
    "AllToAll": _MESH,
    "zigzag": _ENDS,
    "unzigzag": _ENDS,
}
# Where a call has too many arguments without a name.
TOO_MANY: dict[str, str] = {
    "listed_weights": "There is no value: listed_weights(query, key, lists, lse).",
    "attention_weights": "There is no value: attention_weights(query, key, rows=rows).",
    "Causal": "A window is masks.Window(left, right).",
}
