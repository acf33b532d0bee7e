"""A function of batch, head, query and key: traced once, compared by what it computes, evaluated
anywhere."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from pallas_flash.rules import reads
from pallas_flash.rules.resolved_mask import Ints, register

INDEX = jax.ShapeDtypeStruct((), jnp.int32)


class Rule:
    """The program of a function of int32 numbers (b, h, q_idx, kv_idx), and perhaps of a score,
    without the arrays that it closes over: `mask_mod` or `score_mod`. The program takes first them,
    then the numbers."""

    def __init__(self, jaxpr, arrays: int, name: str, source: Any = None):
        self.jaxpr, self.name, self.text = jaxpr, name, str(jaxpr)
        # no text tells one derivative of a user's own from another
        self.source = source if "custom_" in self.text else None
        self.arrays, self.numbers = jaxpr.invars[:arrays], jaxpr.invars[arrays:]
        used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
        self.reads_batch, self.reads_head, *_ = (id(x) in used for x in self.numbers)

    def __eq__(self, other):
        return isinstance(other, Rule) and self.text == other.text and self.source is other.source

    def __hash__(self):
        return hash(self.text)

    def __repr__(self):
        return self.name

    def __call__(self, arrays, *numbers: Ints) -> jax.Array:
        """Of one number each; `vmap` and `jnp.vectorize` make it that of many."""
        inputs = zip(self.jaxpr.invars, (*arrays, *self.typed(*numbers)), strict=True)
        return reads.run(self.jaxpr.eqns, self.jaxpr.outvars, dict(inputs))[0]

    def typed(self, *numbers: Ints) -> list[jax.Array]:
        return [
            jnp.asarray(x, known.aval.dtype) for x, known in zip(numbers, self.numbers, strict=True)
        ]

    def numbered(self, batch: tuple[int, ...], heads: int) -> dict[str, Any]:
        """The numbers of the batch rows [*batch] and of the heads, None for those that it does not
        ask for."""
        b = np.arange(np.prod(batch), dtype=np.int32).reshape(batch) if self.reads_batch else None
        return dict(batch=b, head=np.arange(heads, dtype=np.int32) if self.reads_head else None)

    @functools.cached_property
    def from_key(self) -> "Rule":
        """The same of keys that count from 0 at another, whose number is one more array, the
        last."""
        moved = lambda arrays, first, b, h, q, k, *score: self(arrays, b, h, q, k + first, *score)
        arrays, numbers = (
            [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in of]
            for of in (self.arrays, self.numbers)
        )
        with any_mesh():
            return Rule(
                jax.make_jaxpr(moved)(arrays, INDEX, *numbers).jaxpr,
                len(arrays) + 1,
                self.name,
                self.source,
            )

    @functools.cached_property
    def reads(self) -> tuple[reads.Read, ...]:
        """The numbers that it reads of its arrays, one after the other."""
        return reads.of(self.jaxpr, len(self.numbers))

    def index(self, *x) -> tuple[jax.Array, ...]:
        """What it reads next, of b, h, q_idx, kv_idx and all that it has read before."""
        program = self._indices[len(x) - 4]
        inputs = [
            jnp.asarray(value, known.aval.dtype)
            for value, known in zip(x, program.invars, strict=True)
        ]
        return tuple(
            reads.run(
                reads.needed(program),
                program.outvars,
                dict(zip(program.invars, inputs, strict=True)),
            )
        )

    @functools.cached_property
    def _indices(self) -> list:
        """The program of the index of each read, which needs nothing of a score that comes before
        it in the rule."""

        def index(*x):
            more = [jnp.zeros((), known.aval.dtype) for known in self.numbers[4:]]
            _, found = reads.index(self.jaxpr, [*x[:4], *more], x[4:])
            return [jnp.asarray(i, jnp.int32) for i in found]

        shape = lambda x: jax.ShapeDtypeStruct((), x.aval.dtype)
        numbers, values = (
            list(map(shape, self.numbers[:4])),
            [shape(self.arrays[at.array]) for at in self.reads],
        )
        with any_mesh():
            return [jax.make_jaxpr(index)(*numbers, *values[:n]).jaxpr for n in range(len(values))]

    def result(self, numbers, values) -> jax.Array:
        """What it returns where it reads these values."""
        return jnp.asarray(reads.result(self.jaxpr, self.typed(*numbers), values))

    @property
    def operations(self) -> set[str]:
        """The names of the primitives it is made of, but for its reads."""

        def run(numbers, values):
            return self.result(numbers, values), [
                self.index(*numbers[:4], *values[:n]) for n in range(len(values))
            ]

        shape = lambda x: jax.ShapeDtypeStruct((), x.aval.dtype)
        of = list(map(shape, self.numbers)), [shape(self.arrays[at.array]) for at in self.reads]
        with any_mesh():
            return operations(jax.make_jaxpr(run)(*of).jaxpr)


def operations(jaxpr) -> set[str]:
    """The names of the primitives that a program is made of, loops too; fmod is rem of floats, and
    a scan says how it runs."""
    return set(_operations(jaxpr))


def _operations(jaxpr):
    for eqn in jaxpr.eqns:
        inner = [x for x in eqn.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        name = eqn.primitive.name
        if not inner or name in ("scan", "while"):
            if name == "rem" and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating):
                name = "fmod"
            if name == "scan":
                name += " in reverse" * eqn.params["reverse"] + " unrolled" * (
                    eqn.params["unroll"] != 1
                )
            yield name
        for x in inner:
            yield from _operations(getattr(x, "jaxpr", x))


def trace(mask_mod: Callable, name: str | None = None) -> tuple[Rule, tuple]:
    """The rule of a mask_mod, and the arrays that it closes over."""
    if not callable(mask_mod):
        raise TypeError(
            "Where takes a function mask_mod(b, h, q_idx, kv_idx) -> bool; got "
            f"{type(mask_mod).__name__}."
        )
    jaxpr, arrays, out = traced(
        "mask_mod(b, h, q_idx, kv_idx)", mask_mod, INDEX, INDEX, INDEX, INDEX
    )
    if getattr(out, "shape", None) != () or out.dtype != bool:
        raise TypeError(
            f"mask_mod(b, h, q_idx, kv_idx) must return one bool for four numbers; got {kind(out)}."
        )
    return Rule(
        jaxpr, len(arrays), name or getattr(mask_mod, "__name__", type(mask_mod).__name__)
    ), arrays


def kind(out) -> str:
    """What a function returned, by its shape."""
    return f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__


HINTS = {
    jax.errors.TracerArrayConversionError: " NumPy takes no traced numbers: use jnp, and "
    "jnp.asarray for arrays that they index.",
    jax.errors.TracerBoolConversionError: " Python's if, and, or need a known bool: use jnp.where, "
    "& and |.",
}


def traced(signature: str, function: Callable, *shapes) -> tuple[Any, tuple, Any]:
    """The program of a user's function, the arrays that this takes from outside, floats first, and
    the shape of what it returns. What it computes of these arrays alone is computed here and
    now."""
    try:
        with any_mesh():
            return _traced(function, *shapes)
    except (TypeError, ValueError, IndexError) as error:
        raise TypeError(
            f"{signature} is called once, with single numbers of shape (), and traced for all "
            "pairs of a query and a key; "
            f"it raised {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}.{HINTS.get(type(error), '')}"
        ) from error
        # jax's, without words: an array varies in a shard_map that checks its types
    except AssertionError as error:
        here = jax.sharding.get_abstract_mesh()
        if not here.manual_axes:
            raise
        if not here.explicit_axes:
            return _traced(function, *shapes)
        raise NotImplementedError(
            f"{signature} reads an array that varies in a shard_map that checks its types and "
            "leaves other axes of the mesh "
            "Explicit, which jax does not trace: give that shard_map check_vma=False, or name all "
            "axes of the mesh in it."
        ) from error


def any_mesh():
    """The context in which a program is traced that is the same on any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _traced(function, *shapes):
    written, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    variables, consts = (*written.jaxpr.constvars, *written.jaxpr.invars), written.consts
    whole = lambda *numbers: reads.run(
        written.eqns, written.jaxpr.outvars, dict(zip(variables, (*consts, *numbers), strict=True))
    )
    closed = jax.make_jaxpr(whole)(*shapes)  # with the arrays that jitted functions close over
    jaxpr, known, left = (
        closed.jaxpr,
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        [],
    )
    for eqn in jaxpr.eqns:
        of = [x for x in eqn.invars if not isinstance(x, Literal)]
        if of and all(x in known for x in of) and not eqn.effects:
            inputs = [x.val if isinstance(x, Literal) else known[x] for x in eqn.invars]
            known |= zip(eqn.outvars, reads.bind(eqn, inputs), strict=True)
        else:
            left.append(eqn)
    used = {id(x) for eqn in left for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
    arrays = sorted(
        (x for x in known if id(x) in used),
        key=lambda x: not jnp.issubdtype(x.aval.dtype, jnp.floating),
    )
    inputs = *arrays, *jaxpr.invars
    run = lambda values, numbers: reads.run(
        left, jaxpr.outvars, dict(zip(inputs, (*values, *numbers), strict=True))
    )
    with any_mesh():
        rest = jax.make_jaxpr(run)(
            [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in arrays], shapes
        )
    return rest.jaxpr, tuple(known[x] for x in arrays), out


def each(f: Callable, *x):
    """f of single numbers, for arrays that broadcast, of any ranks."""
    rank = max(map(jnp.ndim, x))
    return jnp.vectorize(f)(
        *(
            a if jnp.ndim(a) == 0 else jnp.reshape(a, (1,) * (rank - jnp.ndim(a)) + jnp.shape(a))
            for a in x
        )
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """A rule with all that it is asked about.

    `offset` is what makes a row a position, an int or [B]. `batch` [B] and `head` [N] number the
    batch rows and the heads, None from 0 on.
    """

    rule: Rule
    arrays: tuple
    offset: Ints = 0
    batch: Any = None
    head: Any = None

    def numbers(self, batch: Ints, heads: Ints) -> tuple[Ints, Ints]:
        """The numbers of `batch` batch rows [B] and `heads` heads [N]; 0 where the rule does not
        ask."""
        of = lambda known, n: jnp.arange(n, dtype=jnp.int32) if known is None else known
        b = of(self.batch, batch) if self.rule.reads_batch else jnp.zeros(1, jnp.int32)
        return b, of(self.head, heads) if self.rule.reads_head else jnp.zeros(1, jnp.int32)

    def pairs(self, batch: Ints, heads: Ints, row, key) -> tuple[jax.Array, ...]:
        """Batch row, head, position and key of the pairs of some rows and keys, to broadcast
        against [B, N, rows, keys]."""
        b, h = self.numbers(batch, heads)
        position = row[None] + (
            self.offset if isinstance(self.offset, int) else self.offset[:, None]
        )
        return b[:, None, None, None], h[:, None, None], position[:, None, :, None], key

    def of_chunks(self, size: int, first):
        """The same where each of `size` batch rows is cut into chunks, whose first rows these are
        [C]: [B * C]."""
        offset = (jnp.broadcast_to(self.offset, size)[:, None] + first.reshape(1, -1)).reshape(-1)
        batch = jnp.repeat(self.numbers(size, 1)[0], first.size) if self.rule.reads_batch else None
        return dataclasses.replace(self, offset=offset, batch=batch)

    def of_rows(self, pick: Callable):
        """The same of some of its batch rows, those that `pick` takes of an array [B]."""
        return dataclasses.replace(self, offset=pick(self.offset), batch=pick(self.batch))

    def of_keys(self, first):
        """The same where keys count from 0 at the one numbered `first`, an array of the rule's from
        now on."""
        return dataclasses.replace(
            self, rule=self.rule.from_key, arrays=(*self.arrays, jnp.asarray(first, jnp.int32))
        )

    @property
    def operations(self) -> set[str]:
        """The names of the primitives that a kernel needs."""
        return self.rule.operations

    @property
    def why_no_vectors(self) -> str | None:
        """Why its arrays cannot lie in memory as vectors, or None."""
        shapes = [self.rule.arrays[at.array].aval.shape for at in self.rule.reads]
        large = next((shape for shape in shapes if math.prod(shape) >= 2**31), None)
        return (
            large
            and f"{self.rule} reads an array of 2^31 numbers or more, which no int32 counts; got "
            f"{large}"
        )

    def reads(self, read: Callable, *numbers: Ints) -> list[tuple[tuple, jax.Array]]:
        """For each read the index, and what `read(array, index)` finds there, no larger than the
        `numbers` b, h, position and key that it is made of."""
        found = []
        for at in self.rule.reads:
            asked = [x if n in at.numbers else 0 for n, x in enumerate(numbers)]
            values = [value for _, value in found]
            index = each(self.rule.index, *asked, *values) if at.made_of else ()
            found.append(
                (index, read(at.array, index).astype(self.rule.arrays[at.array].aval.dtype))
            )
        return found

    def made(self, values, *numbers) -> jax.Array:
        """What the rule makes of `numbers`, which broadcast, where it reads these `values`."""
        return each(
            lambda *x: self.rule.result(x[: len(numbers)], x[len(numbers) :]), *numbers, *values
        )


@dataclasses.dataclass(frozen=True)
class Predicate(Asked):
    """The rule of a mask: which of a block's queries and keys it lets see each other.

    `kinds` int8 [B | 1, N | 1, tiles, tiles] says of the blocks of `block` queries and keys whether
    they are empty, partial or full (kinds.py), None: not known yet.
    """

    kinds: Any = None
    block: int | None = None

    def of_chunks(self, size: int, first) -> "Predicate":
        return dataclasses.replace(super().of_chunks(size, first), kinds=None, block=None)

    def sees(self, b: Ints, h: Ints, position: Ints, key: Ints) -> jax.Array:
        """bool, of the shape that the arguments broadcast to."""
        return each(lambda *x: self.rule(self.arrays, *x), b, h, position, key)


register(Predicate, "rule")
