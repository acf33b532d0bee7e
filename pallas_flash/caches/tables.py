"""Checks of the numbers of a call of `paged_attention`: rows have as many keys as their table holds
and their queries need, and the entries of the table that the call needs are pages."""

import numpy as np

from pallas_flash import checks
from pallas_flash.problem.call import PagedCall


def check(call: PagedCall):
    """Raises where the values are known and a row has more keys than its table, or fewer than
    queries at its last keys, or an entry that is needed is no page."""
    sizes, pages = call.layout.sizes(call.k_pages.shape), call.page_table.shape[1]
    P, page = sizes["P"], sizes["C"]
    if checks.is_constant(call.lengths):
        lengths = np.asarray(call.lengths)
        for b in np.flatnonzero(lengths > pages * page)[:1]:
            raise ValueError(
                f"lengths must be at most {pages * page}, the keys of the {pages} pages that "
                f"page_table {call.page_table.shape} has for a row; got {lengths[b]} in row {b}."
            )
    are_known = lambda *numbers: all(checks.is_constant(x) for x in numbers if x is not None)
    row_numbers = call.lengths, call.query_offset, call.query_seq_lengths, call.cu_seqlens_q
    if not are_known(*row_numbers):
        return
    _check_queries(call)
    if not are_known(call.page_table, None if call.mask is None else call.mask.indices):
        return
    table, (start, stop) = np.asarray(call.page_table), _visible(call)
    first_key = np.arange(pages)[None] * page
    is_needed = (first_key < stop[:, None]) & (first_key + page > start[:, None])
    if call.mask is not None:
        is_needed &= _named(call, table.shape, page)
    for b, i in np.argwhere(is_needed & ((table < 0) | (table >= P)))[:1]:
        raise ValueError(
            f"page_table must have pages from 0 to {P - 1} where queries see keys; got "
            f"{table[b, i]} in row {b}, entry {i}, for the keys from {i * page} on of "
            f"{call.lengths[b]}."
        )


def _check_queries(call: PagedCall):
    """Raises where a row has more real queries than queries, or than keys at whose end they are. A
    row without keys may have any: it is an idle one, and gets 0."""
    T, lengths = call.query.shape[-3], np.asarray(call.lengths)
    if call.query_seq_lengths is not None:
        real = np.asarray(call.query_seq_lengths)
        for b in np.flatnonzero((real < 0) | (real > T))[:1]:
            raise ValueError(
                f"query_seq_lengths must be 0 to the {T} queries of a row; got {real[b]} in row "
                f"{b}."
            )
    if call.query_offset is not None or not call.is_causal:
        return
    real = _real(call)
    for b in np.flatnonzero((real > lengths) & (lengths > 0))[:1]:
        hint = (
            "append adds the keys of new tokens first."
            if call.cu_seqlens_q is not None
            else "query_seq_lengths says how many queries of a row are real, query_offset where "
            "else they are, and is_causal=False that they are of another sequence."
        )
        raise ValueError(
            "a row must have at least as many keys as real queries, which are at its end; got "
            f"{real[b]} queries and {lengths[b]} keys in row {b}: {hint}"
        )


def _real(call: PagedCall) -> np.ndarray:
    """How many queries of each row are real."""
    T = call.query.shape[-3]
    if call.cu_seqlens_q is not None:
        return np.diff(np.asarray(call.cu_seqlens_q, np.int64))
    if call.query_seq_lengths is not None:
        return np.clip(np.asarray(call.query_seq_lengths, np.int64), 0, T)
    return np.full(call.lengths.shape, T)


def _visible(call: PagedCall) -> tuple[np.ndarray, np.ndarray]:
    """The keys [start, stop) that any query of a row sees, for each row; start >= stop: none."""
    lengths, count = np.asarray(call.lengths, np.int64), _real(call)
    offset = lengths - count if call.query_offset is None else np.asarray(call.query_offset)
    offset = np.broadcast_to(offset, lengths.shape).astype(np.int64)
    window = call.local_window_size
    left, right = (None, None) if window is None else (window.left, window.right)
    right = 0 if call.is_causal else right
    start = np.zeros_like(lengths) if left is None else np.maximum(offset - left, 0)
    stop = lengths if right is None else np.minimum(lengths, offset + count + right)
    return start, np.where(count > 0, stop, 0)


def _named(call: PagedCall, shape: tuple[int, int], page: int) -> np.ndarray:
    """Whether lists name a key of each page, bool [B, pages] = shape."""
    (B, pages), block = shape, call.mask.block
    indices = np.asarray(call.mask.indices, np.int64)  # [B | 1, T, L, n]
    row = np.arange(B)[:, None, None, None]
    if call.cu_seqlens_q is not None:  # tokens of no row get row -1, or B
        ends = np.asarray(call.cu_seqlens_q)
        row = np.searchsorted(ends, np.arange(indices.shape[1]), side="right")[:, None, None] - 1
    number = (indices[..., None] * block + np.arange(block)) // page
    row, number = np.broadcast_arrays(row[..., None], number)
    exists = (0 <= row) & (row < B) & (0 <= number) & (number < pages)
    named = np.zeros(shape, bool)
    named[row[exists], number[exists]] = True
    return named
