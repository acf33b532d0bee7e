"""Split-KV decoding: a program owns one split of the keys of one key/value head, and all rows of
the tokens that see them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.kernels.triton.tuning import DecodeTiles
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import PageTable
from pallas_flash.tiled import online_softmax, split_kv
from pallas_flash.tiled.quantised import weights


def forward(
    problem: Problem,
    tiles: DecodeTiles,
    x: Operands,
    table: PageTable | None = None,
    scales=(None, None),
):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a `table` keys
    and values are pages, which have `scales` where they are in 8 bits."""
    p, rows = split_kv.pack_gqa(problem, mods.flatten(x))
    index = lambda part, k, b: dict(b=b, B=b, n=k, k=k, p=part)
    shape = tiles.num_splits, p.heads, p.batch
    grid = tile.grid(p, tiles, shape, index, t=tiles.block_q, T=problem.queries, p=None)
    specs = grid.operands(rows)
    table_spec = None
    if table is not None:
        numbers = pl.BlockSpec((None, table.numbers.shape[1]), lambda part, k, b: (b, 0))
        table_spec = dataclasses.replace(table, numbers=numbers)
        specs = specs._replace(
            key=_pages_of_head(table, x.key), value=_pages_of_head(table, x.value)
        )
    scale_specs = tuple(None if a is None else _pages_of_head(table, a) for a in scales)
    stats = jax.ShapeDtypeStruct((p.batch, tiles.num_splits, p.heads, p.queries), jnp.float32)
    o = jax.ShapeDtypeStruct(
        (p.batch, tiles.num_splits, p.heads, p.queries, p.value_size), jnp.float32
    )
    o, m, l = grid.launch(
        *(_kernel, rows, (table, table_spec), (scales, scale_specs)),
        out=[(o, grid.spec("bpntv")), *[(stats, grid.spec("bpnt"))] * 2],
        name="flash_attention_decode",
        specs=specs,
        tokens=problem.queries,
    )
    return split_kv.merge_splits(problem, x, o, online_softmax.SoftmaxState(m, l), problem.log_base)


def _pages_of_head(table: PageTable, x) -> pl.BlockSpec:
    """All pages of one key/value head, of keys, values or scales."""
    sizes, arrange = table.layout.sizes(x.shape), table.layout.arrange
    shape = {axis: power_of_two(n) if axis == "H" else n for axis, n in sizes.items()}
    index = lambda part, k, b: arrange(**dict.fromkeys(sizes, 0) | dict(K=k))
    return pl.BlockSpec(arrange(**shape | dict(K=None)), index)


def _kernel(
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


def _block(ref, table: PageTable | None, key: tile.Span):
    """The part of `ref` that has the keys or values of a block, or their scales: the ref of one
    head's rows, or with a table of its pages."""
    if table is None:
        return ref.at[key.slice]
    layout, last = table.layout.of_head, table.numbers.shape[0] - 1
    sizes = layout.sizes(ref.shape)
    number = table.numbers[jnp.minimum(key.index // table.page, last)]
    at = dict(P=jnp.clip(number, 0, sizes["P"] - 1), C=key.index % table.page)
    if "H" not in sizes:
        return ref.at[layout.arrange(**at)]
    columns = jnp.arange(sizes["H"], dtype=jnp.int32)[None]
    at = {axis: i[:, None] for axis, i in at.items()} | dict(H=columns)
    # Pallas' interpreter takes no slice beside them
    return ref.at[tuple(jnp.broadcast_arrays(*layout.arrange(**at)))]
