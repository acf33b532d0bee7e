"""Numbers hold at any size of logit: errors of output and gradients against float64, root mean
squares, in units of those of jax.nn in float32."""

import functools
import itertools
import re

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close, cotangents, program, run

from pallas_flash import flash_attention
from pallas_flash.choose import implementations
from pallas_flash.kernels.blackwell import tile
from pallas_flash.kernels.triton import tuning as triton
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles

pytestmark = pytest.mark.usefixtures("optimized")
SIZES = Sizes(B=1, T=37, S=53, N=3, K=3, Hv=11)  # several blocks of the small tiles
LOWEST = float(np.finfo(np.float32).min)
OUTPUTS = ("o", "dq", "dk", "dv", "dbias")


def large(size):
    """Logits that are spread over +-size."""
    return lambda q, k, hidden: (q * size, k, 0.0)


def far_off(size):
    """Logits that differ by a few, all of about -size or size."""
    return lambda q, k, hidden: (_with(q, np.sqrt(size)), _with(k, np.sqrt(size)), 0.0)


def whole_rows(bias):
    return lambda q, k, hidden: (q, k, np.where(hidden.any(-1, keepdims=True), bias, 0.0))


def parts(bias, others=0.0):
    return lambda q, k, hidden: (q, k, np.where(hidden, bias, others))


def _with(x, column):
    return np.concatenate([np.full_like(x[..., :1], column), x[..., 1:]], -1)


def norm(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


CASES = {f"logits of {size:.0e}": large(size) for size in (1e0, 1e2, 1e4, 1e6, 4e7, 1e9, 4e9)}
CASES |= {f"logits near {size:.0e}": far_off(size) for size in (1e2, 1e4, 1e6, 1e9)}
CASES |= {f"rows hidden by {bias:.1e}": whole_rows(bias) for bias in (-1e4, -1e9, LOWEST, -LOWEST)}
CASES |= {
    f"keys hidden by {bias:.1e}": parts(bias) for bias in (-1e4, -1e9, LOWEST, -np.inf, -LOWEST)
}
CASES["keys hidden by -3e38 and others by -2e38"] = parts(-3e38, others=-2e38)
LOGITS = {f"logits of {size:.0e}": large(size) for size in (1e0, 1e4, 1e9, 1e12, 1e20)}


@pytest.fixture
def alike_tiles(small_tiles, monkeypatch):
    """Forward and backward in tiles of one shape: on some CPUs a product's rounding depends on it,
    and P on that."""
    monkeypatch.setattr(triton, "tiles", lambda p: TritonTiles(*[Tiles(16, 16)] * 4))


def gradients(attend):
    """jit of what takes attend's operands and its cotangent."""

    def of(*x):
        o, vjp = jax.vjp(attend, *x[:-1])
        return o, *vjp(x[-1])

    return jax.jit(of)


JAX_NN = gradients(lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias, scale=1.0))


@pytest.mark.whole("triton", "standard")
@pytest.mark.parametrize("implementation", ["reference", "blockwise", "triton", "standard"])
def test_errors_are_at_most_twice_those_of_jax_nn(implementation, alike_tiles, rng):
    """One compiled program for all cases. Beside twice their error a few float32 roundings are let
    pass, of the result or of the terms that cancel in it: where one key takes all, dS is 0, and dP
    - delta is not."""
    assert not worse_than_jax_nn(implementation, 1.0, CASES, rng, with_bias=True)


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["reference", "blockwise", "triton"])
def test_without_a_bias_too_at_a_scale_that_rounds(implementation, alike_tiles, rng):
    """scale * q k^T and less the maximum must be no one multiply-add, whose result exceeds 0 by the
    rounding of the maximum."""
    assert not worse_than_jax_nn(implementation, 0.3, LOGITS, rng, with_bias=False)


