"""What a context may be, what explain says that it sends, and its order of a sequence."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from test_context_parallel import ROWS, mesh, spread

from pallas_flash import explain, flash_attention, flash_attention_jvp
from pallas_flash.context_parallel import AllToAll, Ring, Zigzag, unzigzag, zigzag

pytestmark = needs_devices


def test_where_a_window_is_known_only_the_keys_in_it_travel():
    ring = make_mesh(context=8)
    (x,) = put(ring, P(None, "context"), jnp.ones((1, 64, 1, 8)))
    steps = lambda **kw: re.search(
        r"in (\d) of (\d) steps|nothing is sent", explain(x, x, x, **kw).context
    )
    assert steps(is_causal=True).groups() == ("7", "8")
    assert steps(local_window_size=(9, 0)).groups() == ("2", "3")
    # what comes after is fetched first
    assert steps(local_window_size=(0, 8)).groups() == ("2", "2")
    assert steps(local_window_size=(3, 3), query_offset=500)[0] == "nothing is sent"
    # as is counted
    assert (
        "in 7 of 8 steps; the backward once more than that"
        in explain(x, x, x, is_causal=True).context
    )


def test_zigzag_and_back_is_the_same():
    batch = dict(tokens=jnp.arange(48).reshape(2, 24), mask=jnp.ones((2, 24, 3)))
    there = zigzag(batch, 4)
    expected = "0 1 2 21 22 23 3 4 5 18 19 20 6 7 8 15 16 17 9 10 11 12 13 14"
    assert " ".join(map(str, there["tokens"][0].tolist())) == expected
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), unzigzag(there, 4), batch))
    with pytest.raises(
        ValueError,
        match="zigzag cuts an axis into 8 chunks, two for each device; got 20 along axis 1",
    ):
        zigzag(jnp.zeros((2, 20)), 4)


def test_zigzag_leaves_arrays_on_the_explicit_axes_that_they_lie_on():
    x = np.arange(48).reshape(2, 24)
    there = zigzag(*spread(x), 4)
    for y, expected in (there, zigzag(x, 4)), (unzigzag(there, 4), x):
        np.testing.assert_array_equal(y, expected)
        assert jax.typeof(y).sharding.spec == ROWS


REFUSED = {
    "context must be None, Ring": dict(context="context"),
    "needs a mesh with the axis 'rows'": dict(context=Ring("rows"), m=None),
    "context names the axis rows; the arrays are on a mesh with data, context": dict(
        context=Ring("rows")
    ),
    "the 4 devices that rows or keys lie on must divide the length of query; got 42": dict(
        context=Ring("context"), T=42
    ),
    "cuts the rows of a device into two chunks; got 5 rows": dict(context=Zigzag("context"), T=20),
    "takes heads that are multiples of its 4 devices, or one key head; got N = 6, K = 2": dict(
        context=AllToAll("context"), N=6
    ),
    "dropout over a ring takes chunks of keys that are multiples of 32; got 10": dict(
        context=Ring("context"), dropout_rate=0.1, dropout_rng=jax.random.key(0)
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused_with_a_sentence(sentence):
    kw = dict(REFUSED[sentence])
    T, N, m = kw.pop("T", 40), kw.pop("N", 4), kw.pop("m", mesh())
    q, k = jnp.ones((2, T, N, 8)), jnp.ones((2, T, min(N, 2), 8))
    if m is not None:
        q, k = put(m, P("data"), q, k)
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        flash_attention(q, k, k, **kw)


@pytest.mark.parametrize("name, shape", [("sinks", (2,)), ("scale", (2,)), ("bias", (2, 8, 8))])
def test_as_many_heads_as_are_a_devices_own_are_not_those_of_all(name, shape):
    (x,) = spread(jnp.ones((2, 8, 8, 8)))
    with pytest.raises(
        ValueError, match=re.escape(f"{name} must be of all 8 query heads, or of 1; got 2.")
    ):
        explain(x, x, x, context=AllToAll("context"), **{name: jnp.ones(shape)})


@pytest.mark.parametrize("kind", [Ring, AllToAll])
def test_forward_mode_and_second_derivatives_are_refused(kind):
    (x,) = spread(jnp.ones((2, 8, 4, 8)))
    attend = functools.partial(flash_attention, implementation="reference", context=kind("context"))
    gradient = jax.grad(lambda x: attend(x, x, x).sum())
    by_cotangent = lambda do: jax.vjp(lambda x: attend(x, x, x), x)[1](do)[0].sum()
    refused = [
        lambda: flash_attention_jvp((x, x, x), (x, x, x), context=kind("context")),
        lambda: jax.jvp(gradient, (x,), (x,)),
        lambda: jax.grad(lambda x: gradient(x).sum())(x),
        lambda: jax.grad(by_cotangent)(x),
    ]
    for derivative in refused:
        with pytest.raises(NotImplementedError, match="first derivatives alone, in reverse mode"):
            derivative()
