"""dK and dV, and in the fused scheme dQ. A program owns keys, and walks over the queries of the
heads that share them, of all or of one of several parts, which then add up dK and dV."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.dkv_consumer import (
    DkvConsumer,
    Do,
    FirstConsumer,
    KeyConsumer,
    Q,
    SecondConsumer,
)
from pallas_flash.kernels.hopper.tile_sizes import ROWS, KeyTiles
from pallas_flash.kernels.mosaic import block_info, elements, logits, scheduler, tma
from pallas_flash.kernels.mosaic.elements import SWIZZLES
from pallas_flash.kernels.mosaic.launch import launch, shared_matrix
from pallas_flash.kernels.mosaic.logits import QueryBlock
from pallas_flash.kernels.mosaic.registers import opaque
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

# Rows for head sizes, decided as forward.TILES were.
_TWO = KeyTiles(128, 128)
_SPLIT = _TWO._replace(width=256, value_width=256, split=True)
_WIDE = _SPLIT._replace(width=512, value_width=512, block_q=32, swizzle=SWIZZLES[1])
TILES = (
    KeyTiles(64, 64, warpgroups=3),
    KeyTiles(64, 64),  # dropout
    # a warpgroup's registers hold S and dP beside 256 columns of dK and dV of 64 keys
    _TWO,
    # beside 320 they hold one of S and dP, and nothing that a soft cap, a bias or a score_mod needs
    *(_TWO._replace(width=n, value_width=320 - n, s_before_dp=True) for n in range(64, 257, 32)),
    _SPLIT,
    _WIDE,
)
# where registers do not hold both sums; dV needs no V, which leaves room for larger blocks
DK_TILES = tuple(_WIDE._replace(stages=n, sums=("dk",)) for n in (2, 1))
DV_TILES = tuple(
    _WIDE._replace(block_q=64, stages=n, swizzle=SWIZZLES[0], sums=("dv",)) for n in (2, 1)
)
# each consumer computes 64 x 64 of a block's dQ, for which wider heads leave no shared memory
FUSED_TILES = (
    KeyTiles(64, 64, block_q=128, fused=True),
    KeyTiles(128, 128, fused=True),
)


class DkvMemory(NamedTuple):
    """The shared memory of a program that owns keys."""

    k: Any  # [block_k, width], of dk in the end
    v: Any  # [block_k, value_width], of dv in the end; None beside dv alone
    q: Any  # [stages, block_q, width]
    do: Any  # [stages, block_q, value_width]
    lse: Any  # [stages, block_q]
    delta: Any  # the same; None beside dv alone
    # [2, block_k, block_q], transposed, as dp and ds; None but where the consumers split the
    # columns of dv
    p: Any
    dp: Any  # [block_k, block_q], dP - delta; None but where they split dk
    ds: Any  # the same there, and in the fused scheme [2, block_k, block_q]; else None
    dq: Any  # [warpgroups, 64, a slice of the columns] float32, or None
    kv_full: Any
    q_full: Any  # of q and lse
    do_full: Any
    delta_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: KeyTiles) -> "DkvMemory":
        rows = plgpu.SMEM((t.stages, t.block_q), jnp.float32)
        matrix = functools.partial(shared_matrix, swizzle=t.swizzle)
        block, scores = functools.partial(matrix, p.dtype), (t.block_k, t.block_q)
        dq = jnp.float32, t.warpgroups, ROWS, t.width // t.dq_column_slices
        has_dk = t.has_dk
        return cls(
            k=block(t.block_k, t.width),
            v=block(t.block_k, t.value_width) if has_dk else None,
            q=block(t.stages, t.block_q, t.width),
            do=block(t.stages, t.block_q, t.value_width),
            lse=rows,
            delta=rows if has_dk else None,
            p=block(2, *scores) if t.split and t.has_dv else None,
            dp=block(*scores) if t.split and has_dk else None,
            ds=block(*[2] * t.fused, *scores) if t.fused or (t.split and has_dk) else None,
            dq=matrix(*dq) if t.fused else None,
            kv_full=plgpu.Barrier(num_arrivals=1 + has_dk),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            do_full=plgpu.Barrier(num_barriers=t.stages),
            delta_full=plgpu.Barrier(num_barriers=t.stages) if has_dk else None,
        )

    def sums(self) -> dict:
        """The places of dk and dv in the end, by name; dv in a slot of do's, as large, where there
        is no v."""
        return dict(dk=self.k, dv=self.do.at[0] if self.v is None else self.v)


class Dq(NamedTuple):
    """The array that a consumer hands over."""

    dq: Any  # its share of a block, [64, a slice of the columns] float32


class Rows(NamedTuple):
    """The rows and the head to which a block's dQ is added."""

    first: IntLike
    head: IntLike


