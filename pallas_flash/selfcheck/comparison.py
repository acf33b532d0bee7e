"""Compares output, log-sum-exp and gradients of kernels with the reference, on small problems like
that of a call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import autodiff, backends, decode, dropout, masks
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Backend, Choice
from pallas_flash.kernels import device
from pallas_flash.mods.score_mod import BoundScoreMod

# Of trials: with blocks that need a mask, blocks that need none, ragged ones.
SIZES = dict(batch=2, queries=523, keys=709, heads=8, kv_heads=2, sinks=False)
WIDTH = 16  # multiples of this tell heads apart in the kernels
# compared as one vector: a single row of a gradient may be zero but for rounding
ROWS = 64
# blocks of all kinds, by head
RULE = masks.MaskMod(lambda b, h, q, k: ((q // 256 + k // 256 + h) % 3 > 0) | (k < 4), "RULE")
SOFT_CAP = 2.0  # near the logits of trials
TOLERANCE = dict(float32=1e-4, bfloat16=2e-2, float16=4e-3)
# Each is a variant of its own.
MORE = (
    *("a rule", "a mask", "a bias", "a score_mod", "arrays of a score_mod"),
    *("a soft cap", "segment ids"),
)
# words in errors of compilers that are not transient
REFUSALS = "shared memory", "ptxas error", "unimplemented"


class Verdict(NamedTuple):
    """Kernels passed where nothing is wrong or unknown."""

    errors: dict[str, float]
    wrong: str | None = None  # what is; final
    unknown: str | None = None  # why they could not be checked; a later check may succeed

    @property
    def why_not(self) -> str | None:
        """Why kernels are not run by default; None: they passed."""
        if self.unknown:
            return f"not checked on this machine: {self.unknown}"
        return f"wrong on this machine: {self.wrong}" if self.wrong else None


def hangs(limit: float) -> Verdict:
    return Verdict({}, f"its check did not finish within {limit:g} s")


class Refused(Exception):
    """By a compiler; compiling again would not help."""


def fails(error: Exception) -> Verdict:
    """The verdict of an error: a compiler's refusal is final; any other, as of the GPU, may be
    transient."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return (
        Verdict({}, f"the compiler rejects it: {error}")
        if isinstance(error, Refused)
        else Verdict({}, unknown=text)
    )


def compiled(function: Callable, *args) -> Callable:
    """function(*args), compiled; raises Refused where a compiler rejects it. XLA does not tune the
    reference's products, which took an H100 67 s for 1.5 s: results.md#self-check."""
    options = {"xla_gpu_autotune_level": "0"} if device.gpu() else None
    try:
        return jax.jit(function).lower(*args).compile(options)
    except Exception as error:
        if isinstance(error, NotImplementedError) or any(
            word in str(error).lower() for word in REFUSALS
        ):
            raise Refused(str(error).partition("\n")[0]) from error
        raise


# ---- how kernels are called ----


class Way(NamedTuple):
    """How kernels are called."""

    name: str  # in their variant
    sizes: dict[str, int]  # of trials, where they must be others
    # (problem, choice, operands, cotangents) -> arrays by name, each [B, length, heads, ...]
    results: Callable
    widen: Callable  # operands as float32, for the reference
    wanted: Callable | None = None  # the reference's results; None: those of FLASH_ATTENTION


def results(
    problem: Problem, choice: Choice, operands: Operands, cotangents: tuple
) -> dict[str, jax.Array]:
    """Of flash_attention, with the gradients."""

    def attend(differentiable):
        x = operands.with_differentiable(differentiable)
        o, lse, largest = autodiff.attend(problem, choice, x)
        return (o, lse), largest

    (o, lse), vjp, largest = jax.vjp(attend, operands.differentiable, has_aux=True)
    (gradients,) = vjp(cotangents)
    found = outputs(o, lse, largest)
    found |= dict(dq=gradients.query, dk=gradients.key, dv=gradients.value)
    found |= {f"darray{n}": x[None, :, None, None] for n, x in enumerate(gradients.captured)}
    return found if problem.bias is None else found | dict(dbias=jnp.swapaxes(gradients.bias, 1, 2))


