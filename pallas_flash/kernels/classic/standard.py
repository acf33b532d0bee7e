"""Standard attention: each step is a kernel, and S and P, in the backward dP and dS, lie in device
memory.

The kernels skip nothing: they compute the scores that a mask hides, and set them to -inf. The
softmax has the two forms of arXiv:1805.02867.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import online_softmax, schedule


class Tiles(NamedTuple):
    block_q: int
    block_k: int
    online: bool = False  # the softmax reads S twice, not three times
    num_warps: int = 4
    num_stages: int = 2

    def __str__(self):
        return (
            f"{self.block_q} x {self.block_k}, "
            f"{'online softmax, 2' if self.online else 'safe softmax, 3'} passes over S"
        )


def tiles(problem: Problem) -> Tiles:
    """Tiles that leave room for products of heads up to 256."""
    width, size = max(problem.head_size, problem.value_size), 4 if problem.dtype == "float32" else 2
    block = 64 if width * size <= 256 else 32
    return Tiles(min(block, power_of_two(problem.queries)), min(block, power_of_two(problem.keys)))


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    p, t, x = problem, tiles, mods.flatten(x)
    s = _by_tile(_scores_kernel, p, t, x, out=[jnp.float32], name="scores")[0]
    prob, *stats = _softmax(p, t, x, s)
    return _sum_over_keys(p, t, x, prob, x.value, name="values"), online_softmax.SoftmaxState(
        *stats
    )


def backward(problem: Problem, tiles: Tiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k, v and bias. P, which frameworks kept from the forward, is computed
    again: the forward leaves only o and lse."""
    p, t, dtype, x = problem, tiles, x.query.dtype, mods.flatten(x)
    s = _by_tile(_scores_kernel, p, t, x, out=[jnp.float32], name="scores")[0]
    dp = _by_tile(_dp_kernel, p, t, x, (do, "btnv"), out=[jnp.float32], name="dp")[0]
    args = (s, "bnts"), (dp, "bnts"), (lse, "bnt"), (delta, "bnt")
    prob, ds = _by_tile(
        _softmax_backward_kernel, p, t, x, *args, out=[dtype, dtype], name="softmax_backward"
    )
    dq = _sum_over_keys(p, t, x, ds, x.key, scale=p.scale, name="dq")
    dk = _sum_over_queries(p, t, x, ds, x.query, x.key, scale=p.scale, name="dk")
    dv = _sum_over_queries(p, t, x, prob, do, x.value, name="dv")
    return Gradients(dq, dk, dv, _dbias(p, x, ds))


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run a problem, beyond `pallas_call.why_not`; or None."""
    if problem.score is None:
        return None
    return "its backward needs the scores before score_mod, which it does not keep"


def _by_tile(kernel, p: Problem, tiles: Tiles, x: Operands, *arrays, out, name):
    """Arrays [B, N, T, S] of the dtypes `out`, from a kernel whose programs own one tile of each;
    `arrays` are pairs of an array and the letters of its axes."""
    index = lambda j, i, n, b: dict(b=b, B=b, n=n, k=n // p.group, t=i, s=j)
    count = schedule.ceil_div
    shape = count(p.keys, tiles.block_k), count(p.queries, tiles.block_q), p.heads, p.batch
    grid = tile.grid(p, tiles, shape, index, t=tiles.block_q, s=tiles.block_k)
    out = [(dtype, "bnts") for dtype in out]
    return grid.launch(kernel, x, *arrays, out=out, name=f"standard_attention_{name}")


def _by_rows(p: Problem, tiles: Tiles) -> tile.Grid:
    """A program owns one tile of queries of one head."""
    index = lambda i, n, b: dict(b=b, B=b, n=n, k=n // p.group, t=i)
    shape = schedule.ceil_div(p.queries, tiles.block_q), p.heads, p.batch
    return tile.grid(p, tiles, shape, index, t=tiles.block_q)


def _program_tile(p: Problem, tiles: Tiles):
    """The rows and keys that a program of `_by_tile` owns."""
    row = tile.span(pl.program_id(1), tiles.block_q, p.queries)
    return row, tile.span(pl.program_id(0), tiles.block_k, p.keys)


def _scores_kernel(x: Operands, s_ref, *, problem: Problem, tiles: Tiles):
    p = problem
    row, key = _program_tile(p, tiles)
    mask = tile.mask(x.resolved_mask, row, p.queries, pair=(pl.program_id(3), pl.program_id(2)))
    q = tile.load(x.query, row.inside, tile.head(x.query, p.head_size))  # [bq, H]
    k = tile.load(x.key, key.inside, tile.head(x.key, p.head_size))  # [bk, H]
    s = tile.scores(p, q, k, tile.dense(x.bias, (), row, key))  # [bq, bk]
    s = jnp.where(mask.visible(key, tile.dense(x.mask, (), row, key), True), s, -jnp.inf)
    tile.store(s_ref, s, row.inside, key.inside)


def _softmax(p: Problem, tiles: Tiles, x: Operands, s):
    """P [B, N, T, S] in the query's dtype, and the fields of the SoftmaxState [B, N, T]."""
    out = [(x.query.dtype, "bnts"), *[(jnp.float32, "bnt")] * p.statistics]
    name = "standard_attention_softmax"
    return _by_rows(p, tiles).launch(_softmax_kernel, x, (s, "bnts"), out=out, name=name)


