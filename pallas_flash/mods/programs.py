"""The programs of mods, and jax.custom_jvp and jax.custom_vjp functions in them.

jax represents such a function by Python functions, new ones at each trace, which equal no others
and hold all that they close over. `close` replaces them by programs: of the function, and of its
first derivatives. `reopen` makes functions of these programs, which hold nothing else.

Programs are compared by what they compute, and pickled. Printed text is no substitute for a
comparison: in it all functions lie at 0xXXXX, any object may print as another, and large arrays
are "...".
"""

import hashlib
import io
import pickle
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash.jax_support.jax_internals import Literal, Primitive, jaxpr_as_fun, primitives

ORDERS = 3  # derivatives of a closed function; a Hessian takes two

# Parameters: `value` and `derivative`, programs. jax never sees these equations.
custom_jvp_p, custom_vjp_p = Primitive("custom_jvp"), Primitive("custom_vjp")


def any_mesh():
    """The context for tracing a program that is the same on any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def jaxpr_of(x: Any):
    """The jaxpr of a parameter of an equation, closed or not; None if it is no program."""
    inner = getattr(x, "jaxpr", x)
    return inner if hasattr(inner, "eqns") else None


def programs_in(eqn) -> list:
    """The programs that an equation runs."""
    each = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [inner for inside in each for x in inside if (inner := jaxpr_of(x)) is not None]


class Effect(Exception):
    """Raised for an operation with an effect, which no mod may have."""


def refuse_effects(eqns):
    for eqn in eqns:
        if eqn.effects:
            raise Effect(eqn.primitive.name)


def close(jaxpr, orders: int = ORDERS):
    """Replaces custom_jvp and custom_vjp functions by programs, in loops too."""

    def new(eqn):
        if eqn.primitive.name not in _KINDS:
            return None
        primitive, derive, _ = _KINDS[eqn.primitive.name]
        inputs, outputs = (list(map(_shape, x)) for x in (eqn.invars, eqn.outvars))
        # the value is not differentiated
        value = _closed(jaxpr_as_fun(eqn.params["call_jaxpr"]), inputs, 0)
        bind = lambda *x: eqn.primitive.bind(*x, **eqn.primitive.get_bind_params(eqn.params))
        derivative = _closed(*derive(bind, inputs, outputs), orders - 1) if orders else None
        return eqn.replace(primitive=primitive, params=dict(value=value, derivative=derivative))

    return _replace_equations(jaxpr, new)


def reopen(jaxpr):
    """The inverse of `close`, with new functions."""

    def new(eqn):
        opened = next((f for p, _, f in _KINDS.values() if p is eqn.primitive), None)
        if opened is None:
            return None
        inputs, outputs = (list(map(_shape, x)) for x in (eqn.invars, eqn.outvars))
        value, derivative = (
            x and jaxpr_as_fun(_with(x, reopen(jaxpr_of(x))))
            for x in (eqn.params["value"], eqn.params["derivative"])
        )
        function = opened(value, derivative or _no_derivative, inputs, outputs)
        with any_mesh():
            (made,) = jax.make_jaxpr(function)(*inputs).eqns
        return made.replace(invars=eqn.invars, outvars=eqn.outvars)

    return _replace_equations(jaxpr, new)


def _no_derivative(*_):
    raise NotImplementedError(
        f"a score_mod with a jax.custom_jvp or jax.custom_vjp in it, as jax.nn.relu, has {ORDERS} "
        "derivatives, one after the other; got one more."
    )


def _closed(function: Callable, shapes: list, orders: int):
    with any_mesh():
        program = jax.make_jaxpr(function)(*shapes)
        refuse_effects(jaxpr_of(program).eqns)
        return _with(program, close(program.jaxpr, orders))


def _shape(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type)


def _with(program, jaxpr):
    """The program, closed or not, with another jaxpr."""
    return jaxpr if jaxpr_of(program) is program else program.replace(jaxpr=jaxpr)


def _replace_equations(jaxpr, new: Callable):
    """Replaces each equation by new(equation), unless that is None, in loops too."""

    def inside(x):
        if isinstance(x, tuple) and any(jaxpr_of(each) is not None for each in x):  # of a cond
            made = tuple(map(inside, x))
            return x if all(a is b for a, b in zip(made, x, strict=True)) else made
        if (inner := jaxpr_of(x)) is None or (made := _replace_equations(inner, new)) is inner:
            return x
        return _with(x, made)

    def replaced(eqn):
        if (made := new(eqn)) is not None:
            return made
        params = {name: inside(x) for name, x in eqn.params.items()}
        is_same = all(params[name] is x for name, x in eqn.params.items())
        return eqn if is_same else eqn.replace(params=params)

    eqns = list(map(replaced, jaxpr.eqns))
    is_same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


# ---- a rule as a function of the arrays that have a derivative, and the function with that rule


def _jvp_rule(bind: Callable, inputs: list, outputs: list) -> tuple[Callable, list]:
    """The function (*primals, *tangents) -> (*results, *tangents), and the shapes of its inputs."""

    def derivative(*x):
        primals, tangents = x[: len(inputs)], _fill(x[len(inputs) :], inputs, _no_tangent)
        results, out_tangents = jax.jvp(bind, primals, tuple(tangents))
        return *results, *_floats(out_tangents, outputs)

    return derivative, [*inputs, *_floats(inputs, inputs)]


def _custom_jvp(value: Callable, derivative: Callable, inputs: list, outputs: list) -> Callable:
    function = jax.custom_jvp(value)

    @function.defjvp
    def rule(primals, tangents):
        x = derivative(*primals, *_floats(tangents, inputs))
        return x[: len(outputs)], _fill(x[len(outputs) :], outputs, _no_tangent)

    return function


def _vjp_rule(bind: Callable, inputs: list, outputs: list) -> tuple[Callable, list]:
    """The function (*primals, *cotangents) -> cotangents of the primals, and the shapes of its
    inputs."""

    def derivative(*x):
        _, pull = jax.vjp(bind, *x[: len(inputs)])
        return _floats(pull(_fill(x[len(inputs) :], outputs, _no_tangent)), inputs)

    return derivative, [*inputs, *_floats(outputs, outputs)]


def _custom_vjp(value: Callable, derivative: Callable, inputs: list, outputs: list) -> Callable:
    function = jax.custom_vjp(value)

    def backward(primals, cotangents):
        x = derivative(*primals, *_floats(cotangents, outputs))
        return tuple(_fill(x, inputs, lambda _: None))

    function.defvjp(lambda *primals: (value(*primals), primals), backward)
    return function


_KINDS = {
    "custom_jvp_call": (custom_jvp_p, _jvp_rule, _custom_jvp),
    "custom_vjp_call": (custom_vjp_p, _vjp_rule, _custom_vjp),
}


def _has_derivative(x: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(x, like: list) -> list:
    """The entries of x that have a derivative."""
    return [a for a, shape in zip(x, like, strict=True) if _has_derivative(shape)]


def _fill(x, like: list, other: Callable) -> list:
    """The inverse of `_floats`, with other(shape) for each entry that has no derivative."""
    x = iter(x)
    return [next(x) if _has_derivative(shape) else other(shape) for shape in like]


def _no_tangent(shape: jax.ShapeDtypeStruct):
    return np.zeros(shape.shape, jax.dtypes.float0)


def key(jaxpr) -> Hashable:
    """A key that is equal for programs with the same equations on the same values. A parameter of
    an unknown type is compared by its ==, or if it has no hash by identity."""
    numbers = {}

    def known(x):
        if isinstance(x, Literal):
            return x.aval, _value(x.val)
        return numbers.setdefault(x, len(numbers)), x.aval

    inputs = tuple(map(known, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (
            eqn.primitive,
            tuple(map(known, eqn.invars)),
            tuple((name, _value(eqn.params[name])) for name in sorted(eqn.params)),
            tuple(map(known, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(map(known, jaxpr.outvars))


def _value(x: Any) -> Hashable:
    if (inner := jaxpr_of(x)) is not None:
        return key(inner), _value(tuple(getattr(x, "consts", ())))
    if hasattr(x, "__array__"):
        try:
            values = np.asarray(x)
        except (TypeError, RuntimeError):  # a tracer, a random key, an array of other hosts
            return _Itself(x)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        return _Itself(x) if values.dtype == object else (values.dtype, values.shape, digest)
    if isinstance(x, bool | int | float | complex):
        return type(x), repr(x)  # 1 == True == 1.0, 0.0 == -0.0, and nan is not nan
    if isinstance(x, tuple | list):
        return type(x), *map(_value, x)
    if isinstance(x, dict):
        return dict, *((name, _value(value)) for name, value in x.items())
    try:
        hash(x)
    except TypeError:
        return _Itself(x)
    return type(x), x


class _Itself:
    """Compares a value by identity."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, _Itself) and self.x is other.x

    def __hash__(self):
        return id(self.x)