@pytest.mark.whole("reference", "triton", "standard")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "blockwise", "triton", "standard"])
def test_sinks_biases_and_lse_go_to_the_ends_of_float32(
    implementation, with_bias, small_tiles, rng
):
    """Where base 2 does not reach, and where finfo.min hides whole rows: it is a number like
    any other."""
    q, k, v = qkv(rng, SIZES)
    do, dlse = cotangents(rng, q, v)
    hidden = rng.random((1, SIZES.N, SIZES.T, SIZES.S)) < 0.3
    rows = hidden[..., :1]
    sinks = [(1.0, -3e38, -LOWEST), (-np.inf, 3e38, -3e38)]
    sinks += [] if implementation == "reference" else [(LOWEST, 0.0, 2e38)]  # equal to some logits
    biases = (rows * LOWEST, hidden * 2e38, np.full(hidden.shape, LOWEST)) if with_bias else (None,)
    attend = lambda *x: flash_attention(
        *x[:4], sinks=x[4], return_residual=True, implementation=implementation
    )
    ours = gradients(attend)
    for bias, sink in itertools.product(biases, sinks):
        kw = dict(sinks=np.float32(sink)) | ({} if bias is None else dict(bias=np.float32(bias)))
        (o, lse), *found = ours(q, k, v, kw.get("bias"), kw["sinks"], (do, dlse))
        wanted, wanted_lse, expected = oracle.attention(q, k, v, do, dlse, **kw)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)
        for x, y in zip((o, *found), (wanted, *expected), strict=True):
            if y is not None:
                close(x, y, TOLERANCE["float32"])


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_a_score_mod_may_hide_by_the_lowest_number(implementation, small_tiles, rng):
    """A row of nothing else gives each key its share."""
    q, k, v = qkv(rng, SIZES)
    lowest = lambda score, b, h, q_idx, kv_idx: jnp.where(
        (q_idx == 1) | (kv_idx > 30), LOWEST, score
    )
    attend = lambda v: flash_attention(q, k, v, score_mod=lowest, implementation=implementation)
    (o, back), expected = jax.vjp(attend, v), v.mean(1)
    np.testing.assert_allclose(o[:, 1], expected, atol=1e-6)
    np.testing.assert_allclose(back(o.at[:].set(0).at[:, 1].set(1.0))[0], 1 / SIZES.S, rtol=1e-5)


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_a_soft_cap_holds_logits_that_overflow(implementation, small_tiles, rng):
    q, k, v = qkv(rng, SIZES)
    q, k = np.abs(q) * np.float32(1e25), np.sign(k[..., :1]) * np.abs(k) * np.float32(1e25)
    do, _ = cotangents(rng, q, v)
    o, _, (dq, dk, dv, _) = run(
        q, k, v, do, np.zeros(q.shape[:-1], np.float32), implementation, logits_soft_cap=30.0
    )
    wanted, _, (*_, wanted_dv, _) = oracle.attention(
        q, k, v, do, np.zeros(q.shape[:-1]), logits_soft_cap=30.0
    )
    close(o, wanted, TOLERANCE["float32"])
    close(dv, wanted_dv, TOLERANCE["float32"])
    assert not np.any(dq) and not np.any(dk)


def test_the_interpreters_products_round_alike_forward_and_backward(rng):
    """A CPU's products round by how many keys they take, and at logits so large P is 0, 1 or
    infinity by that."""
    q, k, v = qkv(rng, Sizes(B=1, T=16, S=53, N=1, K=1, H=72, Hv=5))
    do, _ = cotangents(rng, q, v)
    kw = dict(scale=1e30)
    *_, gradients = run(q, k, v, do, np.zeros(q.shape[:-1], np.float32), "triton", **kw)
    *_, expected = oracle.attention(q, k, v, do, np.zeros(q.shape[:-1]), **kw)
    assert all(np.isfinite(x).all() for x in gradients[:3])
    close(gradients[2], expected[2], TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
@pytest.mark.usefixtures("small_caches")
def test_decoding_too(implementation, dtype, rng):
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 2, 16)), dtype) for n in (1, 300, 300))
    attend = lambda q, name: flash_attention(q, k, v, scale=0.3, implementation=name)
    ours, reference = (
        jax.jit(functools.partial(attend, name=name)) for name in (implementation, "reference")
    )
    for size in (1.0, 1e4, 1e9, 1e12, 1e20):
        close(ours(q * size), reference(q * size), TOLERANCE[dtype])


