"""Decoding: a program owns one split of the keys of one key/value head, and all rows of the tokens
that see them."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.kernels.triton.tuning import DecodeTiles
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, split_kv
from pallas_flash.tiled.quantised import weights


def forward(problem: Problem, tiles: DecodeTiles, x: Operands, table=None, scales=(None, None)):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` int32
    [B, pages] of page numbers, key and value are pages [P, page, K, n]; where these are quantised,
    both have `scales` [P, page, K]."""
    p, rows = split_kv.pack_gqa(problem, mods.flatten(x))
    index = lambda part, k, b: dict(b=b, B=b, n=k, k=k, p=part)
    shape = tiles.num_splits, p.heads, p.batch
    grid = tile.grid(p, tiles, shape, index, t=tiles.block_q, T=problem.queries, p=None)
    specs = grid.operands(rows)
    table_spec = None
    if table is not None:
        table_spec = pl.BlockSpec((None, table.shape[1]), lambda part, k, b: (b, 0))
        whole = lambda x: pl.BlockSpec(
            (*x.shape[:2], None, power_of_two(x.shape[3])), lambda part, k, b: (0, 0, k, 0)
        )
        specs = specs._replace(key=whole(x.key), value=whole(x.value))
    of_scale = lambda x: (
        None if x is None else pl.BlockSpec((*x.shape[:2], None), lambda part, k, b: (0, 0, k))
    )
    stats = jax.ShapeDtypeStruct((p.batch, tiles.num_splits, p.heads, p.queries), jnp.float32)
    o = jax.ShapeDtypeStruct(
        (p.batch, tiles.num_splits, p.heads, p.queries, p.value_size), jnp.float32
    )
    o, m, l = grid.launch(
        *(_kernel, rows, (table, table_spec), (scales, tuple(map(of_scale, scales)))),
        out=[(o, grid.spec("bpntv")), *[(stats, grid.spec("bpnt"))] * 2],
        name="flash_attention_decode",
        specs=specs,
        tokens=problem.queries,
    )
    return split_kv.merge_splits(problem, x, o, online_softmax.SoftmaxState(m, l), problem.log_base)


def _kernel(
    x: Operands,
    table_ref,
    scale_refs,
    o_ref,
    m_ref,
    l_ref,
    *,
    problem: Problem,
    tokens: int,
    tiles: DecodeTiles,
):
    p = problem
    row = tile.span(tile.FIRST, tiles.block_q, p.queries)
    group = p.queries // tokens
    token, pair = (
        row.index // group,
        (pl.program_id(2), pl.program_id(1) * group + row.index[:, None] % group),
    )
    mask = tile.mask(x.resolved_mask, row._replace(index=token), tokens)
    q = tile.load(x.query, row.inside, tile.head(x.query, p.head_size))  # [bq, H]

    def step(j, carry, masked):
        o, stats = carry
        key = tile.span(j, tiles.block_k, p.keys, bounded=masked)
        inside = (key.index >= first) & mask.reach(key, masked) if masked else None
        k_ref, v_ref = (_block(ref, table_ref, key) for ref in (x.key, x.value))
        k, v = tile.keys_and_values(p, k_ref, v_ref, inside)
        k_scale, v_scale = (
            None if ref is None else tile.load(_block(ref, table_ref, key), inside)[None]
            for ref in scale_refs
        )
        qk = tile.dot_t(q, k.astype(q.dtype))
        qk = qk if k_scale is None else qk * k_scale
        s, _ = online_softmax.scores(qk, None, p.scale, p.soft_cap, p.log_base)  # [bq, bk]
        s = jnp.maximum(s, online_softmax.LOWEST)  # no multiply-add with -m
        if x.score is not None:
            s = mods.bind(x.score, pair, tile.FIRST, token, key.index).score(s)
        visible = mask.visible(key, None, masked)
        s = s if visible is None else jnp.where(visible, s, -jnp.inf)
        prob, alpha, stats = online_softmax.step(s, stats, p.log_base)
        if v_scale is not None:
            prob, v = prob * v_scale, v.astype(weights(q.dtype))
        return o * alpha[:, None] + tile.dot(prob.astype(v.dtype), v), stats

    first = mask.blocks(1).first  # pages before it may hold NaN
    start = (
        jnp.zeros(o_ref.shape, jnp.float32),
        online_softmax.start(jnp.zeros(tiles.block_q, jnp.float32), p.log_base),
    )
    blocks = mask.blocks(tiles.block_k).split(pl.program_id(0), tiles.num_splits)
    o, stats = blocks.visit(step, start)
    tile.store(o_ref, online_softmax.finish(o, stats.l), row.inside, tile.head(o_ref, p.value_size))
    tile.store(m_ref, stats.m, row.inside)
    tile.store(l_ref, stats.l, row.inside)


def _block(ref, table_ref, key: tile.Span):
    """A block of keys or values [S, n], of pages [P, page, n], or of scales [P, page]."""
    if table_ref is None:
        return ref.at[key.slice]
    number, page, *width = ref.shape
    entry = table_ref[jnp.minimum(key.index // page, table_ref.shape[0] - 1)]
    at = jnp.clip(entry, 0, number - 1), key.index % page
    if not width:
        return ref.at[at]
    (width,) = width
    at = at[0][:, None], at[1][:, None], jnp.arange(width, dtype=jnp.int32)[None]
    # the interpreter takes no slice beside them
    return ref.at[tuple(jnp.broadcast_to(i, (key.index.size, width)) for i in at)]
