"""Compares output, log-sum-exp and gradients of kernels with the reference, on small problems of
the same variant as a call's."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout, masks
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck.outcome import Verdict, before_kernels
from pallas_flash.jax_support import hardware
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.call import Call
from pallas_flash.problem.implementation import Choice, Implementation
from pallas_flash.tiled import split_kv
from pallas_flash.transforms import autodiff

# with blocks that need a mask, blocks that need none, and ragged ones
SIZES = dict(batch=2, queries=523, keys=709, heads=8, kv_heads=2, sinks=False)
WIDTH = 16  # multiples of this tell heads apart in the kernels
# blocks of all kinds, by head
RULE = masks.MaskMod(lambda b, h, q, k: ((q // 256 + k // 256 + h) % 3 > 0) | (k < 4), "RULE")
SOFT_CAP = 2.0  # near the logits
# each makes another variant
EXTRAS = (
    *("a rule", "a mask", "a bias", "a score_mod", "arrays of a score_mod"),
    *("a soft cap", "segment ids", "lists of keys"),
)
LISTED = 100  # entries of a list


def extras(problem: Problem) -> list[str]:
    """The names in EXTRAS that apply to the problem."""
    p, mask = problem, problem.resolved_mask
    arrays = (p.score and p.score.tables) or None
    has = mask.mask_mod, p.mask, p.bias, p.score, arrays, p.soft_cap, mask.query_ids, mask.lists
    return [name for name, x in zip(EXTRAS, has, strict=True) if x is not None]


def widths(problem: Problem) -> list[int]:
    return [-(-size // WIDTH) * WIDTH for size in (problem.head_size, problem.value_size)]


def reads_keys_alone(problem: Problem) -> bool:
    """Whether values may be read as keys; elsewhere they are copied."""
    has_lists = problem.resolved_mask.lists is not None
    return problem.values_are_keys and (has_lists or split_kv.is_decoding(problem))


def all_sizes(problem: Problem, **changed: int) -> list[dict[str, int]]:
    """The sizes of the small problems: without and with sinks and more ends that differ by row. The
    last has so many heads that a program computes several tiles."""
    sizes = SIZES | changed
    if split_kv.is_decoding(problem):
        return [sizes | dict(queries=3, sinks=True)]
    if problem.resolved_mask.lists is not None:  # of so many queries that keys are not split
        return [sizes | dict(queries=131, sinks=True)]
    processors = hardware.processors()
    many = dict(batch=1, queries=509, heads=2 * processors, kv_heads=processors, sinks=True)
    return [sizes, sizes | many]


def make(problem: Problem, sizes: dict[str, int]) -> tuple[Problem, Operands, tuple]:
    """A problem of these sizes, its operands, and the cotangents of o and lse."""
    p = problem
    static = dict(deterministic=p.deterministic, return_max_logits=p.max_logits)
    static |= dict(dropout_rate=p.dropped / dropout.LEVELS)
    variant = *widths(p), p.dtype, extras(p), sizes, reads_keys_alone(p)
    call, cotangents = make_call(*variant, **static)
    small, operands = arguments.normalise(Call(**call))
    return small, *jax.device_put((operands, cotangents))


def make_call(
    head_size: int,
    value_size: int,
    dtype: str,
    extras: Collection[str],
    sizes: dict,
    values_are_keys: bool = False,
    **static,
) -> tuple[dict[str, Any], tuple]:
    """The arguments of flash_attention, masked at both ends of the keys, and the cotangents of o
    and lse. With sinks, more of the ends differ by row."""
    B, T, S, N, K, sinks = (sizes[name] for name in SIZES)
    rng, row = np.random.default_rng(0), np.arange(B, dtype=np.int32)
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    call = static | dict(
        is_causal=not sinks,
        key_value_seq_lengths=S - S // 7 * row,
        query_offset=S - T - row if sinks else S - T,
    )
    if static["dropout_rate"]:
        call |= dict(dropout_rng=jax.random.key(0))
    if "a rule" in extras:
        call |= dict(mask=RULE)
    if "lists of keys" in extras:
        indices = rng.integers(-1, S, (B, T, 1, LISTED), np.int32)
        call |= dict(mask=masks.KeyLists(indices))
    if "a bias" in extras:  # the gradient by pair comes from one kernel, that by key from another
        call |= dict(bias=normal(1, N, 1 if sinks else T, S))
    if "a mask" in extras:  # of empty, partial and full blocks
        block = np.arange(T)[:, None] // 256 + np.arange(S) // 256
        call |= dict(mask=rng.random((B, 1, T, S)) < (block + 1) % 3 / 2)
    if "a score_mod" in extras:
        call |= dict(score_mod=far_is_less)
    if "arrays of a score_mod" in extras:
        call |= dict(score_mod=reads_arrays())
    if "a soft cap" in extras:
        call |= dict(logits_soft_cap=SOFT_CAP)
    if "segment ids" in extras:
        ids = np.stack([_documents(S, number) for number in range(B)])
        call |= dict(query_segment_ids=ids[:, S - T :], key_value_segment_ids=ids)
    call |= dict(query=normal(B, T, N, head_size), key=normal(B, S, K, head_size))
    if values_are_keys:
        call |= dict(value=None, value_size=value_size)
    else:
        call |= dict(value=normal(B, S, K, value_size))
    do, dlse = normal(B, T, N, value_size), normal(B, N, T).astype(np.float32)
    if sinks:
        call |= dict(local_window_size=(S // 2, 0), sinks=normal(N).astype(np.float32))
    return call, (do, dlse)


def _documents(length: int, row: int) -> np.ndarray:
    """Segment ids: four documents in the first row; in the others the first continues behind the
    third."""
    return np.arange(length, dtype=np.int32) // -(-length // 4) % (4 - min(row, 1))


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


# rows that are compared as one vector: a single row of a gradient may be zero but for rounding
ROWS = 64
TOLERANCE = dict(float32=1e-4, bfloat16=2e-2, float16=4e-3)


def compiled(function: Callable, *args) -> Callable:
    """Compiles function(*args) without XLA's tuning of matrix products: the reference's took an
    H100 67 s in place of 1.5 s: results.md#self-check."""
    options = {"xla_gpu_autotune_level": "0"} if hardware.gpu() else None
    return jax.jit(function).lower(*args).compile(options)


