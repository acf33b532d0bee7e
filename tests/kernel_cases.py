"""What test_kernels.py runs, as data: the families of Mosaic kernels with their ways of copying and
of adding up, and calls that between them take every path of a kernel."""

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import GATHERED, MASKS, Sizes, arguments, lists, qkv
from check import cotangents

from pallas_flash import masks, scores

FAMILIES = {  # the implementation, and how gpu_interpreter.kernels runs it
    "hopper": ("hopper", {}),
    "blackwell": ("blackwell", {}),
    "ampere by cp.async": ("ampere", dict(tma=False)),
    "ampere by TMA": ("ampere", dict(tma=True)),
}
# Heads above these sizes have the kernels of "ampere by TMA"
WIDEST = dict(blackwell=(192, 128))
ANY_ORDER = dict(deterministic=False)  # on Hopper one kernel has all gradients of narrower heads
ORDERS = {family: (family, {}) for family in FAMILIES}
ORDERS["hopper in any order"] = ("hopper", ANY_ORDER)


class Case(NamedTuple):
    sizes: Sizes
    # of flash_attention and of the oracle, or a function of a random generator; a bias, sinks and
    # the slopes that score_mod(slopes) reads are differentiated
    options: dict | Callable[[np.random.Generator], dict] = {}
    dtype: str = "bfloat16"
    change: Callable = lambda q, k, v: (q, k, v)


def sizes(T, S, H, Hv=None, B=1, N=2, K=1):
    return Sizes(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv or H)


def named(mask, z, **more):
    """A case with a mask of cases.py."""
    return Case(z, lambda rng: MASKS[mask](rng, z) | more)


# Several tiles of queries and of keys in every family, which hang over both ends unless they are
# whole: of 256 x 128, 192 x 128 or 64 x 64 pairs, and what lies between
NARROW, WIDE, SMALL = sizes(203, 309, 64, B=2, N=1), sizes(131, 205, 128, B=2), sizes(67, 131, 128)
SHORT, LISTED = sizes(70, 140, 64), sizes(11, 131, 64, B=2, N=4, K=2)
CAUSAL = dict(is_causal=True)
OFFSETS = np.array([30, -9], np.int32)
CAPPED = dict(is_causal=True, logits_soft_cap=2.0)
SINKS = np.array([0.5, -np.inf], np.float32)


def far_apart(q, k, v):
    """Maxima grow by little and by much, as blocks come from the last to the first."""
    q[:, ::2] /= 8
    return q, k * np.linspace(8, 0.1, k.shape[1], dtype=k.dtype)[:, None, None], v


def growing(q, k, v):
    """Maxima grow as blocks come from the first to the last."""
    q, k, v = far_apart(q, k, v)
    return q, k[:, ::-1], v


def enormous(q, k, v):
    """Products of float32's largest numbers."""
    q, k = (np.abs(x.astype(np.float32)) * np.float32(1e25) for x in (q, k))
    signs = np.where(np.arange(k.shape[1]) % 3 == 0, -1, 1)[:, None, None]
    return q.astype(v.dtype), (k * signs).astype(v.dtype), v


