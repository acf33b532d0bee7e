"""Forward mode, given lse: a program owns a tile of queries of one head, walks over the keys that
they see as dQ's does, and sums

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,   dS = scale (dQ K^T + Q dK^T).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.memory import PaddedRows, TileMemory, flat
from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, MmaTiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.launch import LANE, launch
from pallas_flash.kernels.mosaic.registers import load, per_row
from pallas_flash.kernels.mosaic.statistics import TangentRows
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled.online_softmax import RowLse

# By the code compiled and the clock, as forward.TILES: rows for all tangents at a time.
TILES = (
    MmaTiles(64, 64, 64, 64),
    MmaTiles(128, 128, 64, 32),
    MmaTiles(256, 256, 64, 16, swizzle=64),
)


class TangentInputs(NamedTuple):
    """The kernel's arrays, and what the mask comes to for rows, tiles and blocks."""

    queries: PaddedRows  # q, and dq if there is one
    keys: PaddedRows  # k, v, and dk and dv if there are
    o: jax.Array  # [B, whole tiles of T, N * value_width]
    dbias: jax.Array | None  # of logits.pad_bias
    rows: TangentRows
    blocks: jax.Array | block_info.VisitedBlocks | None  # of block_info.by_query_tile
    logits: logits.Arrays


def scratch(p: Problem, t: MmaTiles, has: tuple[str, ...] = ("dq", "dk", "dv")) -> TileMemory:
    """The shared memory of a program, beside the tangents that a call has."""
    queries = dict(q=t.width, dq=t.width)
    keys = dict(k=t.width, v=t.value_width, dk=t.width, dv=t.value_width)
    present = lambda widths: [n for name, n in widths.items() if name in ("q", "k", "v", *has)]
    return TileMemory.allocate(p, t, present(queries), present(keys))


def tangent(
    problem: Problem, tiles: AmpereTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse
):
    """The tangents of o and lse, without what the tangents of a score_mod's arrays add."""
    p, t = problem, tiles.tangent
    tangents = dict(dq=dx.query, dk=dx.key, dv=dx.value)
    has = tuple(name for name, array in tangents.items() if array is not None)
    inputs = _inputs(p, t, x, dx, rows, o, dlse)
    like = inputs.rows.lse
    do, dlse = launch(
        functools.partial(_kernel, problem=p, tiles=t, has=has),
        inputs,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (inputs.o, like)],
        warpgroups=1,
        scratch=scratch(p, t, has),
        name="flash_attention_tangent",
        semantics=LANE,
    )
    do = do.reshape(*do.shape[:2], p.heads, t.value_width)
    return do[:, : p.queries, :, : p.value_size], dlse[:, :, : p.queries]


def _inputs(
    p: Problem, t: MmaTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse
) -> TangentInputs:
    _, key_lengths = x.resolved_mask.lengths
    queries = (x.query, t.width), (dx.query, t.width)
    keys = (x.key, t.width), (x.value, t.value_width), (dx.key, t.width), (dx.value, t.value_width)
    present = lambda arrays: zip(*(pair for pair in arrays if pair[0] is not None), strict=True)
    o = jnp.pad(o, ((0, 0), (0, -p.queries % t.block_q), (0, 0), (0, t.value_width - p.value_size)))
    return TangentInputs(
        PaddedRows.make(*present(queries), t.block_q, None),
        PaddedRows.make(*present(keys), t.block_k, key_lengths),
        flat(o),
        logits.pad_bias(dx.bias, t.tiling),
        TangentRows.make(p, t.block_q, rows, dlse),
        block_info.by_query_tile(p, x, t.block_q, t.block_k),
        logits.arrays(p, x, t.tiling),
    )


def _kernel(
    program,
    x: TangentInputs,
    do_gmem,
    dlse_gmem,
    memory: TileMemory,
    *,
    problem: Problem,
    tiles: MmaTiles,
    has: tuple[str, ...],
):
    p, t = problem, tiles
    work = scheduler.query_tile(program, p, t)
    rows = pl.ds(work.tile * t.block_q, t.block_q)
    blocks = block_info.visited(x, work, p, t)
    head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, work.head)
    dbias = logits.head_bias(x.dbias, work.batch, work.head)
    mask = head.load_mask(work.batch, rows.start, t.block_q)
    row_values = x.rows.load(work.batch, work.head, rows, tile.LAYOUTS.row)
    ring = tile.CopyRing(memory.ring, memory.ring_full)
    load_keys = x.keys.loader(ring, work.batch, work.kv_head, blocks)

    x.queries.copy(work.tile, work.batch, work.head, memory.owned, memory.owned_full)
    load_keys(blocks.first)
    tile.wait(memory.owned_full)
    q, dq = (*memory.owned, None)[:2]  # in shared memory: registers hold the sums

    def step(n, sums, masked):
        do, dlse = sums
        k, v, *tangents = ring.wait(n)
        tangents = dict(zip([name for name in has if name != "dq"], tangents, strict=True))
        dk, dv = tangents.get("dk"), tangents.get("dv")
        load_keys(n + 1)
        s = tile.dot_t(tile.load(q), k)  # [bq, bk]
        at = head.tile(rows.start, blocks.index(n) * t.block_k, s.shape)
        prob, weight, back = head.probabilities(
            s, at, lambda: per_row(row_values.lse, s.shape), mask if masked else None
        )
        if dq is not None or dk is not None or dbias is not None:
            ds = None if dq is None else tile.dot_t(tile.load(dq), k)
            ds = ds if dk is None else tile.dot_t(tile.load(q), dk, ds)
            ds = head.tangent(weight, back, ds, None if dbias is None else dbias.load(at))
            dlse = dlse + jnp.sum(ds.before_dropout, axis=1)
            do = tile.dot(do, tile.as_left(ds.after_dropout.astype(x.queries.dtype)), v)
        if dv is not None:
            do = tile.dot(do, tile.as_left(prob.astype(x.queries.dtype)), dv)
        return do, dlse

    start = tile.zeros(t.block_q, t.value_width), tile.rows(t.block_q, 0.0)
    do, dlse = blocks.visit(step, start)

    columns = pl.ds(work.head * t.value_width, t.value_width)
    o = load(x.o.at[work.batch, rows, columns], tile.LAYOUTS.tile).astype(jnp.float32)
    do, dlse = row_values.finish(p, do, dlse, o)
    tile.store(do_gmem.at[work.batch, rows, columns], do.astype(x.queries.dtype))
    tile.store(dlse_gmem.at[work.batch, work.head, rows], dlse)
