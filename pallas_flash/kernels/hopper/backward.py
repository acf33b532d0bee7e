"""The backward of FlashAttention-3 (arXiv:2407.08608, algorithm 2), in one of two schemes; both compute P again from lse.

Deterministic: one kernel owns tiles of keys and sums dK and dV over the queries, one owns tiles of queries and sums dQ over the
keys; 7 products for a pair of blocks. Fused: the first of them also computes its part of dQ, and TMA adds it up in global memory,
in whatever order the tiles come; 5 products, and the last bits of dQ differ from run to run.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.kernels.hopper import order, sync, tile
from pallas_flash.kernels.hopper.tuning import ROWS, AllTiles, KeyTiles, Tiles
from pallas_flash.masks import Ints, Visibility


class Inputs(NamedTuple):
    """The kernels' arrays, of sizes that TMA can take, and what the mask comes to for rows, tiles and blocks."""

    q: jax.Array  # [B, T, N, width]
    k: jax.Array  # [B, S, K, width]
    v: jax.Array  # [B, S, K, value_width]
    do: jax.Array  # [B, T, N, value_width]
    lse: jax.Array  # [B, N, whole tiles of T]: in units of log 2, less what `scores_apart` leaves out; +inf: p = 0
    delta: jax.Array  # the same
    blocks: jax.Array | None  # int32 [B or 1, tiles, 4]: schedule.Blocks; None where all are the same and known
    visibility: Visibility  # its data by rows and keys only


def backward(problem: Problem, tiles: AllTiles, x: Operands, o, lse, do, delta):
    """dq, dk, dv in the operands' dtype and shape; no bias, so no dbias."""
    del o  # delta holds all that is needed of it
    p = problem
    live, reached = x.visibility.live(jnp.arange(p.queries)), x.visibility.reached(jnp.arange(p.keys))
    q, do = (_where(live, a) for a in (x.query, do))
    k, v = (_where(reached, a) for a in (x.key, x.value))
    lse = (lse - (p.soft_cap or 0.0)) * online_softmax.LOG2E
    arrays = q, k, v, do, lse, delta
    if tiles.fused is not None:
        dq, dk, dv = _dkv(p, tiles.fused, x.visibility, *arrays, fused=True)
    else:
        dq = _dq(p, tiles.dq, x.visibility, *arrays)
        dk, dv = _dkv(p, tiles.dkv, x.visibility, *arrays, fused=False)
    return dq, dk, dv, None


def _where(rows, x):
    """x with zeros outside of `rows` [B, length]: what is not seen has p = ds = 0, and 0 * NaN is NaN."""
    return x if rows is None else jnp.where(rows[:, :, None, None], x, 0)


def _inputs(p: Problem, t: Tiles | KeyTiles, blocks, visibility: Visibility, q, k, v, do, lse, delta) -> Inputs:
    more = (0, 0), (0, 0), (0, -p.queries % t.block_q)
    lse, delta = jnp.pad(lse, more, constant_values=jnp.inf), jnp.pad(delta, more)
    q, k = (tile.padded(x, t.width) for x in (q, k))
    v, do = (tile.padded(x, t.value_width) for x in (v, do))
    return Inputs(q, k, v, do, lse, delta, blocks, visibility)


class Rows(NamedTuple):
    """What P and dS of a pair of blocks need to know of the queries: each the shape of S, or a value for all."""

    lse: Any  # () -> lse and delta, spread over the shape of S
    delta: Any
    sees: Any  # (shape) -> which queries see which keys; None: all see all


