"""Checks of a page table: the entries that a call of `paged_attention` needs must be pages."""

import numpy as np

from pallas_flash import checks
from pallas_flash.problem.call import PagedCall


def check(call: PagedCall):
    """Raises where the values are known and a row has more keys than its table, or an entry that is
    needed is no page."""
    sizes, pages = call.layout.sizes(call.k_pages.shape), call.page_table.shape[1]
    P, page = sizes["P"], sizes["C"]
    if checks.is_constant(call.lengths):
        lengths = np.asarray(call.lengths)
        for b in np.flatnonzero(lengths > pages * page)[:1]:
            raise ValueError(
                f"lengths must be at most {pages * page}, the keys of the {pages} pages that "
                f"page_table {call.page_table.shape} has for a row; got {lengths[b]} in row {b}."
            )
    numbers = [call.page_table, call.lengths, call.query_offset, call.query_seq_lengths]
    numbers += [call.cu_seqlens_q, None if call.mask is None else call.mask.indices]
    if not all(x is None or checks.is_constant(x) for x in numbers):
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


def _visible(call: PagedCall) -> tuple[np.ndarray, np.ndarray]:
    """The keys [start, stop) that any query of a row sees, for each row; start >= stop: none."""
    lengths = np.asarray(call.lengths, np.int64)
    if call.cu_seqlens_q is not None:
        count = np.diff(np.asarray(call.cu_seqlens_q, np.int64))
    elif call.query_seq_lengths is not None:
        count = np.clip(np.asarray(call.query_seq_lengths, np.int64), 0, call.query.shape[1])
    else:
        count = np.full_like(lengths, call.query.shape[1])
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
    if call.cu_seqlens_q is not None:  # tokens of no row are those of row -1, or B
        ends = np.asarray(call.cu_seqlens_q)
        row = np.searchsorted(ends, np.arange(indices.shape[1]), side="right")[:, None, None] - 1
    number = (indices[..., None] * block + np.arange(block)) // page
    row, number = np.broadcast_arrays(row[..., None], number)
    exists = (0 <= row) & (row < B) & (0 <= number) & (number < pages)
    named = np.zeros(shape, bool)
    named[row[exists], number[exists]] = True
    return named
