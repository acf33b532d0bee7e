"""Keys that lists name, gathered by the Mosaic kernels: output and log-sum-exp are the oracle's,
and there is no race. Gradients, which blockwise computes, are among those of test_kernels.py."""

import functools
from typing import NamedTuple

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, arguments, lists, qkv
from decoding import MOSAIC, equal_the_oracle, ints, needs_interpreter, without_a_race
from selection import whole_but

from pallas_flash import explain, flash_attention, masks
from pallas_flash.accounting import GPUS
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import comparison, verdicts
from pallas_flash.kernels.decoding import gather
from pallas_flash.tiled import split_kv
from scripts.bench.gpu_code import as_if_on

LAST = dict(is_causal=True, query_offset=106)  # the last queries of some 110 keys


class Case(NamedTuple):
    sizes: Sizes
    lists: dict  # arguments of cases.lists
    options: dict = {}
    splits: int = 1


def latents(T, N, head=576):
    """Of which the values are the first 512 columns."""
    return Sizes(1, T, 110, N, 1, head, 512)


CASES = {
    "latents, causal": Case(latents(3, 64), dict(n=70), LAST),
    "latents, 128 heads in splits": Case(latents(2, 128), dict(n=99), splits=2),
    "latents of 512, sinks": Case(
        latents(3, 16, 512), dict(n=60), LAST | dict(sinks=np.linspace(-9, 9, 16))
    ),
    # a key head has 4 rows, which all warps share, or 24
    "a list for all heads, a window": Case(
        Sizes(2, 5, 113, 8, 2, 64, 64), dict(n=80), LAST | dict(local_window_size=(70, 0))
    ),
    "a list for each key head, in splits": Case(
        Sizes(2, 3, 113, 48, 2, 128, 128), dict(L=2, n=90), LAST, splits=3
    ),
    "a list for each head": Case(Sizes(2, 3, 113, 4, 2, 64, 64), dict(L=4, n=50)),
    "blocks of 4 keys, heads of 80 and 48, sinks": Case(
        Sizes(1, 5, 109, 8, 2, 80, 48),
        dict(block=4, L=2, n=20),
        LAST | dict(sinks=np.append(np.linspace(-1, 5, 6), [np.inf, -np.inf])),
    ),
    "blocks of 3 keys for all batch rows, heads of 160": Case(
        Sizes(2, 3, 109, 32, 1, 160, 160), dict(block=3, n=30, B=1), dict(logits_soft_cap=2.0)
    ),
    "lists of 9 queries": Case(
        Sizes(2, 19, 113, 8, 2, 64, 64), dict(block=2, query_block=9, L=2, n=40), LAST
    ),
    "lengths": Case(
        Sizes(3, 3, 113, 4, 4, 128, 128),
        dict(L=4, n=80),
        dict(query_seq_lengths=ints(3, 0, 2), key_value_seq_lengths=ints(113, 90, 0)),
    ),
}
FAST = {
    "hopper": ["latents, causal", "lists of 9 queries"],
    "ampere": [
        "blocks of 4 keys, heads of 80 and 48, sinks",
        "a list for each key head, in splits",
    ],
}
ROWS = [(implementation, name) for name in CASES for implementation in MOSAIC]


def drawn(name, rng, dtype="bfloat16"):
    """q, k and v, where keys that nobody sees are NaN, what the oracle takes in their place, and
    the options of both."""
    z, of_lists, options, _ = CASES[name]
    sizes = dict(block=1, query_block=1) | of_lists
    kw = options | dict(lists=lists(rng, z, **sizes))
    q, k, v = qkv(rng, z, dtype)
    v = k[..., : z.Hv] if z.H > 256 else v
    seen = oracle.visible(z.B, z.N, z.T, z.S, kw).reshape(z.B, z.K, -1, z.S).any(2)
    seen = np.swapaxes(seen, 1, 2)[..., None]
    garbage = (np.where(seen, x, np.nan).astype(dtype) for x in (k, v))
    return q, tuple(garbage), (k, v), kw


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "implementation, name",
    whole_but(ROWS, *((each, name) for each, names in FAST.items() for name in names)),
)
def test_output_and_lse_equal_the_oracle_without_a_race(implementation, name, rng, monkeypatch):
    case = CASES[name]
    q, (k, v), rows, kw = drawn(name, rng)
    options = arguments(kw)
    if case.sizes.H > 256:
        v, options["value_size"] = None, case.sizes.Hv
    attend = functools.partial(
        flash_attention, implementation=implementation, return_residual=True, **options
    )
    with without_a_race(implementation, case.splits, monkeypatch):
        found = jax.jit(attend)(q, k, v)
    assert found[0].dtype == q.dtype
    equal_the_oracle(found, q, rows, **kw)


