"""The types of a mask's blocks: what brute force says, what is skipped, and block masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import RULES, Sizes, qkv
from check import close, equal, largest_array, strict_64_bits, value_and_gradients
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put
from selection import whole_but

from pallas_flash import flash_attention, masks
from pallas_flash.checks.sizes import Sizes as CallSizes
from pallas_flash.masks import block_types, resolution
from pallas_flash.tiled import schedule
from scripts import draw_mask

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=37, S=53, N=4, K=2, H=8, Hv=8)


def gradients(mask, implementation):
    return value_and_gradients(
        lambda *x: flash_attention(*x, mask=mask, implementation=implementation)
    )


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


def test_blocks_of_intervals_are_those_of_the_pairs():
    mask = masks.KeyLengths([21, 50]) & masks.Window(30, 5)
    of_pairs = mask & masks.MaskMod(lambda b, h, q, k: k >= 0)
    types, expected = (
        masks.create_block_mask(m, 37, 53, block=8).second.block_types for m in (mask, of_pairs)
    )
    np.testing.assert_array_equal(types, expected)
    assert {*np.unique(types)} == {0, 1, 2}


@pytest.mark.parametrize(
    "block, block_q, block_k", [(8, 16, 32), (16, 8, 8), (8, 12, 20), (64, 16, 16)]
)
def test_a_map_of_other_blocks_tells_nothing_wrong(block, block_q, block_k):
    resolved_mask = masks.resolve([masks.MaskMod(RULES["holes by head"][0])], 1, 37, 53, 0)
    exact = np.asarray(block_types.compute(resolved_mask, 1, 3, 37, block_q, block_k))
    found = block_types.compute(resolved_mask, 1, 3, 37, block, block)
    recut = np.asarray(block_types.resize(found, block, 37, 53, block_q, block_k))
    assert exact.shape == recut.shape
    assert np.all((recut == exact) | (recut == block_types.PARTIAL))
    if block_q % block == block_k % block == 0:
        np.testing.assert_array_equal(recut, exact)


LISTED = {  # lists of blocks and what lies beside them, of so many queries and keys
    "whole blocks": ([masks.KeyLists([[[0]], [[1]]], 64, 64)], 128, 128),
    "over both ends": ([masks.KeyLists([[[0, 1]]] * 2, 64, 64)], 100, 90),
    "wider and lower blocks": ([masks.KeyLists([[[0]]] * 4, 128, 32)], 128, 256),
    "a rule": ([masks.KeyLists([[[0]]] * 4, 128, 32), masks.Dilated(3)], 128, 256),
}


@pytest.mark.parametrize("name", LISTED)
def test_the_table_of_lists_calls_no_block_full_or_empty_that_is_not(name):
    """In a full block kernels ask no mask_mod."""
    (lists, *others), T, S = LISTED[name]
    resolved_mask = masks.resolve(
        [lists.fitting(CallSizes((1,), dict(T=T, N=1, K=1))), *others], 1, T, S, 0
    )
    found = np.asarray(resolution.with_table(resolved_mask, 1, T).mask_mod.block_types)
    exact = np.asarray(block_types.compute(resolved_mask, 1, 1, T, 64, 64))
    assert np.all((found == exact) | (found == block_types.PARTIAL))
    assert np.any(found == block_types.FULL) == (name != "a rule")


def test_a_list_names_the_partial_blocks_then_the_full_ones():
    partial, visited, *numbers = np.asarray(
        schedule.visited_blocks(np.array([[2, 0, 1, 2, 1]], np.int8))
    )[0]
    assert (partial, visited, numbers) == (2, 4, [2, 4, 0, 3])


@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
@pytest.mark.parametrize("mapped", [False, True])
def test_empty_blocks_in_the_middle_are_skipped_in_both_passes(implementation, mapped, rng):
    q, k, v = qkv(rng, Z)
    # a block that no query sees: masked it would spoil every row
    k[:, 16:32] = v[:, 16:32] = np.nan
    mask = masks.MaskMod(lambda b, h, q, k: (k // 16 != 1) & (k <= q + 20))
    mask = masks.create_block_mask(mask, Z.T, Z.S, block=16) if mapped else mask
    found = gradients(mask, implementation)(q, k, v)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("implementation", whole_but(["blockwise", "triton"], "blockwise"))
def test_in_blocks_that_a_map_calls_full_the_rule_is_not_asked(implementation, rng):
    q, k, v = (x[:, :32] for x in qkv(rng, Z))
    mask = masks.create_block_mask(masks.MaskMod(lambda b, h, q, k: k < 0), 32, 32, block=16)
    mask = jax.tree.map(lambda x: jnp.full_like(x, block_types.FULL), mask)
    found, wanted = (gradients(m, implementation)(q, k, v)[1] for m in (mask, None))
    equal(found, wanted, 5e-6)


def test_a_joined_mask_and_its_map_are_data_of_one_program_of_many_layers(rng):
    x, traced = qkv(rng, Z._replace(K=4, S=37))[0], []

    @jax.jit
    def layers(x, mask):
        traced.append(mask)
        layer = lambda x, _: (
            x + flash_attention(x, x, x, mask=mask, implementation="blockwise"),
            None,
        )
        return jax.lax.scan(layer, x, None, length=2)[0]

    mask = lambda *lengths: ~masks.KeyLengths(np.int32(lengths)) | masks.Causal()
    one, other = layers(x, mask(5, 20)), layers(x, mask(14, 29))
    assert len(traced) == 1 and not np.array_equal(one, other)
    made = masks.create_block_mask(mask(5, 20), 37, 37, block=16, batch=2)
    assert made.counts() == dict(skipped=0, full=4, partial=14)
    assert repr(made).endswith("37 x 37 in blocks of 16: 0 skipped, 4 full, 14 partial)")
    close(layers(x, made), one, 5e-6)


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
    with strict_64_bits():
        found = flash_attention(q, k, v, mask=mapped, implementation=name)
    np.testing.assert_allclose(
        found, flash_attention(q, k, v, mask=longformer, implementation="reference"), atol=1e-5
    )


def test_block_types_serve_no_other_mask_mod_and_no_other_sizes(rng):
    q, k, v = qkv(rng, Z)
    all_seen, by_head = (
        masks.MaskMod(rule) for rule in (lambda b, h, q, k: k >= 0, lambda b, h, q, k: k >= h)
    )
    everything = masks.create_block_mask(all_seen, Z.T, Z.S, block=16)
    attend = functools.partial(flash_attention, implementation="blockwise")
    less = masks.Dilated(3)
    close(attend(q, k, v, mask=everything & less), attend(q, k, v, mask=less), 5e-6)
    other_sizes = r"for \(T, S, query_offset\) = \(37, 53, 0\); the call's are \(36, 53, 0\)"
    with pytest.raises(ValueError, match=other_sizes):
        flash_attention(q[:, :36], k, v, mask=everything)
    with pytest.raises(ValueError, match=r"the call's are \(37, 53, an array\)"):
        flash_attention(q, k, v, mask=everything, query_offset=np.zeros(2, np.int32))
    for heads in 3, 1:
        mask = masks.create_block_mask(by_head, Z.T, Z.S, heads=heads)
        text = rf"made for \(batch, heads\) = \(1, {heads}\); the call's are \(2, 4\)"
        with pytest.raises(ValueError, match=text):
            flash_attention(q, k, v, mask=mask)


def test_a_map_of_long_sequences_is_made_by_strips():
    resolved_mask = masks.resolve([masks.Dilated(3)], 1, 2**17, 2**17, 0)
    text = str(jax.make_jaxpr(lambda: schedule.block_types(resolved_mask, 1, 1, 2**17, 64, 64))())
    assert largest_array(text) <= 64 * 2**17


def test_on_a_mesh_a_map_goes_with_the_batch_rows_whatever_axes_they_lie_on(rng):
    mesh = make_mesh(b=2, h=2)
    x = [a.reshape(2, 2, *a.shape[1:]) for a in qkv(rng, Z._replace(B=4))]
    rule = masks.MaskMod(lambda b, h, q, k: (q // 16 + k // 16 + b + h) % 2 == 0)
    mask = masks.create_block_mask(rule, Z.T, Z.S, block=16, batch=4, heads=Z.N)
    f = jax.jit(lambda q, k, v: flash_attention(q, k, v, mask=mask, implementation="blockwise"))
    expected = flash_attention(*x, mask=rule, implementation="reference")
    for spec in P("b", None, None, "h"), P(None, "b"):
        close(f(*put(mesh, spec, *x)), expected, 5e-6)


def test_a_picture_is_drawn_and_says_what_is_saved(tmp_path, capsys):
    picture, at = tmp_path / "new" / "mask.png", ["--queries", "256", "--out"]
    draw_mask.main(["Causal() & Chunked(128)", *at, str(picture)])
    assert (
        "16 blocks, 10 skipped, 2 full, 4 partial; 62% of the work saved" in capsys.readouterr().out
    )
    assert picture.stat().st_size > 1000
    refused = {
        "Causal": "must be a mask such as",
        "np.foo": "makes no mask",
        "Documents([[1, 2]], [[1, 2]])": "error: ",
    }
    for text, told in refused.items():
        with pytest.raises(SystemExit):
            draw_mask.main([text, *at, str(picture)])
        assert told in capsys.readouterr().err
    for path, told in {picture / "x.png": "error: --out: ", "a.xyz": "'xyz' is not supp"}.items():
        with pytest.raises(SystemExit, match=told):
            draw_mask.main(["Causal()", *at, str(path)])


def test_the_title_of_a_picture_is_what_was_typed_not_its_numbers():
    mask, text = draw_mask.parse_mask("Documents(*[np.arange(1024)[None] // 100] * 2)" + " " * 99)
    block_mask = masks.create_block_mask(mask, 1024, 1024)
    title = draw_mask.draw(block_mask, f"{text}: {draw_mask.summary(block_mask)}")._suptitle
    assert len(title.get_text()) < 200


LENGTHS = masks.KeyLengths([3, 4])


@pytest.mark.parametrize(
    "args, options, text",
    [
        ((lambda b, h, q, k: q >= k, 5, 7), {}, r"a mask_mod as masks.MaskMod\(function\)"),
        ((masks.Causal(), 2, 8, 32, 32), {}, "takes mask, queries, keys; .* by name: block, query"),
        ((masks.Causal(),), dict(Q_LEN=5, KV_LEN=7), r"Did you mean queries\? Did you mean keys\?"),
        ((masks.Causal(), 5, 7), dict(BLOCK_SIZE=64), r"mean block\?"),
        ((masks.Causal(), 5.0, 7), {}, "queries must be a static int from 1 on; got the float 5.0"),
        ((masks.Causal(), 5, (7,)), {}, "keys must be a static int from 1 on; got tuple"),
        (
            (masks.Causal(), 5, 7),
            dict(block=0),
            "block must be a static int from 1 on; got the int 0",
        ),
        ((masks.Causal(), 5, 7), dict(batch=2.0), "batch must be a static int"),
        ((masks.Causal(), 5, 7), dict(heads=-1), "heads must be a static int"),
        ((masks.Causal(), 5, 7), dict(query_offset=1.5), "query_offset must be integers"),
        (
            (masks.Causal(), 5, 7),
            dict(query_offset=np.array([1, 2])),
            "query_offset must be a static int, the same for all batch rows",
        ),
        ((LENGTHS, 5, 7), dict(batch=3), "batch must be the rows of the mask's arrays, 2, or 1"),
        (
            (masks.KeyLengths("3"), 5, 7),
            {},
            "KeyLengths.lengths must be integers; got the text '3'",
        ),
        ((masks.KeyLengths(None), 5, 7), {}, "KeyLengths.lengths must be integers; got NoneType"),
        (
            (masks.Varlen([0, 6]), 5, 7),
            {},
            "Varlen.cu_seqlens_q must ascend, from 0 to the 5 tokens",
        ),
    ],
)
def test_a_block_mask_of_wrong_arguments_says_what_they_must_be(args, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        masks.create_block_mask(*args, **options)
