"""Bits of a row's columns, 32 to a word, where each thread holds a row: a lane of a warp for each
row."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

WORD = 32  # bits
LANES = 32
TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE
ROW = TILE.reduce(1)

# The interpreter in tests/ knows the names of the inline functions.


def keep(x, words: list, flip: int = 0):
    """x where the bit of its column is set, and 0 elsewhere; the bit of column n is n ^ flip. In
    PTX, or a conversion to 16 bits comes before the choice."""
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, *(ROW for _ in words)), return_type=result)
    def keep_bits(_, x, *words):
        utils = mgpu.utils
        i32, f32 = utils.ir.IntegerType.get_signless(32), utils.ir.F32Type.get()
        words, column = [utils.bitcast(word.registers.flat[0], i32) for word in words], 0
        registers = x.registers.copy()
        for i, pair in enumerate(x.registers.flat):
            elements = []
            for j in range(utils.ir.VectorType(pair.type).shape[0]):
                bit = 1 << (column % WORD ^ flip)
                code = (
                    f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {bit:#x}; "
                    "setp.ne.u32 p, t, 0; selp.f32 $0, $1, 0f00000000, p; }"
                )
                element = utils.vector.extract(pair, [], [j])
                args = element, words[column // WORD]
                elements.append(utils.inline_ptx(code, *args, result_types=f32))
                column += 1
            registers.flat[i] = utils.vector.from_elements(pair.type, elements)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return keep_bits(x, *words)


def swap_halves(word):
    """A word by row, whose bit n was bit n ^ 16. Of bits that are tested twice ptxas keeps all
    predicates until then, in registers; these it does not know again."""
    half = np.uint32(WORD // 2)
    return word << half | word >> half


def of_eight(x, number: int):
    """What row `number` of each eight has in a vector by row."""

    @plgpu.inline_mgpu(
        arg_types=(ROW, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=ROW),
    )
    def row_of_eight(_, x, number):
        shuffle = lambda x: _shuffle("idx", x, number.registers[()], LANES - 8 << 8 | 31)
        return _each_register(x, shuffle)

    return row_of_eight(x, jnp.asarray(number, jnp.int32))


def transpose_bytes(x, lane):
    """Words by row, whose byte m in row 8 n + i of each 32 was byte n of row 8 m + i, where bytes
    are numbered from the highest down."""

    @plgpu.inline_mgpu(
        arg_types=(ROW, ROW), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=ROW)
    )
    def transpose_row_bytes(_, x, lane):
        utils = mgpu.utils
        i32 = utils.ir.IntegerType.get_signless(32)
        constant = lambda n: utils.c(n, i32)
        [lane] = (utils.bitcast(y, i32) for y in lane.registers.flat)

        def transpose(x):
            # the bytes that stay and those of the other lane, for lower and higher lanes
            for distance, lower, higher in ((16, 0x3276, 0x5410), (8, 0x3715, 0x6240)):
                other = _shuffle("bfly", x, constant(distance), 31)
                is_higher = utils.arith.cmpi(
                    utils.arith.CmpIPredicate.ne,
                    utils.arith.andi(lane, constant(distance)),
                    constant(0),
                )
                choice = utils.arith.select(is_higher, constant(higher), constant(lower))
                x = utils.prmt(x, other, choice)
            return x

        return _each_register(x, transpose)

    return transpose_row_bytes(x, lane)


def _each_register(x, compute: Callable):
    """compute(word) of each register of a vector by row."""
    i32, registers = mgpu.utils.ir.IntegerType.get_signless(32), x.registers.copy()
    for i, register in enumerate(x.registers.flat):
        word = compute(mgpu.utils.bitcast(register, i32))
        registers.flat[i] = mgpu.utils.bitcast(word, register.type)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def _shuffle(kind: str, x, lane, bounds: int):
    utils = mgpu.utils
    constant = lambda n: utils.c(n, utils.ir.IntegerType.get_signless(32))
    kind = getattr(utils.nvvm.ShflKind, kind)
    return utils.nvvm.shfl_sync(constant(-1), x, lane, constant(bounds), kind)
