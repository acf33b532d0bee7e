"""merge_attention: calls over parts of the keys are the call over all of them, by the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from check import close, cotangents, strict_64_bits

from pallas_flash import flash_attention, merge_attention

Z = Sizes(B=2, T=47, S=53, N=4, K=2, H=8, Hv=5)
PARTS = slice(0, 20), slice(20, 21), slice(21, 53)
OFFSET = -9  # the first nine queries see no key, and others none of some parts


def in_parts(q, k, v, sinks=None):
    found = [
        flash_attention(
            q,
            k[:, part],
            v[:, part],
            is_causal=True,
            query_offset=OFFSET - part.start,
            sinks=sinks if part.start == 0 else None,
            return_residual=True,
        )
        for part in PARTS
    ]
    return merge_attention(*zip(*found, strict=True))


@pytest.mark.parametrize("name", ["no sinks", "sinks"])
def test_parts_of_the_keys_are_all_of_them_with_every_gradient(name, rng):
    x = qkv(rng, Z)
    do, dlse = cotangents(rng, x[0], x[2])
    kw = dict(is_causal=True, query_offset=OFFSET)
    if name == "sinks":
        x += (np.array([9, np.inf, -9, -np.inf], np.float32),)
        kw |= dict(sinks=x[3])
    o, lse, expected = oracle.attention(*x[:3], do, dlse, **kw)
    assert np.any(lse == (-np.inf if name == "no sinks" else 9))

    @jax.jit
    def run(x, cotangents):
        found, vjp = jax.vjp(in_parts, *x)
        return found, vjp(cotangents)

    (found, found_lse), gradients = run(x, (do, dlse))
    close(found, o, 1e-5)
    close(found_lse, lse, 1e-6)
    for dx, wanted in zip(gradients, expected[:3] + expected[4:], strict=True):
        close(dx, wanted, 1e-5)


def test_a_part_without_keys_counts_for_nothing_whatever_its_output(rng):
    o = rng.normal(size=(3, 2, 4, 5)).astype(np.float32)  # no batch axis
    lse = rng.normal(size=o.shape[:-1]).astype(np.float32)
    o[0, 0], lse[0, 0], lse[:, 1, 2] = np.nan, -np.inf, -np.inf

    @jax.jit
    def run(o, lse):
        merged, vjp = jax.vjp(merge_attention, o, lse)
        return *merged, *vjp((jnp.ones(merged[0].shape), jnp.zeros(merged[1].shape)))

    found, total, *gradients = run(o, lse)
    p = np.where(np.isneginf(lse), 0, np.exp(lse))
    sums = p.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        close(total, np.log(sums), 1e-6)
        share = np.nan_to_num(p / sums)[..., None]
    close(found, np.sum(share * np.nan_to_num(o), 0), 1e-6)
    close(gradients[0], np.broadcast_to(share, o.shape), 1e-6)
    assert np.all(np.isfinite(gradients[1])) and not np.any(gradients[1][:, 1, 2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_output_has_the_dtype_of_the_parts_and_the_log_sum_exp_is_wide(dtype, rng):
    with strict_64_bits():
        o = jnp.asarray(rng.normal(size=(2, 3, 4, 5)), dtype)
        lse = jnp.zeros((2, 3, 4), "float64" if dtype == "float64" else "float32")
        found, total = merge_attention([o, -o], [lse, lse])
        assert found.dtype == o.dtype and total.dtype == lse.dtype
        assert not np.any(found)
        close(total, np.full(lse.shape, np.log(2)), 1e-6)


O, LSE = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    "error, message, outputs, lses",
    [
        (TypeError, "outputs must be a sequence of arrays, one for each", len, [LSE]),
        (TypeError, r"lses\[0\] must be an array; got the text 'a'", [O], "a"),
        (ValueError, "got 2 outputs and 1 lses", [O, O], [LSE]),
        (ValueError, "got 0 outputs and 0 lses", [], []),
        (TypeError, r"float32 and, in outputs\[1\], float16", [O, O.astype("float16")], [LSE, LSE]),
        (TypeError, r"one floating dtype; got int32", [O.astype("int32")], [LSE]),
        (TypeError, r"lses\[1\] must be floating; got bool", [O, O], [LSE, LSE > 0]),
        (
            ValueError,
            r"in part 1, \(2, 3, 4, 6\) and \(2, 3, 4\)",
            [O, np.ones((2, 3, 4, 6), "f")],
            [LSE, LSE],
        ),
        (ValueError, r"in part 0, .* and \(2, 4, 3\)", [O], [LSE.swapaxes(1, 2)]),
        (ValueError, r"\[\*B, T, N, Hv\]", [O[0, 0]], [LSE[0, 0]]),
    ],
)
def test_what_does_not_fit_raises(error, message, outputs, lses):
    with pytest.raises(error, match=message):
        merge_attention(outputs, lses)