def _p_and_ds(problem: Problem, begin_s, begin_dp, shape, rows: Rows, together: bool = True):
    """P and dS, 16 bits, of the products that begin_s(acc) and begin_dp(acc) begin; `together` takes more registers."""

    def p_and_weight(s):
        s, scale = online_softmax.scores_apart(s, problem.scale, problem.soft_cap)
        p, weight = online_softmax.gradients_apart(s, scale, rows.lse(shape), problem.soft_cap)
        if rows.sees is None:
            return p, weight
        seen = rows.sees(shape)
        return jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)

    def both(s_acc, dp_acc):
        begin_s(s_acc)
        begin_dp(dp_acc)
        p, weight = p_and_weight(tile.finished(s_acc, running=1))
        return p.astype(problem.dtype), weight, tile.finished(dp_acc)

    if together:
        p, weight, dp = tile.products(both, shape, shape)
    else:
        p, weight = p_and_weight(tile.product(begin_s, shape))
        p, dp = p.astype(problem.dtype), tile.product(begin_dp, shape)
    return p, (weight * (dp - rows.delta(shape))).astype(problem.dtype)


# dQ: a program owns queries, and walks over the keys


class QueryMemory(NamedTuple):
    """The shared memory of a program that owns queries."""

    q: Any  # [warpgroups, 64, width], of dq in the end
    do: Any  # [warpgroups, 64, value_width]
    k: Any  # [stages, block_k, width]
    v: Any  # [value_stages, block_k, value_width]
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def of(cls, t: Tiles, dtype) -> "QueryMemory":
        barriers = lambda n: plgpu.Barrier(num_barriers=n)
        return cls(
            q=tile.block(dtype, t.warpgroups, ROWS, t.width),
            do=tile.block(dtype, t.warpgroups, ROWS, t.value_width),
            k=tile.block(dtype, t.stages, t.block_k, t.width),
            v=tile.block(dtype, t.value_stages, t.block_k, t.value_width),
            q_full=barriers(t.warpgroups),
            do_full=barriers(t.warpgroups),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages),
        )


def _dq(p: Problem, t: Tiles, visibility: Visibility, *arrays):
    visibility, blocks = schedule.by_query_tile(visibility, p.queries, t.block_q, t.block_k)
    x = _inputs(p, t, blocks, visibility, *arrays)
    (dq,) = tile.launch(
        functools.partial(_dq_kernel, problem=p, tiles=t),
        x,
        programs=order.query_tiles(p, t.block_q),
        out_type=[jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)],
        tiles=t,
        scratch=QueryMemory.of(t, x.q.dtype),
        name="flash_attention_dq",
    )
    return dq[:, : p.queries, :, : p.head_size]


def _dq_kernel(program, x: Inputs, dq_gmem, memory: QueryMemory, *, problem: Problem, tiles: Tiles):
    at = order.query_tile(program, problem, tiles.block_q, tiles.key_bytes)
    known = schedule.key_blocks(0, problem.keys, None, tiles.block_k)
    blocks = known if x.blocks is None else tile.blocks(x.blocks, at.batch, at.tile)
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    k = sync.Ring(memory.k, memory.k_full, number_of.first_ring, tiles.warpgroups)
    v = sync.Ring(memory.v, memory.v_full, number_of.second_ring, tiles.warpgroups)

    def produce():
        def load(j, _):
            source = at.batch, pl.ds(j * tiles.block_k, tiles.block_k), at.kv_head
            k.fill(j, x.k.at[source], blocks.first)
            v.fill(j, x.v.at[source], blocks.first)

        schedule.loop(tile.opaque(blocks.first), tile.opaque(blocks.last), load, None)
        k.drain(blocks.first, blocks.last)
        v.drain(blocks.first, blocks.last)

    def consume(own):
        first_row = at.tile * tiles.block_q + own * ROWS
        by_row, by_head = (at.batch, pl.ds(first_row, ROWS), at.head), (at.batch, at.head, pl.ds(first_row, ROWS))
        q, do = memory.q.at[own], memory.do.at[own]
        plgpu.copy_gmem_to_smem(x.do.at[by_row], do, memory.do_full.at[own])
        tile.copy_in(x.q.at[by_row], q, memory.q_full.at[own])
        plgpu.barrier_wait(memory.do_full.at[own])
        per_row = lambda ref: functools.partial(tile.across, tile.load(ref.at[by_head], tile.ROW))
        lse, delta = per_row(x.lse), per_row(x.delta)
        view = tile.view(x.visibility, at.batch, first_row)

        def step(j, dq, masked):
            again = tile.opaque(own)  # or the addresses of all parts of q and do would take registers
            q, do, k_j, v_j = memory.q.at[again], memory.do.at[again], k.block(j), v.block(j)

            def begin_s(acc):
                k.wait(j)
                tile.dot_t(acc, q, k_j)

            def begin_dp(acc):
                v.wait(j)
                tile.dot_t(acc, do, v_j)

            def product(dq_acc):
                rows = Rows(lse, delta, functools.partial(view.sees, j * tiles.block_k) if masked else None)
                _, ds = _p_and_ds(problem, begin_s, begin_dp, (ROWS, tiles.block_k), rows)
                v.release(j)
                tile.dot(dq_acc, ds, k_j)  # dQ += dS K

            (dq,) = tile.products_add(product, dq)
            k.release(j)
            return dq

        dq = blocks.visit(step, tile.zeros(ROWS, tiles.width))
        q[...] = (dq * problem.scale).astype(q.dtype)
        tile.copy_out((q, dq_gmem.at[by_row]))

    tile.by_role(tiles, consume, produce)


