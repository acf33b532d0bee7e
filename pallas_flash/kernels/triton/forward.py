"""The forward of FlashAttention-2 (arXiv:2307.08691, algorithm 1): a program owns a tile of queries
and walks over the keys."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, tile
from pallas_flash.kernels.triton import decode
from pallas_flash.kernels.triton.tuning import AllTiles, Tiles
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule


def forward(problem: Problem, tiles: AllTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    if tiles.decode is not None:
        return decode.forward(problem, tiles.decode, x)
    p, t = problem, tiles.forward
    x = mods.with_block_lists(p, t, x)
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
