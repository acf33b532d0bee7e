"""What runs by mma on every NVIDIA GPU, for all Mosaic families: decoding, forward mode, and the
gradients of scores."""

from pallas_flash.kernels import joined
from pallas_flash.kernels.mma.tuning import (
    decode_tiles,
    padded_length,
    page_columns,
    score_tiles,
    why_no_decoding,
    widths,
)
from pallas_flash.kernels.mosaic import operations
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled.split_kv import is_decoding
from pallas_flash.tiled.split_kv import why_not as why_no_single_tile

__all__ = ["copies", "decode_tiles", "score_tiles", "why_no_pages", "why_not"]


def why_not(problem: Problem, multiply: str, widest: int) -> str | None:
    """`operations.why_not` of a family of kernels that know heads up to `widest`: its decoding, by
    mma, knows wider ones."""
    p = problem
    if p.head_size <= widest or not is_decoding(p):
        return operations.why_not(p, multiply, widest)
    return joined(operations.why_not(p, multiply, p.head_size), why_no_decoding(p))


def why_no_pages(problem: Problem, shapes: tuple, dtype: str | None) -> str | None:
    """Why the kernels cannot read pages of these shapes where they lie, or None; `dtype` is that of
    pages of 8 bits."""
    p, page = problem, shapes[0][1]
    if page % 64 and (page < 8 or 64 % page):
        return f"it takes pages of 8, 16, 32 or a multiple of 64 keys; got {page}"
    columns = page_columns(p, page, dtype)
    if p.head_size % columns or p.value_size % columns:
        of = f" of {dtype}" if dtype else ""
        return (
            f"it copies pages of {page} keys{of} of heads of a multiple of {columns}; got H = "
            f"{p.head_size}, Hv = {p.value_size}"
        )
    return why_no_decoding(p, page, dtype) or why_no_single_tile(p)


def copies(problem: Problem, by_decoding: bool, block_q: int = 1) -> str | None:
    """What XLA pads for kernels by mma in each call, of queries whole blocks; or None."""
    p, length = problem, lambda n: (n, padded_length(n))
    width, value_width = widths(p)
    sizes = dict(S=length(p.keys), H=(p.head_size, width), Hv=(p.value_size, value_width))
    if not by_decoding:
        padded = operations.copies(T=(p.queries, padded_length(p.queries, block_q)), **sizes)
        reason = why_no_decoding(p) if is_decoding(p) else None
        return f"{padded}, for the forward: {reason}" if padded and reason else padded
    if p.values_are_keys:
        del sizes["Hv"]
    return operations.copies(**sizes)  # its rows are few