# dK and dV, and in the fused scheme dQ: a program owns keys, and walks over the queries of all heads that share them


class KeyMemory(NamedTuple):
    """The shared memory of a program that owns keys."""

    k: Any  # [block_k, width], of dk in the end
    v: Any  # [block_k, value_width], of dv in the end
    q: Any  # [stages, block_q, width]
    do: Any  # [stages, block_q, value_width]
    lse: Any  # [stages, block_q]
    delta: Any
    ds: Any  # [2, block_k, block_q], transposed; None in the deterministic scheme
    dq: Any  # [warpgroups, 64, part of the columns] float32, or None
    kv_full: Any
    q_full: Any
    do_full: Any

    @classmethod
    def of(cls, t: KeyTiles, dtype, fused: bool) -> "KeyMemory":
        rows = plgpu.SMEM((t.stages, t.block_q), jnp.float32)
        return cls(
            k=tile.block(dtype, t.block_k, t.width),
            v=tile.block(dtype, t.block_k, t.value_width),
            q=tile.block(dtype, t.stages, t.block_q, t.width),
            do=tile.block(dtype, t.stages, t.block_q, t.value_width),
            lse=rows,
            delta=rows,
            ds=tile.block(dtype, 2, t.block_k, t.block_q) if fused else None,
            dq=tile.block(jnp.float32, t.warpgroups, ROWS, t.width // t.dq_column_parts) if fused else None,
            kv_full=plgpu.Barrier(num_arrivals=2),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            do_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        )


def _dkv(p: Problem, t: KeyTiles, visibility: Visibility, *arrays, fused: bool):
    """dk, dv; before them dq, if fused."""
    by_key = schedule.query_blocks(visibility, p.queries, t.block_q, t.block_k)
    visibility, by_query = schedule.by_query_tile(visibility, p.queries, t.block_q, t.block_k)
    known = by_query is None and p.keys % t.block_k == 0
    x = _inputs(p, t, None if known else by_key, visibility, *arrays)
    sums = [jnp.zeros(x.q.shape, jnp.float32)] if fused else []
    *dq, dk, dv = tile.launch(
        functools.partial(_dkv_kernel, problem=p, tiles=t),
        x,
        programs=order.key_tiles(p, t.block_k),
        out_type=[*sums, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.k, x.v))],
        tiles=t,
        scratch=KeyMemory.of(t, x.k.dtype, fused),
        name="flash_attention_dq_dk_dv" if fused else "flash_attention_dk_dv",
    )
    dq = [(a[:, : p.queries, :, : p.head_size] * p.scale).astype(x.q.dtype) for a in dq]
    return *dq, dk[:, : p.keys, :, : p.head_size], dv[:, : p.keys, :, : p.value_size]


