"""The gradients of a bias and of the arrays that a score_mod reads, by mma, Hopper's and
Blackwell's too. They are dS, or what each pair adds to the gradient of what it reads, summed over
the pairs that share a number.

A program owns some of the sums, computes P again from lse for the tiles of scores that add to them,
and adds in one order: the gradients are the same each time.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.jax_support import hardware
from pallas_flash.kernels.mma import tile
from pallas_flash.kernels.mma.memory import PaddedRows, TileMemory, cheapest_that_fits
from pallas_flash.kernels.mma.tile_sizes import Gpu, MmaTiles, ScoreTiles
from pallas_flash.kernels.mosaic import block_info, logits, scheduler
from pallas_flash.kernels.mosaic.launch import LANE, launch
from pallas_flash.kernels.mosaic.registers import iota, load, per_column, per_row
from pallas_flash.kernels.mosaic.scheduler import WorkTile, divmod_
from pallas_flash.kernels.mosaic.statistics import GradientInputs
from pallas_flash.mods import captured
from pallas_flash.mods.captured import PAIR
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import schedule

# The sums of dS are one tile, so these know all heads of Hopper's family too. The last row of each
# is for GPUs with 99 KB of shared memory, and for heads above 256 on all. Decided as forward.TILES.
QUERY_TILES = (
    MmaTiles(64, 64, 64, 64),
    MmaTiles(512, 512, 64, 32),
    MmaTiles(512, 512, 64, 16),
)
KEY_TILES = (
    MmaTiles(64, 64, 64, 64, owns_keys=True),
    MmaTiles(512, 512, 32, 64, owns_keys=True),
    MmaTiles(512, 512, 16, 64, owns_keys=True),
)
ENTRIES = 32  # of an array, that a program owns
REDUCTION = 2048  # bytes of shared memory in which warps add up the columns of a tile of queries


class ScoreInputs(NamedTuple):
    """The inputs of all kernels of a call. `read`: the number of a read of the score_mod, to sum
    what each pair adds to its gradient in place of dS."""

    problem: Problem
    tiles: ScoreTiles
    operands: Operands
    rows: tuple  # lse, do, delta
    read: int | None = None


def score_tiles(problem: Problem) -> ScoreTiles | None:
    """The tiles for a problem; None where shared memory does not hold them."""
    by_query, by_key = (
        cheapest_that_fits(table, problem, Gpu.here(), TileMemory.allocate, beside=beside)
        for table, beside in (
            (QUERY_TILES, REDUCTION),
            (KEY_TILES, 0),
        )
    )
    return None if by_query is None or by_key is None else ScoreTiles(by_query, by_key)


def score_gradients(problem: Problem, tiles: ScoreTiles, x: Operands, lse, do, delta) -> tuple:
    """Gradients of the bias, None without one, and of the arrays that a score_mod reads."""
    inputs = ScoreInputs(problem, tiles, x, (lse, do, delta))
    bias = None if x.bias is None else _sums(inputs, problem.bias, x.bias.dtype)
    totals = [] if x.score is None else [jnp.zeros_like(array) for array in x.score.tables]
    for number, read in enumerate(x.score.mod.reads if totals else ()):
        if read.array < len(totals):
            total = totals[read.array]
            gradient = _read_gradient(inputs._replace(read=number), total.shape)
            totals[read.array] = total + gradient.astype(total.dtype)
    return bias, tuple(totals)


def _read_gradient(inputs: ScoreInputs, shape: tuple[int, ...]) -> jax.Array:
    """The part of one read in the gradient of an array of this shape."""
    p, score = inputs.problem, inputs.operands.score
    read = score.mod.reads[inputs.read]
    _, differ = read.axes
    sizes = [shape[axis] for axis in differ]
    entries = math.prod(sizes)
    if read.depends_on >= PAIR and entries < p.queries * p.keys // 4:
        sums = _entry_sums(inputs, entries)
        index, _ = score.captured_by_head(p.batch, p.heads)[inputs.read]
        index = [_four_axes(jnp.asarray(i)[..., None, None]) for i in index]
        entry = jnp.unravel_index(jnp.arange(entries, dtype=jnp.int32), sizes)
        for axis, i in zip(differ, entry, strict=True):
            index[axis] = _four_axes(i)
        return _ordered_scatter_add(sums, captured.flat_index(index, shape), shape)
    rows, keys = (jnp.arange(n, dtype=jnp.int32) for n in (p.queries, p.keys))
    pairs = score.pairs(p.batch, p.heads, rows, keys)
    index, _ = score.read_captured(lambda n, at: score.arrays[n][at], *pairs)[inputs.read]
    place = _four_axes(captured.flat_index([_four_axes(i) for i in index], shape))
    return _ordered_scatter_add(_sums(inputs, place.shape), place, shape)


def _four_axes(x) -> jax.Array:
    return jnp.reshape(x, (1,) * (4 - jnp.ndim(x)) + jnp.shape(x))


def _ordered_scatter_add(sums, place, shape: tuple[int, ...]) -> jax.Array:
    """Zeros of this shape with the sums added at the places, indices of the flat array; always in
    one order, as no scatter of XLA's does on a GPU."""
    sums = _reduce(sums, place.shape)
    place = jnp.broadcast_to(place, sums.shape).reshape(-1)
    order = jnp.argsort(place, stable=True)
    place, sums = place[order], sums.reshape(-1)[order]
    starts = jnp.concatenate([jnp.ones(1, bool), place[1:] != place[:-1]])

    def add(x, y):
        (a, starts_a), (b, starts_b) = x, y
        return jnp.where(starts_b, b, a + b), starts_a | starts_b

    totals, _ = lax.associative_scan(add, (sums, starts))
    entry = jnp.arange(math.prod(shape), dtype=jnp.int32)
    # not by jnp.searchsorted, whose types jax 0.12 takes in no equation of ours
    last = jnp.zeros_like(entry).at[place].max(jnp.arange(place.size, dtype=jnp.int32))
    return jnp.where(place[last] == entry, totals[last], 0.0).reshape(shape)


