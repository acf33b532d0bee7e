"""A user's rule in registers: what a mask_mod or a score_mod is given, and its steps on tiles."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal

from pallas_flash import schedule
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import seen, sync, tile
from pallas_flash.mods import bound, captured, traced
from pallas_flash.mods.captured import PAIR
from pallas_flash.pytrees import IntLike


class Numbers(NamedTuple):
    """What a rule is given of batch rows and heads, and what it reads of arrays."""

    batch: Any  # int32 [B], their numbers; None where it does not ask for them
    head: Any  # int32 [N]
    offset: Any  # int32 [B]; None where it is known
    values: (
        # each [B or 1, N or 1, n], n = 1, or whole tiles of queries or of keys where the index is
        # made of theirs; where
        tuple
    )
    # it is made of both, all of the array, [n]


def numbers(p: Problem, asked: bound.BoundMod | None, block_q: int, block_k: int) -> Numbers | None:
    """Those of a rule, None without one."""
    if asked is None:
        return None
    b, h = asked.indices(p.batch, p.heads)
    offset = None if isinstance(asked.offset, int) else asked.offset
    # beyond the last query or key is what it reads for the last
    count = lambda n, size: jnp.minimum(
        jnp.arange(schedule.ceil_div(n, size) * size, dtype=jnp.int32)[None, None], n - 1
    )
    position = count(p.queries, block_q) + (
        asked.offset if offset is None else offset[:, None, None]
    )
    read = lambda array, index: asked.arrays[array][index]
    of = lambda *at: [
        _stored(value) for _, value in asked.read_captured(read, b[:, None, None], h[:, None], *at)
    ]
    both = zip(asked.mod.reads, of(position, 0), of(0, count(p.keys, block_k)), strict=True)
    whole = lambda at: _stored(asked.arrays[at.array].reshape(-1)).reshape(-1)
    values = tuple(
        whole(at) if at.depends_on >= PAIR else of_key if KEY in at.depends_on else of_query
        for at, of_query, of_key in both
    )
    return Numbers(
        b if asked.mod.uses_batch else None, h if asked.mod.uses_head else None, offset, values
    )


QUERY, KEY = 2, 3  # of a rule's numbers
# columns of a tile whose numbers are read one by one: registers do not hold the indices of many
# more
AT_ONCE = 32


def _stored(value) -> jax.Array:
    """[B or 1, N or 1, n], bools and integers of 16 bits as int32."""
    is_small = value.dtype.kind in "biu" and value.dtype.itemsize < 4
    value = value.astype(jnp.int32) if is_small else value
    return value.reshape((1,) * (3 - value.ndim) + value.shape)


class Block(NamedTuple):
    """The pairs of some queries and keys, in a tile of this shape."""

    first_query: IntLike
    first_key: IntLike
    shape: tuple[int, int]
    transposed: bool

    def parts(self, size: int) -> list["Block"]:
        """The same in blocks of so many columns at most."""
        rows, columns = self.shape
        at = lambda n: (
            (self.first_query + n, self.first_key)
            if self.transposed
            else (self.first_query, self.first_key + n)
        )
        return [
            Block(*at(n), (rows, min(size, columns - n)), self.transposed)
            for n in range(0, columns, size)
        ]


class OfHead(NamedTuple):
    """A rule of one batch row and head."""

    asked: bound.BoundMod
    batch: IntLike
    head: IntLike
    offset: IntLike
    # numbers; where they are those of queries or keys, a function from a slice of these to its ref;
    # of both, a ref
    values: list

    def allowed(self, first_query: IntLike, first_key: IntLike, shape, transposed: bool = False):
        """Whether the rule of a mask lets each query see each key of a block, in the shape of the
        scores."""
        return self.steps(
            self.asked.evaluate, Block(first_query, first_key, shape, transposed)
        ).output(0)

    def steps(
        self, f: Callable, block: Block, *more: Callable, first: int | None = None
    ) -> "Steps":
        """Those of f(values, b, h, query, key, *more), where more() are float32 tiles, and values
        what the rule reads, or the first of that alone."""
        shape, values = block.shape, self._reads()[:first]
        logit, index, number = (
            jax.ShapeDtypeStruct(*x)
            for x in ((shape, jnp.float32), (shape, jnp.int32), ((), jnp.int32))
        )
        found = [
            jax.ShapeDtypeStruct(shape if at.depends_on & PAIR else (), dtype)
            for at, dtype in values
        ]
        with traced.any_mesh():
            program = jax.make_jaxpr(f)(found, number, number, index, index, *[logit for _ in more])
        return Steps(
            program,
            *(functools.partial(self._found, n, block) for n in range(len(values))),
            lambda: self.batch,
            lambda: self.head,
            lambda: seen.of_queries(block.first_query + self.offset, shape, block.transposed),
            lambda: seen.of_keys(block.first_key, shape, block.transposed),
            *more,
        )

    def _reads(self):
        """The reads of the rule, and the types of what they find."""
        return [(at, self.asked.mod.arrays[at.array].aval.dtype) for at in self.asked.mod.reads]

    def _found(self, n: int, block: Block):
        """What its read number n finds for a block."""
        x, (at, dtype) = self.values[n], self._reads()[n]
        if at.depends_on >= PAIR:
            x = jnp.concatenate(
                [_gathered(x, self._place(n, part)) for part in block.parts(AT_ONCE)], axis=1
            )
        elif KEY in at.depends_on:
            x = seen.for_keys(x, block.first_key, block.shape, block.transposed)
        elif QUERY in at.depends_on:
            x = seen.for_queries(x, block.first_query, block.shape, block.transposed)
        return x != 0 if dtype.kind == "b" else x.astype(dtype)

    def _place(self, n: int, block: Block):
        """Where in its array that is, which lies in memory as a vector."""
        asked, shape = (
            self.asked.mod,
            self.asked.mod.arrays[self.asked.mod.reads[n].array].aval.shape,
        )
        place = lambda values, *at: captured.flat_index(
            traced.vectorize(asked.index, *at, *values), shape
        )
        return self.steps(
            lambda *x: jnp.broadcast_to(place(*x), block.shape), block, first=n
        ).output(0)


def _gathered(ref, index):
    """Of a vector in global memory the elements with these numbers, a tile: a load for each, of
    which L1 serves most."""
    of_tile = plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=tile.TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile.TILE), return_type=of_tile)
    def gather(_, ref, index):  # a name that the interpreter in tests/ knows
        arith, ir, memref, vector = (
            getattr(mgpu.utils, name) for name in ("arith", "ir", "memref", "vector")
        )

        def loaded(numbers):
            each = [
                vector.extract(numbers, [], [n])
                for n in range(ir.VectorType(numbers.type).shape[0])
            ]
            values = [memref.load(ref, [arith.index_cast(ir.IndexType.get(), n)]) for n in each]
            return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)

        registers = np.vectorize(loaded, otypes=[object])(index.registers)
        return mgpu.FragmentedArray(
            _registers=registers,
            _layout=index.layout,
            _is_signed=mgpu.utils.is_signed(of_tile.dtype),
        )

    return gather(ref, index)


def of(
    asked: bound.BoundMod | None, x: Numbers | None, batch: IntLike, head: IntLike
) -> OfHead | None:
    """From refs; None without a rule."""
    if x is None:
        return None
    b, h = None if x.batch is None else x.batch[batch], None if x.head is None else x.head[head]
    entry = lambda ref: seen.entry(ref, batch, head)
    part = lambda ref: (
        lambda rows: ref.at[
            (*(n if isinstance(n, int) else sync.opaque(n) for n in entry(ref)), rows)
        ]
    )
    values = [
        ref
        if at.depends_on >= PAIR
        else part(ref)
        if at.depends_on & PAIR
        else ref[(*entry(ref), 0)]
        for at, ref in zip(asked.mod.reads, x.values, strict=True)
    ]
    return OfHead(asked, b, h, asked.offset if x.offset is None else x.offset[batch], values)


class Steps:
    """A program of tiles. What it computes it computes once, and where it is asked for: what nobody
    reads would be in the way of Mosaic's layout inference."""

    def __init__(self, program, *inputs: Callable):
        self.jaxpr, self.known = program.jaxpr, {}
        self.makes = dict(zip(self.jaxpr.invars, inputs, strict=True))
        self.equations = {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}

    def output(self, number: int):
        return self(self.jaxpr.outvars[number])

    def __call__(self, x):
        if isinstance(x, Literal):
            return x.val
        if x not in self.known:
            if x not in self.makes:
                eqn = self.equations[x]
                self.makes |= zip(
                    eqn.outvars,
                    _outputs(eqn, [functools.partial(self, of) for of in eqn.invars]),
                    strict=True,
                )
            self.known[x] = self.makes[x]()
        return self.known[x]


def _outputs(eqn, inputs: list[Callable]) -> list[Callable]:
    """One for each output of an equation, from those of its inputs."""
    if (inner := eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))) is not None:
        steps = Steps(inner, *inputs)
        return [functools.partial(steps.output, n) for n in range(len(eqn.outvars))]
    compute = _INSTEAD.get(eqn.primitive.name)
    if compute is None:
        return [lambda: captured.bind(eqn, [x() for x in inputs])[0]]
    return [lambda: compute(*(x() for x in inputs), **eqn.params)]


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
