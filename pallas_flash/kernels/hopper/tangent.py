"""Forward mode, given lse: a program owns 64 queries of one head for each of its consumers, walks
over the keys as the forward does, and sums

    dlse = sum_j P dS,   dO = sum_j (P dS) V + P dV - dlse O,   dS = scale (dQ K^T + Q dK^T).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.tile_sizes import ROWS, HopperTiles, QueryTiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler, tma
from pallas_flash.kernels.mosaic.block_info import TileMask
from pallas_flash.kernels.mosaic.launch import barriers, launch, shared_matrix
from pallas_flash.kernels.mosaic.registers import opaque, per_row
from pallas_flash.kernels.mosaic.statistics import TangentRows
from pallas_flash.kernels.mosaic.tma import RaggedRows
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import schedule
from pallas_flash.tiled.online_softmax import RowLse

# Rows for head sizes, decided as forward.TILES were. With all tangents there are twice as many
# blocks in shared memory as in the forward.
TILES = (
    QueryTiles(64, 64),
    QueryTiles(128, 128),
    QueryTiles(192, 192, block_k=32),
    QueryTiles(256, 256, warpgroups=1, block_k=32),
)


class WithTangent(NamedTuple):
    """An array, and its tangent if it has one."""

    x: Any
    dx: Any = None


class TangentInputs(NamedTuple):
    """The kernel's arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles
    and blocks."""

    q: WithTangent  # [B, T, N, H]
    keys: RaggedRows  # k [B, S, K, H], v [B, S, K, Hv], with tangents
    o: jax.Array  # [B, T, N, Hv]
    dbias: jax.Array | None  # of logits.pad_bias
    rows: TangentRows
    blocks: jax.Array | block_info.VisitedBlocks | None  # of block_info.by_query_tile
    logits: logits.Arrays


class TangentMemory(NamedTuple):
    """The shared memory of a program."""

    q: Any  # [warpgroups, 64, the larger width]; of o, and of its tangent, in the end
    dq: Any  # [warpgroups, 64, width]
    k: WithTangent  # [stages, block_k, width]
    v: tuple[WithTangent]  # [value_stages, block_k, value_width], in tile.k_subtiles
    dlse: Any  # [warpgroups, 64]
    q_full: Any
    dq_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: QueryTiles, tangents=(True, True, True)) -> "TangentMemory":
        """tangents: whether q, k and v have one."""
        block = functools.partial(shared_matrix, p.dtype)
        has_dq, has_dk, has_dv = tangents
        dq = block(t.warpgroups, ROWS, t.width, swizzle=t.swizzle)
        k = block(t.stages, t.block_k, t.width, swizzle=t.swizzle)
        (v,) = tile.subtile_blocks(p.dtype, t.value_stages, t.block_k, t.value_width, t.swizzle)
        return cls(
            q=block(t.warpgroups, ROWS, max(t.width, t.value_width), swizzle=t.swizzle),
            dq=dq if has_dq else None,
            k=WithTangent(k, k if has_dk else None),
            v=(WithTangent(v, v if has_dv else None),),
            dlse=plgpu.SMEM((t.warpgroups, ROWS), jnp.float32),
            q_full=barriers(t.warpgroups),
            dq_full=barriers(t.warpgroups) if has_dq else None,
            k_full=barriers(t.stages, 1 + has_dk),
            v_full=barriers(t.value_stages, 1 + has_dv),
        )


def tangent(
    problem: Problem, tiles: HopperTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse
):
    """The tangents of o and lse, but for what the tangents of a score_mod's arrays add."""
    p, t = problem, tiles.tangent
    tangents = tuple(a is not None for a in dx[:3])
    inputs = _inputs(p, t, x, dx, rows, o, dlse)
    do, dlse = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=scheduler.query_programs(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (inputs.o, inputs.rows.lse)],
        warpgroups=t.warpgroups + 1,
        scratch=TangentMemory.allocate(p, t, tangents),
        name="flash_attention_tangent",
    )
    return do[:, : p.queries, :, : p.value_size], dlse[:, :, : p.queries]


