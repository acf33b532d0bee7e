"""Masks that are any rule in the Hopper kernels, in jax's GPU interpreter: what the reference says,
by lists of blocks."""

import re

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close

from pallas_flash import explain, flash_attention, masks, scores
from pallas_flash.kernels import hopper

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)

LONGFORMER = masks.Window(40, 40) | masks.GlobalTokens(4)


def holes(numbers):
    """Reads a number for each head, asks for all indices, hides all keys from head 0 of row 1, and
    blocks here and there."""
    return masks.MaskMod(
        lambda b, h, q, k: (
            ((q // 64 + k // 64 + numbers[h]) % 3 > 0) & (h + 1 > b) | (h > 0) & (k < 4)
        )
    )


def documents(ids, far):
    """Reads a number for each query and each key, of the batch row, and a flag for each head and
    key."""
    ids, far = jnp.array(ids), jnp.array(far)
    return masks.MaskMod(lambda b, h, q, k: (ids[b, q] == ids[b, k]) | (q - k < 9) & far[h, k])


def neighbours(seen, turn):
    """Reads a flag for each pair, and then one at a place that this and a table by distance say."""
    seen, turn = jnp.array(seen), jnp.array(turn)
    return masks.MaskMod(
        lambda b, h, q, k: seen[b, q, k] | seen[h, k, turn[(q - k) % 7] + seen[b, q, k]]
    )


def joined(ids):
    """Reads lengths, ends of rows, and ids."""
    lengths, of_q, of_k = np.array([-3, 160]), ids[:, :131], ids[:, :205]
    unlike = (masks.KeyLengths(lengths) | masks.Causal()) & ~masks.Documents(of_q, of_k)
    return unlike | ~(masks.PrefixLM(np.array([40, 120])) & masks.QueryLengths(lengths - 50))


# all keys from the first 70 queries
HIDDEN = masks.MaskMod(lambda b, h, q, k: (q - k) % 5 * (q // 70) == 2 + h)
LENGTHS = dict(
    query_offset=np.array([50, -4], np.int32),
    query_seq_lengths=np.array([100, 131], np.int32),
    key_value_seq_lengths=np.array([205, 150], np.int32),
)
MORE = LENGTHS | dict(
    logits_soft_cap=3.0,
    sinks=np.array([0.5, -1.0], np.float32),
    score_mod=scores.Alibi((0.05, 0.02)),
)
IDS = np.sort(np.random.default_rng(0).integers(0, 5, (2, 400)), 1).astype(np.int16)
FAR = np.random.default_rng(1).random((2, 400)) < 0.1
PAIRS = np.random.default_rng(2).random((2, 300, 300)) < 0.4
TURN = np.arange(7, dtype=np.int16) * 31 % 7
DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))
CASES = {  # head size, whether the same bits each time, the mask, and what else
    "numbers by head, all that changes logits": (64, True, lambda: holes(jnp.array([0, 2])), MORE),
    "one kernel": (
        128,
        False,
        lambda: holes(jnp.array([1, 2])),
        LENGTHS | dict(local_window_size=(150, 40)),
    ),
    "known while tracing": (64, False, lambda: LONGFORMER, {}),
    "a list made before": (
        128,
        True,
        lambda: masks.create_block_mask(LONGFORMER, 131, 205),
        dict(is_causal=True),
    ),
    "arrays read by position": (
        64,
        True,
        lambda: documents(IDS, FAR),
        dict(is_causal=True, query_offset=74),
    ),
    "arrays read by pair": (64, True, lambda: neighbours(PAIRS, TURN), dict(query_offset=74)),
    "joined masks of every kind of array": (64, True, lambda: joined(IDS), LENGTHS),
    "arrays read by position, one kernel": (128, False, lambda: documents(IDS, FAR), LENGTHS),
    "queries that see nothing, dropout": (64, True, lambda: HIDDEN, DROPOUT),
    "halves of dK and dV": (
        192,
        True,
        lambda: HIDDEN,
        dict(is_causal=True, query_offset=80) | DROPOUT,
    ),
    "the widest": (256, True, lambda: LONGFORMER & masks.Dilated(2), {}),
}
FAST = "numbers by head, all that changes logits", "arrays read by position", "arrays read by pair"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(n, marks=pytest.mark.whole) for n in CASES if n not in FAST)]
)
def test_output_lse_and_all_gradients_are_the_references(name, rng):
    size, deterministic, mask, options = CASES[name]
    q, k, v = qkv(rng, Sizes(B=2, T=131, S=205, N=2, K=1, H=size, Hv=size), jnp.bfloat16)

    def attended(implementation, *x):
        def loss(q, k, v):
            more = dict(
                return_residual=True, implementation=implementation, deterministic=deterministic
            )
            o, lse = flash_attention(q, k, v, mask=mask(), **more, **options)
            seen = jnp.where(lse == -jnp.inf, 0, lse)
            return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(seen)), (o, lse)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*x)

    (_, (expected_o, expected_lse)), expected = attended(
        "reference", *(x.astype(np.float32) for x in (q, k, v))
    )
    for row in range(2 if "query_offset" in options and "query_seq_lengths" in options else 0):
        queries, keys = LENGTHS["query_seq_lengths"][row], LENGTHS["key_value_seq_lengths"][row]
        q[row, queries:], k[row, keys:], v[row, keys:] = np.nan, np.nan, np.nan
    with gpu_interpreter.hopper_kernels():
        (_, (o, lse)), found = attended("hopper", q, k, v)
    close(o, expected_o, TOLERANCE["bfloat16"], "output")
    close(lse, expected_lse, 1e-5, "lse")
    for name, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        close(x, y, TOLERANCE["bfloat16"], name)


