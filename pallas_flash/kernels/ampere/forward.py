"""The forward of FlashAttention-2 (arXiv:2307.08691, algorithm 1).

A program owns a tile of queries of one head, in registers, and walks over the blocks of keys that
they see; the next block is copied under the products of this one. Of wide heads two warpgroups each
have half of the columns of q, k, v and o, and add up their parts of S.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import decoding
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.memory import PaddedRows, flat, pad
from pallas_flash.kernels.mma.tile_sizes import AmpereTiles, Gpu, MmaTiles, Row, padded_length
from pallas_flash.kernels.mosaic import block_info, logits, scheduler, statistics
from pallas_flash.kernels.mosaic.launch import LANE, launch, shared_matrix
from pallas_flash.kernels.mosaic.registers import load, per_row
from pallas_flash.kernels.mosaic.statistics import ForwardInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule


def _waits_for_shared_memory(gpu: Gpu) -> bool:
    return gpu.has_fast_products() and gpu.capability != 9.0  # an H100 does not


# Head sizes, queries and keys of a block; what was decided by the code compiled for an A100, an RTX
# 4090 and an RTX 5090, its registers, spills, shared memory and instructions, timed on an H100
# alone: results.md#by-mma-by-the-clock.
TILES = (
    # these fill the registers
    Row(MmaTiles(64, 64, 128, 64), spills_beside=("ids", "dropout")),
    # for an mma a warp that owns twice the rows reads half as much shared memory
    Row(MmaTiles(64, 64, 128, 32), is_for=_waits_for_shared_memory),
    Row(MmaTiles(64, 64, 64, 64)),
    Row(MmaTiles(128, 128, 128, 32), is_for=_waits_for_shared_memory),
    Row(MmaTiles(128, 128, 64, 64)),
    # with one stage two programs fit into 99 KB
    Row(MmaTiles(128, 128, 64, 64, stages=1)),
    Row(MmaTiles(192, 128, 64, 32)),
    # a narrow swizzle saves registers of addresses
    Row(MmaTiles(256, 256, 64, 32, swizzle=64)),
    Row(MmaTiles(256, 256, 64, 32, stages=1, swizzle=64)),
    # the registers of one warpgroup do not hold o
    Row(MmaTiles(512, 512, 64, 32, warpgroups=2, swizzle=64)),
    Row(MmaTiles(512, 512, 64, 16, warpgroups=2, swizzle=64)),
)


class ForwardMemory(NamedTuple):
    """The shared memory of a program, and with TMA its mbarriers; an array has the columns of one
    warpgroup, then of another."""

    q: Any  # [block_q, width]; None: registers hold it
    k: Any  # [warpgroups * stages, block_k, width / warpgroups]
    v: Any  # [warpgroups * stages, block_k, value_width / warpgroups]
    scores: Any  # of tile.SumOfParts; None with one warpgroup
    q_full: Any
    kv_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: MmaTiles) -> "ForwardMemory":
        matrix = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        slots = t.warpgroups * t.stages
        return cls(
            q=matrix(t.block_q, t.width) if t.copies_q else None,
            k=matrix(slots, t.block_k, t.width // t.warpgroups),
            v=matrix(slots, t.block_k, t.value_width // t.warpgroups),
            scores=tile.parts_of_sum(t.block_q, t.block_k) if t.warpgroups > 1 else None,
            q_full=plgpu.Barrier() if t.tma and t.copies_q else None,
            kv_full=plgpu.Barrier(num_arrivals=2, num_barriers=slots) if t.tma else None,
        )


def forward(problem: Problem, tiles: AmpereTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    logits are in base e."""
    if tiles.decode is not None:
        return decoding.decode(problem, tiles.decode, x)
    p, t = problem, tiles.forward
    length = schedule.ceil_div(p.queries, t.block_q) * t.block_q
    fields = jax.tree.leaves(statistics.types(p, t.block_q))
    o_type = jax.ShapeDtypeStruct((p.batch, length, p.heads * t.value_width), x.query.dtype)
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        _inputs(p, t, x),
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[o_type, *fields],
        warpgroups=t.warpgroups,
        scratch=ForwardMemory.allocate(p, t),
        name="flash_attention_forward",
        semantics=LANE,
    )
    o = o.reshape(p.batch, length, p.heads, t.value_width)[:, : p.queries, :, : p.value_size]
    return o, statistics.results(p, stats)


