"""What kernels by `pl.pallas_call` share. jax's Triton lowering compiles them for a GPU; Pallas'
interpreter runs them on every device, in a jax without that lowering too."""

import importlib.util
import math

import jax

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined
from pallas_flash.problem.arguments import Problem


def power_of_two(n: int) -> int:
    """The smallest power of two >= n that a tile may have."""
    return max(16, 1 << (n - 1).bit_length())


def why_not(problem: Problem) -> str | None:
    """Why such kernels cannot run a problem, or None."""
    capability, reasons = hardware.compute_capability(), []
    if capability and capability < 8.0:
        reasons.append(
            "the kernels need an NVIDIA GPU of compute capability 8.0 or higher; this one has "
            f"{capability}"
        )
    if problem.dtype == "float64":
        reasons.append("the kernels sum in float32; got float64")
    if problem.mask:
        reasons.append(why_no_index("a dense mask", problem.mask))
    if max(problem.head_size, problem.value_size) > 256:
        reasons.append(
            f"head sizes above 256 do not fit into registers; got H = {problem.head_size}, Hv = "
            f"{problem.value_size}"
        )
    return joined(*reasons, *_why_no_rule(problem))


def remark() -> str | None:
    """What runs such kernels on the GPU that a call is for, if nothing compiles them."""
    has_lowering = importlib.util.find_spec("jax.experimental.pallas.triton")
    if has_lowering or hardware.here().platform != "gpu":
        return None
    return (
        f"jax {jax.__version__} has no Triton lowering: XLA runs the kernels, by Pallas' "
        "interpreter, slowly"
    )


def why_no_index(what: str, shape: tuple[int, ...]) -> str | None:
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
    """Why the mask_mod and the score_mod cannot be evaluated for tiles."""
    reasons = []
    for bound in (problem.resolved_mask.mask_mod, problem.score):
        if bound is None:
            continue
        try:
            lacking = sorted(bound.primitives - set(_OPERATIONS))
        except TypeError as error:  # a mask_mod that only plain JAX evaluates
            reasons.append(f"{bound.mod}: {str(error).removesuffix('.')}")
            continue
        if bound.why_not_flat:
            reasons.append(bound.why_not_flat)
        elif lacking:
            reasons.append(
                f"{bound.mod} needs {', '.join(lacking)}, which jax's Triton lowering does not "
                "know for tiles"
            )
    return reasons
