"""The gradients of the Hopper kernels, of both schemes, against the oracle in jax's GPU
interpreter."""

import contextlib
import os
import pathlib
import subprocess
import sys

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, Sizes, qkv
from check import check, cotangents, run
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import explain, flash_attention
from pallas_flash.kernels import hopper
from pallas_flash.kernels.hopper import dkv_consumer, sync

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)

DETERMINISTIC, FUSED = True, False


def sizes(T, S, H, Hv=None, B=1, N=2, K=1):
    return Sizes(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv or H)


def mask(name, z):
    return lambda rng: MASKS[name](rng, z)


# Several tiles of keys and of queries, which hang over both ends unless they are whole.
NARROW, SQUARE, WIDE = sizes(203, 309, 64, B=2), sizes(205, 205, 128, B=2), sizes(131, 200, 128)
CASES = {
    "full, whole tiles": (sizes(128, 256, 128), FUSED, {}),
    "full, 64": (sizes(70, 140, 64), DETERMINISTIC, {}),
    "bottom right": (sizes(67, 330, 64, N=4), FUSED, dict(is_causal=True, query_offset=263)),
    "documents, 64": (NARROW, FUSED, mask("documents_causal", NARROW)),
    "documents, 128": (SQUARE, DETERMINISTIC, mask("documents_scattered", SQUARE)),
    "window": (WIDE, FUSED, dict(local_window_size=(40, 4), query_offset=np.array([30], np.int32))),
    "lengths": (NARROW, DETERMINISTIC, mask("everything", NARROW)),
    "soft cap": (WIDE, FUSED, dict(is_causal=True, logits_soft_cap=2.0)),
    "soft cap, 64": (sizes(70, 140, 64), DETERMINISTIC, dict(is_causal=True, logits_soft_cap=2.0)),
    "sinks, soft cap": (
        sizes(70, 140, 64),
        DETERMINISTIC,
        dict(
            is_causal=True,
            query_offset=-9,
            logits_soft_cap=2.0,
            sinks=np.array([0.5, -np.inf], np.float32),
        ),
    ),
    "256": (sizes(70, 130, 256), DETERMINISTIC, dict(is_causal=True)),
    "256, in any order": (sizes(67, 67, 200), FUSED, {}),
    "192 and 128": (sizes(131, 140, 192, Hv=128), DETERMINISTIC, dict(is_causal=True)),
    "padded heads": (sizes(37, 53, 11, Hv=72), FUSED, {}),
    "heads of 80, in any order": (sizes(67, 131, 80), FUSED, dict(is_causal=True, query_offset=64)),
    "heads of 96": (sizes(67, 131, 96), DETERMINISTIC, dict(is_causal=True, query_offset=64)),
    "heads of 144": (sizes(67, 67, 144), DETERMINISTIC, {}),
    "one query, one key": (sizes(1, 1, 64, N=1), FUSED, {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    whole_but(
        CASES,
        "full, whole tiles",
        "sinks, soft cap",
        "heads of 80, in any order",
        "one query, one key",
    ),
)
def test_gradients_are_the_oracles(name, rng):
    z, deterministic, kw = CASES[name]
    kw = kw(rng) if callable(kw) else kw
    dtype = jnp.float16 if "cap" in name else jnp.bfloat16
    with gpu_interpreter.hopper_kernels():
        check(rng, *qkv(rng, z, dtype), "hopper", deterministic=deterministic, **kw)


@pytest.mark.gpu
def test_sinks_and_capped_logits_go_to_the_ends_of_float32(rng):
    q, k, v = qkv(rng, sizes(70, 140, 64), jnp.bfloat16)
    large, one_sign = (np.abs(x.astype(np.float32)) * np.float32(1e25) for x in (q, k))
    with gpu_interpreter.hopper_kernels():
        check(rng, q, k, v, "hopper", sinks=np.array([3e38, -3e38], np.float32))
        one_sign *= rng.choice(np.float32([-1, 1]), (*k.shape[:-1], 1))
        check(
            rng, large.astype(q.dtype), one_sign.astype(q.dtype), v, "hopper", logits_soft_cap=30.0
        )


RACES = [
    (64, 64, DETERMINISTIC),
    (128, 128, FUSED),
    (64, 64, FUSED),
    (256, 256, DETERMINISTIC),
    (192, 128, DETERMINISTIC),
]


@pytest.mark.gpu
@pytest.mark.parametrize("width, value_width, deterministic", whole_but(RACES, (128, 128, FUSED)))
def test_there_is_no_race(width, value_width, deterministic, rng):
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        z = sizes(300 if width == 64 else 200, 260, width, value_width, N=1 if width > 128 else 2)
        check(
            rng,
            *qkv(rng, z, jnp.bfloat16),
            "hopper",
            deterministic=deterministic,
            is_causal=True,
            query_offset=130,
        )
    assert not races.found


LEFT_OUT = {
    "the meeting before dS is read": (FUSED, dkv_consumer.DkvConsumer, "barrier"),
    "the wait for a block": (DETERMINISTIC, sync.TmaRing, "wait"),
    "the fence after lse and delta are read": (DETERMINISTIC, sync, "fence"),
}


@pytest.mark.parametrize("name", whole_but(LEFT_OUT, "the wait for a block"))
def test_without_it_there_is_a_race(name, rng, monkeypatch):
    deterministic, owner, word = LEFT_OUT[name]
    monkeypatch.setattr(owner, word, lambda *args, **kw: None)
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 5.0)
    q, k, v = qkv(rng, sizes(256, 128, 64, N=1), jnp.bfloat16)
    # the interpreter may also give up, where nobody has seen that a block was there
    with (
        contextlib.suppress(jax.errors.JaxRuntimeError),
        gpu_interpreter.hopper_kernels(detect_races=True) as races,
    ):
        run(q, k, v, *cotangents(rng, q, v), "hopper", deterministic=deterministic)
    assert races.found


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [DETERMINISTIC, FUSED])
def test_garbage_in_padding_changes_no_gradient(deterministic, rng):
    lengths = dict(
        query_seq_lengths=np.array([40, 150], np.int32),
        key_value_seq_lengths=np.array([300, 50], np.int32),
    )
    # the second tile of queries, and of keys, may hold nothing
    q, k, v = qkv(rng, sizes(150, 300, 64, B=2), jnp.bfloat16)
    do, dlse = cotangents(rng, q, v)
    call = lambda: run(
        q, k, v, do, dlse, "hopper", deterministic=deterministic, is_causal=True, **lengths
    )[2][:3]
    with gpu_interpreter.hopper_kernels():
        clean = call()
        q[0, 40:], k[1, 50:], v[1, 50:], do[0, 40:] = np.nan, np.inf, -np.inf, np.nan
        dirty = call()
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_allclose(
            np.float32(x), np.float32(y), rtol=0, atol=0 if deterministic else 1e-2
        )


