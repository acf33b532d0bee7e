"""A mask_mod or a score_mod in registers: the values that it reads, and its steps on tiles."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic.block_info import broadcast_index
from pallas_flash.kernels.mosaic.elements import Tiling
from pallas_flash.kernels.mosaic.registers import ScoreTile, gather, opaque
from pallas_flash.mods import captured, traced
from pallas_flash.mods.bound import BoundMod
from pallas_flash.mods.captured import PAIR
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import schedule

QUERY, KEY = 2, 3  # among the indices (b, h, q_idx, kv_idx)
# columns of a tile whose elements are read one by one: registers hold the indices of few
AT_ONCE = 32


class Arrays(NamedTuple):
    """The indices of batch rows and heads that a mod takes, and the values of captured arrays that
    it reads."""

    batch: Any  # int32 [B], their indices; None where it does not ask for them
    head: Any  # int32 [N]
    offset: Any  # int32 [B]; None where it is static
    # each [B or 1, N or 1, n], n = 1, or whole tiles of queries or of keys where the index is made
    # of theirs; where it is made of both, all of the array, [n]
    values: tuple


def arrays(p: Problem, bound: BoundMod | None, t: Tiling) -> Arrays | None:
    """The arrays of a mod, None without one."""
    if bound is None:
        return None
    b, h = bound.indices(p.batch, p.heads)
    offset = None if isinstance(bound.offset, int) else bound.offset
    # beyond the last query or key is what it reads for the last
    index = lambda n, size: jnp.minimum(
        jnp.arange(schedule.ceil_div(n, size) * size, dtype=jnp.int32)[None, None], n - 1
    )
    position = index(p.queries, t.block_q) + (
        bound.offset if offset is None else offset[:, None, None]
    )
    read = lambda array, index: bound.arrays[array][index]
    values_at = lambda *at: [
        _widen(value) for _, value in bound.read_captured(read, b[:, None, None], h[:, None], *at)
    ]
    by_query, by_key = values_at(position, 0), values_at(0, index(p.keys, t.block_k))
    flat = lambda at: _widen(bound.arrays[at.array].reshape(-1)).reshape(-1)
    values = tuple(
        flat(at) if at.depends_on >= PAIR else for_key if KEY in at.depends_on else for_query
        for at, for_query, for_key in zip(bound.mod.reads, by_query, by_key, strict=True)
    )
    return Arrays(
        b if bound.mod.uses_batch else None, h if bound.mod.uses_head else None, offset, values
    )


def _widen(value) -> jax.Array:
    """The value [B or 1, N or 1, n], bools and integers of 16 bits as int32."""
    is_small = value.dtype.kind in "biu" and value.dtype.itemsize < 4
    value = value.astype(jnp.int32) if is_small else value
    return value.reshape((1,) * (3 - value.ndim) + value.shape)


class HeadMod(NamedTuple):
    """A mod of one batch row and head."""

    bound: BoundMod
    batch: IntLike
    head: IntLike
    offset: IntLike
    # scalars; by query or by key a function from a slice of these to its ref; by both, a ref
    values: list

    def visible(self, tile: ScoreTile):
        """Whether a mask_mod lets each query see each key."""
        return self.steps(self.bound.evaluate, tile).output(0)

    def steps(
        self, f: Callable, tile: ScoreTile, *tiles: Callable, first: int | None = None
    ) -> "Steps":
        """The Steps of f(values, b, h, query, key, *tiles), where each of the tiles is called for a
        float32 tile, and values are of the mod's reads, or of the first reads alone."""
        shape, values = tile.shape, self._reads()[:first]
        logit, index, scalar = (
            jax.ShapeDtypeStruct(*x)
            for x in ((shape, jnp.float32), (shape, jnp.int32), ((), jnp.int32))
        )
        types = [
            jax.ShapeDtypeStruct(shape if at.depends_on & PAIR else (), dtype)
            for at, dtype in values
        ]
        with traced.any_mesh():
            program = jax.make_jaxpr(f)(
                types, scalar, scalar, index, index, *[logit for _ in tiles]
            )
        return Steps(
            program,
            *(functools.partial(self._value, n, tile) for n in range(len(values))),
            lambda: self.batch,
            lambda: self.head,
            lambda: tile.query_index(self.offset),
            tile.key_index,
            *tiles,
        )

    def _reads(self):
        """The reads of the mod, and the dtypes of their values."""
        return [(at, self.bound.mod.arrays[at.array].aval.dtype) for at in self.bound.mod.reads]

    def _value(self, n: int, tile: ScoreTile):
        """The values of read number n for a tile."""
        x, (at, dtype) = self.values[n], self._reads()[n]
        if at.depends_on >= PAIR:
            x = jnp.concatenate(
                [
                    gather(x, index=self.place(n, part), layout=tile.layouts.tile)
                    for part in tile.split(AT_ONCE)
                ],
                axis=1,
            )
        elif KEY in at.depends_on:
            x = tile.load_per_key(x)
        elif QUERY in at.depends_on:
            x = tile.load_per_query(x)
        return x != 0 if dtype.kind == "b" else x.astype(dtype)

    def place(self, n: int, tile: ScoreTile, axes: list[int] | None = None):
        """The places of the values of read number n in its array, which lies in memory as a vector;
        of these axes alone."""
        mod = self.bound.mod
        shape = mod.arrays[mod.reads[n].array].aval.shape
        axes = range(len(shape)) if axes is None else axes

        def place(values, *at):
            index = traced.vectorize(mod.index, *at, *values)
            return captured.flat_index([index[i] for i in axes], [shape[i] for i in axes])

        steps = self.steps(lambda *x: jnp.broadcast_to(place(*x), tile.shape), tile, first=n)
        return steps.output(0)