def _softmax_kernel(x: Operands, s_ref, p_ref, *stats_refs, problem: Problem, tiles: Tiles):
    row = tile.span(pl.program_id(0), tiles.block_q, problem.queries)

    def over_keys(step, carry):
        def load_and_step(j, carry):
            key = tile.span(j, tiles.block_k, problem.keys)
            return step(
                key,
                tile.load(s_ref.at[:, key.slice], row.inside, key.inside, other=-jnp.inf),
                carry,
            )

        return schedule.loop(
            0, schedule.ceil_div(problem.keys, tiles.block_k), load_and_step, carry
        )

    stats = (_online if tiles.online else _safe)(over_keys, problem, x, tiles.block_q)

    def write(key, s, _):
        prob = online_softmax.finish(
            problem.log_base.power(s - stats.m[:, None]), stats.l, problem.kept
        )
        prob = tile.drop(problem, x.seeds, (), row, key, prob)
        tile.store(tile.subtile(p_ref, None, key.slice), prob, row.inside, key.inside)

    over_keys(write, None)
    for ref, x in zip(stats_refs, jax.tree.leaves(stats), strict=True):
        tile.store(ref, x, row.inside)


def _safe(over_keys, p: Problem, x: Operands, rows: int) -> online_softmax.SoftmaxState:
    """The maximum m and the sum l of b^(s - m) of each row, each in a pass over the keys
    (algorithm 2)."""
    power = p.log_base.power
    first, l, top = tile.start(p, x, rows)
    # not the larger of m and the block's maximum: Triton then stores as m what it began with
    # (mma/NOTES.md#executed)
    largest = lambda _, s, m: jnp.max(jnp.maximum(s, m[:, None]), axis=1)
    m, top = over_keys(largest, first), None if top is None else over_keys(largest, top)
    l = l if x.sinks is None else l * power(first - m)
    return online_softmax.SoftmaxState(
        m, over_keys(lambda _, s, l: l + jnp.sum(power(s - m[:, None]), axis=1), l), top
    )


def _online(over_keys, p: Problem, x: Operands, rows: int) -> online_softmax.SoftmaxState:
    """The maximum and the sum of each row, in one pass over the keys (algorithm 3)."""
    step = lambda _, s, stats: online_softmax.step(s, stats, p.log_base)[2]
    return over_keys(step, tile.start(p, x, rows))


def _dp_kernel(x: Operands, do_ref, dp_ref, *, problem: Problem, tiles: Tiles):
    p = problem
    row, key = _program_tile(p, tiles)
    mask = tile.mask(x.resolved_mask, row, p.queries)
    do = _zero_hidden(
        tile.load(do_ref, row.inside, tile.head(do_ref, p.value_size)), mask.valid(row, True)
    )
    v = _zero_hidden(
        tile.load(x.value, key.inside, tile.head(x.value, p.value_size)), mask.reach(key, True)
    )
    tile.store(
        dp_ref, tile.drop(p, x.seeds, (), row, key, tile.dot_t(do, v)), row.inside, key.inside
    )


def _softmax_backward_kernel(
    x: Operands, s_ref, dp_ref, lse_ref, delta_ref, p_ref, ds_ref, *, problem: Problem, tiles: Tiles
):
    row, key = _program_tile(problem, tiles)
    s = tile.load(s_ref, row.inside, key.inside, other=-jnp.inf)
    dp = tile.load(dp_ref, row.inside, key.inside)
    lse, delta = tile.load(lse_ref, row.inside, other=jnp.inf), tile.load(delta_ref, row.inside)
    tanh = None if problem.soft_cap is None else s / (problem.soft_cap * problem.log_base.log_e)
    prob = problem.log_base.power(s - lse[..., None])
    prob, ds = online_softmax.gradients(prob, dp - delta[..., None], s > -jnp.inf, tanh)
    tile.store(p_ref, tile.drop(problem, x.seeds, (), row, key, prob), row.inside, key.inside)
    tile.store(ds_ref, ds, row.inside, key.inside)


