"""What decoding by mma, which the families of Mosaic kernels share, needs of a problem and of
pages, and what is padded for it."""

import dataclasses

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined
from pallas_flash.kernels.mma.tile_sizes import (
    OUTPUT_COLUMNS,
    ROWS,
    padded_length,
    page_columns,
    widths,
)
from pallas_flash.kernels.mosaic import operations
from pallas_flash.kernels.mosaic.elements import OPERANDS
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.page_layout import Pages
from pallas_flash.tiled import schedule, split_kv

WIDEST = 512  # head size of the kernels that do not decode


def why_not_with_decoding(problem: Problem, multiply: str) -> str | None:
    """`operations.why_not` for a family whose own kernels know heads up to `WIDEST`, and whose
    decoding, by mma, knows wider ones."""
    p = problem
    has_lists = p.resolved_mask.lists is not None
    if not has_lists and (p.head_size <= WIDEST or not split_kv.is_decoding(p)):
        has_latents = p.head_size > WIDEST and p.values_are_keys and p.is_static
        rows = split_kv.why_not(p) if has_latents else None
        return joined(operations.why_not(p, multiply, WIDEST), rows)
    beside_lists = _why_no_lists(p) if has_lists else None
    lacking = operations.why_not(p, multiply, max(p.head_size, p.value_size))
    return joined(lacking, beside_lists, why_not(_in_16_bits(p)))


def decode(problem: Problem, tiles, x: Operands, table=None, scales=(None, None)):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows. With a PageTable keys
    and values are pages, which have `scales` where they are in 8 bits."""
    # not at the top: they take a newer jax than the choice of an implementation does
    from pallas_flash.kernels.decoding import forward, listed_keys

    if problem.resolved_mask.lists is None:
        return forward.forward(problem, tiles, x, table, scales)
    decoding, *arguments = listed_keys.as_decoding(problem, x, table, scales)
    return listed_keys.results(problem, *forward.forward(decoding, tiles, *arguments))


def takes_lists(problem: Problem) -> bool:
    """Whether the forward gathers the keys that a problem's lists name: where they have no table of
    blocks, or no kernel that reads one knows such heads."""
    return not problem.resolved_mask.lists.has_table or problem.head_size > WIDEST


def _why_no_lists(problem: Problem) -> str | None:
    """Why decoding cannot run a problem with lists, or None."""
    p, mask = problem, problem.resolved_mask
    others = {
        "a bias": p.bias is not None,
        "a dense mask": p.mask is not None,
        "a mask_mod": mask.mask_mod is not None,
        "segment ids": mask.query_ids is not None,
        "a score_mod": p.score is not None,
        "dropout": p.dropped,
    }
    beside = " and ".join(name for name, is_there in others.items() if is_there)
    return f"it does not gather the keys of lists beside {beside}" if beside else None


def why_no_pages(problem: Problem, pages: Pages) -> str | None:
    """Why the kernels cannot read pages where they lie, or None."""
    p, page, dtype = _in_16_bits(problem), pages.page, pages.stored
    if pages.alone:
        return (
            f"it reads keys and values in 8 bits, or neither; got {pages.alone} alone in {dtype}: "
            "triton and blockwise take them"
        )
    has_lists = p.resolved_mask.lists is not None
    if not has_lists and page % 64 and (page < 8 or 64 % page):
        return f"it takes pages of 8, 16, 32 or a multiple of 64 keys; got {page}"
    columns = page_columns(p, ROWS if has_lists else page, dtype)
    if p.head_size % columns or p.value_size % columns:
        of = f" of {dtype}" if dtype else ""
        return (
            f"it copies pages of {page} keys{of} of heads of a multiple of {columns}; got H = "
            f"{p.head_size}, Hv = {p.value_size}"
        )
    return why_not(p, page, dtype) or (None if has_lists else split_kv.why_not(p))


def _in_16_bits(p: Problem) -> Problem:
    """The problem in a dtype that mma multiplies, to say what else it lacks."""
    return p if p.dtype in OPERANDS else dataclasses.replace(p, dtype=OPERANDS[0])


def why_not(p: Problem, *pages) -> str | None:
    """Why decoding has no tiles for a problem and pages; None where it has, or where there is no
    GPU to ask."""
    sizes, columns = f"got H = {p.head_size}, Hv = {p.value_size}", 2 * OUTPUT_COLUMNS
    if widths(p)[1] > columns:
        return f"values of more than {columns} columns do not fit into registers; {sizes}"
    if not (hardware.compute_capability() or hardware.interpret):
        return None
    try:
        from pallas_flash.kernels.decoding import tuning
    except Exception:  # another jax may lack what kernels import, which is said elsewhere
        return None
    if tuning.decode_tiles(p, *pages) is not None:
        return None
    needed, available = tuning.decoding_bytes(p, *pages), hardware.shared_memory()
    needed_kb, kb = (schedule.ceil_div(n, 1024) for n in (needed, available))
    return (
        f"split-KV decoding needs {needed_kb} KB of shared memory, and this GPU has {kb}; {sizes}"
    )


def copies(problem: Problem) -> str | None:
    """What XLA pads for decoding in each call, or None; its rows are few."""
    sizes = padded(problem)
    if problem.values_are_keys:
        del sizes["Hv"]
    if problem.resolved_mask.lists is not None:
        del sizes["S"]
    return operations.copies(**sizes)


def padded(p: Problem) -> dict[str, tuple[int, int]]:
    """Sizes of keys and values, and what they are padded to."""
    width, value_width = widths(p)
    length = p.keys, padded_length(p.keys)
    return dict(S=length, H=(p.head_size, width), Hv=(p.value_size, value_width))