class DqStore(NamedTuple):
    """Shared memory in which each consumer leaves its share of a block's dQ, and from which the
    producer adds it to global memory, before the block's slots are filled again."""

    tiles: KeyTiles
    smem: Any  # [warpgroups, 64, a slice of the columns]
    gmem: Any
    batch: IntLike

    def handoff(self, wg: IntLike) -> sync.Handoff:
        ids = sync.BarrierIds.make(self.tiles)
        return sync.Handoff(Dq(self.smem.at[wg]), ids.dq_filled + wg, ids.dq_free + wg)

    def start(self) -> tuple[Rows, ...]:
        """The blocks whose dQ is to be added, the oldest first: at first none of these."""
        self._release()
        return (Rows(jnp.int32(0), jnp.int32(0)),) * self.tiles.stages

    def add_under(self, load: Callable, blocks: tuple[Rows, ...], exists: IntLike):
        """Adds the dQ of the oldest block, if it exists, under what `load` does."""
        pl.when(exists)(functools.partial(self._begin, blocks[0]))
        load()
        pl.when(exists)(self._release)

    def drain(self, blocks: tuple[Rows, ...], count: IntLike):
        """Adds the dQ of the last of `count` blocks."""
        for n in range(len(blocks)):
            self.add_under(lambda: None, blocks[n:], count >= len(blocks) - n)

    def _begin(self, block: Rows):
        size = self.tiles.width // self.tiles.dq_column_slices
        for wg in range(self.tiles.warpgroups):
            self.handoff(wg).wait()
            row, column = (wg * ROWS, 0) if self.tiles.block_q > ROWS else (0, wg * size)
            rows = pl.ds(pl.multiple_of(block.first + row, ROWS), ROWS)
            target = self.gmem.at[self.batch, rows, block.head, pl.ds(column, size)]
            plgpu.copy_smem_to_gmem(self.smem.at[wg], target, reduction_op="add")

    def _release(self):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for wg in range(self.tiles.warpgroups):
            self.handoff(wg).release()


def dkv(p: Problem, t: KeyTiles, x: Operands, lse, do, delta) -> dict[str, jax.Array]:
    """dk and dv, or one of them, and dq, as the tiles say, by name."""
    x = GradientInputs.by_tma(p, t, x, lse, do, delta)
    (q, _), (k, v) = x.queries.arrays, x.keys.arrays
    outputs = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in dict(dk=k, dv=v).items()}
    outputs = {name: outputs[name] for name in t.sums}
    if t.fused:
        padded_size = functools.partial(elements.padded_size, "float32", swizzle=t.swizzle)
        zeros = lambda like, size: jnp.zeros((*like.shape[:3], padded_size(size)), jnp.float32)
        if t.group_parts > 1:
            outputs = dict(dk=zeros(k, p.head_size), dv=zeros(v, p.value_size))
        outputs = dict(dq=zeros(q, p.head_size)) | outputs
    results = launch(
        functools.partial(_kernel, problem=p, tiles=t, names=tuple(outputs)),
        x,
        programs=scheduler.key_programs(p, t.block_k, t.group_parts),
        out_type=[*outputs.values()],
        warpgroups=t.warpgroups + 1,
        scratch=DkvMemory.allocate(p, t),
        name=f"flash_attention_{'_'.join(outputs)}",
    )
    gradients = dict(zip(outputs, results, strict=True))
    lengths = dict(dq=p.queries, dk=p.keys, dv=p.keys)
    sizes = dict(dq=p.head_size, dk=p.head_size, dv=p.value_size)
    gradients = {name: a[:, : lengths[name], :, : sizes[name]] for name, a in gradients.items()}
    if t.fused:
        gradients["dq"] = gradients["dq"] * p.scale
    return {name: a.astype(q.dtype) for name, a in gradients.items()}


