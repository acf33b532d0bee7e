"""Every feature of flash_attention, calls that have some of them, and what refuses which."""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import explain, flash_attention, masks
from pallas_flash.accounting import GPUS
from pallas_flash.choose.selfcheck import specs
from pallas_flash.choose.selfcheck.specs import Feature
from scripts.bench.gpu_code import as_if_on

# V: the value's head size; M, R: of a table; Q: blocks of queries; W: of a list
SIZES = dict(B=2, T=20, S=64, N=4, K=2, H=8, V=6, M=4, R=5, Q=5, W=48)


def _by_distance(table):
    return lambda score, b, h, q, k: score + table[h, (q - k) % SIZES["R"]] * jnp.tanh(score)


def _by_steps(steps):
    return lambda b, h, q, k: (q + steps[h] * k + h + b) % 5 > 0


def _wide(x):
    """Of 512 columns, or as many times as query and key have those, with the same scores."""
    times = 512 // SIZES["H"]
    return jnp.tile(x, times) / times**0.25


def _by_head(slopes):
    return lambda score, b, h, q, k: (
        jnp.maximum(score, 0.1 * score) - 0.1 * slopes[h] * jnp.abs(q - k).astype(jnp.float32)
    )


def _blocks(x):
    """Lists of quarters of the keys, for fifths of the queries."""
    queries, keys = x["query"].shape[1], x["key"].shape[1]
    return masks.KeyLists(x["blocks"], keys // 4, -(-queries // SIZES["Q"]))


KNOWN, INPUTS = specs.FEATURES, tuple(specs.INPUTS)
# kernels gather keys beside few of the others
GATHERED = "`mask`: `masks.KeyLists` of single keys"
NO_VALUES = "values that are the keys' first columns"
# those that the self-check knows, and what another of them stands for there: of a mask, what it
# resolves to; of a score_mod, one whose second derivative no rounding hides
FEATURES = {
    "`is_causal`": KNOWN["causal"],
    "`local_window_size`": KNOWN["a window"],
    "`query_offset` by row": KNOWN["an offset"],
    "`query_seq_lengths`": Feature(dict(query_seq_lengths="B")),
    "`key_value_seq_lengths`": KNOWN["key lengths"],
    "segment ids": KNOWN["segment ids"],
    "`mask`: `masks.PrefixLM`": Feature(
        dict(prefix="B"), lambda x: dict(mask=masks.PrefixLM(x["prefix"]))
    ),
    "`mask`: `masks.MaskMod`": Feature(
        dict(steps="M"), lambda x: dict(mask=masks.MaskMod(_by_steps(x["steps"])))
    ),
    "`mask`: `masks.KeyLists` of blocks": Feature(
        dict(blocks="BQKR"), lambda x: dict(mask=_blocks(x))
    ),
    GATHERED: KNOWN["lists of keys"],
    "`mask`: union of two": Feature(
        dict(starts="B"), lambda x: dict(mask=masks.KeyStarts(x["starts"]) | masks.Dilated(2))
    ),
    "`mask`: complement of one": Feature(
        dict(query_segment_ids="BT", spots="BS"),
        lambda x: dict(mask=~masks.Documents(x["query_segment_ids"], x["spots"])),
    ),
    "`mask`: an array": KNOWN["a mask"],
    "`bias`": KNOWN["a bias"],
    "`scale` by head, learned": Feature(dict(scale="N")),
    "`logits_soft_cap`": KNOWN["a soft cap"],
    "`score_mod`, a learned table": Feature(
        dict(table="MR"), lambda x: dict(score_mod=_by_distance(x["table"]))
    ),
    "`score_mod`, a learned scalar by head": Feature(
        dict(slopes="M"), lambda x: dict(score_mod=_by_head(x["slopes"]))
    ),
    "`sinks`": KNOWN["sinks"],
    "dropout": KNOWN["dropout"],
    "`return_max_logits`": KNOWN["the largest logits"],
    "heads of 512": Feature(make=lambda x: {name: _wide(x[name]) for name in INPUTS if name in x}),
    NO_VALUES: KNOWN["values of keys"],
}
# known features that have no row, each beside one that has; decoding has rows of its own
WITHOUT_A_ROW = "a rule", "a score_mod", "arrays of a score_mod", "decoding"
# A call has one mask array or other masks, one score_mod, values or none, and heads of one size:
# two calls have all features.
SECOND = "`mask`: an array", "`score_mod`, a learned scalar by head", "heads of 512", NO_VALUES
TOGETHER = (tuple(name for name in FEATURES if name not in SECOND), SECOND)
LETTERS = specs.letters(FEATURES.values())
LEARNED = (*INPUTS, "bias", "scale", "sinks", "slopes", "table")


def integers(T, S, **_):
    """The least of each array of integers, and what it stays below."""
    return dict(
        query_offset=(0, 5),
        query_seq_lengths=(3 * T // 4, T),
        key_value_seq_lengths=(5 * S // 8, S + 1),
        prefix=(0, 9),
        query_segment_ids=(0, 2),
        key_value_segment_ids=(0, 2),
        steps=(1, 4),
        starts=(0, 9),
        spots=(0, 4),
        blocks=(-1, 4),
        listed=(-1, S),
    )


def arrays(dtype="float32", **sizes) -> dict[str, Any]:
    """An array for each name in LETTERS."""
    rng, sizes = np.random.default_rng(0), SIZES | sizes
    found = specs.draw(LETTERS, sizes, rng, dtype)
    for name, limits in integers(**sizes).items():
        x = rng.integers(*limits, found[name].shape, np.int32)
        found[name] = np.sort(x) if name.endswith("ids") else x
    found |= dict(mask=found["mask"] < 0.8, scale=abs(found["scale"]) / 2)
    return {name: jnp.asarray(x) for name, x in found.items()}


@dataclasses.dataclass(frozen=True)
class Call:
    """flash_attention with some features, as a function of a dict of arrays; gives (o, lse) and
    the largest logits where a feature returns them."""

    implementation: str
    features: tuple[str, ...]
    context: Any = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return INPUTS[:2] if NO_VALUES in self.features else INPUTS

    def arguments(self, x) -> dict:
        found = specs.arguments([FEATURES[name] for name in self.features], x)
        found |= dict(implementation=self.implementation, context=self.context)
        return found | dict(return_residual=True)

    def __call__(self, x):
        return flash_attention(**self.arguments(x))

    def loss(self, x):
        return self.loss_and_outputs(x, self)[0]

    @staticmethod
    def loss_and_outputs(x, run):
        o, *statistics = run(x)
        loss = jnp.sum(jnp.sin(o.astype(jnp.float32))) + sum(
            jnp.sum(jnp.where(n == -jnp.inf, 0.0, n)) for n in statistics
        )
        return loss, (o, *statistics)

    def gradients(self, x):
        return self.gradients_and_outputs(x)[0]

    def gradients_and_outputs(self, x, run=None):
        """`run` in place of the call."""
        learned, rest = self.split(x)
        loss = lambda learned: self.loss_and_outputs(learned | rest, run or self)
        return jax.grad(loss, has_aux=True)(learned)

    def used(self, x):
        learned, rest = self.split(x)
        return learned | rest

    def split(self, x):
        """The arrays with a gradient, and the others."""
        used = {
            *self.inputs,
            *(name for feature in self.features for name in FEATURES[feature].arrays),
        }
        pick = lambda keep: {name: a for name, a in x.items() if name in used and keep(name)}
        return pick(lambda name: name in LEARNED), pick(lambda name: name not in LEARNED)


# the Mosaic kernels, and a GPU for which each is explained; those that run in jax's interpreter too
EXPLAINED = {"hopper": "H200", "blackwell": "B200", "ampere": "A100-80GB"}
INTERPRETED = ("blackwell",)


def on_its_gpu(implementation: str):
    """The context in which `explain` is asked."""
    gpu = EXPLAINED.get(implementation)
    return as_if_on(GPUS[gpu]) if gpu else contextlib.nullcontext()


def refused(implementation: str) -> dict[str, str]:
    """The features that an implementation refuses, and why."""
    x, reasons = inputs(implementation), {}
    with on_its_gpu(implementation):
        for feature in FEATURES:
            arguments = Call(implementation, (feature,)).arguments(x)
            try:
                explain(**arguments)
            except NotImplementedError as error:
                reasons[feature] = reason(error)
    return reasons


def alone(implementation: str, feature: str):
    """Output, log-sum-exp and gradients with a feature by itself are right in jax's GPU
    interpreter."""
    run = lambda name, x: (call := Call(name, (feature,))).gradients_and_outputs(call.used(x))
    x = inputs(implementation)
    with gpu_interpreter.kernels(implementation):
        found = jax.block_until_ready(jax.jit(functools.partial(run, implementation))(x))
    wide = {
        name: a.astype(jnp.float32) if a.dtype == x["query"].dtype else a for name, a in x.items()
    }
    assert_equal(found, run("reference", wide), feature, TOLERANCE["bfloat16"])


def reason(error: NotImplementedError) -> str:
    found = re.search(r"cannot run this call(?: of \w+)?: (.*)\. The call: ", str(error))
    return found.group(1) if found else str(error)


def inputs(implementation: str):
    return arrays("bfloat16" if implementation in EXPLAINED else "float32")


# of both dtypes, and some numbers are sums of all
TOLERANCE = dict(float32=6e-5, bfloat16=3e-2)


def assert_equal(got, expected, features, tolerance=None):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        size = max(1, np.max(np.abs(b), where=np.isfinite(b), initial=0))
        each = (tolerance or TOLERANCE[str(a.dtype)]) * size
        a = np.asarray(a, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=each, err_msg=str(features))