def _inputs(
    p: Problem, t: QueryTiles, x: Operands, dx: Gradients, rows: RowLse, o, dlse
) -> TangentInputs:
    _, key_lengths = x.resolved_mask.lengths
    q, k, v = map(WithTangent, x[:3], dx[:3])
    pad = lambda a: tma.pad(a, t.swizzle)
    return TangentInputs(
        jax.tree.map(pad, q),
        tma.padded_rows([k, v], t.block_k, key_lengths, t.swizzle),
        pad(o),
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
    memory: TangentMemory,
    *,
    problem: Problem,
    tiles: QueryTiles,
):
    t = tiles
    work = scheduler.query_tile(program, problem, t)
    ids = sync.BarrierIds.make(t)
    ring = lambda slots, full, first: sync.TmaRing(
        slots, jax.tree.map(lambda _: full, slots), first, t.warpgroups
    )
    k = ring(memory.k, memory.k_full, ids.first_ring)
    v = ring(memory.v, memory.v_full, ids.second_ring)

    def consume(wg):
        consumer = TangentConsumer(problem, t, x, memory, k, v, work, wg)
        rows = consumer.setup()
        consumer.finish(rows, *rows.compute(), do_gmem, dlse_gmem)

    def produce():
        count = tile.load_kv(x, work, tile.visited(x, work, problem, t), k, v, t)
        k.drain(count)
        v.drain(count)

    tile.specialize(t, consume, produce)


class Weights(NamedTuple):
    """The left operands of V and dV of a block, None without a product, and the sum of P dS by
    row."""

    p_ds: Any  # P dS, as dropout leaves it
    prob: Any  # P, as dropout leaves it
    dlse: Any


class TangentConsumer(tile.QueryConsumer):
    """A consumer that owns 64 queries, and sums the tangents of their o and lse."""

    @property
    def first_row(self) -> IntLike:
        return self.work.tile * self.tiles.block_q + self.wg * ROWS

    def rows(self, array, width: int):
        """The consumer's rows of q, dq, o or do."""
        rows = pl.ds(self.first_row, ROWS)
        return tma.head_rows(array, self.work.batch, rows, self.work.head, width)

    def setup(self) -> "QueryTile":
        """The consumer's queries, once they and their tangents are in shared memory."""
        x, memory, wg = self.x, self.memory, self.wg
        blocks = self.blocks()
        self.load_into_q(x.q.x)
        if x.q.dx is not None:
            dq = self.rows(x.q.dx, self.tiles.width)
            plgpu.copy_gmem_to_smem(dq, memory.dq.at[wg], memory.dq_full.at[wg])
        tangent_rows = x.rows.load(*self.by_row(self.first_row), tile.LAYOUTS.row)
        for full in jax.tree.leaves((memory.q_full, memory.dq_full)):
            plgpu.barrier_wait(full.at[wg])
        return QueryTile(self, blocks, tangent_rows, *self.load_logits(self.first_row))

    def load_into_q(self, array):
        """Begins to load the consumer's rows of q, or in the end of o."""
        q, full = self.memory.q.at[self.wg], self.memory.q_full.at[self.wg]
        plgpu.copy_gmem_to_smem(self.rows(array, q.shape[1]), q, full)

    def finish(self, rows: "QueryTile", do, dlse, do_gmem, dlse_gmem):
        """The epilogue: do and dlse, from their sums over the keys, leave by way of shared memory,
        do by that of q."""
        memory, wg, q = self.memory, self.wg, self.memory.q.at[self.wg]
        out = q.at[:, : self.tiles.value_width]
        plgpu.commit_smem()  # a barrier too: all warps have read q
        self.load_into_q(self.x.o)
        plgpu.barrier_wait(memory.q_full.at[wg])
        do, dlse = rows.tangent_rows.finish(self.problem, do, dlse, out[...].astype(jnp.float32))
        out[...] = do.astype(out.dtype)
        memory.dlse.at[wg][...] = dlse
        by_row = dlse_gmem.at[self.by_row(self.first_row)]
        tma.copy_out((q, self.rows(do_gmem, q.shape[1])), (memory.dlse.at[wg], by_row))


