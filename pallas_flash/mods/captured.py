"""Splits a mod into what depends on none of its scalars, which is computed once; the scalars that
it reads from captured arrays, since a kernel does the reading; and what it computes with them."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support.jax_internals import Literal, vary_alike
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods import programs
from pallas_flash.mods.programs import any_mesh, jaxpr_of, programs_in

ONLY_SCALARS = "captured arrays may only be indexed down to scalars, e.g. table[h, kv_idx]"

PAIR = {2, 3}  # the mod's scalars q_idx and kv_idx, which differ within a tile


class ArrayRef(NamedTuple):
    """A slice of captured array number `array`, which a mod has indexed: it begins at the index
    `start`, and has the `axes` that are left."""

    array: int
    start: tuple[IntLike, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, starts, sizes) -> "ArrayRef":
        moved = list(self.start)
        for axis, start in zip(self.axes, starts, strict=True):
            moved[axis] = (
                start if isinstance(moved[axis], int) and moved[axis] == 0 else moved[axis] + start
            )
        return self._replace(start=tuple(moved), shape=tuple(sizes))

    def without(self, dimensions) -> "ArrayRef":
        """The slice without these dimensions, each of size 1."""
        left = [i for i in range(len(self.axes)) if i not in dimensions]
        return self._replace(
            axes=tuple(self.axes[i] for i in left), shape=tuple(self.shape[i] for i in left)
        )


class Read(NamedTuple):
    """A scalar that a mod reads: the number of the array, and for each of its axes the scalars of
    the mod that the index depends on."""

    array: int
    by_axis: tuple[frozenset[int], ...]

    @property
    def depends_on(self) -> frozenset[int]:
        return frozenset().union(*self.by_axis)

    @property
    def axes(self) -> tuple[list[int], list[int]]:
        """The axes with one index for all pairs of a batch row and head, and the other axes."""
        differ = [axis for axis, numbers in enumerate(self.by_axis) if numbers & PAIR]
        return [axis for axis in range(len(self.by_axis)) if axis not in differ], differ


class Split(NamedTuple):
    """A mod with the values that it reads as inputs: `jaxpr` takes the mod's scalars and then these
    values, and returns the index of each read, axis by axis, and the mod's result."""

    reads: tuple[Read, ...]
    jaxpr: Any

    def index(self, n: int) -> list:
        """The variables that hold the index of read number n."""
        first = sum(len(read.by_axis) for read in self.reads[:n])
        return self.jaxpr.outvars[first : first + len(self.reads[n].by_axis)]


def split(jaxpr, scalars: list[jax.ShapeDtypeStruct]) -> Split:
    """Splits the program of a mod, which takes its captured arrays and then these scalars."""
    arrays = [x.aval for x in jaxpr.invars[: len(jaxpr.invars) - len(scalars)]]
    indexed = []  # (array, number of axes) of each read

    def program(scalars, values):
        values, indices = iter(values), []
        indexed.clear()

        def read(array, index):
            indexed.append((array, len(index)))
            indices.extend(jnp.asarray(i, jnp.int32) for i in index)
            return next(values, jnp.zeros((), arrays[array].dtype))

        refs = [
            _read(ArrayRef(n, (0,) * x.ndim, tuple(range(x.ndim)), x.shape), read)
            for n, x in enumerate(arrays)
        ]
        each = functools.partial(bind, read=read)
        return indices, jnp.asarray(call(jaxpr, (*refs, *scalars), each)[0])

    jax.eval_shape(program, scalars, ())
    values = [jax.ShapeDtypeStruct((), arrays[array].dtype) for array, _ in indexed]
    made = jax.make_jaxpr(program)(scalars, values).jaxpr
    depends_on = iter(_dependences(made))
    reads, inputs = [], {n: frozenset([n]) for n in range(len(scalars))}
    for array, axes in indexed:
        axis = lambda: frozenset().union(*(inputs[n] for n in next(depends_on)))
        reads.append(Read(array, tuple(axis() for _ in range(axes))))
        inputs[len(inputs)] = reads[-1].depends_on
    return Split(tuple(reads), made)


def _dependences(jaxpr) -> list[frozenset[int]]:
    """The inputs of a program that each of its outputs depends on."""
    known = {x: frozenset([n]) for n, x in enumerate(jaxpr.invars)}
    inputs = lambda variables: frozenset().union(
        *(known.get(x, ()) for x in variables if not isinstance(x, Literal))
    )
    for eqn in jaxpr.eqns:
        known |= dict.fromkeys(eqn.outvars, inputs(eqn.invars))
    return [inputs([x]) for x in jaxpr.outvars]


