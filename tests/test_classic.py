"""The earlier algorithms keep the contracts of the others, and FlashAttention's first holds its induction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
from cases import MASKS, SIZES, Sizes, arguments, bias, dense_mask, qkv
from check import check, close, run

from pallas_flash import explain, flash_attention
from pallas_flash.arguments import normalise
from pallas_flash.kernels.classic import flash1, standard

pytestmark = pytest.mark.usefixtures("quick_compile")

# Each contract of test_attention that asks for no bias, here on these implementations.
test_a_float_mask_counts_non_zero_as_true = test_attention.test_a_float_mask_counts_non_zero_as_true
test_a_row_that_sees_no_key_gives_zero_and_no_gradient = test_attention.test_a_row_that_sees_no_key_gives_zero_and_no_gradient
test_large_logits_neither_overflow = test_attention.test_large_logits_neither_overflow_nor_lose_the_maximum


@pytest.fixture(params=["standard", "flash1"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(standard, "tiles", lambda p: standard.Tiles(16, 32, online=p.batch == 1))
    monkeypatch.setattr(flash1, "tiles", lambda p: flash1.Tiles(16, 32))
    return request.param


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_oracles_output_and_gradients(name, implementation, rng):
    z = Sizes()
    check(rng, *qkv(rng, z), implementation, **MASKS[name](rng, z))


@pytest.mark.parametrize("name", SIZES)
def test_every_size_gives_the_oracles_output_and_gradients(name, implementation, rng):
    check(rng, *qkv(rng, SIZES[name]), implementation, is_causal=True, query_offset=3)
