"""The forward of FlashAttention-3 (arXiv:2407.08608): softmax of a block under the product of the
block before it.

A program owns 64 queries of one head for each of its consumer warpgroups (forward_consumer.py), and
walks over the keys; the consumers share the tensor cores by ping-pong. It may be persistent over
several tiles of queries of the head. With values wider than 256 two consumers own 64 queries:
`attend_second`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import decoding
from pallas_flash.kernels.hopper import sync, tile
from pallas_flash.kernels.hopper.forward_consumer import (
    ForwardConsumer,
    Handed,
    Program,
    attend_second,
)
from pallas_flash.kernels.hopper.tile_sizes import ROWS, HopperTiles, QueryTiles
from pallas_flash.kernels.mosaic import (
    block_info,
    elements,
    scheduler,
    statistics,
)
from pallas_flash.kernels.mosaic.launch import barriers, launch, shared_matrix
from pallas_flash.kernels.mosaic.statistics import ForwardInputs
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

# Rows for head sizes, by registers, spills, shared memory and instructions of the code compiled for
# an H200, and by the clock of an H100: NOTES.md#as-compiled, results.md#hopper-by-the-clock.
TILES = (
    # three warpgroups hide more latency than two, but spill with dropout, or where values have 128
    # columns; a threshold spills there with documents
    QueryTiles(64, 64, warpgroups=3, block_k=128, k_wait="early", q_stages=2),
    # with a threshold ptxas leaves the wait for products in its place: no early wait for K
    QueryTiles(64, 64, block_k=128, rescale_threshold=8.0),
    QueryTiles(64, 128, block_k=128, rescale_threshold=8.0),
    QueryTiles(128, 64, warpgroups=3, block_k=128, k_wait="early"),
    QueryTiles(128, 128, block_k=128, rescale_threshold=8.0, q_stages=2),
    QueryTiles(192, 128, block_k=128, rescale_threshold=8.0),
    # from here on shared memory is as busy as it can be, of which Q takes less the wider a block
    # is: 128 keys do not fit twice at 192, and spill at 256, where a threshold gains nothing
    QueryTiles(192, 192, block_k=96, k_wait="early"),
    QueryTiles(128, 256, block_k=96, k_wait="early"),
    QueryTiles(256, 256, block_k=80, k_wait="early"),
    # dropout, whose unit 80 keys do not divide into
    QueryTiles(256, 256, k_wait="early"),
    # blocks are as large as fit twice, with 128 queries where a warpgroup's registers hold o of 64
    QueryTiles(512, 256, k_wait="early"),
    QueryTiles(512, 256, block_k=32, k_wait="early"),
    QueryTiles(512, 512, k_wait="early", split=True),
    QueryTiles(512, 512, block_k=32, k_wait="early", split=True),
)


def forward(problem: Problem, tiles: HopperTiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows, with an l where the
    logits are in base e."""
    if tiles.decode is not None:
        return decoding.decode(problem, tiles.decode, x)
    p, t = problem, tiles.forward
    check(t, p.dtype)
    inputs = ForwardInputs.by_tma(p, t, x)
    if not isinstance(inputs.blocks, block_info.VisitedBlocks):
        by_consumer = block_info.by_query_tile(p, x, ROWS, t.block_k)
        inputs = inputs._replace(consumer_blocks=by_consumer)
    o_type = jax.ShapeDtypeStruct(
        (*inputs.q.shape[:3], inputs.keys.arrays[1].shape[3]), x.query.dtype
    )
    o, *stats = launch(
        functools.partial(_kernel, problem=p, tiles=t),
        inputs,
        programs=scheduler.query_programs(p, t.block_q, t.tiles_per_program),
        out_type=[o_type, *jax.tree.leaves(statistics.types(p, t.block_q))],
        warpgroups=t.warpgroups + 1,
        scratch=ForwardMemory.allocate(p, t),
        name="flash_attention_forward",
    )
    return o[:, : p.queries, :, : p.value_size], statistics.results(p, stats)


def check(t: QueryTiles, dtype: str):
    """Refuses tiles, which scripts/tune.py may have drawn, that would be wrong or wait for ever."""
    if t.k_wait == "early" and t.value_stages < 2:
        raise ValueError(
            "to wait for K early, while a block of V is held, takes value_stages of 2 or more, "
            f"or it waits for ever; got {t.value_stages}."
        )
    columns = elements.columns(dtype, t.swizzle)
    if t.split and (t.warpgroups != 2 or t.value_width % (2 * columns)):
        raise ValueError(
            "split must be by 2 warpgroups, of values whose halves are whole tiles of "
            f"{columns} columns; got {t.warpgroups}, {t.value_width}."
        )


class ForwardMemory(NamedTuple):
    """The shared memory of a program."""

    q: Any  # [q_stages x row_tiles, 64, the larger width], of the output in the end
    k: Any  # [stages, block_k, width]
    v: Any  # [value_stages, block_k, value_width], in tile.k_subtiles
    stats: Any  # for each field of the SoftmaxState [row_tiles, 64]
    handed: Handed | None  # where two consumers share the output
    q_full: Any
    k_full: Any
    v_full: Any

    @classmethod
    def allocate(cls, p: Problem, t: QueryTiles) -> "ForwardMemory":
        block = functools.partial(shared_matrix, p.dtype, swizzle=t.swizzle)
        tiles_of_q = t.q_stages * t.row_tiles
        fields = jax.tree.leaves(statistics.types(p, t.block_q))
        v = tile.subtile_blocks(p.dtype, t.value_stages, t.block_k, t.value_width, t.swizzle)
        return cls(
            q=block(tiles_of_q, ROWS, max(t.width, t.value_width)),
            k=block(t.stages, t.block_k, t.width),
            v=v,
            stats=(plgpu.SMEM((t.row_tiles, ROWS), jnp.float32),) * len(fields),
            handed=Handed.allocate(p, t) if t.split else None,
            q_full=barriers(tiles_of_q),
            k_full=barriers(t.stages),
            v_full=barriers(t.value_stages, len(v)),
        )


def _kernel(program, x: ForwardInputs, o_gmem, *outputs, problem: Problem, tiles: QueryTiles):
    *stats_gmem, memory = outputs
    owned = Program(problem, tiles, x, program)
    ids = sync.BarrierIds.make(tiles)
    k = sync.TmaRing(memory.k, memory.k_full, ids.first_ring, tiles.row_tiles)
    v_full = (memory.v_full,) * len(memory.v)
    v = sync.TmaRing(memory.v, v_full, ids.second_ring, tiles.warpgroups)

    def consume(wg):
        turns = sync.PingPong(ids.consumers, ids.single, tiles.row_tiles, wg)
        consumer = ForwardConsumer(owned, memory, o_gmem, stats_gmem, k, v, turns, wg)
        if not tiles.split:
            return consumer.run()
        first = consumer._replace(wg=0, handoff=sync.Handoff(memory.handed, *ids.handoff))
        pl.when(wg == 0)(first.run)
        pl.when(wg == 1)(lambda: attend_second(first._replace(column_slice=1)))

    def produce():
        def load(n, used):
            work = owned.work_tile(n)
            return tile.load_kv(x, work, owned.blocks_in_order(work), k, v, tiles, used)

        used = schedule.loop(0, tiles.tiles_per_program, load, jnp.int32(0))
        k.drain(used)
        v.drain(used)

    tile.specialize(tiles, consume, produce)
