"""The Mosaic kernels by mma, for GPUs from Ampere on, against the oracle in jax's GPU interpreter:
by cp.async, and by TMA as GPUs from Hopper on copy."""

import contextlib
import functools

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MASKS, Sizes, qkv
from check import check, close, cotangents, run, tangents
from selection import whole_but

from pallas_flash import explain, flash_attention, masks, scores
from pallas_flash.accounting import GPUS
from pallas_flash.kernels import ampere
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


def sizes(T, S, H, Hv=None, B=1, N=2, K=1):
    return Sizes(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv or H)


# Several tiles of queries and of keys, which hang over both ends unless they are whole. A tile is
# of 64 and 128 queries at 64, and of 32 and 64 of either at 128.
SMALL, LARGE = sizes(203, 180, 64, B=2), sizes(131, 200, 128, B=2)
CASES = {
    "whole tiles": (sizes(256, 128, 64), {}),
    "full": (LARGE, {}),
    "bottom right": (sizes(67, 330, 128, N=4, K=2), dict(is_causal=True, query_offset=263)),
    "window": (SMALL, dict(local_window_size=(40, 4), query_offset=np.array([30, -9], np.int32))),
    "documents": (SMALL, lambda rng: MASKS["documents_causal"](rng, SMALL)),
    "scattered documents": (LARGE, lambda rng: MASKS["documents_scattered"](rng, LARGE)),
    "prefix": (SMALL, lambda rng: MASKS["prefix_window_lengths"](rng, SMALL)),
    "varlen": (LARGE, lambda rng: MASKS["varlen_window_causal"](rng, LARGE)),
    "everything": (SMALL, lambda rng: MASKS["everything"](rng, SMALL)),
    "soft cap, sinks": (
        SMALL,
        dict(is_causal=True, logits_soft_cap=2.0, sinks=np.array([0.5, -np.inf], np.float32)),
    ),
    "heads of 11 and 72": (sizes(37, 53, 11, Hv=72), {}),
    "heads of 96": (sizes(67, 131, 96), dict(is_causal=True)),
    "heads of 32 and 128": (sizes(67, 131, 32, Hv=128), dict(is_causal=True)),
    "heads of 192 and 128": (sizes(67, 100, 192, Hv=128), dict(is_causal=True)),
    "heads of 256": (sizes(67, 100, 256), dict(is_causal=True)),
    "heads of 200 and 136": (sizes(37, 53, 200, Hv=136), {}),
    "one query, one key": (sizes(1, 1, 64, N=1), {}),
}
COPIES = pytest.mark.parametrize("tma", [False, True], ids=["cp.async", "TMA"])


@pytest.mark.gpu
@COPIES
@pytest.mark.parametrize(
    "name",
    whole_but(CASES, "full", "everything", "soft cap, sinks", "heads of 11 and 72", "heads of 256"),
)
def test_output_lse_and_gradients_are_the_oracles(name, tma, rng):
    z, kw = CASES[name]
    kw = kw(rng) if callable(kw) else kw
    dtype = jnp.float16 if "cap" in name else jnp.bfloat16
    with gpu_interpreter.ampere_kernels(tma=tma):
        check(rng, *qkv(rng, z, dtype), "ampere", return_max_logits=True, **kw)


# (q_idx - kv_idx) % 3 by head; what reads arrays, by query, by key and by both
BY_HEAD = np.array([3, 4], np.int32)
SLOPES = np.array([0.5, 0.25], np.float32)
MORE = {
    "a rule": lambda rng: dict(
        mask=masks.MaskMod(lambda b, h, q, k: (q - k) % jnp.asarray(BY_HEAD)[h] != 1),
        is_causal=True,
    ),
    "a mask": lambda rng: dict(mask=rng.random((1, 2, LARGE.T, LARGE.S)) < 0.6),
    "alibi": lambda rng: dict(score_mod=scores.Alibi(SLOPES), is_causal=True),
    "a bias": lambda rng: dict(
        bias=rng.normal(size=(1, 2, LARGE.T, LARGE.S)).astype(np.float32), logits_soft_cap=5.0
    ),
    "dropout": lambda rng: dict(dropout_rate=0.25, dropout_rng=jax.random.key(3)),
}
WIDE = {"dropout, heads of 160 and 136": sizes(37, 53, 160, Hv=136)}  # blocks of 16 keys


