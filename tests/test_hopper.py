"""What is the Hopper kernels' alone, in jax's GPU interpreter: the products of each consumer,
programs of several tiles, what is copied and padded, and the tables of tiles."""

import functools
import re

import fakes
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close, program
from gpu_interpreter import needs_interpreter
from selection import whole_but

from pallas_flash import dropout, explain, flash_attention, masks
from pallas_flash.choose import implementations
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.blackwell.tile_sizes import ForwardTiles
from pallas_flash.kernels.hopper import forward, tuning
from pallas_flash.kernels.mosaic import elements, scheduler
from scripts.bench import results

attend = functools.partial(flash_attention, implementation="hopper")


def one_head(T, S, H=64, N=1):
    return Sizes(B=1, T=T, S=S, N=N, K=1, H=H, Hv=H)


def shaped(T, S, H, Hv=None, batch=1, heads=2, kv_heads=2):
    """Of query, key and value."""
    sizes = (T, heads, H), (S, kv_heads, H), (S, kv_heads, Hv or H)
    return [jax.ShapeDtypeStruct((batch, *size), jnp.bfloat16) for size in sizes]


def tiles(x, **options):
    return implementations.HOPPER.tiles(explain(*x, **options).problem)


def agrees(rng, z, detect_races=False, **options):
    """Output and log-sum-exp are the reference's."""
    x = qkv(rng, z, jnp.bfloat16)
    options |= dict(return_residual=True)
    wide = (a.astype(np.float32) for a in x)
    expected = flash_attention(*wide, **options, implementation="reference")
    with gpu_interpreter.hopper_kernels(detect_races) as races:
        o, lse = attend(*x, **options)
    close(o, expected[0], TOLERANCE["bfloat16"], "output")
    close(lse, expected[1], 1e-5, "lse")
    assert not races.found


# ---- products ----