# ---- how kernels are called ----


def results(
    problem: Problem, choice: Choice, operands: Operands, cotangents: tuple
) -> dict[str, jax.Array]:
    """The results of flash_attention and its gradients, each [B, length, heads, ...]."""

    def attend(differentiable):
        x = operands.with_differentiable(differentiable)
        o, lse, largest = autodiff.attend(problem, choice, x)
        return (o, lse), largest

    (o, lse), vjp, largest = jax.vjp(attend, operands.differentiable, has_aux=True)
    (gradients,) = vjp(cotangents)
    named = outputs(o, lse, largest)
    named |= dict(dq=gradients.query, dk=gradients.key)
    named |= {} if gradients.value is None else dict(dv=gradients.value)
    named |= {f"darray{n}": x[None, :, None, None] for n, x in enumerate(gradients.captured)}
    return named if problem.bias is None else named | dict(dbias=jnp.swapaxes(gradients.bias, 1, 2))


def forward_results(problem: Problem, choice: Choice, operands: Operands, cotangents: tuple):
    return outputs(*autodiff.attend(problem, choice, operands))


def outputs(o, lse, largest) -> dict[str, jax.Array]:
    """o, lse and, unless they are None, the largest logits, by name."""
    numbers = dict(lse=lse) if largest is None else dict(lse=lse, largest=largest)
    return dict(o=o) | {name: jnp.swapaxes(x, 1, 2)[..., None] for name, x in numbers.items()}