@pytest.mark.gpu
def test_the_deterministic_scheme_gives_the_same_bits_twice(rng):
    q, k, v = qkv(rng, sizes(200, 260, 64), jnp.bfloat16)
    do, dlse = cotangents(rng, q, v)
    with gpu_interpreter.hopper_kernels():
        once, again = (run(q, k, v, do, dlse, "hopper")[2][:3] for _ in range(2))
    for x, y in zip(once, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", whole_but([DETERMINISTIC, FUSED], FUSED))
def test_inside_of_a_checked_shard_map_it_gives_the_same(deterministic, rng):
    def loss(q, k, v, ids):
        options = dict(
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            is_causal=True,
            deterministic=deterministic,
        )
        return jnp.sum(
            jnp.sin(
                flash_attention(q, k, v, implementation="hopper", **options).astype(jnp.float32)
            )
        )

    arrays = (
        *qkv(rng, sizes(67, 67, 64, B=2), jnp.bfloat16),
        np.sort(rng.integers(0, 3, (2, 67))).astype(np.int32),
    )
    # on two, the interpreter waits in vain
    one_device = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    grad = jax.grad(loss, (0, 1, 2))
    with gpu_interpreter.hopper_kernels():
        spread = jax.jit(
            jax.shard_map(grad, mesh=one_device, in_specs=P("data"), out_specs=P("data"))
        )(*arrays)
        for x, y in zip(spread, grad(*arrays), strict=True):
            np.testing.assert_allclose(
                np.float32(x), np.float32(y), rtol=0, atol=0 if deterministic else 1e-2
            )


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", whole_but([DETERMINISTIC, FUSED], FUSED))
def test_kernels_that_jax_maps_since_values_are_shared_give_what_more_batch_rows_give(
    deterministic, rng
):
    def gradients(q, k, v, length):
        o, vjp = jax.vjp(
            lambda *qkv: flash_attention(
                *qkv,
                implementation="hopper",
                key_value_seq_lengths=length,
                deterministic=deterministic,
            ),
            *(q, k, v),
        )
        return vjp(o)

    (q, k, v), lengths = (
        qkv(rng, sizes(67, 131, 64, B=2, N=1), jnp.bfloat16),
        jnp.array([131, 40], jnp.int32),
    )
    with gpu_interpreter.hopper_kernels():
        rows = jax.jit(jax.vmap(gradients, (0, 0, None, 0)))(q, k, v[0], lengths)
        for x, y in zip(
            rows, jax.jit(gradients)(q, k, jnp.stack([v[0]] * 2), lengths), strict=True
        ):
            np.testing.assert_allclose(
                np.float32(x), np.float32(y), rtol=0, atol=0 if deterministic else 1e-2
            )


@pytest.mark.parametrize("size, fused", [(64, True), (128, True), (129, False)])
def test_one_kernel_is_taken_where_any_order_is_allowed_and_it_fits(size, fused):
    q = jax.ShapeDtypeStruct((1, 8, 2, size), jnp.bfloat16)
    assert hopper.tiles(explain(q, q, q).problem).fused is None
    assert (hopper.tiles(explain(q, q, q, deterministic=False).problem).fused is not None) == fused


# In a process of its own: jax's Triton module must not have been imported
WITHOUT_TRITON = """
import sys

sys.modules["jax.experimental.pallas.triton"] = None
import gpu_interpreter
import jax
import jax.numpy as jnp

from pallas_flash import explain, flash_attention

q, table = jnp.ones((1, 5, 1, 64), jnp.bfloat16), jnp.ones(5)


def loss(x):
    rule = lambda s, b, h, i, j: s * x[j]
    return flash_attention(q, q, q, x, score_mod=rule, implementation="hopper").sum()


with gpu_interpreter.hopper_kernels():
    print(jax.grad(loss)(table).shape)
print(explain(q, q, q, implementation="reference").why_not["triton"])
"""


def test_without_jaxs_triton_biases_and_captured_arrays_have_gradients():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env=os.environ | dict(PYTHONPATH=os.pathsep.join(["tests", *sys.path])),
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    shape, triton = run.stdout.splitlines()
    assert shape == "(5,)"
    assert "cannot be imported" in triton
