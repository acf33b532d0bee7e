"""Output, gradients and tangents lower for GPUs that are not here, with as much shared memory as
their programs can have: every feature alone, and mixtures of them at every width."""

import contextlib
import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, masks
from pallas_flash.accounting import GPUS
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)

B, N, K, T, S = 2, 4, 2, 200, 208
GPU = {
    **{name: GPUS[name] for name in ("A100-80GB", "RTX-4090", "RTX-5090", "H200")},
    "B200": GPUS["H200"]._replace(kind="NVIDIA B200", capability=(10, 0)),
}
WIDTHS = [(64, 64), (128, 128), (160, 160), (192, 128), (64, 256), (256, 256)]
TABLE = jax.ShapeDtypeStruct((N, 32), "float32")
ROWS = jax.ShapeDtypeStruct((B,), "int32")


def distance(q, k):
    return jnp.clip(q - k, -16, 15) + 16


def bias(*shape):
    return dict(bias=jax.ShapeDtypeStruct(shape, "bfloat16")), lambda x: dict(bias=x)


# what each adds to a call: a float array that has a gradient, or none, and the arguments made of it
FEATURES = {
    "nothing": ({}, lambda: {}),
    "causal": ({}, lambda: dict(is_causal=True)),
    "a window": ({}, lambda: dict(local_window_size=(40, 9))),
    "lengths": ({}, lambda: dict(query_seq_lengths=[T, 70], key_value_seq_lengths=[90, S])),
    "segment ids": (
        {},
        lambda: dict(
            query_segment_ids=jnp.zeros((B, T), jnp.int32),
            key_value_segment_ids=jnp.zeros((B, S), jnp.int32),
        ),
    ),
    "a mask": ({}, lambda: dict(mask=jnp.ones((1, N, T, S), bool))),
    "a rule": ({}, lambda: dict(mask=masks.MaskMod(lambda b, h, q, k: (q + k + h) % 5 > 0))),
    "a constant rule": ({}, lambda: dict(mask=masks.Chunked(75) | masks.Window(None, None))),
    "a soft cap": ({}, lambda: dict(logits_soft_cap=5.0)),
    "dropout": ({}, lambda: dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))),
    "sinks": (dict(sinks=jax.ShapeDtypeStruct((N,), "float32")), lambda x: dict(sinks=x)),
    "the largest logits": ({}, lambda: dict(return_max_logits=True)),
    "a bias by pair": bias(1, N, T, S),
    "a bias by key": bias(B, 1, 1, S),
    "a bias by query": bias(1, N, T, 1),
    "a score_mod": ({}, lambda: dict(score_mod=lambda s, b, h, q, k: jnp.maximum(s, 0.0) - h)),
    "slopes": (
        dict(slopes=jax.ShapeDtypeStruct((N,), "float32")),
        lambda x: dict(score_mod=lambda s, b, h, q, k: s - x[h] * jnp.abs(q - k)),
    ),
    "a table by key": (
        dict(by_key=jax.ShapeDtypeStruct((B, S), "float32")),
        lambda x: dict(score_mod=lambda s, b, h, q, k: s + x[b, k]),
    ),
    "a table by distance": (
        dict(table=TABLE),
        lambda x: dict(score_mod=lambda s, b, h, q, k: s + x[h, distance(q, k)]),
    ),
    "a table by pair": (
        dict(pairs=jax.ShapeDtypeStruct((T, S), "float32")),
        lambda x: dict(score_mod=lambda s, b, h, q, k: s * x[q, k]),
    ),
}
# of which a call has one
KINDS = [
    ("a bias by pair", "a bias by key", "a bias by query"),
    ("a score_mod", "slopes", "a table by key", "a table by distance", "a table by pair"),
    ("a mask", "a rule", "a constant rule"),
]
# between them all that takes a kernel, registers or shared memory of its own
TOGETHER = [
    ("causal", "dropout", "sinks", "the largest logits", "a bias by key", "a table by distance"),
    ("lengths", "a soft cap", "a rule", "dropout", "a bias by pair", "a table by key"),
    ("a window", "segment ids", "a constant rule", "the largest logits", "slopes"),
]


def drawn(rng) -> tuple[str, ...]:
    several = [name for kind in KINDS for name in kind]
    names = [name for name in FEATURES if name not in several and rng.random() < 0.4]
    return *names, *(str(rng.choice(kind)) for kind in KINDS if rng.random() < 0.7)


def shapes(features, size, value_size):
    """Of query, key and value, and of the features' arrays."""
    head = lambda length, heads, n: jax.ShapeDtypeStruct((B, length, heads, n), "bfloat16")
    of_heads = dict(q=head(T, N, size), k=head(S, K, size), v=head(S, K, value_size))
    return functools.reduce(lambda x, name: x | FEATURES[name][0], features, of_heads)


def everything(features, implementation, x):
    """Output, gradients and tangents."""

    def attend(x):
        more = {}
        for name in features:
            arrays, options = FEATURES[name]
            more |= options(*(x[array] for array in arrays))
        found = flash_attention(
            x["q"], x["k"], x["v"], **more, return_residual=True, implementation=implementation
        )
        return tuple(a.astype(jnp.float32) for a in found[:2])

    o, pull = jax.vjp(attend, x)
    return o, pull(o), jax.jvp(attend, (x,), (x,))


@contextlib.contextmanager
def limited_to(gpu, monkeypatch):
    """Mosaic refuses what takes more shared memory than a program of the GPU can have."""
    from jax.experimental.mosaic.gpu import core

    monkeypatch.setattr(core, "_SMEM_SIZE_BOUND", gpu.shared_memory - 1024)
    with as_if_on(gpu):
        yield


def lower(features, implementation, widths):
    x = shapes(features, *widths)
    f = functools.partial(everything, features, implementation)
    jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))


def implementations(gpu) -> list[str]:
    return ["hopper", "ampere"] if gpu.capability == (9, 0) else ["ampere"]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("features", TOGETHER, ids=["one", "another", "without dropout"])
def test_features_lower_together(features, name, widths, monkeypatch):
    with limited_to(GPU[name], monkeypatch):
        lower(features, implementations(GPU[name])[0], widths)


@pytest.mark.whole
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", GPU)
def test_every_feature_lowers_alone_at_the_width_that_takes_most_memory(name, feature, monkeypatch):
    with limited_to(GPU[name], monkeypatch):
        for implementation in implementations(GPU[name]):
            lower((feature,), implementation, WIDTHS[-1])


@pytest.mark.whole
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", GPU)
def test_drawn_mixtures_lower(name, widths, monkeypatch):
    rng = np.random.default_rng([*name.encode(), *widths])
    with limited_to(GPU[name], monkeypatch):
        for implementation in implementations(GPU[name]):
            lower(drawn(rng), implementation, widths)
