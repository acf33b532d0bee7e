"""Forward mode, and second derivatives, of every implementation."""

import functools
import math
import re

import check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, qkv

from pallas_flash import flash_attention, flash_attention_jvp

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(T=19, S=23, N=2, K=1, H=8, Hv=8)
equal = functools.partial(check.equal, tolerance=5e-6)


def attend(implementation, **kw):
    return functools.partial(flash_attention, implementation=implementation, **kw)


def test_forward_mode_is_a_function_of_its_own_in_o_of_t_memory(rng):
    q, k, v = qkv(rng, Z)
    x, dx = (q, k, v, bias(rng, "1N1S", Z)), (*qkv(rng, Z), bias(rng, "1N1S", Z))
    options = dict(is_causal=True, query_offset=2, logits_soft_cap=3.0, return_residual=True)
    jvp = lambda name: jax.jit(
        functools.partial(flash_attention_jvp, implementation=name, **options)
    )
    equal(jvp("blockwise")(x, dx), jvp("reference")(x, dx))
    step = 1e-2
    shifted = [[a + sign * step * da for a, da in zip(x, dx, strict=True)] for sign in (1, -1)]
    above, below = (flash_attention(*x, implementation="reference", **options) for x in shifted)
    equal(
        jvp("blockwise")(x, dx)[1],
        jax.tree.map(lambda a, b: (a - b) / (2 * step), above, below),
        tolerance=2e-3,
    )
    long = [jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)] * 3
    sizes = re.findall(
        r"\[([\d,]+)\]",
        str(jax.make_jaxpr(lambda *x: flash_attention_jvp(x, x, is_causal=True))(*long)),
    )
    assert max(math.prod(map(int, size.split(","))) for size in sizes) < 4096**2 / 8


@pytest.mark.parametrize("implementation", ["triton"])
def test_kernels_say_what_serves_where_they_have_no_derivative(implementation, rng):
    x = qkv(rng, Z)
    f = lambda *x: jnp.sum(attend(implementation)(*x) ** 2)
    of_query = lambda q: f(q, *x[1:])
    along = lambda q: jax.jvp(of_query, (q,), (q,))[1]
    loop = lambda q: jax.lax.fori_loop(0, 2, lambda i, q: q + jax.jacfwd(of_query)(q), q)
    for run in (
        lambda: jax.jit(functools.partial(jax.jvp, f))(x, x),
        lambda: jax.jacfwd(f)(*x),
        lambda: jax.linearize(f, *x)[1](*x),
        lambda: jax.jit(jax.jacfwd(f))(*x),
        lambda: jax.jacfwd(jax.jit(f))(*x),
        lambda: jax.jit(jax.vmap(along))(x[0][None]),
        lambda: jax.jit(jax.grad(along))(x[0]),
        lambda: jax.jvp(along, (x[0],), (x[0],)),
        lambda: jax.jvp(jax.checkpoint(of_query), (x[0],), (x[0],)),
        lambda: jax.jit(loop)(x[0]),  # Newton's method, as solvers have it
    ):
        with pytest.raises(NotImplementedError, match="in reverse mode alone"):
            run()
    with pytest.raises(
        NotImplementedError, match="forward mode is for blockwise and reference; got triton"
    ):
        flash_attention_jvp(x, x, implementation="triton")
    gradient = jax.grad(of_query)
    for run in (
        lambda: jax.grad(lambda q: jnp.sum(gradient(q) ** 2))(x[0]),
        lambda: jax.jit(lambda q: jax.jvp(gradient, (q,), (q,)))(x[0]),
    ):
        with pytest.raises(NotImplementedError, match="have first derivatives alone"):
            run()


def test_second_derivatives_of_bfloat16_err_as_its_rounding_does(rng):
    """Tangents of a scale: of what they add to those of P, most is taken off again in those of
    o."""
    (q, k, v), do = qkv(rng, Z, "bfloat16"), rng.normal(size=(Z.B, Z.T, Z.N, Z.Hv))
    x, dx = (3 * q, k, v), (3 * q, 0 * k, 0 * v)

    @functools.partial(jax.jit, static_argnums=0)
    def hvp(name, x, dx):
        loss = lambda *x: jnp.sum(attend(name)(*x) * jnp.asarray(do, jnp.float32))
        return jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), x, dx)[1]

    expected = hvp("reference", *([a.astype(np.float32) for a in y] for y in (x, dx)))
    norm = lambda x: np.linalg.norm(np.float32(x))
    for mine, wanted in zip(hvp("blockwise", x, dx), expected, strict=True):
        assert norm(mine - wanted) <= 0.01 * norm(wanted)
