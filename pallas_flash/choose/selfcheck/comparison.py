"""Compares output, log-sum-exp and gradients of kernels with the reference, on small problems of
the same variant as a call's."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import specs
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


def widths(problem: Problem) -> dict[str, int]:
    """Head sizes as the kernels pad them."""
    names = "head_size", "value_size"
    return {name: -(-getattr(problem, name) // WIDTH) * WIDTH for name in names}


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
    p, rate = problem, problem.dropped / dropout.LEVELS
    variant = p.dtype, specs.variants(p)
    call, cotangents = specs.make_call(widths(p) | sizes, *variant, rate=rate)
    small, operands = arguments.normalise(Call(**call, deterministic=p.deterministic))
    small = dataclasses.replace(small, waits_for_reads=p.waits_for_reads)
    return small, *jax.device_put((operands, cotangents))


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