def for_head(
    bound: BoundMod | None, x: Arrays | None, batch: IntLike, head: IntLike
) -> HeadMod | None:
    """The mod of a head, from refs; None without one."""
    if x is None:
        return None
    b, h = None if x.batch is None else x.batch[batch], None if x.head is None else x.head[head]

    def value(at, ref):
        if at.depends_on >= PAIR:
            return ref
        place = broadcast_index(ref, batch, head)
        if not at.depends_on & PAIR:
            return ref[(*place, 0)]
        return lambda rows: ref.at[(*(n if isinstance(n, int) else opaque(n) for n in place), rows)]

    values = [value(at, ref) for at, ref in zip(bound.mod.reads, x.values, strict=True)]
    offset = bound.offset if x.offset is None else x.offset[batch]
    return HeadMod(bound, b, h, offset, values)


class Steps(dict):
    """A program of tiles, whose variables are keys. A value is computed once, where it is first
    asked for: one that nobody reads would be in the way of Mosaic's layout inference."""

    def __init__(self, program, *inputs: Callable):
        self.jaxpr = program.jaxpr
        self.inputs = dict(zip(self.jaxpr.invars, inputs, strict=True))

    def __missing__(self, variable):
        self[variable] = value = self.inputs[variable]()
        return value

    def output(self, n: int):
        outputs = self.jaxpr.outvars[n : n + 1]
        left = [eqn for eqn in self.jaxpr.eqns if eqn.outvars[0] not in self]
        return captured.run(captured.needed(left, outputs), outputs, self, _bind)[0]


def _bind(eqn, inputs: list) -> list:
    if (inner := eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))) is not None:
        return captured.call(inner, inputs, _bind)
    compute = _INSTEAD.get(eqn.primitive.name)
    return captured.bind(eqn, inputs) if compute is None else [compute(*inputs, **eqn.params)]


def _power(x, y: int):
    if y == 0:
        return jnp.ones_like(x)
    power = functools.reduce(lax.mul, [x] * abs(y))
    return power if y > 0 else 1.0 / power


# What Mosaic does not know, or computes with an error of 2^-11: the tanh of NVIDIA GPUs.
_INSTEAD = {
    "add_any": lax.add,
    "copy": lambda x: x,
    "integer_pow": _power,
    "not": lambda x: x ^ (True if x.dtype == bool else np.array(-1).astype(x.dtype)),
    "tanh": lambda x, **_: 2.0 * lax.logistic(2.0 * x) - 1.0,
}
