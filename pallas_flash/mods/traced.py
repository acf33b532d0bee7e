"""A mod, traced once: compared by what it computes, and evaluated anywhere."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.mods import captured, programs
from pallas_flash.mods.programs import any_mesh as any_mesh

INDEX = jax.ShapeDtypeStruct((), jnp.int32)


class TracedMod:
    """The program of a mask_mod or score_mod. It takes first the arrays that the function captures,
    then its scalars: int32 b, h, q_idx, kv_idx, and the score of a score_mod."""

    def __init__(self, jaxpr, arrays: int, name: str, tables: int = 0):
        self._closed = programs.close(jaxpr)
        self.jaxpr, self.name, self.tables = programs.reopen(self._closed), name, tables
        self._key = tables, programs.key(self._closed)
        self._hash = hash(self._key)
        self.arrays, self.scalars = jaxpr.invars[:arrays], jaxpr.invars[arrays:]
        used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
        self.uses_batch, self.uses_head, *_ = (id(x) in used for x in self.scalars)

    def __eq__(self, other):
        return isinstance(other, TracedMod) and self._key == other._key

    def __hash__(self):
        return self._hash

    def __repr__(self):
        return self.name

    @property
    def text(self) -> str:
        """The program as printed, to look for types in; different programs may print alike."""
        return str(self.jaxpr)

    @property
    def fingerprint(self) -> str | None:
        """Text that identifies the program, in other processes too; None if no text does."""
        return repr(self._key) if programs.has_name(self._key) else None

    def __reduce__(self):
        return _load, (programs.dumps(self._closed), len(self.arrays), self.name, self.tables)

    def __deepcopy__(self, memo):
        return self

    def __call__(self, arrays, *scalars: IntLike) -> jax.Array:
        """The result for scalars; `vectorize` takes arrays."""
        return captured.call(self.jaxpr, (*arrays, *self.typed(*scalars)))[0]

    def typed(self, *scalars: IntLike) -> list[jax.Array]:
        return [
            jnp.asarray(x, known.aval.dtype) for x, known in zip(scalars, self.scalars, strict=True)
        ]

    def index_arrays(self, batch: tuple[int, ...], heads: int) -> dict[str, Any]:
        """The indices of the batch rows [*batch] and of the heads; None if the mod does not use
        them."""
        b = np.arange(np.prod(batch), dtype=np.int32).reshape(batch) if self.uses_batch else None
        return dict(batch=b, head=np.arange(heads, dtype=np.int32) if self.uses_head else None)

    @functools.cached_property
    def with_first_key(self) -> "TracedMod":
        """This mod with kv_idx counted from another key, its new last array."""
        return self._with_arrays(lambda first, b, h, q, k: (b, h, q, k + first), INDEX)

    def with_rows(self, *new: jax.ShapeDtypeStruct) -> "TracedMod":
        """This mod for rows whose b and q_idx are looked up in its new last arrays, [B] and [B,
        rows]; and, if there is a third, whose h is looked up in that, [K, rows]."""
        at = lambda x, *index: lax.dynamic_slice(x, index, (1,) * x.ndim).reshape(())

        def indices(batch, position, *head_and_scalars):
            *head, b, h, row, k = head_and_scalars
            b_here = at(batch, b) if self.uses_batch else 0
            h_here = at(*head, h, row) if head and self.uses_head else h
            return b_here, h_here, at(position, b, row), k

        return self._with_arrays(indices, *new)

    def _with_arrays(self, indices: Callable, *new: jax.ShapeDtypeStruct) -> "TracedMod":
        """This mod, evaluated for the b, h, q_idx and kv_idx that indices(*new, b, h, q_idx,
        kv_idx) returns."""

        def moved(arrays, new, b, h, q, k, *score):
            return self(arrays, *indices(*new, b, h, q, k), *score)

        shape = lambda x: jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        arrays, scalars = list(map(shape, self.arrays)), map(shape, self.scalars)
        with any_mesh():
            jaxpr = jax.make_jaxpr(moved)(arrays, new, *scalars).jaxpr
        return TracedMod(jaxpr, len(arrays) + len(new), self.name, self.tables)

    @functools.cached_property
    def _split(self) -> captured.Split:
        shapes = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in self.scalars]
        with any_mesh():
            return captured.split(self.jaxpr, shapes)

    @property
    def reads(self) -> tuple[captured.Read, ...]:
        """The scalars that the mod reads from its arrays, in order."""
        return self._split.reads

    def index(self, *x) -> tuple[jax.Array, ...]:
        """The index of the next read, from b, h, q_idx, kv_idx and the values of all reads
        before."""
        inputs = self._split.jaxpr.invars
        known = *inputs[:4], *inputs[len(self.scalars) :][: len(x) - 4]
        return tuple(self._run(self._split.index(len(x) - 4), known, x))

    def result(self, scalars, values) -> jax.Array:
        """The mod's result for these values of its reads."""
        jaxpr = self._split.jaxpr
        return self._run(jaxpr.outvars[-1:], jaxpr.invars, (*scalars, *values))[0]

    def _run(self, outputs, inputs, x) -> list[jax.Array]:
        known = {v: jnp.asarray(value, v.aval.dtype) for v, value in zip(inputs, x, strict=True)}
        return captured.run(captured.needed(self._split.jaxpr.eqns, outputs), outputs, known)

    @property
    def primitives(self) -> set[str]:
        """The names of the primitives of the mod, without its reads."""
        return primitives(self._split.jaxpr)