CASES = {
    "full": Case(NARROW),
    "whole tiles": Case(sizes(128, 256, 128), ANY_ORDER),
    "whole tiles, bottom right": Case(sizes(192, 256, 64), CAUSAL | dict(query_offset=64)),
    "bottom right, grouped": Case(
        sizes(67, 330, 64, N=4, K=2), CAUSAL | ANY_ORDER | dict(query_offset=263)
    ),
    "window": Case(NARROW, dict(local_window_size=70)),
    "window to the left": named("query_lengths", NARROW, local_window_size=(100, 0)),
    "window, offsets": Case(
        WIDE, ANY_ORDER | dict(local_window_size=(40, 4), query_offset=OFFSETS)
    ),
    "window, causal": Case(NARROW, CAUSAL | dict(local_window_size=(200, 4), query_offset=OFFSETS)),
    "key lengths": named("key_lengths", NARROW),
    "no keys": Case(NARROW, CAUSAL | dict(key_value_seq_lengths=np.array([0, 7], np.int32))),
    "no keys for some queries": Case(SMALL, CAUSAL | dict(query_offset=-40)),
    "documents": named("documents_causal", NARROW, **ANY_ORDER),
    "scattered documents": named("documents_scattered", WIDE, local_window_size=(100, 40)),
    "prefix": named("prefix_window_lengths", NARROW),
    "varlen": named("varlen_window_causal", WIDE, sinks=SINKS),
    "everything": named("everything", NARROW._replace(N=2), sinks=SINKS),
    "soft cap": Case(WIDE, CAPPED | ANY_ORDER | dict(scale=0.3), "float16"),
    "soft cap, sinks": Case(
        SHORT, CAPPED | dict(query_offset=-9, sinks=np.array([np.inf, 0.5], np.float32)), "float16"
    ),
    "sinks to the ends of float32": Case(SHORT, dict(sinks=np.array([3e38, -3e38], np.float32))),
    "capped logits beyond float32": Case(SHORT, dict(logits_soft_cap=30.0), change=enormous),
    "maxima that grow": Case(sizes(131, 700, 128, N=1), change=far_apart),
    "maxima that grow from the first block on": Case(sizes(131, 700, 128, N=1), change=growing),
    "grouped": Case(sizes(131, 257, 128, N=6, K=2), dict(scale=0.2), "float16"),
    "one query, one key": Case(sizes(1, 1, 64, N=1), ANY_ORDER),
    "heads of 11 and 72": Case(sizes(37, 53, 11, 72), ANY_ORDER),
    "heads of 32 and 128": Case(sizes(67, 131, 32, 128), CAUSAL),
    "heads of 64 and 128": Case(sizes(67, 131, 64, 128, K=2), dtype="float16"),
    "heads of 80": Case(sizes(67, 131, 80), CAUSAL | ANY_ORDER | dict(query_offset=64)),
    "heads of 80 and 40": Case(sizes(67, 131, 80, 40)),
    "heads of 96": Case(sizes(67, 131, 96), CAUSAL | dict(query_offset=64)),
    "heads of 128 and 64": Case(sizes(67, 131, 128, 64, K=2), CAUSAL),
    "heads of 128 and 256": Case(sizes(67, 67, 128, 256, K=2)),
    "heads of 144": Case(sizes(67, 67, 144)),
    "heads of 160": Case(sizes(67, 131, 160, K=2)),
    "heads of 160, soft cap": Case(sizes(67, 131, 160, K=2), CAPPED),
    "heads of 192 and 128": Case(sizes(131, 140, 192, 128), CAUSAL),
    "heads of 200 and 136": Case(sizes(37, 53, 200, 136), ANY_ORDER),
    "heads of 256": Case(sizes(131, 140, 256), CAUSAL),
    "lists of keys": Case(LISTED, lambda rng: GATHERED["lists of keys, causal"](rng, LISTED)),
}

# wider ones, which not every family knows
ABOVE_256 = {
    "heads of 512": Case(
        sizes(67, 131, 512, B=2), CAUSAL | dict(query_offset=OFFSETS, logits_soft_cap=2.0)
    ),
    "heads of 512, no keys": Case(
        sizes(67, 70, 512, B=2), dict(key_value_seq_lengths=np.array([0, 37], np.int32))
    ),
    "heads of 320": Case(sizes(67, 131, 320), CAUSAL | dict(query_offset=64), "float16"),
    "heads of 300, a window": Case(sizes(67, 70, 300), dict(local_window_size=(40, 4))),
    "heads of 512 and 64": Case(sizes(131, 140, 512, 64), CAUSAL),
    "heads of 64 and 512": Case(sizes(67, 140, 64, 512, N=4, K=2), dict(sinks=np.resize(SINKS, 4))),
}

# ---- masks that are arrays or rules, biases, score_mods, dropout: what the reference says ----