def _dkv_kernel(program, x: Inputs, *outputs, problem: Problem, tiles: KeyTiles):
    *dq_gmem, dk_gmem, dv_gmem, memory = outputs
    at = order.key_tile(program, problem, tiles.block_k, tiles.query_bytes)
    last = schedule.ceil_div(problem.queries, tiles.block_q)
    blocks = schedule.Blocks(0, 0, last, last) if x.blocks is None else tile.blocks(x.blocks, at.batch, at.tile)
    steps = blocks.last - blocks.first  # with one of the heads
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    q = sync.Ring((memory.q, memory.lse), memory.q_full, number_of.first_ring, tiles.warpgroups)
    do = sync.Ring((memory.do, memory.delta), memory.do_full, number_of.second_ring, tiles.warpgroups)
    first_key = at.tile * tiles.block_k

    def produce():
        keys = at.batch, pl.ds(first_key, tiles.block_k), at.kv_head
        plgpu.copy_gmem_to_smem(x.k.at[keys], memory.k, memory.kv_full)
        plgpu.copy_gmem_to_smem(x.v.at[keys], memory.v, memory.kv_full)

        def head(g, _):
            def load(i, _):
                t, rows = g * steps + i - blocks.first, pl.ds(i * tiles.block_q, tiles.block_q)
                by_row, by_head = (at.batch, rows, at.head + g), (at.batch, at.head + g, rows)
                q.fill(t, (x.q.at[by_row], x.lse.at[by_head]))
                do.fill(t, (x.do.at[by_row], x.delta.at[by_head]))

            schedule.loop(tile.opaque(blocks.first), tile.opaque(blocks.last), load, None)

        schedule.loop(0, tile.opaque(problem.group), head, None)
        q.drain(0, problem.group * steps)
        do.drain(0, problem.group * steps)

    def consume(own):
        plgpu.barrier_wait(memory.kv_full)

        def head(g, sums):
            def step(i, sums, masked):
                block = Block(g * steps + i - blocks.first, at.head + g, i * tiles.block_q)
                return owner_of(tile.opaque(own)).add(block, masked, *sums)

            return blocks.visit(step, sums)

        owner_of = lambda own: Owner(problem, tiles, x, memory, q, do, own, at.batch, first_key, *dq_gmem)
        owner = owner_of(own)
        zeros = tile.zeros(ROWS, owner.columns.size), tile.zeros(ROWS, owner.value_columns.size)
        dk, dv = schedule.loop(0, problem.group, head, zeros)
        owner.meet()  # all have read k and v
        k, v = memory.k.at[owner.keys, owner.columns], memory.v.at[owner.keys, owner.value_columns]
        k[...], v[...] = (dk * problem.scale).astype(k.dtype), dv.astype(v.dtype)
        owner.meet()
        mine = owner.cut(tiles.block_k, tiles.warpgroups)
        keys = at.batch, pl.ds(first_key + mine.start, mine.size), at.kv_head
        tile.copy_out((memory.k.at[mine], dk_gmem.at[keys]), (memory.v.at[mine], dv_gmem.at[keys]))

    tile.by_role(tiles, consume, produce)


class Block(NamedTuple):
    """A block of queries of one head."""

    number: Ints  # in the order of the rings
    head: Ints
    first_row: Ints


