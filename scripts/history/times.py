"""What generations.py times, where there is a GPU: each generation at the paper's shape, by length,
and flash1 by tiles."""

from typing import Any

from pallas_flash import accounting as a
from pallas_flash import explain
from scripts.bench.cases import PASSES, Case
from scripts.bench.measure import Row, measure
from scripts.bench.peers import Contender
from scripts.history.counts import GENERATIONS, by_block, tiles_of

BOTH = PASSES[-1]


def contender(name: str, generation: str, tiles: Any = None) -> Contender:
    def asked(case, **call):
        return explain(*case.shapes()[:3], is_causal=case.causal, **call).problem

    def why_not(case):
        try:
            asked(case, implementation=generation.partition(", ")[0])
        except NotImplementedError as error:
            return str(error)

    def attend(case, q, k, v):
        own = tiles or tiles_of(generation, asked(case))
        return a.attention(generation.partition(", ")[0], own, is_causal=case.causal)(q, k, v)

    return Contender(name, attend, why_not, package="pallas-flash")


def case_of(p, causal: bool) -> Case:
    return Case(p.batch, p.queries, p.keys, p.heads, p.kv_heads, p.head_size, p.dtype, causal)


def at_the_shape(p, args, clock: str) -> list[Row]:
    """Full and causal; forward, backward, both."""
    everyone = [contender(name, name) for name in GENERATIONS]
    cases = [case_of(p, causal) for causal in (False, True)]
    return [
        row
        for case in cases
        for row in measure(everyone, case, list(PASSES), args.repeats, args.jobs, clock)
    ]


def as_the_paper(rows: list[Row]) -> list[Row]:
    """Forward and backward without a mask that skips."""
    return [row for row in rows if row.passes == BOTH and not row.case.causal]


def by_length(p, args, clock: str) -> list[Row]:
    """As many tokens at each length."""
    everyone, rows = [contender(name, name) for name in GENERATIONS], []
    for causal in (False, True):
        for length in args.lengths:
            case = case_of(p, causal)._replace(B=max(1, args.tokens // length), T=length, S=length)
            rows += measure(everyone, case, [BOTH], args.repeats, args.jobs, clock)
    return rows


def by_tiles(p, args, clock: str) -> list[Row]:
    everyone = [
        contender(block_name(at.tiles), "flash1", at.tiles) for at in by_block(p, args.blocks)
    ]
    return measure(everyone, case_of(p, False), [PASSES[0], BOTH], args.repeats, args.jobs, clock)


def block_name(tiles) -> str:
    return f"flash1, {tiles.block_q} x {tiles.block_k}"


def speed_ups(rows: list[Row]) -> dict[tuple, dict[str, float]]:
    """Of standard's time over each one's, by length and mask."""
    medians = {(row.case.T, row.case.causal, row.name): row.median for row in rows if row.median}
    found = {}
    for (length, causal, name), seconds in medians.items():
        if base := medians.get((length, causal, GENERATIONS[0])):
            found.setdefault((length, causal), {})[name] = base / seconds
    return found
