"""PTX of values alone, evaluated in NumPy: what kernels write of numbers of 8 bits."""

import re

import jax.numpy as jnp
import numpy as np

FORMATS = dict(f16=np.float16, bf16=jnp.bfloat16, e4m3=jnp.float8_e4m3fn, e5m2=jnp.float8_e5m2)
MANTISSA = dict(f16=10, bf16=7)


def _prmt(a, b, selector):
    source = [word >> 8 * n & 255 for word in (a, b) for n in range(4)]
    chosen = [source[int(selector) >> 4 * n & 7] for n in range(4)]
    return sum(byte << np.uint32(8 * n) for n, byte in enumerate(chosen))


OF_WORDS = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shr.u32": np.right_shift,
    "mov.b16": lambda a: a,
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
}


def results(code: str, word) -> tuple:
    """$0 and $1, from an array of words, $2. Registers hold words; those of .f32 its numbers."""
    values = {"$2": np.asarray(word, np.uint32)}

    def read(name: str):
        return values[name] if name in values else np.uint32(int(name, 0))

    for statement in filter(None, map(str.strip, code.strip("{} \n").split(";"))):
        operation, operands = statement.split(None, 1)
        if operation == ".reg":
            continue
        target, *sources = re.findall(r"\{.*?\}|[^\s,]+", operands)
        value = evaluated(operation, *map(read, sources))
        names = re.findall(r"[^\s,{}]+", target)
        values |= dict(zip(names, [value] if len(names) == 1 else halves(value), strict=True))
    return values["$0"], values["$1"]


def evaluated(operation: str, *x):
    """The value of an instruction."""
    if operation in OF_WORDS:
        return OF_WORDS[operation](*x)
    name, *kinds = operation.split(".")
    to, of = kinds[-2].removesuffix("x2"), kinds[-1].removesuffix("x2")
    match name, to, of:
        case "fma", "rn", _:
            with np.errstate(all="ignore"):
                a, b, c = ([number(half, of) for half in halves(each)] for each in x)
                return word_of(a[0] * b[0] + c[0], a[1] * b[1] + c[1], of)
        case "cvt", "f32", "f16":
            return number(x[0], "f16")
        case "cvt", "bf16", "f32":
            return word_of(x[1], x[0], to)
        case "cvt", "bf16", "s2f6":
            scales = int(x[1]) & 255, int(x[1]) >> 8
            both = zip(bytes_of(x[0], np.int8), scales, strict=True)
            return word_of(*(a / 64 * 2.0 ** (scale - 127) for a, scale in both), to)
        case "cvt", _, "e4m3" | "e5m2":
            return word_of(*bytes_of(x[0], FORMATS[of]), to)
    raise NotImplementedError(operation)


def halves(word) -> list:
    return [word & 0xFFFF, word >> 16]


def bytes_of(word, dtype) -> list:
    """The lower two, as numbers."""
    return [(word >> n & 255).astype(np.uint8).view(dtype).astype(np.float32) for n in (0, 8)]


def number(half, of: str):
    """As float64, by integers: the threads of jax take float32 below 2^-126 as 0."""
    bits = MANTISSA[of]
    most = 0x7FFF >> bits
    exponent, fraction = (half >> bits & most).astype(int), half & (1 << bits) - 1
    x = np.ldexp(fraction + (exponent > 0) * 2.0**bits, np.maximum(exponent, 1) - most // 2 - bits)
    x = np.where(exponent == most, np.where(fraction > 0, np.nan, np.inf), x)
    return np.where(half >> 15, -x, x)


def word_of(low, high, to: str):
    """A word of two numbers."""
    with np.errstate(all="ignore"):
        bits = lambda x: x.astype(FORMATS[to]).view(np.uint16).astype(np.uint32)
        return bits(low) | bits(high) << np.uint32(16)