def outputs(o, lse, largest) -> dict[str, jax.Array]:
    """o, lse, and the largest logits if they are asked for."""
    numbers = dict(lse=lse) if largest is None else dict(lse=lse, largest=largest)
    return dict(o=o) | {name: jnp.swapaxes(x, 1, 2)[..., None] for name, x in numbers.items()}


def widen(operands: Any) -> Any:
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(wide, operands)


FLASH_ATTENTION = Way("", {}, results, widen)


def tangents(
    problem: Problem, choice: Choice, operands: Operands, cotangents: tuple
) -> dict[str, jax.Array]:
    """Of flash_attention, along the operands one row or key further."""

    def attend(differentiable):
        x = operands.with_differentiable(differentiable)
        return autodiff.attend(problem, choice, x)[:2]

    x = operands.differentiable
    along = x._replace(
        **{name: jnp.roll(getattr(x, name), 1, 1) for name in ("query", "key", "value")}
    )
    do, dlse = jax.jvp(attend, (x,), (along,))[1]
    return dict(do=do, dlse=jnp.swapaxes(dlse, 1, 2)[..., None])


FORWARD_MODE = Way("forward mode", {}, tangents, widen, tangents)


# ---- small problems ----


def more(problem: Problem) -> list[str]:
    """What it has of MORE."""
    p, ids = problem, problem.resolved_mask.query_ids
    arrays = (p.score and p.score.tables) or None
    has = p.resolved_mask.mask_mod, p.mask, p.bias, p.score, arrays, p.soft_cap, ids
    return [name for name, x in zip(MORE, has, strict=True) if x is not None]


