"""FLOPs, exponentials and bytes of every kernel of standard attention, flash1 and triton, in
closed form.

Per query head, T queries see S keys, n_q = ceil(T / block_q), n_k = ceil(S / block_k), an element
has e bytes, a statistic 4:

|                     | products | exponentials | bytes                                                                     |
|---------------------|----------|--------------|---------------------------------------------------------------------------|
| standard, forward   | 2        | 2 T S        | (4 + 12 + 2 e) T S, and Q n_k, K and V n_q times                          |
| standard, backward  | 5        | T S          | (4 + 4 + 8 + 5 e) T S, and Q and dO 2 n_k, K 2 n_q, V n_q times            |
| flash1, forward     | 2        | T S          | K and V once, Q n_k times, O n_k times read and n_k + 1 written, as float32 |
| flash1, backward    | 5        | T S          | K and V once, Q and dO n_k times, dQ n_k times read and n_k + 1 written   |
| triton, forward   | 2        | T S          | Q and O once, K and V n_q times                                           |
| triton, decoding  | 2        | T S          | K and V once for all heads that share them, Q once a part, O a part in float32 |
| triton, backward  | 4 + 3    | 2 T S        | dkv: K and V once, Q and dO n_k times; dq: Q and dO once, K and V n_q times |

A product is 2 T S H FLOPs, or Hv for H. Why flash1 beats standard: n_k = 4 H S / M for an SRAM of M
elements, so its bytes are Theta(T S H^2 / M), and no exact algorithm needs less for all M in [H, S
H] (FlashAttention, theorem 2 and proposition 3). triton moves K and V n_q times in place of Q and
O, the same order for tiles of the same size; but O, l and m stay on the chip.

What is counted is what runs: FLOPs of whole tiles, heads padded to a power of two; but bytes only
of elements that exist. Blocks that no query sees are left out by triton alone. A cache may serve
what the kernels load: the bytes are those asked for.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.kernels.triton import tuning
from pallas_flash.kernels.triton.tuning import power_of_two


class Cost(NamedTuple):
    """What a kernel does, or several: FLOPs of products, exponentials, other FLOPs, bytes from and
    to device memory."""

    matrix: int = 0
    exponentials: int = 0
    other: int = 0
    reads: int = 0
    writes: int = 0

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


class Sizes:
    """Elements and bytes, of all heads of all batch rows together."""

    def __init__(self, p: Problem, block_q: int, block_k: int):
        self.T, self.S, self.H, self.V = p.queries, p.keys, p.head_size, p.value_size
        self.h, self.v = power_of_two(self.H), power_of_two(self.V)
        self.e = jnp.dtype(p.dtype).itemsize
        self.heads, self.kv_heads = p.batch * p.heads, p.batch * p.kv_heads
        self.bq, self.bk = block_q, block_k
        self.n_q, self.n_k = schedule.ceil_div(self.T, block_q), schedule.ceil_div(self.S, block_k)
        bytes_ = lambda heads, length, size: heads * length * size * self.e
        self.q, self.o = bytes_(self.heads, self.T, self.H), bytes_(self.heads, self.T, self.V)
        self.key, self.value = (
            bytes_(self.kv_heads, self.S, self.H),
            bytes_(self.kv_heads, self.S, self.V),
        )
        self.statistic = 4 * self.heads * self.T
        self.entries = self.heads * self.T * self.S
        self.group = p.group

    def tiled(self, pairs: int | None = None):
        """Entries and rows of S in whole tiles, for `pairs` of tiles to a head; all by default."""
        rows = self.heads * (self.n_q * self.n_k if pairs is None else pairs) * self.bq
        return rows * self.bk, rows

    def scaled(self, A: int, R: int) -> int:
        """FLOPs of the scale: in float32 the queries take it, for each tile of S again, with 16
        bits S."""
        return R * self.h if self.e == 4 else A


def total(kernels: dict[str, Cost]) -> Cost:
    """What several kernels do together."""
    return Cost(*map(sum, zip(*kernels.values(), strict=True)))


def delta(p: Problem) -> Cost:
    """rowsum(o do) - dlse; and, from m and l, lse in one number, and do with the factor that this
    leaves."""
    z = Sizes(p, 1, 1)
    return Cost(
        other=3 * z.heads * z.T * z.V, reads=2 * z.o + 3 * z.statistic, writes=z.o + 2 * z.statistic
    )


def standard_forward(p: Problem, t) -> dict[str, Cost]:
    """S is written once and read three times, or two with the online softmax; P is written and read
    once.

    A program of a product owns a tile of its result, and so loads Q n_k and K n_q times for S, V
    n_q times for P V.
    """
    z = Sizes(p, t.block_q, t.block_k)
    A, R = z.tiled()
    rows = z.heads * z.n_q * z.bq
    passes, exponentials, other = (
        (2, 2 * A + R, 5 * A + 5 * R) if t.online else (3, 2 * A, 6 * A + 2 * R)
    )
    return dict(
        standard_attention_scores=_scores(z),
        standard_attention_softmax=Cost(
            exponentials=exponentials,
            other=other + rows,
            reads=passes * 4 * z.entries,
            writes=z.e * z.entries + 2 * z.statistic,
        ),
        standard_attention_values=_over_keys(z, z.V, z.v),
    )


def standard_backward(p: Problem, t) -> dict[str, Cost]:
    """P again from S, which is computed again; dP, and from both dS; then a product with each of
    them."""
    z = Sizes(p, t.block_q, t.block_k)
    A, _ = z.tiled()
    return dict(
        standard_attention_scores=_scores(z),
        standard_attention_dp=Cost(
            matrix=2 * A * z.v, reads=z.n_k * z.o + z.n_q * z.group * z.value, writes=4 * z.entries
        ),
        standard_attention_softmax_backward=Cost(
            exponentials=A,
            other=3 * A,
            reads=8 * z.entries + 2 * z.n_k * z.statistic,
            writes=2 * z.e * z.entries,
        ),
        standard_attention_dq=_over_keys(z, z.H, z.h),
        standard_attention_dk=_over_queries(z, z.H, z.h),
        standard_attention_dv=_over_queries(z, z.V, z.v),
    )


def standard_memory(p: Problem) -> dict[str, int]:
    """S, P, m and l; then S, dP, P, dS, delta and lse, when the softmax's has run. do lies where a
    result comes later."""
    z = Sizes(p, 1, 1)
    return dict(
        forward=(4 + z.e) * z.entries + 2 * z.statistic,
        backward=(8 + 2 * z.e) * z.entries + 2 * z.statistic,
    )


def _scores(z: Sizes) -> Cost:
    A, R = z.tiled()
    return Cost(
        matrix=2 * A * z.h,
        other=z.scaled(A, R),
        reads=z.n_k * z.q + z.n_q * z.group * z.key,
        writes=4 * z.entries,
    )


def _over_keys(z: Sizes, size: int, width: int) -> Cost:
    A, R = z.tiled()
    operand = z.n_q * z.heads * z.S * size * z.e
    return Cost(
        matrix=2 * A * width,
        other=(R + z.heads * z.n_q * z.bq) * width,
        reads=z.e * z.entries + operand,
        writes=z.heads * z.T * size * z.e,
    )


def _over_queries(z: Sizes, size: int, width: int) -> Cost:
    A, _ = z.tiled()
    tile = z.n_k * z.bk * width
    return Cost(
        matrix=2 * A * width,
        other=(z.heads * z.n_q + z.kv_heads) * tile,
        reads=z.e * z.entries + z.n_k * z.heads * z.T * size * z.e,
        writes=z.kv_heads * z.S * size * z.e,
    )


def flash1_forward(p: Problem, t) -> dict[str, Cost]:
    """Of each tile of keys, all queries: n_k times Q, O, l and m are read, and O, l and m written
    once more, as zeros."""
    z = Sizes(p, t.block_q, t.block_k)
    A, R = z.tiled()
    state = 4 * z.heads * z.T * z.V + 2 * z.statistic
    kernel = Cost(
        matrix=2 * A * (z.h + z.v),
        exponentials=A + R,
        other=z.scaled(A, R) + 3 * A + 5 * R + 3 * R * z.v + z.heads * z.n_q * z.bq,
        reads=z.group * (z.key + z.value) + z.n_k * (z.q + state),
        writes=(z.n_k + 1) * state,
    )
    return dict(flash1_attention_forward=kernel) | _cast(z, state - 2 * z.statistic, z.o)


def flash1_backward(p: Problem, t) -> dict[str, Cost]:
    """Of each tile of keys, all queries: n_k times Q, dO, lse, delta and dQ are read, dQ written
    once more; dK and dV once."""
    z = Sizes(p, t.block_q, t.block_k)
    A, R = z.tiled()
    dq = 4 * z.heads * z.T * z.H
    kernel = Cost(
        matrix=2 * A * (3 * z.h + 2 * z.v),
        exponentials=A,
        other=z.scaled(A, R)
        + 3 * A
        + 2 * R * z.h
        + z.n_k * z.bk * (z.heads * z.n_q * (z.h + z.v) + z.kv_heads * z.h),
        reads=z.key + z.value + z.n_k * (z.q + z.o + 2 * z.statistic + dq),
        writes=(z.n_k + 1) * dq + z.key + z.value,
    )
    return dict(flash1_attention_backward=kernel) | _cast(z, dq, z.q)


def _cast(z: Sizes, reads: int, writes: int) -> dict[str, Cost]:
    return dict(cast=Cost(reads=reads, writes=writes)) if z.e != 4 else {}


def flash1_memory(p: Problem) -> dict[str, int]:
    """O in float32 where that is not the result, l and m; then dQ in the same way, where do lies
    where the result comes later, and else what `delta` writes."""
    z = Sizes(p, 1, 1)
    sums = lambda size: 0 if z.e == 4 else 4 * z.heads * z.T * size
    return dict(
        forward=sums(z.V) + 2 * z.statistic,
        backward=sums(z.H) + 2 * z.statistic if z.e != 4 else delta(p).writes,
    )


def portable_forward(p: Problem, tiles) -> dict[str, Cost]:
    """Of each tile of queries, the keys it sees: without a mask, K and V n_q times."""
    if tiles.decode is not None:
        return _portable_decode(p, tiles.decode)
    t = tiles.forward
    z = Sizes(p, t.block_q, t.block_k)
    pairs, keys, _ = _keys_of_query_tiles(p, z)
    A, R = z.tiled(pairs)
    own = z.heads * z.n_q * z.bq
    kernel = Cost(
        matrix=2 * A * (z.h + z.v),
        exponentials=A + R,
        other=z.scaled(A, R) + 3 * A + 4 * R + 2 * R * z.v + own * (2 + z.v),
        reads=z.q + z.heads * keys * (z.H + z.V) * z.e,
        writes=z.o + 2 * z.statistic,
    )
    return dict(flash_attention_forward=kernel)


def portable_backward(p: Problem, tiles) -> dict[str, Cost]:
    """dkv: of each tile of keys, the queries that see it, n_k times all without a mask, and which
      these are (4 int32).

    dq: of each tile of queries, the keys it sees. Each computes S and dP: seven products, not five,
      in place of atomic sums.
    """
    t = tiles.dkv
    z = Sizes(p, t.block_q, t.block_k)
    pairs, rows, live = _rows_of_key_tiles(p, z)
    A, R = z.tiled(pairs)
    dkv = Cost(
        matrix=2 * A * 2 * (z.h + z.v),
        exponentials=A,
        other=z.scaled(A, R)
        + 3 * A
        + z.bk * (z.heads * pairs * (z.h + z.v) + z.kv_heads * z.n_k * z.h),
        reads=z.key
        + z.value
        + z.heads * (live * (z.H + z.V) * z.e + 8 * rows)
        + 16 * z.kv_heads * z.n_k,
        writes=z.key + z.value,
    )
    t = tiles.dq
    z = Sizes(p, t.block_q, t.block_k)
    pairs, keys, live = _keys_of_query_tiles(p, z)
    A, R = z.tiled(pairs)
    dq = Cost(
        matrix=2 * A * (2 * z.h + z.v),
        exponentials=A,
        other=z.scaled(A, R) + 3 * A + (R + z.heads * z.n_q * z.bq) * z.h,
        reads=z.heads * (live + keys) * (z.H + z.V) * z.e + 2 * z.statistic,
        writes=z.q,
    )
    return dict(flash_attention_dkv=dkv, flash_attention_dq=dq)


def _portable_decode(p: Problem, t) -> dict[str, Cost]:
    """Of the keys that any row sees, K and V once; Q, and what the rows see, for each part of the
    keys. `merge` is no kernel but XLA's pass over the parts' outputs, which are float32."""
    z, rows = Sizes(p, p.queries, t.block_k), p.queries * p.group
    start, stop, _ = interval_of_rows(p, z)
    blocks, some = schedule.key_blocks(start, stop, None, t.block_k).clipped(), start < stop
    keys = np.max(stop, where=some, initial=0) - np.min(start, where=some, initial=p.keys)
    R, own = (
        z.kv_heads * int(blocks.last - blocks.first) * t.block_q,
        z.kv_heads * t.parts * t.block_q,
    )
    programs = z.kv_heads * t.parts
    kernel = Cost(
        matrix=2 * R * t.block_k * (z.h + z.v),
        exponentials=R * t.block_k + R,
        other=R * (5 * t.block_k + 4 + 2 * z.v) + own * (2 + z.v),
        reads=z.kv_heads * max(int(keys), 0) * (z.H + z.V) * z.e
        + programs * rows * z.H * z.e
        + 8 * own,
        writes=4 * programs * rows * (z.V + 2),
    )
    return dict(
        flash_attention_decode=kernel, merge=Cost(reads=kernel.writes, writes=z.o + 2 * z.statistic)
    )


def portable_memory(p: Problem) -> dict[str, int]:
    """m and l, or the outputs of decoding's parts; then what `delta` writes."""
    t = tuning.tiles(p).decode
    forward = (
        2 * Sizes(p, 1, 1).statistic
        if t is None
        else _portable_decode(p, t)["flash_attention_decode"].writes
    )
    return dict(forward=forward, backward=delta(p).writes)


