"""Tiles of scores in registers, wherever a GPU generation's products leave them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike


class Layouts(NamedTuple):
    """The layouts of a GPU generation: of a product's sums, and of a value for each of their rows
    or columns."""

    tile: Any
    row: Any
    column: Any
    columns: int = 8  # of a tile that lie in the registers as the next ones do
    # the layout of a tile where Mosaic does not know it from that of its rows or columns
    broadcast: Any = None

    @property
    def row_in_thread(self) -> bool:
        """Whether each thread holds a row of a tile."""
        return self.tile == plgpu.Layout.TCGEN05_TMEM_NATIVE


def opaque(n: IntLike):
    """n, unknown to the compiler, which would compute early what depends on n, and unroll loops,
    and has no registers for that."""
    return lax.optimization_barrier(jnp.asarray(n, jnp.int32))


def iota(size: int, layout):
    """0 to size - 1 as int32. Of a lax.iota that a constant mask leaves without a reader MLIR
    removes the layout_cast alone, and Mosaic's layout inference finds none for what is left."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=layout))
    def iota_in_layout(_):  # a name that the interpreter in tests/ knows
        i32 = mgpu.utils.ir.IntegerType.get_signless(32)
        return mgpu.FragmentedArray.broadcasted_iota(
            i32, (size,), 0, layout.to_mgpu(), is_signed=True
        )

    return iota_in_layout()


def per_row(x, shape, layout=None):
    """A value of each row, repeated along it; a value of all rows stays as it is. The layout of the
    tile is needed where Mosaic does not know it from that of the rows."""
    return _broadcast(x, shape, 0, layout)


def per_column(x, shape, layout=None):
    """A value of each column, repeated along it; a value of all columns stays as it is."""
    return _broadcast(x, shape, 1, layout)


def _broadcast(x, shape, axis: int, layout):
    if not jnp.ndim(x):
        return x
    x = lax.broadcast_in_dim(x, shape, [axis])
    return x if layout is None else plgpu.layout_cast(x, layout)


def some_below_one(alpha, layout):
    """1 in each warp that has a row whose alpha is below 1, else 0; alpha: a value of each row, in
    this layout."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def some_below_one(_, alpha):  # a name that the interpreter in tests/ knows
        i32 = mgpu.utils.ir.IntegerType.get_signless(32)
        rows = [mgpu.utils.bitcast(x, i32) for x in alpha.registers.flat]
        compare = "".join(
            f"setp.lt.or.f32 p, ${i}, 0f3F800000, p; " for i in range(1, 1 + len(rows))
        )
        vote = (
            f"{{ .reg .pred p; setp.ne.u32 p, 0, 0; {compare}vote.sync.any.pred p, p, -1; "
            f"selp.s32 $0, 1, 0, p; }}"
        )
        some = mgpu.utils.inline_ptx(vote, *rows, result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(some, (), is_signed=True)

    return some_below_one(alpha)


def load(ref, layout):
    """A vector or a tile from global memory."""
    return plgpu.load(ref, layout=layout, optimized=False)


def load_rows(ref):
    """A tile in global memory, for threads that hold a row each, 16 bytes at a time: whatever
    its size, a load of a warp goes to 32 rows."""
    result = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load_rows(_, ref):  # a name that the interpreter in tests/ knows
        ir, vector = mgpu.utils.ir, mgpu.utils.vector
        narrow, size = mgpu.TMEM_NATIVE_LAYOUT, 16 // np.dtype(result.dtype).itemsize
        x = mgpu.FragmentedArray.load_untiled(
            ref, layout=mgpu.tmem_native_layout(size), optimized=False
        )
        n = narrow.vector_length
        part = ir.VectorType.get((n,), x.mlir_dtype)
        pieces = [
            vector.extract_strided_slice(part, wide, [first], [n], [1])
            for wide in x.registers.flat
            for first in range(0, size, n)
        ]
        registers = np.empty(len(pieces), object)
        registers[:] = pieces
        return mgpu.FragmentedArray(
            _registers=registers.reshape(narrow.registers_shape(result.shape)),
            _layout=narrow,
            _is_signed=None,
        )

    return load_rows(ref)


def gather(ref, *rows: IntLike, index, layout):
    """The elements of a row in global memory at these indices, which are in this layout: a load for
    each, of which L1 serves most."""
    result = plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=layout)
    scalars = (plgpu.Layout.WG_SPLAT,) * len(rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalars, layout), return_type=result)
    def gather(_, ref, *indices):  # a name that the interpreter in tests/ knows
        arith, ir, memref, vector = (
            getattr(mgpu.utils, name) for name in ("arith", "ir", "memref", "vector")
        )
        *rows, index = indices
        as_index = lambda n: arith.index_cast(ir.IndexType.get(), n)
        rows = [as_index(row.registers[()]) for row in rows]

        def loaded(indices):
            each = [
                vector.extract(indices, [], [n])
                for n in range(ir.VectorType(indices.type).shape[0])
            ]
            values = [memref.load(ref, [*rows, as_index(n)]) for n in each]
            return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)

        registers = np.vectorize(loaded, otypes=[object])(index.registers)
        return mgpu.FragmentedArray(
            _registers=registers,
            _layout=index.layout,
            _is_signed=mgpu.utils.is_signed(result.dtype),
        )

    return gather(ref, *(jnp.asarray(row, jnp.int32) for row in rows), index)


class ScoreTile(NamedTuple):
    """The place of a tile of scores: a row for each query and a column for each key, or the other
    way round if transposed."""

    layouts: Layouts
    first_query: IntLike
    first_key: IntLike
    shape: tuple[int, int]
    transposed: bool = False

    @property
    def first(self) -> tuple[IntLike, IntLike]:
        """The query or key of the first row, and of the first column."""
        first = self.first_query, self.first_key
        return first[::-1] if self.transposed else first

    def per_query(self, x):
        broadcast = per_column if self.transposed else per_row
        return broadcast(x, self.shape, self.layouts.broadcast)

    def per_key(self, x):
        broadcast = per_row if self.transposed else per_column
        return broadcast(x, self.shape, self.layouts.broadcast)

    def query_index(self, offset: IntLike = 0):
        """The query of each score, plus an offset."""
        count, layout = self._queries
        return self.per_query(self.first_query + offset + iota(count, layout))

    def key_index(self):
        """The key of each score."""
        count, layout = self._keys
        return self.per_key(self.first_key + iota(count, layout))

    def load_per_query(self, rows: Callable):
        """The value of the ref rows(slice of queries) for the query of each score."""
        count, layout = self._queries
        return self.per_query(load(rows(pl.ds(self.first_query, count)), layout))

    def load_per_key(self, rows: Callable):
        """The value of the ref rows(slice of keys) for the key of each score."""
        count, layout = self._keys
        return self.per_key(load(rows(pl.ds(self.first_key, count)), layout))

    def split(self, size: int) -> list["ScoreTile"]:
        """Tiles of `size` columns, the last perhaps of fewer."""
        rows, columns = self.shape
        axis = "first_query" if self.transposed else "first_key"
        return [
            self._replace(**{axis: getattr(self, axis) + n}, shape=(rows, min(size, columns - n)))
            for n in range(0, columns, size)
        ]

    @property
    def _queries(self):
        return (
            (self.shape[1], self.layouts.column)
            if self.transposed
            else (self.shape[0], self.layouts.row)
        )

    @property
    def _keys(self):
        return (
            (self.shape[0], self.layouts.row)
            if self.transposed
            else (self.shape[1], self.layouts.column)
        )
