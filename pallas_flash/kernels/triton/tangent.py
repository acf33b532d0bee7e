"""Forward mode, given lse: a program owns a tile of queries, walks over the keys as the forward
does, and sums

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,   dS = scale (dQ K^T + Q dK^T).
"""

import jax.numpy as jnp

from pallas_flash.kernels.pallas_call import mods, tile
from pallas_flash.kernels.triton.forward import by_query_tile, program_head, program_rows
from pallas_flash.kernels.triton.tuning import AllTiles, Tiles
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.online_softmax import RowLse


def tangent(problem: Problem, tiles: AllTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse):
    """The tangents of o and lse, without the part of the arrays that a score_mod reads."""
    p, t = problem, tiles.tangent
    x, dx = mods.with_block_lists(p, t, x), dx._replace(sinks=None, captured=())
    grid = by_query_tile(p, t)
    row, specs = grid.spec("bnt"), grid.operands(x)
    of = lambda name: None if getattr(dx, name) is None else getattr(specs, name)
    of_tangents = {name: of(name) for name in ("query", "key", "value", "bias")}
    arrays = (dx, Gradients(**of_tangents)), (rows, RowLse(row, row)), (o, "btnv"), (dlse, "bnt")
    out = [(o.dtype, "btnv"), (dlse.dtype, "bnt")]
    return grid.launch(_kernel, x, *arrays, out=out, name="flash_attention_tangent")


def _kernel(
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