def interval_of_rows(p: Problem, z: Sizes):
    """The keys that the rows of each tile of queries see, [n_q, block_q], and the rows."""
    row = np.arange(z.n_q * z.bq).reshape(z.n_q, z.bq)
    return np.broadcast_arrays(*p.resolved_mask.interval(np.minimum(row, z.T - 1)), row)


def _keys_of_query_tiles(p: Problem, z: Sizes):
    """Of one head, over all tiles of queries: pairs of tiles visited, keys loaded, rows that see
    something."""
    start, stop, row = interval_of_rows(p, z)
    blocks = schedule.key_blocks(start, stop, None, z.bk, axis=-1)
    first, last = np.asarray(blocks.first), np.asarray(blocks.last)
    keys = np.maximum(np.minimum(last * z.bk, stop.max(-1)) - first * z.bk, 0)
    return int(np.sum(last - first)), int(keys.sum()), int(np.sum((start < stop) & (row < z.T)))


def _rows_of_key_tiles(p: Problem, z: Sizes):
    """Of one head, over all tiles of keys: pairs of tiles visited, rows loaded, and those of them
    that see something."""
    row = np.arange(z.T)
    start, stop, _ = np.broadcast_arrays(*p.resolved_mask.interval(row), row)
    blocks = np.asarray(schedule.query_blocks(p.resolved_mask, z.T, z.bq, z.bk))[0]
    spans = [slice(first * z.bq, last * z.bq) for first, _, _, last in blocks]
    rows, live = (sum(int(some[span].sum()) for span in spans) for some in (row >= 0, start < stop))
    return int(np.sum(blocks[:, 3] - blocks[:, 0])), rows, live
