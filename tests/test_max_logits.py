"""return_max_logits: the largest logit of each row, in every implementation, and wherever a call
may be."""

import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MASKS, Sizes, arguments, qkv
from check import close
from selection import whole_but

from pallas_flash import explain, flash_attention, flash_attention_jvp

small_tiles = pytest.mark.usefixtures("small_tiles")
Z = Sizes()
LOW = np.finfo(np.float32).min


def far_is_less(s, b, h, q, k):
    """A score_mod of NumPy's numbers and of jax's, which hides keys of some heads."""
    return s * (1 + 0.1 * h) - 0.3 * abs(q - k) + 0.5 * b


def hidden(rng, z, value):
    """A bias of [B, 1, T, S] with such values, all of some rows."""
    bias = np.where(
        rng.random((z.B, 1, z.T, z.S)) < 0.3, value, rng.normal(size=(z.B, 1, z.T, z.S))
    ).astype(np.float32)
    bias[:, :, :5] = value
    return bias


# above all logits, among them, below them, and none
sinks = lambda z: np.resize(np.array([30, 1, -30, -np.inf], np.float32), z.N)
CASES = {
    "rows that see nothing": lambda rng, z: dict(is_causal=True, query_offset=-9),
    "sinks, and rows that see nothing": lambda rng, z: dict(
        is_causal=True, query_offset=-9, sinks=sinks(z)
    ),
    "sinks and a soft cap": lambda rng, z: dict(
        sinks=sinks(z), logits_soft_cap=2.0, local_window_size=(20, 3)
    ),
    "a bias of -inf": lambda rng, z: dict(bias=hidden(rng, z, -np.inf)),
    "a bias of the lowest number, and sinks": lambda rng, z: dict(
        bias=hidden(rng, z, LOW), sinks=sinks(z)
    ),
    "a score_mod": lambda rng, z: dict(
        score=far_is_less, is_causal=True, query_offset=11, logits_soft_cap=5.0
    ),
    "a negative scale": lambda rng, z: dict(scale=-1.5, is_causal=True, query_offset=3),
    "large logits": lambda rng, z: dict(scale=40.0, local_window_size=9),
    "dropped weights": lambda rng, z: dict(
        is_causal=True, dropout_rate=0.5, dropout_rng=jax.random.key(1)
    ),
    "everything": lambda rng, z: MASKS["everything"](rng, z) | dict(sinks=sinks(z)),
}


def attend(q, k, v, *, implementation, **kw):
    """The output without it, and what a call with it returns, from one program."""
    kw = arguments(kw)
    if (score := kw.pop("score", None)) is not None:
        kw["score_mod"] = score
    arrays = {name: kw.pop(name) for name in list(kw) if hasattr(kw[name], "shape")}

    @jax.jit
    def both(q, k, v, arrays):
        call = functools.partial(
            flash_attention, q, k, v, implementation=implementation, **arrays, **kw
        )
        return call(return_residual=True), call(return_residual=True, return_max_logits=True)

    return both(q, k, v, arrays)


# whose running maximum lags; test_kernels.py asks for it in the fast half
ON_HOPPER = pytest.param("hopper", marks=[gpu_interpreter.needs_interpreter, pytest.mark.whole])


