"""The gradients of the tables that a score_mod reads: a program owns up to 128 entries of a table,
for one batch row and head. Where these read a single entry, a program owns the part of its gradient
that comes from a tile of queries."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.kernels.triton.tuning import Tiles
from pallas_flash.mods import captured
from pallas_flash.mods.captured import Read
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

ENTRIES = 128  # entries at most


def gradients(p: Problem, tiles: Tiles, x: Operands, do, lse, delta) -> tuple:
    """The gradient of each table: a sum over all pairs that read an entry, always in one order."""
    totals = [jnp.zeros_like(table) for table in x.score.tables]
    number = 0
    for read, (index, _) in zip(
        x.score.mod.reads, x.score.captured_by_head(p.batch, p.heads), strict=True
    ):
        if read.array < len(totals):
            sums = _sums(p, tiles, mods.flatten(x), do, lse, delta, read, number)
            total = _together(sums, index, read, totals[read.array].shape)
            totals[read.array] = totals[read.array] + total.astype(totals[read.array].dtype)
            number += 1
    return tuple(totals)


def _together(sums, index: tuple, read: Read, shape: tuple[int, ...]):
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


def _sums(p: Problem, tiles: Tiles, x: Operands, do, lse, delta, read: Read, number: int):
    """The sums [B, N, entries of the axes that differ] for read `number` of the tables."""
    shape = x.score.mod.arrays[read.array].aval.shape
    entries = math.prod(shape[axis] for axis in read.axes[1])
    size = min(ENTRIES, power_of_two(entries)) if entries > 1 else 1  # of a program
    programs = (
        schedule.ceil_div(entries, size)
        if entries > 1
        else schedule.ceil_div(p.queries, tiles.block_q)
    )
    index = lambda e, n, b: dict(b=b, B=b, n=n, k=n // p.group)
    out = jax.ShapeDtypeStruct((p.batch, p.heads, max(entries, programs)), jnp.float32)
    (sums,) = tile.grid(p, tiles, (programs, p.heads, p.batch), index).launch(
        *(_kernel, x, (do, "btnv"), (lse, "bnt"), (delta, "bnt")),
        out=[(out, pl.BlockSpec((None, None, size), lambda e, n, b: (b, n, e)))],
        name="flash_attention_dtable",
        **dict(read=read, number=number, entries=entries),
    )
    return sums if entries > 1 else jnp.sum(sums, axis=2, keepdims=True)


def _kernel(
    x: Operands,
    do_ref,
    lse_ref,
    delta_ref,
    sums_ref,
    *,
    problem: Problem,
    tiles: Tiles,
    read: Read,
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


def _entry(mod: mods.TileMod, read: Read):
    """The number of the entry that each pair of a tile reads, along the axes that differ."""
    number = mod.bound.mod.reads.index(read)
    index, _ = mod.bound.read_captured(mod.read, *mod.indices)[number]
    differ = read.axes[1]
    shape = mod.bound.mod.arrays[read.array].aval.shape
    return captured.flat_index([index[axis] for axis in differ], [shape[axis] for axis in differ])