WIDTHS = {  # the bytes of a row, and a swizzle that divides them
    "heads of 64": (128, 128),
    "three tiles side by side, some lanes have none": (384, 128),
    "latents": (1152, 128),
    "heads of 80": (192, 64),
    "heads of 48": (96, 32),
    "heads of 16": (32, 32),
}


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("name", WIDTHS)
def test_a_gather_copies_each_byte_of_each_row_to_its_place_in_the_swizzled_tiles(name, rows):
    """jax's GPU interpreter has other code in place of these offsets."""
    width, swizzle = WIDTHS[name]
    lanes = gather.Lanes.make(rows, swizzle)
    copy = gather.Copy(lanes, swizzle, width)
    slot = np.full((rows * width // gather.CHUNK, 2), -1)  # the row and the byte of each chunk
    for thread in range(gather.WARPS * gather.LANES):
        place, (warp, lane) = copy.place(thread), divmod(thread, gather.LANES)
        first = warp * lanes.rows + lane // lanes.chunks % lanes.rows  # as Lanes.layout has them
        for n, row in enumerate(range(first, rows, gather.WARPS * lanes.rows)):
            for step in copy.steps(n):
                if place.tile < step.tiles:
                    at = (copy.target(place) + step.target) // gather.CHUNK
                    assert slot[at, 0] == -1
                    slot[at] = row, copy.source(place) + step.source
    # CUDA's swizzle: bits 4 to 6 of an address are exchanged by bits 7 to 9, as many as it has
    row, byte = np.indices((rows, width // gather.CHUNK)).reshape(2, -1)
    byte *= gather.CHUNK
    at = row // 8 * 8 * width + byte // swizzle * 8 * swizzle + row % 8 * swizzle + byte % swizzle
    at ^= (at >> 7) % (swizzle // 16) << 4
    np.testing.assert_array_equal(slot[at // gather.CHUNK], np.stack([row, byte], 1))


@needs_interpreter
def test_a_wait_that_lets_one_copy_more_run_is_a_race(rng, monkeypatch):
    from pallas_flash.kernels.mma import tile

    wait = tile._wait_for_cp_async
    monkeypatch.setattr(tile, "_wait_for_cp_async", lambda running: wait(running + 1))
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 1)
    q, (k, v), _, kw = drawn("a list for each head", rng)
    with gpu_interpreter.kernels("hopper", detect_races=True) as races:
        flash_attention(q, k, v, implementation="hopper", **arguments(kw))
    assert races.found


# ---- which calls ----

TOKENS = masks.KeyLists(jax.ShapeDtypeStruct((1, 64, 1, 300), jnp.int32))
OF_64 = masks.KeyLists(jax.ShapeDtypeStruct((1, 64, 1, 9), jnp.int32), block=64)
CALLS = {  # head size, what hides keys, and what is said: of a kernel, or of why there is none
    "latents": (576, dict(mask=TOKENS), "2 warpgroups, widths 576/512, keys gathered by lists"),
    "causal": (128, dict(mask=TOKENS, is_causal=True), "128/128, keys gathered by lists"),
    "wide latents, blocks of 64 keys": (576, dict(mask=OF_64), "keys gathered by lists"),
    "blocks of 64 keys": (128, dict(mask=OF_64), "forward"),  # by their table
    "a score_mod, dropout": (
        128,
        dict(
            mask=TOKENS,
            score_mod=lambda s, b, h, q, k: s * 2,
            dropout_rate=0.5,
            dropout_rng=jax.ShapeDtypeStruct((2,), jnp.uint32),
        ),
        "it does not gather the keys of lists beside a score_mod and dropout",
    ),
    "a rule": (
        128,
        dict(mask=TOKENS & masks.Dilated(3)),
        "it does not gather the keys of lists beside a mask_mod",
    ),
    "float32": (128, dict(mask=TOKENS, dtype="float32"), "mma multiplies bfloat16 and float16"),
    "wide values": (1024, dict(mask=TOKENS), "values of more than 512 columns do not fit"),
}


@needs_interpreter
@pytest.mark.parametrize("name", CALLS)
def test_explain_says_that_keys_are_gathered_or_why_not(name):
    head, options, said = CALLS[name]
    options = dict(dtype="bfloat16") | options
    dtype = options.pop("dtype")
    q, k = (jax.ShapeDtypeStruct((1, *n, head), dtype) for n in ((64, 32), (4096, 1)))
    v = k if head != 576 else None
    options |= {} if v is k else dict(value_size=512)
    with as_if_on(GPUS["A100-80GB"]):
        found = explain(q, k, v, **options)
    assert said in (found.why_not.get("ampere") or str(found.tiles))


@needs_interpreter
def test_the_self_check_of_lists_gathers_keys():
    q, k = (jax.ShapeDtypeStruct((1, *n, 64), jnp.bfloat16) for n in ((64, 8), (700, 2)))
    hopper = implementations.find("hopper")
    with gpu_interpreter.hopper_kernels():
        problem = explain(q, k, k, mask=TOKENS, implementation="hopper").problem
        assert str(verdicts.variant_of(hopper, problem)).endswith("deterministic, lists of keys")
        (sizes,) = comparison.all_sizes(problem)
        small, *_ = comparison.make(problem, sizes | dict(queries=3))
        assert hopper.tiles_like(hopper.tiles(problem), small).decode.gathers