def _load(program: bytes, *args) -> TracedMod:
    return TracedMod(programs.loads(program), *args)


def primitives(jaxpr) -> set[str]:
    """The names of the primitives of a program and its loops; fmod is rem of floats, and a
    scan's name says how it runs."""
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


def describe(out) -> str:
    """The type of a function's result, in words."""
    return f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__


HINTS = {
    jax.errors.TracerArrayConversionError: " NumPy takes no traced values: use jnp, and "
    "jnp.asarray for arrays that they index.",
    jax.errors.TracerBoolConversionError: " Python's if, and, or need a known bool: use jnp.where, "
    "& and |.",
}


def trace_function(signature: str, function: Callable, *shapes) -> tuple[Any, tuple, int, Any]:
    """Traces a user's function: its program, the arrays that it captures, how many of these may
    have a derivative, the first, and the shape of its result. What depends on none of its scalars
    is computed now, and captured."""
    try:
        with any_mesh():
            return _traced(function, *shapes)
    except (TypeError, ValueError, IndexError) as error:
        raise TypeError(
            f"{signature} is called once, with scalars, and traced for all pairs of a query and a "
            f"key; it raised {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}.{HINTS.get(type(error), '')}"
        ) from error
    except programs.Effect as effect:
        raise TypeError(
            f"{signature} must have no effects, as it is evaluated as often as an implementation "
            f"needs, or not at all; got `{effect}`. Call jax.debug.print, checkify.check and the "
            "like outside, on the call's arrays or with attention_weights."
        ) from None
    except AssertionError as error:
        # without words, if an array varies in a shard_map that checks its types
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.manual_axes:
            raise
        if not mesh.explicit_axes:
            return _traced(function, *shapes)
        raise NotImplementedError(
            f"{signature} reads an array that varies in a shard_map that checks its types and "
            "leaves other axes of the mesh "
            "Explicit, which jax does not trace: give that shard_map check_vma=False, or name all "
            "axes of the mesh in it."
        ) from error


def _traced(function, *shapes):
    written, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    # jitted functions are inlined, with the arrays that they close over
    closed = jax.make_jaxpr(lambda *scalars: captured.call(written, scalars))(*shapes)
    program, arrays, tables = captured.hoist(closed, shapes)
    return programs.close(program), arrays, tables, out


def vectorize(f: Callable, *x):
    """Applies f, a function of scalars, to arrays of any ranks that broadcast."""
    rank = max(map(jnp.ndim, x))
    return jnp.vectorize(f)(
        *(
            a if jnp.ndim(a) == 0 else jnp.reshape(a, (1,) * (rank - jnp.ndim(a)) + jnp.shape(a))
            for a in x
        )
    )