def more(name, rng):
    """Sizes, and what of MORE the name begins with."""
    return WIDE.get(name, LARGE), MORE[name.partition(",")[0]](rng)


@pytest.mark.gpu
@COPIES
@pytest.mark.parametrize("name", whole_but([*MORE, *WIDE], "a rule", "dropout", *WIDE))
def test_what_else_changes_scores_gives_what_it_gives_elsewhere(name, tma, rng):
    z, kw = more(name, rng)
    q, k, v = qkv(rng, z, jnp.bfloat16)
    do, dlse = cotangents(rng, q, v)
    with gpu_interpreter.ampere_kernels(tma=tma):
        found = run(q, k, v, do, dlse, "ampere", **kw)
    expected = run(q, k, v, do, dlse, "reference", **kw)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close(x, y, 3e-2, name)


# of which there are no tangents
WITHOUT = {"all": (), "no key": ("key",), "key": ("query", "value"), "value": ("query", "key")}
ALONG = [
    *((name, "all") for name in (*CASES, *MORE, *WIDE)),
    *(("bottom right", some) for some in WITHOUT),
]


@pytest.mark.gpu
@COPIES
@pytest.mark.parametrize(
    "name, some", whole_but(sorted({*ALONG}), ("everything", "all"), ("a bias", "all"))
)
def test_tangents_are_those_of_dense_attention(name, some, tma, rng):
    z, kw = CASES[name] if name in CASES else more(name, rng)
    kw = kw(rng) if callable(kw) else kw
    dtype = jnp.float16 if "cap" in name else jnp.bfloat16
    with gpu_interpreter.ampere_kernels(tma=tma):
        tangents(rng, *qkv(rng, z, dtype), "ampere", without=WITHOUT[some], **kw)


@pytest.mark.gpu
@COPIES
@pytest.mark.parametrize("head", whole_but([64, 128], 128))
def test_there_is_no_race(head, tma, rng):
    q, k, v = qkv(rng, sizes(200, 260, head, N=2), jnp.bfloat16)
    with gpu_interpreter.ampere_kernels(detect_races=True, tma=tma) as races:
        check(rng, q, k, v, "ampere", is_causal=True, query_offset=60)
        tangents(rng, q, k, v, "ampere", is_causal=True, query_offset=60)
    assert not races.found


@COPIES
def test_without_a_wait_there_is_a_race(tma, rng, monkeypatch):
    from pallas_flash.kernels.mma import tile  # an older jax lacks its layouts

    monkeypatch.setattr(tile.CopyRing, "wait", lambda ring, t: ring.at(t))
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 5.0)
    q, k, v = qkv(rng, sizes(128, 256, 64, N=1), jnp.bfloat16)
    # the interpreter may also give up, where nobody has seen that a block was there
    with (
        contextlib.suppress(jax.errors.JaxRuntimeError),
        gpu_interpreter.ampere_kernels(detect_races=True, tma=tma) as races,
    ):
        run(q, k, v, *cotangents(rng, q, v), "ampere")
    assert races.found