@small_tiles
@pytest.mark.parametrize(
    "name", ["reference", "blockwise", "triton", "flash1", "standard", ON_HOPPER]
)
@pytest.mark.parametrize(
    "case", whole_but(CASES, "sinks, and rows that see nothing", "a score_mod", "a bias of -inf")
)
def test_it_is_the_oracles_and_changes_no_bit_beside_it(case, name, rng):
    z = Sizes(B=1, T=70, S=309, N=2, K=1, H=128, Hv=128) if name == "hopper" else Z
    q, k, v = qkv(rng, z, "bfloat16" if name == "hopper" else "float32")
    kw = CASES[case](rng, z)
    if name in ("flash1", "standard") and (("bias" in kw and name == "flash1") or "score" in kw):
        pytest.skip("it takes no bias, or no score_mod")
    if name == "hopper" and kw.get("scale", 1) < 0:
        pytest.skip("the kernels take the maximum before the scale")
    expected = oracle.max_logits(q, k, **kw)
    for x, lengths in ((q, "query_seq_lengths"), (k, "key_value_seq_lengths")):
        beyond = np.arange(x.shape[1]) >= kw.get(lengths, np.full(z.B, x.shape[1]))[:, None]
        x[beyond] = np.nan
    with gpu_interpreter.kernels(name):
        plain, (*same, found) = attend(q, k, v, implementation=name, **kw)
    for a, b in zip(plain, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert found.dtype == jnp.float32
    close(found, expected, 2e-6)


@pytest.mark.whole
@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("name", ["blockwise", "triton"])
def test_decoding_has_the_same_bits_beside_it(name, rng):
    x = qkv(rng, Sizes(T=2, S=301, N=4, K=2, H=64, Hv=64))
    plain, (*same, _) = attend(*x, implementation=name, is_causal=True, query_offset=299)
    jax.tree.map(np.testing.assert_array_equal, plain, tuple(same))


def test_it_comes_last_and_the_call_says_what_is_asked(rng):
    q, k, v = qkv(rng, Z)
    options = dict(sinks=sinks(Z), implementation="reference")
    o, lse, largest = flash_attention(
        q, k, v, return_residual=True, return_max_logits=True, **options
    )
    pair = flash_attention(q, k, v, return_max_logits=True, **options)
    assert type(pair) is tuple and len(pair) == 2
    np.testing.assert_array_equal(pair[1], largest)
    assert (
        largest.shape == lse.shape
        and flash_attention(q, k, v, return_max_logits=False, **options).shape == o.shape
    )
    assert "the largest logits" in str(explain(q, k, v, return_max_logits=True))
    with pytest.raises(TypeError, match="return_max_logits must be a static bool"):
        flash_attention(q, k, v, return_max_logits=1)


@small_tiles
@pytest.mark.whole
@pytest.mark.parametrize("name", ["blockwise", "reference", "triton"])
def test_it_has_no_gradient_and_the_backward_keeps_nothing_for_it(name, rng):
    q, k, v = qkv(rng, Z)
    call = functools.partial(flash_attention, sinks=sinks(Z), is_causal=True, implementation=name)
    both = lambda q, k, v: call(q, k, v, return_max_logits=True)
    alone = lambda q, k, v: jnp.sum(both(q, k, v)[1])
    beside = lambda q, k, v: (lambda o, largest: jnp.sum(o**2) + jnp.sum(largest**2))(
        *both(q, k, v)
    )
    plain = lambda q, k, v: jnp.sum(call(q, k, v) ** 2)
    zeros, found, again, expected = jax.jit(
        lambda *x: [
            jax.grad(f, (0, 1, 2))(*x) for f in (alone, beside, jax.checkpoint(beside), plain)
        ]
    )(q, k, v)
    assert not any(np.any(x) for x in zeros)
    for of in found, again:
        for a, b in zip(of, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    kept = lambda f: sorted(
        str(x.shape) for x in jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(f, *x)[1], q, k, v))
    )
    assert kept(lambda *x: both(*x)[0]) == kept(call)


@small_tiles
@pytest.mark.whole
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("name", ["blockwise", "reference"])
def test_in_forward_mode_its_tangent_is_zero_and_float64_has_its_own(name, dtype, tolerance, rng):
    with jax.enable_x64(dtype == "float64"):
        x, dx = ([a.astype(dtype) for a in qkv(rng, Z)] for _ in range(2))
        for of_sinks in {}, dict(sinks=sinks(Z)):
            options = dict(is_causal=True, implementation=name, return_max_logits=True, **of_sinks)
            (_, largest), (do, tangent) = flash_attention_jvp(x, dx, **options)
            assert largest.dtype == tangent.dtype == dtype
            close(largest, oracle.max_logits(*x[:2], is_causal=True), tolerance)
            assert not np.any(tangent) and np.any(do)
