"""Replacing jax.nn.dot_product_attention is a change of import: same names, order, defaults and
numbers."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, dense_mask, qkv
from check import close, value_and_gradients
from selection import whole_but

from pallas_flash import flash_attention

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(H=8, Hv=8)


def test_the_signature_begins_with_that_of_jax_nn():
    theirs, ours = (
        list(inspect.signature(f).parameters.values())
        for f in (jax.nn.dot_product_attention, flash_attention)
    )
    for a, b in zip(theirs, ours, strict=False):
        assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)


CASES = {
    "full": lambda rng: {},
    "causal": lambda rng: dict(is_causal=True),
    "scale": lambda rng: dict(scale=0.7),
    "bias and mask": lambda rng: dict(bias=bias(rng, "1NTS", Z), mask=dense_mask(rng, "B1TS", Z)),
    "bias over keys": lambda rng: dict(bias=bias(rng, "B11S", Z)),
    "window": lambda rng: dict(local_window_size=40),
    "window of two sides": lambda rng: dict(local_window_size=(20, 30), is_causal=True),
    "lengths": lambda rng: dict(
        key_value_seq_lengths=jnp.array([9, 53]), query_seq_lengths=jnp.array([37, 20])
    ),
}


@pytest.mark.whole("triton")
@pytest.mark.parametrize(
    "name", whole_but(CASES, "causal", "scale", "bias and mask", "window of two sides", "lengths")
)
def test_numbers_equal_those_of_jax_nn(name, implementation, rng):
    q, k, v = qkv(rng, Z)
    kw = CASES[name](rng)
    # jax.nn leaves garbage in the others
    rows = np.arange(Z.T) < np.asarray(kw.get("query_seq_lengths", [Z.T] * Z.B))[:, None]
    rows = rows[..., None, None]

    def run(attention, **more):
        attend = lambda *x: jnp.where(rows, attention(*x, **kw, **more), 0.0)
        return value_and_gradients(attend)(q, k, v)

    theirs, ours = (
        run(jax.nn.dot_product_attention),
        run(flash_attention, implementation=implementation),
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        close(a, b, 1e-5)


def test_lse_equals_the_residual_of_jax_nn(implementation, rng):
    q, k, v = qkv(rng, Z)
    kw = dict(is_causal=True, return_residual=True)
    _, ours = flash_attention(q, k, v, implementation=implementation, **kw)
    _, theirs = jax.nn.dot_product_attention(q, k, v, **kw)
    close(ours, theirs, 1e-6)
