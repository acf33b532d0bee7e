"""What generations.py prints: the paper's table and why the kernels differ from it, memory, both by
length and by tiles."""

from pallas_flash import accounting as a
from pallas_flash.accounting import published
from scripts.bench import report
from scripts.history import counts, times
from scripts.history.counts import FIRST, GENERATIONS, SECOND, Count


def print_paper(p, table: dict[str, Count], rows: list):
    ms = {row.name: row.median for row in times.as_the_paper(rows) if row.median}
    lines = []
    for name, row in table.items():
        paper, is_paper, _ = name.partition(", the paper's")
        if is_paper:
            printed = (
                published.GFLOPS[paper],
                published.GIGABYTES[paper],
                "",
                "",
                f"{published.MILLISECONDS[paper]} on an A100",
            )
            lines.append((f"{paper}, as printed", "", printed[0], "", "", *printed[1:]))
        measured = report.milliseconds(ms[name]) if name in ms else ""
        lines.append((f"{name} formulas" if is_paper else name, *_counted(row), measured))
    print("\nThe paper's table (arXiv:2205.14135, figure 2), its formulas, and the kernels here")
    header = (
        "",
        "products",
        "GFLOPs, products",
        "other",
        "10⁹ exponentials",
        "GB",
        f"roofline ms, {FIRST}",
        SECOND,
        "ms",
    )
    report.print_table(header, lines)
    print()
    for note in notes(p, table):
        print(f"- {note}")


def _counted(row: Count) -> tuple[str, ...]:
    work = (
        f"{row.products:.4g}",
        f"{row.matrix / 1e9:.0f}",
        f"{row.other / 1e9:.1f}",
        f"{row.exponentials / 1e9:.2f}",
    )
    least = (
        f"{row.least[gpu] * 1e3:.2f}" if gpu in row.least else "cannot run"
        for gpu in (FIRST, SECOND)
    )
    return *work, f"{row.bytes / 1e9:.2f}", *least


def notes(p, table: dict[str, Count]) -> list[str]:
    """Why what the paper printed, its formulas and the kernels differ."""
    standard, flash = (table[f"{name}, the paper's"] for name in ("standard", "flash"))
    printed = published.GFLOPS, published.GIGABYTES, published.MILLISECONDS
    (f, F), (b, B), (t, T) = ((one["standard"], one["flash"]) for one in printed)
    giga = lambda x: x / 1e9
    off = lambda x, of: f"{x:.2f}, {x / of - 1:+.1%}"
    peak, bandwidth = a.GPUS[FIRST].products, a.GPUS[FIRST].bandwidth
    zeros = giga(flash.bytes - 2 * p.batch * p.keys * p.kv_heads * p.head_size * 2)
    one_product = giga(2 * p.batch * p.queries * p.keys * p.head_size)
    block = counts.tiles_of("hopper", p).forward.block_q
    return [
        f"GFLOPs: the products of all heads are {giga(standard.matrix):.0f} and "
        f"{giga(flash.matrix):.0f}; the latter in {T} ms"
        f" are {flash.matrix / T * 1e3 / peak:.0%} of an A100's peak. But what was printed differs "
        f"by {F} - {f} = {F - f:.1f}:"
        f" the one product that flash computes again, of one head, is {one_product:.2f}. With the "
        "products of one head and all"
        f" else of {p.heads} the formulas give {off(giga(standard.printed), f)}, and "
        f"{off(giga(flash.printed), F)}.",
        f"GB: the formulas give {off(giga(standard.bytes), b)}, and {off(giga(flash.bytes), B)}, "
        "for an SRAM of"
        f" {published.A100_SRAM} elements; without the zeros that algorithm 4 writes to dK and dV "
        f"first, {off(zeros, B)}.",
        f"ms: {b} GB in {t} ms are {b * 1e12 / t / bandwidth:.0%} of an A100's bandwidth: memory "
        "is what standard attention waits"
        f" for. Of flash's {T} ms the bytes take {B * 1e12 / bandwidth:.1f} at least, the products"
        f" {flash.matrix / peak * 1e3:.1f}.",
        "Products of the kernels here: 2 forward; 5 backward, for S is computed again; 7 in "
        "triton and hopper, whose backward"
        f" is two kernels. hopper's forward pads the queries to tiles of {block}.",
        "Other FLOPs: no mask and no dropout, but sums are rescaled. The safe softmax takes two "
        "exponentials to an entry.",
    ]


