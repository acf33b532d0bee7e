"""FLOPs, exponentials and bytes of the Hopper kernels, FlashAttention-3, in closed form.

They move what triton moves, all K and V for each tile of queries, but by TMA: rows up to a
multiple of 8, heads as `tuning.stored` has them, and what lies beyond an array is not read. block_q
is 128 or 192, for two or three warpgroups share K and V in shared memory: that is what they gain in
bytes. Which blocks to visit they compute.
"""

import jax.numpy as jnp
import numpy as np

from pallas_flash import schedule
from pallas_flash.accounting.costs import Cost, Sizes, interval_of_rows
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import tuning
from pallas_flash.kernels.hopper.tuning import ROWS


class _Padded:
    """Bytes of all heads of all batch rows, with what TMA asks for."""

    def __init__(self, p: Problem, t):
        self.T, self.S = (-(-length // 8) * 8 for length in (p.queries, p.keys))
        self.heads, self.kv_heads = p.batch * p.heads, p.batch * p.kv_heads
        self.size, self.value_size = (
            tuning.stored(size, t.swizzle) for size in (p.head_size, p.value_size)
        )
        # of a key and its value, or of a query and its do
        self.both = 2 * (self.size + self.value_size)
        self.n_q, self.n_k = (
            schedule.ceil_div(p.queries, t.block_q),
            schedule.ceil_div(p.keys, t.block_k),
        )

    def keys(self, first, last, t) -> int:
        """Of the blocks of keys that the tiles of queries of one head load."""
        return int(np.sum(np.maximum(np.minimum(last * t.block_k, self.S) - first * t.block_k, 0)))


def _query_tiles(p: Problem, block_q: int, block_k: int):
    """First and last block of keys of each tile of queries, at least one."""
    start, stop, _ = interval_of_rows(p, Sizes(p, block_q, block_k))
    blocks = schedule.key_blocks(start, stop, None, block_k, axis=-1)
    first, last = np.asarray(blocks.first), np.asarray(blocks.last)
    return first, np.maximum(last, first + 1)


def _consumers(p: Problem, t, first, last) -> int:
    """The blocks that the consumers of one head compute: of their program's those that their own 64
    rows see, at least one."""
    own_first, own_last = _query_tiles(p, ROWS, t.block_k)
    own = np.minimum(np.arange(first.size * t.warpgroups), own_first.size - 1)
    first, last = (np.repeat(x, t.warpgroups) for x in (first, last))
    own_first = np.clip(own_first[own], first, last - 1)
    return int(np.sum(np.clip(own_last[own], own_first + 1, last) - own_first))


def forward(p: Problem, tiles) -> dict[str, Cost]:
    """Q once, and of each tile of queries the keys it sees; alpha may rescale O for every block but
    the first."""
    if tiles.decode is not None:
        return _decode(p, tiles.decode)
    t = tiles.forward
    z = _Padded(p, t)
    first, last = _query_tiles(p, t.block_q, t.block_k)
    R = z.heads * _consumers(p, t, first, last) * ROWS
    A, own = R * t.block_k, z.heads * z.n_q * t.block_q
    kernel = Cost(
        matrix=2 * A * (t.width + t.value_width),
        exponentials=A + R,
        other=4 * A + 5 * R + R * t.value_width + 3 * own,
        reads=z.heads * (2 * z.T * z.size + z.keys(first, last, t) * z.both),
        # lse has rows of whole tiles
        writes=z.heads * (2 * z.T * z.value_size + 4 * z.n_q * t.block_q),
    )
    return dict(flash_attention_forward=kernel)


def _decode(p: Problem, t) -> dict[str, Cost]:
    """Keys and values once, of the blocks that any row sees; Q, and what the rows see, for each
    part of the keys. `merge` is no kernel but XLA's pass over the parts' outputs, which are
    float32."""
    start, stop, _ = interval_of_rows(p, Sizes(p, p.queries, t.block_k))
    blocks = [int(np.asarray(n).item()) for n in schedule.key_blocks(start, stop, None, t.block_k)]
    first, full_first, full_last, last = schedule.Blocks(*blocks).clipped()
    kv_heads, S = p.batch * p.kv_heads, -(-p.keys // 8) * 8
    programs, rows = kv_heads * t.parts, -(-p.queries * p.group // 8) * 8
    size, value_size = (tuning.stored(size, t.swizzle) for size in (p.head_size, p.value_size))
    keys, masked = (
        min(last * t.block_k, S) - first * t.block_k,
        last - full_last + full_first - first,
    )
    R, own = kv_heads * (last - first) * ROWS, programs * ROWS
    A, table = R * t.block_k, 32 * programs + 8 * kv_heads * masked
    kernel = Cost(
        matrix=2 * A * (t.width + t.value_width),
        exponentials=A + R,
        other=4 * A + 5 * R + R * t.value_width + (3 + t.value_width) * own,
        reads=2 * kv_heads * keys * (size + value_size)
        + 2 * programs * rows * size
        + 8 * own
        + table,
        writes=4 * (programs * rows * t.value_width + own),
    )
    o = 2 * p.batch * p.queries * p.heads * p.value_size
    return dict(
        flash_attention_decode=kernel,
        merge=Cost(reads=kernel.writes, writes=o + 8 * p.batch * p.queries * p.heads),
    )


def backward(p: Problem, tiles) -> dict[str, Cost]:
    """dq and dkv as in triton, or both in one kernel that adds up dQ in device memory: five
    products in place of seven."""
    if tiles.fused is not None:
        return dict(flash_attention_dq_dk_dv=_dkv(p, tiles.fused, fused=True))
    return dict(
        flash_attention_dq=_dq(p, tiles.dq), flash_attention_dk_dv=_dkv(p, tiles.dkv, fused=False)
    )


def _dq(p: Problem, t) -> Cost:
    z = _Padded(p, t)
    first, last = _query_tiles(p, t.block_q, t.block_k)
    A, own = (
        z.heads * int(np.sum(last - first)) * t.block_q * t.block_k,
        z.heads * z.n_q * t.block_q,
    )
    return Cost(
        matrix=2 * A * (2 * t.width + t.value_width),
        exponentials=A,
        other=4 * A + own * t.width,
        reads=z.heads * (z.T + z.keys(first, last, t)) * z.both + 8 * own,
        writes=z.heads * z.T * 2 * z.size,
    )


def _dkv(p: Problem, t, fused: bool) -> Cost:
    """Where warpgroups own columns of dK and dV, some may be both's; in the fused scheme dQ is read
    and written."""
    z = _Padded(p, t)
    keys = np.arange(z.n_k, dtype=np.int32) * t.block_k
    seen_by = p.resolved_mask.by_key(schedule.ceil_div(p.queries, t.block_q) * t.block_q)
    blocks = schedule.known_blocks(
        seen_by, keys, np.minimum(keys + t.block_k, p.keys) - 1, t.block_q
    )
    first, last = (np.broadcast_to(n, keys.shape) for n in (blocks.first, blocks.last))
    A = z.heads * int(np.sum(last - first)) * t.block_q * t.block_k
    rows = int(np.sum(np.maximum(np.minimum(last * t.block_q, z.T) - first * t.block_q, 0)))
    owners, dq = (
        t.warpgroups if t.split else 1,
        4 * z.heads * rows * tuning.stored(p.head_size, t.swizzle, 4) * fused,
    )
    columns = owners * (t.columns(t.width) + t.columns(t.value_width))
    return Cost(
        matrix=2 * A * (t.width + t.value_width + columns + fused * t.width),
        exponentials=A,
        other=4 * A + owners * z.kv_heads * z.n_k * t.block_k * t.columns(t.width),
        reads=z.kv_heads * z.S * z.both
        + z.heads * (rows * z.both + 8 * int(np.sum(last - first)) * t.block_q)
        + dq,
        writes=z.kv_heads * z.S * z.both + dq,
    )


def delta(p: Problem) -> Cost:
    """rowsum(o do) - dlse, and lse with +inf for the rows that saw nothing."""
    rows, size = p.batch * p.heads * p.queries, jnp.dtype(p.dtype).itemsize
    return Cost(
        other=2 * rows * p.value_size,
        reads=2 * rows * p.value_size * size + 8 * rows,
        writes=8 * rows,
    )


def memory(p: Problem) -> dict[str, int]:
    """Nothing, or the outputs of decoding's parts; then delta and the lse that the backward takes,
    and in one kernel dQ in float32. Copies that pad come on top."""
    rows, t = p.batch * p.heads * p.queries, tuning.tiles(p).decode
    return dict(
        forward=0 if t is None else _decode(p, t)["flash_attention_decode"].writes,
        backward=4 * rows * (2 + (0 if p.deterministic else p.head_size)),
    )