def flat_index(index: tuple, shape: tuple[int, ...]):
    """The index into the flattened array of this shape."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = np.int32(0)
    for i, step in zip(index, steps, strict=True):
        place = place + i * np.int32(step)
    return place


def needed(eqns, outvars) -> list:
    """The equations that these variables depend on."""
    selected, variables = [], set(map(id, outvars))
    for eqn in reversed(eqns):
        if variables & set(map(id, eqn.outvars)):
            variables |= set(map(id, eqn.invars))
            selected.append(eqn)
    return selected[::-1]


def bind(eqn, inputs, read: Callable | None = None) -> list[Any]:
    """Evaluates one equation. A jitted function is inlined, and what an array varies over follows
    from the inputs. An ArrayRef that is indexed down to a scalar becomes `read(array, index)`."""
    name, refs = eqn.primitive.name, [x for x in inputs if isinstance(x, ArrayRef)]
    if name == "pvary":
        return inputs
    if name in ("jit", "pjit") or (name == "remat2" and refs):
        return call(eqn.params["jaxpr"], inputs, functools.partial(bind, read=read))
    if refs:
        return [_index(eqn, inputs, refs[0].shape, read)]
    if read is not None:
        for shape in _arrays_inside(eqn):
            raise _not_a_scalar(name, shape)
    out = eqn.primitive.bind(*vary_alike(inputs), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def run(eqns, outvars, known: dict, bind: Callable = bind) -> list[Any]:
    """The values of `outvars`, by these equations from the `known` variables; bind(equation,
    inputs) evaluates one."""
    value = lambda x: x.val if isinstance(x, Literal) else known[x]
    for eqn in eqns:
        known |= zip(eqn.outvars, bind(eqn, [value(x) for x in eqn.invars]), strict=True)
    return [value(x) for x in outvars]


def call(program, inputs, bind: Callable = bind) -> list[Any]:
    """The results of a program, closed or not."""
    inner, consts = jaxpr_of(program), getattr(program, "consts", ())
    variables = zip((*inner.constvars, *inner.invars), (*consts, *inputs), strict=True)
    return run(inner.eqns, inner.outvars, dict(variables), bind)


def _index(eqn, inputs, shape, read: Callable):
    name, (ref, *indices) = eqn.primitive.name, inputs
    if name not in _INDEXES or not isinstance(ref, ArrayRef):
        raise _not_a_scalar(name, shape)
    ref, inside, other = _INDEXES[name](eqn.params, ref, *indices)
    value = _read(ref, read)
    return value if inside is None else jnp.where(inside, value, other)


def _not_a_scalar(name: str, shape: tuple[int, ...]) -> TypeError:
    is_control_flow = name in ("scan", "while", "cond")
    hint = " Index it before the loop or branch." * is_control_flow
    return TypeError(f"{ONLY_SCALARS}; got `{name}` of an array of shape {shape}.{hint}")


def _arrays_inside(eqn):
    """The shapes of the arrays that jax has written into the program of a loop or branch, as with
    jax_use_simplified_jaxpr_constants. Without that flag they are inputs."""
    for inner in programs_in(eqn):
        for inside in inner.eqns:
            literals = [x for x in inside.invars if isinstance(x, Literal)]
            yield from (x.aval.shape for x in literals if x.aval.shape)
            yield from _arrays_inside(inside)


def _read(ref: ArrayRef, read: Callable):
    return ref if ref.axes else read(ref.array, ref.start)


# ---- operations that index an ArrayRef: each returns the new ArrayRef, whether it lies inside of
# the array (None: it does), and the value if not ----


def _dynamic_slice(params, ref: ArrayRef, *starts):
    sizes = params["slice_sizes"]
    clamped = [_clamped(i, n - size) for i, n, size in zip(starts, ref.shape, sizes, strict=True)]
    return ref.cut(clamped, sizes), None, None


def _slice(params, ref: ArrayRef):
    starts, stops = params["start_indices"], params["limit_indices"]
    if set(params["strides"] or ()) - {1}:
        raise TypeError(f"{ONLY_SCALARS}; got a slice with strides.")
    return (
        ref.cut(starts, [stop - start for start, stop in zip(starts, stops, strict=True)]),
        None,
        None,
    )


def _squeeze(params, ref: ArrayRef):
    return ref.without([i % len(ref.axes) for i in params["dimensions"]]), None, None


def _reshape(params, ref: ArrayRef):
    if params["new_sizes"] != () or math.prod(ref.shape) != 1:
        raise TypeError(f"{ONLY_SCALARS}; got `reshape` of an array of shape {ref.shape}.")
    return ref.without(range(len(ref.axes))), None, None


def _gather(params, ref: ArrayRef, indices):
    to, axes = params["dimension_numbers"], range(len(ref.axes))
    if (
        set(params["slice_sizes"]) != {1}
        or sorted(to.start_index_map) != list(axes)
        or to.offset_dims
        or indices.ndim != 1
    ):
        raise TypeError(f"{ONLY_SCALARS}; got `gather` of indices of shape {indices.shape}.")
    each = [indices.reshape(())] if len(axes) == 1 else [indices[i] for i in axes]
    at = dict(zip(to.start_index_map, each, strict=True))
    starts = [_clamped(at[i], ref.shape[i] - 1) for i in axes]
    inside = other = None
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        inside = functools.reduce(operator.and_, [at[i] == starts[i] for i in axes])
        other = jnp.nan if params["fill_value"] is None else params["fill_value"]
    return ref.cut(starts, params["slice_sizes"]).without(axes), inside, other


def _clamped(i, last: int):
    if last == 0:
        return 0
    i = jnp.asarray(i)
    return lax.clamp(jnp.asarray(0, i.dtype), i, jnp.asarray(last, i.dtype)).astype(jnp.int32)


_INDEXES = dict(
    dynamic_slice=_dynamic_slice, slice=_slice, squeeze=_squeeze, reshape=_reshape, gather=_gather
)


def hoist(closed, shapes) -> tuple[Any, tuple, int]:
    """The program of one pair, which takes captured arrays and then scalars of these shapes; the
    arrays; and how many of these, the first, may have a derivative. `closed` takes the scalars.

    An array that the mod makes itself, as jnp.arange(8), is captured if it is indexed down to
    scalars; one that the mod does more with, a sum or a loop, stays in the program.
    """
    jaxpr, known = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    eqns = [_name_arrays(eqn, known) for eqn in jaxpr.eqns]
    parts = _split(eqns, jaxpr.outvars, known, makes_arrays=True)
    program = _program(parts, jaxpr, shapes)
    if not parts.is_like(without := _split(eqns, jaxpr.outvars, known, makes_arrays=False)):
        try:
            with any_mesh():
                split(program, list(shapes))
        except TypeError:
            parts = without
            program = _program(parts, jaxpr, shapes)
    before = needed(parts.before, parts.arrays)
    return program, tuple(run(before, parts.arrays, dict(known))), parts.tables


class _Split(NamedTuple):
    before: list  # the equations that depend on no scalar
    left: list  # the others
    arrays: list  # the variables of the former that the latter use
    tables: int  # of the arrays, the first: floats made of what the function captures

    def is_like(self, other: "_Split") -> bool:
        return len(self.left) == len(other.left) and set(self.arrays) == set(other.arrays)


class _Constant:
    """The variable of an array that is written into a program, as with
    jax_use_simplified_jaxpr_constants."""

    def __init__(self, aval):
        self.aval = aval


def _name_arrays(eqn, known: dict):
    """The equation with variables in place of arrays; their values are added to `known`."""
    is_array = lambda x: (
        isinstance(x, Literal) and (isinstance(x.val, jax.Array) or np.ndim(x.val) > 0)
    )
    inputs = [_Constant(x.aval) if is_array(x) else x for x in eqn.invars]
    new = {a: x.val for a, x in zip(inputs, eqn.invars, strict=True) if a is not x}
    known |= new
    return eqn.replace(invars=inputs) if new else eqn


def _split(eqns, outvars, consts, makes_arrays: bool) -> _Split:
    """Splits equations by what is known: what depends on `consts` alone, and with `makes_arrays`
    what depends on nothing. Numbers made of numbers stay: a kernel computes them faster than it
    reads them."""
    known, free, numbers, before, left = dict.fromkeys(consts), set(), set(), [], []
    for eqn in eqns:
        inputs = [x for x in eqn.invars if not isinstance(x, Literal)]
        # lax.axis_index has no inputs: an index on an axis of a vmap or shard_map is known now
        is_axis_index = {type(effect).__name__ for effect in eqn.effects} == {"NamedAxisEffect"}
        is_pure = not eqn.effects and (makes_arrays or inputs)
        if not (all(x in known for x in inputs) and (is_axis_index or is_pure)):
            left.append(eqn)
            continue
        before.append(eqn)
        known |= dict.fromkeys(eqn.outvars)
        free.update(eqn.outvars if free.issuperset(inputs) else ())
        if makes_arrays and numbers.issuperset(inputs) and _is_arithmetic(eqn):
            numbers.update(eqn.outvars)
    programs.refuse_effects(left)
    used = [*(x for eqn in left for x in eqn.invars), *outvars]
    left = needed([eqn for eqn in before if numbers.issuperset(eqn.outvars)], used) + left
    used = set(map(id, used))
    is_table = lambda x: x not in free and jnp.issubdtype(x.aval.dtype, jnp.floating)
    arrays = [x for x in known if id(x) in used and x not in numbers]
    arrays.sort(key=lambda x: not is_table(x))
    return _Split(before, left, arrays, sum(map(is_table, arrays)))


def _is_arithmetic(eqn) -> bool:
    """Whether all results are numbers, of no loop and no function, and none a random key."""
    is_number = lambda x: not x.shape and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    is_inside = eqn.effects or programs.programs_in(eqn)
    return not is_inside and all(is_number(x.aval) for x in eqn.outvars)


def _program(split: _Split, jaxpr, shapes):
    """The program of one pair: of the split's arrays and the scalars."""

    def program(arrays, scalars):
        inputs = zip((*split.arrays, *jaxpr.invars), (*arrays, *scalars), strict=True)
        return run(split.left, jaxpr.outvars, dict(inputs))

    arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in split.arrays]
    with any_mesh():
        return jax.make_jaxpr(program)(arrays, shapes).jaxpr
