"""The backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2) in two kernels, which compute P
again from lse. One owns tiles of queries and sums dQ over the keys, one owns tiles of keys and sums
dK and dV over the queries. Nothing is added in any other order, so gradients are deterministic."""

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.memory import PaddedRows, TileMemory
from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, Gpu, MmaTiles, Row
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.elements import round_up
from pallas_flash.kernels.mosaic.launch import LANE, launch
from pallas_flash.kernels.mosaic.registers import load, per_column, per_row
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import schedule

# Decided as forward.TILES.
DQ_TILES = (
    Row(MmaTiles(64, 64, 128, 32)),
    # a warp that owns twice the rows reads half as much shared memory for an mma
    Row(MmaTiles(128, 128, 128, 32), ("dropout",), Gpu.has_fast_products),
    Row(MmaTiles(128, 128, 128, 32, stages=1), ("dropout",), Gpu.has_fast_products),
    Row(MmaTiles(128, 128, 64, 32)),
    Row(MmaTiles(128, 128, 64, 32, stages=1)),
    Row(MmaTiles(256, 256, 64, 16, swizzle=64)),
    Row(MmaTiles(256, 256, 64, 16, stages=1, swizzle=64)),
)
_OWNS_KEYS = dict(block_k=64, owns_keys=True)
_SEPARATE = dict(separate_dk_dv=True, swizzle=64)
_TALL = dict(spills_beside=("dropout", "score"), is_for=Gpu.has_fast_products)
DKV_TILES = (
    Row(MmaTiles(64, 64, 32, block_k=128, owns_keys=True), **_TALL),
    Row(MmaTiles(64, 64, 64, **_OWNS_KEYS), ("ids",)),
    Row(MmaTiles(64, 64, 32, **_OWNS_KEYS)),
    # a warp with its keys and values in registers reads three fifths as much
    Row(MmaTiles(128, 128, 32, **_OWNS_KEYS, keeps_owned=True), **_TALL),
    Row(MmaTiles(128, 128, 32, **_OWNS_KEYS)),
    Row(MmaTiles(128, 128, 32, **_OWNS_KEYS, stages=1)),
    Row(MmaTiles(192, 128, 16, **_OWNS_KEYS)),
    # registers hold one of the sums
    Row(MmaTiles(256, 256, 16, **_OWNS_KEYS, **_SEPARATE)),
    Row(MmaTiles(256, 256, 16, **_OWNS_KEYS, **_SEPARATE, stages=1)),
)


class Output(NamedTuple):
    """A gradient [B, length, heads, size], which the kernel writes in whole tiles of rows, and with
    zeros up to a width."""

    length: int
    rows: int  # of a tile
    heads: int
    size: int
    width: int


def backward(problem: Problem, tiles: AmpereTiles, *operands) -> Gradients:
    """All gradients except of a bias and of the arrays that a score_mod reads."""
    return Gradients(dq(problem, tiles.dq, *operands), *dk_dv(problem, tiles.dkv, *operands))


def dq(p: Problem, t: MmaTiles, x: Operands, lse, do, delta):
    """dQ [B, T, N, H], by one kernel."""
    (dq,) = _launch(
        _dq_kernel,
        p,
        t,
        GradientInputs.make(PaddedRows.make, p, t, x, lse, do, delta),
        scheduler.query_programs(p, t.block_q),
        [Output(p.queries, t.block_q, p.heads, p.head_size, t.width)],
        "flash_attention_dq",
    )
    return dq


def dk_dv(p: Problem, t: MmaTiles, x: Operands, lse, do, delta) -> list[jax.Array]:
    """dK [B, S, K, H] and dV [B, S, K, Hv], by one kernel or one each."""
    inputs = GradientInputs.make(PaddedRows.make, p, t, x, lse, do, delta)
    programs = scheduler.key_programs(p, t.block_k)
    outputs = dict(
        dk=Output(p.keys, t.block_k, p.kv_heads, p.head_size, t.width),
        dv=Output(p.keys, t.block_k, p.kv_heads, p.value_size, t.value_width),
    )
    gradients = []
    for names in [("dk",), ("dv",)] if t.separate_dk_dv else [("dk", "dv")]:
        kernel, name = functools.partial(_key_kernel, names=names), "_".join(names)
        results = [outputs[name] for name in names]
        gradients += _launch(kernel, p, t, inputs, programs, results, f"flash_attention_{name}")
    return gradients


def _launch(
    kernel, p: Problem, t: MmaTiles, x: GradientInputs, programs: int, outputs: list, name: str
):
    """The gradients that the kernel writes, as each Output says."""
    arrays = launch(
        functools.partial(kernel, problem=p, tiles=t),
        x,
        programs=programs,
        out_type=[
            jax.ShapeDtypeStruct(
                (p.batch, round_up(out.length, out.rows), out.heads * out.width), p.dtype
            )
            for out in outputs
        ],
        warpgroups=1,
        scratch=TileMemory.allocate(p, t),
        name=name,
        semantics=LANE,
    )
    return [
        a.reshape(*a.shape[:2], out.heads, out.width)[:, : out.length, :, : out.size]
        for a, out in zip(arrays, outputs, strict=True)
    ]