def widths(problem: Problem) -> list[int]:
    return [-(-size // WIDTH) * WIDTH for size in (problem.head_size, problem.value_size)]


def trials(problem: Problem, way: Way = FLASH_ATTENTION) -> list[dict[str, int]]:
    """The sizes of the trial problems: without and with sinks and what else moves the ends of rows;
    the last with so many heads that a program computes several tiles."""
    sizes = SIZES | way.sizes
    if decode.is_decoding(problem):
        return [sizes | dict(queries=3, sinks=True)]
    processors = device.processors()
    return [
        sizes,
        sizes | dict(batch=1, queries=509, heads=2 * processors, kv_heads=processors, sinks=True),
    ]


def check(
    backend: Backend, problem: Problem, trials: list[dict[str, int]], way: Way = FLASH_ATTENTION
) -> Callable[[], Verdict]:
    """Compiles the kernels and the reference in float32 on small problems of the same variant, and
    returns the function that runs and compares them."""
    pairs = [_programs(backend, way, *trial(problem, sizes)) for sizes in trials]

    def verdict():
        errors = [_errors(*pair) for pair in pairs]
        largest = {
            name: max((e[name] for e in errors), key=lambda e: (e != e, e)) for name in errors[0]
        }
        tolerance = TOLERANCE[problem.dtype]
        # nan is not
        wrong = [f"{name} is off by {e:.1e}" for name, e in largest.items() if not e <= tolerance]
        return Verdict(
            largest, f"{', '.join(wrong)}; the tolerance is {tolerance:.0e}" if wrong else None
        )

    return verdict


def _programs(
    backend: Backend, way: Way, small: Problem, operands: Operands, cotangents: tuple
) -> list[Callable]:
    """That of the kernels, and the reference's."""
    wide = dataclasses.replace(small, dtype="float32")

    def program(results, problem, backend, *arrays):
        run = compiled(
            functools.partial(results, problem, Choice(backend, backend.tiles(problem))), *arrays
        )
        return lambda: jax.device_get(run(*arrays))

    wanted = way.wanted or results
    wanted = program(wanted, wide, backends.REFERENCE, way.widen(operands), widen(cotangents))
    return [program(way.results, small, backend, operands, cotangents), wanted]


def _errors(kernels: Callable, reference: Callable) -> dict[str, float]:
    found, wanted = kernels(), reference()
    return {name: error(x, wanted[name]) for name, x in found.items()}


def trial(problem: Problem, sizes: dict[str, int]) -> tuple[Problem, Operands, tuple]:
    """A small problem of the same variant, masked at both ends of the keys; its operands; the
    cotangents of o and lse. One with sinks has more ends that differ by row too."""
    width, value_width = widths(problem)
    p = dataclasses.replace(
        problem, **sizes, head_size=width, value_size=value_width, scale=width**-0.5
    )
    lengths = p.keys - p.keys // 7 * np.arange(p.batch, dtype=np.int32)
    rules = [
        masks.Causal(),
        masks.KeyLengths(jax.device_put(lengths)),
        *([RULE] if p.resolved_mask.mask_mod is not None else []),
    ]
    rules += [] if p.resolved_mask.query_ids is None else [_documents(p)]
    offset = p.keys - p.queries
    if p.sinks:
        rules[0], offset = (
            masks.Window(p.keys // 2, 0),
            jax.device_put(offset - np.arange(p.batch, dtype=np.int32)),
        )
    resolved_mask = masks.resolve(rules, p.batch, p.queries, p.keys, offset)
    seeds = dropout.seeds(jax.random.key(0), p.batch, p.heads) if p.dropped else None
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(
        rng.standard_normal(shape, np.float32).astype(jnp.dtype(p.dtype))
    )
    # the gradient by pair comes from one kernel, that by key from another
    bias = None if p.bias is None else normal(1, p.heads, 1 if p.sinks else p.queries, p.keys)
    score = None
    if p.score is not None:
        score_mod = reads_arrays() if p.score.tables else far_is_less
        score = BoundScoreMod.bind(score_mod, jnp.float32, offset)
    # of empty, partial and full blocks
    row, key = np.arange(p.queries)[:, None] // 256, np.arange(p.keys) // 256
    mask = (
        None
        if p.mask is None
        else jax.device_put(rng.random((p.batch, 1, p.queries, p.keys)) < (row + key + 1) % 3 / 2)
    )
    q, k = normal(p.batch, p.queries, p.heads, width), normal(p.batch, p.keys, p.kv_heads, width)
    v, do = (
        normal(p.batch, p.keys, p.kv_heads, value_width),
        normal(p.batch, p.queries, p.heads, value_width),
    )
    dlse = normal(p.batch, p.heads, p.queries).astype(jnp.float32)
    sinks = normal(p.heads).astype(jnp.float32) if p.sinks else None
    operands = Operands(
        query=q,
        key=k,
        value=v,
        bias=bias,
        sinks=sinks,
        mask=mask,
        resolved_mask=resolved_mask,
        seeds=seeds,
        score=score,
    )
    soft_cap = None if p.soft_cap is None else SOFT_CAP
    return dataclasses.replace(p, soft_cap=soft_cap).of_part(operands), operands, (do, dlse)


def _documents(p: Problem) -> masks.Documents:
    """Four in the first row; in the second the first goes on behind the third."""
    of = lambda batch: np.arange(p.keys, dtype=np.int32) // -(-p.keys // 4) % (4 - batch)
    ids = np.stack([of(min(batch, 1)) for batch in range(p.batch)])
    return masks.Documents(*map(jax.device_put, (ids[:, p.keys - p.queries :], ids)))


def far_is_less(s, b, h, q, k):
    """The score_mod of trials."""
    return s - 0.01 * (h + 1) * jnp.abs(q - k)


def reads_arrays() -> Callable:
    """That of calls whose score_mod reads float arrays: by head, by key and by pair, since each
    gradient comes from another kernel."""
    rng = np.random.default_rng(1)
    slopes, by_key, by_distance = (
        jax.device_put(rng.standard_normal(32, np.float32)) for _ in range(3)
    )

    def score_mod(s, b, h, q, k):
        near = by_distance[jnp.clip(q - k, -16, 15) + 16]
        return s - 0.01 * slopes[h % 32] * jnp.abs(q - k) + by_key[k % 32] + near

    return score_mod


def error(x, want) -> float:
    """The largest relative error of ROWS neighbouring rows of a head."""

    def size(x):  # [B, blocks, heads]
        squares = np.square(x).sum(-1)
        return np.sqrt(np.add.reduceat(squares, range(0, squares.shape[1], ROWS), axis=1))

    x, want = (a.astype(np.float64) for a in (x, want))
    return float(np.max(size(x - want) / np.maximum(size(want), 1e-3)))
