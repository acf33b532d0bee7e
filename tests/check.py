"""Runs flash_attention with all gradients and compares with the oracle."""

import contextlib
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import arguments, normal

from pallas_flash import flash_attention
from pallas_flash.transforms import equation

# Largest error, relative to the largest entry of the expected array. Half-precision kernels round p
# and ds to the input's dtype.
TOLERANCE = {"float32": 5e-6, "float16": 5e-3, "bfloat16": 3e-2}


def run(q, k, v, do, dlse, implementation, **kw):
    """o, lse and (dq, dk, dv, dbias or None, and of sinks if there are any) of one jitted call; the
    largest logits, if asked."""
    kw = arguments(kw)
    static = {
        name: kw.pop(name)
        for name in list(kw)
        if not (hasattr(kw[name], "shape") or name == "mask")
    }
    floats = q, k, v, kw.pop("bias", None), *([kw.pop("sinks")] if "sinks" in kw else [])

    @jax.jit
    def call(floats, do, dlse, kw):
        def attend(q, k, v, bias, sinks=None):
            options = dict(implementation=implementation, return_residual=True, **static, **kw)
            o, lse, *largest = flash_attention(q, k, v, bias, sinks=sinks, **options)
            return (o, lse), largest

        (o, lse), vjp, largest = jax.vjp(attend, *floats, has_aux=True)
        # the softmax of an empty row has no gradient, so its lse takes none
        return o, lse, vjp((do.astype(o.dtype), dlse.astype(lse.dtype))), *largest

    return call(floats, do, dlse, kw)


def cotangents(rng, q, v):
    do = normal(rng, *q.shape[:-1], v.shape[-1], dtype=q.dtype)
    return do, normal(rng, *q.shape[:-1])


def close(actual, expected, tolerance, name=""):
    actual, expected = (
        np.asarray(actual).astype(np.float64),
        np.asarray(expected).astype(np.float64),
    )
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    same = actual == expected  # infinities
    error = np.abs(np.where(same, 0, actual - np.where(same, 0, expected)))
    size = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
    worst = float(np.max(error, initial=0))
    assert worst <= tolerance * max(1.0, size), (
        f"{name}: error {worst:.3g} against entries up to {size:.3g}"
    )


def equal(actual, expected, tolerance=1e-5):
    """Trees of arrays."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        close(x, y, tolerance)


def vmap_is_a_loop(f, axes, *x, tolerance=5e-6):
    """jit of vmap over trees of arrays, along an axis of each or None, gives what each call gives
    alone."""
    found, alone = jax.jit(jax.vmap(f, axes))(*x), jax.jit(f)
    pick = lambda tree, axis, i: (
        tree if axis is None else jax.tree.map(lambda a: a[(slice(None),) * axis + (i,)], tree)
    )
    for i in range(len(jax.tree.leaves(found)[0])):
        each = alone(*(pick(tree, axis, i) for tree, axis in zip(x, axes, strict=True)))
        equal(pick(found, 0, i), each, tolerance)


def value_and_gradients(f, argnums=(0, 1, 2)):
    """f(*x), an array or a tree of them, and the gradients of the sum of its sines, jitted.

    The sum is not returned: it rounds by the sizes of its terms, which may cancel, and these are
    compared.
    """

    def loss(*x):
        y = f(*x)
        finite = (jnp.where(part == -jnp.inf, 0, part) for part in jax.tree.leaves(y))
        return sum(jnp.sum(jnp.sin(part)) for part in finite), y

    def run(*x):
        gradients, y = jax.grad(loss, argnums, has_aux=True)(*x)
        return y, gradients

    return jax.jit(run)


@contextlib.contextmanager
def strict_64_bits():
    """64-bit types, and an error where jax would promote."""
    promotion = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax.enable_x64(True), promotion[0], promotion[1]:
        yield


def check(rng, q, k, v, implementation, tolerance=None, **kw):
    """Output, lse and every gradient agree with the oracle."""
    do, dlse = cotangents(rng, q, v)
    o, lse, grads, *largest = run(q, k, v, do, dlse, implementation, **kw)
    expected_o, expected_lse, expected = oracle.attention(q, k, v, do, dlse, **kw)
    tolerance = tolerance or TOLERANCE[str(q.dtype)]
    assert o.dtype == q.dtype and lse.dtype == jnp.float32
    assert not np.any(np.asarray(o)[np.asarray(lse) == -np.inf])
    close(o, expected_o, tolerance, "output")
    close(lse, expected_lse, max(1e-6, tolerance / 10), "lse")
    if largest:
        close(
            largest[0], oracle.max_logits(q, k, **kw), max(1e-6, tolerance / 10), "largest logits"
        )
    for name, actual, wanted in zip(
        ("dq", "dk", "dv", "dbias", "dsinks")[: len(expected)], grads, expected, strict=True
    ):
        assert (actual is None) == (wanted is None), name
        if wanted is not None:
            close(actual, wanted, tolerance, name)
    return o, lse, grads


def program(f, *x) -> str:
    """The jaxpr of f(*x), and those of the equations in it that are not traced yet."""

    def texts(jaxpr):
        yield str(jaxpr)
        for eqn in jaxpr.eqns:
            if "rules" in eqn.params and eqn.params["jaxpr"] is None:
                run = equation.as_function(**eqn.params)
                yield from texts(jax.make_jaxpr(run)(*(a.aval for a in eqn.invars)).jaxpr)
            for inner in (getattr(a, "jaxpr", a) for a in eqn.params.values()):
                if hasattr(inner, "eqns"):
                    yield from itertools.islice(texts(inner), 1, None)  # the first is in ours

    return "\n".join(texts(jax.make_jaxpr(f)(*x).jaxpr))


def temporary_bytes(f, *x) -> int:
    """Of the compiled program of f(*x), beside its arguments and results."""
    return jax.jit(f).lower(*x).compile().memory_analysis().temp_size_in_bytes


def largest_array(text: str) -> int:
    """The most elements that an array has in a jaxpr."""
    shapes = re.findall(r"\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def tangents(rng, q, k, v, implementation, without=(), **kw):
    """The tangents of output and lse, along those of all floats but some, agree with dense
    attention's in float32."""
    kw = arguments(kw)
    floats = dict(query=q, key=k, value=v)
    floats |= {name: kw.pop(name) for name in ("bias", "sinks") if name in kw}
    along = {
        name: np.asarray(rng.normal(size=a.shape), np.float32).astype(a.dtype)
        for name, a in floats.items()
        if name not in without
    }

    def attend(implementation, x, rest):
        options = dict(implementation=implementation, return_residual=True, **kw)
        return jax.jvp(lambda x: flash_attention(**rest, **x, **options), (x,), (along_like(x),))[1]

    def along_like(x):
        return {name: jnp.asarray(along[name], x[name].dtype) for name in x}

    x = {name: a for name, a in floats.items() if name in along}
    rest = {name: a for name, a in floats.items() if name not in along}
    found = jax.jit(lambda x, rest: attend(implementation, x, rest))(x, rest)
    wide = lambda y: {name: np.asarray(a, np.float32) for name, a in y.items()}
    expected = jax.jit(lambda x, rest: attend("reference", x, rest))(wide(x), wide(rest))
    for name, actual, wanted in zip(("do", "dlse"), found, expected, strict=True):
        close(actual, wanted, TOLERANCE[str(q.dtype)], name)