@pytest.mark.usefixtures("small_caches")
def test_gradients_of_decoding_too(rng):
    """Where one key takes all, P of the backward is 1 only if it rounds the logits as the forward
    did."""
    q, k, v = (
        rng.normal(size=(2, n, heads, 16)).astype(np.float32)
        for n, heads in ((8, 8), (300, 1), (300, 1))
    )
    do, _ = cotangents(rng, q, v)
    ours = gradients(
        lambda q, k, v: flash_attention(q, k, v, scale=0.3, implementation="blockwise")
    )
    for size in (1.0, 1e4, 1e9, 1e20):
        o, dq, dk, dv = ours(q * np.float32(size), k, v, do)
        wanted, _, expected = oracle.attention(
            q * np.float32(size), k, v, do, np.zeros(q.shape[:-1]), scale=0.3
        )
        terms = norm(do) * norm(v) * norm(k), norm(do) * norm(v) * size, 0
        close(o, wanted, TOLERANCE["float32"] * 10)
        for mine, want, term in zip((dq, dk, dv), expected, terms, strict=False):
            assert norm(mine - want) <= 1e-3 * max(norm(want), term), size


@pytest.mark.parametrize(
    "options", [dict(), dict(bias=True), dict(bias=True, logits_soft_cap=7.0)], ids=str
)
@pytest.mark.parametrize("tiles", ["few blocks", "many"])
def test_products_of_bfloat16_hold_at_any_size_too(tiles, options, request, rng):
    """scale * (q k^T - maximum), or with something between the two: nothing overflows, forward and
    backward, and dS errs by the rounding of what cancels in it."""
    if tiles == "many":
        request.getfixturevalue("small_tiles")
    q, k, v, do = (
        jnp.asarray(rng.normal(size=(1, n, 3, 16)), "bfloat16") for n in (37, 53, 53, 37)
    )
    bias = jnp.asarray(rng.normal(size=(1, 3, 37, 53)), "bfloat16") if options else None
    options = dict(scale=0.3, logits_soft_cap=options.get("logits_soft_cap"))
    attend = lambda name: (
        lambda q, k, v, bias: flash_attention(q, k, v, bias, implementation=name, **options)
    )
    ours, reference = (gradients(attend(name)) for name in ("blockwise", "reference"))
    for size in (1.0, 1e4, 1e9, 1e12, 1e20):
        terms = (0, norm(do) * norm(v) * norm(k), norm(do) * norm(v) * size, 0, norm(do) * norm(v))
        results = (jax.tree.leaves(run(q * size, k, v, bias, do)) for run in (ours, reference))
        for mine, wanted, term in zip(*results, terms, strict=False):
            mine, wanted = np.float32(mine) / size, np.float32(wanted) / size
            assert norm(mine - wanted) <= TOLERANCE["bfloat16"] / 4 * max(
                norm(wanted), term / size
            ), size


