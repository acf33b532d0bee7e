"""Which blocks blockwise visits, cuts and has in memory at a time, by the mask and the sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import equal, temporary_bytes, value_and_gradients
from test_masks import BANDS, Z

from pallas_flash import explain, flash_attention, masks
from pallas_flash.attention import normalised
from pallas_flash.tiled import blockwise
from pallas_flash.tiled.blockwise import Tiles, mask, tuning
from pallas_flash.tiled.blockwise.slices import Block


@pytest.mark.parametrize(
    "left, right, offset",
    [*BANDS, (None, None, 0), (None, 0, -9), (None, 0, 9), (2, 1, -7), (3, 3, 12)],
)
@pytest.mark.parametrize("block_q, block_k", [(8, 16), (16, 8), (32, 32)])
def test_blockwise_knows_which_blocks_all_rows_see_and_of_which_each_row_sees_a_key(
    block_q, block_k, left, right, offset
):
    v = masks.resolve([masks.Window(left, right)], 1, Z.T, Z.S, offset)
    problem = dataclasses.replace(normalised(*qkv(np.random.default_rng(0), Z))[0], resolved_mask=v)
    position, key = np.arange(Z.T)[:, None] + offset, np.arange(Z.S)
    seen = (key >= position - (np.inf if left is None else left)) & (
        key <= position + (np.inf if right is None else right)
    )
    tiles = Tiles(min(block_q, Z.T), min(block_k, Z.S), None, "float32")
    one = mask.find_band(problem, tiles.block_q, tiles.block_k)
    known, starts = mask.static_key_blocks(problem, tiles), range(0, Z.T, block_q)
    assert (one is None) == (known is not None)
    if one is not None:
        starts = [min(i, Z.T - block_q) for i in starts]
        known = [[one.key_block(v, Block(i, block_q))] for i in starts]
    for start, blocks in zip(starts, known, strict=True):
        rows = seen[start : start + block_q]
        for block, masked, some in blocks:
            tile = rows[:, block.start : block.start + block.size]
            assert block.start >= 0 and tile.shape[1] == block.size and (masked or tile.all())
            assert some <= tile.any(1).all() if one else some == tile.any(1).all()
            rows = np.where((key >= block.start) & (key < block.start + block.size), False, rows)
        assert not rows.any(), "what is seen is not visited"


@pytest.mark.parametrize(
    "T, S, N, K", [(300, 300, 8, 1), (1500, 64, 32, 4), (577, 577, 2, 2), (1000, 200, 8, 4)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blockwise_needs_no_loop_over_blocks_where_lengths_hide_some_of_few_keys(T, S, N, K, dtype):
    q, k = (
        jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for length, heads in ((T, N), (S, K))
    )
    problem = explain(q, k, k, key_value_seq_lengths=jax.ShapeDtypeStruct((2,), jnp.int32)).problem
    tiles = blockwise.tiles(problem)
    known = mask.static_key_blocks(problem, tiles)
    one = mask.find_band(problem, tiles.block_q, tiles.block_k)
    assert one.width == S if known is None else all(len(keys) == 1 for keys in known)


ALIKE = [  # T, S, K, mask
    (256, 256, 2, dict(local_window_size=(20, 0))),
    (303, 303, 1, dict(local_window_size=(9, 30))),
    (381, 390, 2, dict(local_window_size=(40, 3), query_offset=-10)),  # some rows see nothing
    (330, 440, 1, dict(local_window_size=(140, 3), query_offset=90)),
    (317, 317, 2, dict(is_causal=True, local_window_size=30)),
]


@pytest.fixture
def loops_over_few_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "UNROLLED", 1)
    monkeypatch.setattr(mask, "UNROLLED", 1)
    monkeypatch.setattr(tuning, "_remembered", tuning._choose)
    mask.find_band.cache_clear()
    yield
    mask.find_band.cache_clear()


@pytest.mark.parametrize("T, S, K, kw", ALIKE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_query_blocks_that_see_equally_many_keys_are_one_loop_and_exact(
    T, S, K, kw, dtype, loops_over_few_blocks, rng
):
    sizes = Sizes(T=T, S=S, N=2, K=K, H=8, Hv=8, B=1)
    q, k, v = (x.astype(dtype) for x in qkv(rng, sizes))
    bias = jnp.asarray(rng.standard_normal((1, 2, 1, S)), dtype) if dtype == "float32" else None
    found = explain(q, k, v, bias, implementation="blockwise", **kw)
    assert (
        mask.find_band(found.problem, found.tiles.block_q, found.tiles.block_k).width
        == found.tiles.block_k
        < S
    )

    def outputs(implementation, dtype, *x):
        return flash_attention(
            *(a.astype(dtype) for a in x), implementation=implementation, return_residual=True, **kw
        )

    x = (q, k, v) if bias is None else (q, k, v, bias)
    of = lambda *args: value_and_gradients(functools.partial(outputs, *args), range(len(x)))(*x)
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    equal(of("blockwise", dtype), of("reference", "float32"), tolerance)


def lowered(layers: int, T: int, **kw) -> str:
    """The program of the gradients of so many calls, each of which takes the output of the one
    before."""

    def stacked(q, k, v):
        for _ in range(layers):
            q = flash_attention(q, k, v, implementation="blockwise", **kw)
        return q.sum()

    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    return jax.jit(jax.grad(stacked, (0, 1, 2))).lower(x, x, x).as_text()


@pytest.mark.parametrize("window, at_a_time", [(64, 8), (300, 5)])
def test_a_longer_sequence_and_more_layers_have_no_more_products_in_the_program(window, at_a_time):
    """Seven of each block that runs at a time, and of those that are left over; in jax 0.10 all of
    them call one function."""
    of_matrices = r"dot_general .*batching_dims = \[0, 1\] x"  # not sums by row
    products = lambda *size: len(
        re.findall(of_matrices, lowered(*size, local_window_size=(window, 0)))
    )
    for T in (2048, 8192):
        n = T // 128
        assert products(2, T) in (7, 7 * (at_a_time + n % at_a_time))
    assert products(12, 2048) == products(2, 2048)


def test_blocks_that_run_at_a_time_have_no_more_scores_than_fit():
    steps = lambda heads, block_q, block_k: tuning.unrolled(
        Tiles(block_q, block_k, None, "float32"), (1, heads, 1)
    )
    assert [steps(4, 128, 192), steps(16, 128, 192), steps(4, 160, 8192)] == [6, 1, 1]


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(tuning, "_is_one_device", lambda: True)


@pytest.mark.parametrize("T, blocks", [(512, 4), (1024, 4), (2048, 8)])
def test_a_block_of_forward_and_backward_is_some_two_dozen_fusions_to_compile(
    T, blocks, one_device
):
    """The passes of its formulas are 17: eight products with q k^T twice, two exponentials, two
    reductions, a mask and its maximum, dS, and the sums of dK and dV. The others take slices."""
    x = jax.ShapeDtypeStruct((1, T, 4, 64), jnp.float32)
    attend = functools.partial(flash_attention, is_causal=True, implementation="blockwise")

    def both(q, k, v, do):
        o, vjp = jax.vjp(attend, q, k, v)
        return o, *vjp(do)

    program = jax.jit(both).lower(x, x, x, x).compile().as_text()
    kernels = re.findall(r" (?:fusion|dot|reduce|copy|custom-call)\(", program.split("ENTRY")[1])
    found = len(kernels) / blocks
    assert found <= 26, found


def test_few_blocks_under_a_window_are_not_a_loop():
    has_loop = lambda T: "stablehlo.while" in lowered(1, T, local_window_size=(64, 0))
    assert not has_loop(1024) and has_loop(1032)


def test_slices_of_blocks_that_are_in_no_loop_are_static():
    program = lowered(1, 512, local_window_size=(64, 0))
    assert "stablehlo.while" not in program
    assert "stablehlo.slice" in program and "stablehlo.dynamic_slice" not in program


def test_equal_parts_are_no_more_than_asked_for():
    for length in range(1, 2100, 7):
        size = tuning.even(length, 256)
        assert size % 8 == 0 and size <= 256 and -(-length // size) == -(-length // 256)


@pytest.mark.parametrize(
    "B, T, N, K, H, is_causal, dtype, with_backward",
    [
        (1, 2048, 4, 4, 64, False, "float32", True),  # blocks one after the other
        (1, 1024, 4, 4, 64, True, "float32", True),
        (1, 2048, 4, 4, 64, True, "bfloat16", True),
        # a loop over heads: all of them took 34 to 62 MiB
        (8, 256, 8, 8, 64, True, "bfloat16", True),
        (2, 300, 16, 16, 128, True, "bfloat16", True),
        (16, 128, 8, 8, 128, False, "float32", True),
        (32, 100, 16, 16, 96, True, "float32", False),
        pytest.param(
            *(16, 256, 16, 16, 64, False, "bfloat16", False),
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11), reason="XLA widens all operands before the loop"
            ),
        ),
        (1, 2048, 4, 2, 64, False, "float32", False),  # blocks one after the other
        (1, 2048, 4, 4, 64, True, "float32", True),
        (1, 4096, 1, 1, 64, True, "float32", False),
        (16, 32, 32, 4, 192, False, "float32", True),  # most of it is what is made of q and do
    ],
)
def test_blockwise_has_less_in_memory_at_a_time_than_malloc_maps_anew_in_each_call(
    B, T, N, K, H, is_causal, dtype, with_backward, one_device
):
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K))
    attend = lambda *qkv: flash_attention(*qkv, is_causal=is_causal, implementation="blockwise")
    run = jax.grad(lambda *qkv: attend(*qkv).sum(), (0, 1, 2)) if with_backward else attend
    assert temporary_bytes(run, q, k, k) < 2**25


@pytest.mark.parametrize(
    "T, S, G, is_causal, blocks",
    [
        (2048, 16, 1, True, 1),
        (256, 128, 1, True, 1),
        (4096, 77, 1, True, 1),
        (128, 128, 1, True, 2),
        (250, 128, 1, True, 2),
        (1024, 1024, 1, False, 1),
        (1500, 1500, 1, False, 2),
        (577, 577, 8, False, 3),
    ],
)
def test_queries_are_cut_where_a_mask_hides_much_or_their_scores_are_many(
    T, S, G, is_causal, blocks
):
    q, k = (
        jax.ShapeDtypeStruct((8, length, heads, 64), jnp.float32)
        for length, heads in ((T, 4 * G), (S, 4))
    )
    assert -(-T // explain(q, k, k, is_causal=is_causal).tiles.block_q) == blocks


def test_a_forward_that_no_backward_follows_takes_more_heads_at_a_time_and_explain_says_so(
    one_device,
):
    for T, is_causal, batch, alone in ((224, True, 8, "all"), (256, False, 16, r"\d+")):
        x = jax.ShapeDtypeStruct((batch, T, 8, 64), jnp.float32)
        tiles = explain(x, x, x, is_causal=is_causal).tiles
        assert (
            tiles.heads < (tiles.forward_heads or 64)
            and tiles.for_gradient().forward_heads == tiles.heads
        )
        found = (
            rf"by {T} keys, {tiles.heads} key/value heads at a time "
            rf"\({alone} where no backward follows\)"
        )
        assert re.search(found, str(tiles))


@pytest.mark.parametrize(
    "T, offset, kw",
    [
        (23, 108, dict(is_causal=True)),  # each query sees all keys but those of its chunk
        (50, 81, dict(is_causal=True, logits_soft_cap=20.0)),
        (37, 94, dict(local_window_size=(99, 3))),
        (41, 90, dict(is_causal=True, score_mod=lambda s, b, h, i, j: s - 0.01 * h * (i - j))),
    ],
)
def test_chunks_behind_a_long_cache_go_in_loops_and_equal_the_reference(
    T, offset, kw, monkeypatch, rng
):
    small_limits(monkeypatch)
    q, k, v = qkv(rng, Sizes(T=T, S=131, N=6, K=2, H=11, Hv=5, B=2))
    tiles = explain(q, k, v, implementation="blockwise", query_offset=offset, **kw).tiles
    assert tiles.block_k == 16

    attend = lambda name: (
        lambda *x: flash_attention(*x, implementation=name, query_offset=offset, **kw)
    )
    equal(
        *(value_and_gradients(attend(name))(q, k, v) for name in ("blockwise", "reference")), 2e-5
    )


def small_limits(monkeypatch):
    """Some dozens of keys are many, for loops on one device."""
    monkeypatch.setattr(tuning, "_is_one_device", lambda: True)
    monkeypatch.setattr(tuning, "_remembered", tuning._choose)
    monkeypatch.setattr(tuning, "LOOPS_ARE_FAST", True)
    limits = dict(KEYS=16, FEW_KEYS=96, MANY_KEYS=64, SCORES=2**7, STEP_SCORES=2**7, UNROLLED=2)
    for name, size in limits.items():
        monkeypatch.setattr(tuning, name, size)


LENGTHS = np.array([131, 40], np.int32)


@pytest.mark.parametrize(
    "kw",
    [
        dict(is_causal=True, query_offset=108),
        dict(),
        dict(logits_soft_cap=20.0, local_window_size=(99, 3), query_offset=100),
        dict(key_value_seq_lengths=LENGTHS, is_causal=True, query_offset=LENGTHS - 23),
        dict(
            query_segment_ids=np.tile(np.arange(23) // 9, (2, 1)),
            key_value_segment_ids=np.tile(np.arange(131) // 51, (2, 1)),
            sinks=np.array([0.5, 1, 2, 0, 1, 3], np.float32),
        ),
        dict(
            score_mod=lambda s, b, h, i, j: s - 0.01 * h * (i - j), is_causal=True, query_offset=90
        ),
        dict(dropout_rate=0.3, dropout_rng=jax.random.key(0)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_of_few_queries_copies_a_block_of_keys_at_a_time_and_equals_the_reference(
    dtype, kw, monkeypatch, rng
):
    small_limits(monkeypatch)
    x = [a.astype(dtype) for a in qkv(rng, Sizes(T=23, S=131, N=6, K=2, H=11, Hv=5, B=2))]
    tiles = explain(*x, implementation="blockwise", **kw).tiles
    assert tiles.chunk.in_place and tiles.chunk.block_k == 16
    assert not tiles.for_gradient().chunk
    if "key_value_seq_lengths" in kw:
        padding = jnp.arange(131)[None, :, None, None] >= LENGTHS[:, None, None, None]
        x[1:] = [jnp.where(padding, jnp.nan, a) for a in x[1:]]

    def attend(name, dtype):
        of = flash_attention(*(a.astype(dtype) for a in x), implementation=name, **kw)
        return of.astype("float32")

    found = attend("blockwise", dtype), attend("reference", "float32")
    equal(*found, 2e-5 if dtype == "float32" else 2e-2)


def test_a_text_alone_has_blocks_of_all_its_keys_and_a_chunk_behind_a_long_cache_loops(
    one_device,
):
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.float32) for n in (2048, 65536))
    find = lambda k, at: explain(q, k, k, is_causal=True, query_offset=at).tiles.block_k
    assert find(q, 0) == 2048
    assert find(k, 63488) == tuning.KEYS