def tangents(
    problem: Problem, choice: Choice, operands: Operands, cotangents: tuple
) -> dict[str, jax.Array]:
    """The tangents of flash_attention's results, along the operands rolled by one row or key."""

    def attend(differentiable):
        x = operands.with_differentiable(differentiable)
        return autodiff.attend(problem, choice, x)[:2]

    x = operands.differentiable
    rolled = lambda a: jax.tree.map(lambda a: jnp.roll(a, 1, 1), a)
    along = x._replace(query=rolled(x.query), key=rolled(x.key), value=rolled(x.value))
    do, dlse = jax.jvp(attend, (x,), (along,))[1]
    return dict(do=do, dlse=jnp.swapaxes(dlse, 1, 2)[..., None])


def widen(operands: Any) -> Any:
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(wide, operands)


class EntryPoint(NamedTuple):
    """How kernels are called, and what is compared."""

    name: str  # a part of the variant's scheme
    results: Callable = results  # (problem, choice, operands, cotangents) -> arrays by name
    reference_results: Callable = results  # the same arrays, expected
    widen: Callable = widen  # operands as float32, for the reference
    sizes: dict[str, int] = {}  # of small problems, where SIZES do not fit
    # what the kernels run
    convert: Callable[[Implementation, Problem], Problem] = Implementation.converted


FLASH_ATTENTION = EntryPoint("")
FORWARD_MODE = EntryPoint("forward mode", tangents, tangents)


def check(
    implementation: Implementation,
    problem: Problem,
    all_sizes: list[dict[str, int]],
    entry: EntryPoint = FLASH_ATTENTION,
) -> Callable[[], Verdict]:
    """Compiles the kernels, and the reference in float32, for small problems of these sizes.
    Returns the function that runs and compares them."""
    with before_kernels():
        tiles = implementation.tiles(problem)
        smalls = [make(problem, sizes) for sizes in all_sizes]
        pairs = [_programs(implementation, tiles, entry, *small) for small in smalls]

    def verdict():
        errors = [_errors(*pair) for pair in pairs]
        largest = {
            name: max((e[name] for e in errors), key=lambda e: (e != e, e)) for name in errors[0]
        }
        tolerance = TOLERANCE[problem.dtype]
        # NaN is not <= it
        wrong = [f"{name} is off by {e:.1e}" for name, e in largest.items() if not e <= tolerance]
        return Verdict(
            largest, f"{', '.join(wrong)}; the tolerance is {tolerance:.0e}" if wrong else None
        )

    return verdict


def _programs(
    implementation: Implementation,
    tiles: Any,
    entry: EntryPoint,
    small: Problem,
    operands: Operands,
    cotangents: tuple,
) -> list[Callable]:
    """The program of the kernels, and that of the reference."""
    wide = dataclasses.replace(small, dtype="float32"), entry.widen(operands)
    return [
        program(implementation, tiles, entry.results, small, operands, cotangents),
        program(implementations.REFERENCE, None, entry.reference_results, *wide, widen(cotangents)),
    ]


def program(
    implementation: Implementation, tiles: Any, results: Callable, problem: Problem, *arrays
) -> Callable:
    """Compiles `results` of these operands and cotangents, by the kernels of these tiles."""
    choice = Choice(implementation, implementation.tiles_like(tiles, problem))
    run = compiled(functools.partial(results, problem, choice), *arrays)
    return functools.partial(run, *arrays)


def _errors(kernels: Callable, reference: Callable) -> dict[str, float]:
    with before_kernels():  # the reference fails if the process cannot use the GPU
        expected = jax.device_get(reference())
    ours = jax.device_get(kernels())
    return {name: error(x, expected[name]) for name, x in ours.items()}


def error(x, want) -> float:
    """The largest relative error of ROWS neighbouring rows of a head."""

    def size(x):  # [B, blocks, heads]
        squares = np.square(x).sum(-1)
        return np.sqrt(np.add.reduceat(squares, range(0, squares.shape[1], ROWS), axis=1))

    x, want = (a.astype(np.float64) for a in (x, want))
    return float(np.max(size(x - want) / np.maximum(size(want), 1e-3)))
