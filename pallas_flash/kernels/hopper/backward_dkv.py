"""dK and dV, and in the fused scheme dQ: a program owns keys, and walks over the queries of all heads that share them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import ends, kept, order, scored, seen, sync, tile
from pallas_flash.kernels.hopper.gradients import Inputs, dlogits, inputs, probabilities
from pallas_flash.kernels.hopper.tuning import ROWS, KeyTiles, stored
from pallas_flash.masks import Ints, Visibility


class Memory(NamedTuple):
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
    q_full: Any  # of q and lse
    do_full: Any
    delta_full: Any

    @classmethod
    def of(cls, t: KeyTiles, dtype, fused: bool) -> "Memory":
        rows, block = plgpu.SMEM((t.stages, t.block_q), jnp.float32), functools.partial(tile.block, swizzle=t.swizzle)
        return cls(
            k=block(dtype, t.block_k, t.width),
            v=block(dtype, t.block_k, t.value_width),
            q=block(dtype, t.stages, t.block_q, t.width),
            do=block(dtype, t.stages, t.block_q, t.value_width),
            lse=rows,
            delta=rows,
            ds=block(dtype, 2, t.block_k, t.block_q) if fused else None,
            dq=block(jnp.float32, t.warpgroups, ROWS, t.width // t.dq_column_parts) if fused else None,
            kv_full=plgpu.Barrier(num_arrivals=2),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            do_full=plgpu.Barrier(num_barriers=t.stages),
            delta_full=plgpu.Barrier(num_barriers=t.stages),
        )


def dkv(p: Problem, t: KeyTiles, visibility: Visibility, *arrays, fused: bool):
    """dk, dv; before them dq, if fused."""
    lengths = visibility.lengths
    by_key = schedule.query_blocks(visibility, p.queries, t.block_q, t.block_k)
    visibility, by_query = schedule.by_query_tile(visibility, p.queries, t.block_q, t.block_k)
    x = inputs(p, t, lengths, None if by_query is None else by_key, visibility, *arrays)
    sums = [jnp.zeros((*x.q.shape[:3], stored(p.head_size, t.swizzle, 4)), jnp.float32)] if fused else []
    *dq, dk, dv = tile.launch(
        functools.partial(_kernel, problem=p, tiles=t),
        x,
        programs=order.key_tiles(p, t.block_k),
        out_type=[*sums, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.k, x.v))],
        tiles=t,
        scratch=Memory.of(t, x.k.dtype, fused),
        name="flash_attention_dq_dk_dv" if fused else "flash_attention_dk_dv",
    )
    dq = [(a[:, : p.queries, :, : p.head_size] * p.scale).astype(x.q.dtype) for a in dq]
    return *dq, dk[:, : p.keys, :, : p.head_size], dv[:, : p.keys, :, : p.value_size]


def _kernel(program, x: Inputs, *outputs, problem: Problem, tiles: KeyTiles):
    *dq_gmem, dk_gmem, dv_gmem, memory = outputs
    at = order.key_tile(program, problem, tiles.block_k, tiles.query_bytes)
    blocks = seen.query_blocks(x.blocks, x.visibility, at.batch, at.tile, problem.queries, tiles.block_q, tiles.block_k)
    steps = blocks.last - blocks.first  # with one of the heads
    number_of = sync.Numbers(tiles.warpgroups, tiles.stages)
    slots = memory.q, memory.lse, memory.do, memory.delta
    full = memory.q_full, memory.q_full, memory.do_full, memory.delta_full
    queries = sync.Ring(slots, full, number_of.first_ring, tiles.warpgroups)
    first_key = at.tile * tiles.block_k

    def produce():
        def keys(first, k_gmem, v_gmem):
            rows = lambda x, width: tile.rows_of(x, at.batch, pl.ds(first, tiles.block_k), at.kv_head, width)
            plgpu.copy_gmem_to_smem(rows(k_gmem, tiles.width), memory.k, memory.kv_full)
            plgpu.copy_gmem_to_smem(rows(v_gmem, tiles.value_width), memory.v, memory.kv_full)

        ends.reader(x.last, at.batch, tiles.block_k)(at.tile, keys, x.k, x.v)
        read = ends.reader(x.last_queries, at.batch, tiles.block_q)

        def head(g, _):
            def load(i, _):
                def fill(first, q_gmem, do_gmem):
                    rows = lambda x, width: tile.rows_of(x, at.batch, pl.ds(first, tiles.block_q), at.head + g, width)
                    by_row = at.batch, at.head + g, pl.ds(i * tiles.block_q, tiles.block_q)
                    q, do = rows(q_gmem, tiles.width), rows(do_gmem, tiles.value_width)
                    queries.fill(g * steps + i - blocks.first, (q, x.lse.at[by_row], do, x.delta.at[by_row]))

                read(i, fill, x.q, x.do)

            schedule.loop(sync.opaque(blocks.first), sync.opaque(blocks.last), load, None)

        schedule.loop(0, sync.opaque(problem.group), head, None)
        queries.drain(problem.group * steps)

    def consume(own):
        plgpu.barrier_wait(memory.kv_full)

        def head(g, sums):
            dropout = kept.of(problem.dropped, x.seeds, at.batch, at.head + g)
            score = scored.of(problem, x.score, at.batch, at.head + g)

            def step(i, sums, masked):
                block = Block(g * steps + i - blocks.first, at.head + g, i * tiles.block_q, dropout, score)
                return owner_of(sync.opaque(own)).add(block, masked, *sums)

            return blocks.visit(step, sums)

        owner_of = lambda own: Owner(problem, tiles, x, memory, queries, own, at.batch, first_key, *dq_gmem)
        owner = owner_of(own)
        columns, value_columns = owner.columns(tiles.width), owner.columns(tiles.value_width)
        zeros = tile.zeros(ROWS, columns.size), tile.zeros(ROWS, value_columns.size)
        dk, dv = schedule.loop(0, problem.group, head, zeros)
        owner.meet()  # all have read k and v
        k, v = memory.k.at[owner.keys, columns], memory.v.at[owner.keys, value_columns]

        def write():
            k[...], v[...] = (dk * problem.scale).astype(k.dtype), dv.astype(v.dtype)

        if tiles.split:  # some columns may be both's: one after the other
            pl.when(own == 0)(write)
            owner.meet()
        pl.when((own > 0) | (not tiles.split))(write)
        owner.meet()
        mine = owner.cut(tiles.block_k, tiles.warpgroups)
        keys = lambda x, width: tile.rows_of(x, at.batch, pl.ds(first_key + mine.start, mine.size), at.kv_head, width)
        dk_to, dv_to = keys(dk_gmem, tiles.width), keys(dv_gmem, tiles.value_width)
        tile.copy_out((memory.k.at[mine], dk_to), (memory.v.at[mine], dv_to))

    tile.by_role(tiles, consume, produce)


class Block(NamedTuple):
    """A block of queries of one head."""

    number: Ints  # in the order of the rings
    head: Ints
    first_row: Ints
    dropout: kept.Dropout | None
    score: scored.OfHead | None


class Owner(NamedTuple):
    """A consumer that owns keys: a part of its program's dK and dV. Scores are transposed, [keys, queries]."""

    problem: Problem
    tiles: KeyTiles
    x: Inputs
    memory: Memory
    queries: sync.Ring  # q, lse, do, delta
    number: Ints
    batch: Ints
    first_key: Ints
    dq_gmem: Any = None  # in the fused scheme

    def cut(self, size: int, parts: int) -> pl.Slice:
        """The consumer's part of an axis that is cut into so many parts, one or one for each consumer."""
        own = self.number if parts > 1 else sync.opaque(0)
        return pl.ds(pl.multiple_of(own * (size // parts), size // parts), size // parts)

    @property
    def keys(self) -> pl.Slice:
        return self.cut(self.tiles.block_k, self.tiles.block_k // ROWS)

    def columns(self, width: int) -> pl.Slice:
        """The consumer's columns of dK or dV: the first ones, or the last."""
        size = self.tiles.columns(width)
        first = pl.multiple_of(self.number * (width - size), self.tiles.swizzle // 2)
        return pl.ds(first if size < width else 0, size)

    def meet(self):
        sync.meet(sync.Numbers(self.tiles.warpgroups, self.tiles.stages).meeting, self.tiles.warpgroups)

    def add(self, block: Block, masked: bool, dk, dv):
        """dK += dS^T Q and dV += P^T dO with a block of queries, by 64 of them at a time."""
        q, _, do, _ = self.queries.block(block.number)
        q, do = q.at[:, self.columns(self.tiles.width)], do.at[:, self.columns(self.tiles.value_width)]
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
            else:
                self.meet()
                self.add_dq(block, shared, add_dk)

        sums = tile.products_add(products, dk, dv)
        self.queries.release(block.number)
        return sums

    def p_and_ds(self, block: Block, rows: pl.Slice, masked: bool):
        """P and dS, 16 bits, of 64 of the block's queries."""
        q, lse, do, delta = self.queries.block(block.number)
        shape, is_first, has_data = (ROWS, ROWS), rows.start == 0, bool(jax.tree.leaves(self.x.visibility))
        per_query = lambda ref: lambda shape: tile.down(plgpu.load(ref.at[rows], layout=tile.COLUMN), shape)

        def wait(array):
            if is_first:
                self.queries.wait(block.number, array)

        def begin_s(acc):
            wait(array=0)
            tile.dot_t(acc, self.memory.k.at[self.keys], q.at[rows])

        def begin_dp(acc):
            wait(array=2)
            tile.dot_t(acc, self.memory.v.at[self.keys], do.at[rows])

        def finish_s(s):
            sees = keeps = modify = None
            first_row, first_key = block.first_row + rows.start, self.first_key + self.keys.start
            if masked:
                view = seen.view(self.x.visibility, sync.opaque(self.batch), first_row, ROWS, transposed=True)
                sees = functools.partial(view.sees, first_key)
            if block.dropout is not None:
                keeps = functools.partial(block.dropout.keeps_transposed, first_row, first_key)
            if block.score is not None:
                modify = lambda s, scale: block.score.vjp(s, scale, first_row, first_key, transposed=True)
            p, weight, back = probabilities(self.problem, s, per_query(lse), sees, keeps, modify)
            p, weight = lax.optimization_barrier((p.astype(q.dtype), weight))
            wait(array=3)  # ptxas moves no wait for a product before this one, and no exponential behind it
            return p, weight, back

        def both(s_acc, dp_acc):
            begin_s(s_acc)
            begin_dp(dp_acc)
            p, weight, _ = finish_s(tile.finished(s_acc, running=1))
            return p, weight, tile.finished(dp_acc)

        many = self.problem.soft_cap is not None or block.score is not None
        if many or (masked and has_data):  # there are no registers for both products
            p, weight, back = finish_s(tile.product(begin_s, shape))
            dp = tile.product(begin_dp, shape)
        else:
            p, weight, dp = tile.products(both, shape, shape)
            back = None
        return p, dlogits(self.problem, weight, back, dp, per_query(delta)(shape)).astype(q.dtype)

    def add_dq(self, block: Block, ds, begin_more):
        """dQ += dS K in global memory, of which a consumer adds its part; ds is of all consumers, [block_k, block_q]."""
        rows = self.cut(self.tiles.block_q, self.tiles.block_q // ROWS)
        columns = self.cut(self.tiles.width, self.tiles.dq_column_parts)
        more = self.tiles.block_q // ROWS  # products

        def product(dq_acc):
            tile.dot(dq_acc, ds.at[:, rows].transpose((1, 0)), self.memory.k.at[:, columns])
            begin_more()
            return tile.finished(dq_acc, running=more)

        dq = tile.products(product, (rows.size, columns.size))
        rows = pl.ds(block.first_row + rows.start, rows.size)
        tile.add_out(dq, self.memory.dq.at[self.number], self.dq_gmem.at[self.batch, rows, block.head, columns])
