"""Split-KV decoding (Flash-Decoding), attention of a few new tokens to many keys: which calls are
decoding, packed GQA, the number of splits, and their merge.

The rows of one tile are the new tokens times the query heads that share a key/value head, so keys
and values are read once. The keys are split along the sequence, one program per split, and the
outputs of the splits are merged.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem, shapes
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.online_softmax import SoftmaxState

MAX_ROWS = 64  # rows of one tile
WIDE = 256  # the widest head that the regular kernels take
KEYS = 256  # the fewest keys: fewer are few blocks, which the regular forward reads as fast
MIN_GAIN = 1.05  # the least speedup for which there are more splits
# XLA's limit of operands to a kernel is 96, and more splits one by one make one for each
ONE_BY_ONE = 64

_SUPPORTED = """
batch queries keys heads kv_heads head_size value_size dtype scale soft_cap resolved_mask
deterministic sinks score max_logits values_are_keys
""".split()


def is_decoding(problem: Problem) -> bool:
    """Whether the forward of a problem is decoding: few rows, many keys, and no option that
    decoding does not support."""
    p = problem
    others = [field.name for field in dataclasses.fields(p) if field.name not in _SUPPORTED]
    is_supported = p.resolved_mask.shows_intervals and not any(getattr(p, name) for name in others)
    return p.is_static and is_supported and why_not(p) is None and p.keys >= KEYS


def why_not(problem: Problem) -> str | None:
    """Why a problem has more rows than decoding takes, or None."""
    p, most = problem, max_rows(problem.head_size, problem.values_are_keys)
    if p.queries * p.group <= most:
        return None
    return f"decoding has up to {most} rows, T N / K; got {p.queries} x {p.group}"


def max_rows(head_size: int, values_are_keys: bool) -> int:
    """Most rows T N / K: one tile of 64, or eight for the wide latents of MLA, which no other
    kernel takes: the rows of four new tokens of 128 heads."""
    return 8 * MAX_ROWS if values_are_keys and head_size > WIDE else MAX_ROWS


def max_ragged_rows(head_size: int, values_are_keys: bool) -> int:
    """Most rows of a tile of ragged tokens, whose missing tokens cost as much as real ones: for
    latents the rows of one token of 128 heads."""
    return min(2 * MAX_ROWS, max_rows(head_size, values_are_keys))


def num_splits(problem: Problem, block_k: int, processors: int, min_gain: float = MIN_GAIN) -> int:
    """The fewest splits that keep all processors nearly as busy as the best number would."""
    p = problem
    programs = p.batch * p.kv_heads * schedule.ceil_div(p.queries * p.group, MAX_ROWS)
    most = schedule.ceil_div(p.keys, block_k)
    time = {
        n: schedule.ceil_div(programs * n, processors) / n
        for n in range(1, min(most, processors) + 1)
    }
    return next(n for n in time if time[n] <= min_gain * min(time.values()))


def intervals(problem: Problem, mask: ResolvedMask) -> tuple[jax.Array, jax.Array]:
    """The keys [start, stop) that each query sees, [B | 1, T]."""
    row = jnp.arange(problem.queries, dtype=jnp.int32)[None]
    ends = mask.narrow(ResolvedMask.BY_BATCH, lambda a: a[:, None]).interval(row)
    start, stop, _ = jnp.broadcast_arrays(*(jnp.asarray(end, jnp.int32) for end in ends), row)
    return start, stop


def reach(start, stop, keys: int) -> tuple[jax.Array, jax.Array]:
    """The range of keys [first, last) that any of the rows [B, rows] sees; empty where none sees a
    key."""
    sees = start < stop
    return jnp.min(jnp.where(sees, start, keys), 1), jnp.max(jnp.where(sees, stop, 0), 1)


def pack_gqa(problem: Problem, x: Operands, score_mod: bool = False) -> tuple[Problem, Operands]:
    """The problem and operands with the query heads of a group as rows, token by token: row r has
    token r // group. With `score_mod` the head and the position of a score_mod become data by row.
    The mask remains that of the tokens; the sinks are left out, and `merge_splits` adds them."""
    p, score = problem, x.score
    if score_mod and score is not None:
        score = score.pack_gqa(p.batch, p.heads, p.queries, p.group)
    q = x.query.reshape(p.batch, p.queries, p.kv_heads, p.group, -1)
    q = jnp.swapaxes(q, 2, 3).reshape(p.batch, -1, p.kv_heads, p.head_size)
    rows = dataclasses.replace(
        p, queries=q.shape[1], heads=p.kv_heads, sinks=False, score=shapes(score)
    )
    return rows, x._replace(query=q, sinks=None, score=score)


def merge_splits(problem: Problem, x: Operands, o, stats: SoftmaxState, log_base: LogBase):
    """Merges o [B, splits, K, rows, Hv] and its SoftmaxState [B, splits, K, rows] into
    o [B, T, N, Hv] and SoftmaxState [B, N, T], and adds the sinks."""
    p, splits = problem, o.shape[1]
    split = lambda n: jax.tree.map(lambda a: a[:, n], (o, stats))
    if splits == 1:
        o, stats = split(0)
    elif splits > ONE_BY_ONE:
        o, stats = online_softmax.merge_axis(o, stats, 1, log_base)
    else:
        outputs, states = zip(*map(split, range(splits)), strict=True)
        shares, stats = online_softmax.merge(states, log_base)
        o = sum(o * share[..., None] for o, share in zip(outputs, shares, strict=True))
    by_query = lambda a: jnp.moveaxis(
        a.reshape(p.batch, p.kv_heads, p.queries, p.group, *a.shape[3:]), 2, 3
    )
    o, stats = jax.tree.map(
        lambda a: by_query(a).reshape(p.batch, p.heads, p.queries, *a.shape[3:]), (o, stats)
    )
    if x.sinks is not None:  # one more split, with the value 0
        stats = stats._replace(top=stats.largest) if p.with_top else stats
        sink = x.sinks.reshape(-1, p.heads, 1)  # of all batch rows, or of each
        sink = online_softmax.start(jnp.zeros_like(stats.m), log_base, sink, p.with_top)
        share, stats = online_softmax.merge([stats, sink], log_base)
        o = o * share[0][..., None]
    return jnp.swapaxes(o, 1, 2).astype(x.query.dtype), stats