def _reduce(sums, shape):
    """Sums over the axes where the shape has 1."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and sums.shape[axis] > 1)
    return jnp.sum(sums, axes, keepdims=True) if axes else sums


def _sums(inputs: ScoreInputs, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Sums of a shape [B | 1, N | 1, T | 1, S | 1] over the axes that it broadcasts over. A program
    owns a tile of queries or of keys and sums over the others, or it owns a tile of both, and sums
    over batch rows and heads."""
    p, (by_query, by_key) = inputs.problem, (n > 1 for n in shape[2:])
    by_pair = by_query and by_key
    t = inputs.tiles.by_key if by_key and not by_query else inputs.tiles.by_query
    kernel, heads = (_pair_kernel, shape[:2]) if by_pair else (_side_kernel, (p.batch, p.heads))
    queries, keys = (p.queries, t.block_q), (p.keys, t.block_k)
    sides = [queries, keys] if by_pair else [keys if t.owns_keys else queries]
    tiles = [schedule.ceil_div(length, size) for length, size in sides]
    whole = (n * size for n, (_, size) in zip(tiles, sides, strict=True))
    out = jax.ShapeDtypeStruct((*heads, *whole), dtype if by_pair else jnp.float32)
    blocks = block_info.block_types if by_pair else None
    sums = _launch(kernel, inputs, t, math.prod((*heads, *tiles)), out, blocks)
    sums = sums[:, :, *(slice(length) for length, _ in sides)]
    if by_pair:
        return sums
    return _reduce(jnp.expand_dims(sums, 2 if t.owns_keys else 3), shape).astype(dtype)


# ---- the kernels ----