def worse_than_jax_nn(implementation, scale, cases, rng, with_bias):
    """What of the results and gradients, one compiled program for all cases, has an error more than
    twice jax.nn's."""
    options = dict(scale=scale, implementation=implementation)
    ours = gradients(lambda *x: flash_attention(*x[:3], x[3] if with_bias else None, **options))
    outputs, worse = OUTPUTS if with_bias else OUTPUTS[:-1], {}
    for name, case in cases.items():
        q, k, v = qkv(rng, SIZES)
        hidden = (rng.random((1, SIZES.N, SIZES.T, SIZES.S)) < 0.3) & (
            rng.random((1, SIZES.N, SIZES.T, 1)) < 0.5
        )
        q, k, bias = case(q, k, hidden)
        q, bias = np.float32(q), np.broadcast_to(np.float32(bias), hidden.shape)
        do, _ = cotangents(rng, q, v)
        o, _, expected = oracle.attention(
            q, k, v, do, np.zeros(q.shape[:-1]), scale=scale, bias=bias
        )
        results = (
            ours(q, k, v, jnp.asarray(bias), do),
            JAX_NN(q * np.float32(scale), k, v, jnp.asarray(bias), do),
        )
        dp = norm(np.einsum("btnh,bsnh->bnts", do, v))
        terms = dict(o=0, dq=dp * norm(k), dk=dp * norm(q), dv=0, dbias=dp)
        for of, wanted, mine, theirs in zip(outputs, (o, *expected), *results, strict=False):
            size = max(norm(wanted), terms[of])
            error, peer = (norm(x - wanted) / size for x in (mine, theirs))
            if not error <= 2 * peer + 4e-6:
                worse[f"{name}: {of}"] = f"{error:.2g}, jax.nn {peer:.2g}"
    return worse


