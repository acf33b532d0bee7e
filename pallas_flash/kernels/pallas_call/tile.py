"""The primitives of kernels by `pl.pallas_call`: spans of rows and keys, loads, products, what a
tile sees, grids of programs.

Arrays in a kernel have sizes that are powers of two, and loads are bounded where an array ends
earlier.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash import dropout
from pallas_flash.jax_support.jax_internals import traced_lines
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.pallas_call import mods, power_of_two
from pallas_flash.kernels.pallas_call.mods import FIRST
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled import online_softmax, schedule

try:
    from pallas_flash.kernels.pallas_call import by_triton as lowering
except ImportError:  # a jax without it
    from pallas_flash.kernels.pallas_call import interpreted as lowering


class Span(NamedTuple):
    """The rows or keys of one tile, which are neighbours; `inside` is None where no load needs a
    bound."""

    slice: pl.Slice
    index: jax.Array  # [size]
    inside: jax.Array | None  # [size], bool


def span(number, size: int, length: int, bounded: bool = True) -> Span:
    """The Span of tile `number` in an array of `length`, bounded where the last may overhang."""
    index = number * size + jnp.arange(size, dtype=jnp.int32)
    return Span(
        pl.ds(number * size, size), index, index < length if bounded and length % size else None
    )


def load(ref, rows=None, columns=None, other=0):
    """Loads the tile `ref`, with `other` outside of `rows` and `columns`: bools along each axis,
    None where there is no bound."""
    return lowering.load(ref, _inside(ref.shape, rows, columns), other)


barrier = lowering.barrier


def store(ref, x, rows=None, columns=None):
    """Writes the part of tile x inside of `rows` and `columns` to `ref`."""
    lowering.store(ref, x.astype(ref.dtype), _inside(ref.shape, rows, columns))


def subtile(ref, *index):
    """The subtile of `ref` at `index` to store into, where None is all of an axis. With 64-bit
    integers enabled Pallas' interpreter asks that all its starts be of one type."""
    index = (*index, *[None] * (len(ref.shape) - len(index)))
    return ref.at[
        tuple(pl.ds(FIRST, n) if i is None else i for i, n in zip(index, ref.shape, strict=True))
    ]


def head(ref, size: int):
    """Which columns of a tile's head axis exist, or None for all."""
    return jnp.arange(ref.shape[-1]) < size if ref.shape[-1] > size else None


def _inside(shape, rows, columns):
    if len(shape) == 1:
        return rows
    bounds = ([] if rows is None else [rows[:, None]]) + (
        [] if columns is None else [columns[None, :]]
    )
    return jnp.broadcast_to(functools.reduce(operator.and_, bounds), shape) if bounds else None


def dot(a, b):
    """a b"""
    return _product(a, b, 1, 0)


def dot_t(a, b):
    """a b^T"""
    return _product(a, b, 1, 1)


def t_dot(a, b):
    """a^T b"""
    return _product(a, b, 0, 0)


def _product(a, b, a_axis, b_axis):
    # None: what jax's configuration says, for float32 TF32
    precision = "highest" if a.dtype == jnp.float32 else "default"
    dims = ((a_axis,), (b_axis,)), ((), ())
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