class QueryTile(NamedTuple):
    """A consumer's queries: the step over blocks of keys, which come by position."""

    consumer: TangentConsumer
    blocks: schedule.Blocks
    tangent_rows: TangentRows  # [64]
    head: logits.Logits
    mask: TileMask

    def compute(self):
        """The sums over the keys for do [64, value_width] and dlse [64]."""
        c, last = self.consumer, self.blocks.last - 1
        full = isinstance(last, int) and self.blocks.full_first == 0
        carry = tile.zeros(ROWS, c.tiles.value_width), self.first(0, not full)
        do, weights = self.blocks.without_first().visit(self.step, carry)
        c.v.wait(last)
        (do,) = tile.accumulate(lambda acc: self.begin_do(acc, weights, last), do)
        c.v.release(last)
        return do, weights.dlse

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.consumer.tiles.block_k

    def first(self, t: IntLike, masked: bool) -> Weights:
        dlse = tile.rows(0.0)
        body = lambda *accumulators: self.weights(t, masked, dlse, *accumulators)
        return self.rounded(tile.with_accumulators(body, self.shape, self.shape))

    def step(self, t: IntLike, carry, masked: bool):
        """dO += (P dS) V + P dV of the block before, under which block t's weights are computed."""
        do, before = carry

        def under_the_products(do_acc, *accumulators):
            begin = lambda: self.begin_do(do_acc, before, t - 1)
            return jax.tree.leaves(self.weights(t, masked, before.dlse, *accumulators, begin))

        zeros = tile.zeros(*self.shape)
        like, tree = jax.tree.flatten(
            Weights(*(None if x is None else zeros for x in before[:2]), before.dlse)
        )
        do, _, _, *weights = tile.overlap(under_the_products, (do, zeros, zeros), like)
        self.consumer.v.release(t - 1)
        return do, self.rounded(jax.tree.unflatten(tree, weights))

    def begin_do(self, acc, weights: Weights, t: IntLike) -> int:
        """Begins the products of block t's values; returns how many."""
        (v,) = self.consumer.v.block(t)
        pairs = [(weights.p_ds, v.x), (weights.prob, v.dx)]
        pairs = [(a, b) for a, b in pairs if a is not None]
        for a, b in pairs:
            tile.dot(acc, a, b)
        return len(pairs)

    def rounded(self, x: Weights) -> Weights:
        low = lambda a: None if a is None else a.astype(self.consumer.x.q.x.dtype)
        return Weights(low(x.p_ds), low(x.prob), x.dlse)

    def weights(self, t: IntLike, masked: bool, dlse, s_acc, ds_acc, begin=None) -> Weights:
        """The Weights of block t, whose exponentials run under dS and what begin() begins."""
        c, tiles = self.consumer, self.consumer.tiles
        wg = opaque(c.wg)  # or the addresses of all slices of q would take registers
        q = c.memory.q.at[wg, :, : tiles.width]
        c.k.wait(t)
        k = c.k.block(t)
        tile.dot_t(s_acc, q, k.x)
        factors = [] if c.memory.dq is None else [(c.memory.dq.at[wg], k.x)]
        factors += [] if k.dx is None else [(q, k.dx)]
        for a, b in factors:
            tile.dot_t(ds_acc, a, b)
        running = 0
        if begin is not None:
            c.v.wait(t - 1)
            running = begin()
        s = tile.await_sum(s_acc, running=len(factors) + running)
        at = self.head.tile(c.first_row, self.blocks.index(t) * tiles.block_k, self.shape)
        prob, weight, back = self.head.probabilities(
            s, at, lambda: per_row(self.tangent_rows.lse, self.shape), self.mask if masked else None
        )
        prob = None if c.memory.v[0].dx is None else prob
        ds = tile.await_sum(ds_acc, running=running) if factors else None
        c.k.release(t)
        dbias = logits.head_bias(c.x.dbias, c.work.batch, c.work.head)
        if ds is None and dbias is None:
            return Weights(None, prob, dlse)
        ds = self.head.tangent(weight, back, ds, None if dbias is None else dbias.load(at))
        return Weights(ds.after_dropout, prob, dlse + jnp.sum(ds.before_dropout, axis=1))
