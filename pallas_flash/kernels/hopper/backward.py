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


def _p_and_ds(problem: Problem, s_acc, dp_acc, lse, delta, sees):
    """P and dS, 16 bits, from the products S and dP, of which dP was begun last. lse() and delta() have the shape of S."""
    s, scale = online_softmax.scores_apart(tile.finished(s_acc, running=1), problem.scale, problem.soft_cap)
    p, weight = online_softmax.gradients_apart(s, scale, lse(s.shape), problem.soft_cap)
    if sees is not None:
        seen = sees(s.shape)
        p, weight = jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)
    ds = weight * (tile.finished(dp_acc) - delta(s.shape))
    return p.astype(problem.dtype), ds.astype(problem.dtype)


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
        lse, delta = tile.load(x.lse.at[by_head], tile.ROW), tile.load(x.delta.at[by_head], tile.ROW)
        view = tile.view(x.visibility, at.batch, first_row)

        def step(j, dq, masked):
            k_j, v_j = k.block(j), v.block(j)
            num = tile.opaque(own)
            q, do = memory.q.at[num], memory.do.at[num]
            sees = functools.partial(view.sees, j * tiles.block_k) if masked else None

            def scores(s_acc, dp_acc):
                k.wait(j)
                tile.dot_t(s_acc, q, k_j)
                v.wait(j)
                tile.dot_t(dp_acc, do, v_j)
                per_row = lambda row: functools.partial(tile.across, row)
                _, ds = _p_and_ds(problem, s_acc, dp_acc, per_row(lse), per_row(delta), sees)
                v.release(j)
                return ds

            def product(dq_acc):
                ds = tile.products(scores, (ROWS, tiles.block_k), (ROWS, tiles.block_k))
                tile.dot(dq_acc, ds, k_j)

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
            blocks = schedule.Blocks(0, 0, last, last) if x.blocks is None else tile.blocks(x.blocks, tile.opaque(at.batch), at.tile)
            steps = blocks.last - blocks.first
            def step(i, sums, masked):
                owner = Owner(problem, tiles, memory, q, do, tile.opaque(own), *dq_gmem)
                block = Block(g * steps + i - blocks.first, tile.opaque(at.batch), i * tiles.block_q, at.head + g)
                view = tile.view(x.visibility, block.batch, block.first_row, tiles.block_q, transposed=True) if masked else None
                return owner.add(block, view and functools.partial(view.sees, first_key + owner.keys.start), *sums)

            return blocks.visit(step, sums)

        owner = Owner(problem, tiles, memory, q, do, own, *dq_gmem)
        zeros = tile.zeros(ROWS, owner.columns.size), tile.zeros(ROWS, owner.value_columns.size)
        dk, dv = schedule.loop(0, problem.group, head, zeros)
        owner.meet()  # all have read k and v
        k, v = memory.k.at[owner.keys, owner.columns], memory.v.at[owner.keys, owner.value_columns]
        k[...], v[...] = (dk * problem.scale).astype(k.dtype), dv.astype(v.dtype)
        owner.meet()
        mine = pl.ds(own * (tiles.block_k // tiles.warpgroups), tiles.block_k // tiles.warpgroups)
        keys = at.batch, pl.ds(first_key + mine.start, mine.size), at.kv_head
        tile.copy_out((memory.k.at[mine], dk_gmem.at[keys]), (memory.v.at[mine], dv_gmem.at[keys]))

    tile.by_role(tiles, consume, produce)


class Block(NamedTuple):
    """A block of queries of one head."""

    number: Ints  # in the order of the rings
    batch: Ints
    first_row: Ints
    head: Ints


class Owner(NamedTuple):
    """A consumer that owns keys: a part of its program's dK and dV. Scores are transposed, [keys, queries]."""

    problem: Problem
    tiles: KeyTiles
    memory: KeyMemory
    q_ring: sync.Ring
    do_ring: sync.Ring
    number: Ints
    dq_gmem: Any = None  # in the fused scheme

    def _cut(self, size: int, parts: int) -> pl.Slice:
        return pl.ds(self.number * (size // parts) if parts > 1 else 0, size // parts)

    @property
    def keys(self) -> pl.Slice:
        if self.tiles.split: return pl.ds(pl.multiple_of(tile.opaque(0), 64), 64)
        return self._cut(self.tiles.block_k, self.tiles.block_k // ROWS)

    @property
    def columns(self) -> pl.Slice:
        return self._cut(self.tiles.width, self.tiles.column_parts)

    @property
    def value_columns(self) -> pl.Slice:
        return self._cut(self.tiles.value_width, self.tiles.column_parts)

    def meet(self):
        sync.meet(sync.Numbers(self.tiles.warpgroups, self.tiles.stages).meeting, self.tiles.warpgroups)

    def add(self, block: Block, sees, dk, dv):
        """dK += dS^T Q and dV += P^T dO, with a block of queries."""
        (q, _), (do, _) = self.q_ring.block(block.number), self.do_ring.block(block.number)
        q, do = q.at[:, self.columns], do.at[:, self.value_columns]

        def products(dk_acc, dv_acc):
            p, ds = self.p_and_ds(block, sees)
            if self.dq_gmem is None:
                tile.dot(dv_acc, p, do)
                tile.dot(dk_acc, ds, q)
                tile.wait(running=1)
                self.do_ring.release(block.number)
            else:
                shared = self.memory.ds.at[lax.rem(block.number, jnp.int32(2))]
                shared.at[self.keys][...] = ds
                tile.dot(dv_acc, p, do)
                self.meet()
                self.add_dq(block, shared, lambda: tile.dot(dk_acc, ds, q))

        sums = tile.products_add(products, dk, dv)
        self.q_ring.release(block.number)
        return sums

    def p_and_ds(self, block: Block, sees):
        (q, lse), (do, delta) = self.q_ring.block(block.number), self.do_ring.block(block.number)
        k, v = self.memory.k.at[self.keys], self.memory.v.at[self.keys]

        def scores(s_acc, dp_acc):
            self.q_ring.wait(block.number)
            tile.dot_t(s_acc, k, q)
            self.do_ring.wait(block.number)
            tile.dot_t(dp_acc, v, do)
            per_query = lambda ref: lambda shape: tile.down(plgpu.load(ref, layout=tile.COLUMN), shape)
            return _p_and_ds(self.problem, s_acc, dp_acc, per_query(lse), per_query(delta), sees)

        shape = ROWS, self.tiles.block_q
        if sees is not None or self.problem.soft_cap or self.tiles.width==64:
            self.q_ring.wait(block.number)
            s = tile.product(lambda acc: tile.dot_t(acc, k, q), shape)
            s, scale = online_softmax.scores_apart(s, self.problem.scale, self.problem.soft_cap)
            p, weight = online_softmax.gradients_apart(s, scale, tile.down(plgpu.load(lse, layout=tile.COLUMN), shape), self.problem.soft_cap)
            if sees is not None:
                seen = sees(s.shape)
                p, weight = jnp.where(seen, p, 0.0), jnp.where(seen, weight, 0.0)
            self.do_ring.wait(block.number)
            dp = tile.product(lambda acc: tile.dot_t(acc, v, do), shape)
            ds = weight * (dp - tile.down(plgpu.load(delta, layout=tile.COLUMN), shape))
            return p.astype(self.problem.dtype), ds.astype(self.problem.dtype)
        return tile.products(scores, shape, shape)

    def add_dq(self, block: Block, ds, begin_next):
        """dQ += dS K in global memory, of which a consumer adds its part; ds is of all consumers, [block_k, block_q]."""
        rows = self._cut(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self._cut(self.tiles.width, self.tiles.dq_column_parts)

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            tile.wait(running=1)
            self.do_ring.release(block.number)
            begin_next()
            return tile.finished(dq_acc, running=1)

        dq = tile.products(product, (rows.size, columns.size))
        rows = pl.ds(block.first_row + rows.start, rows.size)
        tile.add_out(dq, self.memory.dq.at[self.number], self.dq_gmem.at[block.batch, rows, block.head, columns])
