"""mask_mods: as by brute force in every implementation, their algebra, and what they capture."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, Sizes, qkv
from check import check, close
from drawn_masks import Drawn

from pallas_flash import explain, flash_attention, masks

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)


def loss(q, k, v, mask, implementation):
    return jnp.sum(jnp.sin(flash_attention(q, k, v, mask=mask, implementation=implementation)))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_hides_what_brute_force_hides_with_all_gradients(name, implementation, rng):
    rule, kw = RULES[name]
    check(rng, *qkv(rng, Z), implementation, rule=rule, **kw)


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


# ---- masks that are joined ----


@pytest.mark.whole("triton")
@pytest.mark.parametrize("join", ["and", "or", "with a map"])
def test_several_sets_of_document_ids_hide_what_each_of_them_hides(implementation, join, rng):
    ids = lambda size: rng.integers(0, 2, (Z.B, size)).astype(np.int32)
    documents = [(ids(Z.T), ids(Z.S)) for _ in range(2)]
    mask = functools.reduce(operator.and_, [masks.Documents(*x) for x in documents])

    def seen(b, h, i, p, j):
        same = np.logical_and(*(x[b, i] == y[b, j] for x, y in documents))
        return same | (j > p) if join == "or" else same

    if join == "or":
        mask = mask | ~masks.Causal()
    if join == "with a map":
        mask = masks.create_block_mask(mask, Z.T, Z.S, block=16, batch=Z.B)
    segments = dict(query_segment_ids=ids(Z.T), key_value_segment_ids=ids(Z.S))
    check(rng, *qkv(rng, Z), implementation, drawn=Drawn(mask, seen), **segments)


def test_a_joined_mask_says_what_it_is_made_of_and_forgets_maps():
    mask = ~(masks.KeyLengths([3, 4]) & masks.create_block_mask(masks.Causal(), 8, 8))
    assert repr(mask) == "~(KeyLengths(lengths=[3, 4]) & Causal())"
    q = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.bfloat16)
    assert "where ~(KeyLengths(lengths=int32[2]) & Causal())" in str(explain(q, q, q, mask=mask))
    assert masks.Causal() | ~masks.Dilated(3) == masks.Causal() | ~masks.Dilated(3)


def test_positions_that_no_offset_says_go_with_rules_but_with_no_offset():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)
    packed = masks.Varlen(np.array([[0, 3, 8]]), np.array([[0, 5, 8]]))
    assert "where ~(Varlen(" in str(explain(q, q, q, mask=~packed & masks.Dilated(3)))
    with pytest.raises(ValueError, match="cannot be combined with query_offset"):
        explain(q, q, q, mask=~packed | masks.Causal(), query_offset=1)
