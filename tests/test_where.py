"""Masks that are rules: what brute force says in every implementation, their algebra, and maps of
their blocks."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import RULES, Sizes, bias, qkv
from check import check, close
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import explain, flash_attention, masks, schedule
from pallas_flash.masks import block_types
from pallas_flash.masks.resolved_mask import ResolvedMask
from scripts import draw_mask

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)
Q, KV = np.arange(40)[:, None], np.arange(40)


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


@pytest.mark.parametrize("implementation", whole_but(["flash1", "standard"], "flash1"))
def test_the_earlier_algorithms_take_a_rule(implementation, rng):
    rule, kw = RULES["holes by head"]
    check(rng, *qkv(rng, Z), implementation, rule=rule, **kw)


@pytest.mark.whole("reference", "blockwise")
def test_a_rule_goes_with_a_bias_its_gradient_and_a_soft_cap(implementation, rng):
    rule, kw = RULES["holes by head"]
    check(
        rng,
        *qkv(rng, Z),
        implementation,
        rule=rule,
        bias=bias(rng, "1N1S", Z),
        logits_soft_cap=3.0,
        **kw,
    )


ALGEBRA = {
    "or": (
        masks.Window(2, 3) | masks.GlobalTokens(4),
        (Q - KV <= 2) & (KV - Q <= 3) | (Q < 4) | (KV < 4),
    ),
    "not": (~masks.Causal(), KV > Q),
    "and": (
        masks.Dilated(3) & masks.Causal() & masks.MaskMod(lambda b, h, q, k: k != 5),
        ((Q - KV) % 3 == 0) & (KV <= Q) & (KV != 5),
    ),
    "both in or": (
        (masks.Causal() & masks.Chunked(8)) | masks.Dilated(9),
        (KV <= Q) & (KV // 8 == Q // 8) | ((Q - KV) % 9 == 0),
    ),
    "chunks": (masks.Chunked(7), Q // 7 == KV // 7),
    "far windows": (~masks.Window(2**31 - 1, 0), KV > Q),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_masks_join_as_sets_do(name):
    mask, expected = ALGEBRA[name]
    np.testing.assert_array_equal(dense(mask)[0, 0], expected)


def test_a_rule_counts_positions_from_the_offset():
    np.testing.assert_array_equal(
        dense(masks.Chunked(7) & masks.Dilated(2), offset=5)[0, 0],
        dense(ALGEBRA["chunks"][0], offset=5)[0, 0] & ((Q + 5 - KV) % 2 == 0),
    )


def test_masks_compare_hash_and_print_by_what_they_say():
    assert masks.MaskMod(lambda b, h, q, k: q - k < 3) == masks.MaskMod(
        lambda batch, head, i, j: i - j < 3
    )
    assert (
        len(
            {
                masks.Dilated(3),
                masks.Dilated(3),
                masks.Dilated(4),
                masks.Chunked(3),
                masks.Chunked(3),
            }
        )
        == 3
    )
    assert (
        repr(masks.Window(8, 0) | masks.GlobalTokens(2))
        == "(Window(left=8, right=0) | GlobalTokens(2))"
    )
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


MISTAKES = {
    "no function": (
        lambda: masks.MaskMod(3),
        TypeError,
        r"takes a function mask_mod\(b, h, q_idx, kv_idx\) -> bool; got int",
    ),
    "no bool": (
        lambda: masks.MaskMod(lambda b, h, q, k: q - k),
        TypeError,
        r"must return one bool for four scalars; got int32\[\]",
    ),
    "many": (
        lambda: masks.MaskMod(lambda b, h, q, k: jnp.arange(3) < k),
        TypeError,
        r"one bool for four scalars; got bool\[3\]",
    ),
    "too few numbers": (
        lambda: masks.MaskMod(lambda q, k: q >= k),
        TypeError,
        r"is called once, .* takes 2 positional arguments",
    ),
    "an if": (
        lambda: masks.MaskMod(lambda b, h, q, k: q >= k and k > 2),
        TypeError,
        r"TracerBool.*if, and, or need .*: use jnp",
    ),
    "of NumPy": (
        lambda: masks.MaskMod(lambda b, h, q, k: np.ones(3, bool)[k]),
        TypeError,
        "NumPy takes no traced values: use",
    ),
    "a map of an array": (
        lambda: masks.create_block_mask(np.ones((3, 3), bool), 3, 3),
        TypeError,
        "an object of pallas_flash.masks, as",
    ),
    "or an array": (
        lambda: masks.Causal() | np.ones((3, 3), bool),
        TypeError,
        r"\| joins two objects of pallas_flash.masks; got ndarray. An array x becomes one as "
        r"masks.MaskMod\(lambda",
    ),
    "size": (
        lambda: masks.Chunked(0),
        ValueError,
        r"a chunk's size must be an int from 1 to .*; got 0",
    ),
    "stride": (
        lambda: masks.Dilated(True),
        ValueError,
        r"a stride must be an int from 1 to .*; got True",
    ),
}


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
        return jax.grad(
            lambda q: jnp.sum(
                jnp.sin(flash_attention(q, k, v, mask=same, implementation=implementation))
            )
        )(q)

    actual = f(ids, jnp.stack([limit, limit + 20]))
    dense = lambda q, seen: jnp.sum(
        jnp.sin(flash_attention(q, k, v, mask=seen, implementation="reference"))
    )
    wanted = jax.jit(jax.grad(dense))
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
    for reads, text in (
        (
            lambda b, h, q, k: jnp.any(ids[jnp.arange(3)] == q),
            "captured arrays may only be indexed down to scalars",
        ),
        (
            lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, n: n + ids[k + i], q) > 9,
            r"got `scan` of an array of shape \(53,\)\. Index it before the loop or branch\. The",
        ),
        (
            lambda b, h, q, k: jax.lax.erf(1.0 * ids[q]) < 0.5,
            r"reads needs erf.*, which jax's Triton lowering does not know",
        ),
        (
            lambda b, h, q, k: jax.lax.fori_loop(0, q, lambda i, n: n + i, k) % 3 > 0,
            r"reads needs while, which jax's Triton",
        ),
        (
            lambda b, h, q, k: jax.lax.fori_loop(0, 4, lambda i, n: n + i, k, unroll=2) > q,
            r"reads needs scan unrolled, which",
        ),
    ):
        with pytest.raises(NotImplementedError, match=text):
            flash_attention(q, k, v, mask=masks.MaskMod(reads, "reads"), implementation="triton")


# ---- blocks ----


@pytest.mark.parametrize(
    "T, S, block_q, block_k", [(40, 40, 8, 8), (37, 53, 16, 16), (37, 53, 8, 32), (16, 64, 16, 64)]
)
@pytest.mark.parametrize(
    "name", ["holes by head", "by batch, with lengths", "global tokens and a window"]
)
def test_every_block_is_told_empty_partial_or_full_as_brute_force_has_it(
    name, T, S, block_q, block_k
):
    rule, _ = RULES[name]
    found = block_types.compute(
        masks.resolve([masks.MaskMod(rule)], 2, T, S, 3), 2, 3, T, block_q, block_k
    )
    seen = oracle.visible(2, 3, T, S, dict(rule=rule, query_offset=3))
    padded = np.pad(seen, ((0, 0), (0, 0), (0, -T % block_q), (0, -S % block_k)))
    tiles = padded.reshape(2, 3, -(-T // block_q), block_q, -1, block_k)
    np.testing.assert_array_equal(
        np.broadcast_to(found, (2, 3, *found.shape[2:])), tiles.any((3, 5)) + tiles.all((3, 5)) * 1
    )


@pytest.mark.parametrize(
    "block, block_q, block_k", [(8, 16, 32), (16, 8, 8), (8, 12, 20), (64, 16, 16)]
)
def test_a_map_of_other_blocks_tells_nothing_wrong(block, block_q, block_k):
    resolved_mask = masks.resolve([masks.MaskMod(RULES["holes by head"][0])], 1, 37, 53, 0)
    exact = np.asarray(block_types.compute(resolved_mask, 1, 3, 37, block_q, block_k))
    recut = np.asarray(
        block_types.resize(
            block_types.compute(resolved_mask, 1, 3, 37, block, block),
            block,
            37,
            53,
            block_q,
            block_k,
        )
    )
    assert exact.shape == recut.shape
    assert np.all((recut == exact) | (recut == block_types.PARTIAL))
    if block_q % block == block_k % block == 0:
        np.testing.assert_array_equal(recut, exact)


def test_a_list_names_the_partial_blocks_then_the_full_ones():
    partial, visited, *numbers = np.asarray(schedule.lists(np.array([[2, 0, 1, 2, 1]], np.int8)))[0]
    assert (partial, visited, numbers) == (2, 4, [2, 4, 0, 3])


@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
@pytest.mark.parametrize("mapped", [False, True])
def test_empty_blocks_in_the_middle_are_skipped_in_both_passes(implementation, mapped, rng):
    q, k, v = qkv(rng, Z)
    # a block that no query sees: masked it would spoil every row
    k[:, 16:32] = v[:, 16:32] = np.nan
    mask = masks.MaskMod(lambda b, h, q, k: (k // 16 != 1) & (k <= q + 20))
    mask = masks.create_block_mask(mask, Z.T, Z.S, block=16) if mapped else mask
    f = jax.value_and_grad(
        lambda *x: jnp.sum(jnp.sin(flash_attention(*x, mask=mask, implementation=implementation))),
        argnums=(0, 1, 2),
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(f)(q, k, v)))


@pytest.mark.parametrize("implementation", whole_but(["blockwise", "triton"], "blockwise"))
def test_in_blocks_that_a_map_calls_full_the_rule_is_not_asked(implementation, rng):
    q, k, v = (x[:, :32] for x in qkv(rng, Z))
    mask = masks.create_block_mask(masks.MaskMod(lambda b, h, q, k: k < 0), 32, 32, block=16)
    mask = jax.tree.map(lambda x: jnp.full_like(x, block_types.FULL), mask)
    f = lambda mask: jax.grad(
        lambda *x: jnp.sum(jnp.sin(flash_attention(*x, mask=mask, implementation=implementation))),
        argnums=(0, 1, 2),
    )
    for actual, wanted in zip(jax.jit(f(mask))(q, k, v), jax.jit(f(None))(q, k, v), strict=True):
        close(actual, wanted, 5e-6)


def test_a_map_is_a_pytree_made_once_for_all_layers(rng):
    x = qkv(rng, Z._replace(K=4, S=37))[0]
    mask = masks.Causal() & masks.Dilated(2)

    @jax.jit
    def layers(x, mask):
        layer = lambda x, _: (
            x + flash_attention(x, x, x, mask=mask, implementation="blockwise"),
            None,
        )
        return jax.lax.scan(layer, x, None, length=2)[0]

    made = masks.create_block_mask(mask, 37, 37, block=16)
    assert made.counts() == dict(skipped=3, full=0, partial=6)
    assert repr(made).endswith("37 x 37 in blocks of 16: 3 skipped, 0 full, 6 partial)")
    close(layers(x, made), layers(x, mask), 5e-6)


def test_what_is_found_while_tracing_is_no_transfer_of_the_program(rng):
    q, k, v = map(jnp.asarray, qkv(rng, Z))
    # of no other test: what is found is kept
    mask = masks.MaskMod(lambda b, h, q, k: (q - k) % 7 != 5)
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        o = jax.jit(functools.partial(flash_attention, mask=mask, implementation="blockwise"))(
            q, k, v
        )
    finally:
        jax.config.update("jax_transfer_guard", None)
    close(o, flash_attention(q, k, v, mask=mask, implementation="reference"), 5e-6)


@pytest.mark.parametrize("name", ["blockwise", "triton"])
def test_a_block_mask_is_taken_where_promotion_is_strict(name, rng):
    q, k, v = qkv(rng, Z)
    longformer = masks.Window(9, 9) | masks.GlobalTokens(4)
    mapped = masks.create_block_mask(longformer, Z.T, Z.S, block=16)
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        found = flash_attention(q, k, v, mask=mapped, implementation=name)
    np.testing.assert_allclose(
        found, flash_attention(q, k, v, mask=longformer, implementation="reference"), atol=1e-5
    )


def test_a_map_serves_no_other_rule_and_no_other_sizes(rng):
    q, k, v = qkv(rng, Z)
    everything = masks.create_block_mask(
        masks.MaskMod(lambda b, h, q, k: k >= 0), Z.T, Z.S, block=16
    )
    less = masks.Dilated(3)
    close(
        *(
            flash_attention(q, k, v, mask=mask, implementation="blockwise")
            for mask in (everything & less, less)
        ),
        5e-6,
    )
    with pytest.raises(
        ValueError,
        match=r"was made for \(T, S, query_offset\) = \(37, 53, 0\); the call's are \(36, 53, 0\)",
    ):
        flash_attention(q[:, :36], k, v, mask=everything)
    with pytest.raises(ValueError, match=r"the call's are \(37, 53, an array\)"):
        flash_attention(q, k, v, mask=everything, query_offset=np.zeros(2, np.int32))
    by_head = masks.create_block_mask(masks.MaskMod(lambda b, h, q, k: k >= h), Z.T, Z.S, heads=3)
    with pytest.raises(
        ValueError, match=r"was made for \(batch, heads\) = \(1, 3\); the call's are \(2, 4\)"
    ):
        flash_attention(q, k, v, mask=by_head)
    of_the_first = masks.create_block_mask(masks.MaskMod(lambda b, h, q, k: k >= h), Z.T, Z.S)
    with pytest.raises(
        ValueError, match=r"was made for \(batch, heads\) = \(1, 1\); the call's are \(2, 4\)"
    ):
        flash_attention(q, k, v, mask=of_the_first)


def test_a_map_of_long_sequences_is_made_by_strips():
    resolved_mask = ResolvedMask(
        2**17,
        mask_mod=masks.resolve([masks.Dilated(3)], 1, 2**17, 2**17, 0).mask_mod,
    )
    text = str(jax.make_jaxpr(lambda: schedule.block_kinds(resolved_mask, 1, 1, 2**17, 64, 64))())
    sizes = [
        np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\[([\d,]+)\]", text)
    ]
    assert max(sizes) <= 64 * 2**17


# ---- elsewhere ----


def test_on_a_mesh_a_rule_counts_all_batch_rows_and_heads(rng):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    x = qkv(rng, Z)
    rule, _ = RULES["holes by head"]
    mask = masks.MaskMod(rule) & masks.MaskMod(lambda b, h, q, k: k != b)
    f = jax.jit(lambda q, k, v: flash_attention(q, k, v, mask=mask, implementation="blockwise"))
    placed = (jax.device_put(a, NamedSharding(mesh, P("b", None, "h"))) for a in x)
    close(f(*placed), f(*x), 5e-6)


SPREAD = {"heads": P("b", None, "h"), "rows": P("b", "h")}


@pytest.mark.parametrize("spread", whole_but(SPREAD, "rows"))
def test_on_a_mesh_a_rule_reads_arrays_that_lie_on_it(spread, rng):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    x = qkv(rng, Z._replace(T=40, S=40))
    ids, far = (
        np.sort(rng.integers(0, 3, (Z.B, 40))).astype(np.int32),
        np.array([3.0, 9, 0, 40], np.float32),
    )

    @jax.jit
    def gradients(q, k, v, ids, far):
        mask = masks.Causal() & masks.MaskMod(
            lambda b, h, q, k: (ids[b, q] == ids[b, k]) | (q - k < far[h])
        )
        loss = lambda *x: jnp.sum(
            jnp.sin(flash_attention(*x, mask=mask, implementation="blockwise"))
        )
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    places = *[SPREAD[spread]] * 3, P(), P()
    placed = (
        jax.device_put(a, NamedSharding(mesh, place))
        for a, place in zip((*x, ids, far), places, strict=True)
    )
    for actual, wanted in zip(gradients(*placed), gradients(*x, ids, far), strict=True):
        close(actual, wanted, 5e-6)


def test_on_a_mesh_a_map_goes_with_the_batch_rows_whatever_axes_they_lie_on(rng):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    x = [a.reshape(2, 2, *a.shape[1:]) for a in qkv(rng, Z._replace(B=4))]
    rule = masks.MaskMod(lambda b, h, q, k: (q // 16 + k // 16 + b + h) % 2 == 0)
    mask = masks.create_block_mask(rule, Z.T, Z.S, block=16, batch=4, heads=Z.N)
    f = jax.jit(lambda q, k, v: flash_attention(q, k, v, mask=mask, implementation="blockwise"))
    expected = flash_attention(*x, mask=rule, implementation="reference")
    for spec in P("b", None, None, "h"), P(None, "b"):
        close(f(*(jax.device_put(a, NamedSharding(mesh, spec)) for a in x)), expected, 5e-6)


def test_a_picture_is_drawn_and_says_what_is_saved(tmp_path, capsys):
    draw_mask.main(
        ["Causal() & Chunked(128)", "--queries", "256", "--out", str(tmp_path / "mask.png")]
    )
    assert (
        "16 blocks, 10 skipped, 2 full, 4 partial; 62% of the work saved" in capsys.readouterr().out
    )
    assert (tmp_path / "mask.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        draw_mask.main(["Causal"])


def test_a_program_with_symbols_takes_a_rule(rng):
    b, t = export.symbolic_shape("b, t")
    shape = lambda heads: jax.ShapeDtypeStruct((b, t, heads, Z.H), jnp.float32)
    f = jax.jit(
        lambda q, k, v: flash_attention(
            q, k, v, mask=masks.Dilated(3), is_causal=True, implementation="blockwise"
        )
    )
    program = export.export(f)(shape(Z.N), shape(Z.K), shape(Z.K))
    q, k, v = qkv(rng, Z._replace(S=Z.T))
    close(program.call(q, k, v), f(q, k, v), 5e-6)


def test_masks_of_every_kind_meet(rng):
    given = (
        masks.KeyLengths(np.array([30, 53], np.int32)),
        masks.Causal(),
        masks.Dilated(2),
        masks.PrefixLM(9),
        masks.Chunked(32),
    )
    mask = functools.reduce(operator.and_, given)
    q, k, v = qkv(rng, Z)
    actual, wanted = (
        flash_attention(q, k, v, mask=mask, implementation=name)
        for name in ("blockwise", "reference")
    )
    close(actual, wanted, 5e-6)
