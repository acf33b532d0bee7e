"""Every feature of flash_attention, and calls that have some of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import flash_attention, masks

# V: the value's head size; M, R: of a table
SIZES = dict(B=2, T=20, S=64, N=4, K=2, H=8, V=6, M=4, R=5)


class Feature(NamedTuple):
    """One thing that a call may have."""

    arrays: dict[str, str]  # its arrays, with the letters of their axes
    options: Callable[[dict], dict]  # of flash_attention, from those arrays


def _by_distance(table):
    def by_distance(score, b, h, q, k):
        return score + table[h, (q - k) % SIZES["R"]] * jnp.tanh(score)

    return by_distance


def _by_head(slopes):
    return lambda score, b, h, q, k: (
        jnp.maximum(score, 0.1 * score) - slopes[h] * jnp.abs(q - k).astype(jnp.float32)
    )


FEATURES = {
    "`is_causal`": Feature({}, lambda x: dict(is_causal=True)),
    "`local_window_size`": Feature({}, lambda x: dict(local_window_size=(16, 9))),
    "`query_offset` by row": Feature(dict(offset="B"), lambda x: dict(query_offset=x["offset"])),
    "`query_seq_lengths`": Feature(
        dict(queries="B"), lambda x: dict(query_seq_lengths=x["queries"])
    ),
    "`key_value_seq_lengths`": Feature(
        dict(keys="B"), lambda x: dict(key_value_seq_lengths=x["keys"])
    ),
    "segment ids": Feature(
        dict(q_ids="BT", kv_ids="BS"),
        lambda x: dict(query_segment_ids=x["q_ids"], key_value_segment_ids=x["kv_ids"]),
    ),
    "`mask`: `masks.PrefixLM`": Feature(
        dict(prefix="B"), lambda x: dict(mask=masks.PrefixLM(x["prefix"]))
    ),
    "`mask`: `masks.MaskMod`": Feature(
        {}, lambda x: dict(mask=masks.MaskMod(lambda b, h, q, k: (q + 2 * k + h + b) % 5 > 0))
    ),
    "`mask`: union of two": Feature({}, lambda x: dict(mask=masks.Window(7, 4) | masks.Dilated(2))),
    "`mask`: complement of one": Feature({}, lambda x: dict(mask=~masks.Dilated(7))),
    "`mask`: an array": Feature(dict(mask="B1TS"), lambda x: dict(mask=x["mask"])),
    "`bias`": Feature(dict(bias="1NTS"), lambda x: dict(bias=x["bias"])),
    "`scale` by head, learned": Feature(dict(scale="N"), lambda x: dict(scale=x["scale"])),
    "`logits_soft_cap`": Feature({}, lambda x: dict(logits_soft_cap=2.0)),
    "`score_mod`, a learned table": Feature(
        dict(table="MR"), lambda x: dict(score_mod=_by_distance(x["table"]))
    ),
    "`score_mod`, a learned scalar by head": Feature(
        dict(slopes="M"), lambda x: dict(score_mod=_by_head(x["slopes"]))
    ),
    "`sinks`": Feature(dict(sinks="N"), lambda x: dict(sinks=x["sinks"])),
    "dropout": Feature({}, lambda x: dict(dropout_rate=0.3, dropout_rng=jax.random.key(1))),
    "`return_max_logits`": Feature({}, lambda x: dict(return_max_logits=True)),
}
# A call has one mask array or other masks, and one score_mod: two calls have all features.
SECOND = "`mask`: an array", "`score_mod`, a learned scalar by head"
TOGETHER = (tuple(name for name in FEATURES if name not in SECOND), SECOND)
LETTERS = dict(query="BTNH", key="BSKH", value="BSKV") | {
    k: v for f in FEATURES.values() for k, v in f.arrays.items()
}
INTEGERS = dict(
    offset=(0, 5), queries=(15, 20), keys=(40, 65), q_ids=(0, 2), kv_ids=(0, 2), prefix=(0, 9)
)
INPUTS = ("query", "key", "value")
LEARNED = (*INPUTS, "bias", "scale", "sinks", "slopes", "table")


def arrays(dtype="float32") -> dict[str, Any]:
    """An array for each name in LETTERS."""
    rng, found = np.random.default_rng(0), {}
    for name, letters in LETTERS.items():
        shape = tuple(SIZES.get(letter, 1) for letter in letters)
        if name in INTEGERS:
            x = np.sort(rng.integers(*INTEGERS[name], shape)).astype(np.int32)
        elif name == "mask":
            x = rng.random(shape) < 0.8
        else:
            x = rng.normal(size=shape).astype("float32")
        found[name] = jnp.asarray(x, dtype if name in INPUTS else None)
    return found | dict(scale=jnp.abs(found["scale"]) / 2)


@dataclasses.dataclass(frozen=True)
class Call:
    """flash_attention with some features, as a function of a dict of arrays; gives (o, lse) and
    the largest logits where a feature returns them."""

    implementation: str
    features: tuple[str, ...]

    def options(self, x) -> dict:
        found, mask = {}, None
        for name in self.features:
            more = FEATURES[name].options(x)
            joined = more.get("mask") if mask is None or "mask" not in more else mask & more["mask"]
            mask = mask if joined is None else joined
            found |= more
        return found | dict(mask=mask, implementation=self.implementation, return_residual=True)

    def __call__(self, x):
        return flash_attention(*(x[name] for name in INPUTS), **self.options(x))

    def loss(self, x):
        o, *statistics = self(x)
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + sum(
            jnp.sum(jnp.where(n == -jnp.inf, 0.0, n)) for n in statistics
        )

    def gradients(self, x):
        learned, rest = self.split(x)
        return jax.grad(lambda learned: self.loss(learned | rest))(learned)

    def split(self, x):
        """The arrays with a gradient, and the others."""
        used = {*INPUTS, *(name for feature in self.features for name in FEATURES[feature].arrays)}
        pick = lambda keep: {name: a for name, a in x.items() if name in used and keep(name)}
        return pick(lambda name: name in LEARNED), pick(lambda name: name not in LEARNED)
