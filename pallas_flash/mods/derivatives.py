"""A function with derivatives of its own, a jax.custom_jvp or jax.custom_vjp, as programs.

jax keeps such a function as Python functions, new ones each time that it traces: they equal no
others, and hold all that they close over. `close` puts programs in their place, of the function and
of its first derivatives; `reopen` makes functions of these again, which hold nothing else.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.jax_support.jax_internals import Primitive, jaxpr_as_fun

ORDERS = 3  # how many derivatives are kept; the second is that of a Hessian

# Parameters: `value` and `derivative`, programs. jax never sees these equations.
custom_jvp_p, custom_vjp_p = Primitive("custom_jvp"), Primitive("custom_vjp")


def any_mesh():
    """The context in which a program is traced that is the same on any mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def jaxpr_of(x: Any):
    """The program that a parameter of an equation is, with its constants or without; else None."""
    inner = getattr(x, "jaxpr", x)
    return inner if hasattr(inner, "eqns") else None


def programs_in(eqn) -> list:
    """The programs that an equation runs."""
    each = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [inner for inside in each for x in inside if (inner := jaxpr_of(x)) is not None]


class Effect(Exception):
    """An operation that a mod may not have."""


def refuse_effects(eqns):
    for eqn in eqns:
        if eqn.effects:
            raise Effect(eqn.primitive.name)


def close(jaxpr, orders: int = ORDERS):
    """The program with programs in place of functions with derivatives of their own, in loops
    too."""

    def new(eqn):
        if eqn.primitive.name not in _KINDS:
            return None
        primitive, derive, _ = _KINDS[eqn.primitive.name]
        inputs, outputs = (list(map(_shape, x)) for x in (eqn.invars, eqn.outvars))
        # nobody asks for a derivative of the value
        value = _closed(jaxpr_as_fun(eqn.params["call_jaxpr"]), inputs, 0)
        bind = lambda *x: eqn.primitive.bind(*x, **eqn.primitive.get_bind_params(eqn.params))
        derivative = _closed(*derive(bind, inputs, outputs), orders - 1) if orders else None
        return eqn.replace(primitive=primitive, params=dict(value=value, derivative=derivative))

    return _replace_equations(jaxpr, new)


def reopen(jaxpr):
    """The program that `close` was given, with new functions."""

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
    """The program with another jaxpr in it; it may be one itself."""
    return jaxpr if jaxpr_of(program) is program else program.replace(jaxpr=jaxpr)


def _replace_equations(jaxpr, new: Callable):
    """The program with new(equation), where it is not None, in place of equations, in loops too."""

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


# ---- the derivative as a function of arrays with a derivative, and the function again ----


def _of_jvp(bind: Callable, inputs: list, outputs: list) -> tuple[Callable, list]:
    """(*primals, *tangents) -> (*results, *their tangents), and the shapes of what it takes."""

    def derivative(*x):
        primals, tangents = x[: len(inputs)], _fill(x[len(inputs) :], inputs, _no_tangent)
        results, of_results = jax.jvp(bind, primals, tuple(tangents))
        return *results, *_floats(of_results, outputs)

    return derivative, [*inputs, *_floats(inputs, inputs)]


def _custom_jvp(value: Callable, derivative: Callable, inputs: list, outputs: list) -> Callable:
    function = jax.custom_jvp(value)

    @function.defjvp
    def rule(primals, tangents):
        x = derivative(*primals, *_floats(tangents, inputs))
        return x[: len(outputs)], _fill(x[len(outputs) :], outputs, _no_tangent)

    return function


def _of_vjp(bind: Callable, inputs: list, outputs: list) -> tuple[Callable, list]:
    """(*primals, *cotangents) -> the primals' cotangents, and the shapes of what it takes."""

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
    "custom_jvp_call": (custom_jvp_p, _of_jvp, _custom_jvp),
    "custom_vjp_call": (custom_vjp_p, _of_vjp, _custom_vjp),
}


def _has_derivative(x: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(x, like: list) -> list:
    """Those that have a derivative."""
    return [a for a, shape in zip(x, like, strict=True) if _has_derivative(shape)]


def _fill(x, like: list, other: Callable) -> list:
    """The `_floats` x, and what is `other` for those without a derivative."""
    x = iter(x)
    return [next(x) if _has_derivative(shape) else other(shape) for shape in like]


def _no_tangent(shape: jax.ShapeDtypeStruct):
    return np.zeros(shape.shape, jax.dtypes.float0)
