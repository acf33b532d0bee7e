"""python scripts/generations.py [--out FILE]

Counts the generations of attention, from standard attention to FlashAttention-4, on the problem of
FlashAttention's paper (GPT-2 medium, forward and backward): FLOPs, exponentials, bytes, memory, and
the time of these at a GPU's peak rates. Prints a table and draws it. Nothing is measured: to time
the same implementations, run scripts/benchmark.py with --implementations. The kernels in Mosaic GPU
need jax 0.11.2: with another they are left out.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash import explain
from pallas_flash.accounting import GPUS, Cost, total
from scripts.bench.gpu_code import as_if_on
from scripts.bench.pictures import Figure, matplotlib, write
from scripts.bench.report import print_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "design" / "generations.svg"
# the paper's GPU, and those that run FlashAttention-3 and FlashAttention-4
SHOWN = FIRST, SECOND, THIRD = "A100-40GB", "H200", "B200"
PRINTED = [
    ("the paper's standard, as printed", "", "66.6", "", "40.3", "", "41.7 measured", "", ""),
    ("the paper's flash, as printed", "", "75.2", "", "4.4", "", "7.3 measured", "", ""),
]
NOTE = """The paper (arXiv:2205.14135, figure 2) had a mask and dropout, kept P for the backward and
held all of S in 16 bits, where the kernels here have S in float32. Its GFLOPs fit the products of
one head: those of all 16 are {} and {}. Bytes are those asked of device memory, some of
which a cache may serve. A roofline is as long as the busiest unit of each kernel, at peak rates."""


class Attention(NamedTuple):
    """A problem: 16 bits, as many keys as queries, T of them, as many key heads as query heads."""

    B: int
    T: int
    N: int
    H: int
    causal: bool = False

    @property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.B * self.N

    @property
    def scores(self) -> int:
        """Entries of S."""
        return self.heads * self.T**2

    @property
    def tensor(self) -> int:
        """Bytes of Q, and as many of K, V and O."""
        return 2 * self.heads * self.T * self.H

    @property
    def rows(self) -> int:
        """Bytes of a float32 of each row."""
        return 4 * self.heads * self.T

    def tiles(self, implementation: str, gpu: str = SECOND) -> Any:
        """Raises NotImplementedError where this jax lacks the kernels."""
        q = jax.ShapeDtypeStruct((self.B, self.T, self.N, self.H), "float16")
        call = dict(is_causal=self.causal, deterministic=True, implementation=implementation)
        with as_if_on(GPUS[gpu]):
            return explain(q, q, q, **call).tiles


GPT2_MEDIUM = Attention(64, 1024, 16, 64)


# ---- the kernels ----


class Tiles(NamedTuple):
    """S of each head in tiles, of which a kernel visits those that the mask leaves."""

    p: Attention
    block_q: int
    block_k: int

    def row_stops(self) -> np.ndarray:
        """The first row behind each block of queries."""
        return np.arange(self.block_q, self.p.T + self.block_q, self.block_q)

    def key_blocks(self) -> np.ndarray:
        """How many each block of queries visits, under a causal mask up to its last row."""
        stops = self.row_stops() if self.p.causal else np.full_like(self.row_stops(), self.p.T)
        return -(-np.minimum(stops, self.p.T) // self.block_k)

    def keys(self, stops=np.inf) -> int:
        """Keys that all blocks of queries load: whole blocks, or up to `stops`."""
        return int(np.minimum(self.key_blocks() * self.block_k, stops).sum())

    def query_blocks(self) -> np.ndarray:
        """How many each block of keys visits, under a causal mask from its first key on."""
        first = np.arange(0, self.p.T, self.block_k) // self.block_q
        return -(-self.p.T // self.block_q) - (first if self.p.causal else 0 * first)

    def cost(self, visits, products: int, reads: int, writes: int, alpha: int = 0) -> Cost:
        """The cost of so many products of each tile; with `alpha` 1 each rescales the rows of O."""
        rows = self.p.heads * int(visits.sum()) * self.block_q
        matrix = 2 * products * rows * self.block_k * self.p.H
        return Cost(matrix, rows * (self.block_k + alpha), reads, writes)


def standard(p: Attention, t, passes: int = 3) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Three kernels forward, six backward, S and dP in float32 between them. The safe softmax reads
    S three times; the online softmax two times, with alpha for each tile of a row."""
    n, q, rows = p.scores, p.tensor, p.rows
    n_q, n_k = p.T // t.block_q, p.T // t.block_k
    product = lambda reads, writes: Cost(2 * n * p.H, 0, reads, writes)
    scores = product((n_k + n_q) * q, 4 * n)
    exponentials = 2 * n + (n // t.block_k if passes == 2 else 0)
    forward = dict(
        scores=scores,
        softmax=Cost(0, exponentials, 4 * passes * n, 2 * n + 2 * rows),
        values=product(2 * n + n_q * q, q),
    )
    backward = dict(
        scores=scores,
        dp=scores,
        softmax_backward=Cost(0, n, 8 * n + 2 * n_k * rows, 4 * n),
        dq=product(2 * n + n_q * q, q),
        dk=product(2 * n + n_k * q, q),
        dv=product(2 * n + n_k * q, q),
    )
    return forward, dict(delta=Cost(0, 0, 2 * q + 3 * rows, q + 2 * rows)) | backward


def flash1(p: Attention, t) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Keys outside: for each block of keys Q is read, and O, m and l read and written, in float32;
    in the backward Q and dO read, dQ read and written. These sums begin as zeros in memory."""
    n, q, rows, n_k = p.scores, p.tensor, p.rows, p.T // t.block_k
    o, dq = 2 * q + 2 * rows, 2 * q
    cast = Cost(0, 0, 2 * q, q)  # by XLA, of sums to 16 bits
    forward = Cost(4 * n * p.H, n + n // t.block_k, 2 * q + n_k * (q + o), (n_k + 1) * o)
    reads = 2 * q + n_k * (2 * q + 2 * rows + dq)
    backward = Cost(10 * n * p.H, n, reads, (n_k + 1) * dq + 2 * q)
    delta = Cost(0, 0, 2 * q + 3 * rows, q + 2 * rows)
    return dict(forward=forward, cast=cast), dict(delta=delta, backward=backward, cast=cast)


def flash2(
    p: Attention, t, forward: Cost, delta: Cost, keys=Tiles.keys, lists: int = 0, statistics=None
) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """The backward of FlashAttention-2 and 3: dQ has a kernel of its own, so S and dP are computed
    twice. `lists` are bytes for each block of keys; `statistics` those of lse and delta for dQ."""
    dkv, dq = (Tiles(p, x.block_q, x.block_k) for x in (t.dkv, t.dq))
    row = 4 * p.H  # bytes of one of K and V, or of Q and dO
    visits = dkv.query_blocks()
    queries = int(visits.sum()) * dkv.block_q * (row + 8)  # with lse and delta
    reads = 2 * p.tensor + p.heads * (queries + lists * visits.size)
    statistics = 2 * p.rows if statistics is None else statistics
    dq_reads = p.heads * (p.T + keys(dq)) * row + statistics
    return dict(forward=forward), dict(
        delta=delta,
        dkv=dkv.cost(visits, 4, reads, 2 * p.tensor),
        dq=dq.cost(dq.key_blocks(), 3, dq_reads, p.tensor),
    )


def triton(p: Attention, t, by_mma: bool = False) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """FlashAttention-2. Queries outside: O, m and l stay on the chip, K and V are loaded for each
    block of queries, under a mask up to the last row's key. Which blocks a program visits is a
    list. By mma whole blocks are copied, which ones is computed, and m and l are one number."""
    forward, q, rows = Tiles(p, t.forward.block_q, t.forward.block_k), p.tensor, p.rows
    keys = lambda x: x.keys(x.row_stops() if p.causal and not by_mma else np.inf)
    reads, statistics = q + p.heads * keys(forward) * 4 * p.H, rows if by_mma else 2 * rows
    cost = forward.cost(forward.key_blocks(), 2, reads, q + statistics, 1)
    delta = Cost(0, 0, 2 * q + rows + statistics, 2 * rows + (0 if by_mma else q))
    return flash2(p, t, cost, delta, keys, lists=0 if by_mma else 16)


ampere = functools.partial(triton, by_mma=True)


def hopper(p: Attention, t) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """FlashAttention-3 with deterministic=True. The warpgroups of a CTA share K and V, whole blocks
    of which TMA copies; each computes the blocks that its 64 rows see. m and l leave the kernel as
    one number, in rows of whole tiles."""
    forward, q, rows = Tiles(p, t.forward.block_q, t.forward.block_k), p.tensor, p.rows
    warpgroup, padded = forward._replace(block_q=64), forward.row_stops()[-1]
    # a warpgroup whose rows lie beyond the last computes what the last rows see
    visits = warpgroup.key_blocks()[np.minimum(np.arange(padded // 64), p.T // 64 - 1)]
    reads = q + p.heads * forward.keys(p.T) * 4 * p.H
    cost = warpgroup.cost(visits, 2, reads, q + 4 * p.heads * int(padded), 1)
    statistics = 8 * p.heads * -(-p.T // t.dq.block_q) * t.dq.block_q
    # XLA prepares lse and dlse, and the kernel of dQ sums delta
    before = Cost(0, 0, rows, 2 * rows)
    forward, backward = flash2(p, t, cost, before, statistics=statistics)
    delta = Cost(0, 0, q, statistics // 2)
    return forward, backward | dict(dq=total(dict(dq=backward["dq"], delta=delta)))


def hopper_memory(p: Attention) -> int:
    """lse, and delta in rows of whole tiles."""
    block_q = p.tiles("hopper").dq.block_q
    return p.rows + 4 * p.heads * -(-p.T // block_q) * block_q


def blackwell(p: Attention, t) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """FlashAttention-4 with two kernels backward, a share of whose exponentials are polynomials.
    Both tiles of a program forward compute all blocks that it copies. m and l leave the kernel as
    one number, in rows of whole programs."""
    forward, q, rows = Tiles(p, t.forward.block_q, t.forward.block_k), p.tensor, p.rows
    padded = 4 * p.heads * int(forward.row_stops()[-1])
    reads = q + p.heads * forward.keys(p.T) * 4 * p.H
    cost = forward.cost(forward.key_blocks(), 2, reads, q + padded, 1)
    statistics = 4 * p.heads * int(Tiles(p, t.dq.block_q, t.dq.block_k).row_stops()[-1])

    def with_polynomials(cost: Cost, tiles, products: int) -> Cost:
        pairs = cost.matrix // (2 * products * p.H)
        polynomials = pairs * tiles.exp2_columns // tiles.columns
        return cost._replace(exponentials=cost.exponentials - polynomials)

    # XLA prepares lse and dlse, which both warpgroups of dQ read; its kernel sums delta
    before = Cost(0, 0, rows, 2 * rows)
    first, backward = flash2(p, t, cost, before, statistics=4 * statistics)
    dq = with_polynomials(backward["dq"], t.dq, 3)
    return dict(forward=with_polynomials(first["forward"], t.forward, 2)), backward | dict(
        dkv=with_polynomials(backward["dkv"], t.dkv, 4),
        dq=total(dict(dq=dq, delta=Cost(0, 0, q, statistics))),
    )


class Generation(NamedTuple):
    """A row of the table."""

    implementation: str
    costs: Callable  # (problem, tiles) -> Cost by kernel, of the forward and of the backward
    memory: Callable  # bytes beyond operands and results at the worst moment of either
    color: str
    runs_on: tuple[str, ...] = SHOWN


GENERATIONS = {
    # S, P and the statistics; in the backward S, dP, P, dS
    "standard": Generation("standard", standard, lambda p: 12 * p.scores + 2 * p.rows, "#8c8c8c"),
    "standard, online softmax": Generation(
        "standard",
        lambda p, t: standard(p, t, passes=2),
        lambda p: 12 * p.scores + 2 * p.rows,
        "#bdbdbd",
    ),
    # O or dQ in float32
    "flash1": Generation("flash1", flash1, lambda p: 2 * p.tensor + 2 * p.rows, "#f0b040"),
    # dO with the factor that m and l leave, lse and delta
    "triton (FlashAttention-2)": Generation(
        "triton", triton, lambda p: p.tensor + 2 * p.rows, "#3b76af"
    ),
    "ampere (FlashAttention-2)": Generation("ampere", ampere, lambda p: 2 * p.rows, "#c1567f"),
    "hopper (FlashAttention-3)": Generation("hopper", hopper, hopper_memory, "#9467bd", (SECOND,)),
    "blackwell (FlashAttention-4)": Generation(
        "blackwell", blackwell, lambda p: 2 * p.rows, "#2a9d8f", (THIRD,)
    ),
}


def counted_for(generation: Generation) -> str:
    """The GPU whose tiles are counted."""
    return SECOND if SECOND in generation.runs_on else THIRD


def kernels(name: str, p: Attention) -> dict[str, Cost]:
    """Costs of the forward's and the backward's kernels, by name."""
    generation = GENERATIONS[name]
    tiles = p.tiles(generation.implementation, counted_for(generation))
    forward, backward = generation.costs(p, tiles)
    return {f"forward: {k}": cost for k, cost in forward.items()} | {
        f"backward: {k}": cost for k, cost in backward.items()
    }


def left_out(p: Attention) -> dict[str, str]:
    """The generations that this jax has no kernels for, and why."""
    found = {}
    for name, generation in GENERATIONS.items():
        try:
            p.tiles(generation.implementation, counted_for(generation))
        except NotImplementedError as error:
            found[name] = str(error)
    return found


# ---- the table ----


def table(p: Attention, names: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for name in names:
        generation = GENERATIONS[name]
        costs = kernels(name, p)
        cost = total(costs)
        time = lambda gpu, costs=costs: f"{GPUS[gpu].roofline(costs, 'float16') * 1e3:.2f}"
        rows.append(
            (
                name,
                f"{cost.matrix / (2 * p.scores * p.H):.4g}",
                f"{cost.matrix / 1e9:.0f}",
                f"{cost.exponentials / 1e9:.2f}",
                f"{cost.bytes / 1e9:.2f}",
                f"{generation.memory(p) / 1e6:,.0f}",
                *(time(gpu) if gpu in generation.runs_on else "cannot run" for gpu in SHOWN),
            )
        )
    return rows


HEADER = ("", "products", "GFLOPs", "10⁹ exp", "GB", "MB extra", *(f"ms, {gpu}" for gpu in SHOWN))


# ---- the picture ----

UNITS = dict(memory="#b5524b", products="#3b76af", exponentials="#5aa469")
LENGTHS = [128, 256, 512, 1024, 2048, 4096]


def draw(p: Attention, names: list[str]) -> Figure:
    figure = Figure(figsize=(12, 4.2))
    # no layout engine: the same anywhere
    left, middle, right = figure.subplots(
        1, 3, gridspec_kw=dict(left=0.18, right=0.99, top=0.83, bottom=0.13, wspace=0.25)
    )
    figure.suptitle(
        f"Forward and backward of attention, counted, not measured: batch {p.B}, {p.N} heads of "
        f"{p.H}, {p.T} queries and keys, 16 bits",
        fontsize=11,
    )
    costs = {name: total(kernels(name, p)) for name in names}
    draw_bytes(left, {name: cost.bytes / 1e9 for name, cost in costs.items()})
    draw_units(middle, costs)
    draw_memory(right, p, names)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (middle, left):
        axes.invert_yaxis()
    middle.set_yticks([])
    return figure


def draw_bytes(axes, gigabytes: dict[str, float]):
    bars = axes.barh(
        list(gigabytes), gigabytes.values(), color=[GENERATIONS[name].color for name in gigabytes]
    )
    axes.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
    axes.set(xlabel="GB", title="Read from and written to device memory")


def draw_units(axes, costs: dict[str, Cost]):
    width = 0.27
    gpus = [counted_for(GENERATIONS[name]) for name in costs]
    for number, (unit, color) in enumerate(UNITS.items()):
        each = zip(gpus, costs.values(), strict=True)
        ms = [GPUS[gpu].seconds(cost, "float16")[unit] * 1e3 for gpu, cost in each]
        bars = axes.barh(
            np.arange(len(ms)) + (number - 1) * width, ms, width, color=color, label=unit
        )
        axes.bar_label(bars, fmt="{:.2g}", padding=3, fontsize=8)
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="ms", title=f"Time of each unit of an {SECOND} at its peak")
    for number, gpu in enumerate(gpus):
        if gpu != SECOND:
            axes.text(2.8, number, f"of a {gpu}", va="center", fontsize=8)


def draw_memory(axes, p: Attention, names: list[str]):
    for name in names:
        if "online" not in name:
            generation = GENERATIONS[name]
            sizes = [generation.memory(p._replace(B=1, T=length)) / 1e6 for length in LENGTHS]
            axes.plot(
                LENGTHS, sizes, marker="o", markersize=3.5, color=generation.color, label=name
            )
    axes.set(
        xlabel="length T",
        xscale="log",
        yscale="log",
        ylim=(None, 1e6),
        ylabel="MB for one sequence",
    )
    axes.set_xticks(LENGTHS, map(str, LENGTHS))
    axes.minorticks_off()
    axes.set_title("Memory beyond operands and results")
    axes.legend(frameon=False, fontsize=8.5)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    shown = f"the picture ({FIGURE.relative_to(ROOT)}; {FIGURE.name} if generations are left out)"
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help=shown)
    args, p = parser.parse_args(argv), GPT2_MEDIUM
    missing = left_out(p)
    names = [name for name in GENERATIONS if name not in missing]
    print_table(HEADER, [*PRINTED, *table(p, names)])
    products = [2 * products * p.scores * p.H / 1e9 for products in (6, 7)]
    print(f"\n{NOTE.format(*(f'{flops:.0f}' for flops in products))}\n")
    for name, why in missing.items():
        print(f"Left out: {name}. {why}\n")
    path = args.out or (pathlib.Path(FIGURE.name) if missing else FIGURE)
    with matplotlib.rc_context({"font.size": 9.5, "svg.hashsalt": "generations"}):
        write(draw(p, names), path, metadata=dict(Date=None, Creator=None))


if __name__ == "__main__":
    main()
