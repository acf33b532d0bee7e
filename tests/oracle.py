"""Attention and its gradients in float64 NumPy, every mask by comparing i and j: shares no line
with the package."""

from itertools import pairwise

import numpy as np

HIGHEST = np.finfo(np.float64).max  # in place of an infinite sink


def visible(B, N, T, S, kw):
    """bool [B, N, T, S]: which key each query may see, from the arguments of flash_attention."""
    i, j = np.arange(T)[None, :, None], np.arange(S)[None, None, :]
    by_batch = lambda x: np.broadcast_to(np.asarray(x), (B,))[:, None, None]
    position = i + by_batch(kw.get("query_offset", 0))
    seen = np.ones((B, T, S), bool)
    if (ends := kw.get("varlen")) is not None:
        seen, position = sequences(*ends, B, T, S)
    if (drawn := kw.get("drawn")) is not None and drawn.ends is not None:  # drawn_masks.Drawn
        position = sequences(*drawn.ends, B, T, S)[1]
    if kw.get("is_causal"):
        seen &= j <= position
    for window in kw.get("local_window_size"), kw.get("window"):  # masks.Window, of arrays
        if window is not None:
            left, right = map(by_batch, (window, window) if isinstance(window, int) else window)
            seen &= (j >= position - left) & (j <= position + right)
    if (lengths := kw.get("query_seq_lengths")) is not None:
        seen &= i < by_batch(lengths)
    if (lengths := kw.get("key_value_seq_lengths")) is not None:
        seen &= j < by_batch(lengths)
    if (ids := kw.get("query_segment_ids")) is not None:
        key_ids = kw.get("key_value_segment_ids", ids)
        seen &= np.asarray(ids)[:, :, None] == np.asarray(key_ids)[:, None, :]
    if (prefix := kw.get("prefix")) is not None:  # PrefixLM, which comes as a mask object
        seen &= (j <= position) | (j < by_batch(prefix))
    seen = np.broadcast_to(seen[:, None], (B, N, T, S))
    b, h = rows_and_heads(B, N)
    if drawn is not None:
        seen = seen & drawn.seen(b, h, i[:, None], position[:, None], j)
    if (lists := kw.get("lists")) is not None:
        seen = seen & listed(*lists, B, N, T, S)
    if (rule := kw.get("rule")) is not None:  # masks.MaskMod
        seen = seen & rule(b, h, position[:, None], j)
    mask = kw.get("mask")
    return seen if mask is None else seen & (np.asarray(mask) != 0)


def rows_and_heads(B, N):
    """The indices of batch rows and heads, which broadcast to [B, N, T, S]."""
    return np.arange(B)[:, None, None, None], np.arange(N)[:, None, None]


def _scale(q, kw):
    return kw.get("scale") or q.shape[3] ** -0.5


