"""FlashAttention-2 as Pallas kernels for any GPU that Pallas' Triton lowering knows."""

import math

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined
from pallas_flash.kernels.triton.tuning import decode_tiles, tiles
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled.split_kv import why_not as why_no_single_tile

__all__ = ["decode_tiles", "tiles", "why_no_pages", "why_not"]


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run a problem, or None."""
    capability, reasons = hardware.compute_capability(), []
    if capability and capability < 8.0:
        reasons.append(
            "the kernels need an NVIDIA GPU of compute capability 8.0 or higher; this one has "
            f"{capability}"
        )
    if problem.dtype == "float64":
        reasons.append("the kernels sum in float32; got float64")
    if problem.mask:
        reasons.append(_why_no_index("a dense mask", problem.mask))
    if max(problem.head_size, problem.value_size) > 256:
        reasons.append(
            f"head sizes above 256 do not fit into registers; got H = {problem.head_size}, Hv = "
            f"{problem.value_size}"
        )
    return joined(*reasons, *_why_no_rule(problem))


def why_no_pages(problem: Problem, shapes: tuple, dtype: str | None) -> str | None:
    """Why the kernels cannot read pages of these shapes where they lie, or None; `dtype` is that of
    pages of 8 bits."""
    capability = hardware.compute_capability()
    if dtype == "float8_e4m3fn" and capability and capability < 8.9:
        return (
            "float8_e4m3fn needs an NVIDIA GPU of compute capability 8.9 or higher; this one has "
            f"{capability}: int8 does not"
        )
    unread = (_why_no_index(f"pages in {dtype}", shape) for shape in shapes if dtype)
    return next(filter(None, unread), None) or why_no_single_tile(problem)


def _why_no_index(what: str, shape: tuple[int, ...]) -> str | None:
    """Why an array of bytes cannot be read, or None."""
    if 2**31 < math.prod(shape) <= 2**32:  # from 2^32 bytes on the index has 64 bits
        return (
            f"jax's Triton lowering indexes {what} of 2^31 to 2^32 elements by an int32; got "
            f"{shape}"
        )
    return None


# What Pallas' Triton lowering knows of what a rule of numbers may be made of. A while whose
# condition is a tile's lowers too, but does not compile.
_OPERATIONS = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
broadcast_in_dim cbrt ceil clamp clz convert_element_type copy cos cosh div eq erf_inv exp exp2
expm1 floor fmod ge gt integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg
nextafter not one_minus_square or population_count pow rem reshape rsqrt scan select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze stop_gradient sub tan
tanh xor
""".split()


def _why_no_rule(problem: Problem) -> list[str]:
    found = []
    for bound in (problem.resolved_mask.mask_mod, problem.score):
        if bound is None:
            continue
        try:
            lacking = sorted(bound.primitives - set(_OPERATIONS))
        except TypeError as error:  # of a mask, which elsewhere may read what it likes
            found.append(f"{bound.mod}: {str(error).removesuffix('.')}")
            continue
        if bound.why_not_flat:
            found.append(bound.why_not_flat)
        elif lacking:
            found.append(
                f"{bound.mod} needs {', '.join(lacking)}, which jax's Triton lowering does not "
                "know for tiles"
            )
    return found
