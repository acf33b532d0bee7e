"""The forward of FlashAttention-2 (arXiv:2307.08691, algorithm 1): a program owns a tile of queries
and walks over the keys. In forward mode, given lse, it sums

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,   dS = scale (dQ K^T + Q dK^T).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, tile
from pallas_flash.kernels.triton import decode
from pallas_flash.kernels.triton.tuning import AllTiles, Tiles
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.online_softmax import RowLse


def forward(problem: Problem, tiles: AllTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    if tiles.decode is not None:
        return decode.forward(problem, tiles.decode, x)
    p, t = problem, tiles.forward
    x = mods.with_visited_blocks(p, t, x)
    out = [(x.query.dtype, "btnv"), *[(jnp.float32, "bnt")] * p.statistics]
    o, *stats = by_query_tile(p, t).launch(_kernel, x, out=out, name="flash_attention_forward")
    return o, online_softmax.SoftmaxState(*stats)


def by_query_tile(p: Problem, tiles: Tiles) -> tile.Grid:
    """A program owns one tile of queries of one head. The last tiles, which see most keys under a
    causal mask, come first."""
    count = schedule.ceil_div(p.queries, tiles.block_q)
    index = lambda i, n, b: dict(b=b, B=b, n=n, k=n // p.group, t=count - 1 - i)
    return tile.grid(p, tiles, (count, p.heads, p.batch), index, t=tiles.block_q)


def program_rows(p: Problem, tiles: Tiles) -> tile.Span:
    """The queries that a program of `by_query_tile` owns."""
    return tile.span(pl.num_programs(0) - 1 - pl.program_id(0), tiles.block_q, p.queries)


def program_head() -> tuple:
    """The batch row and head that a program of `by_query_tile` owns."""
    return pl.program_id(2), pl.program_id(1)


def _kernel(x: Operands, o_ref, *stats_refs, problem: Problem, tiles: Tiles):
    p = problem
    row, pair = program_rows(p, tiles), program_head()
    mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
    blocks = mask.blocks(tiles.block_k)
    q = tile.load(x.query, row.inside, tile.head(x.query, p.head_size))  # [bq, H]

    def step(t, carry, masked):
        o, stats = carry
        key = tile.span(blocks.index(t), tiles.block_k, p.keys, bounded=masked)
        k, v = tile.keys_and_values(
            p, x.key.at[key.slice], x.value.at[key.slice], mask.reach(key, masked)
        )
        mod = tile.score_mod(x, row, key, pair)
        s = tile.scores(p, q, k, tile.dense(x.bias, (), row, key), mod)  # [bq, bk]
        visible = mask.visible(key, tile.dense(x.mask, (), row, key), masked)
        s = s if visible is None else jnp.where(visible, s, -jnp.inf)
        prob, alpha, stats = online_softmax.step(s, stats, p.log_base)
        prob = tile.drop(p, x.seeds, (), row, key, prob)
        return o * alpha[:, None] + tile.dot(prob.astype(v.dtype), v), stats

    start = jnp.zeros(o_ref.shape, jnp.float32), tile.start(p, x, tiles.block_q)
    o, stats = blocks.visit(step, start)
    tile.store(
        o_ref, online_softmax.finish(o, stats.l, p.kept), row.inside, tile.head(o_ref, p.value_size)
    )
    for ref, x in zip(stats_refs, jax.tree.leaves(stats), strict=True):
        tile.store(ref, x, row.inside)


def tangent(problem: Problem, tiles: AllTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse):
    """The tangents of o and lse, without the part of the arrays that a score_mod reads."""
    p, t = problem, tiles.tangent
    x, dx = mods.with_visited_blocks(p, t, x), dx._replace(sinks=None, captured=())
    grid = by_query_tile(p, t)
    row, specs = grid.spec("bnt"), grid.operands(x)
    of = lambda name: None if getattr(dx, name) is None else getattr(specs, name)
    of_tangents = {name: of(name) for name in ("query", "key", "value", "bias")}
    arrays = (dx, Gradients(**of_tangents)), (rows, RowLse(row, row)), (o, "btnv"), (dlse, "bnt")
    out = [(o.dtype, "btnv"), (dlse.dtype, "bnt")]
    return grid.launch(_tangent_kernel, x, *arrays, out=out, name="flash_attention_tangent")


def _tangent_kernel(
    x: Operands,
    dx: Gradients,
    rows: RowLse,
    o_ref,
    dlse_ref,
    do_out,
    dlse_out,
    *,
    problem: Problem,
    tiles: Tiles,
):
    p = problem
    row, pair = program_rows(p, tiles), program_head()
    mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
    blocks = mask.blocks(tiles.block_k)
    valid = mask.valid(row, True)
    q, dq = (_load(ref, valid, p.head_size) for ref in (x.query, dx.query))
    lse = tile.load(rows.lse, row.inside, other=jnp.inf)
    logits_move = any(ref is not None for ref in (dx.query, dx.key, dx.bias))

    def step(t, sums, masked):
        do, dlse = sums
        key = tile.span(blocks.index(t), tiles.block_k, p.keys, bounded=masked)
        reach = mask.reach(key, masked)
        dense = lambda ref: tile.dense(ref, (), row, key)

        def of_keys(ref, size):
            return _load(None if ref is None else ref.at[key.slice], reach, size)

        def of_logits():
            """The tangent of the logits before score_mod and soft cap."""
            dk = of_keys(dx.key, p.head_size)
            products = [] if dq is None else [tile.dot_t(dq, k)]
            products += [] if dk is None else [tile.dot_t(q, dk)]
            terms = [sum(products) * p.scale] if products else []
            terms += [] if dx.bias is None else [dense(dx.bias)]
            return sum(terms)

        k = of_keys(x.key, p.head_size)
        visible = mask.visible(key, dense(x.mask), masked)
        mod = tile.score_mod(x, row, key, pair)
        # [bq, bk]
        prob, ds, _ = tile.weighted(p, q, k, lse, dense(x.bias), visible, mod, of_logits)
        pairs = [(ds, x.value)] if logits_move else []
        pairs += [] if dx.value is None else [(prob, dx.value)]
        for weights, ref in pairs:
            values = of_keys(ref, p.value_size)
            weights = tile.drop(p, x.seeds, (), row, key, weights)
            do = do + tile.dot(weights.astype(values.dtype), values)
        return do, dlse + jnp.sum(ds, axis=1)

    start = jnp.zeros(do_out.shape, jnp.float32), jnp.zeros(lse.shape, jnp.float32)
    do, dlse = blocks.visit(step, start)
    factor, of_sinks = (tile.load(ref, row.inside) for ref in (rows.factor, dlse_ref))
    dlse = jnp.where(lse == jnp.inf, 0.0, dlse * factor + of_sinks)
    columns = tile.head(o_ref, p.value_size)
    o = tile.load(o_ref, row.inside, columns).astype(jnp.float32)
    do = do * (factor / p.kept)[:, None] - dlse[:, None] * o
    tile.store(do_out, do, row.inside, columns)
    tile.store(dlse_out, dlse, row.inside)


def _load(ref, rows, size: int):
    """Loads a tile of heads of this size, with 0 outside of `rows`; None where there is no ref."""
    return None if ref is None else tile.load(ref, rows, tile.head(ref, size))
