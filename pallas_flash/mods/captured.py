"""Splits a mod into the scalars that it reads from captured arrays and what it computes with them,
since a kernel does the reading."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support import varying
from pallas_flash.jax_support.jax_internals import Literal
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods.derivatives import jaxpr_of, programs_in

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
    out = eqn.primitive.bind(
        *varying.vary_alike(inputs), **eqn.primitive.get_bind_params(eqn.params)
    )
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
