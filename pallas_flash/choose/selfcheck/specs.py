"""Calls of flash_attention as data: features by name, and arrays of random numbers. The self-check
compares them, tests run them, and scripts/benchmark.py times them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks
from pallas_flash.problem.arguments import Problem
from pallas_flash.tiled import split_kv

INPUTS = dict(query="BTNH", key="BSKH", value="BSKV")
# sizes of a problem
SIZES = "batch queries keys heads kv_heads head_size value_size".split()


class Feature(NamedTuple):
    """One thing that a call may have."""

    arrays: dict[str, str] = {}  # its arrays, with the letters of their axes
    # the arguments of flash_attention, from all arrays and from what else is given by name; None:
    # the arrays are arguments themselves
    make: Callable[[dict], dict] | None = None
    # whether a problem has it, where it selects other kernels
    is_in: Callable[[Problem], bool] | None = None


# blocks of all kinds, by head
RULE = masks.MaskMod(lambda b, h, q, k: ((q // 256 + k // 256 + h) % 3 > 0) | (k < 4), "RULE")


def far_is_less(s, b, h, q, k):
    """A score_mod."""
    return s - 0.01 * (h + 1) * jnp.abs(q - k)


def reads_arrays() -> Callable:
    """A score_mod that reads float arrays by head, by key and by pair: the gradient of each comes
    from another kernel."""
    rng = np.random.default_rng(1)
    slopes, by_key, by_distance = (
        jax.device_put(rng.standard_normal(32, np.float32)) for _ in range(3)
    )

    def score_mod(s, b, h, q, k):
        near = by_distance[jnp.clip(q - k, -16, 15) + 16]
        return s - 0.01 * slopes[h % 32] * jnp.abs(q - k) + by_key[k % 32] + near

    return score_mod


def reads_keys_alone(problem: Problem) -> bool:
    """Whether values may be read as keys; elsewhere they are copied."""
    has_lists = problem.resolved_mask.lists is not None
    return problem.values_are_keys and (has_lists or split_kv.is_decoding(problem))


FEATURES = {  # those that select other kernels in the order of records
    "causal": Feature(make=lambda x: dict(is_causal=True)),
    "a window": Feature(make=lambda x: dict(local_window_size=x.get("window", (16, 9)))),
    "an offset": Feature(dict(query_offset="B")),
    "key lengths": Feature(dict(key_value_seq_lengths="B")),
    "sinks": Feature(dict(sinks="N")),
    "decoding": Feature(is_in=split_kv.is_decoding),  # by its sizes
    "values of keys": Feature(
        make=lambda x: dict(value=None, value_size=x.get("value_size", 6)), is_in=reads_keys_alone
    ),
    "dropout": Feature(
        make=lambda x: dict(dropout_rate=x.get("rate", 0.25), dropout_rng=jax.random.key(0)),
        is_in=lambda p: p.dropped > 0,
    ),
    "the largest logits": Feature(
        make=lambda x: dict(return_max_logits=True), is_in=lambda p: p.max_logits
    ),
    "a rule": Feature(
        make=lambda x: dict(mask=RULE), is_in=lambda p: p.resolved_mask.mask_mod is not None
    ),
    "a mask": Feature(dict(mask="B1TS"), is_in=lambda p: p.mask is not None),
    "a bias": Feature(dict(bias="1NTS"), is_in=lambda p: p.bias is not None),
    "a score_mod": Feature(
        make=lambda x: dict(score_mod=far_is_less), is_in=lambda p: p.score is not None
    ),
    "arrays of a score_mod": Feature(
        make=lambda x: dict(score_mod=reads_arrays()),
        is_in=lambda p: bool(p.score and p.score.tables),
    ),
    # near the logits
    "a soft cap": Feature(
        make=lambda x: dict(logits_soft_cap=2.0), is_in=lambda p: p.soft_cap is not None
    ),
    "segment ids": Feature(
        dict(query_segment_ids="BT", key_value_segment_ids="BS"),
        is_in=lambda p: p.resolved_mask.query_ids is not None,
    ),
    "lists of keys": Feature(
        dict(listed="BT1W"),
        lambda x: dict(mask=masks.KeyLists(x["listed"])),
        is_in=lambda p: p.resolved_mask.lists is not None,
    ),
}


def variants(problem: Problem) -> list[str]:
    """The names of the problem's features that select other kernels."""
    return [name for name, each in FEATURES.items() if each.is_in and each.is_in(problem)]


def letters(features: Iterable[Feature]) -> dict[str, str]:
    """All arrays of a call by name, with the letters of their axes, the inputs last."""
    return {name: axes for each in features for name, axes in each.arrays.items()} | INPUTS


def draw(letters: dict[str, str], sizes: dict[str, int], rng, dtype: str) -> dict[str, np.ndarray]:
    """Arrays of normal numbers, in `dtype` those that have the call's; a letter without a size
    is 1."""
    found = {}
    for name, axes in letters.items():
        x = rng.standard_normal([sizes.get(letter, 1) for letter in axes], np.float32)
        found[name] = x.astype(dtype) if name in (*INPUTS, "bias", "do") else x
    return found


def arguments(features: Iterable[Feature], x: dict[str, Any]) -> dict[str, Any]:
    """The arguments of flash_attention, from arrays by name; masks are joined by &."""
    found = {name: x[name] for name in INPUTS if name in x}
    for each in features:
        more = each.make(x) if each.make else {name: x[name] for name in each.arrays}
        if "mask" in found and "mask" in more:
            more |= dict(mask=found["mask"] & more["mask"])
        found |= more
    return found


def make_call(sizes: dict[str, int], dtype: str, names: Iterable[str], **given) -> tuple:
    """The arguments of flash_attention with features of these names, masked at both ends of the
    keys, and the cotangents of o and lse. With sinks, more of the ends differ by row."""
    by_letter = dict(zip("BTSNKHV", (sizes[name] for name in SIZES), strict=True))
    B, T, S, sinks = (sizes[name] for name in ("batch", "queries", "keys", "sinks"))
    ends = "key lengths", "an offset", *(("a window", "sinks") if sinks else ["causal"])
    features = {name: FEATURES[name] for name in (*ends, *names)}
    needed = letters(features.values()) | dict(do="BTNV", dlse="BNT")
    if "a bias" in features and sinks:  # the gradient by key comes from another kernel
        needed |= dict(bias="1N1S")
    rng, row = np.random.default_rng(0), np.arange(B, dtype=np.int32)
    # four documents in the first row; in the others the first continues behind the third
    ids = np.arange(S, dtype=np.int32) // -(-S // 4) % (4 - np.minimum(row, 1))[:, None]
    given |= dict(query_segment_ids=ids[:, S - T :], key_value_segment_ids=ids)
    given |= dict(window=(S // 2, 0), value_size=sizes["value_size"])
    given |= dict(query_offset=S - T - row if sinks else S - T)
    given |= dict(key_value_seq_lengths=S - S // 7 * row)
    if "lists of keys" in features:
        given |= dict(listed=rng.integers(-1, S, (B, T, 1, 100), np.int32))
    if "a mask" in features:  # of empty, partial and full blocks
        block = np.arange(T)[:, None] // 256 + np.arange(S) // 256
        given |= dict(mask=rng.random((B, 1, T, S)) < (block + 1) % 3 / 2)
    rest = {name: axes for name, axes in needed.items() if name not in given}
    x = draw(rest, by_letter, rng, dtype) | given
    return arguments(features.values(), x), (x["do"], x["dlse"])
