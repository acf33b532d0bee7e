"""What the queries of a tile see of a block of keys, where each thread holds a row: a bit for each
of its columns, 32 to a word. A warp's lanes are 32 rows.

Words are vectors by row. The interpreter in tests/ knows the names of the inline functions."""

import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.registers import ScoreTile, gather, iota, load
from pallas_flash.masks.resolved_mask import ResolvedMask

WORD = LANES = 32
TILE = plgpu.Layout.TCGEN05_TMEM_NATIVE
ROW = TILE.reduce(1)


class RowMask(NamedTuple):
    """The mask of a batch row and head. Where rows are queries, their data are in registers, which
    a loop over blocks keeps; others are refs."""

    resolved_mask: ResolvedMask
    batch: IntLike
    start: IntLike | None  # [queries], where they are rows
    stop: IntLike | None
    bits: Any  # mask.HeadBits or None
    rule: Any  # mods.HeadMod or None

    @classmethod
    def load(
        cls,
        resolved_mask: ResolvedMask,
        batch: IntLike,
        first_query: IntLike,
        size: int,
        bits,
        rule,
        transposed: bool,
    ) -> "RowMask":
        """The mask of `size` queries from `first_query` on."""
        if transposed:
            return cls(resolved_mask, batch, None, None, bits, rule)
        queries = pl.ds(first_query, size)
        at = resolved_mask.narrow(
            ("start", "stop", "query_ids"), lambda ref: load(ref.at[batch, queries], ROW)
        )
        return cls(at, batch, *at.interval(first_query + iota(size, ROW)), bits, rule)

    def select(self, tile: ScoreTile) -> Callable:
        """A function of x and `other`: x where each query sees each key, and `other` elsewhere."""
        words = [self._words(part) for part in tile.split(WORD)]
        if self.bits is not None:
            words = list(map(operator.and_, words, self.bits.words_of_rows(tile)))
        if self.rule is None:
            return lambda x, other: select(x, words, other)
        visible = self.rule.visible(tile)
        return lambda x, other: select(jnp.where(visible, x, other), words, other)

    def _words(self, tile: ScoreTile):
        """The columns, at most 32, that each row sees by its interval and its id."""
        mask = self.resolved_mask
        words = self._visible_to_keys(tile) if tile.transposed else self._keys_in_interval(tile)
        if mask.query_ids is None:
            return words
        if tile.transposed:
            keys = pl.ds(tile.first_key, tile.shape[0])
            ids = load(mask.key_ids.at[self.batch, keys], ROW)
            others = self._at_lane(tile.first_query, tile)(mask.query_ids)
        else:
            ids, others = mask.query_ids, self._at_lane(tile.first_key, tile)(mask.key_ids)
        return words & equal(ids, others)

    def _keys_in_interval(self, tile: ScoreTile):
        relative = lambda end: plgpu.layout_cast(
            jnp.broadcast_to(end - tile.first_key, tile.shape[:1]), ROW
        )
        return interval(relative(self.start), relative(self.stop))

    def _visible_to_keys(self, tile: ScoreTile):
        """The queries that see each key."""
        mask, row = self.resolved_mask, iota(tile.shape[0], ROW)
        if not mask.has_data:  # an interval of queries
            key = tile.first_key + row
            start, stop = mask.transposed(ResolvedMask.ALL).interval(key)
            stop = jnp.where(key < mask.keys, stop, 0) - tile.first_query
            return interval(jnp.zeros_like(key) + start - tile.first_query, stop)
        # each lane computes which of the warp's keys one query sees
        number = lane(tile.shape[0])
        at = mask.narrow(("start", "stop"), self._at_lane(tile.first_query, tile))
        first_key = tile.first_key + row - number
        start, stop = (
            jnp.zeros_like(row) + end - first_key for end in at.interval(tile.first_query + number)
        )
        return transpose(interval(start, stop))

    def _at_lane(self, first: IntLike, tile: ScoreTile) -> Callable:
        """A function of a ref: its data of 32 queries or keys, in each warp one in each lane."""
        index = first + lane(tile.shape[0])
        return lambda ref: gather(ref, self.batch, index=index, layout=ROW)


# Words


def lane(rows: int):
    """The lane of each row."""
    return iota(rows, ROW) & (LANES - 1)


