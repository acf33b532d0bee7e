"""Dropout: the mask is as random as chance, the same everywhere, and what is dropped is dropped in
the gradients too."""

import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, qkv
from check import TOLERANCE, close, equal, value_and_gradients
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices
from selection import whole_but

from pallas_flash import dropout, dropout_mask, explain, flash_attention
from pallas_flash.context_parallel import Ring
from pallas_flash.kernels.blackwell.tile import LAYOUTS
from pallas_flash.kernels.classic import flash1, standard
from pallas_flash.kernels.mosaic import dropout as mosaic_dropout
from pallas_flash.kernels.mosaic import registers
from pallas_flash.kernels.triton import tuning as triton
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles
from pallas_flash.tiled import blockwise

# hopper has tests of its own, in jax's GPU interpreter
ALL = ("reference", "blockwise", "triton", "flash1", "standard")
KEY = jax.random.key(7)


# ---- the mask


@functools.cache
def masks(keys=20, heads=2, length=512):
    """[key, head, T, S] with mean 0 and deviation 1, at a rate of 26 in 256."""
    mask = jax.vmap(lambda key: dropout_mask(key, 0.1, (heads, length, length)))
    kept = 1 - 26 / 256
    return (np.asarray(mask(jax.random.split(jax.random.key(0), keys)), np.float32) - kept) / (
        kept * (1 - kept)
    ) ** 0.5


def deviations(x):
    """How many standard deviations the mean of independent x [key, ...] is off, for the worst
    key."""
    return np.abs(x.mean(tuple(range(1, x.ndim)))).max() * x[0].size ** 0.5


SUMS = {  # of the masks of 20 keys, numbers with mean 0 and deviation 1
    "of a head": lambda x: x.reshape(40, -1),
    "of a row": lambda x: x.reshape(-1, 512),
    "of a column": lambda x: x.swapaxes(2, 3).reshape(-1, 512),
    "the squares of the rows' sums": lambda x: (np.square(x.sum(3)) / 512 - 1) / 2**0.5,
    "the squares of the columns' sums": lambda x: (np.square(x.sum(2)) / 512 - 1) / 2**0.5,
    "of two heads": lambda x: x[:, 0] * x[:, 1],
    "of two keys": lambda x: x * np.roll(x, 1, axis=0),
    "of corners": lambda x: x[..., 1:, 1:] * x[..., :-1, :-1] * x[..., 1:, :-1] * x[..., :-1, 1:],
    **{
        f"of rows {n} apart": lambda x, n=n: x[..., n:, :] * x[..., :-n, :]
        for n in (1, 8, 16, 64, 128)
    },
    **{
        f"of columns {n} apart": lambda x, n=n: x[..., n:] * x[..., :-n]
        for n in (1, 8, 16, 64, 128)
    },
    **{
        f"of diagonals {n} apart": lambda x, n=n: x[..., n:, n:] * x[..., :-n, :-n]
        for n in (1, 8, 64)
    },
}


@pytest.mark.parametrize("name", SUMS)
def test_the_mask_is_as_random_as_chance(name):
    assert deviations(SUMS[name](masks())) < 5


def test_far_rows_and_columns_are_independent_beyond_16_bits():
    """What a counter of 16 bits each would repeat."""
    first, second = (np.uint32(x) for x in (123456789, 987654321))
    near, far = jnp.arange(512), jnp.arange(512) + 2**16
    of = lambda row, column: (
        np.asarray(dropout.keeps(128, first, second, row[:, None], column), np.float32) * 2 - 1
    )
    for other in (of(far, near), of(near, far), of(far, far)):
        assert deviations((of(near, near) * other)[None]) < 5


@pytest.mark.parametrize("rate, dropped", [(0.001, 1), (0.1, 26), (0.5, 128), (0.999, 255)])
def test_the_rate_is_taken_to_the_nearest_of_256_that_drops_some_and_not_all(rate, dropped):
    mask = np.asarray(dropout_mask(KEY, rate, (512, 512)))
    p = dropped / 256
    assert abs(mask.mean() - (1 - p)) < 5 * (p * (1 - p)) ** 0.5 / 512


def of_tiles(monkeypatch, block_q, block_k):
    t = Tiles(block_q, block_k)
    monkeypatch.setattr(
        blockwise,
        "tiles",
        lambda p: blockwise.Tiles(min(block_q, p.queries), min(block_k, p.keys), 1, p.dtype),
    )
    monkeypatch.setattr(triton, "tiles", lambda p: TritonTiles(t, t, t, t))
    monkeypatch.setattr(flash1, "tiles", lambda p: flash1.Tiles(block_q, block_k))
    monkeypatch.setattr(standard, "tiles", lambda p: standard.Tiles(block_q, block_k))


