"""The forward of FlashAttention-2 (arXiv:2307.08691, algorithm 1): a program owns a tile of queries
and walks over the keys. In forward mode, given lse, it sums

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,   dS = scale (dQ K^T + Q dK^T).

Few queries, whose keys may be in pages, have split-KV decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.kernels.triton.tuning import DecodeTiles, Tiles, TritonTiles
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import online_softmax, quantised, schedule, split_kv
from pallas_flash.tiled.online_softmax import RowLse


def forward(problem: Problem, tiles: TritonTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    if tiles.decode is not None:
        return decode(problem, tiles.decode, x)
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


def tangent(
    problem: Problem, tiles: TritonTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse
):
    """The tangents of o and lse, without the part of the arrays that a score_mod reads."""
    p, t = problem, tiles.tangent
    x, dx = mods.with_visited_blocks(p, t, x), dx._replace(sinks=None, captured=())
    grid = by_query_tile(p, t)
    row, specs = grid.spec("bnt"), grid.operands(x)
    spec = lambda name: None if getattr(dx, name) is None else getattr(specs, name)
    dx_specs = {name: spec(name) for name in ("query", "key", "value", "bias")}
    arrays = (dx, Gradients(**dx_specs)), (rows, RowLse(row, row)), (o, "btnv"), (dlse, "bnt")
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

        def load_keys(ref, size):
            return _load(None if ref is None else ref.at[key.slice], reach, size)

        def logits_tangent():
            """The tangent of the logits before score_mod and soft cap."""
            dk = load_keys(dx.key, p.head_size)
            products = [] if dq is None else [tile.dot_t(dq, k)]
            products += [] if dk is None else [tile.dot_t(q, dk)]
            terms = [sum(products) * p.scale] if products else []
            terms += [] if dx.bias is None else [dense(dx.bias)]
            return sum(terms)

        k = load_keys(x.key, p.head_size)
        visible = mask.visible(key, dense(x.mask), masked)
        mod = tile.score_mod(x, row, key, pair)
        # [bq, bk]
        prob, ds, _ = tile.weighted(p, q, k, lse, dense(x.bias), visible, mod, logits_tangent)
        pairs = [(ds, x.value)] if logits_move else []
        pairs += [] if dx.value is None else [(prob, dx.value)]
        for weights, ref in pairs:
            values = load_keys(ref, p.value_size)
            weights = tile.drop(p, x.seeds, (), row, key, weights)
            do = do + tile.dot(weights.astype(values.dtype), values)
        return do, dlse + jnp.sum(ds, axis=1)

    start = jnp.zeros(do_out.shape, jnp.float32), jnp.zeros(lse.shape, jnp.float32)
    do, dlse = blocks.visit(step, start)
    factor, sinks_dlse = (tile.load(ref, row.inside) for ref in (rows.factor, dlse_ref))
    dlse = jnp.where(lse == jnp.inf, 0.0, dlse * factor + sinks_dlse)
    columns = tile.head(o_ref, p.value_size)
    o = tile.load(o_ref, row.inside, columns).astype(jnp.float32)
    do = do * (factor / p.kept)[:, None] - dlse[:, None] * o
    tile.store(do_out, do, row.inside, columns)
    tile.store(dlse_out, dlse, row.inside)


def _load(ref, rows, size: int):
    """Loads a tile of heads of this size, with 0 outside of `rows`; None where there is no ref."""
    return None if ref is None else tile.load(ref, rows, tile.head(ref, size))


# ---- decoding ----


def decode(
    problem: Problem,
    tiles: DecodeTiles,
    x: Operands,
    table: PageTable | None = None,
    scales=(None, None),
):
    """What `forward` returns, by split-KV decoding: a program owns one split of the keys of one
    key/value head, and all rows of the tokens that see them. With a `table` keys and values are
    pages, which have `scales` where they are in 8 bits."""
    p, rows = split_kv.pack_gqa(problem, mods.flatten(x))
    index = lambda part, k, b: dict(b=b, B=b, n=k, k=k, p=part)
    shape = tiles.num_splits, p.heads, p.batch
    grid = tile.grid(p, tiles, shape, index, t=tiles.block_q, T=problem.queries, p=None)
    specs = grid.operands(rows)
    table_spec = None
    if table is not None:
        numbers = pl.BlockSpec((None, table.numbers.shape[1]), lambda part, k, b: (b, 0))
        table_spec = dataclasses.replace(table, numbers=numbers)
        specs = specs._replace(key=_head_pages(table, x.key), value=_head_pages(table, x.value))
    scale_specs = tuple(None if a is None else _head_pages(table, a) for a in scales)
    stats = jax.ShapeDtypeStruct((p.batch, tiles.num_splits, p.heads, p.queries), jnp.float32)
    o = jax.ShapeDtypeStruct(
        (p.batch, tiles.num_splits, p.heads, p.queries, p.value_size), jnp.float32
    )
    o, m, l = grid.launch(
        *(_decode_kernel, rows, (table, table_spec), (scales, scale_specs)),
        out=[(o, grid.spec("bpntv")), *[(stats, grid.spec("bpnt"))] * 2],
        name="flash_attention_decode",
        specs=specs,
        tokens=problem.queries,
    )
    return split_kv.merge_splits(problem, x, o, online_softmax.SoftmaxState(m, l), problem.log_base)


def _head_pages(table: PageTable, x) -> pl.BlockSpec:
    """All pages of one key/value head, of keys, values or scales."""
    sizes, arrange = table.layout.sizes(x.shape), table.layout.arrange
    shape = {axis: power_of_two(n) if axis == "H" else n for axis, n in sizes.items()}
    index = lambda part, k, b: arrange(**dict.fromkeys(sizes, 0) | dict(K=k))
    return pl.BlockSpec(arrange(**shape | dict(K=None)), index)


def _decode_kernel(
    x: Operands,
    table: PageTable | None,
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
        k_ref, v_ref = (_block(ref, table, key) for ref in (x.key, x.value))
        k, v = tile.keys_and_values(p, k_ref, v_ref, inside)
        k_scale, v_scale = (
            None if ref is None else tile.load(_block(ref, table, key), inside)[None]
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
            prob, v = prob * v_scale, v.astype(quantised.weights(q.dtype))
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


def _block(ref, table: PageTable | None, key: tile.Span):
    """The part of `ref` that has the keys or values of a block, or their scales: the ref of one
    head's rows, or with a table of its pages."""
    if table is None:
        return ref.at[key.slice]
    layout, last = table.layout.without_heads, table.numbers.shape[0] - 1
    sizes = layout.sizes(ref.shape)
    number = table.numbers[jnp.minimum(key.index // table.page, last)]
    at = dict(P=jnp.clip(number, 0, sizes["P"] - 1), C=key.index % table.page)
    if "H" not in sizes:
        return ref.at[layout.arrange(**at)]
    columns = jnp.arange(sizes["H"], dtype=jnp.int32)[None]
    at = {axis: i[:, None] for axis, i in at.items()} | dict(H=columns)
    # Pallas' interpreter takes no slice beside them
    return ref.at[tuple(jnp.broadcast_arrays(*layout.arrange(**at)))]
