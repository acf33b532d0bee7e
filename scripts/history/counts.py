"""What generations.py counts: each generation on a problem, the way from the paper's bytes to those
of the kernels, sweeps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import accounting as a
from pallas_flash import explain
from pallas_flash.accounting import Cost, published

GENERATIONS = ("standard", "standard, online softmax", "flash1", "triton", "hopper")
# the GPUs of least times: the paper's, and one that runs every generation
FIRST, SECOND = "A100-40GB", "H200"
PUBLISHED_SPEED_UP, PUBLISHED_MEMORY = (2, 4), (10, 20)


def the_problem(batch: int, length: int, heads: int, head_size: int, causal: bool = False):
    q = jax.ShapeDtypeStruct((batch, length, heads, head_size), "float16")
    return explain(q, q, q, is_causal=causal).problem


def tiles_of(name: str, p) -> Any:
    generation, _, online = name.partition(", ")
    tiles = a.default_tiles(generation, p)
    return tiles._replace(online=True) if online else tiles


def kernels_of(name: str, p, tiles: Any = None) -> dict[str, Cost]:
    """Of the forward and the backward."""
    generation, tiles = name.partition(", ")[0], tiles or tiles_of(name, p)
    passes = dict(
        forward=a.forward(generation, p, tiles), backward=a.backward(generation, p, tiles)
    )
    return {
        f"{which}: {kernel}": cost
        for which, costs in passes.items()
        for kernel, cost in costs.items()
    }


class Count(NamedTuple):
    """Forward and backward together."""

    products: float  # of T x S by the head size; part of a padded tile counts
    matrix: int  # FLOPs
    other: int
    exponentials: int
    bytes: int
    printed: float | None  # FLOPs as the paper seems to have counted them, where it is the paper's
    extra: int | None  # bytes of memory at the worst moment, beyond operands and results
    least: dict[str, float]  # seconds, by GPU that can run it


def count(p, kernels: dict[str, Cost], gpus=(FIRST, SECOND), **more) -> Count:
    whole = a.total(kernels)
    one = 2 * p.batch * p.heads * p.queries * p.keys * p.head_size
    least = {gpu: a.GPUS[gpu].roofline(kernels, p.dtype) for gpu in gpus}
    facts = dict(printed=None, extra=None) | more
    return Count(
        whole.matrix / one,
        whole.matrix,
        whole.other,
        whole.exponentials,
        whole.bytes,
        **facts,
        least=least,
    )


def memory(name: str, p) -> int:
    return max(a.extra_memory(name.partition(", ")[0], p).values())


def table(p) -> dict[str, Count]:
    """The paper's two, by its formulas, and the kernels."""
    papers = dict(standard=published.frameworks(p), flash=published.flash(p))
    counts = {
        f"{name}, the paper's": count(p, k, printed=published.printed_flops(p, k))
        for name, k in papers.items()
    }
    runs_on = lambda name: (SECOND,) if name == "hopper" else (FIRST, SECOND)
    return counts | {
        name: count(p, kernels_of(name, p), runs_on(name), extra=memory(name, p))
        for name in GENERATIONS
    }


def least_by_unit(p) -> dict[str, dict[str, float]]:
    """How long each unit of the second GPU is busy at least, all kernels together."""
    return {
        name: a.GPUS[SECOND].seconds(a.total(kernels_of(name, p)), p.dtype) for name in GENERATIONS
    }


# ---- from the paper's bytes to the kernels' ----


class Way(NamedTuple):
    """Steps of bytes from one count to another."""

    start: str
    stop: str
    begin: int
    steps: list[tuple[str, int]]  # why, and what it adds

    @property
    def end(self) -> int:
        return self.begin + sum(step for _, step in self.steps)


def ways(p) -> list[Way]:
    """For whole tiles, as many key heads as query heads, no mask, elements of 16 bits, as in the
    paper's problem."""
    return [_to_standard(p), _to_online(p), _to_flash1(p), _to_portable(p), _to_hopper(p)]


