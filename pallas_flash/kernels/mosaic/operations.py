"""What every family of kernels asks of a problem: dtypes and sizes, mask_mods and score_mods of
operations that Mosaic knows in registers, and a jax whose Mosaic GPU will do."""

import re

import jax

from pallas_flash.kernels import joined
from pallas_flash.kernels.mosaic.elements import OPERANDS
from pallas_flash.mods.bound import BoundMod
from pallas_flash.problem.arguments import Problem

# What Mosaic GPU knows, as exactly as float32 asks for, of what a mod may be made of, or
# kernels/mosaic/mods.py in its place.
_OPERATIONS = """
abs add add_any and broadcast_in_dim clamp convert_element_type copy div eq exp
exp2 ge gt integer_pow le log log2 logistic lt max min mul ne neg not one_minus_square or rem
reshape rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sqrt square
squeeze sub tanh xor
""".split()


def why_not_jax() -> str | None:
    """Why this jax has no Mosaic GPU that will do, or None."""
    if jax.__version_info__ < (0, 11, 2):
        return f"it needs jax 0.11.2, and that Python 3.12, or newer; this is jax {jax.__version__}"
    return None


def why_not(problem: Problem, multiply: str, widest: int) -> str | None:
    """Why no kernels of a family can run a problem, or None; `multiply`: their instruction,
    `widest`: the largest head size they know."""
    p, reasons = problem, []
    if p.dtype not in OPERANDS:
        reasons.append(f"{multiply} multiplies {' and '.join(OPERANDS)}; got {p.dtype}")
    reasons += [_why_no_mod(p.resolved_mask.mask_mod), _why_no_mod(p.score)]
    if max(p.head_size, p.value_size) > widest:
        reasons.append(
            f"head sizes above {widest} do not fit into registers; got H = {p.head_size}, Hv = "
            f"{p.value_size}"
        )
    if p.scale <= 0:
        reasons.append(
            "it takes the maximum before it multiplies by the scale, which must be above 0; "
            f"got {p.scale}"
        )
    return joined(*reasons)


def copies(**sizes: tuple[int, int]) -> str | None:
    """What XLA pads in each call, from sizes and what they are padded to; None where nothing is."""
    padded = [f"{name} from {n} to {to}" for name, (n, to) in sizes.items() if n != to]
    return f"XLA pads arrays in each call, {', '.join(padded)}" if padded else None


def _why_no_mod(bound: BoundMod | None) -> str | None:
    if bound is None:
        return None
    try:
        operations = bound.primitives
    except TypeError as error:  # of a mask, which elsewhere may read what it likes
        return f"{bound.mod}: {str(error).removesuffix('.')}"
    if bound.why_not_flat:
        return bound.why_not_flat
    if narrow := re.search(r"\b[iuf]8\w*(?=\[)", bound.mod.text):
        return (
            f"{bound.mod} computes with numbers of 8 bits ({narrow[0]}), for which Mosaic GPU "
            "lacks operations: int32 will do"
        )
    if lacking := sorted(operations - set(_OPERATIONS)):
        return (
            f"{bound.mod} needs {', '.join(lacking)}, which Mosaic GPU does not know for registers"
        )
    return None