@pytest.mark.gpu
def test_garbage_in_padding_changes_nothing_and_the_same_call_gives_the_same_bits(rng):
    lengths = dict(
        query_seq_lengths=np.array([40, 150], np.int32),
        key_value_seq_lengths=np.array([300, 50], np.int32),
    )
    # the second tile of queries, and of keys, may hold nothing
    q, k, v = qkv(rng, sizes(150, 300, 64, B=2), jnp.bfloat16)
    do, dlse = cotangents(rng, q, v)
    call = lambda: run(q, k, v, do, dlse, "ampere", is_causal=True, **lengths)
    with gpu_interpreter.ampere_kernels():
        clean = call()
        q[0, 40:], k[1, 50:], v[1, 50:], do[0, 40:] = np.nan, np.inf, -np.inf, np.nan
        dirty = call()
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
def test_nan_in_padded_queries_and_their_tangents_changes_no_tangent_beside_sinks(rng):
    lengths, sinks = np.array([30, 67], np.int32), np.zeros(2, np.float32)
    options = dict(query_seq_lengths=lengths, sinks=sinks, return_residual=True)
    attend = functools.partial(flash_attention, implementation="ampere", **options)
    along = jax.jit(lambda x, dx: jax.jvp(attend, x, dx))
    x, dx = (qkv(rng, sizes(67, 70, 64, B=2), jnp.bfloat16) for _ in range(2))
    with gpu_interpreter.ampere_kernels():
        clean = along(x, dx)
        x[0][0, 30:] = dx[0][0, 30:] = np.nan
        dirty = along(x, dx)
    for a, b in zip(*map(jax.tree.leaves, (clean, dirty)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (a, b)))


HALF = jax.ShapeDtypeStruct((2, 300, 4, 64), "bfloat16")


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-4090", "RTX-5090", "H200"])
def test_each_gpu_is_given_its_copies(gpu):
    if ampere._why_not_here() and "jax" in ampere._why_not_here():
        pytest.skip(ampere._why_not_here())
    with as_if_on(GPUS[gpu]):
        choice = explain(HALF, HALF, HALF)
        named = explain(HALF, HALF, HALF, implementation="ampere")
    assert choice.implementation == ("hopper" if gpu == "H200" else "ampere")
    assert named.tiles.forward.tma == (gpu in ("RTX-5090", "H200"))
    padded = "XLA pads arrays in each call, T from 300 to 304, S from 300 to 304"
    assert named.copies == (padded if named.tiles.forward.tma else None)


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-5090"])
def test_lengths_of_no_whole_tiles_lower(gpu):
    if ampere._why_not_here() and "jax" in ampere._why_not_here():
        pytest.skip(ampere._why_not_here())
    attend = functools.partial(flash_attention, implementation="ampere")
    gradients = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))
    with as_if_on(GPUS[gpu]):
        for function, queries, keys in ((gradients, 203, 131), (attend, 1, 301)):  # and decoding
            q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), "bfloat16") for n in (queries, keys))
            jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",))


REFUSED = {
    "float32": (dict(dtype="float32"), "bfloat16 and float16; got float32"),
    "wide heads": (dict(H=264), "above 256 do not fit into registers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_it_refuses_by_a_sentence(name, monkeypatch):
    more, reason = REFUSED[name]
    monkeypatch.setattr(ampere, "_why_not_here", lambda: None)
    x = jax.ShapeDtypeStruct((1, 128, 2, more.get("H", 64)), more.get("dtype", "bfloat16"))
    with pytest.raises(NotImplementedError, match=reason):
        explain(x, x, x, implementation="ampere")


def test_where_shared_memory_holds_no_tangents_blockwise_has_them(monkeypatch):
    monkeypatch.setattr(ampere, "_why_not_here", lambda: None)
    x = jax.ShapeDtypeStruct((1, 128, 2, 256), "bfloat16")
    found = {}
    for gpu in "A100-80GB", "RTX-4090":
        with as_if_on(GPUS[gpu]):
            found[gpu] = explain(x, x, x, implementation="ampere")
            along = jax.jit(lambda x, dx: jax.jvp(flash_attention, (x, x, x), (dx, dx, dx)))
            code = along.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
        assert ("flash_attention_tangent" in code) == (gpu == "A100-80GB")
        assert ("forward mode" in str(found[gpu].tiles)) == (gpu == "A100-80GB")
        assert found[gpu].derivatives.endswith("by blockwise")
    assert "forward mode" in found["RTX-4090"].derivatives


def test_heads_that_no_mma_divides_are_padded_and_explain_says_so(monkeypatch):
    monkeypatch.setattr(ampere, "_why_not_here", lambda: None)
    x = jax.ShapeDtypeStruct((1, 128, 2, 72), "bfloat16")
    assert explain(x, x, x, implementation="ampere").copies == (
        "XLA pads arrays in each call, H from 72 to 80, Hv from 72 to 80"
    )