@pytest.mark.whole("reference", "triton", "standard")
@pytest.mark.parametrize(
    "implementation", ["reference", "blockwise", "triton", "flash1", "standard"]
)
def test_keys_of_one_large_logit_share_the_gradient(implementation, small_tiles):
    """Of 8 equal logits of 1e9 each has P = 1/8, forward and backward."""
    q = k = jnp.full((1, 8, 1, 16), np.sqrt(1e9 / 16), jnp.float32)
    v = jnp.ones((1, 8, 1, 16))
    o, dv = jax.value_and_grad(
        lambda v: flash_attention(q, k, v, scale=1.0, implementation=implementation).sum()
    )(v)
    np.testing.assert_allclose(o, v.size, rtol=1e-6)
    np.testing.assert_allclose(dv, 1.0, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p_of_the_backward_is_that_of_the_forward_and_computed_once(dtype):
    """XLA sees it where no loop parts them: of seven products six are left, and of two exponentials
    one."""
    x = jax.ShapeDtypeStruct((8, 64, 8, 16), dtype)
    both = gradients(
        lambda q, k, v, bias: flash_attention(q, k, v, is_causal=True, implementation="blockwise")
    )
    program = both.lower(x, x, x, x, x).compile().as_text()
    assert (program.count(" dot("), program.count(" exponential(")) == (6, 1)


@pytest.mark.parametrize("blocks", ["one", "several"])
def test_a_block_of_all_keys_sums_its_delta_itself_and_o_need_not_be_read(
    blocks, rng, monkeypatch, request
):
    if blocks == "several":
        request.getfixturevalue("small_tiles")
    q, k, v = qkv(rng, Sizes(T=40, S=40), jnp.float32)
    with_lse = functools.partial(flash_attention, implementation="blockwise", return_residual=True)
    grad = lambda: jax.jit(jax.grad(lambda q: sum(jnp.sum(jnp.sin(x)) for x in with_lse(q, k, v))))(
        q
    )
    expected, right = grad(), implementations.BLOCKWISE
    # delta
    spoilt = lambda *args: right.backward(*args[:-1], args[-1] * jnp.nan)
    fakes.replace(monkeypatch.setattr, right, backward=spoilt)
    np.testing.assert_array_equal(grad(), expected if blocks == "one" else jnp.nan)


def test_where_one_key_holds_the_whole_row_queries_have_no_gradient(rng):
    q, k, v = qkv(rng, Sizes(T=40, S=40, Hv=64), jnp.float32)
    loss = lambda q: jnp.sum(jnp.sin(flash_attention(q * 1e9, k, v, implementation="blockwise")))
    assert not jnp.any(jax.jit(jax.grad(loss))(q))


def test_the_maximum_is_guarded_where_a_row_may_see_no_key_and_not_where_each_is_known_to_see_one():
    """Without the guard XLA's CPU library takes the product and the softmax of it in one call."""
    x = jnp.ones((2, 8, 2, 16))
    attend = lambda **kw: program(
        lambda x: flash_attention(x, x, x, implementation="blockwise", **kw), x
    )
    guarded = lambda **kw: re.search(rf"= max .*{str(LOWEST)[:8]}", attend(**kw))
    assert not any(
        guarded(**kw) for kw in (dict(), dict(is_causal=True), dict(local_window_size=(2, 0)))
    )
    assert all(
        guarded(is_causal=True, **kw)
        for kw in (dict(query_offset=-1), dict(key_value_seq_lengths=np.array([8, 0])))
    )
    assert all(
        guarded(**kw)
        for kw in (dict(bias=jnp.ones((1, 2, 8, 8))), dict(mask=jnp.ones((1, 2, 8, 8), bool)))
    )


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a GPU has the precision that no product may ask for"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(T=2, S=300)], ids=["many queries", "decoding"])
@pytest.mark.usefixtures("small_caches")
def test_no_product_leaves_its_precision_to_jax(sizes, dtype, implementation, rng):
    """On a GPU jax's default is TF32. No product on a CPU has it: one that asked would raise, when
    it is lowered."""
    q, k, v = qkv(rng, sizes, jnp.dtype(dtype))
    nearness = lambda table: lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx % 8]

    def outputs(q, k, v, sinks, table):
        options = dict(return_residual=True, is_causal=True, query_offset=300)
        o, lse = flash_attention(
            q,
            k,
            v,
            sinks=sinks,
            score_mod=nearness(table),
            implementation=implementation,
            **options,
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(lse), o

    sinks, table = np.ones(sizes.N, np.float32), np.ones((sizes.N, 8), np.float32)
    with jax.default_matmul_precision("TF32_TF32_F32"):
        with pytest.raises(ValueError, match="TF32"):
            jax.jit(jnp.dot).lower(table, table.T)
        jax.jit(jax.grad(outputs, argnums=(0, 1, 2, 3, 4), has_aux=True)).lower(
            q, k, v, sinks, table
        )
        jax.jit(outputs).lower(q, k, v, sinks, table)


@pytest.mark.parametrize(
    "dtype, lengths, rounded",
    [("bfloat16", None, True), ("bfloat16", [7], False), ("float16", None, False)],
)
def test_what_all_weights_multiply_is_rounded_by_the_product_and_what_is_added_to_is_not(
    dtype, lengths, rounded
):
    """Under lengths a loop over blocks of keys sums."""
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 16), dtype) for length in (128, 4096))
    attend = lambda q, k: flash_attention(
        q, k, k, key_value_seq_lengths=lengths, implementation="blockwise"
    )
    found = re.findall(
        r"dot_general.*-> tensor<1x2x128x16x(\w+)>", jax.jit(attend).lower(q, k).as_text()
    )
    assert set(found) == {"bf16" if rounded else "f32"}


def test_an_exp2_by_multiply_adds_errs_by_at_most_an_ulp_of_bfloat16():
    x = np.linspace(-126, 8, 2**20, dtype=np.float32)
    exp2, expected = jax.jit(tile.exp2), np.exp2(np.float64(x))
    error = np.asarray(exp2(x)) / expected - 1
    assert abs(error).max() <= tile.EXP2_ERROR and abs(error.mean()) < 1e-6
    narrow = [np.asarray(jnp.bfloat16(p)).view(np.int16) for p in (exp2(x), expected)]
    assert abs(narrow[0] - narrow[1]).max() <= 1
    tiny = np.linspace(-127, -126, 1000, dtype=np.float32)
    assert abs(exp2(tiny) - np.exp2(tiny)).max() < 2.0**-126
    np.testing.assert_array_equal(
        exp2(jnp.float32([-np.inf, LOWEST, -1000, -127, 0, 3, np.nan])), [0, 0, 0, 0, 1, 8, np.nan]
    )