def seen_through(implementation, key, T=37, S=53, B=2, N=2, dtype=np.float32, **kw):
    """The mask of forward and backward: with equal weights and v = 1, o is P, and dv is P^T where
    do = 1."""
    q, k = np.zeros((B, T, N, 8), dtype), np.zeros((B, S, 1, 8), dtype)
    v = np.broadcast_to(np.eye(S, dtype=dtype)[:, None], (B, S, 1, S))
    do = np.broadcast_to(np.eye(T, S, dtype=dtype)[:, None], (B, T, N, S))

    @jax.jit
    def both(v, do):
        attend = lambda v: flash_attention(
            q, k, v, dropout_rate=0.3, dropout_rng=key, implementation=implementation, **kw
        )
        o, vjp = jax.vjp(attend, v)
        return o, *vjp(do)

    o, dv = both(v, do)
    return np.moveaxis(np.asarray(o) > 0, 2, 1), np.moveaxis(np.asarray(dv)[:, :, 0, :T], 1, 2)


def drops_the_same(implementation, T=37, S=53, atol=1e-6, **kw):
    """Forward and backward have the mask of dropout_mask."""
    expected = np.asarray(dropout_mask(KEY, 0.3, (2, 2, T, S)))
    forward, backward = seen_through(implementation, KEY, T, S, **kw)
    np.testing.assert_array_equal(forward, expected)
    kept = 1 - 77 / 256
    np.testing.assert_allclose(backward, expected.sum(1)[:, :S] / (S * kept), atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [(16, 16), (32, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("implementation", ALL)
def test_every_implementation_drops_the_same_weights_for_every_size_of_tile(
    implementation, tiles, monkeypatch
):
    of_tiles(monkeypatch, *tiles)
    drops_the_same(implementation)


@pytest.mark.gpu
@gpu_interpreter.needs_interpreter
@pytest.mark.parametrize(
    "deterministic, T, S", whole_but([(True, 100, 250), (False, 120, 128)], (False, 120, 128))
)
def test_the_hopper_kernels_drop_the_same_weights_in_both_schemes(deterministic, T, S):
    with gpu_interpreter.hopper_kernels():
        drops_the_same("hopper", T, S, atol=1e-4, dtype=np.float16, deterministic=deterministic)


@gpu_interpreter.needs_interpreter
@pytest.mark.parametrize("dropped", [1, 77, 128, 129, 255])
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_of_a_row_in_a_thread_are_those_of_the_mask(transposed, dropped):
    """Of P, and of dP, which the bits meet in another order."""
    row, column, shape = 256, 96, (128, 64)
    first_query, first_key = (column, row) if transposed else (row, column)
    seeds = jnp.array([3_000_000_007, 41], jnp.uint32)

    def kernel(seeds_gmem, p_gmem, ds_gmem):
        at = registers.ScoreTile(LAYOUTS, first_query, first_key, shape, transposed)
        ones = plgpu.layout_cast(jnp.ones(shape, jnp.float32), LAYOUTS.tile)
        of_head = mosaic_dropout.Dropout(dropped, seeds_gmem[0], seeds_gmem[1])
        p, marked = of_head.mark(ones, ones, at)
        p_gmem[...], ds_gmem[...] = p, mosaic_dropout.gradient(marked, ones, 0.0 * ones)

    with gpu_interpreter.parameters() as (interpret, _):
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        call = plgpu.kernel(kernel, out_type=[out, out], interpret=interpret)
        found = jax.jit(call)(seeds)
    mask = dropout.mask(dropped, seeds, first_query + 128, first_key + 128)
    expected = mask.T[row:, column:] if transposed else mask[row:, column:]
    for x in found:
        np.testing.assert_array_equal(x, expected[: shape[0], : shape[1]])


# ---- results and gradients


def dense(q, k, v, b, mask):
    """Attention with dropout, causal with an offset of 20, in a few lines; and its lse."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[3] ** -0.5 + b
    s = jnp.where(jnp.arange(s.shape[3]) <= jnp.arange(s.shape[2])[:, None] + 20, s, -jnp.inf)
    p = jnp.where(mask, jax.nn.softmax(s) / (1 - 77 / 256), 0)
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), jnp.swapaxes(
        jax.nn.logsumexp(s, axis=-1), 1, 2
    )


@pytest.mark.whole("reference", "triton", "standard")
@pytest.mark.parametrize("implementation", ALL)
def test_output_lse_and_gradients_are_those_of_a_dense_mask(implementation, rng, monkeypatch):
    of_tiles(monkeypatch, 16, 32)
    z = Sizes()
    q, k, v = qkv(rng, z)
    b = np.zeros((1, 1, 1, 1), np.float32) if implementation == "flash1" else bias(rng, "1N1S", z)
    mask = dropout_mask(KEY, 0.3, (z.B, z.N, z.T, z.S))

    def ours(q, k, v, b):
        options = dict(
            is_causal=True, query_offset=20, return_residual=True, implementation=implementation
        )
        b = None if implementation == "flash1" else b
        return flash_attention(q, k, v, b, dropout_rate=0.3, dropout_rng=KEY, **options)

    def results(f):
        return value_and_gradients(f, (0, 1, 2, 3))(q, k, v, b)

    for a, e in zip(
        jax.tree.leaves(results(ours)),
        jax.tree.leaves(results(lambda *x: dense(*x, mask))),
        strict=True,
    ):
        if implementation != "flash1" or a.shape != b.shape:
            close(a, e, TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", whole_but(["blockwise", "triton"], "blockwise"))
def test_half_precision_is_as_exact_as_its_dtype(implementation, rng, small_tiles):
    """Output and gradients are those of the reference in float32."""
    q, k, v = qkv(rng, Sizes(H=32, Hv=16), jnp.bfloat16)
    options = dict(dropout_rate=0.1, dropout_rng=KEY, is_causal=True)

    def run(implementation, *x):
        attend = lambda *x: flash_attention(*x, implementation=implementation, **options)
        return value_and_gradients(attend)(*x)

    exact = run("reference", *(x.astype(np.float32) for x in (q, k, v)))
    equal(run(implementation, q, k, v), exact, TOLERANCE["bfloat16"])


@needs_devices
@pytest.mark.whole
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_shared_mask_is_the_same_in_all_rows_and_heads_on_all_devices(kind, small_tiles):
    mesh = make_mesh(kind, data=2, context=2)
    T, B, N = 64, 2, 2
    q = np.zeros((B, T, N, 8), np.float32)
    v = np.broadcast_to(np.eye(T, dtype=np.float32)[:, None], (B, T, N, T))
    where = NamedSharding(mesh, P("data", "context"))
    context = Ring("context", batch="data")
    attend = lambda q, k, v, key: flash_attention(
        q,
        k,
        v,
        dropout_rate=0.3,
        dropout_rng=dropout.Shared(key),
        implementation="blockwise",
        context=context,
    )
    o = jax.jit(attend)(*(jax.device_put(x, where) for x in (q, q, v)), KEY)
    expected = np.broadcast_to(dropout_mask(KEY, 0.3, (T, T)), (B, N, T, T))
    np.testing.assert_array_equal(np.moveaxis(np.asarray(o) > 0, 2, 1), expected)


# ---- arguments


def test_raw_and_typed_keys_give_the_same_and_other_keys_another_mask(rng):
    q, k, v = qkv(rng, Sizes(T=19, S=23))
    attend = lambda key: np.asarray(
        flash_attention(q, k, v, dropout_rate=0.3, dropout_rng=key, implementation="reference")
    )
    np.testing.assert_array_equal(attend(KEY), attend(jax.random.key_data(KEY)))
    assert not np.array_equal(attend(KEY), attend(jax.random.fold_in(KEY, 0)))


def test_a_rate_of_zero_is_the_program_without_dropout(rng):
    q, k, v = qkv(rng, Sizes())
    program = lambda **kw: str(jax.make_jaxpr(lambda q: flash_attention(q, k, v, **kw))(q))
    assert program() == program(dropout_rate=0.0, dropout_rng=KEY) == program(dropout_rate=0)
    assert program() != program(dropout_rate=0.1, dropout_rng=KEY)


@pytest.mark.parametrize("shape", [5, (7,)])
def test_a_shape_that_is_not_that_of_weights_says_which_is(shape):
    with pytest.raises(
        ValueError, match=r"shape must be \(\*B, N, T, S\), that of the weights; got"
    ):
        dropout_mask(jax.random.key(0), 0.1, shape)


def test_explain_says_the_rate_that_is_taken():
    q = jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.bfloat16)
    text = explain(q, q, q, dropout_rate=0.1, dropout_rng=KEY, sinks=jnp.ones(4))
    assert "sinks, dropout 0.1016" in str(text)