def _dq_kernel(
    program, x: GradientInputs, dq_gmem, memory: TileMemory, *, problem: Problem, tiles: MmaTiles
):
    p, t = problem, tiles
    work = scheduler.query_tile(program, p, t)
    rows = pl.ds(work.tile * t.block_q, t.block_q)
    blocks = block_info.visited(x, work, p, t)
    head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, work.head)
    mask = head.load_mask(work.batch, rows.start, t.block_q)
    lse, delta = (
        load(ref.at[work.batch, work.head, rows], tile.LAYOUTS.row) for ref in (x.lse, x.delta)
    )
    ring = tile.CopyRing(memory.ring, memory.ring_full)
    load_kv = x.keys.loader(ring, work.batch, work.kv_head, blocks)

    x.queries.copy(work.tile, work.batch, work.head, memory.owned, memory.owned_full)
    if t.stages > 1:
        load_kv(blocks.first)
    tile.wait(memory.owned_full)
    q_smem, do = memory.owned
    q = tile.load(q_smem) if t.keeps_q else None  # registers hold no do beside it

    def step(n, dq, masked):
        k, v = ring.next(n, lambda ahead: load_kv(n + ahead))
        s = tile.dot_t(tile.load(q_smem) if q is None else q, k)  # [bq, bk]
        at = head.tile(rows.start, blocks.index(n) * t.block_k, s.shape)
        _, weight, back = head.probabilities(
            s, at, lambda: per_row(lse, s.shape), mask if masked else None
        )
        dp = tile.dot_t(tile.load(do), v)
        ds = head.gradient(weight, back, dp, per_row(delta, s.shape))
        return tile.dot(dq, tile.as_left(ds.astype(x.queries.dtype)), k)

    dq = blocks.visit(step, tile.zeros(t.block_q, t.width))
    _store(dq_gmem, work.batch, rows, work.head, dq * p.scale)


def _key_kernel(
    program, x: GradientInputs, *refs, names: tuple[str, ...], problem: Problem, tiles: MmaTiles
):
    """Sums the gradients of these names, dk and dv."""
    *outputs, memory = refs
    p, t = problem, tiles
    work = scheduler.key_tile(program, p, t)
    rows = pl.ds(work.tile * t.block_k, t.block_k)
    query_blocks = block_info.query_blocks(x, work, p, t)
    ring = tile.CopyRing(memory.ring, memory.ring_full)
    x.keys.copy(work.tile, work.batch, work.kv_head, memory.owned, memory.owned_full)
    if t.tma or t.keeps_owned:
        tile.wait(memory.owned_full)  # cp.async: else with the first block
    k, v = (tile.left_operand(x, t.keeps_owned) for x in memory.owned)

    def add_head(g, sums):
        blocks, position = query_blocks(g)
        head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, work.head + g)
        load_queries = x.queries.loader(ring, work.batch, work.head + g, blocks, position)
        if t.stages > 1:
            load_queries(blocks.first)

        def step(n, sums, masked):
            q, do = ring.next(position(n), lambda ahead: load_queries(n + ahead))
            first_row = blocks.index(n) * t.block_q
            by_row = work.batch, work.head + g, pl.ds(first_row, t.block_q)
            per_query = lambda ref: per_column(load(ref.at[by_row], tile.LAYOUTS.column), s.shape)
            mask = None
            if masked:
                mask = head.load_mask(work.batch, first_row, t.block_q, transposed=True)
            s = tile.dot_t(k(), q)  # S^T [bk, bq]
            at = head.tile(first_row, rows.start, s.shape, transposed=True)
            prob, weight, back = head.probabilities(s, at, lambda: per_query(x.lse), mask)
            new, left = dict(sums), lambda a: tile.as_left(a.astype(x.queries.dtype))
            if "dv" in sums:
                new["dv"] = tile.dot(sums["dv"], left(prob), do)
            if "dk" in sums:
                dp = tile.dot_t(v(), do)
                ds = head.gradient(weight, back, dp, per_query(x.delta))
                new["dk"] = tile.dot(sums["dk"], left(ds), q)
            return new

        return blocks.visit(step, sums)

    widths, factors = dict(dk=t.width, dv=t.value_width), dict(dk=p.scale, dv=1.0)
    zeros = {name: tile.zeros(t.block_k, widths[name]) for name in names}
    sums = schedule.loop(0, p.group, add_head, zeros)
    for name, gmem in zip(names, outputs, strict=True):
        _store(gmem, work.batch, rows, work.kv_head, sums[name] * factors[name])


def _store(ref, batch, rows: pl.Slice, head, sums):
    """Writes a tile's rows of a head."""
    width = sums.shape[1]
    tile.store(ref.at[batch, rows, pl.ds(head * width, width)], sums.astype(ref.dtype))
