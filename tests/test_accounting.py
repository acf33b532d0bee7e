"""What the formulas say is what the kernels load, store and compute; and what the paper of
FlashAttention printed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from jax.experimental import pallas as pl

from pallas_flash import accounting, autodiff, explain
from pallas_flash.accounting import published
from pallas_flash.kernels import device
from pallas_flash.kernels.classic import flash1, standard
from pallas_flash.kernels.triton.tuning import AllTiles
from pallas_flash.kernels.triton.tuning import Tiles as Portable

TILES = {
    "standard": ("standard", standard.Tiles(16, 32)),
    "standard, online softmax": ("standard", standard.Tiles(16, 32, online=True)),
    "flash1": ("flash1", flash1.Tiles(16, 32)),
    "triton": ("triton", AllTiles(Portable(16, 32), Portable(32, 16), Portable(16, 16))),
}
CALLS = {
    "whole tiles": (Sizes(B=1, T=64, S=96, N=2, K=2, H=32, Hv=32), "bfloat16", {}),
    "grouped heads, ragged": (Sizes(N=4), "float32", {}),
    "multi-query, causal": (
        Sizes(B=1, T=53, S=61, N=3, K=1, H=16, Hv=8),
        "float16",
        dict(is_causal=True),
    ),
    "bottom-right window": (
        Sizes(B=1, T=50, S=70, N=1, K=1),
        "float32",
        dict(local_window_size=(20, 9), query_offset=20),
    ),
}


def arrays(z, dtype):
    shapes = (
        (z.B, z.T, z.N, z.H),
        (z.B, z.S, z.K, z.H),
        (z.B, z.S, z.K, z.Hv),
        (z.B, z.T, z.N, z.Hv),
    )
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def observed(function, *args):
    """What the kernels did, and the bytes of the arrays they made."""
    kernels = accounting.observe(function, *args)
    operations = lambda k: (k.operations[name] for name in ("matrix", "exponentials", "other"))
    costs = {
        name: accounting.Cost(*operations(k), k.reads.total(), k.writes.total())
        for name, k in kernels.items()
    }
    return costs, sum(k.results.total() for k in kernels.values())


def merged(*several):
    """The costs of kernels, without the passes of XLA; a kernel that runs twice counts twice."""
    names = {name for costs in several for name in costs} - {"delta", "cast"}
    return {
        name: accounting.total({i: c[name] for i, c in enumerate(several) if name in c})
        for name in names
    }


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("generation", TILES)
def test_kernels_load_store_and_compute_what_the_formulas_say(generation, call):
    (generation, tiles), (z, dtype, call) = TILES[generation], CALLS[call]
    q, k, v, do = arrays(z, dtype)
    problem = explain(q, k, v, **call).problem
    attend = accounting.attention(generation, tiles, **call)
    forward, backward = (
        f(generation, problem, tiles) for f in (accounting.forward, accounting.backward)
    )
    extra = accounting.extra_memory(generation, problem)

    costs, memory = observed(attend, q, k, v)
    assert costs == merged(forward)
    size = lambda *xs: sum(math.prod(x.shape) * x.dtype.itemsize for x in xs)
    cast = generation == "flash1" and dtype != "float32"  # by XLA, what the kernels sum in float32
    assert memory == extra["forward"] + (0 if cast else size(do))

    costs, both = observed(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do), q, k, v, do)
    assert costs == merged(forward, backward)
    # do with its factor lies where XLA puts a result later
    in_place = generation == "standard" or cast
    by_xla = backward["delta"].writes - (size(do) if in_place else 0)
    assert both - memory == extra["backward"] - by_xla + size(k, v) + (0 if cast else size(q))


HOPPER = {
    "grouped heads, ragged": (Sizes(B=1, T=203, S=309, N=2, K=1, H=64, Hv=64), {}),
    "whole tiles": (Sizes(B=1, T=384, S=256, N=2, K=2, H=128, Hv=128), {}),
    "causal": (Sizes(B=1, T=300, S=200, N=2, K=1, H=40, Hv=72), dict(is_causal=True)),
    "window, wide heads": (
        Sizes(B=1, T=200, S=330, N=1, K=1, H=256, Hv=256),
        dict(local_window_size=(70, 20), query_offset=99),
    ),
    "columns of both": (Sizes(B=1, T=70, S=130, N=2, K=1, H=192, Hv=128), dict(is_causal=True)),
    "in any order": (
        Sizes(B=1, T=203, S=309, N=2, K=1, H=64, Hv=64),
        dict(is_causal=True, deterministic=False),
    ),
    "heads of 80 and 40, in any order": (
        Sizes(B=1, T=70, S=130, N=2, K=1, H=80, Hv=40),
        dict(deterministic=False),
    ),
    "columns of both, 160": (Sizes(B=1, T=70, S=130, N=2, K=1, H=160, Hv=160), {}),
}


@pytest.fixture
def traceable(monkeypatch):
    """The Hopper kernels are traced, not run."""
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip(f"the Hopper kernels need jax 0.11.2 or newer; this is {jax.__version__}")
    monkeypatch.setattr(device, "interpret", True)
    autodiff._attend_jit.clear_cache()
    yield
    autodiff._attend_jit.clear_cache()


@pytest.mark.parametrize("call", HOPPER)
def test_hopper_kernels_copy_and_compute_what_the_formulas_say(call, traceable):
    z, call = HOPPER[call]
    q, k, v, do = arrays(z, "bfloat16")
    problem = explain(q, k, v, **call).problem
    attend = accounting.attention("hopper", **call)
    costs, _ = observed(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do), q, k, v, do)
    assert costs == merged(
        accounting.forward("hopper", problem), accounting.backward("hopper", problem)
    )


DECODING = {
    "one token": (Sizes(B=2, T=1, S=512, N=8, K=2, H=64, Hv=64), {}),
    "heads of 96": (Sizes(B=2, T=1, S=512, N=8, K=2, H=96, Hv=96), {}),
    "a ragged window": (
        Sizes(B=2, T=3, S=500, N=8, K=2, H=64, Hv=128),
        dict(local_window_size=(150, 0), query_offset=300),
    ),
}


@pytest.mark.parametrize("call", DECODING)
def test_decoding_on_hopper_copies_and_computes_what_the_formulas_say(call, traceable):
    z, call = DECODING[call]
    equal_the_formulas("hopper", "bfloat16", z, call)


@pytest.mark.parametrize("call", DECODING)
def test_decoding_in_portable_loads_and_computes_what_the_formulas_say(call):
    z, call = DECODING[call]
    equal_the_formulas("triton", "float32", z._replace(H=40), call)


def equal_the_formulas(generation, dtype, z, call):
    q, k, v, _ = arrays(z, dtype)
    costs, memory = observed(accounting.attention(generation, **call), q, k, v)
    problem = explain(q, k, v, **call).problem
    expected = accounting.forward(generation, problem)
    assert costs == {name: cost for name, cost in expected.items() if name != "merge"}
    assert memory == accounting.extra_memory(generation, problem)["forward"]


def test_bytes_under_a_mask_with_data_are_counted_where_the_data_is_given():
    z = Sizes(B=2, T=64, S=64, N=1, K=1, H=16, Hv=16)
    q, k, v, _ = arrays(z, "float32")

    def attend(q, k, v, lengths):
        return accounting.attention("triton", TILES["triton"][1], key_value_seq_lengths=lengths)(
            q, k, v
        )

    kernel = accounting.observe(attend, q, k, v, np.array([5, 64], np.int32))[
        "flash_attention_forward"
    ]
    assert kernel.reads["args[0].key"] == 4 * (5 + 64) * z.H * (z.T // 16)
    with pytest.raises(ValueError, match="pass arrays"):
        accounting.observe(attend, q, k, v, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_an_access_beyond_an_array_is_found():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 16, 16)]

    def call(x):
        whole, own = pl.BlockSpec((32,), lambda i: (0,)), pl.BlockSpec((16,), lambda i: (i,))
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct((32,), x.dtype), grid=2, in_specs=[whole], out_specs=own
        )(x)

    with pytest.raises(IndexError, match="beyond its shape"):
        accounting.observe(call, jax.ShapeDtypeStruct((30,), jnp.float32))
    (counted,) = accounting.observe(call, jax.ShapeDtypeStruct((32,), jnp.float32)).values()
    assert counted.reads.total() == counted.writes.total() == 128


def test_observed_values_are_those_of_the_interpreter(rng):
    z = Sizes(B=1, N=2, K=1)
    q, k, v = qkv(rng, z)
    stored = []
    attend = accounting.attention("triton", TILES["triton"][1], is_causal=True)
    accounting.observe(
        attend, q, k, v, watch=lambda kernel, array, value: stored.append((array, value))
    )
    o = np.concatenate([value.ravel() for array, value in stored if array == "outputs[0]"])
    np.testing.assert_allclose(np.sort(o), np.sort(np.ravel(attend(q, k, v))), atol=1e-5)


def test_flash1_moves_theta_of_the_lower_bound():
    """12 times, for T_c = 4 H S / M and each time Q is read and O read and written; the rest is l,
    m, K, V and the zeros."""
    p = published.gpt2_medium()
    for sram in (2**14, 2**15, 2**16):
        kernels = published.flash(p, sram)
        assert 12 < kernels["forward"].bytes / 2 / accounting.lower_bound(p, sram) < 20


def test_the_formulas_give_what_the_paper_printed_within_ten_percent():
    p = published.gpt2_medium()
    for name, kernels in (("standard", published.frameworks(p)), ("flash", published.flash(p))):
        assert accounting.total(kernels).bytes / 1e9 == pytest.approx(
            published.GIGABYTES[name], rel=0.1
        )
        assert published.printed_flops(p, kernels) / 1e9 == pytest.approx(
            published.GFLOPS[name], rel=0.1
        )
        assert (
            accounting.GPUS["A100-40GB"].roofline(kernels, p.dtype) * 1e3
            < published.MILLISECONDS[name]
        )


def test_the_roofline_is_the_busiest_unit_of_each_kernel():
    gpu = accounting.GPUS["H200"]._replace(
        products=100, float32=10, cores=1, clock=5 / 16, bandwidth=2
    )
    by_memory, by_products = (
        accounting.Cost(reads=6, matrix=100),
        accounting.Cost(matrix=700, exponentials=5, writes=2),
    )
    assert gpu.roofline(dict(a=by_memory, b=by_products), "bfloat16") == 3 + 7
    assert gpu.roofline(dict(b=by_products), "float32") == 70


def test_what_the_formulas_do_not_know_is_refused():
    q, k, v, _ = arrays(Sizes(), "float32")
    with pytest.raises(NotImplementedError, match="observe the kernels"):
        accounting.forward("triton", explain(q, k, v, logits_soft_cap=2.0).problem)
    with pytest.raises(
        ValueError, match="generation must be one of standard, flash1, triton, hopper"
    ):
        accounting.forward("flash2", explain(q, k, v).problem)