def _sum_over_keys(p: Problem, tiles: Tiles, x: Operands, a, b, scale: float = 1.0, *, name: str):
    """The product scale a b for a [B, N, T, S] and b = x.value or x.key: o from P, dq from dS."""
    v = "v" if b is x.value else "h"
    (out,) = _by_rows(p, tiles).launch(
        *(_sum_over_keys_kernel, x, (a, "bnts"), (b, f"bsk{v}")),
        out=[(b.dtype, f"btn{v}")],
        name=f"standard_attention_{name}",
        width=b.shape[3],
        scale=scale,
    )
    return out


def _sum_over_keys_kernel(
    x: Operands, a_ref, b_ref, out_ref, *, problem: Problem, tiles: Tiles, width: int, scale: float
):
    p = problem
    row = tile.span(pl.program_id(0), tiles.block_q, p.queries)
    mask, columns = tile.mask(x.resolved_mask, row, p.queries), tile.head(b_ref, width)

    def step(j, out):
        key = tile.span(j, tiles.block_k, p.keys)
        a = tile.load(a_ref.at[:, key.slice], row.inside, key.inside)  # [bq, bk]
        b = _zero_hidden(tile.load(b_ref.at[key.slice], key.inside, columns), mask.reach(key, True))
        return out + tile.dot(a, b)

    out = schedule.loop(
        0, schedule.ceil_div(p.keys, tiles.block_k), step, jnp.zeros(out_ref.shape, jnp.float32)
    )
    tile.store(out_ref, out * scale, row.inside, columns)


def _sum_over_queries(
    p: Problem, tiles: Tiles, x: Operands, a, b, like, scale: float = 1.0, *, name: str
):
    """The product scale a^T b for a [B, N, T, S] and b = do or x.query, summed over the queries and
    the heads of a group: dv from P, dk from dS."""
    v = "v" if like is x.value else "h"
    index = lambda j, k, b: dict(b=b, B=b, n=k, k=k, s=j)
    shape = schedule.ceil_div(p.keys, tiles.block_k), p.kv_heads, p.batch
    grid = tile.grid(p, tiles, shape, index, s=tiles.block_k, n=p.group)
    (out,) = grid.launch(
        *(_sum_over_queries_kernel, x, (a, "bnts"), (b, f"btn{v}")),
        out=[(like.dtype, f"bsk{v}")],
        name=f"standard_attention_{name}",
        width=b.shape[3],
        scale=scale,
    )
    return out


def _sum_over_queries_kernel(
    x: Operands, a_ref, b_ref, out_ref, *, problem: Problem, tiles: Tiles, width: int, scale: float
):
    p = problem
    key = tile.span(pl.program_id(0), tiles.block_k, p.keys)
    columns = tile.head(b_ref, width)

    def query_head(g, out):
        def step(i, out):
            row = tile.span(i, tiles.block_q, p.queries)
            mask = tile.mask(x.resolved_mask, row, p.queries)
            a = tile.load(a_ref.at[g, row.slice], row.inside, key.inside)  # [bq, bk]
            b = _zero_hidden(
                tile.load(b_ref.at[row.slice, g], row.inside, columns), mask.valid(row, True)
            )
            return out + tile.t_dot(a, b)

        return schedule.loop(0, schedule.ceil_div(p.queries, tiles.block_q), step, out)

    out = schedule.loop(0, p.group, query_head, jnp.zeros(out_ref.shape, jnp.float32))
    tile.store(out_ref, out * scale, key.inside, columns)


def _dbias(p: Problem, x: Operands, ds):
    if x.bias is None:
        return None
    broadcast = [
        axis for axis, (n, whole) in enumerate(zip(p.bias, ds.shape, strict=True)) if n < whole
    ]
    return jnp.sum(ds.astype(jnp.float32), broadcast, keepdims=True).astype(x.bias.dtype)


def _zero_hidden(x, rows):
    """Sets the rows of x that nobody sees to 0: they may be NaN, and 0 * NaN is NaN."""
    return jnp.where(rows[:, None], x, 0)