def has_name(of: Hashable) -> bool:
    """Whether the repr of a key identifies it, in other processes too."""
    if isinstance(of, tuple):
        return all(map(has_name, of))
    origin = type(of).__module__.partition(".")[0]
    return origin in ("builtins", "numpy", "jax", "jaxlib") and "0x" not in repr(of)


# ---- in a pickle ----


class _Pickler(pickle.Pickler):
    """Pickles what jax 0.12 cannot pickle, or restores as something else."""

    def reducer_override(self, x):
        if isinstance(x, Primitive):
            if _PRIMITIVES.get(x.name) is not x:
                raise pickle.PicklingError(
                    f"a mask that is pickled may use jax's own operations; got `{x.name}`. Pickle "
                    "what the mask is made of, and make it again."
                )
            return _primitive, (x.name,)
        if isinstance(x, jax.core.ShapedArray):
            return _aval, (x.shape, x.dtype, x.weak_type)
        match type(x).__name__:
            case "Traceback":  # where the equation was written
                return type(None), ()
            case "TypedNdArray":  # a number
                return np.asarray, (np.asarray(x),)
            case "UnspecifiedValue":  # the one sharding of a jitted function that has none
                return _unspecified, ()
        return NotImplemented


_OWN = custom_jvp_p, custom_vjp_p
_PRIMITIVES = {
    x.name: x
    for x in (*_OWN, *vars(lax).values(), *vars(primitives).values())
    if isinstance(x, Primitive)
}


def _primitive(name: str) -> Primitive:
    return _PRIMITIVES[name]


def _aval(shape, dtype, weak_type):
    with any_mesh():
        return jax.core.ShapedArray(shape, dtype, weak_type)


def _unspecified():
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0).eqns
    return eqn.params["in_shardings"][0]


def dumps(jaxpr) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(jaxpr)
    return file.getvalue()


loads = pickle.loads