def select(x, words: list, other: float, flip: int = 0):
    """x where the bit of its column is set, and `other` elsewhere, from a word for each 32 columns;
    the bit of column n is n ^ flip.

    In PTX: of bits that are tested one after another ptxas makes seven predicates at once, and a
    conversion to 16 bits stays behind the choice."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, *(ROW for _ in words)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE),
    )
    def select_by_bits(_, x, *words):
        utils, registers = mgpu.utils, x.registers.copy()
        bits, column = [_word(word.registers.flat[0]) for word in words], 0
        for i, vector in enumerate(x.registers.flat):
            elements = []
            for j in range(utils.ir.VectorType(vector.type).shape[0]):
                code = (
                    f"and.b32 t, $2, {1 << (column % WORD ^ flip):#x}; setp.ne.u32 p, t, 0; "
                    f"selp.f32 $0, $1, 0f{struct.pack('>f', other).hex()}, p;"
                )
                element = utils.vector.extract(vector, [], [j])
                elements.append(
                    utils.inline_ptx(
                        f"{{ .reg .pred p; .reg .b32 t; {code} }}",
                        element,
                        bits[column // WORD],
                        result_types=element.type,
                    )
                )
                column += 1
            registers.flat[i] = utils.vector.from_elements(vector.type, elements)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return select_by_bits(x, *words)


def swap_halves(word):
    """The word whose bit n is bit n ^ 16. Of bits that are tested twice ptxas keeps all predicates
    until then, in registers; these it does not know again."""
    half = np.uint32(WORD // 2)
    return word << half | word >> half


def interval(start, stop):
    """The bits from `start` to `stop` - 1 that a word has."""

    @plgpu.inline_mgpu(arg_types=(ROW, ROW), return_type=_by_row(start, jnp.uint32))
    def bit_interval(_, start, after):
        # a shift by 32 leaves 0; of an inverted word ptxas would not test seven bits at once
        code = """{
            .reg .b32 from, before;
            shl.b32 from, -1, $1;
            shr.u32 before, -1, $2;
            and.b32 $0, from, before;
        }"""
        return _each_register(code, start, after)

    return bit_interval(jnp.maximum(start, 0), WORD - jnp.clip(stop, 0, WORD))


def equal(x, others):
    """Which lanes of its warp have in `others` what a row has in x. A step for each number that
    occurs in a warp's `others`: one, or a few."""

    @plgpu.inline_mgpu(arg_types=(ROW, ROW), return_type=_by_row(x, jnp.uint32))
    def lanes_equal(_, x, others):
        code = """{
            .reg .pred p; .reg .b32 left, number, lanes, result;
            mov.b32 result, 0;
            mov.b32 left, -1;
            NEXT:
            clz.b32 number, left;
            xor.b32 number, number, 31;
            shfl.sync.idx.b32 number, $2, number, 31, -1;
            setp.eq.s32 p, $2, number;
            vote.sync.ballot.b32 lanes, p, -1;
            setp.eq.s32 p, $1, number;
            @p mov.b32 result, lanes;
            xor.b32 left, left, lanes;
            setp.ne.u32 p, left, 0;
            @p bra.uni NEXT;
            mov.b32 $0, result;
        }"""
        return _each_register(code, x, others)

    return lanes_equal(x, others)


def transpose(word, distances: tuple[int, ...] = (16, 8, 4, 2, 1)):
    """Bits whose column's and whose row's number are exchanged within 32 x 32, or of both numbers
    only the bits in `distances`: (16, 8) exchanges bytes."""
    number = lane(word.shape[0])
    for n in distances:
        is_higher = number & n != 0
        low = np.uint32(sum(1 << bit for bit in range(WORD) if not bit & n))
        mine = jnp.where(is_higher, ~low, low)
        by = jnp.where(is_higher, np.uint32(WORD - n), np.uint32(n))
        other = from_lane(word, n)
        word = word & mine | (other << by | other >> (np.uint32(WORD) - by)) & ~mine
    return word


def from_lane(x, distance: int):
    """What the lane has whose number differs in the bits of `distance`."""

    @plgpu.inline_mgpu(arg_types=(ROW, plgpu.Layout.WG_SPLAT), return_type=_by_row(x, x.dtype))
    def lane_xor(_, x, distance):
        code = "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;"
        return _each_register(code, x, distance)

    return lane_xor(x, jnp.asarray(distance, jnp.int32))


def from_eight(x, number: int):
    """What lane `number` of each eight lanes has."""

    @plgpu.inline_mgpu(arg_types=(ROW, plgpu.Layout.WG_SPLAT), return_type=_by_row(x, x.dtype))
    def lane_of_eight(_, x, number):
        code = f"shfl.sync.idx.b32 $0, $1, $2, {LANES - 8 << 8 | 31}, -1;"
        return _each_register(code, x, number)

    return lane_of_eight(x, jnp.asarray(number, jnp.int32))


def _by_row(x, dtype):
    return plgpu.ShapeDtypeStruct(x.shape, dtype, layout=ROW)


def _word(register):
    return mgpu.utils.bitcast(register, mgpu.utils.ir.IntegerType.get_signless(WORD))


def _each_register(code: str, *operands):
    """A vector of what the PTX computes of each register of vectors by row, and of scalars."""
    first = operands[0]
    registers = first.registers.copy()
    for i, register in enumerate(first.registers.flat):
        words = [_word(x.registers.flat[i % x.registers.size]) for x in operands]
        result = mgpu.utils.inline_ptx(code, *words, result_types=words[0].type, convergent=True)
        registers.flat[i] = mgpu.utils.bitcast(result, register.type)
    return mgpu.FragmentedArray(_registers=registers, _layout=first.layout, _is_signed=False)
