"""Every mode of differentiation of plain JAX: blockwise's first and second derivatives are those of
dense attention in float64, with every argument."""

import functools

import check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BROADCASTS, MASKS, RULES, Sizes, arguments, bias, dense_mask, qkv
from selection import whole_but

from pallas_flash import flash_attention

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(T=19, S=35, N=4, K=2, H=5, Hv=3)


def score_mod(table):
    """By head and distance; the logarithm is no number where the key comes later."""

    def mod(s, b, h, q, k):
        far = jnp.where(k > q, 0.0, jnp.log(jnp.where(k > q, 1.0, q - k + 1.0)))
        return jnp.sin(s * table[h, 0]) + table[h, 1 + abs(q - k) % 3] - 0.1 * far + table[h, 4] * s

    return mod


def drawn(rng, name: str):
    """The floats that a call differentiates, and the rest of it: a mask by its name, and what else
    changes scores by chance."""
    chance = lambda p: rng.random() < p
    query, key, value = qkv(rng, Z)
    floats = dict(query=query, key=key, value=value)
    if name in RULES:
        rule, options = RULES[name]
        options = arguments(dict(options, rule=rule))
    else:
        options = arguments(MASKS[name](rng, Z))
    if chance(0.4):
        floats["bias"] = bias(rng, rng.choice(BROADCASTS), Z)
    if chance(0.4):
        floats["sinks"] = rng.normal(size=Z.N).astype(np.float32)
    if chance(0.4):
        floats["table"] = rng.normal(size=(Z.N, 5)).astype(np.float32)
    if chance(0.3):
        options["logits_soft_cap"] = 2.0
    if chance(0.3):
        options |= dict(dropout_rate=0.25, dropout_rng=jax.random.key(rng.integers(99)))
    if "mask" not in options and chance(0.3):
        options["mask"] = dense_mask(rng, rng.choice(BROADCASTS), Z)
    return floats, options


def modes(implementation, options, x, dx, ux):
    """Derivatives along dx and ux: first in forward and reverse, and second in all four orders."""

    def attend(x):
        x = dict(x)
        mod = dict(score_mod=score_mod(x.pop("table"))) if "table" in x else {}
        o, lse = flash_attention(
            **x, **mod, **options, implementation=implementation, return_residual=True
        )
        return o, jnp.where(lse == -jnp.inf, 0, lse)

    loss = lambda x: sum(jnp.sum(jnp.sin(out)) for out in attend(x))
    gradient = jax.grad(loss)
    along = lambda f, dx: lambda x: jax.jvp(f, (x,), (dx,))[1]
    dot = lambda a, b: sum(jnp.vdot(a[name], b[name]) for name in a)
    return {
        "forward": along(attend, dx)(x),
        "reverse": gradient(x),
        "forward over forward": along(along(attend, dx), ux)(x),
        "forward over reverse": along(gradient, dx)(x),
        "reverse over forward": jax.grad(along(loss, dx))(x),
        "reverse over reverse": jax.grad(lambda x: dot(gradient(x), ux))(x),
    }


def are_the_references(rng, floats, options, tolerance=2e-5, dtype=np.float32):
    x = floats
    dx, ux = ({name: rng.normal(size=a.shape) for name, a in x.items()} for _ in range(2))
    with jax.enable_x64(True):
        in_float64 = [{name: np.float64(a) for name, a in y.items()} for y in (x, dx, ux)]
        expected = jax.jit(functools.partial(modes, "reference", options))(*in_float64)
        expected = jax.tree.map(np.asarray, expected)
    in_dtype = [{name: jnp.asarray(a, dtype) for name, a in y.items()} for y in (x, dx, ux)]
    found = jax.jit(functools.partial(modes, "blockwise", options))(*in_dtype)
    for name, wanted in expected.items():
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True)
        for n, pair in enumerate(pairs):
            check.close(*pair, tolerance, f"{name}, {n}")


@pytest.mark.parametrize(
    "name", whole_but([*MASKS, *RULES], "everything", "window", "varlen", "holes by head")
)
def test_all_derivatives_of_first_and_second_order_are_the_dense_ones(name, rng):
    are_the_references(rng, *drawn(rng, name))
