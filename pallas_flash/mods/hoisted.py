"""Splits the program of a mod into what depends on none of its scalars, which is computed once, and
the program of one pair, which captures the results as arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.jax_support.jax_internals import Literal
from pallas_flash.mods import captured, derivatives
from pallas_flash.mods.derivatives import any_mesh


def hoist(closed, shapes) -> tuple[Any, tuple, int]:
    """The program of one pair, which takes captured arrays and then scalars of these shapes; the
    arrays; and how many of these, the first, may have a derivative. `closed` takes the scalars.

    An array that the mod makes itself, as jnp.arange(8), is captured if it is indexed down to
    scalars; one that the mod does more with, a sum or a loop, stays in the program.
    """
    jaxpr, known = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    eqns = [_name_arrays(eqn, known) for eqn in jaxpr.eqns]
    split = _split(eqns, jaxpr.outvars, known, makes_arrays=True)
    program = _program(split, jaxpr, shapes)
    if not split.is_like(without := _split(eqns, jaxpr.outvars, known, makes_arrays=False)):
        try:
            with any_mesh():
                captured.split(program, list(shapes))
        except TypeError:
            split = without
            program = _program(split, jaxpr, shapes)
    before = captured.needed(split.before, split.arrays)
    return program, tuple(captured.run(before, split.arrays, dict(known))), split.tables


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
    derivatives.refuse_effects(left)
    used = [*(x for eqn in left for x in eqn.invars), *outvars]
    left = captured.needed([eqn for eqn in before if numbers.issuperset(eqn.outvars)], used) + left
    used = set(map(id, used))
    is_table = lambda x: x not in free and jnp.issubdtype(x.aval.dtype, jnp.floating)
    arrays = [x for x in known if id(x) in used and x not in numbers]
    arrays.sort(key=lambda x: not is_table(x))
    return _Split(before, left, arrays, sum(map(is_table, arrays)))


def _is_arithmetic(eqn) -> bool:
    """Whether all results are numbers, of no loop and no function, and none a random key."""
    is_number = lambda x: not x.shape and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    is_inside = eqn.effects or derivatives.programs_in(eqn)
    return not is_inside and all(is_number(x.aval) for x in eqn.outvars)


def _program(split: _Split, jaxpr, shapes):
    """The program of one pair: of the split's arrays and the scalars."""

    def program(arrays, scalars):
        inputs = zip((*split.arrays, *jaxpr.invars), (*arrays, *scalars), strict=True)
        return captured.run(split.left, jaxpr.outvars, dict(inputs))

    arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in split.arrays]
    with any_mesh():
        return jax.make_jaxpr(program)(arrays, shapes).jaxpr