LOWEST = float(np.finfo(np.float32).min)
EXTREMES = np.float32([0.0, -1e4, -1e9, LOWEST, 3e38])
LENGTHS = dict(
    query_offset=np.array([50, -4], np.int32),
    query_seq_lengths=np.array([100, 131], np.int32),
    key_value_seq_lengths=np.array([205, 150], np.int32),
)
SLOPES = np.float32([0.05, 0.02])
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))
SINKS_AND_CAP = dict(logits_soft_cap=3.0, sinks=np.array([0.5, -1.0], np.float32))
ALL = LENGTHS | SINKS_AND_CAP
OFFSET = CAUSAL | dict(query_offset=74)
FIXED = np.random.default_rng(2)
IDS = np.sort(FIXED.integers(0, 5, (2, 400)), 1).astype(np.int16)
FAR, PAIRS = FIXED.random((2, 400)) < 0.1, FIXED.random((2, 300, 300)) < 0.4
TURN = np.arange(7, dtype=np.int16) * 31 % 7


def dense(*shape, blocks=(64, 64)):
    """A mask with empty, partial and full blocks of about that size, broadcast where the shape has
    a 1."""
    counts = [-(-n // size) for n, size in zip(shape[2:], blocks, strict=True)]
    part = FIXED.choice([0.0, 0.6, 1.0], (*shape[:2], *counts))
    rows, columns = (np.arange(n) // size for n, size in zip(shape[2:], blocks, strict=True))
    return dict(mask=FIXED.random(shape) < part[:, :, rows][..., columns])


def added(*shape, hidden=0.0, rows=(0.0,)):
    """A bias that hides that part of all pairs, and adds these numbers to the logits of whole rows,
    in turn."""
    x = np.where(FIXED.random(shape) < hidden, -np.inf, FIXED.standard_normal(shape))
    return dict(bias=np.float32(x) + np.resize(np.float32(rows), shape[2])[:, None])


def holes(*numbers):
    """Reads a number for each head, asks for all indices, hides all keys from head 0 of row 1, and
    blocks here and there."""
    numbers = jnp.array(numbers)
    seen = lambda b, h, q, k: (q // 64 + k // 64 + numbers[h]) % 3 > 0
    rule = lambda b, h, q, k: seen(b, h, q, k) & (h + 1 > b) | (h > 0) & (k < 4)
    return dict(mask=masks.MaskMod(rule))


def by_position():
    """Reads a number for each query and each key, of the batch row, and a flag for each head and
    key."""
    ids, far = jnp.array(IDS), jnp.array(FAR)
    rule = lambda b, h, q, k: (ids[b, q] == ids[b, k]) | (q - k < 9) & far[h, k]
    return dict(mask=masks.MaskMod(rule))


def by_pair():
    """Reads a flag for each pair, and then one at a place that this and a table by distance say."""
    seen, turn = jnp.array(PAIRS), jnp.array(TURN)
    place = lambda b, q, k: turn[(q - k) % 7] + seen[b, q, k]
    rule = lambda b, h, q, k: seen[b, q, k] | seen[h, k, place(b, q, k)]
    return dict(mask=masks.MaskMod(rule))


def joined():
    """Reads lengths, ends of rows, and ids."""
    lengths, of_q, of_k = np.array([-3, 160]), IDS[:, :131], IDS[:, :205]
    unlike = (masks.KeyLengths(lengths) | masks.Causal()) & ~masks.Documents(of_q, of_k)
    prefix = masks.PrefixLM(np.array([40, 120])) & masks.QueryLengths(lengths - 50)
    return dict(mask=unlike | ~prefix)


def listed(*sizes, beside=None, z=WIDE):
    """Lists of keys, as cases.lists, which a table of blocks can say, and a mask beside them."""
    mask = masks.KeyLists(*lists(np.random.default_rng(sizes), z, *sizes))
    return dict(mask=mask if beside is None else mask & beside)


LONGFORMER = masks.Window(40, 40) | masks.GlobalTokens(4)
# all keys from the first 70 queries
HIDDEN = dict(mask=masks.MaskMod(lambda b, h, q, k: (q - k) % 5 * (q // 70) == 2 + h))


def curved(slopes):
    """Reads two numbers, asks for all indices, has a tanh, a derivative below 0, and none where the
    query is the last but one."""

    def score_mod(s, b, h, q, k):
        bent = jnp.tanh(s * slopes[0]) * 3 - jnp.maximum(s, 0.1 * s) / 2 + s**0
        far = slopes[h] * jnp.abs(q - k).astype(s.dtype) * (b + 1)
        # NaN beyond the query
        return bent - far + jnp.where((q - k) % 3 == h, 0.3, 0.0) + 0.01 * jnp.sqrt(1.0 * (q - k))

    return score_mod


def waved(slopes):
    """Reads a number for each key and head, and one for each query."""
    waves = jnp.sin(jnp.outer(slopes, jnp.arange(300.0)))
    return lambda s, b, h, q, k: s + waves[h, k] * waves[0, q]


def by_distance(slopes):
    """Reads T5's table, whose entries are made of the slopes."""
    return scores.T5Bias(jnp.sin(jnp.outer(slopes, jnp.arange(8.0)) * 30), max_distance=40)


def moved(slopes):
    """Brings rows to the ends of float32, as a whole: they keep their P."""
    by = jnp.asarray(np.resize(EXTREMES, 131))
    return lambda s, b, h, q, k: s + by[q] + 0 * slopes[0]


def scored(rule, **options):
    return dict(score_mod=rule, slopes=SLOPES) | options


def joint(*options) -> dict:
    return {name: x for each in options for name, x in each.items()}


def of_heads(size, *options, z=WIDE):
    """A case whose keys and values have this size."""
    return Case(z._replace(H=size, Hv=size), joint(*options))


T, S = WIDE.T, WIDE.S
SCORED = {
    "a mask and a bias": of_heads(64, added(1, 2, T, S), dense(2, 1, T, S), ALL),
    "a mask by head": of_heads(192, dense(2, 2, T, S), CAUSAL, DROPOUT),
    "a mask by batch row": of_heads(128, dense(2, 1, T, S, blocks=(140, 140)), LENGTHS, ANY_ORDER),
    "a mask of keys": of_heads(64, dense(2, 1, 1, S, blocks=(1, 3)), OFFSET, ANY_ORDER),
    "a mask of queries": of_heads(128, dense(1, 2, T, 1, blocks=(3, 1))),
    "a mask, heads of 256": of_heads(256, dense(1, 1, T, S)),
    "a bias by head and pair": of_heads(128, added(1, 2, T, S, hidden=0.3), LENGTHS, ANY_ORDER),
    "a bias of keys": of_heads(64, added(2, 1, 1, S, hidden=0.3), OFFSET, SINKS_AND_CAP),
    "a bias of queries": of_heads(64, added(2, 2, T, 1), DROPOUT, ANY_ORDER),
    "a bias by head alone": of_heads(256, added(1, 2, 1, 1), SINKS_AND_CAP),
    "a bias to the ends of float32": of_heads(64, added(1, 1, T, S, rows=EXTREMES)),
    "a bias and a score_mod": of_heads(128, added(2, 1, T, S), scored(scores.Alibi)),
    "a score_mod": of_heads(64, scored(curved), CAUSAL, ALL),
    "a score_mod, dropout": of_heads(128, scored(curved), CAUSAL, ALL, DROPOUT, ANY_ORDER),
    "numbers by position": of_heads(64, scored(waved), OFFSET),
    "a table by distance": of_heads(128, scored(by_distance), CAUSAL, ALL, ANY_ORDER),
    "a table by distance, heads of 256": of_heads(256, scored(by_distance), OFFSET),
    "a score_mod to the ends of float32": of_heads(64, scored(moved)),
    "ALiBi, few queries": of_heads(
        64,
        scored(scores.Alibi),
        CAUSAL,
        ANY_ORDER,
        dict(query_offset=200),
        z=sizes(3, 300, 64, B=2),
    ),
    "dropout, heads of 192": of_heads(192, scored(curved), CAUSAL, DROPOUT),
    "dropout, heads of 160 and 136": Case(sizes(37, 53, 160, 136), DROPOUT),
    "dropout, heads of 192 and 128": Case(WIDE._replace(H=192, Hv=128), LENGTHS | DROPOUT),
    "a rule": of_heads(64, holes(0, 2), ALL, scored(scores.Alibi)),
    "a rule and a window": of_heads(
        128, holes(1, 2), LENGTHS, ANY_ORDER, dict(local_window_size=(150, 40))
    ),
    "a rule known while tracing": of_heads(64, dict(mask=LONGFORMER), ANY_ORDER),
    "a block mask": of_heads(128, dict(mask=masks.create_block_mask(LONGFORMER, T, S)), CAUSAL),
    "a rule by position": of_heads(64, by_position(), OFFSET),
    "a rule by position, lengths": of_heads(128, by_position(), LENGTHS, ANY_ORDER),
    "a rule by pair": of_heads(64, by_pair(), dict(query_offset=74)),
    "joined masks": of_heads(64, joined(), LENGTHS),
    "a rule that hides queries, dropout": of_heads(64, HIDDEN, DROPOUT),
    "a rule, heads of 192": of_heads(192, HIDDEN, CAUSAL, dict(query_offset=80), DROPOUT),
    "a rule, heads of 256": of_heads(256, dict(mask=LONGFORMER & masks.Dilated(2))),
    "lists of blocks": of_heads(64, listed(64, 1, 1, 2), ALL, scored(scores.Alibi)),
    "lists of blocks by head": of_heads(128, listed(16, 8, 2, 6), OFFSET, DROPOUT, ANY_ORDER),
    "lists of keys for blocks of queries": of_heads(
        192, listed(1, 64, 2, 90), LENGTHS, added(1, 1, T, 1), ANY_ORDER
    ),
    "lists of blocks and a rule": of_heads(64, listed(100, 70, 1, 2, beside=masks.Dilated(3))),
}


# ---- gradients of scores: what broadcasts, and what a score_mod reads ----

TINY = sizes(67, 70, 32, B=2)  # two tiles of queries, two or three of keys
BUCKETS = jnp.arange(200, dtype=jnp.int32) // 7
SHORTER = dict(
    query_seq_lengths=np.array([60, 67], np.int32),
    key_value_seq_lengths=np.array([70, 30], np.int32),
)
EARLY = CAUSAL | dict(query_offset=3)
SCORED_ABOVE_256 = {
    "heads of 512, dropout": of_heads(512, scored(curved), CAUSAL, DROPOUT, z=SMALL),
    "heads of 272 and 384, a mask": Case(sizes(67, 131, 272, 384), dense(1, 2, 67, 131)),
    "heads of 512, a rule": of_heads(512, holes(0, 2), added(1, 1, 67, 131), z=SMALL),
    "a mask and a bias, heads of 512": of_heads(
        512, added(1, 2, 67, 70), dense(1, 1, 67, 70), z=TINY._replace(B=1)
    ),
    "lists of blocks, heads of 512": of_heads(512, listed(16, 16, 2, 5, z=SMALL), CAUSAL, z=SMALL),
    "a score_mod, dropout, heads of 320": of_heads(
        320, scored(scores.Alibi), EARLY, DROPOUT, z=TINY
    ),
}
# longer and shorter than their keys
ENDS = np.array([[[0, 31, 31, 60], [0, 40, 50, 67]], [[0, 20, 31, 70]] * 2], np.int32)
PACKED = masks.Varlen(*ENDS)
SEQUENCES = dict(mask=PACKED)
BESIDE_BIASES = (  # of a shape that of its number, modulo theirs
    {},
    EARLY | DROPOUT,
    SHORTER,
    dict(mask=masks.MaskMod(lambda b, h, q, k: (BUCKETS[q] + h) % 3 != BUCKETS[k] % 3)),
    CAPPED,
)
BIASES = {}
for n, shape in enumerate(itertools.product((1, 2), (1, 2), (1, TINY.T), (1, TINY.S))):
    dtype = "float16" if n % 3 == 1 else "bfloat16"
    bias = added(*shape)["bias"].astype("float32" if n % 2 else dtype)
    BIASES[f"a bias {shape}"] = Case(TINY, dict(bias=bias) | BESIDE_BIASES[n % 5], dtype)


def reads(shape, rule, *options, z=TINY):
    """A case with a score_mod that reads an array of this shape."""
    array = np.asarray(FIXED.normal(size=shape) * 0.3, np.float32)
    return Case(z, joint(scored(rule), dict(slopes=array), *options))


t5 = functools.partial(scores.T5Bias, max_distance=40)
SCORES = {
    "slopes by sequence and head": reads(
        (3, 2), lambda x: scores.Alibi(x, PACKED.key_value_segment_ids(TINY.S)), CAUSAL, SEQUENCES
    ),
    "all heads' slope": reads((), lambda x: lambda s, b, h, q, k: s - x * abs(q - k)),
    "T5's buckets": reads((2, 8), t5, EARLY, SHORTER),
    # of more entries than a program owns, the heads last
    "distances": reads(
        (150, 2),
        lambda x: lambda s, b, h, q, k: s * x[q - k + 75, h],
        dict(logits_soft_cap=2.0),
        DROPOUT,
    ),
    "distances within sequences": reads(
        (150, 2), lambda x: lambda s, b, h, q, k: s + x[q - k + 75, h], CAUSAL, SEQUENCES
    ),
    "by what an array says of distances": reads(
        (30,), lambda x: lambda s, b, h, q, k: s + x[BUCKETS[jnp.abs(q - k)]]
    ),
    "by key, and by query": reads(
        (2, 90), lambda x: lambda s, b, h, q, k: s + jnp.sin(x)[h, k] * x[0, BUCKETS[q + b]], EARLY
    ),
    "by query and key": reads(
        (90, TINY.S),
        lambda x: lambda s, b, h, q, k: s + x[q, k] * x[k, k],
        dict(mask=masks.MaskMod(lambda b, h, q, k: (q + h) % 3 != k % 3)),
    ),
    # neither the logarithm nor its derivative is a number where the key comes later
    "no number behind the mask": reads(
        (2, 3), lambda x: lambda s, b, h, q, k: s - x[h, 1] * jnp.log(q - k + 1.0), CAUSAL
    ),
}
# one that takes each kernel, and blocks of 16 that shared memory holds of wide heads
BROAD = TINY._replace(B=1, H=208, Hv=256)
SCORES |= {
    "by query, wide heads": reads((2,), scores.Alibi, EARLY, DROPOUT, z=BROAD),
    "by key, wide heads": Case(BROAD, EARLY | DROPOUT | added(1, 2, 1, TINY.S)),
    "by pair, wide heads": Case(BROAD, EARLY | DROPOUT | added(1, 1, TINY.T, TINY.S)),
    "by entry, wide heads": reads((2, 8), t5, EARLY, DROPOUT, z=BROAD),
}

# ---- races, and garbage in padding ----

# slots of shared memory are used again, in every kernel
LONG = sizes(300, 450, 64, N=1)
LATE = CAUSAL | dict(query_offset=150)
PROPERTIES = {
    "long, heads of 64": Case(LONG, LATE),
    "long, heads of 64, in any order": Case(LONG, LATE | ANY_ORDER),
    "long, heads of 64 and 128": Case(LONG._replace(Hv=128), LATE),
    "long, heads of 128, in any order": Case(LONG._replace(H=128, Hv=128), LATE | ANY_ORDER),
    "long, heads of 192 and 128": Case(LONG._replace(H=192, Hv=128), LATE),
    "long, heads of 256": Case(LONG._replace(H=256, Hv=256), LATE),
    "long, heads of 512": Case(LONG._replace(T=67, H=512, Hv=512), CAUSAL | dict(query_offset=383)),
    # P's second slot is written while the first is read: with dK, and beside dV alone
    "long, heads of 64 and 512": Case(sizes(131, 67, 64, 512, N=1)),
    "long, heads of 320": Case(sizes(131, 67, 320, N=1)),
    "long, by query": reads((2,), scores.Alibi),
    "long, by key": Case(TINY, added(1, 2, 1, TINY.S)),
    "long, by pair": Case(TINY, added(1, 1, TINY.T, TINY.S)),
    "long, by entry": reads((2, 8), t5),
    # more stages hold narrow heads
    "long, heads of 64, by 128": Case(sizes(650, 700, 64, N=1), CAUSAL | dict(query_offset=50)),
    # whose P has columns of its own
    "long, heads of 128, one tile of queries": Case(
        sizes(100, 450, 128, N=1), CAUSAL | dict(query_offset=350)
    ),
    "long, a rule": of_heads(64, holes(0, 2), z=LONG._replace(N=2)),
    "long, a mask and a bias": of_heads(
        64, dense(1, 2, 300, 450), added(1, 1, 300, 450), z=LONG._replace(N=2)
    ),
}
LONG_BY_MMA = {
    "heads of 288 and 96, by 32 keys": Case(sizes(67, 131, 288, 96), LATE),
    "heads of 512, by 16 keys": Case(sizes(67, 131, 512, N=1)),
}
# the second tile of queries, and of keys, may hold nothing
PADDED = CAUSAL | dict(
    query_seq_lengths=np.array([40, 150], np.int32),
    key_value_seq_lengths=np.array([300, 50], np.int32),
)
PROPERTIES["padding"] = Case(sizes(150, 300, 64, B=2), PADDED)
of_scores = lambda x: lambda s, b, h, q, k: s + x[0, k] * x[q, 0]
PROPERTIES["padding, scores"] = reads((67, 70), of_scores, CAUSAL, SHORTER, added(1, 1, 67, 70))
PROPERTIES["padding, sinks, in any order"] = Case(
    sizes(150, 300, 64, B=2), PADDED | ANY_ORDER | dict(sinks=SINKS)
)


class Call(NamedTuple):
    """A case with its numbers, which are the same whoever asks."""

    floats: dict[str, Any]  # query, key, value, and what else is differentiated
    tangents: dict[str, Any]
    cotangents: tuple  # of output and log-sum-exp
    options: dict[str, Any]  # the rest
    oracle: dict[str, Any] | None  # the options as the oracle takes them; None: as the reference


ALL_CASES = joint(
    CASES, ABOVE_256, SCORED, SCORED_ABOVE_256, BIASES, SCORES, PROPERTIES, LONG_BY_MMA
)


def has_own_kernels(family: str, name: str) -> bool:
    """Whether a family runs a case by kernels of its own, at least in part."""
    z, most = ALL_CASES[name].sizes, WIDEST.get(family)
    return most is None or (z.H <= most[0] and z.Hv <= most[1])


def drawn(name: str) -> Call:
    case, rng = ALL_CASES[name], np.random.default_rng(zlib.crc32(name.encode()))
    options = case.options(rng) if callable(case.options) else dict(case.options)
    q, k, v = case.change(*qkv(rng, case.sizes, case.dtype))
    floats = dict(query=q, key=k, value=v)
    rest = arguments(options)
    floats |= {x: rest.pop(x) for x in ("bias", "sinks", "slopes") if x in rest}
    like = lambda x: rng.normal(size=x.shape).astype(np.float32).astype(x.dtype)
    tangents = {x: like(a) for x, a in floats.items()}
    known = options if name in CASES | ABOVE_256 else None
    return Call(floats, tangents, cotangents(rng, q, v), rest, known)