def print_ways(ways):
    print("\nGB: from the paper's formulas to the kernels, step by step")
    lines, at = [], None
    for way in ways:
        lines += [] if way.start == at else [(way.start, f"{way.begin / 1e9:.2f}")]
        lines += [(f"  {why}", f"{step / 1e9:+.2f}") for why, step in way.steps]
        lines += [(f"= {way.stop}", f"{way.end / 1e9:.2f}")]
        at = way.stop
    report.print_table(("", "GB"), lines)


def print_memory(table: dict[str, Count], found: dict[str, int], where: str):
    """By formula and as compiled; `where` says on what, or why not."""
    print("\nMemory beyond operands and results, at the worst moment of forward and backward, MB")
    lines = [
        (name, megabytes(table[name].extra), megabytes(found[name]) if name in found else "")
        for name in GENERATIONS
    ]
    report.print_table(("", "formula", f"compiled for {where}" if found else "compiled"), lines)
    if not found:
        print(f"Nothing was compiled: {where}")


def megabytes(bytes_: int) -> str:
    return f"{bytes_ / 1e6:,.0f}" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.3g}"


def print_lengths(lengths, rows: list):
    (low, high), (less, least) = counts.PUBLISHED_SPEED_UP, counts.PUBLISHED_MEMORY
    print(
        "\nBy length, forward and backward: standard's bytes over those of each; of times, where "
        "they were taken, the same"
    )
    speed, lines = times.speed_ups(rows), []
    for row in lengths:
        at = row.length, "causal" if row.causal else "full"
        lines.append(
            (
                *at,
                "bytes",
                *(f"{row.bytes[GENERATIONS[0]] / row.bytes[name]:.2f}" for name in GENERATIONS[1:]),
            )
        )
        if mine := speed.get((row.length, row.causal)):
            lines.append(
                (
                    *at,
                    "time",
                    *(f"{mine[name]:.2f}" if name in mine else "" for name in GENERATIONS[1:]),
                )
            )
    report.print_table(("T", "mask", "standard's", *GENERATIONS[1:]), lines)
    print(
        f"Published of times: {low} to {high}. triton and hopper skip what a causal mask hides, "
        "the others compute it."
    )

    print(
        "\nMemory by length, of one sequence, MB: the same with a mask. Published: linear, and "
        f"{less} to {least} times less"
    )
    names = [name for name in GENERATIONS if name != "standard, online softmax"]
    lines = []
    for row in lengths:
        if not row.causal:
            whole = {name: row.arrays + row.extra[name] for name in names}
            ratios = (
                (row.arrays + row.kept) / (row.arrays + row.flash),
                *(whole["standard"] / whole[name] for name in names[1:]),
            )
            sizes = (megabytes(x) for x in (row.arrays, *(row.extra[name] for name in names)))
            lines.append((row.length, *sizes, *(f"{ratio:.1f}" for ratio in ratios)))
    over = "frameworks/flash", *(f"standard/{name}" for name in names[1:])
    report.print_table(("T", "operands, results", *names, *over), lines)
    print(
        "The ratios are of all memory, operands and results too. frameworks: what they keep for "
        "the backward, P before and after"
    )
    print(
        "dropout and a byte of its mask, 5 bytes to an entry; flash: l and m. standard: S and dP "
        "in float32, P and dS, 12 bytes."
    )


def print_blocks(blocks, rows: list):
    ms = {(row.name, row.passes): row.median for row in rows if row.median}
    print(
        "\nflash1 by tiles, GB. M: the SRAM, in elements, for which the paper takes such tiles. T "
        "S H² / M: of the lower bound"
    )
    lines = []
    for at in blocks:
        name = times.block_name(at.tiles)
        measured = (
            report.milliseconds(ms[name, one]) if (name, one) in ms else ""
            for one in ("forward", times.BOTH)
        )
        sizes = (f"{x / 1e9:.2f}" for x in (at.forward, at.backward, at.paper, at.bound))
        lines.append((f"{at.tiles.block_q} x {at.tiles.block_k}", at.sram, *sizes, *measured))
    formulas, bound = "both, the paper's formulas", "T S H² / M, forward"
    header = (
        "queries x keys",
        "M",
        "forward",
        "backward",
        formulas,
        bound,
        "ms, forward",
        f"ms, {times.BOTH}",
    )
    report.print_table(header, lines)


def print_times(timed: dict[str, list]):
    titles = dict(shape="GPT-2 medium", lengths="By length", tiles="flash1 by tiles")
    for name, rows in timed.items():
        print(f"\n{titles[name]}, timed")
        speed = lambda row: {"TFLOP/s": f"{row.tflops:.3g}" if row.median else ""}
        report.print_rows(rows, rows[0].name, speed)