class TileMask(NamedTuple):
    """The mask of the rows of a query tile."""

    resolved_mask: ResolvedMask
    batch: IntLike  # the entry of the data's refs
    start: IntLike  # [rows]
    stop: IntLike
    bind: Callable | None  # key indices -> the TileMod of the mask's mask_mod

    def blocks(self, block_k: int) -> schedule.Blocks:
        """The key blocks that the rows visit."""
        where = self.resolved_mask.mask_mod
        if where is not None and where.block_types is not None:
            return schedule.Blocks.from_row(where.block_types)
        return schedule.key_blocks(self.start, self.stop, self.resolved_mask.contiguous, block_k)

    def visible(self, key: Span, dense, masked: bool):
        """Whether the rows see the keys, or None where they see all; `dense` is a tile of the dense
        mask, or None."""
        if not masked:
            return dense
        column = lambda x: x[:, None] if jnp.ndim(x) else x
        v, ids = self.resolved_mask, ()
        if v.query_ids is not None:
            ids = (
                v.query_ids[:, None],
                load(v.key_ids.at[self.batch, key.slice], key.inside)[None, :],
            )
        inside = v.visible(column(self.start), column(self.stop), key.index[None, :], *ids)
        inside = inside if self.bind is None else inside & self.bind(key.index).visible()
        return inside if dense is None else inside & dense

    def reach(self, key: Span, masked: bool):
        """Which keys a row could see, or None for all: beyond the last stop there may be NaN."""
        if not masked:
            return None
        return key.index < (self.stop if isinstance(self.stop, int) else jnp.max(self.stop))

    def valid(self, row: Span, masked: bool):
        """Which rows exist and see a key, or None for all: the others may be NaN."""
        if not masked:
            return None
        valid = jnp.broadcast_to(self.start < self.stop, row.index.shape)
        return valid if row.inside is None else valid & row.inside


def mask(
    resolved_mask: ResolvedMask,
    row: Span,
    queries: int,
    batch: IntLike = FIRST,
    pair: tuple[IntLike, IntLike] | None = None,
) -> TileMask:
    """The TileMask of a tile's rows, from the entry `batch` of the data's refs; a row beyond the
    last one counts as the last.

    `pair` is the (batch row, head) that a mask_mod is evaluated for, where `visible` is called.
    """
    index = row.index if row.inside is None else jnp.minimum(row.index, queries - 1)
    bind, mask_mod = None, resolved_mask.mask_mod
    if mask_mod is not None:
        bind = functools.partial(mods.bind, mask_mod, pair, batch, index)
    at = resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda ref: ref[batch])
    at = at.narrow(ResolvedMask.BY_QUERY, lambda ref: ref[batch, index])
    return TileMask(at, batch, *at.interval(index), bind)


def dense(ref, leading: tuple, row: Span, key: Span):
    """A tile [rows or 1, keys or 1] of a bias (float32) or mask (bool); None without one.

    `leading` indexes the axes before those; axes of size 1 broadcast, and one that holds just the
    tile is taken whole.
    """
    if ref is None:
        return None
    leading = tuple(i if n > 1 else FIRST for i, n in zip(leading, ref.shape, strict=False))
    take = lambda span, n: span.slice if n > span.index.size else pl.ds(0, n)
    bound = lambda span, n: None if n == 1 else span.inside
    rows, keys = ref.shape[-2:]
    ref = ref.at[(*leading, take(row, rows), take(key, keys))]
    x = load(ref, bound(row, rows), bound(key, keys))
    return x if x.dtype == bool else x.astype(jnp.float32)


def keys_and_values(problem: Problem, k_ref, v_ref, inside):
    """k [keys, H] and v [keys, Hv] with 0 for keys outside."""
    k_head, v_head = head(k_ref, problem.head_size), head(v_ref, problem.value_size)
    return load(k_ref, inside, k_head), load(v_ref, inside, v_head)


class GradientRows(NamedTuple):
    """The operands of the backward for a tile of queries: refs or values."""

    q: jax.Array  # [rows, H]
    do: jax.Array  # [rows, Hv]
    lse: jax.Array  # [rows]
    delta: jax.Array  # [rows]

    def at(self, row: Span, *head: IntLike) -> "GradientRows":
        """The refs of a tile of queries of one head, by the indices of the axes before it."""
        by_row, by_head = (*head[:-1], row.slice, head[-1]), (*head, row.slice)
        q, do = (ref.at[by_row] for ref in (self.q, self.do))
        return GradientRows(q, do, *(ref.at[by_head] for ref in (self.lse, self.delta)))

    def load(self, problem: Problem, row: Span, valid) -> "GradientRows":
        """Loads the values; padding rows get values that give no gradient."""
        q = load(self.q, valid, head(self.q, problem.head_size))
        do = load(self.do, valid, head(self.do, problem.value_size))
        return GradientRows(
            q, do, load(self.lse, row.inside, other=jnp.inf), load(self.delta, row.inside)
        )