def _inputs(p: Problem, t: MmaTiles, x: Operands) -> ForwardInputs:
    _, key_lengths = x.resolved_mask.lengths
    if t.copies_q:
        q = PaddedRows.make([x.query], [t.width], t.block_q, None)
    else:
        rows = padded_length(p.queries, t.block_q)
        q = PaddedRows((flat(pad(x.query, rows, t.width)),), None)
    widths = t.width, t.value_width
    keys = PaddedRows.make([x.key, x.value], widths, t.block_k, key_lengths)
    return ForwardInputs.make(p, t, x, q, keys)


def _kernel(program, x: ForwardInputs, o_gmem, *outputs, problem: Problem, tiles: MmaTiles):
    *stats_gmem, memory = outputs
    p, t = problem, tiles
    part = lax.axis_index("warpgroup") if t.warpgroups > 1 else 0
    work = scheduler.query_tile(program, p, t)
    first_row = work.tile * t.block_q
    rows = pl.ds(first_row, t.block_q)
    part_of = lambda head: head * t.warpgroups + part
    columns = lambda width: pl.ds(
        part_of(work.head) * (width // t.warpgroups), width // t.warpgroups
    )
    blocks = block_info.visited(x, work, p, t)
    head = logits.for_head(p, tile.LAYOUTS, x.logits, work.batch, work.head)
    mask = head.load_mask(work.batch, first_row, t.block_q)
    kv = tile.CopyRing((memory.k, memory.v), memory.kv_full, parts=t.warpgroups, part=part)
    load_kv = x.keys.loader(kv, work.batch, part_of(work.kv_head), blocks)
    sum_parts = tile.SumOfParts(memory.scores, part)

    if t.copies_q:
        x.q.copy(work.tile, work.batch, work.head, [memory.q], memory.q_full)
    for n in range(t.stages - 1):
        load_kv(blocks.first + n)
    if t.copies_q:
        tile.wait(memory.q_full)
        q = tile.load(memory.q) if t.keeps_q else None
    else:
        q = load(x.q.arrays[0].at[work.batch, rows, columns(t.width)], tile.LHS)

    def step(n, carry, masked):
        o, stats = carry
        k, v = kv.next(n, lambda ahead: load_kv(n + ahead))
        s = sum_parts(n, tile.dot_t(tile.load(memory.q) if q is None else q, k))  # [bq, bk]
        at = head.tile(first_row, blocks.index(n) * t.block_k, s.shape)
        s, scale = head.modify(s, at)
        if masked:
            s = jnp.where(mask.visible(at), s, -jnp.inf)
        prob, alpha, stats = online_softmax.step(s, stats, p.log_base, scale)
        o = o * per_row(alpha, o.shape)
        prob = head.drop(prob, at).astype(x.q.dtype)
        return tile.dot(o, tile.as_left(prob), v), stats

    sink = None if x.sinks is None else x.sinks[work.head]
    start = online_softmax.start(tile.rows(t.block_q, 0.0), p.log_base, sink, p.max_logits)
    o, stats = blocks.visit(step, (tile.zeros(t.block_q, t.value_width // t.warpgroups), start))

    o = online_softmax.finish(o, stats.l, p.kept).astype(x.q.dtype)
    tile.store(o_gmem.at[work.batch, rows, columns(t.value_width)], o)

    def store_statistics():
        values = jax.tree.leaves(statistics.finish(p, stats))
        for gmem, value in zip(stats_gmem, values, strict=True):
            tile.store(gmem.at[work.batch, work.head, rows], value)

    pl.when(part == 0)(store_statistics)  # both have the same