def _logits(q, k, kw):
    """[B, N, T, S]"""
    q, k = (np.asarray(x).astype(np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = _scale(q, kw) * np.einsum("btnh,bsnh->bnts", q, k)
    if (bias := kw.get("bias")) is not None:
        logits = logits + np.asarray(bias).astype(np.float64)
    if cap := kw.get("logits_soft_cap"):
        logits = cap * np.tanh(logits / cap)
    return logits


def max_logits(q, k, score=None, **kw):
    """The largest logit that each query sees, [B, T, N], and -inf where there is none. `score` is a
    score_mod of NumPy's numbers, of positions from query_offset on."""
    logits = _logits(q, k, kw)
    B, N, T, S = logits.shape
    if score is not None:
        offset = np.broadcast_to(kw.get("query_offset", 0), B)[:, None, None, None]
        position = np.arange(T)[:, None] + offset
        logits = score(logits, *rows_and_heads(B, N), position, np.arange(S))
    seen = np.where(visible(B, N, T, S, kw), logits, -np.inf)
    return np.moveaxis(seen.max(-1, initial=-np.inf), 1, 2)


def sequences(of_queries, of_keys, B, T, S):
    """masks.Varlen, sequence by sequence: which see each other, bool [B, T, S], and the positions
    [B, T, 1]."""
    seen, position = np.zeros((B, T, S), bool), np.indices((B, T, 1))[1]
    for b, (of_q, of_k) in enumerate(zip(of_queries, of_keys, strict=True)):
        for (q, q_end), (k, k_end) in zip(pairwise(of_q), pairwise(of_k), strict=True):
            seen[b, q:q_end, k:k_end] = True
            position[b, q:q_end, 0] = k_end - q_end + np.arange(q, q_end)
    return seen, position


def listed(indices, block, query_block, B, N, T, S):
    """masks.KeyLists, entry by entry: the keys that each query's list names, bool [B, N, T, S]."""
    seen, L = np.zeros((B, N, T, S), bool), indices.shape[2]
    indices = np.broadcast_to(indices, (B, *indices.shape[1:]))
    for b, h, t in np.ndindex(B, N, T):
        for entry in map(int, indices[b, t // query_block, h * L // N]):
            if entry >= 0:
                seen[b, h, t, entry * block : (entry + 1) * block] = True
    return seen


def _softmax(logits, seen, sinks=None):
    """The weights of keys, those of the sinks if there are any, the maxima and the sums; logits and
    seen are [B, N, T, S]."""
    s, S = np.where(seen, logits, -np.inf), seen.shape[3]
    if sinks is not None:  # a key with the value 0
        sinks = np.minimum(np.asarray(sinks, np.float64), HIGHEST)[:, None, None]
        s = np.concatenate([s, np.broadcast_to(sinks, (*s.shape[:3], 1))], -1)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    empty = m == -np.inf
    e = np.where(empty, 0, np.exp(s - np.where(empty, 0, m)))
    l = np.where(empty, 1, e.sum(-1, keepdims=True))
    return (e / l)[..., :S], (e / l)[..., S:], m, l


def weights(q, k, **kw):
    """Those of the softmax, [B, N, T, S]."""
    logits = _logits(q, k, kw)
    return _softmax(logits, visible(*logits.shape, kw), kw.get("sinks"))[0]


def _query_lengths(kw):
    """How many queries there are, each time [B], beyond which all are padding."""
    found = kw.get("query_seq_lengths"), getattr(kw.get("drawn"), "lengths", None)
    ends = kw.get("varlen")
    return [x for x in (*found, None if ends is None else ends[0][:, -1]) if x is not None]


def attention(q, k, v, do, dlse, **kw):
    """o, lse [B, T, N], and the gradients (dq, dk, dv, dbias or None, dsinks if there are any) for
    the cotangents do and dlse."""
    q, k, v, do, dlse = (np.asarray(x).astype(np.float64) for x in (q, k, v, do, dlse))
    (B, T, N, _), (S, K) = q.shape, v.shape[1:3]
    seen = visible(B, N, T, S, kw)
    # padding may hold NaN: what no query sees, and queries that see nothing, count as 0
    q, do = (np.where(np.moveaxis(seen.any(3), 1, 2)[..., None], x, 0) for x in (q, do))
    for lengths in _query_lengths(kw):
        dlse = np.where(np.arange(T)[:, None] < np.asarray(lengths)[:, None, None], dlse, 0)
    key_seen = seen.reshape(B, K, N // K, T, S).any((2, 3))
    k, v = (np.where(np.moveaxis(key_seen, 1, 2)[..., None], x, 0) for x in (k, v))
    k_all, v_all = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scale, bias, sinks = _scale(q, kw), kw.get("bias"), kw.get("sinks")

    logits, cap = _logits(q, k, kw), kw.get("logits_soft_cap")
    p, p_sink, m, l = _softmax(logits, seen, sinks)
    empty = m == -np.inf
    o = np.einsum("bnts,bsnh->btnh", p, v_all)
    lse = np.where(empty, -np.inf, np.where(m == HIGHEST, np.inf, m + np.log(l)))
    lse = np.moveaxis(lse[..., 0], 1, 2)

    dv = np.einsum("bnts,btnh->bsnh", p, do)
    dp = np.einsum("btnh,bsnh->bnts", do, v_all)
    delta = (p * dp).sum(-1, keepdims=True) - np.moveaxis(dlse, 2, 1)[..., None]
    ds = p * (dp - delta)
    if cap:
        ds = ds * (1 - (logits / cap) ** 2)
    dq = scale * np.einsum("bnts,bsnh->btnh", ds, k_all)
    dk = scale * np.einsum("bnts,btnh->bsnh", ds, q)
    dk, dv = (x.reshape(B, S, K, N // K, -1).sum(3) for x in (dk, dv))
    dbias = None
    if bias is not None:
        shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
        axes = tuple(a for a in range(4) if shape[a] == 1)
        dbias = ds.sum(axes, keepdims=True).reshape(np.shape(bias))
    return (
        o,
        lse,
        (dq, dk, dv, dbias) + (() if sinks is None else (-(p_sink * delta).sum((0, 2, 3)),)),
    )
