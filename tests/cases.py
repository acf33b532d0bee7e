"""The cases that the tests run, as data: sizes, masks and biases."""

import functools
import operator
from typing import NamedTuple

import numpy as np

from pallas_flash import masks


class Sizes(NamedTuple):
    """Distinct primes where they can be, and several blocks of the small tiles that the tests
    use."""

    B: int = 2
    T: int = 37
    S: int = 53
    N: int = 6
    K: int = 2
    H: int = 11
    Hv: int = 5


SIZES = {
    "grouped": Sizes(),
    "multi_query": Sizes(N=3, K=1),
    "multi_head": Sizes(N=3, K=3),
    "one_query": Sizes(T=1),
    "one_key": Sizes(S=1),
    "more_queries": Sizes(T=53, S=19),
    "fewer_keys_than_columns": Sizes(S=7),
    "whole_blocks": Sizes(T=32, S=64, H=16, Hv=16),
    "head_1": Sizes(H=1, Hv=1),
    "head_256": Sizes(B=1, T=17, S=19, N=1, K=1, H=256, Hv=200),
}


def _runs(rng, B, length, documents):
    """Ids in runs, [B, length]; documents differ in length from row to row."""
    return np.sort(rng.integers(0, documents, (B, length)), axis=1).astype(np.int32)


def _documents(rng, z):
    return dict(
        query_segment_ids=_runs(rng, z.B, z.T, 4), key_value_segment_ids=_runs(rng, z.B, z.S, 4)
    )


def _scattered(rng, z):
    return dict(
        query_segment_ids=rng.integers(0, 3, (z.B, z.T)).astype(np.int32),
        # id 0 has no key, id 3 no query
        key_value_segment_ids=rng.integers(1, 4, (z.B, z.S)).astype(np.int32),
    )


def _varlen(rng, z):
    """Ends of five sequences, some of them without queries or without keys, and rows and keys
    behind the last."""
    ends = lambda size: sequence_ends(rng.integers(0, size + 1, (z.B, 6)).astype(np.int32))
    return dict(varlen=(ends(z.T), ends(z.S)))


def _lengths(rng, z):
    return dict(
        query_seq_lengths=rng.integers(0, z.T + 1, z.B).astype(np.int32),
        key_value_seq_lengths=rng.integers(0, z.S + 1, z.B).astype(np.int32),
    )


def _offset(rng, z):
    return dict(query_offset=rng.integers(-9, z.S, z.B).astype(np.int32))


