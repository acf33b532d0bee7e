"""The backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2), without atomics: each program
sums what it owns, so the bits are the same each time.

In one kernel a program owns a tile of keys and sums dK and dV over the queries; in another it owns
a tile of queries and sums dQ over the keys; with a bias there is a third, which owns a tile of the
bias's gradient. Each computes P again from the log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, tile
from pallas_flash.kernels.triton import tables
from pallas_flash.kernels.triton.forward import by_query_tile, program_head, program_rows
from pallas_flash.kernels.triton.tuning import AllTiles, Tiles
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import schedule


def backward(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k, v, the bias, and the arrays that a score_mod reads."""
    dk, dv = _dkv(problem, tiles.dkv, x, do, lse, delta)
    bias, captured = of_scores(problem, tiles, x, lse, do, delta)
    dq = _dq(problem, tiles.dq, x, do, lse, delta)
    return Gradients(dq, dk, dv, bias, captured=captured)


def of_scores(problem: Problem, tiles: AllTiles, x: Operands, lse, do, delta) -> tuple:
    """The gradients of the bias, None without one, and of the arrays that a score_mod reads."""
    args = problem, tiles.dq, x, do, lse, delta
    bias = None if x.bias is None else _dbias(*args)
    return bias, () if x.score is None else tables.gradients(*args)


def _dkv(p: Problem, tiles: Tiles, x: Operands, do, lse, delta):
    blocks = schedule.query_blocks(x.resolved_mask, p.queries, tiles.block_q, tiles.block_k)
    x = mods.with_visited_blocks(p, tiles, x, by_key=True)
    shared = blocks.shape[0] == 1
    index = lambda j, k, b: dict(b=b, B=b, n=k, k=k, s=j)
    shape = schedule.ceil_div(p.keys, tiles.block_k), p.kv_heads, p.batch
    grid = tile.grid(p, tiles, shape, index, s=tiles.block_k, n=p.group)
    block_spec = pl.BlockSpec((None, None, 4), lambda j, k, b: (0 if shared else b, j, 0))
    return grid.launch(
        *(_dkv_kernel, x, (do, "btnv"), (lse, "bnt"), (delta, "bnt"), (blocks, block_spec)),
        out=[(x.key.dtype, "bskh"), (x.value.dtype, "bskv")],
        name="flash_attention_dkv",
    )


def _dkv_kernel(
    x: Operands,
    do_ref,
    lse_ref,
    delta_ref,
    blocks_ref,
    dk_ref,
    dv_ref,
    *,
    problem: Problem,
    tiles: Tiles,
):
    p = problem
    key = tile.span(pl.program_id(0), tiles.block_k, p.keys)
    k, v = tile.keys_and_values(p, x.key, x.value, key.inside)  # [bk, H], [bk, Hv]
    b, head = pl.program_id(2), pl.program_id(1) * p.group
    refs = tile.GradientRows(x.query, do_ref, lse_ref, delta_ref)
    interval = schedule.Blocks.from_table(blocks_ref)
    visited = None if x.resolved_mask.mask_mod is None else x.resolved_mask.mask_mod.block_types

    def query_head(g, carry):
        pair = b, head + g
        blocks = interval
        if visited is not None:
            blocks = schedule.Blocks.from_row(visited, *([g] if len(visited.shape) == 2 else []))

        def step(t, carry, masked):
            dk, dv = carry
            row = tile.span(blocks.index(t), tiles.block_q, p.queries, bounded=masked)
            mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
            rows = refs.at(row, g).load(p, row, mask.valid(row, masked))
            visible = mask.visible(key, tile.dense(x.mask, (g,), row, key), masked)
            drop = functools.partial(tile.drop, p, x.seeds, (g,), row, key)
            mod = tile.score_mod(x, row, key, pair)
            # [bq, bk]
            prob, ds = tile.gradients(
                p, rows, k, v, tile.dense(x.bias, (g,), row, key), visible, drop, mod
            )
            return dk + tile.t_dot(ds.astype(k.dtype), rows.q), dv + tile.t_dot(
                prob.astype(k.dtype), rows.do
            )

        return blocks.visit(step, carry)

    zeros = jnp.zeros(dk_ref.shape, jnp.float32), jnp.zeros(dv_ref.shape, jnp.float32)
    dk, dv = schedule.loop(0, p.group, query_head, zeros)
    tile.store(dk_ref, dk * p.scale, key.inside, tile.head(dk_ref, p.head_size))
    tile.store(dv_ref, dv, key.inside, tile.head(dv_ref, p.value_size))


def _dq(p: Problem, tiles: Tiles, x: Operands, do, lse, delta):
    x = mods.with_visited_blocks(p, tiles, x)
    (dq,) = by_query_tile(p, tiles).launch(
        *(_dq_kernel, x, (do, "btnv"), (lse, "bnt"), (delta, "bnt")),
        out=[(x.query.dtype, "btnh")],
        name="flash_attention_dq",
    )
    return dq


