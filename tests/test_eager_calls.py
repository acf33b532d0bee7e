"""An eager call that is compiled goes through few Python functions of the package."""

import pathlib
import sys

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put

import pallas_flash
from pallas_flash import flash_attention, paged_attention
from pallas_flash.flax import FlashAttention

PACKAGE = str(pathlib.Path(pallas_flash.__file__).parent)
Q = jnp.ones((1, 16, 2, 16))  # [B, T, N, H]


def attend(q=Q):
    return flash_attention(q, q, q, is_causal=True, implementation="blockwise")


def on_a_mesh():
    (q,) = put(make_mesh(data=1), P("data"), Q)
    return lambda: attend(q)


def in_pages():
    pages = jnp.ones((8, 8, 2, 16))  # [P, page, K, H]
    args = Q[:, :1], pages, pages, jnp.arange(4, dtype=jnp.int32)[None], jnp.array([16])
    return lambda: paged_attention(*args)


def in_flax():
    layer, x = FlashAttention(2, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 16, 32))
    return lambda: layer(x)


# at most so many, of which Python 3.11, where a comprehension is a function, needs the most
MOST = {
    "flash_attention": (200, lambda: attend),
    "on a mesh": pytest.param(230, on_a_mesh, marks=needs_devices),
    "paged_attention": (130, in_pages),
    "FlashAttention": (250, in_flax),
}


@pytest.mark.parametrize("most, make", MOST.values(), ids=MOST)
def test_a_warm_call_goes_through_few_functions(most, make):
    call, called = make(), []
    for _ in range(2):
        call()

    def when_called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(when_called)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert 0 < len(called) <= most, called
