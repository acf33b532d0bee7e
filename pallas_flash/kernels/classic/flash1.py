"""FlashAttention's first algorithm (arXiv:2205.14135, algorithms 1 and 4): tiles of keys outside,
tiles of queries inside.

A program owns a head. Its O, l and m stay in device memory, are read and written again for every
tile of keys, and after every tile hold the exact result for the keys so far. The backward does the
same with dQ. Masks hide, but skip no tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_flash.kernels.pallas_call import mods, power_of_two, tile
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import online_softmax, schedule


class Tiles(NamedTuple):
    block_q: int  # B_r of the paper
    block_k: int  # B_c
    num_warps: int = 8
    num_stages: int = 2

    def __str__(self):
        return f"{self.block_q} x {self.block_k}, {self.num_warps} warps"


def tiles(problem: Problem) -> Tiles:
    """The paper's tiles for an SRAM of 64 KiB. An SM has 100 to 228 KiB, and holds more there than
    q, k, v and o."""
    return tiles_for(problem, 2**16 // jnp.dtype(problem.dtype).itemsize)


def tiles_for(problem: Problem, sram: int) -> Tiles:
    """B_c = ceil(M / 4 H) and B_r = min(B_c, H) for an SRAM of M = `sram` elements, rounded
    to powers of two, which Triton asks for."""
    p = problem
    size = power_of_two(max(p.head_size, p.value_size))
    # the largest power of two that is not above B_c
    block_k = power_of_two(schedule.ceil_div(sram, 4 * size) // 2 + 1)
    return Tiles(min(block_k, size, power_of_two(p.queries)), min(block_k, power_of_two(p.keys)))


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot run a problem, beyond `pallas_call.why_not`; or None."""
    if problem.score is not None:
        return "it has no gradients for the arrays of a score_mod"
    return "it has no gradient for a bias" if problem.bias is not None else None


