"""The numbers that a rule reads from arrays, one at a time, apart from what it makes of them; the
caller does the reading."""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from pallas_flash.devices import varying
from pallas_flash.pytrees import IntLike

MAY_READ = "a rule may read single numbers of the arrays that it closes over, as table[h, kv_idx]"

PAIR = {2, 3}  # of a rule's numbers: the query's and the key's, which differ within a tile


class Part(NamedTuple):
    """What a rule has taken of array `number`: from the index `start` on, along those `axes` of the
    array that are left."""

    number: int
    start: tuple[IntLike, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, starts, sizes) -> "Part":
        moved = list(self.start)
        for axis, start in zip(self.axes, starts, strict=True):
            moved[axis] = (
                start if isinstance(moved[axis], int) and moved[axis] == 0 else moved[axis] + start
            )
        return self._replace(start=tuple(moved), shape=tuple(sizes))

    def without(self, dimensions) -> "Part":
        """Without some of its axes, of size 1."""
        left = [i for i in range(len(self.axes)) if i not in dimensions]
        return self._replace(
            axes=tuple(self.axes[i] for i in left), shape=tuple(self.shape[i] for i in left)
        )


class Read(NamedTuple):
    """One place where a rule reads: the number of the array, and for each of its axes of which of
    the rule's numbers the index is made."""

    array: int
    by_axis: tuple[frozenset[int], ...]

    @property
    def depends_on(self) -> frozenset[int]:
        return frozenset().union(*self.by_axis)


def steps(jaxpr, numbers):
    """Runs a rule, the program of arrays and then `numbers`: yields (array, index) for each number
    that it reads of an array, is sent what is there, and returns what the rule does."""
    values = []
    for n, array in enumerate(x.aval for x in jaxpr.invars[: len(jaxpr.invars) - len(numbers)]):
        part = Part(n, (0,) * array.ndim, tuple(range(array.ndim)), array.shape)
        values.append((yield from _read(part)))
    (result,) = yield from _run(jaxpr, [*values, *numbers])
    return result


def index(jaxpr, numbers, values) -> tuple[int, tuple]:
    """The array and the index that a rule reads after it has read `values`."""
    running = steps(jaxpr, numbers)
    asked = next(running)
    for value in values:
        asked = running.send(value)
    return asked


def result(jaxpr, numbers, values):
    """What a rule returns that reads `values`."""
    running = steps(jaxpr, numbers)
    try:
        next(running)
        for value in values:
            running.send(value)
    except StopIteration as done:
        return done.value
    raise AssertionError("a rule reads as often as it did when it was traced")


def of(jaxpr, count: int) -> tuple[Read, ...]:
    """All reads of a rule of so many numbers."""
    found, dtype = [], lambda array: jaxpr.invars[array].aval.dtype

    def indices(numbers, values):
        running, sent, made = steps(jaxpr, numbers), iter(values), []
        try:
            asked = next(running)
            while True:
                found.append((asked[0], len(asked[1])))
                made.extend(map(jnp.asarray, asked[1]))
                asked = running.send(next(sent, jnp.zeros((), dtype(asked[0]))))
        except StopIteration:
            return made

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in jaxpr.invars[-count:]]
    jax.eval_shape(indices, shapes, ())
    values = [jax.ShapeDtypeStruct((), dtype(array)) for array, _ in found]
    found.clear()
    made_of = iter(_made_of(jax.make_jaxpr(indices)(shapes, values).jaxpr))
    reads, known = [], {n: frozenset([n]) for n in range(len(shapes))}
    for array, axes in found:
        read = Read(
            array, tuple(frozenset().union(*(known[n] for n in next(made_of))) for _ in range(axes))
        )
        known[len(known)] = read.depends_on
        reads.append(read)
    return tuple(reads)


def _made_of(jaxpr) -> list[frozenset[int]]:
    """For each of its outputs, which of a program's inputs it is made of."""
    known = {x: frozenset([n]) for n, x in enumerate(jaxpr.invars)}
    inputs = lambda variables: frozenset().union(
        *(known.get(x, ()) for x in variables if not isinstance(x, Literal))
    )
    for eqn in jaxpr.eqns:
        known |= dict.fromkeys(eqn.outvars, inputs(eqn.invars))
    return [inputs([x]) for x in jaxpr.outvars]


