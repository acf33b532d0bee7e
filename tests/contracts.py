"""The contracts of every implementation, which the tests of each family inherit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, Sizes, bias, dense_mask, qkv
from check import check, cotangents, run

from pallas_flash import scores


def accepted(implementation, **options):
    """The options without those of which an earlier algorithm has no gradient."""
    without = dict(flash1=("bias", "score_mod"), standard=("score_mod",)).get(implementation, ())
    return {name: x for name, x in options.items() if name not in without}


PADDED = {  # what changes scores beside lengths, or sequences that leave rows at the end
    "nothing else": {},
    "causal, a window": dict(is_causal=True, local_window_size=(30, 0)),
    "a mask and a bias": dict(mask="BNTS", bias="1NTS"),
    "a soft cap and slopes": dict(logits_soft_cap=3.0, score_mod=scores.Alibi((0.1,) * Sizes().N)),
    "sequences and sinks": dict(sequences=True, sinks=np.full(Sizes().N, 0.5, np.float32)),
}


class Contracts:
    """A subclass runs them with the fixture `implementation` of its module."""

    @pytest.mark.parametrize("name", ["full", "documents_scattered_window", "everything", "varlen"])
    def test_sinks_join_the_softmax_with_gradients_in_rows_without_keys_too(
        self, name, implementation, rng
    ):
        z = Sizes()
        sinks = np.array([0.5, -3.0, np.inf, -np.inf, 6.0, -1e9], np.float32)
        kw = dict(sinks=sinks, logits_soft_cap=5.0) | MASKS[name](rng, z)
        o, lse, _ = check(rng, *qkv(rng, z), implementation, **kw)
        empty = np.asarray(lse) == sinks
        assert np.all(np.asarray(o)[empty] == 0) and np.all(empty[:, :, 2])
        assert np.any(empty[:, :, sinks < np.inf]) == (name != "full")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_is_as_exact_as_its_dtype(self, dtype, implementation, rng):
        z = Sizes(H=32, Hv=16)
        kw = dict(is_causal=True, scale=0.3, logits_soft_cap=2.5, mask=dense_mask(rng, "1NTS", z))
        kw |= accepted(implementation, bias=bias(rng, "1NTS", z).astype(dtype))
        *_, grads = check(rng, *qkv(rng, z, jnp.dtype(dtype)), implementation, **kw)
        assert {g.dtype for g in grads if g is not None} == {jnp.dtype(dtype)}

    @pytest.mark.whole("triton", "standard", "flash1")
    @pytest.mark.parametrize("garbage", [np.nan, np.inf])
    @pytest.mark.parametrize("name", PADDED)
    def test_garbage_in_padding_changes_no_bit(self, garbage, name, implementation, rng):
        z = Sizes()
        make = dict(mask=dense_mask, bias=bias)
        more = accepted(implementation, **PADDED[name])
        more = {name: make[name](rng, x, z) if name in make else x for name, x in more.items()}
        queries, keys = np.array([20, z.T], np.int32), np.array([z.S, 33], np.int32)
        if more.pop("sequences", False):
            padded = dict(varlen=[np.stack([0 * x, x // 2, x], 1) for x in (queries, keys)])
        else:
            padded = dict(query_seq_lengths=queries, key_value_seq_lengths=keys)
        q, k, v = qkv(rng, z)
        do, dlse = cotangents(rng, q, v)
        clean = run(q, k, v, do, dlse, implementation, **padded, **more)
        q[0, 20:], do[0, 20:], dlse[0, 20:] = garbage, garbage, garbage
        k[1, 33:], v[1, 33:] = garbage, -garbage
        dirty = run(q, k, v, do, dlse, implementation, **padded, **more)
        jax.tree.map(np.testing.assert_array_equal, clean, dirty)