rule = lambda seen: dict(mask=masks.MaskMod(seen))
MASK = np.zeros((1, 2, 384, 512), bool)
MASK[0, 1, 200::7, ::5] = True
# In how many blocks of 128 keys lie those that 64 queries, the rows of a consumer, see; a tile of
# three consumers that sees none visits one.
PRODUCTS = {  # queries, of how many heads, of 512 keys; options; blocks of all consumers
    "causal": (192, 1, dict(is_causal=True), 1 + 1 + 2),
    "window": (192, 1, dict(local_window_size=(0, 64)), 1 + 2 + 1),
    "a later window": (192, 1, dict(local_window_size=(0, 10), query_offset=100), 2 + 1 + 2),
    "lengths": (
        192,
        1,
        dict(is_causal=True, query_seq_lengths=np.array([64], np.int32)),
        1 + 1 + 1,
    ),
    "by distance": (576, 1, rule(lambda b, h, q, k: q // 192 == k // 128), 3 * 3),
    "by head": (384, 2, rule(lambda b, h, q, k: (q < 192) & (h == 1)), 3 * (1 + 1 + 4 + 1)),
    # all four blocks of the second tile of the second head
    "a mask": (384, 2, dict(mask=MASK), 3 * (1 + 1 + 1 + 4)),
}


@needs_interpreter
@pytest.mark.parametrize("name", whole_but(PRODUCTS, "a later window", "by head", "a mask"))
def test_a_consumer_multiplies_only_the_blocks_that_its_own_rows_need(name, rng, monkeypatch):
    queries, heads, options, blocks = PRODUCTS[name]
    products = gpu_interpreter.record_products(monkeypatch)
    agrees(rng, one_head(queries, 512, N=heads), **options)
    assert len(products) == 2 * blocks


# The tiles of a program see three blocks of keys and then one, or one and then three: its second
# tile is the first to use a slot.
FEWER = dict(is_causal=True, query_offset=-150)
MORE = dict(local_window_size=(100, 400), query_offset=200)
HEADS = dict(is_causal=True, query_offset=50)
SEVERAL = {  # sizes, options: tiles to a program
    "fewer, 128": (one_head(500, 300, 128), FEWER, 2),
    "fewer, 64": (one_head(760, 300), FEWER, 2),
    "more, 128": (one_head(500, 300, 128), MORE, 2),
    "more, 64": (one_head(760, 300), MORE, 2),
    "heads, 128": (one_head(200, 300, 128, N=4)._replace(B=2, K=2), HEADS, 8),
    "heads, 64": (one_head(200, 300, N=4)._replace(B=2, K=2), HEADS, 8),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("name", whole_but(SEVERAL, "more, 128", "more, 64", "heads, 128"))
def test_a_program_that_goes_over_several_tiles_or_heads_has_no_race(name, rng, monkeypatch):
    monkeypatch.setattr(hardware, "processors", lambda: 1)
    z, options, count = SEVERAL[name]
    assert tiles(qkv(rng, z, jnp.bfloat16)).forward.tiles_per_program == count
    agrees(rng, z, detect_races=True, **options)


# ---- copies ----


def copied(x, **options):
    """The program of output and gradients, and the shapes of 4 axes that XLA copies in it."""
    f = functools.partial(attend, **options)
    do = jax.ShapeDtypeStruct((*x[0].shape[:3], x[2].shape[3]), x[0].dtype)
    with gpu_interpreter.hopper_kernels():
        text = program(lambda *x: jax.vjp(f, *x[:3])[1](x[3]), *x, do)
    copies = "pad|slice|dynamic_slice|select_n|gather|concatenate"
    return text, re.findall(rf"\w+\[(\d+,\d+,\d+,\d+)\] = (?:{copies})\[?", text)


@needs_interpreter
@pytest.mark.parametrize("deterministic", [True, False])
def test_of_arrays_that_end_at_lengths_no_more_than_a_block_is_copied(deterministic):
    lengths = np.array([300, 7], np.int32)
    lengths = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    x = shaped(512, 512, 64, batch=2, kv_heads=1)
    rows = {shape.split(",")[1] for shape in copied(x, deterministic=deterministic, **lengths)[1]}
    assert "512" not in rows and "128" in rows


@needs_interpreter
@pytest.mark.parametrize(
    "head, deterministic", [(80, True), (80, False), (96, True), (96, False), (40, True)]
)
def test_heads_that_are_no_row_of_the_table_are_neither_padded_nor_cut(head, deterministic):
    x = shaped(200, 200, head, kv_heads=1)
    text, copies = copied(x, is_causal=True, deterministic=deterministic)
    assert text.count("mpmd_map[") == (3 if deterministic else 2) and not copies


# Heads, options: whether the kernel of dQ sums delta, and XLA reads o nowhere
DELTA = {
    "heads of 64": ((64, 64), {}, True),
    "heads of 192 and 128": ((192, 128), dict(logits_soft_cap=2.0), True),
    "no room for o": ((192, 192), {}, False),
    "heads in two halves": ((272, 272), {}, False),
    "one kernel": ((64, 64), dict(deterministic=False), False),
    "sinks": ((64, 64), dict(sinks=np.zeros(2, np.float32)), False),
    "a bias": ((64, 64), dict(bias=np.zeros((1, 1, 72, 1), np.float32)), False),
    "a score_mod": ((64, 64), dict(score_mod=lambda s, *_: s + 1), False),
}


@needs_interpreter
@pytest.mark.parametrize("name", DELTA)
def test_xla_sums_delta_only_where_the_kernel_of_dq_does_not(name):
    sizes, options, sums_delta = DELTA[name]
    text, _ = copied(shaped(72, 72, *sizes), **dict(deterministic=True) | options)
    assert (re.search(r"reduce_sum\[\s*axes=\(3,\)", text) is None) == sums_delta


PADDED = {  # sizes of queries and keys, of heads: what explain says of them
    (1023, 77, 128, 128): "T from 1023 to 1024, S from 77 to 80",
    (1024, 80, 100, 64): "H from 100 to 112",
    (8, 16, 40, 24): None,
    (1, 1001, 128, 128): "S from 1001 to 1008",  # decoding
    (200, 264, 192, 128): None,
}


@needs_interpreter
@pytest.mark.parametrize("sizes", PADDED)
def test_explain_says_what_is_padded_and_nothing_else_is(sizes):
    x, padded = shaped(*sizes, batch=2), PADDED[sizes]
    sentence = f"XLA pads arrays in each call, {padded}"
    with gpu_interpreter.hopper_kernels():
        assert explain(*x, implementation="hopper").copies == (padded and sentence)
        assert (" pad[" in str(jax.make_jaxpr(attend)(*x))) == (padded is not None)


# ---- tiles ----

WIDTHS = {  # of the tiles, and their swizzle, and the sizes that arrays have
    (1, 1): (64, 64, 128, 8, 8),
    (40, 64): (64, 64, 128, 40, 64),
    (96, 96): (96, 96, 64, 96, 96),
    (192, 128): (192, 128, 128, 192, 128),
    (80, 24): (80, 32, 32, 80, 32),
    (65, 200): (80, 208, 32, 80, 208),
    (160, 32): (160, 32, 64, 160, 32),
    (120, 250): (128, 256, 128, 128, 256),
    # two consumers own half of the values' columns each
    (320, 320): (320, 320, 64, 320, 320),
    (300, 257): (304, 288, 32, 304, 272),
    (64, 384): (64, 384, 128, 64, 384),
}


@pytest.mark.parametrize("sizes", WIDTHS)
def test_tiles_are_no_wider_than_whole_columns_of_them_that_hold_the_heads(sizes):
    t = tiles(shaped(8, 8, *sizes)).forward
    arrays = (elements.padded_size("bfloat16", size, t.swizzle) for size in sizes)
    assert (t.width, t.value_width, t.swizzle, *arrays) == WIDTHS[sizes]


CAUSAL = dict(is_causal=True)
LENGTHS = dict(key_value_seq_lengths=np.array([7], np.int32))  # data, of which nothing is known
FUSED = {  # length, head size, options: whether one kernel has all gradients
    (2048, 64): (CAUSAL, True),
    (2048, 128): (CAUSAL, True),
    (2048, 129): (CAUSAL, False),
    (1024, 128): (CAUSAL, False),
    (512, 128): ({}, False),
    (1000, 128): (LENGTHS, True),
    (16384, 128): (dict(local_window_size=(512, 0)), False),
    (16384, 64): (dict(local_window_size=(1024, 0)), True),
}


@pytest.mark.parametrize("length, size", FUSED)
def test_one_kernel_is_taken_where_any_order_is_allowed_many_keys_are_seen_and_it_fits(
    length, size
):
    x, (options, fused) = shaped(length, length, size), FUSED[length, size]
    assert tiles(x, deterministic=True, **options).fused is None
    any_order = tiles(x, **options)
    assert (any_order.fused is not None) == fused == (any_order.dq is None)


def test_the_faster_backward_is_the_default_in_every_case_that_was_timed():
    timed = {
        name: {(x.case, x.T): x.tflops for x in rows} for name, rows in results.of_an_h100().items()
    }
    for (case, length), default in timed[results.BACKWARD].items():
        head = re.match(r"(\d+)(?:/(\d+))?", case)
        x = shaped(length, length, int(head[1]), int(head[2] or head[1]))
        options = (
            CAUSAL
            if "causal" in case
            else dict(local_window_size=(1023, 0))
            if "window" in case
            else {}
        )
        both = (tiles(x, deterministic=d, **options) for d in (False, True))
        deterministic = timed[results.DETERMINISTIC].get((case, length))
        if deterministic:
            assert len({*both}) == (1 if deterministic == default else 2), (case, length)


# Batch, heads, of keys, length: parts. 132 processors want 528 programs, and a program's queries
# are to take 18 MB of L2.
PARTS = {
    (1, 16, 16, 16384): 1,
    (4, 32, 8, 4096): 1,
    (4, 32, 8, 2048): 2,
    (1, 32, 8, 2048): 4,
    (2, 64, 8, 8192): 4,
    (1, 24, 8, 1024): 3,
}


@pytest.mark.parametrize("batch, heads, kv_heads, length", PARTS)
def test_a_group_of_heads_has_as_few_programs_as_keep_all_processors_busy_to_the_end(
    batch, heads, kv_heads, length, monkeypatch
):
    monkeypatch.setattr(hardware, "processors", lambda: 132)
    monkeypatch.setattr(tuning, "ONE_KERNEL_KEYS", 0)
    x = shaped(length, length, 128, batch=batch, heads=heads, kv_heads=kv_heads)
    t = tiles(x, is_causal=True, deterministic=False).fused
    assert t.group_parts == PARTS[batch, heads, kv_heads, length]


BOTTOM_RIGHT = dict(query_offset=269, **CAUSAL)
IN_LISTS = dict(mask=masks.Window(64, 64) | masks.GlobalTokens(4))  # of blocks


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("head, options", [(128, BOTTOM_RIGHT), (96, IN_LISTS)], ids=["128", "96"])
@pytest.mark.parametrize("parts", whole_but((1, 2, 4), 1, 2))
def test_a_group_of_heads_in_parts_has_the_gradients_of_the_whole_group(
    head, options, parts, rng, monkeypatch
):
    monkeypatch.setattr(hardware, "processors", lambda: parts)
    z = Sizes(B=1, T=131, S=400, N=4, K=1, H=head, Hv=head)
    x = qkv(rng, z, jnp.bfloat16)
    gradients = lambda f, x: jax.grad(lambda x: jnp.sum(f(*x, **options) ** 2))(x)
    wide = [a.astype(np.float32) for a in x]
    expected = gradients(functools.partial(flash_attention, implementation="reference"), wide)
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        assert tiles(x, deterministic=False, **options).fused.group_parts == parts
        found = gradients(functools.partial(attend, deterministic=False), x)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        close(a, b, TOLERANCE["bfloat16"], name)
    assert not races.found


H200, B200 = fakes.Device("NVIDIA H200"), fakes.Device("NVIDIA B200", "10.0", 148)
A100 = fakes.Device("NVIDIA A100-SXM4-80GB", "8.0", 108)
RTX_3090 = fakes.Device("NVIDIA GeForce RTX 3090", "8.6", 82)
# GPU, pairs of batch row and head, bytes and programs of each: pairs to a section
SECTIONS = {
    (H200, 256, 1 << 20, 8): 32,  # as many as L2 holds
    (B200, 256, 1 << 20, 8): 64,
    (A100, 256, 1 << 20, 8): 16,
    (RTX_3090, 256, 1 << 20, 64): 4,
    (H200, 256, 64 << 20, 8): 16,  # as keep three quarters of 132 processors busy
    (H200, 16, 64 << 20, 512): 1,
    (H200, 4, 1 << 20, 8): 4,
}


@pytest.mark.parametrize("gpu, pairs, size, programs", SECTIONS)
def test_a_section_has_what_l2_holds_but_enough_for_most_processors(gpu, pairs, size, programs):
    with jax.default_device(gpu):
        assert scheduler._section(pairs, size, programs) == SECTIONS[gpu, pairs, size, programs]


def test_a_section_may_be_of_the_l2_of_one_die(monkeypatch):
    """32 heads of 4 MB, whose 32 tiles of queries come section by section."""
    x = shaped(8192, 8192, 128, batch=2, heads=16, kv_heads=16)
    p, t = explain(*x, implementation="blockwise").problem, ForwardTiles(128, 128)
    monkeypatch.setattr(hardware, "l2_cache", lambda: 126 << 20)
    monkeypatch.setattr(hardware, "processors", lambda: 148)
    for section_mb, heads in ((None, 16), (45, 8)):
        work = [scheduler.query_tile(n, p, t, section_mb=section_mb) for n in range(17)]
        assert [16 * at.batch + at.head for at in work] == [n % heads for n in range(17)]


UNFIT = {
    "takes value_stages of 2 or more.*got 1": dict(k_wait="early", value_stages=1),
    "by 2 warpgroups.*got 3": dict(split=True, warpgroups=3),
    "whole tiles of 64 columns; got 2, 64": dict(split=True, warpgroups=2),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_tiles_by_which_the_forward_would_wait_for_ever_or_be_wrong_are_refused(reason):
    unfit = tiles(shaped(8, 8, 64)).forward._replace(**UNFIT[reason])
    with pytest.raises(ValueError, match=reason):
        forward.check(unfit, "bfloat16")


def test_explain_says_what_runs_by_blockwise_where_heads_are_too_wide_for_a_kernel():
    kernels, all_tiles = implementations.find("hopper"), tiles(shaped(8, 8, 64), deterministic=True)
    forward_alone = all_tiles._replace(dq=None, dkv=None, tangent=None)
    assert str(forward_alone) == f"forward {all_tiles.forward}"
    assert kernels.derivatives(forward_alone).endswith("; reverse and forward mode by blockwise")
    assert kernels.derivatives(all_tiles).endswith("of second by blockwise")


# Heads, what else takes shared memory: queries and keys of a block
WIDE = {
    (320, 320): (64, 64),
    (512, 512): (64, 32),
    (64, 512): (64, 64),
    (512, 256): (128, 32),
    (512, 256, "largest logits"): (64, 32),
    # what two consumers hand over leaves no room for 64 keys
    (88, 512): (64, 64),
    (88, 512, "a score_mod"): (64, 32),
    (384, 64): (128, 64),
}


@pytest.mark.parametrize("case", WIDE)
def test_blocks_of_wide_heads_are_as_large_as_shared_memory_allows(case):
    head, value, *more = case
    most = dict(return_max_logits="largest logits" in more, score_mod=lambda s, *_: s + 1)
    t = tiles(shaped(8, 8, head, value), **(most if more else {})).forward
    assert (t.block_q, t.block_k) == WIDE[case]
    assert t.split == (t.block_q == 64)


@pytest.mark.parametrize("head, block_k", [(128, 128), (192, 96), (256, 64)])
def test_random_words_of_dropout_are_shared_within_a_block(head, block_k):
    options = dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))
    assert tiles(shaped(8, 8, head), **options).forward.block_k == block_k
    assert block_k % dropout.UNIT == 0


# Heads, length: with two tiles to a program 132 processors would have more to do, or nothing; 64
# blocks of keys are many.
ROUNDS = {
    (8, 2048): 1,
    (32, 1024): 1,
    (32, 2048): 2,
    (128, 512): 2,
    (512, 512): 8,  # of two heads
    (1024, 128): 4,  # of four
    (128, 1024): 4,
    (128, 4096): 2,
    (128, 8192): 1,
}


@pytest.mark.parametrize("heads, length", ROUNDS)
def test_short_programs_go_over_several_tiles_where_all_processors_stay_busy(
    heads, length, monkeypatch
):
    monkeypatch.setattr(hardware, "processors", lambda: 132)
    x = shaped(length, length, 128, heads=heads, kv_heads=heads)
    assert tiles(x).forward.tiles_per_program == ROUNDS[heads, length]


@pytest.mark.parametrize("apart", [False, True])
def test_programs_of_several_heads_own_each_tile_once(apart):
    x = shaped(200, 300, 128, batch=3, heads=4, kv_heads=2)
    problem = explain(*x).problem
    t = tiles(x).forward._replace(tiles_per_program=4, heads_apart=apart)
    programs = range(scheduler.query_programs(problem, t.block_q, 4))
    owned = lambda program, n: scheduler.query_tile(jnp.int32(program), problem, t, 4, jnp.int32(n))
    works = {(i, n): tuple(map(int, owned(i, n))) for i in programs for n in range(4)}
    heads = {i: {head for (j, _), (_, head, *_) in works.items() if i == j} for i in programs}
    assert len({*works.values()}) == len(works) == 3 * 4 * 2
    assert heads[0] == ({0, 2} if apart else {0, 1})


def test_programs_of_unequal_numbers_of_tiles_are_refused():
    problem = explain(*shaped(3 * 128, 3 * 128, 128)).problem
    for tiles in 2, 9:  # 9 are those of three heads; there are two
        with pytest.raises(ValueError, match=f"got {tiles} to a program, of 3 to a head"):
            scheduler.query_programs(problem, 128, tiles)


@pytest.mark.parametrize(
    "sizes, together",
    [
        ((256, 256), True),
        ((512, 64), True),
        ((64, 512), True),
        ((320, 256), True),
        ((272, 320), False),
        ((192, 512), False),
        ((512, 512), False),
    ],
)
def test_dk_and_dv_have_one_kernel_where_registers_hold_both(sizes, together):
    t = tiles(shaped(8, 8, *sizes))
    kernels = [name for name in ("dkv", "dk", "dv") if getattr(t, name) is not None]
    assert kernels == (["dkv"] if together else ["dk", "dv"])
    assert t.dq is not None and t.fused is None


SPLIT, TOGETHER, ONE_BY_ONE = ("two consumers", "S and dP at once", "S, then dP")
SUMS = {  # of heads, and what else: who owns dK and dV of 64 keys, and what is computed at once
    (128, 128): TOGETHER,
    (128, 128, "soft cap"): TOGETHER,
    (192, 128): ONE_BY_ONE,
    (192, 128, "dropout"): ONE_BY_ONE,
    (192, 128, "documents"): ONE_BY_ONE,
    (192, 128, "soft cap"): SPLIT,
    (192, 128, "bias"): SPLIT,
    (192, 128, "score_mod"): SPLIT,
    (160, 160): ONE_BY_ONE,
    (64, 256): ONE_BY_ONE,
    (256, 64): ONE_BY_ONE,
    (136, 192): SPLIT,
    (192, 192): SPLIT,
}
CHANGES = {
    "dropout": dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)),
    "documents": dict(query_segment_ids=np.zeros((1, 8), np.int32)),
    "soft cap": dict(logits_soft_cap=2.0),
    "bias": dict(bias=np.zeros((1, 1, 8, 8), np.float32)),
    "score_mod": dict(score_mod=lambda s, *_: s + 1),
}


@pytest.mark.parametrize("case", SUMS)
def test_two_consumers_share_keys_only_where_one_has_no_registers_for_both_sums_and_scores(case):
    head, value, *change = case
    t = tiles(shaped(8, 8, head, value), **CHANGES[change[0]] if change else {}).dkv
    assert t.block_k == 64 * (1 if SUMS[case] == SPLIT else t.warpgroups)
    assert (t.split, t.s_before_dp) == (SUMS[case] == SPLIT, SUMS[case] == ONE_BY_ONE)