class Arrays:
    """Bytes of the arrays of all heads, and the number of tiles of queries and keys."""

    def __init__(self, p, block_q: int = 1, block_k: int = 1):
        rows, keys = p.batch * p.heads * p.queries, p.batch * p.kv_heads * p.keys
        self.e = jnp.dtype(p.dtype).itemsize
        self.q, self.o = rows * p.head_size * self.e, rows * p.value_size * self.e
        self.key, self.value = keys * p.head_size * self.e, keys * p.value_size * self.e
        self.statistic = 4 * rows
        self.entries = rows * p.keys  # of S
        self.n_q, self.n_k = -(-p.queries // block_q), -(-p.keys // block_k)


def _bytes(kernels: dict[str, Cost], *names: str) -> int:
    return sum(cost.bytes for name, cost in kernels.items() if not names or name.endswith(names))


def _to_standard(p) -> Way:
    t = tiles_of("standard", p)
    z = Arrays(p, t.block_q, t.block_k)
    n, e = z.entries, z.e
    # of S twice, P V, dP, dQ, dK, dV
    loads = z.n_k * (3 * z.q + 2 * z.o) + z.n_q * (3 * z.key + 2 * z.value)
    stores = z.o + z.q + z.key + z.value
    once = 3 * (z.q + z.key + z.o + z.value)  # of the paper's six products
    steps = [
        ("no kernel of its own for the mask", -2 * e * n),
        ("no dropout, and no bytes of its mask", -(4 * e + 2) * n),
        ("the safe softmax reads S three times, not once", 2 * e * n),
        (
            "S and dP are float32: S written once and read four times, in the backward in place of "
            "P; dP",
            7 * (4 - e) * n,
        ),
        ("P is not kept: the backward writes S and P again", (4 + e) * n),
        (
            "a program holds a tile of its result, and loads Q, K, V, dO again for each",
            loads + stores - once,
        ),
        (
            "m, l, log-sum-exp, rowsum(o do), and do with a factor",
            z.statistic * (2 + 2 * z.n_k) + a.backward("standard", p)["delta"].bytes,
        ),
    ]
    return Way("standard, the paper's", "standard", _bytes(published.frameworks(p)), steps)


def _to_online(p) -> Way:
    steps = [("maximum and sum in one pass over S", -4 * Arrays(p).entries)]
    return Way("standard", "standard, online softmax", _bytes(kernels_of("standard", p)), steps)


def _to_flash1(p) -> Way:
    t = tiles_of("flash1", p)
    z = Arrays(p, t.block_q, t.block_k)
    sram = 4 * p.head_size * t.block_k
    begin, smaller = _bytes(published.flash(p)), _bytes(published.flash(p, sram))
    wider = (2 * z.n_k + 1) * (z.o + z.q) * (4 - z.e) // z.e
    steps = [
        (
            f"tiles for an SRAM of {sram * z.e // 1024} KiB, not "
            f"{published.A100_SRAM * z.e // 1024}: {z.n_k} of keys",
            smaller - begin,
        ),
        ("O and dQ, which are read and written for each tile, are float32", wider),
        ("XLA casts them", _bytes(kernels_of("flash1", p), "cast")),
        (
            "rowsum(o do) once, so that the backward does not read O",
            a.backward("flash1", p)["delta"].bytes - z.n_k * z.o,
        ),
        ("dK and dV are not written as zeros first", -z.key - z.value),
    ]
    return Way("flash, the paper's", "flash1", begin, steps)


def _to_portable(p) -> Way:
    old, new = tiles_of("flash1", p), tiles_of("triton", p)
    z, f = Arrays(p, old.block_q, old.block_k), Arrays(p, new.forward.block_q, new.forward.block_k)
    dkv, dq = (Arrays(p, t.block_q, t.block_k) for t in (new.dkv, new.dq))
    kernels = kernels_of("flash1", p)
    sums = 2 * z.n_k + 1  # times that a sum in device memory is read and written
    state, wide, rows = (
        4 * z.o // z.e + 2 * z.statistic,
        4 * z.q // z.e,
        z.q + z.o + 2 * z.statistic,
    )
    steps = [
        (
            "O, l, m stay on the chip",
            z.o + 2 * z.statistic - sums * state - _bytes(kernels, "forward: cast"),
        ),
        (
            f"forward: Q once, not {z.n_k} times; K and V {f.n_q} times, not once",
            (f.n_q - 1) * (z.key + z.value) - (z.n_k - 1) * z.q,
        ),
        ("dQ stays on the chip", z.q - sums * wide - _bytes(kernels, "backward: cast")),
        (
            f"but has a kernel of its own, which loads Q and dO once, K and V {dq.n_q} times",
            rows + dq.n_q * (z.key + z.value),
        ),
        (
            f"dK and dV: {dkv.n_k} tiles of keys, not {z.n_k}, and a list of blocks for each",
            (dkv.n_k - z.n_k) * rows + 16 * p.batch * p.kv_heads * dkv.n_k,
        ),
    ]
    return Way("flash1", "triton", _bytes(kernels), steps)


def _to_hopper(p) -> Way:
    old, new = tiles_of("triton", p), tiles_of("hopper", p)
    each = lambda part, side: [
        getattr(Arrays(p, t.block_q, t.block_k), side)
        for t in (getattr(old, part), getattr(new, part))
    ]
    (f, F), (q, Q), (k, K) = each("forward", "n_q"), each("dq", "n_q"), each("dkv", "n_k")
    z = Arrays(p)
    keys, rows = z.key + z.value, z.q + z.o + 2 * z.statistic
    steps = [
        (
            f"forward: warpgroups share K and V, {new.forward.block_q} queries to a program: {F} "
            f"times, not {f}",
            (F - f) * keys,
        ),
        (f"dQ: the same, {new.dq.block_q} queries: {Q} times, not {q}", (Q - q) * keys),
        (
            f"dK and dV: they share Q and dO, {new.dkv.block_k} keys: {K} times, not {k}",
            (K - k) * rows,
        ),
        ("without a mask there is no list of blocks", -16 * p.batch * p.kv_heads * k),
        ("m and l are one number, and leave no factor to do", -z.o - 2 * z.statistic),
        (
            "it is written in rows of whole tiles",
            4 * p.batch * p.heads * (F * new.forward.block_q - p.queries),
        ),
    ]
    return Way("triton", "hopper", _bytes(kernels_of("triton", p)), steps)


# ---- sweeps ----


class AtLength(NamedTuple):
    """Of one sequence."""

    length: int
    causal: bool
    bytes: dict[str, int]  # by generation
    extra: dict[str, int]  # memory beyond operands and results
    arrays: int  # operands and results of forward and backward
    # what frameworks keep for the backward: P, P after dropout, and a byte of dropout's mask
    kept: int
    flash: int  # what the paper's algorithm keeps: l and m


def by_length(p, lengths: list[int]) -> list[AtLength]:
    rows = []
    for causal in (False, True):
        for length in lengths:
            one = the_problem(1, length, p.heads, p.head_size, causal)
            kernels = {name: kernels_of(name, one) for name in GENERATIONS}
            z = Arrays(one)
            rows.append(
                AtLength(
                    length,
                    causal,
                    {name: _bytes(costs) for name, costs in kernels.items()},
                    {name: memory(name, one) for name in GENERATIONS},
                    2 * (z.q + z.key + z.value + z.o) + z.statistic,
                    (2 * z.e + 1) * z.entries,
                    2 * z.statistic,
                )
            )
    return rows


class AtBlock(NamedTuple):
    tiles: Any
    sram: int  # elements that the paper's choice of tiles takes
    forward: int  # bytes
    backward: int
    paper: int  # the paper's algorithms with the same tiles of keys
    bound: float  # the lower bound, bytes of the forward


def by_block(p, blocks: list[int]) -> list[AtBlock]:
    """flash1 with B_c keys and B_r = min(B_c, H) queries to a tile."""
    rows = []
    for block in blocks:
        tiles = tiles_of("flash1", p)._replace(block_q=min(block, p.head_size), block_k=block)
        sram = 4 * p.head_size * block
        forward, backward = (_bytes(f("flash1", p, tiles)) for f in (a.forward, a.backward))
        bound = a.lower_bound(p, sram) * Arrays(p).e
        rows.append(
            AtBlock(tiles, sram, forward, backward, _bytes(published.flash(p, sram)), bound)
        )
    return rows
