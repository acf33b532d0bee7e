"""Forward mode of the Hopper kernels, against dense attention in jax's GPU interpreter."""

import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, Sizes, qkv
from check import tangents
from selection import whole_but

from pallas_flash import flash_attention, masks, scores

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


def sizes(T, S, H, Hv=None, B=1, N=2, K=1):
    return Sizes(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv or H)


def mask(name, z):
    return lambda rng: MASKS[name](rng, z)


# Several tiles of queries and blocks of keys, which hang over both ends unless they are whole; a
# block is of 32 keys for heads above 128.
NARROW, SQUARE = sizes(203, 309, 64, B=2), sizes(205, 205, 128, B=2)
SMALL = sizes(67, 131, 128)
CASES = {
    "full, whole tiles": (sizes(128, 256, 128), {}),
    "bottom right": (sizes(67, 330, 64, N=4, K=2), dict(is_causal=True, query_offset=263)),
    "documents": (NARROW, mask("documents_scattered", NARROW)),
    "everything": (NARROW, mask("everything", NARROW)),
    "window": (SQUARE, dict(local_window_size=(40, 4), query_offset=np.array([30, -9], np.int32))),
    "rows that see nothing": (SMALL, dict(is_causal=True, query_offset=-40)),
    "soft cap, sinks": (
        SMALL,
        dict(is_causal=True, logits_soft_cap=2.0, sinks=np.array([0.5, -np.inf], np.float32)),
    ),
    "a rule": (SMALL, dict(mask=masks.Causal() | masks.GlobalTokens(5))),
    "a mask": (SMALL, lambda rng: dict(mask=rng.random((1, 2, 67, 131)) < 0.6)),
    "a score_mod": (
        SMALL,
        dict(score_mod=scores.Alibi(np.array([0.5, 0.25], np.float32)), is_causal=True),
    ),
    "a bias": (
        SMALL,
        lambda rng: dict(
            bias=rng.normal(size=(1, 2, 1, 131)).astype(np.float32), logits_soft_cap=5.0
        ),
    ),
    "dropout": (SMALL, dict(dropout_rate=0.25, dropout_rng=jax.random.key(3))),
    "heads of 11 and 72": (sizes(37, 53, 11, 72), {}),
    "heads of 128 and 64": (sizes(67, 131, 128, 64), dict(is_causal=True)),
    "heads of 192 and 128": (sizes(131, 100, 192, 128), dict(is_causal=True)),
    "heads of 256": (sizes(67, 100, 256), {}),
    "one query, one key": (sizes(1, 1, 64, N=1), {}),
}
WITHOUT = {"no key": ("key",), "key": ("query", "value"), "value": ("query", "key")}


def agrees(rng, name, without=()):
    z, kw = CASES[name]
    kw = kw(rng) if callable(kw) else kw
    dtype = jnp.float16 if "cap" in name else jnp.bfloat16
    with gpu_interpreter.hopper_kernels():
        tangents(rng, *qkv(rng, z, dtype), "hopper", without=without, **kw)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", whole_but(CASES, "everything", "a bias", "dropout", "heads of 192 and 128")
)
def test_tangents_are_those_of_dense_attention(name, rng):
    agrees(rng, name)


@pytest.mark.gpu
@pytest.mark.parametrize("some", whole_but(WITHOUT, "no key"))
def test_so_are_those_along_some_of_the_arrays(some, rng):
    agrees(rng, "bottom right", WITHOUT[some])


@pytest.mark.gpu
@pytest.mark.parametrize("head", whole_but([64, 128, 256], 128))
def test_there_is_no_race(head, rng):
    q, k, v = qkv(rng, sizes(200, 260, head, N=1), jnp.bfloat16)
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        tangents(rng, q, k, v, "hopper", is_causal=True, query_offset=60)
    assert not races.found


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [None, np.zeros(2, np.float32)], ids=["", "sinks"])
def test_garbage_in_padding_of_arrays_and_tangents_changes_no_bit(sinks, rng):
    options = dict(
        query_seq_lengths=np.array([30, 67], np.int32),
        key_value_seq_lengths=np.array([131, 70], np.int32),
        sinks=sinks,
        return_residual=True,
    )
    attend = functools.partial(flash_attention, implementation="hopper", is_causal=True, **options)
    along = jax.jit(lambda x, dx: jax.jvp(attend, x, dx))
    x, dx = (qkv(rng, sizes(67, 131, 128, B=2), jnp.bfloat16) for _ in range(2))
    with gpu_interpreter.hopper_kernels():
        clean = along(x, dx)
        for q, k, v in (x, dx):
            q[0, 30:], k[1, 70:], v[1, 70:] = np.nan, np.inf, np.nan
        dirty = along(x, dx)
        for a, b in zip(*map(jax.tree.leaves, (clean, dirty)), strict=True):
            np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (a, b)))
