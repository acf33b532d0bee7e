"""What kernels load, store and compute: no more than their masks and tiles ask for; and times at a
GPU's peaks."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from jax.experimental import pallas as pl
from observation import attention, observe
from selection import whole_but

from pallas_flash import accounting, explain
from pallas_flash.accounting import GPUS
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.hopper import tuning
from pallas_flash.kernels.mosaic import elements
from pallas_flash.kernels.pallas_call import power_of_two
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles
from pallas_flash.transforms import autodiff
from scripts.bench.gpu_code import as_if_on

TILES = TritonTiles(Tiles(16, 32), Tiles(32, 16), Tiles(16, 16))
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
    """q, k, v and do, as shapes."""
    shapes = [(z.T, z.N, z.H), (z.S, z.K, z.H), (z.S, z.K, z.Hv), (z.T, z.N, z.Hv)]
    return [jax.ShapeDtypeStruct((z.B, *shape), dtype) for shape in shapes]


def both_passes(attend):
    return lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do)


def visible_of(z, call):
    return oracle.visible(1, 1, z.T, z.S, call)[0, 0]


def columns_of(visible, rows: int, columns: int):
    """First and last column that each block of rows sees, in whole blocks of columns."""
    for i in range(0, len(visible), rows):
        seen = np.flatnonzero(visible[i : i + rows].any(0))
        if seen.size:
            stop = seen[-1] + 1
            yield seen[0] // columns * columns, -(-stop // columns) * columns, stop


@pytest.mark.parametrize("call", whole_but(CALLS, "grouped heads, ragged", "bottom-right window"))
def test_triton_loads_what_a_tile_sees_and_computes_no_other_tile(call):
    z, dtype, call = CALLS[call]
    kernels = observe(both_passes(attention("triton", TILES, **call)), *arrays(z, dtype))
    forward, dkv, dq = kernels.values()
    visible, heads = visible_of(z, call), z.B * z.N
    size = jnp.dtype(dtype).itemsize
    product = lambda t, H: 2 * heads * t.block_q * t.block_k * power_of_two(H)
    for kernel, t, counts in ((forward, TILES.forward, (1, 1)), (dq, TILES.dq, (2, 1))):
        blocks = list(columns_of(visible, t.block_q, t.block_k))
        keys = heads * sum(stop - first for first, _, stop in blocks)
        assert kernel.reads["args[0].key"] == keys * z.H * size
        assert kernel.reads["args[0].value"] == keys * z.Hv * size
        tiles = sum((last - first) // t.block_k for first, last, _ in blocks)
        products = sum(n * product(t, H) for n, H in zip(counts, (z.H, z.Hv), strict=True))
        assert kernel.operations["matrix"] == tiles * products
    t = TILES.dkv
    blocks = list(columns_of(visible.T, t.block_k, t.block_q))
    rows = heads * sum(visible[first:last].any(1).sum() for first, last, _ in blocks)
    assert dkv.reads["args[0].query"] == rows * z.H * size
    tiles = sum((last - first) // t.block_q for first, last, _ in blocks)
    assert dkv.operations["matrix"] == tiles * 2 * (product(t, z.H) + product(t, z.Hv))


@pytest.fixture
def traceable(monkeypatch):
    """The Hopper kernels are traced, not run."""
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip(f"the Hopper kernels need jax 0.11.2 or newer; this is {jax.__version__}")
    monkeypatch.setattr(hardware, "interpret", True)
    monkeypatch.setattr(tuning, "ONE_KERNEL_KEYS", 0)  # small calls have the backward of large ones
    autodiff.attend.clear_cache()
    yield
    autodiff.attend.clear_cache()


HOPPER = {
    "grouped heads, ragged": (Sizes(B=1, T=203, S=309, N=2, K=1, H=64, Hv=64), {}),
    "whole tiles": (Sizes(B=1, T=384, S=256, N=2, K=2, H=128, Hv=128), {}),
    "causal": (Sizes(B=1, T=300, S=200, N=2, K=1, H=40, Hv=72), dict(is_causal=True)),
    "window, wide heads": (
        Sizes(B=1, T=200, S=300, N=1, K=1, H=256, Hv=256),
        dict(local_window_size=(70, 20), query_offset=99),
    ),
    "columns of both": (Sizes(B=1, T=70, S=130, N=2, K=1, H=192, Hv=128), dict(is_causal=True)),
    "dK and dV apart": (Sizes(B=1, T=203, S=130, N=2, K=1, H=320, Hv=512), dict(is_causal=True)),
    "in any order": (
        Sizes(B=1, T=203, S=309, N=2, K=1, H=64, Hv=64),
        dict(is_causal=True, deterministic=False),
    ),
}


@pytest.mark.parametrize("call", HOPPER)
def test_hopper_copies_the_blocks_that_a_tile_sees(call, traceable):
    z, call = HOPPER[call]
    x, call = arrays(z, "bfloat16"), dict(deterministic=True) | call
    with as_if_on(GPUS["H200"]):
        tiles = explain(*x[:3], implementation="hopper", **call).tiles
    kernels = observe(both_passes(attention("hopper", tiles, **call)), *x)
    visible = visible_of(z, call)
    row = lambda size, t: 2 * z.N * elements.padded_size("bfloat16", size, t.swizzle)
    T, S = (-(-length // 8) * 8 for length in (z.T, z.S))
    by_queries = dict(flash_attention_forward=tiles.forward)
    if tiles.fused is None:
        by_queries["flash_attention_dq"] = tiles.dq
    for name, t in by_queries.items():
        blocks = columns_of(visible, t.block_q, t.block_k)
        keys = sum(min(last, S) - first for first, last, _ in blocks)
        k, v = ("args[1]", "args[2]") if t is tiles.forward else ("args[2]", "args[3]")
        assert kernels[name].reads[k] == keys * row(z.H, t)
        assert kernels[name].reads[v] == keys * row(z.Hv, t)
    by_keys = dict(dq_dk_dv=tiles.fused, dk_dv=tiles.dkv, dk=tiles.dk, dv=tiles.dv)
    for name, t in by_keys.items():
        if t is not None:
            blocks = columns_of(visible.T, t.block_k, t.block_q)
            rows = sum(min(last, T) - first for first, last, _ in blocks)
            kernel = kernels[f"flash_attention_{name}"]
            assert kernel.reads["args[0]"] == rows * row(z.H, t)
            assert kernel.reads["args[1]"] == rows * row(z.Hv, t)


DECODING = {
    "one token": (Sizes(B=2, T=1, S=512, N=8, K=2, H=64, Hv=64), {}),
    "heads of 96": (Sizes(B=2, T=1, S=512, N=8, K=2, H=96, Hv=96), {}),
    "a ragged window": (
        Sizes(B=2, T=3, S=500, N=8, K=2, H=64, Hv=128),
        dict(local_window_size=(150, 0), query_offset=300),
    ),
}


@pytest.mark.parametrize("call", DECODING)
def test_decoding_copies_a_key_once_for_all_heads_on_hopper(call, traceable):
    z, call = DECODING[call]
    x = arrays(z, "bfloat16")[:3]
    with as_if_on(GPUS["H200"]):
        t = explain(*x, implementation="hopper", **call).tiles.decode
        (kernel,) = observe(attention("hopper", **call), *x).values()
    visible = visible_of(z, call)
    ((first, last, _),) = columns_of(visible, z.T, t.block_k)
    keys = 2 * z.B * z.K * (min(last, -(-z.S // 8) * 8) - first)
    assert kernel.reads["args[1]"] == keys * elements.padded_size("bfloat16", z.H, t.swizzle)
    assert kernel.reads["args[2]"] == keys * elements.padded_size("bfloat16", z.Hv, t.swizzle)


@pytest.mark.parametrize("call", whole_but(DECODING, "a ragged window"))
def test_decoding_loads_a_key_once_for_all_heads_in_triton(call):
    z, call = DECODING[call]
    (kernel,) = observe(attention("triton", **call), *arrays(z, "float32")[:3]).values()
    visible = visible_of(z, call)
    ((first, last, _),) = columns_of(visible, z.T, 1)
    keys = 4 * z.B * z.K * (last - first)
    assert kernel.reads["args[0].key"] == keys * z.H
    assert kernel.reads["args[0].value"] == keys * z.Hv


def test_bytes_under_a_mask_with_data_are_counted_where_the_data_is_given():
    z = Sizes(B=2, T=64, S=64, N=1, K=1, H=16, Hv=16)
    q, k, v, _ = arrays(z, "float32")

    def attend(q, k, v, lengths):
        return attention("triton", TILES, key_value_seq_lengths=lengths)(q, k, v)

    (kernel,) = observe(attend, q, k, v, np.array([5, 64], np.int32)).values()
    assert kernel.reads["args[0].key"] == 4 * (5 + 64) * z.H * (z.T // 16)
    with pytest.raises(ValueError, match="pass arrays"):
        observe(attend, q, k, v, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_an_access_beyond_an_array_is_found():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 16, 16)]

    def call(x):
        whole, block = pl.BlockSpec((32,), lambda i: (0,)), pl.BlockSpec((16,), lambda i: (i,))
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct((32,), x.dtype), grid=2, in_specs=[whole], out_specs=block
        )(x)

    with pytest.raises(IndexError, match="beyond its shape"):
        observe(call, jax.ShapeDtypeStruct((30,), jnp.float32))
    (counted,) = observe(call, jax.ShapeDtypeStruct((32,), jnp.float32)).values()
    assert counted.reads.total() == counted.writes.total() == 128


def test_observed_values_are_those_of_the_interpreter(rng):
    q, k, v = qkv(rng, Sizes(B=1, N=2, K=1))
    stored, attend = [], attention("triton", TILES, is_causal=True)
    observe(attend, q, k, v, watch=lambda kernel, array, value: stored.append((array, value)))
    o = np.concatenate([value.ravel() for array, value in stored if array == "outputs[0]"])
    np.testing.assert_allclose(np.sort(o), np.sort(np.ravel(attend(q, k, v))), atol=1e-5)


def test_the_roofline_is_the_busiest_unit_of_each_kernel():
    gpu = GPUS["H200"]._replace(products=100, float32=10, cores=1, clock=5 / 16, bandwidth=2)
    by_memory = accounting.Cost(reads=6, matrix=100)
    by_products = accounting.Cost(matrix=700, exponentials=5, writes=2)
    assert gpu.roofline(dict(a=by_memory, b=by_products), "bfloat16") == 3 + 7
    assert gpu.roofline(dict(b=by_products), "float32") == 70