def start(p: Problem, x: Operands, rows: int) -> online_softmax.SoftmaxState:
    """The SoftmaxState [rows] of one head before any key."""
    sink = None if x.sinks is None else x.sinks[...]
    return online_softmax.start(jnp.zeros(rows, jnp.float32), p.log_base, sink, p.with_top)


def score_mod(
    x: Operands, row: Span, key: Span, pair: tuple[IntLike, IntLike], batch: IntLike = FIRST
) -> mods.TileMod | None:
    """The score_mod of one (batch row, head), `pair`, or None without one; `batch` is the entry of
    the data's refs."""
    return None if x.score is None else mods.bind(x.score, pair, batch, row.index, key.index)


def scores(problem: Problem, q, k, bias, mod: mods.TileMod | None = None):
    """The logits [rows, keys], in the problem's log base."""
    s, _ = scores_before_mod(problem, q, k, bias)
    return s if mod is None else mod.score(s)


def scores_before_mod(problem: Problem, q, k, bias):
    """The logits [rows, keys] before score_mod, scale q k^T with bias and soft cap, in the log base
    of the problem; and the tanh of the soft cap, None without one."""
    p, scale = problem, problem.scale
    if q.dtype == jnp.float32:
        if bias is None and p.soft_cap is None:
            # no product is left that with less m is one multiply-add
            return dot_t(q * (scale * p.log_base.log_e), k), None
        q, scale = q * scale, 1.0
    return online_softmax.scores(dot_t(q, k), bias, scale, p.soft_cap, p.log_base)


def drop(problem: Problem, seeds, leading: tuple, row: Span, key: Span, x):
    """Sets x [rows, keys] to 0 where dropout drops the weight; `leading` indexes the axes of
    `seeds` before the last."""
    if seeds is None:
        return x
    first, second = (seeds[(*leading, np.int32(i))] for i in range(2))
    keeps = dropout.keeps(problem.dropped, first, second, row.index[:, None], key.index[None, :])
    return jnp.where(keeps, x, 0.0)


def gradients(
    problem: Problem, rows: GradientRows, k, v, bias, visible, drop, mod: mods.TileMod | None = None
):
    """P after dropout, and dS [rows, keys]."""
    return with_tables(problem, rows, k, v, bias, visible, drop, mod)[:2]


def with_tables(
    problem: Problem, rows: GradientRows, k, v, bias, visible, drop, mod: mods.TileMod | None
):
    """P after dropout, dS, and (array, index, cotangent) of each read of the score_mod's tables."""
    dp = lambda: drop(dot_t(rows.do, v)) - rows.delta[..., None]
    p, ds, tables = weighted(problem, rows.q, k, rows.lse, bias, visible, mod, dp)
    return drop(p), ds, tables


def weighted(
    problem: Problem, q, k, lse, bias, visible, mod: mods.TileMod | None, factor: Callable
):
    """P [rows, keys]; P factor() times the derivative of the logits by those before score_mod and
    soft cap; and the reads of the score_mod's tables, as in `with_tables`."""
    (x, tanh), lse, tables = scores_before_mod(problem, q, k, bias), lse[..., None], ()
    if mod is None:
        p = problem.log_base.power(x - lse)
        return *online_softmax.gradients(p, factor(), visible, tanh), tables
    s, back = mod.score_vjp(x)
    s = jnp.where(lse == jnp.inf, 0.0, s)  # it may be NaN in padding rows
    p = problem.log_base.power(s - lse)
    p, ds = online_softmax.gradients(p, factor(), visible, None)
    ds, tables = back(ds)
    return p, online_softmax.soft_cap_vjp(ds, tanh, visible), tables