def _kernel(
    program, x: GradientInputs, *refs, names: tuple[str, ...], problem: Problem, tiles: KeyTiles
):
    """Sums the gradients that are named: dk, dv, dq."""
    *outputs, memory = refs
    outputs = dict(zip(names, outputs, strict=True))
    heads = problem.group // tiles.group_parts
    work = scheduler.key_tile(program, problem, tiles, tiles.group_parts)
    query_blocks = block_info.query_blocks(x, work, problem, tiles)
    ids = sync.BarrierIds.make(tiles)
    q, do = (
        sync.TmaRing(slots, full, released, tiles.warpgroups)
        for slots, full, released in (
            (Q(memory.q, memory.lse), Q(memory.q_full, memory.q_full), ids.first_ring),
            (Do(memory.do, memory.delta), Do(memory.do_full, memory.delta_full), ids.second_ring),
        )
    )
    first_key = work.tile * tiles.block_k
    dq_gmem, store = outputs.get("dq"), None
    if tiles.dq_by_producer:
        store = DqStore(tiles, memory.dq, dq_gmem, work.batch)

    def produce():
        _load_keys(x, work, memory, tiles)
        read = x.queries.reader(work.batch, tiles.block_q)

        def head(g, to_add):
            blocks, position = query_blocks(g)

            def load(t, to_add):
                i = blocks.index(t)

                def fill(first, q_gmem, do_gmem):
                    rows = lambda x, width: tma.head_rows(
                        x, work.batch, pl.ds(first, tiles.block_q), work.head + g, width
                    )
                    by_row = work.batch, work.head + g, pl.ds(i * tiles.block_q, tiles.block_q)
                    delta = x.delta.at[by_row] if tiles.has_dk else None
                    fills = (
                        (q, Q(rows(q_gmem, tiles.width), x.lse.at[by_row])),
                        (do, Do(rows(do_gmem, tiles.value_width), delta)),
                    )
                    # first what is released first
                    for ring, source in fills if tiles.has_dv else reversed(fills):
                        ring.fill(position(t), source)

                if store is None:
                    read(i, fill)
                    return to_add
                store.add_under(lambda: read(i, fill), to_add, position(t) >= tiles.stages)
                return *to_add[1:], Rows(i * tiles.block_q, work.head + g)

            return schedule.loop(opaque(blocks.first), opaque(blocks.last), load, to_add)

        to_add = schedule.loop(0, opaque(heads), head, store and store.start())
        blocks, position = query_blocks(heads - 1)
        if store is not None:
            store.drain(to_add, position(blocks.last))
        for ring in q, do:
            ring.drain(position(blocks.last))

    def consume(wg):
        if not tiles.split:
            return compute(wg, KeyConsumer)
        for is_first, kind in (True, FirstConsumer), (False, SecondConsumer):
            pl.when((wg == 0) == is_first)(functools.partial(compute, wg, kind))

    def compute(wg, kind: type[DkvConsumer]):
        plgpu.barrier_wait(memory.kv_full)
        consumer_at = lambda wg: kind(problem, tiles, memory, q, do, wg, first_key, dq_gmem, store)

        def head(g, sums):
            blocks, position = query_blocks(g)
            head_logits = logits.for_head(
                problem, tile.LAYOUTS, x.logits, work.batch, work.head + g
            )

            def step(t, sums, masked):
                first_row = blocks.index(t) * tiles.block_q
                block = QueryBlock(position(t), work.batch, work.head + g, first_row, head_logits)
                return consumer_at(opaque(wg)).add(block, masked, sums)

            return blocks.visit(step, sums)

        consumer, widths = consumer_at(wg), tiles.widths
        zeros = {name: tile.zeros(ROWS, consumer.columns(widths[name]).size) for name in tiles.sums}
        sums = schedule.loop(0, heads, head, zeros)
        if tiles.has_dk:
            sums = sums | dict(dk=sums["dk"] * problem.scale)
        if store is not None:
            store.handoff(wg).wait_for_release()
        finish = _finish if tiles.group_parts == 1 else _add
        finish(work, consumer, sums, outputs)

    tile.specialize(tiles, consume, produce)


def _load_keys(x: GradientInputs, work: scheduler.WorkTile, memory: DkvMemory, tiles: KeyTiles):
    def copy(first, k_gmem, v_gmem):
        rows = lambda x, width: tma.head_rows(
            x, work.batch, pl.ds(first, tiles.block_k), work.kv_head, width
        )
        plgpu.copy_gmem_to_smem(rows(k_gmem, tiles.width), memory.k, memory.kv_full)
        if memory.v is not None:
            plgpu.copy_gmem_to_smem(rows(v_gmem, tiles.value_width), memory.v, memory.kv_full)

    x.keys.reader(work.batch, tiles.block_k)(work.tile, copy)


def _finish(work: scheduler.WorkTile, consumer: DkvConsumer, sums: dict, outputs: dict):
    """The epilogue: the sums leave by way of shared memory."""
    tiles, smem = consumer.tiles, consumer.memory.sums()
    widths = tiles.widths

    def write():
        for name, x in sums.items():
            target = smem[name].at[consumer.keys, consumer.columns(widths[name])]
            target[...] = x.astype(target.dtype)

    consumer.barrier()  # all have read what lies there
    consumer.in_turn(write)
    consumer.barrier()
    share = consumer.share(tiles.block_k, tiles.warpgroups)
    rows = lambda x, width: tma.head_rows(
        x, work.batch, pl.ds(consumer.first_key + share.start, share.size), work.kv_head, width
    )
    tma.copy_out(*((smem[name].at[share], rows(outputs[name], widths[name])) for name in sums))


def _add(work: scheduler.WorkTile, consumer: DkvConsumer, sums: dict, outputs: dict):
    """The epilogue of one of several programs that add to the same keys' sums: they leave by way of
    the shared memory of dq."""
    smem = consumer.memory.dq.at[consumer.wg]
    rows = pl.ds(consumer.first_key + consumer.keys.start, ROWS)
    for name, x in sums.items():
        size = smem.shape[1]
        for first in range(0, x.shape[1], size):
            # not known to jax, or it would refuse that they hang over
            columns = pl.ds(pl.multiple_of(opaque(first), size), size)
            target = outputs[name].at[work.batch, rows, work.kv_head, columns]
            tile.add_out(x[:, first : first + size], smem, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
