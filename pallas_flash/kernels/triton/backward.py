"""The backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2), without atomics: each program
sums what it owns, so the bits are the same each time.

In one kernel a program owns a tile of keys and sums dK and dV over the queries; in another it owns
a tile of queries and sums dQ over the keys. With a bias there is a third, which owns a tile of the
bias's gradient; and one for each table that a score_mod reads, which owns entries of its gradient.
Each computes P again from the log-sum-exp.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.kernels.triton.forward import by_query_tile, program_head, program_rows
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles
from pallas_flash.mods import captured
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import schedule

TABLE_ENTRIES = 128  # that a program owns, at most


def backward(problem: Problem, tiles: TritonTiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k, v, the bias, and the arrays that a score_mod reads."""
    p, t, rows = problem, tiles, ((do, "btnv"), (lse, "bnt"), (delta, "bnt"))
    dk, dv = _dkv(p, t.dkv, x, rows)
    dbias = None if x.bias is None else _dbias(p, t.dq, x, rows)
    dtables = () if x.score is None else _dtables(p, t.dq, x, rows)
    dq = _dq(p, t.dq, x, rows)
    return Gradients(dq, dk, dv, dbias, captured=dtables)


def _dkv(p: Problem, tiles: Tiles, x: Operands, rows: tuple):
    blocks = schedule.query_blocks(x.resolved_mask, p.queries, tiles.block_q, tiles.block_k)
    x = mods.with_visited_blocks(p, tiles, x, by_key=True)
    shared = blocks.shape[0] == 1
    index = lambda j, k, b: dict(b=b, B=b, n=k, k=k, s=j)
    shape = schedule.ceil_div(p.keys, tiles.block_k), p.kv_heads, p.batch
    grid = tile.grid(p, tiles, shape, index, s=tiles.block_k, n=p.group)
    block_spec = pl.BlockSpec((None, None, 4), lambda j, k, b: (0 if shared else b, j, 0))
    return grid.launch(
        *(_dkv_kernel, x, *rows, (blocks, block_spec)),
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


def _dq(p: Problem, tiles: Tiles, x: Operands, rows: tuple):
    x = mods.with_visited_blocks(p, tiles, x)
    (dq,) = by_query_tile(p, tiles).launch(
        *(_dq_kernel, x, *rows),
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


def _dbias(p: Problem, tiles: Tiles, x: Operands, rows: tuple):
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
    bias_grid = tile.grid(p, tiles, shape, index, t=tiles.block_q, s=tiles.block_k)
    (dbias,) = grid.launch(
        *(_dbias_kernel, x, *rows),
        out=[(out, bias_grid.spec("bnts", out))],
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


def _dtables(p: Problem, tiles: Tiles, x: Operands, rows: tuple) -> tuple:
    """The gradient of each table that a score_mod reads: a sum over all pairs that read an entry,
    always in one order."""
    totals = [jnp.zeros_like(table) for table in x.score.tables]
    number = 0
    for read, (index, _) in zip(
        x.score.mod.reads, x.score.captured_by_head(p.batch, p.heads), strict=True
    ):
        if read.array < len(totals):
            sums = _dtable(p, tiles, mods.flatten(x), rows, read, number)
            total = _table_gradient(sums, index, read, totals[read.array].shape)
            totals[read.array] = totals[read.array] + total.astype(totals[read.array].dtype)
            number += 1
    return tuple(totals)


def _table_gradient(sums, index: tuple, read: captured.Read, shape: tuple[int, ...]):
    """The gradient of a table from the sums [B, N, entries of the axes that differ]."""
    same, differ = read.axes
    sizes = [shape[axis] for axis in same]
    place = jnp.broadcast_to(
        captured.flat_index([index[axis] for axis in same], sizes), sums.shape[:2]
    )
    here = (place[..., None] == jnp.arange(math.prod(sizes), dtype=jnp.int32)[None, None]).astype(
        sums.dtype
    )
    total = jnp.einsum("bnf,bne->fe", here, sums, precision="highest")
    return jnp.moveaxis(
        total.reshape([shape[axis] for axis in same + differ]), range(len(shape)), same + differ
    )


def _dtable(p: Problem, tiles: Tiles, x: Operands, rows: tuple, read: captured.Read, number: int):
    """The sums [B, N, entries of the axes that differ] for read `number` of the tables. A program
    owns up to TABLE_ENTRIES of them, for one batch row and head. Where these read a single entry,
    it owns the part of the sum that comes from a tile of queries."""
    shape = x.score.mod.arrays[read.array].aval.shape
    entries = math.prod(shape[axis] for axis in read.axes[1])
    size = min(TABLE_ENTRIES, power_of_two(entries)) if entries > 1 else 1  # of a program
    programs = (
        schedule.ceil_div(entries, size)
        if entries > 1
        else schedule.ceil_div(p.queries, tiles.block_q)
    )
    index = lambda e, n, b: dict(b=b, B=b, n=n, k=n // p.group)
    out = jax.ShapeDtypeStruct((p.batch, p.heads, max(entries, programs)), jnp.float32)
    (sums,) = tile.grid(p, tiles, (programs, p.heads, p.batch), index).launch(
        *(_dtable_kernel, x, *rows),
        out=[(out, pl.BlockSpec((None, None, size), lambda e, n, b: (b, n, e)))],
        name="flash_attention_dtable",
        **dict(read=read, number=number, entries=entries),
    )
    return sums if entries > 1 else jnp.sum(sums, axis=2, keepdims=True)


def _dtable_kernel(
    x: Operands,
    do_ref,
    lse_ref,
    delta_ref,
    sums_ref,
    *,
    problem: Problem,
    tiles: Tiles,
    read: captured.Read,
    number: int,
    entries: int,
):
    p, part, pair = (
        problem,
        pl.program_id(0) if entries > 1 else 0,
        (pl.program_id(2), pl.program_id(1)),
    )
    entry_span, end = tile.span(part, sums_ref.shape[0], entries), (part + 1) * sums_ref.shape[0]

    def query_tile(i, sums):
        row = tile.span(i, tiles.block_q, p.queries)
        mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
        refs = tile.GradientRows(
            *(ref.at[row.slice] for ref in (x.query, do_ref, lse_ref, delta_ref))
        )
        rows = refs.load(p, row, mask.valid(row, True))

        def key_tile(j, sums):
            key = tile.span(j, tiles.block_k, p.keys)
            mod = tile.score_mod(x, row, key, pair)
            entry = _entry(mod, read)
            first = jnp.maximum(jnp.min(entry), end - sums_ref.shape[0])
            last = jnp.minimum(jnp.max(entry) + 1, end)

            def added(_, sums):
                k, v = tile.keys_and_values(
                    p, x.key.at[key.slice], x.value.at[key.slice], mask.reach(key, True)
                )
                visible = mask.visible(key, tile.dense(x.mask, (), row, key), True)
                drop = functools.partial(tile.drop, p, x.seeds, (), row, key)
                bias = tile.dense(x.bias, (), row, key)
                *_, tables = tile.with_tables(p, rows, k, v, bias, visible, drop, mod)
                d = tables[number][2].astype(jnp.float32)
                at_entry = lambda e: jnp.sum(
                    jnp.where(jnp.broadcast_to(entry, d.shape) == e, d, 0.0)
                )
                add = lambda e, sums: sums + jnp.where(entry_span.index == e, at_entry(e), 0.0)
                return schedule.loop(first, last, add, sums)

            return schedule.loop(0, (first < last).astype(jnp.int32), added, sums)

        blocks = mask.blocks(tiles.block_k)
        return schedule.loop(blocks.first, blocks.last, key_tile, sums)

    sums = jnp.zeros(sums_ref.shape, jnp.float32)
    if entries > 1:
        sums = schedule.loop(0, schedule.ceil_div(p.queries, tiles.block_q), query_tile, sums)
    else:
        sums = query_tile(pl.program_id(0), sums)
    tile.store(sums_ref, sums, entry_span.inside)


def _entry(mod: mods.TileMod, read: captured.Read):
    """The number of the entry that each pair of a tile reads, along the axes that differ."""
    number = mod.bound.mod.reads.index(read)
    index, _ = mod.bound.read_captured(mod.read, *mod.indices)[number]
    differ = read.axes[1]
    shape = mod.bound.mod.arrays[read.array].aval.shape
    return captured.flat_index([index[axis] for axis in differ], [shape[axis] for axis in differ])