class Grid(NamedTuple):
    """A grid of programs, and the blocks of arrays that each gets. Each letter of an axis has a
    block size (None: one entry, without the axis), and from the grid's indices the number of the
    block (0 for a letter left out).

    b n k batch and heads, t s rows and keys, h v head sizes; B T S the axes of a mask's data; c the
    seeds of a head.
    """

    problem: Problem
    tiles: Any
    shape: tuple[int, ...]
    index: Callable[..., dict[str, IntLike]]
    sizes: dict[str, int | None]

    def spec(self, letters: str, broadcast=None) -> pl.BlockSpec:
        """The BlockSpec of an array with these axes; in an array `broadcast`, axes of size 1 are
        not cut."""
        one = [broadcast is not None and broadcast.shape[axis] == 1 for axis in range(len(letters))]
        cut = lambda size, one: size if size is None or not one else 1
        sizes = tuple(cut(self.sizes[c], o) for c, o in zip(letters, one, strict=True))

        def index(*program):
            at = self.index(*program)
            return tuple(0 if o else at.get(c, 0) for c, o in zip(letters, one, strict=True))

        return pl.BlockSpec(sizes, index)

    def operands(self, x: Operands) -> Operands:
        """The BlockSpecs of all operands."""
        dense = lambda a: None if a is None else self.spec("bnts", a)
        resolved_mask = x.resolved_mask.narrow(ResolvedMask.BY_BATCH, lambda _: self.spec("B"))
        resolved_mask = resolved_mask.narrow(ResolvedMask.BY_QUERY, lambda _: self.spec("BT"))
        resolved_mask = resolved_mask.narrow(ResolvedMask.BY_KEY, lambda _: self.spec("BS"))
        resolved_mask = dataclasses.replace(
            resolved_mask, mask_mod=mods.specs(self, resolved_mask.mask_mod)
        )
        return Operands(
            query=self.spec("btnh"),
            key=self.spec("bskh"),
            value=self.spec("bskv"),
            bias=dense(x.bias),
            sinks=None if x.sinks is None else self.spec("n"),
            mask=dense(x.mask),
            resolved_mask=resolved_mask,
            seeds=None if x.seeds is None else self.spec("bnc"),
            score=mods.specs(self, x.score),
        )

    @traced_lines()
    def launch(self, kernel, x: Operands, *arrays, out, name: str, specs=None, **options):
        """The results of kernel(x, *arrays, *out, problem=, tiles=, **options). `arrays` come with
        their letters, `out` are dtypes with letters; in place of letters there may be a BlockSpec,
        with it a shape in place of a dtype, and `specs` in place of `operands(x)`."""
        p = self.problem
        lengths = dict(b=p.batch, t=p.queries, s=p.keys, n=p.heads, k=p.kv_heads)
        lengths |= dict(h=p.head_size, v=p.value_size)
        spec = lambda axes: self.spec(axes) if isinstance(axes, str) else axes
        # the axes of a mesh over which the operands vary, and so the results
        devices = jax.typeof(x.query).manual_axis_type

        def shape(of, axes):
            if isinstance(axes, str):
                of = jax.ShapeDtypeStruct([lengths[c] for c in axes], of)
            return jax.ShapeDtypeStruct(of.shape, of.dtype, manual_axis_type=devices)

        call = functools.partial(
            pl.pallas_call,
            functools.partial(kernel, problem=p, tiles=self.tiles, **options),
            [shape(*pair) for pair in out],
            grid=self.shape,
            in_specs=[specs or self.operands(x), *(spec(axes) for _, axes in arrays)],
            out_specs=[spec(axes) for _, axes in out],
            name=name,
        )
        args, interpreted = (x, *(array for array, _ in arrays)), call(interpret=True)
        if (parameters := lowering.parameters(self.tiles)) is None:
            return interpreted(*args)
        compiled = call(compiler_params=parameters)
        return lax.platform_dependent(*args, cuda=compiled, rocm=compiled, default=interpreted)


def grid(problem: Problem, tiles, shape: tuple[int, ...], index, **sizes: int | None) -> Grid:
    """A Grid with whole axes of rows, keys and heads but for `sizes`; one batch row and head at a
    time."""
    p = problem
    whole = lambda length, size: schedule.ceil_div(length, size) * size
    T, S = whole(p.queries, tiles.block_q), whole(p.keys, tiles.block_k)
    defaults = dict(b=None, n=None, k=None, t=T, s=S, B=1, T=p.queries, S=S, c=2)
    defaults |= dict(h=power_of_two(p.head_size), v=power_of_two(p.value_size))
    return Grid(p, tiles, shape, index, defaults | sizes)
