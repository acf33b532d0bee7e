"""Output, gradients and tangents lower for GPUs that are not here, with as much shared memory as
their programs can have: every feature alone, and mixtures of them at every width."""

import contextlib
import functools
import itertools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from features.calls import FEATURES, INPUTS, SIZES, Feature

from pallas_flash import flash_attention, masks
from pallas_flash.accounting import GPUS
from pallas_flash.choose.selfcheck import specs
from pallas_flash.kernels.hopper import tuning
from scripts.bench.gpu_code import as_if_on

pytestmark = gpu_interpreter.needs_interpreter

T, S, R = 203, 211, SIZES["R"]  # no whole tiles
DTYPES = dict.fromkeys((*INPUTS, "bias"), "bfloat16")
DTYPES |= dict(sinks="float32", table="float32", mask="bool")  # the others: int32
GPU = {name: GPUS[name] for name in ("A100-80GB", "RTX-4090", "RTX-5090", "H200", "B200", "B300")}
WIDTHS = [(64, 64), (128, 128), (160, 160), (192, 128), (64, 256), (256, 256)]
ABOVE_256 = [("H200", (272, 320)), ("A100-80GB", (320, 64))]
ABOVE_256 += [(name, (512, 512)) for name in GPU if name != "B300"]
# a B300 is a B200 but for the kernels by tcgen05
GPU_WIDTHS = [row for row in itertools.product(GPU, WIDTHS) if row[0] != "B300"]
GPU_WIDTHS += [*ABOVE_256, ("B300", (64, 64)), ("B300", (128, 128))]


def read(letters, score_mod):
    """A score_mod that reads a learned array."""
    return Feature(dict(table=letters), lambda x: dict(score_mod=score_mod(x["table"])))


def biased(letters):
    return Feature(dict(bias=letters), lambda x: dict(bias=x["bias"]))


# what differs here from features.calls: how a table is read, and what a bias broadcasts over
KINDS = (
    {
        "a bias by pair": biased("1NTS"),
        "a bias by key": biased("B11S"),
        "a bias by query": biased("1NT1"),
    },
    {
        "a score_mod": Feature(
            {}, lambda x: dict(score_mod=lambda s, b, h, q, k: jnp.maximum(s, 0.0) - h)
        ),
        "slopes": read("N", lambda x: lambda s, b, h, q, k: s - x[h] * jnp.abs(q - k)),
        "a table by key": read("BS", lambda x: lambda s, b, h, q, k: s + x[b, k]),
        "a table by distance": read("NR", lambda x: lambda s, b, h, q, k: s + x[h, (q - k) % R]),
        "a table by pair": read("TS", lambda x: lambda s, b, h, q, k: s * x[q, k]),
    },
    {
        "a constant rule": Feature(
            {}, lambda x: dict(mask=masks.Chunked(75) | masks.Window(None, None))
        ),
        **{name: FEATURES[name] for name in ("`mask`: an array", "`mask`: `masks.MaskMod`")},
    },
)  # of each of which a call has one
ONE_OF = {name: feature for kind in KINDS for name, feature in kind.items()}
OTHERS = "is_causal local_window_size query_seq_lengths key_value_seq_lengths logits_soft_cap sinks"
EACH = {f"`{name}`": FEATURES[f"`{name}`"] for name in (*OTHERS.split(), "return_max_logits")}
EACH |= {name: FEATURES[name] for name in ("segment ids", "dropout")}
EACH["deterministic"] = Feature({}, lambda x: dict(deterministic=True))
EACH = {"nothing": Feature({}, lambda x: {})} | EACH | ONE_OF
# between them all that takes a kernel, registers or shared memory of its own
TOGETHER = {
    "one": "`is_causal`,dropout,`sinks`,`return_max_logits`,a bias by key,a table by distance",
    "another": (
        "`query_seq_lengths`,`key_value_seq_lengths`,`logits_soft_cap`,`mask`: `masks.MaskMod`,"
        "dropout,deterministic,a bias by pair,a table by key"
    ),
    "without dropout": "`local_window_size`,segment ids,a constant rule,`return_max_logits`,slopes",
}


def drawn(rng) -> list[str]:
    names = [name for name in EACH if name not in ONE_OF and rng.random() < 0.4]
    return names + [str(rng.choice([*kind])) for kind in KINDS if rng.random() < 0.7]


def outputs(features, implementation, floats, rest):
    """Output and log-sum-exp."""
    x = floats | rest
    options = specs.arguments(features, x)
    found = flash_attention(**options, return_residual=True, implementation=implementation)
    return tuple(a.astype(jnp.float32) for a in found[:2])


def everything(features, implementation, floats, rest):
    """Output, gradients and tangents."""
    attend = lambda x: outputs(features, implementation, x, rest)
    o, pull = jax.vjp(attend, floats)
    return o, pull(o), jax.jvp(attend, (floats,), (floats,))