def flat_index(index: tuple, shape: tuple[int, ...]):
    """The place of an index in an array of this shape."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = np.int32(0)
    for i, step in zip(index, steps, strict=True):
        place = place + i * np.int32(step)
    return place


def needed(jaxpr) -> list:
    """The equations that a program's outputs are made of."""
    found, of = [], set(map(id, jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if of & set(map(id, eqn.outvars)):
            of |= set(map(id, eqn.invars))
            found.append(eqn)
    return found[::-1]


def run(eqns, outvars, known: dict) -> list[Any]:
    """The values of `outvars` by these equations from what is known."""
    of = lambda x: x.val if isinstance(x, Literal) else known[x]
    for eqn in eqns:
        known |= zip(eqn.outvars, bind(eqn, [of(x) for x in eqn.invars]), strict=True)
    return [of(x) for x in outvars]


def _run(jaxpr, values):
    known = dict(zip(jaxpr.invars, values, strict=True))
    of = lambda x: x.val if isinstance(x, Literal) else known[x]
    for eqn in jaxpr.eqns:
        outputs = yield from _evaluated(eqn, [of(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _evaluated(eqn, inputs):
    if not any(isinstance(x, Part) for x in inputs):
        return bind(eqn, inputs)
    if eqn.primitive.name in _STRAIGHT:
        return (yield from _run(getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]), inputs))
    name, (part, *rest) = eqn.primitive.name, inputs
    if name not in _TAKES or not isinstance(part, Part):
        shape = ", ".join(map(str, next(x for x in inputs if isinstance(x, Part)).shape))
        hint = " Read what a loop or a branch needs before it." * (
            name in ("scan", "while", "cond")
        )
        raise TypeError(f"{MAY_READ}; got {name} of one [{shape}].{hint}")
    part, inside, other = _TAKES[name](eqn.params, part, *rest)
    value = yield from _read(part)
    return [value if inside is None else jnp.where(inside, value, other)]


def bind(eqn, inputs) -> list[Any]:
    """The outputs of one equation; a jitted function is taken apart, and what an array varies over
    follows from the inputs."""
    if eqn.primitive.name == "pvary":
        return inputs
    if eqn.primitive.name in ("jit", "pjit"):
        inner = eqn.params["jaxpr"]
        variables = *inner.jaxpr.constvars, *inner.jaxpr.invars
        return run(
            inner.eqns,
            inner.jaxpr.outvars,
            dict(zip(variables, (*inner.consts, *inputs), strict=True)),
        )
    out = eqn.primitive.bind(
        *varying.vary_alike(inputs), **eqn.primitive.get_bind_params(eqn.params)
    )
    return out if eqn.primitive.multiple_results else [out]


def _read(part: Part):
    if part.axes:
        return part
    return (yield part.number, part.start)


# ---- what takes a part of a part; with it whether it lies inside, and what is there if not ----


def _dynamic_slice(params, part: Part, *starts):
    sizes = params["slice_sizes"]
    clamped = [_clamped(i, n - size) for i, n, size in zip(starts, part.shape, sizes, strict=True)]
    return part.cut(clamped, sizes), None, None


def _slice(params, part: Part):
    starts, stops = params["start_indices"], params["limit_indices"]
    if set(params["strides"] or ()) - {1}:
        raise TypeError(f"{MAY_READ}; got a slice of several.")
    return (
        part.cut(starts, [stop - start for start, stop in zip(starts, stops, strict=True)]),
        None,
        None,
    )


def _squeeze(params, part: Part):
    return part.without([i % len(part.axes) for i in params["dimensions"]]), None, None


def _reshape(params, part: Part):
    if params["new_sizes"] != () or math.prod(part.shape) != 1:
        raise TypeError(f"{MAY_READ}; got reshape of one {list(part.shape)}.")
    return part.without(range(len(part.axes))), None, None


def _gather(params, part: Part, indices):
    to, axes = params["dimension_numbers"], range(len(part.axes))
    if (
        set(params["slice_sizes"]) != {1}
        or sorted(to.start_index_map) != list(axes)
        or to.offset_dims
        or indices.ndim != 1
    ):
        raise TypeError(f"{MAY_READ}; got gather of {indices.shape}.")
    each = [indices.reshape(())] if len(axes) == 1 else [indices[i] for i in axes]
    at = dict(zip(to.start_index_map, each, strict=True))
    starts = [_clamped(at[i], part.shape[i] - 1) for i in axes]
    inside = other = None
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        inside = functools.reduce(operator.and_, [at[i] == starts[i] for i in axes])
        other = jnp.nan if params["fill_value"] is None else params["fill_value"]
    return part.cut(starts, params["slice_sizes"]).without(axes), inside, other


def _clamped(i, last: int):
    if last == 0:
        return 0
    i = jnp.asarray(i)
    return lax.clamp(jnp.asarray(0, i.dtype), i, jnp.asarray(last, i.dtype)).astype(jnp.int32)


_STRAIGHT = ("jit", "pjit", "remat2")  # what runs the program that it holds, once
_TAKES = dict(
    dynamic_slice=_dynamic_slice, slice=_slice, squeeze=_squeeze, reshape=_reshape, gather=_gather
)
