"""mask_mods: as by brute force in every implementation, their algebra, and what they capture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, Sizes, qkv
from check import check, close

from pallas_flash import explain, flash_attention, masks
from pallas_flash.masks import block_types

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)
Q, KV = np.arange(40)[:, None], np.arange(40)


def loss(q, k, v, mask, implementation):
    return jnp.sum(jnp.sin(flash_attention(q, k, v, mask=mask, implementation=implementation)))


def dense(mask, batch=1, heads=1, offset=0, T=40, S=40):
    """bool [B | 1, N | 1, T, S]"""
    resolved_mask = masks.resolve(masks.conjuncts(mask), batch, T, S, offset)
    return np.asarray(
        block_types.visible_pairs(resolved_mask, batch, heads, jnp.arange(T), jnp.arange(S))
    )


@pytest.mark.parametrize("name", RULES)
def test_a_rule_hides_what_brute_force_hides_with_all_gradients(name, implementation, rng):
    rule, kw = RULES[name]
    check(rng, *qkv(rng, Z), implementation, rule=rule, **kw)


ALGEBRA = {
    "and": (
        masks.Dilated(3) & masks.Causal() & masks.MaskMod(lambda b, h, q, k: k != 5),
        ((Q - KV) % 3 == 0) & (KV <= Q) & (KV != 5),
    ),
    "both in or": (
        (masks.Causal() & masks.Chunked(8)) | masks.Dilated(9),
        (KV <= Q) & (KV // 8 == Q // 8) | ((Q - KV) % 9 == 0),
    ),
    "far windows": (~masks.Window(2**31 - 1, 0), KV > Q),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_masks_join_as_sets_do(name):
    mask, expected = ALGEBRA[name]
    np.testing.assert_array_equal(dense(mask)[0, 0], expected)


def test_a_rule_counts_positions_from_the_offset():
    np.testing.assert_array_equal(
        dense(masks.Chunked(7) & masks.Dilated(2), offset=5)[0, 0],
        dense(masks.Chunked(7), offset=5)[0, 0] & ((Q + 5 - KV) % 2 == 0),
    )


def test_masks_compare_hash_and_print_by_what_they_say():
    assert masks.MaskMod(lambda b, h, q, k: q - k < 3) == masks.MaskMod(
        lambda batch, head, i, j: i - j < 3
    )
    kinds = [masks.Dilated(3), masks.Dilated(3), masks.Dilated(4), *[masks.Chunked(3)] * 2]
    assert len(set(kinds)) == 3
    either = masks.Window(8, 0) | masks.GlobalTokens(2)
    assert repr(either) == "(Window(left=8, right=0) | GlobalTokens(2))"
    assert repr(masks.Dilated(4) & ~masks.Chunked(2)) == "Dilated(4) & ~(Chunked(size=2))"
    q = jax.ShapeDtypeStruct((1, 40, 1, 8), jnp.float32)
    said = explain(q, q, q, mask=masks.Dilated(4), is_causal=True)
    assert "mask: causal, where Dilated(4)" in str(said)
    assert "MaskMod" in said.why_not["hopper"] or "bfloat16" in said.why_not["hopper"]


def test_calls_with_equal_rules_share_one_compiled_program(rng):
    q, k, v = qkv(rng, Z)
    traced = []

    @jax.jit
    def f(q, k, v, mask):
        traced.append(mask)
        return flash_attention(q, k, v, mask=mask, implementation="blockwise")

    for _ in range(2):
        f(q, k, v, masks.MaskMod(lambda b, h, q, k: q - k < 3))
    assert len(traced) == 1


ARRAY = np.ones((3, 3), bool)
NO_MASK_MODS = {
    "no function": (3, r"takes a function mask_mod\(b, h, q_idx, kv_idx\) -> bool; got the int 3"),
    "no bool": (lambda b, h, q, k: q - k, r"must return one bool for four scalars; got int32\[\]"),
    "many": (lambda b, h, q, k: jnp.arange(3) < k, r"one bool for four scalars; got bool\[3\]"),
    "too few": (lambda q, k: q >= k, r"is called once, .* takes 2 positional arguments"),
    "an if": (lambda b, h, q, k: q >= k and k > 2, r"TracerBool.*if, and, or need .*: use jnp"),
    "of NumPy": (lambda b, h, q, k: ARRAY[k], "NumPy takes no traced values: use"),
}
MISTAKES = {
    "types of an array": (
        lambda: masks.create_block_mask(ARRAY, 3, 3),
        TypeError,
        "an object of pallas_flash.masks, as",
    ),
    "or an array": (
        lambda: masks.Causal() | ARRAY,
        TypeError,
        r"\| joins two objects of pallas_flash.masks; got an array .*\. An array x becomes one as "
        r"masks.MaskMod\(lambda",
    ),
    "size": (
        lambda: masks.Chunked(0),
        ValueError,
        r"size must be a static int from 1 to .*; got the int 0",
    ),
    "stride": (
        lambda: masks.Dilated(True),
        ValueError,
        r"stride must be a static int .*; got the bool True",
    ),
}


@pytest.mark.parametrize("name", NO_MASK_MODS)
def test_what_is_no_mask_mod_raises(name):
    mask_mod, text = NO_MASK_MODS[name]
    with pytest.raises(TypeError, match=text):
        masks.MaskMod(mask_mod)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_was_expected(name):
    make, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        make()


# ---- arrays that a rule closes over ----


@pytest.mark.whole("reference")
def test_a_rule_may_read_arrays_traced_ones_too(implementation, rng):
    q, k, v = qkv(rng, Z)
    ids, limit = jnp.asarray(rng.integers(0, 3, (Z.B, Z.S)), jnp.int32), np.int32(9)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def f(ids, limit):
        same = masks.MaskMod(lambda b, h, q, k: (ids[b, q] == ids[b, k]) | (k < limit))
        return jax.grad(loss)(q, k, v, same, implementation)

    actual = f(ids, jnp.stack([limit, limit + 20]))
    wanted = jax.jit(jax.grad(lambda q, seen: loss(q, k, v, seen, "reference")))
    for gradient, n in zip(actual, (9, 29), strict=True):
        seen = (ids[:, : Z.T, None] == ids[:, None]) | (np.arange(Z.S) < n)
        close(gradient, wanted(q, seen[:, None]), 5e-6)


def test_kernels_take_numbers_that_are_traced_and_name_what_they_do_not_know(rng):
    q, k, v = qkv(rng, Z)
    within = lambda n, **kw: flash_attention(
        q, k, v, mask=masks.MaskMod(lambda b, h, q, k: abs(q - k) < n), **kw
    )
    close(
        jax.jit(functools.partial(within, implementation="triton"))(9),
        within(9, implementation="reference"),
        5e-6,
    )
    ids = jnp.arange(Z.S) // 5
    loop = lambda n, step, init, **kw: jax.lax.fori_loop(0, n, step, init, **kw)
    any_of = lambda b, h, q, k: jnp.any(ids[jnp.arange(3)] == q)
    in_a_loop = lambda b, h, q, k: loop(3, lambda i, n: n + ids[k + i], q) > 9
    erf = lambda b, h, q, k: jax.lax.erf(1.0 * ids[q]) < 0.5
    to_q = lambda b, h, q, k: loop(q, lambda i, n: n + i, k) % 3 > 0
    unrolled = lambda b, h, q, k: loop(4, lambda i, n: n + i, k, unroll=2) > q
    shape = r"got `scan` of an array of shape \(53,\)\. Index it before the loop or branch\. The"
    for reads, text in (
        (any_of, "captured arrays may only be indexed down to scalars"),
        (in_a_loop, shape),
        (erf, r"reads needs erf.*, which jax's Triton lowering does not know"),
        (to_q, r"reads needs while, which jax's Triton"),
        (unrolled, r"reads needs scan unrolled, which"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            flash_attention(q, k, v, mask=masks.MaskMod(reads, "reads"), implementation="triton")


# ---- elsewhere ----