@contextlib.contextmanager
def limited_to(gpu, monkeypatch):
    """Mosaic refuses what takes more shared memory than a program of the GPU can have, and a choice
    that it makes unsigned: it does so where the first of its values is a number. Small calls have
    the backward of large ones."""
    from jax.experimental.mosaic.gpu import FragmentedArray, core

    def select(condition, a, b, stock=FragmentedArray.select):
        chosen = stock(condition, a, b)
        assert chosen.is_signed == a.is_signed
        return chosen

    monkeypatch.setattr(FragmentedArray, "select", select)
    monkeypatch.setattr(core, "_SMEM_SIZE_BOUND", gpu.shared_memory - 1024)
    monkeypatch.setattr(tuning, "ONE_KERNEL_KEYS", 0)
    with as_if_on(gpu):
        yield


def lower(features, implementation, what=everything, dtype="bfloat16", **sizes):
    sizes, dtypes = SIZES | dict(T=T, S=S) | sizes, DTYPES | dict.fromkeys(INPUTS, dtype)
    floats, rest = {}, {}
    for name, axes in specs.letters(features).items():
        dtype = dtypes.get(name, "int32")
        shape = tuple(sizes.get(axis, 1) for axis in axes)
        (floats if "float" in dtype else rest)[name] = jax.ShapeDtypeStruct(shape, dtype)
    f = functools.partial(what, features, implementation)
    return jax.jit(f).trace(floats, rest).lower(lowering_platforms=("cuda",))


def lower_by_name(names, implementation, widths, what=everything, **sizes):
    features = [EACH[name] for name in names]
    lower(features, implementation, what, H=widths[0], V=widths[1], **sizes)


def implementations(gpu) -> list[str]:
    families = {(9, 0): ["hopper", "ampere"], (10, 0): ["blackwell"], (10, 3): ["blackwell"]}
    return families.get(gpu.capability, ["ampere"])


@pytest.mark.parametrize("name, widths", GPU_WIDTHS, ids=str)
@pytest.mark.parametrize("features", TOGETHER)
def test_features_lower_together(features, name, widths, monkeypatch):
    with limited_to(GPU[name], monkeypatch):
        lower_by_name(TOGETHER[features].split(","), implementations(GPU[name])[0], widths)


@pytest.mark.parametrize("head", [80, 96, 128])  # slices of 64 columns divide into 128 alone
def test_the_backward_of_a_group_of_heads_in_parts_lowers(head, monkeypatch):
    with limited_to(GPU["H200"], monkeypatch):
        lower((), "hopper", H=head, V=head, N=4, K=1)


def test_the_backward_of_calls_that_share_keys_is_no_loop(monkeypatch):
    q, k = (jax.ShapeDtypeStruct((*n, 1, T, 2, 64), "bfloat16") for n in [(5,), ()])
    attend = functools.partial(flash_attention, implementation="hopper")
    gradients = jax.grad(lambda q, k: attend(q, k, k).astype("float32").sum(), (0, 1))
    with limited_to(GPU["H200"], monkeypatch):
        traced = jax.jit(jax.vmap(gradients, (0, None))).trace(q, k)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text and "stablehlo.while" not in text


DECODING = [
    ("nothing",),
    ("`query_seq_lengths`",),
    ("`is_causal`", "`query_seq_lengths`", "`key_value_seq_lengths`"),
    ("`local_window_size`", "segment ids", "slopes"),
]


@pytest.mark.parametrize("features", DECODING, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_lowers(features, tokens, monkeypatch):
    with limited_to(GPU["H200"], monkeypatch):
        lower_by_name(features, "hopper", (64, 64), outputs, T=tokens, S=300)


MOST_MEMORY = dict.fromkeys(GPU, WIDTHS[-1]) | {"B200": (128, 128)}
del MOST_MEMORY["B300"]


@pytest.mark.whole
@pytest.mark.parametrize("feature", EACH)
@pytest.mark.parametrize("name", MOST_MEMORY)
def test_every_feature_lowers_alone_at_the_width_that_takes_most_memory(name, feature, monkeypatch):
    with limited_to(GPU[name], monkeypatch):
        for implementation in implementations(GPU[name]):
            lower_by_name((feature,), implementation, MOST_MEMORY[name])


@pytest.mark.whole
@pytest.mark.parametrize("name, widths", GPU_WIDTHS, ids=str)
def test_drawn_mixtures_lower(name, widths, monkeypatch):
    rng = np.random.default_rng([*name.encode(), *widths])
    with limited_to(GPU[name], monkeypatch):
        for implementation in implementations(GPU[name]):
            lower_by_name(drawn(rng), implementation, widths)
