"""Numbers of 8 bits in 16 bits, exactly, with NaN and infinities. In PTX, which takes the four of a
register together: LLVM takes each alone."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support import hardware, jax_internals

FORMATS = dict(bfloat16="bf16", float16="f16", float8_e4m3fn="e4m3", float8_e5m2="e5m2")


class Pair(NamedTuple):
    """Two neighbours among the four bytes of $2."""

    result: str  # the register of two numbers of 16 bits
    both: str  # the register of the two bytes
    upper: str  # with which prmt makes each the upper byte of 16 bits, over 0


PAIRS = Pair("$0", "x", "0x1404"), Pair("$1", "y", "0x3424")


def widen(x, stored: str, dtype, layout):
    """Numbers of the dtype `stored`, whose bits are given as int8, in a dtype of 16 bits. Registers
    of the layout have a multiple of four of them."""
    code = code_of_four(stored, FORMATS[np.dtype(dtype).name], hardware.mosaic_capability())
    if code is None:
        return x.astype(jnp.int32).astype(jnp.float32).astype(dtype)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def widen_bytes(_, x):  # a name that the interpreter in tests/ knows
        utils = mgpu.utils
        i32, vector_of = utils.ir.IntegerType.get_signless(32), utils.ir.VectorType.get
        to = utils.dtype_to_ir_type(result.dtype)

        def widened(register):
            size = utils.ir.VectorType(register.type).shape[0]
            words = utils.bitcast(register, vector_of((size // 4,), i32))
            pairs = []
            for n in range(size // 4):
                word = utils.vector.extract(words, [], [n])
                pairs += utils.inline_ptx(code, word, result_types=(i32, i32))
            pairs = utils.vector.from_elements(vector_of((size // 2,), i32), pairs)
            return utils.bitcast(pairs, vector_of((size,), to))

        registers = np.vectorize(widened, otypes=[object])(x.registers)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen_bytes(x)


def code_of_four(stored: str, to: str, capability: float) -> str | None:
    """The code that makes $0 and $1, four numbers of the format `to`, of the four of $2; None where
    LLVM's is as good."""
    if to == "bf16" and capability >= 10 and jax_internals.ptx_isa() >= 92:
        code_of_pair = _by_one_instruction
    elif stored == "int8":
        return None
    elif stored == "float8_e4m3fn" and capability < 8.9:
        code_of_pair = _by_bits
    else:
        code_of_pair = _by_float16
    pairs = " ".join(code_of_pair(x, stored, to) for x in PAIRS)
    registers = ".reg .b16 x, y, l, h; .reg .b32 p, q, r; .reg .f32 a, b;"
    return f"{{ {registers} mov.b32 {{x, y}}, $2; {pairs} }}"


def _by_one_instruction(x: Pair, stored: str, to: str) -> str:
    if stored == "int8":  # of 64ths, times 2^6
        return f"""
        mov.b16 l, 0x8585;
        cvt.rn.scaled::n2::ue8m0.{to}x2.s2f6x2 {x.result}, {x.both}, l;"""
    return f"cvt.rn.{to}x2.{FORMATS[stored]}x2 {x.result}, {x.both};"


def _by_float16(x: Pair, stored: str, to: str) -> str:
    """e5m2 is the upper byte of float16."""
    float16 = x.result if to == "f16" else "p"
    if stored == "float8_e5m2":
        code = f"prmt.b32 {float16}, $2, 0, {x.upper};"
    else:
        code = f"cvt.rn.f16x2.e4m3x2 {float16}, {x.both};"
    if to == "f16":
        return code
    return f"""{code}
        mov.b32 {{l, h}}, p;
        cvt.f32.f16 a, l;
        cvt.f32.f16 b, h;
        cvt.rn.bf16x2.f32 {x.result}, b, a;"""


def _by_bits(x: Pair, stored: str, to: str) -> str:
    """The sign, and by a shift exponent and mantissa, at their places, times a factor for the bias
    of the exponent. NaN is 480 then. Times another factor it is infinite, while 448 is not, and
    infinity times 0 is NaN."""
    shift, factor, other = dict(f16=(1, 2.0**8, 144), bf16=(4, 2.0**120, 1.125 * 2.0**119))[to]
    return f"""
        prmt.b32 p, $2, 0, {x.upper};
        shr.u32 q, p, {shift};
        and.b32 q, q, {_twice(0x7F00 >> shift)};
        and.b32 p, p, 0x80008000;
        or.b32 p, p, q;
        mov.b32 q, 0x80008000;
        mov.b32 r, {_twice(_bits(factor, to))};
        fma.rn.{to}x2 p, p, r, q;
        mov.b32 r, {_twice(_bits(other, to))};
        fma.rn.{to}x2 r, p, r, q;
        mov.b32 q, 0;
        fma.rn.{to}x2 {x.result}, r, q, p;"""


def _bits(value: float, to: str) -> int:
    """The bits of a number that the format has."""
    if to == "f16":
        return int(np.float16(value).view(np.uint16))
    return int(np.float32(value).view(np.uint32)) >> 16


def _twice(half: int) -> str:
    """A word of two equal halves."""
    return f"{half * 0x10001:#x}"