def forward(problem: Problem, tiles: Tiles, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    p, x = problem, mods.flatten(x)
    index = lambda n, b: dict(b=b, B=b, n=n, k=n // p.group)
    grid = tile.grid(p, tiles, (p.heads, p.batch), index)
    out = [(jnp.float32, "btnv"), *[(jnp.float32, "bnt")] * p.statistics]
    o, *stats = grid.launch(_kernel, x, out=out, name="flash1_attention_forward")
    return (o if p.kept == 1 else o / p.kept).astype(x.query.dtype), online_softmax.SoftmaxState(
        *stats
    )


def _kernel(x: Operands, o_ref, *stats_refs, problem: Problem, tiles: Tiles):
    p, pair = problem, (pl.program_id(1), pl.program_id(0))
    columns = tile.head(o_ref, p.value_size)

    def start(row, _):
        stats = tile.start(p, x, tiles.block_q)
        write(row, jnp.zeros((tiles.block_q, o_ref.shape[1]), jnp.float32), stats)

    def write(row, o, stats):
        tile.store(tile.subtile(o_ref, row.slice), o, row.inside, columns)
        for ref, x in zip(stats_refs, jax.tree.leaves(stats), strict=True):
            tile.store(ref.at[row.slice], x, row.inside)

    def key_tile(j, _):
        key = tile.span(j, tiles.block_k, p.keys)
        # [bk, H], [bk, Hv]
        k, v = tile.keys_and_values(p, x.key.at[key.slice], x.value.at[key.slice], key.inside)

        def query_tile(row, _):
            mask = tile.mask(x.resolved_mask, row, p.queries, pair=pair)
            # [bq, H]
            q = tile.load(x.query.at[row.slice], row.inside, tile.head(x.query, p.head_size))
            o = tile.load(o_ref.at[row.slice], row.inside, columns)  # [bq, Hv]
            stats = online_softmax.SoftmaxState(
                *(tile.load(ref.at[row.slice], row.inside) for ref in stats_refs)
            )
            s = tile.scores(p, q, k, None)  # [bq, bk]
            s = jnp.where(mask.visible(key, tile.dense(x.mask, (), row, key), True), s, -jnp.inf)
            prob, alpha, new = online_softmax.step(s, stats, p.log_base)
            prob = tile.drop(p, x.seeds, (), row, key, prob)
            pv = tile.dot(prob.astype(v.dtype), jnp.where(mask.reach(key, True)[:, None], v, 0))
            o = ((stats.l * alpha)[:, None] * o + pv) / jnp.where(new.l == 0, 1.0, new.l)[:, None]
            write(row, o, new)

        _for_query_tiles(p, tiles, query_tile, None)

    _for_query_tiles(p, tiles, start, None)
    schedule.loop(0, schedule.ceil_div(p.keys, tiles.block_k), key_tile, None)


def _for_query_tiles(p: Problem, tiles: Tiles, body, carry):
    """Runs carry = body(rows, carry) over all tiles of queries. Every thread may read afterwards
    what the body wrote."""
    step = lambda i, carry: body(tile.span(i, tiles.block_q, p.queries), carry)
    carry = schedule.loop(0, schedule.ceil_div(p.queries, tiles.block_q), step, carry)
    tile.barrier()
    return carry


def backward(problem: Problem, tiles: Tiles, x: Operands, lse, do, delta) -> Gradients:
    """The gradients of q, k and v. `lse` is the paper's m and l in one number; delta already
    includes the cotangent of lse."""
    p, x = problem, mods.flatten(x)
    index = lambda k, b: dict(b=b, B=b, n=k, k=k)
    grid = tile.grid(p, tiles, (p.kv_heads, p.batch), index, n=p.group)
    dq, dk, dv = grid.launch(
        *(_backward_kernel, x, (do, "btnv"), (lse, "bnt"), (delta, "bnt")),
        out=[(jnp.float32, "btnh"), (x.key.dtype, "bskh"), (x.value.dtype, "bskv")],
        name="flash1_attention_backward",
    )
    return Gradients(dq.astype(x.query.dtype), dk, dv)


def _backward_kernel(
    x: Operands,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    *,
    problem: Problem,
    tiles: Tiles,
):
    p, b, head = problem, pl.program_id(1), pl.program_id(0) * problem.group
    columns = tile.head(dq_ref, p.head_size)
    refs = tile.GradientRows(x.query, do_ref, lse_ref, delta_ref)

    def start(g, row, _):
        zeros = jnp.zeros((tiles.block_q, dq_ref.shape[2]), jnp.float32)
        tile.store(tile.subtile(dq_ref, row.slice, g), zeros, row.inside, columns)

    def key_tile(j, _):
        key = tile.span(j, tiles.block_k, p.keys)
        # [bk, H], [bk, Hv]
        k, v = tile.keys_and_values(p, x.key.at[key.slice], x.value.at[key.slice], key.inside)

        def query_tile(g, row, carry):
            dk, dv = carry
            mask = tile.mask(x.resolved_mask, row, p.queries, pair=(b, head + g))
            rows, valid = refs.at(row, g).load(p, row, row.inside), mask.valid(row, True)[:, None]
            rows = rows._replace(q=jnp.where(valid, rows.q, 0), do=jnp.where(valid, rows.do, 0))
            reach = mask.reach(key, True)[:, None]
            k_, v_ = jnp.where(reach, k, 0), jnp.where(reach, v, 0)
            visible = mask.visible(key, tile.dense(x.mask, (g,), row, key), True)
            drop = functools.partial(tile.drop, p, x.seeds, (g,), row, key)
            prob, ds = tile.gradients(p, rows, k_, v_, None, visible, drop)  # [bq, bk]
            ds = ds.astype(k.dtype)
            dq = tile.load(dq_ref.at[row.slice, g], row.inside, columns)
            dq = dq + p.scale * tile.dot(ds, k_)
            tile.store(tile.subtile(dq_ref, row.slice, g), dq, row.inside, columns)
            return dk + tile.t_dot(ds, rows.q), dv + tile.t_dot(prob.astype(k.dtype), rows.do)

        zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        dk, dv = _for_heads(p, tiles, query_tile, zeros)
        tile.store(
            tile.subtile(dk_ref, key.slice),
            dk * p.scale,
            key.inside,
            tile.head(dk_ref, p.head_size),
        )
        tile.store(tile.subtile(dv_ref, key.slice), dv, key.inside, tile.head(dv_ref, p.value_size))

    _for_heads(p, tiles, start, None)
    schedule.loop(0, schedule.ceil_div(p.keys, tiles.block_k), key_tile, None)


def _for_heads(p: Problem, tiles: Tiles, body, carry):
    """Runs carry = body(head, rows, carry) over all heads of a group and all tiles of queries."""
    query_head = lambda g, carry: _for_query_tiles(p, tiles, functools.partial(body, g), carry)
    return schedule.loop(0, p.group, query_head, carry)