class Owner(NamedTuple):
    """A consumer that owns keys: a part of its program's dK and dV. Scores are transposed, [keys, queries]."""

    problem: Problem
    tiles: KeyTiles
    x: Inputs
    memory: KeyMemory
    q_ring: sync.Ring
    do_ring: sync.Ring
    number: Ints
    batch: Ints
    first_key: Ints
    dq_gmem: Any = None  # in the fused scheme

    def cut(self, size: int, parts: int) -> pl.Slice:
        """The consumer's part of an axis that is cut into so many parts, one or one for each consumer."""
        own = self.number if parts > 1 else tile.opaque(0)
        return pl.ds(pl.multiple_of(own * (size // parts), size // parts), size // parts)

    @property
    def keys(self) -> pl.Slice:
        return self.cut(self.tiles.block_k, self.tiles.block_k // ROWS)

    @property
    def columns(self) -> pl.Slice:
        return self.cut(self.tiles.width, self.tiles.column_parts)

    @property
    def value_columns(self) -> pl.Slice:
        return self.cut(self.tiles.value_width, self.tiles.column_parts)

    def meet(self):
        sync.meet(sync.Numbers(self.tiles.warpgroups, self.tiles.stages).meeting, self.tiles.warpgroups)

    def add(self, block: Block, masked: bool, dk, dv):
        """dK += dS^T Q and dV += P^T dO with a block of queries, by 64 of them at a time."""
        (q, _), (do, _) = self.q_ring.block(block.number), self.do_ring.block(block.number)
        q, do = q.at[:, self.columns], do.at[:, self.value_columns]
        parts = [pl.ds(first, ROWS) for first in range(0, self.tiles.block_q, ROWS)]
        shared = None if self.dq_gmem is None else self.memory.ds.at[lax.rem(block.number, jnp.int32(2))]

        def products(dk_acc, dv_acc):
            def add_dk():
                for rows, ds in zip(parts, all_ds, strict=True):
                    tile.dot(dk_acc, ds, q.at[rows])  # dK += dS^T Q

            all_ds = []
            for rows in parts:
                p, ds = self.p_and_ds(block, rows, masked)
                all_ds.append(ds)
                if shared is not None:
                    shared.at[self.keys, rows][...] = ds
                tile.dot(dv_acc, p, do.at[rows])  # dV += P^T dO
            if shared is None:
                sync.fence()  # lse and delta have been read, and TMA may write there
                add_dk()
                tile.wait(running=len(parts))
                self.do_ring.release(block.number)
            else:
                self.meet()
                self.add_dq(block, shared, add_dk)

        sums = tile.products_add(products, dk, dv)
        self.q_ring.release(block.number)
        return sums

    def p_and_ds(self, block: Block, rows: pl.Slice, masked: bool):
        (q, lse), (do, delta) = self.q_ring.block(block.number), self.do_ring.block(block.number)
        x, is_first = self.x, rows.start == 0

        def begin_s(acc):
            if is_first:
                self.q_ring.wait(block.number)
            tile.dot_t(acc, self.memory.k.at[self.keys], q.at[rows])

        def begin_dp(acc):
            if is_first:
                self.do_ring.wait(block.number)
            tile.dot_t(acc, self.memory.v.at[self.keys], do.at[rows])

        per_query = lambda ref: lambda shape: tile.down(plgpu.load(ref.at[rows], layout=tile.COLUMN), shape)
        sees = None
        if masked:
            view = tile.view(x.visibility, tile.opaque(self.batch), block.first_row + rows.start, ROWS, transposed=True)
            sees = functools.partial(view.sees, self.first_key + self.keys.start)
        few_registers = self.problem.soft_cap is not None or masked and jax.tree.leaves(x.visibility)
        of_queries = Rows(per_query(lse), per_query(delta), sees)
        return _p_and_ds(self.problem, begin_s, begin_dp, (ROWS, ROWS), of_queries, together=not few_registers)

    def add_dq(self, block: Block, ds, begin_more):
        """dQ += dS K in global memory, of which a consumer adds its part; ds is of all consumers, [block_k, block_q]."""
        rows = self.cut(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self.cut(self.tiles.width, self.tiles.dq_column_parts)
        more = self.tiles.block_q // ROWS  # products

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            tile.wait(running=1)
            self.do_ring.release(block.number)
            begin_more()
            return tile.finished(dq_acc, running=more)

        dq = tile.products(product, (rows.size, columns.size))
        rows = pl.ds(block.first_row + rows.start, rows.size)
        tile.add_out(dq, self.memory.dq.at[self.number], self.dq_gmem.at[self.batch, rows, block.head, columns])