def _dq_kernel(x: Operands, do_ref, lse_ref, delta_ref, dq_ref, *, problem: Problem, tiles: Tiles):
    p = problem
    row, pair = program_rows(p, tiles), program_head()
    mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
    blocks = mask.blocks(tiles.block_k)
    rows = tile.GradientRows(x.query, do_ref, lse_ref, delta_ref).load(
        p, row, mask.valid(row, True)
    )

    def step(t, dq, masked):
        key = tile.span(blocks.index(t), tiles.block_k, p.keys, bounded=masked)
        k, v = tile.keys_and_values(
            p, x.key.at[key.slice], x.value.at[key.slice], mask.reach(key, masked)
        )
        visible = mask.visible(key, tile.dense(x.mask, (), row, key), masked)
        drop = functools.partial(tile.drop, p, x.seeds, (), row, key)
        mod = tile.score_mod(x, row, key, pair)
        # [bq, bk]
        _, ds = tile.gradients(p, rows, k, v, tile.dense(x.bias, (), row, key), visible, drop, mod)
        return dq + tile.dot(ds.astype(k.dtype), k)

    dq = blocks.visit(step, jnp.zeros(dq_ref.shape, jnp.float32))
    tile.store(dq_ref, dq * p.scale, row.inside, tile.head(dq_ref, p.head_size))


def _dbias(p: Problem, tiles: Tiles, x: Operands, do, lse, delta):
    """The gradient of the bias. A program owns a tile of it and sums dS over the axes that the bias
    broadcasts. A bias without queries or keys is small: there each program sums one batch row
    and head, and these sums are added afterwards."""
    (b, n, t, s), x = p.bias, mods.flatten(x)
    B, N = (p.batch, p.heads) if t == 1 or s == 1 else (b, n)
    all_or_one = lambda programs, size: 1 if programs > 1 else size
    cut = dict(b=all_or_one(B, p.batch), n=all_or_one(N, p.heads), k=all_or_one(N, p.kv_heads))
    shape = schedule.ceil_div(s, tiles.block_k), schedule.ceil_div(t, tiles.block_q), N, B
    index = lambda j, i, n, b: dict(b=b, B=b, n=n, k=n // p.group if N > 1 else 0)
    grid = tile.grid(p, tiles, shape, index, **cut, B=cut["b"])
    summed = [axis for axis, (whole, parts) in enumerate(((b, B), (n, N))) if whole < parts]
    out = jax.ShapeDtypeStruct((B, N, t, s), jnp.float32 if summed else x.bias.dtype)
    index = lambda j, i, n, b: dict(b=b, n=n, t=i, s=j)
    of_bias = tile.grid(p, tiles, shape, index, t=tiles.block_q, s=tiles.block_k)
    (dbias,) = grid.launch(
        *(_dbias_kernel, x, (do, "btnv"), (lse, "bnt"), (delta, "bnt")),
        out=[(out, of_bias.spec("bnts", out))],
        name="flash_attention_dbias",
    )
    return jnp.sum(dbias, summed, keepdims=True).astype(x.bias.dtype) if summed else dbias


def _dbias_kernel(
    x: Operands, do_ref, lse_ref, delta_ref, dbias_ref, *, problem: Problem, tiles: Tiles
):
    p, (B, _, N, _) = problem, x.query.shape
    program_j, program_i, first_n, first_b = map(pl.program_id, range(4))
    broadcast_q, broadcast_k = p.bias[2] == 1, p.bias[3] == 1
    refs = tile.GradientRows(x.query, do_ref, lse_ref, delta_ref)

    def query_tile(b, n, i, dbias):
        row = tile.span(i, tiles.block_q, p.queries)
        mask = tile.mask(x.resolved_mask, row, p.queries, b, (first_b + b, first_n + n))
        rows = refs.at(row, b, n).load(p, row, mask.valid(row, True))

        def step(j, dbias):
            key = tile.span(j, tiles.block_k, p.keys)
            at = (b, key.slice, lax.div(n, jnp.int32(p.group)) if N > 1 else tile.FIRST)
            k, v = tile.keys_and_values(p, x.key.at[at], x.value.at[at], mask.reach(key, True))
            visible = mask.visible(key, tile.dense(x.mask, (b, n), row, key), True)
            drop = functools.partial(tile.drop, p, x.seeds, (b, n), row, key)
            mod = tile.score_mod(x, row, key, (first_b + b, first_n + n), b)
            _, ds = tile.gradients(
                p, rows, k, v, tile.dense(x.bias, (b, n), row, key), visible, drop, mod
            )
            ds = jnp.sum(ds, 0, keepdims=True) if broadcast_q else ds
            return dbias + (jnp.sum(ds, 1, keepdims=True) if broadcast_k else ds)

        blocks = mask.blocks(tiles.block_k)
        first, last = blocks.first, blocks.last
        if not broadcast_k:
            first, last = jnp.maximum(first, program_j), jnp.minimum(last, program_j + 1)
        return schedule.loop(first, last, step, dbias)

    def head(b, n, dbias):
        if not broadcast_q:
            return query_tile(b, n, program_i, dbias)
        return schedule.loop(
            0,
            schedule.ceil_div(p.queries, tiles.block_q),
            lambda i, d: query_tile(b, n, i, d),
            dbias,
        )

    dbias = jnp.zeros(
        (1 if broadcast_q else tiles.block_q, 1 if broadcast_k else tiles.block_k), jnp.float32
    )
    dbias = schedule.loop(
        0, B, lambda b, d: schedule.loop(0, N, lambda n, d: head(b, n, d), d), dbias
    )
    rows = None if broadcast_q else tile.span(program_i, tiles.block_q, p.queries).inside
    keys = None if broadcast_k else tile.span(program_j, tiles.block_k, p.keys).inside
    tile.store(dbias_ref, dbias, rows, keys)