class TileLoop(NamedTuple):
    """A program's loop over tiles of scores."""

    problem: Problem
    tiles: MmaTiles
    read: int | None
    x: GradientInputs
    memory: TileMemory

    def over(self, work: WorkTile, blocks: schedule.Blocks, add: Callable, sums):
        """Computes sums = add(sums, tile, score_mod of the head, d) for each block of keys that a
        tile of queries meets, or block of queries that a tile of keys meets. d() is dS of that
        tile, or dS^T."""
        p, t, x, memory = self.problem, self.tiles, self.x, self.memory
        batch, head, _, owned_tile = work
        ring = tile.CopyRing(memory.ring, memory.ring_full)
        sides = (x.queries, head), (x.keys, divmod_(head, p.group)[0])
        (owned, owned_head), (others, others_head) = sides[::-1] if t.owns_keys else sides
        tile.release(t.tma)  # by the threads that still read the tile before
        load_others = others.loader(ring, batch, others_head, blocks)
        owned.copy(owned_tile, batch, owned_head, memory.owned, memory.owned_full)
        load_others(blocks.first)
        tile.wait(memory.owned_full)
        head_logits = logits.for_head(p, tile.LAYOUTS, x.logits, batch, head)
        head_logits = head_logits._replace(read=self.read)

        def load_rows(i):
            """lse, delta and mask of a tile of queries."""
            rows = pl.ds(i * t.block_q, t.block_q)
            layout = tile.LAYOUTS.column if t.owns_keys else tile.LAYOUTS.row
            each = (load(ref.at[batch, head, rows], layout) for ref in (x.lse, x.delta))
            return *each, head_logits.load_mask(batch, rows.start, t.block_q, t.owns_keys)

        owned_rows = None if t.owns_keys else load_rows(owned_tile)

        def step(n, sums, masked):
            block = ring.wait(n)
            load_others(n + 1)
            i, j = (owned_tile, blocks.index(n))[:: -1 if t.owns_keys else 1]
            at = head_logits.tile(i * t.block_q, j * t.block_k, self.shape, t.owns_keys)

            def gradient():
                lse, delta, mask = load_rows(i) if owned_rows is None else owned_rows
                product = lambda n: tile.dot_t(tile.load(memory.owned[n]), block[n])
                _, weight, back = head_logits.probabilities(
                    product(0), at, lambda: at.per_query(lse), mask if masked else None
                )
                return head_logits.gradient(weight, back, product(1), at.per_query(delta))

            return add(sums, at, head_logits.score_mod, gradient)

        return blocks.visit(step, sums)

    def add_gradients(self, work: WorkTile, blocks: schedule.Blocks, sums):
        """sums plus dS of each of these tiles."""
        return self.over(work, blocks, lambda sums, at, mod, gradient: sums + gradient(), sums)

    def blocks(self, work: WorkTile) -> schedule.Blocks:
        """The blocks that a tile of queries, or of keys, meets."""
        p, t, x = self.problem, self.tiles, self.x
        if t.owns_keys:
            return block_info.query_blocks(x, work, p, t)(0)[0]
        return block_info.visited(x, work, p, t)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a tile of scores."""
        t = self.tiles
        return (t.block_k, t.block_q) if t.owns_keys else (t.block_q, t.block_k)

    def zeros(self):
        return tile.zeros(*self.shape)


def _launch(kernel, inputs: ScoreInputs, t: MmaTiles, programs: int, out, blocks=None) -> jax.Array:
    p, x = inputs.problem, inputs.operands
    (sums,) = launch(
        lambda program, x, out, memory: kernel(
            program, TileLoop(p, t, inputs.read, x, memory), out
        ),
        GradientInputs.make(PaddedRows.make, p, t, x, *inputs.rows, blocks),
        programs=programs,
        out_type=[out],
        warpgroups=1,
        scratch=TileMemory.allocate(p, t),
        name="flash_attention_dbias" if inputs.read is None else "flash_attention_dcaptured",
        semantics=LANE,
        reduction_scratch=0 if t.owns_keys else REDUCTION,
    )
    return sums


def _side_kernel(program, loop: TileLoop, out):
    p, t = loop.problem, loop.tiles
    if t.owns_keys:  # of one query head
        p = dataclasses.replace(p, kv_heads=p.heads)
        size, work = t.block_k, scheduler.key_tile(program, p, t)
    else:
        size, work = t.block_q, scheduler.query_tile(program, p, t)
    sums = loop.add_gradients(work, loop.blocks(work), loop.zeros())
    rows = pl.ds(work.tile * size, size)
    tile.store(out.at[work.batch, work.head, rows], jnp.sum(sums, axis=1))


def _pair_kernel(program, loop: TileLoop, out):
    p, t, block_types = loop.problem, loop.tiles, loop.x.blocks
    _, _, tiles_q, tiles_k = block_types.shape
    rest, j = divmod_(program, tiles_k)
    rest, i = divmod_(rest, tiles_q)
    owned = divmod_(rest, out.shape[1])  # batch row and head
    ((first, batches), (first_head, heads)) = (
        (0, n) if owned_count == 1 else (index, 1)
        for n, owned_count, index in zip((p.batch, p.heads), out.shape, owned, strict=False)
    )

    def pair(n, sums):
        b, h = divmod_(n, heads)
        work = WorkTile(first + b, first_head + h, None, i)
        kind = block_types[(*block_info.broadcast_index(block_types, *work[:2]), i, j)]
        visible, partial = (kind > 0).astype(jnp.int32), (kind == 1).astype(jnp.int32)
        blocks = schedule.Blocks(j, j + partial, j + visible, j + visible)
        return schedule.loop(
            0, visible, lambda _, sums: loop.add_gradients(work, blocks, sums), sums
        )

    sums = schedule.loop(0, batches * heads, pair, loop.zeros())
    rows, keys = (pl.ds(n * size, size) for n, size in ((i, t.block_q), (j, t.block_k)))
    tile.store(out.at[(*owned, rows, keys)], sums.astype(out.dtype))


def _entry_sums(inputs: ScoreInputs, entries: int) -> jax.Array:
    """Sums [B, N, 1, entries] over all pairs of a head that read one entry along the axes whose
    index differs."""
    # registers hold sums, dS, and which entry each pair reads
    t = inputs.tiles.by_query
    t = t._replace(block_k=min(t.block_k, 32))
    p = inputs.problem
    groups, tiles = schedule.ceil_div(entries, ENTRIES), schedule.ceil_div(p.queries, t.block_q)
    pairs = p.batch * p.heads * groups
    # as many programs as keep the GPU busy
    splits = min(tiles, schedule.ceil_div(4 * hardware.processors(), pairs))
    out = jax.ShapeDtypeStruct((p.batch, p.heads, splits, groups * ENTRIES), jnp.float32)
    sums = _launch(_entry_kernel, inputs, t, pairs * splits, out)
    return jnp.sum(sums[..., :entries], 2, keepdims=True)


def _entry_kernel(program, loop: TileLoop, out):
    p, t = loop.problem, loop.tiles
    splits = out.shape[2]
    rest, split = divmod_(program, splits)
    rest, head = divmod_(rest, p.heads)
    group, batch = divmod_(rest, p.batch)
    first = group * ENTRIES
    shape = t.block_q, ENTRIES
    number = per_column(iota(ENTRIES, tile.LAYOUTS.column), shape)

    def add(sums, at, mod, gradient):
        entry = mod.place(loop.read, at, mod.bound.mod.reads[loop.read].axes[1])
        low = jnp.maximum(jnp.min(jnp.min(entry, axis=1), axis=0), first)
        high = jnp.minimum(jnp.max(jnp.max(entry, axis=1), axis=0) + 1, first + ENTRIES)

        def add_entries(_, sums):
            d = gradient()

            def add_entry(e, sums):
                row = jnp.sum(jnp.where(entry == e, d, 0.0), axis=1)
                return sums + jnp.where(number == e - first, per_row(row, shape), 0.0)

            return schedule.loop(low, high, add_entry, sums)

        return schedule.loop(0, (low < high).astype(jnp.int32), add_entries, sums)

    def query_tile(n, sums):
        work = WorkTile(batch, head, None, split + n * splits)
        return loop.over(work, loop.blocks(work), add, sums)

    tiles = schedule.ceil_div(p.queries, t.block_q)
    count = divmod_(tiles - 1 - split, splits)[0] + 1
    sums = schedule.loop(0, count, query_tile, tile.zeros(*shape))
    tile.store(out.at[batch, head, split, pl.ds(first, ENTRIES)], jnp.sum(sums, axis=0))