# What a query sees: (rng, sizes) -> arguments. `prefix` stands for masks.PrefixLM, `varlen` for
# masks.Varlen, `window` for masks.Window: `arguments`.
MASKS = {
    "full": lambda rng, z: {},
    "causal": lambda rng, z: dict(is_causal=True),
    "causal_bottom_right": lambda rng, z: dict(is_causal=True, query_offset=z.S - z.T),
    "causal_offset_by_batch": lambda rng, z: dict(is_causal=True, **_offset(rng, z)),
    "window": lambda rng, z: dict(local_window_size=7),
    "window_left": lambda rng, z: dict(local_window_size=(9, 0)),
    "window_right": lambda rng, z: dict(local_window_size=(0, 20)),
    "window_far_away": lambda rng, z: dict(local_window_size=(3, 3), query_offset=z.S - 5),
    "window_causal_offset": lambda rng, z: dict(
        local_window_size=(13, 4), is_causal=True, **_offset(rng, z)
    ),
    "window_and_offset_at_the_ends_of_int32": lambda rng, z: dict(
        local_window_size=(2**31 - 1, 5),
        is_causal=True,
        query_offset=np.array([2**31 - 1, -(2**31)], np.int32)[: z.B],
    ),
    "window_of_arrays_causal": lambda rng, z: dict(
        window=(np.array([9, 2], np.int32)[: z.B], np.array(4, np.int32)),
        is_causal=True,
        **_offset(rng, z),
    ),
    "key_lengths": lambda rng, z: dict(
        key_value_seq_lengths=np.array([z.S, z.S // 3], np.int32)[: z.B]
    ),
    "query_lengths": lambda rng, z: dict(
        query_seq_lengths=np.array([0, z.T // 2 + 1], np.int32)[: z.B]
    ),
    "lengths_causal": lambda rng, z: dict(is_causal=True, **_lengths(rng, z)),
    "documents": _documents,
    "documents_causal": lambda rng, z: dict(is_causal=True, **_documents(rng, z)),
    "documents_scattered": _scattered,
    "documents_scattered_window": lambda rng, z: dict(
        local_window_size=(20, 10), **_scattered(rng, z)
    ),
    "varlen": _varlen,
    "varlen_window_causal": lambda rng, z: dict(
        local_window_size=(9, 4), is_causal=True, **_varlen(rng, z)
    ),
    "prefix": lambda rng, z: dict(prefix=rng.integers(0, z.S, z.B).astype(np.int32)),
    "prefix_window_lengths": lambda rng, z: dict(
        prefix=np.full(z.B, 11, np.int32), local_window_size=(17, 40), **_lengths(rng, z)
    ),
    "everything": lambda rng, z: dict(
        is_causal=True,
        local_window_size=(30, 30),
        **_offset(rng, z),
        **_lengths(rng, z),
        **_documents(rng, z),
    ),
}


def lists(rng, z, block, query_block, L=1, n=3, B=None):
    """Lists of keys as (indices [B, T / query_block, L, n], block, query_block): entries that name
    nothing are anywhere in them, as are repeats, and some lists are empty."""
    blocks, counts = -(-z.S // block), (B or z.B, -(-z.T // query_block), L)
    indices = rng.integers(-1, blocks + 1, (*counts, n)).astype(np.int32)
    far = rng.choice(np.int32([-(2**31), -7, blocks, (2**31 - 1) // block, 2**31 - 1]), n)
    indices = np.where(rng.random(indices.shape) < 0.1, far, indices)
    indices[rng.random(counts) < 0.1] = -1
    return indices, block, query_block


BESIDE_LISTS = dict(rule=lambda b, h, q, k: (q + h) % 3 != k % (b + 2), query_offset=5)
# Lists of keys, alone and beside what else hides keys: (rng, sizes) -> arguments. `lists` stands
# for masks.KeyLists. An entry of TABLES names 64 pairs of a query and a key or more, one of
# GATHERED fewer.
TABLES = {
    "lists of blocks": lambda rng, z: dict(lists=lists(rng, z, 16, 8, z.K)),
    "lists of keys for 64 queries": lambda rng, z: dict(lists=lists(rng, z, 1, 64, z.N, 40)),
    "lists of the only block": lambda rng, z: dict(lists=lists(rng, z, 200, 1, z.N, 2)),
    "lists of 64 keys, causal": lambda rng, z: dict(
        lists=lists(rng, z, 64, 1, n=1), is_causal=True, **_offset(rng, z)
    ),
    "lists for all rows, longer than there are blocks": lambda rng, z: dict(
        lists=lists(rng, z, 3, 100, z.K, 99, B=1), local_window_size=(20, 30), **_lengths(rng, z)
    ),
    "lists, documents, a prefix": lambda rng, z: dict(
        lists=lists(rng, z, 8, 8, z.N, 5),
        prefix=rng.integers(0, z.S, z.B).astype(np.int32),
        **_scattered(rng, z),
    ),
    "lists, sequences": lambda rng, z: dict(
        lists=lists(rng, z, 16, 4, z.K, 4), is_causal=True, **_varlen(rng, z)
    ),
    "lists, a rule": lambda rng, z: dict(lists=lists(rng, z, 16, 16, n=2), **BESIDE_LISTS),
}
GATHERS = ("reference", "blockwise")  # the implementations that take those
GATHERED = {
    "lists of keys": lambda rng, z: dict(lists=lists(rng, z, 1, 1, n=19)),
    "lists of keys, causal": lambda rng, z: dict(
        lists=lists(rng, z, 1, 1, z.K, 60), is_causal=True, **_offset(rng, z), **_lengths(rng, z)
    ),
    "lists of 16 keys": lambda rng, z: dict(lists=lists(rng, z, 16, 1, z.K, 2)),
    "lists of 16 keys for all rows, documents": lambda rng, z: dict(
        lists=lists(rng, z, 16, 2, z.N, 7, B=1), **_documents(rng, z)
    ),
    "lists of 3 keys for 8 queries, sequences": lambda rng, z: dict(
        lists=lists(rng, z, 3, 8, z.N, 5), local_window_size=(9, 4), **_varlen(rng, z)
    ),
    "lists of 32 keys, a rule": lambda rng, z: dict(
        lists=lists(rng, z, 32, 1, z.N, 3), **BESIDE_LISTS
    ),
}

# Rules (b, h, q_idx, kv_idx) that no interval of keys says, in what NumPy and JAX share, and what
# else hides keys beside them.
RULES = {
    "dilated": (lambda b, h, q, k: (q - k) % 3 == 0, {}),
    "global tokens and a window": (
        lambda b, h, q, k: (abs(q - k) < 5) | (k < 3) | (q < 3),
        dict(query_offset=1),
    ),
    "holes by head": (lambda b, h, q, k: (q // 16 + k // 16 + h) % 3 != 0, dict(is_causal=True)),
    "by batch, with lengths": (
        lambda b, h, q, k: (k // 16) % 2 == b,
        dict(
            key_value_seq_lengths=np.array([50, 20], np.int32),
            query_offset=np.array([3, 30], np.int32),
        ),
    ),
    "nothing for some rows": (
        lambda b, h, q, k: (q % 4 > 0) & (k > q + 8),
        dict(local_window_size=30),
    ),
    "nothing": (lambda b, h, q, k: k < 0, {}),
}

LENGTHS = np.array([9, 33], np.int32)
IDS = np.array([[0] * 9 + [1] * 31, [2] * 20 + [0] * 20], np.int32)
ENDS = np.array([[0, 7, 7, 30], [0, 11, 20, 40]], np.int32)
SEQUENCES = np.array([np.searchsorted(ends, np.arange(40), side="right") for ends in ENDS])
# entries that name nothing, repeats, and an empty list
LISTS = np.array([[[0, 3, -1], [1, 1, 0], [9, 4, 2], [3, -7, 3], [5, 5, 5]], [[4, 0, 1]] * 5])

# Each kind of mask of two batch rows, 40 queries and 40 keys, and what it shows: (b, h, q_idx,
# kv_idx) -> bool, in NumPy.
KINDS = {
    "Causal": (masks.Causal(), lambda b, h, q, k: k <= q),
    "Window": (masks.Window(2, 3), lambda b, h, q, k: (q - k <= 2) & (k - q <= 3)),
    "Window of arrays": (
        masks.Window(LENGTHS, np.array(3)),
        lambda b, h, q, k: (q - k <= LENGTHS[b]) & (k - q <= 3),
    ),
    "Chunked": (masks.Chunked(7), lambda b, h, q, k: q // 7 == k // 7),
    "KeyLengths": (masks.KeyLengths(LENGTHS), lambda b, h, q, k: k < LENGTHS[b]),
    "KeyStarts": (masks.KeyStarts(LENGTHS), lambda b, h, q, k: k >= LENGTHS[b]),
    "QueryLengths": (masks.QueryLengths(LENGTHS), lambda b, h, q, k: q < LENGTHS[b]),
    "PrefixLM": (masks.PrefixLM(LENGTHS), lambda b, h, q, k: (k <= q) | (k < LENGTHS[b])),
    "Documents": (masks.Documents(IDS, IDS), lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "Varlen": (
        masks.Varlen(ENDS),
        lambda b, h, q, k: (
            (SEQUENCES[b, q] == SEQUENCES[b, k]) & (SEQUENCES[b, q] % ENDS.shape[1] > 0)
        ),
    ),
    "KeyLists": (
        masks.KeyLists(LISTS[:, :, None], block=8, query_block=8),
        lambda b, h, q, k: (LISTS[b, q // 8] == k[..., None] // 8).any(-1),
    ),
    "Dilated": (masks.Dilated(3), lambda b, h, q, k: (q - k) % 3 == 0),
    "GlobalTokens": (masks.GlobalTokens(4), lambda b, h, q, k: (q < 4) | (k < 4)),
    "MaskMod": (masks.MaskMod(lambda b, h, q, k: k != q + h), lambda b, h, q, k: k != q + h),
}

# Axes of [B, N, T, S] that a bias or mask has; the others are 1, a leading "." leaves an axis out.
BROADCASTS = tuple("BNTS 1NTS B1TS 11TS BN1S B11S BNT1 1N11 1111 ..TS .NT1 ...S".split())


def sequence_ends(numbers):
    """Numbers [B, C] as cu_seqlens: in order, from 0 on."""
    ends = np.sort(numbers, axis=1)
    ends[:, 0] = 0
    return ends


def broadcast_shape(letters: str, z: Sizes):
    full = dict(B=z.B, N=z.N, T=z.T, S=z.S)
    return tuple(full.get(c, 1) for c in letters if c != ".")


def dense_mask(rng, letters, z):
    return rng.random(broadcast_shape(letters, z)) < 0.7


def bias(rng, letters, z):
    return normal(rng, *broadcast_shape(letters, z))


def normal(rng, *shape, dtype="float32"):
    return rng.normal(size=shape).astype(np.float32).astype(dtype)


def qkv(rng, z: Sizes, dtype="float32"):
    shapes = (z.B, z.T, z.N, z.H), (z.B, z.S, z.K, z.H), (z.B, z.S, z.K, z.Hv)
    return tuple(normal(rng, *shape, dtype=dtype) for shape in shapes)


def arguments(kw):
    """The keywords of a case as flash_attention takes them."""
    kw = dict(kw)
    parts = dict(
        lists=lambda lists: masks.KeyLists(*lists),
        prefix=masks.PrefixLM,
        varlen=lambda ends: masks.Varlen(*ends),
        window=lambda sides: masks.Window(*sides),
        rule=masks.MaskMod,
        drawn=lambda drawn: drawn.mask,
    )
    found = [make(x) for name, make in parts.items() if (x := kw.pop(name, None)) is not None]
    if found:
        kw["mask"] = functools.reduce(operator.and_, found)
    return kw