# Of blocks of 192 queries by 128 keys: one to a tile; or all four of one tile of the second head,
# and one of each other.
BLOCKS = {
    "by distance": (masks.MaskMod(lambda b, h, q, k: q // 192 == k // 128), 3),
    "by head": (masks.MaskMod(lambda b, h, q, k: (q < 192) & (h == 1)), 1 + 1 + 4 + 1),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_only_blocks_that_some_pair_needs_are_multiplied(name, rng, monkeypatch):
    mask, blocks = BLOCKS[name]
    heads = 1 + ("head" in name)
    products = gpu_interpreter.record_products(monkeypatch)
    q, k, v = qkv(
        rng,
        Sizes(B=1, T=576 if heads == 1 else 384, S=512, N=heads, K=1, H=64, Hv=64),
        jnp.bfloat16,
    )
    with gpu_interpreter.hopper_kernels():
        o = flash_attention(q, k, v, mask=mask, implementation="hopper")
    close(
        o,
        flash_attention(*(x.astype(np.float32) for x in (q, k, v)), mask=mask),
        TOLERANCE["bfloat16"],
        "output",
    )
    # by three consumers; a tile that sees nothing visits one
    assert len(products) == 2 * 3 * blocks


@pytest.mark.whole
def test_there_is_no_race(rng):
    q, k, v = qkv(rng, Sizes(B=1, T=259, S=530, N=2, K=1, H=64, Hv=64), jnp.bfloat16)
    rule = holes(jnp.array([0, 2]))
    loss = lambda q, k, v: (
        flash_attention(q, k, v, mask=rule, implementation="hopper").astype(jnp.float32).sum()
    )
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    assert not races.found


BYTES = jnp.arange(8, dtype=jnp.uint8)
ROWS = jnp.ones((8, 8))
REFUSED = {
    "more than numbers of an array": (
        lambda b, h, q, k: jnp.sum(ROWS[q]) > k,
        "may only be indexed down to scalars.*; got `reduce_sum`",
    ),
    "numbers of 8 bits": (
        lambda b, h, q, k: BYTES[q] > BYTES[k],
        r"numbers of 8 bits \(u8\), for which Mosaic GPU",
    ),
    "what registers do not know": (
        lambda b, h, q, k: jnp.floor(q / 3) > k,
        "needs floor, which Mosaic GPU does not know",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rules_that_do_not_lower_are_refused_with_a_reason(name):
    rule, reason = REFUSED[name]
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    assert re.search(reason, explain(q, q, q, mask=masks.MaskMod(rule)).why_not["hopper"])
    with pytest.raises(NotImplementedError, match=reason):
        explain(q, q, q, mask=masks.MaskMod(rule), implementation="hopper")


def test_arrays_that_no_int32_counts_are_refused_with_a_reason():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)

    def reasons(seen):
        found.append(explain(q, q, q, mask=masks.MaskMod(lambda b, h, q, k: seen[q, k])).why_not)

    found = []
    jax.eval_shape(reasons, jax.ShapeDtypeStruct((2**16, 2**15), bool))
    for name in ("hopper", "triton"):
        reason = "an array of 2^31 elements or more, which int32 cannot index; got (65536, 32768)"
        assert reason in found[0][name]


def test_it_is_not_decoding():
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (1, 300))
    assert hopper.tiles(explain(q, k, k, mask=LONGFORMER).problem).decode is None
