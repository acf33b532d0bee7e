"""The earlier algorithms keep the contracts of the others, and FlashAttention's first holds its
induction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from cases import SIZES, Sizes, qkv
from contracts import Contracts
from observation import attention, observe
from selection import whole_but

from pallas_flash import explain, flash_attention
from pallas_flash.kernels.classic import flash1, standard
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import online_softmax


@pytest.mark.whole("standard")
class TestContracts(Contracts):
    pass


FEW_MASKS = "window", "documents_scattered_window"


@pytest.mark.parametrize("name", whole_but(test_attention.FEW_MASKS, *FEW_MASKS))
def test_every_mask_gives_the_oracles_results(name, implementation, rng):
    test_attention.test_every_mask_gives_the_oracles_output_and_gradients(name, implementation, rng)


@pytest.mark.whole("standard")
@pytest.mark.parametrize("name", whole_but(SIZES, "more_queries", "head_256"))
def test_every_size_gives_the_oracles_results(name, implementation, rng):
    test_attention.test_every_size_gives_the_oracles_output_and_gradients(name, implementation, rng)


@pytest.fixture(params=["standard", "flash1"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(standard, "tiles", lambda p: standard.Tiles(16, 32))
    monkeypatch.setattr(flash1, "tiles", lambda p: flash1.Tiles(16, 32))
    return request.param


@pytest.mark.parametrize("letters", whole_but(["BNTS", "1N11", "BN1S", ".NT1"], "BNTS", "1N11"))
def test_a_bias_is_added_and_differentiated_by_standard_attention(letters, rng, monkeypatch):
    monkeypatch.setattr(standard, "tiles", lambda p: standard.Tiles(16, 32))
    with_bias = test_attention.test_every_shape_of_bias_and_mask_is_added_masked_and_differentiated
    with_bias(letters, "standard", rng)


def test_both_forms_of_the_softmax_give_the_same(rng):
    z = Sizes()
    attend = lambda online: attention(
        "standard", standard.Tiles(16, 32, online), is_causal=True, query_offset=-5
    )
    safe, online = (attend(form)(*qkv(np.random.default_rng(0), z)) for form in (False, True))
    np.testing.assert_allclose(safe, online, atol=1e-6)
    assert np.all(np.asarray(online)[:, :5] == 0)  # these rows see no key


def test_flash1_is_exact_for_the_keys_so_far_after_every_tile_of_keys(rng):
    """The induction of the paper's theorem 1, on the numbers that the kernel stores."""
    z, tiles = Sizes(B=1, N=1, K=1), flash1.Tiles(16, 16)
    q, k, v = qkv(rng, z)
    stored = {"outputs[0]": [], "outputs[1]": [], "outputs[2]": []}
    attend = attention("flash1", tiles, local_window_size=(9, 20))
    observe(attend, q, k, v, watch=lambda kernel, array, value: stored[array].append(value.ravel()))
    # 3 tiles of queries
    by_key_tile = lambda values: [
        np.concatenate(values[i : i + 3]) for i in range(0, len(values), 3)
    ]
    O, M, L = (by_key_tile(values) for values in stored.values())
    assert len(L) == 1 + 4  # the zeros, and after each of 4 tiles of keys

    i, j = np.arange(z.T)[:, None], np.arange(z.S)
    s = np.einsum("th,sh->ts", q[0, :, 0], k[0, :, 0], dtype=np.float64) * z.H**-0.5
    s = np.where((j >= i - 9) & (j <= i + 20), s, -np.inf)
    for n, (o, l, m) in enumerate(zip(O, L, M, strict=True)):
        prefix = s[:, : n * tiles.block_k]
        highest = prefix.max(1, initial=-np.inf)
        some = highest > -np.inf
        weights = np.exp(prefix[some] - highest[some, None])
        logits = LogBase.TWO.to_e(m[some])
        np.testing.assert_allclose(logits, highest[some], atol=1e-5)
        np.testing.assert_allclose(l[some], weights.sum(1), rtol=1e-5)
        expected = weights / weights.sum(1, keepdims=True) @ v[0, : n * tiles.block_k, 0]
        np.testing.assert_allclose(o.reshape(z.T, z.Hv)[some], expected, atol=1e-5)
        assert (
            np.all(l[~some] == 0)
            and np.all(m[~some] == online_softmax.LOWEST)
            and np.all(o.reshape(z.T, z.Hv)[~some] == 0)
        )


@pytest.mark.parametrize(
    ("sram", "head", "expected"),
    [(2**14, 64, (64, 64)), (2**15, 64, (64, 128)), (98304, 128, (128, 128))],
)
def test_flash1_tiles_by_the_paper(sram, head, expected):
    """B_c = ceil(M / 4 H), B_r = min(B_c, H); 192 to a power of two is 128."""
    q = jax.ShapeDtypeStruct((1, 1024, 1, head), jnp.bfloat16)
    assert flash1.tiles_for(explain(q, q, q).problem, sram)[:2] == expected


def test_they_run_by_name_only_and_say_what_they_cannot(rng):
    q, k, v = qkv(rng, Sizes())
    reasons = explain(q, k, v).why_not
    assert "by name" in reasons["standard"] and "by name" in reasons["flash1"]
    assert "standard" in str(explain(q, k, v, implementation="standard"))
    with pytest.raises(NotImplementedError, match="no gradient for a bias"):
        flash_attention(q, k, v, np.zeros((1, 1)), implementation="flash1")
