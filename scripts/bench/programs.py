"""A contender's pass over a case as a program that is ready to run, compiled by XLA or torch's; and
whether its results are right."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts.bench import machine
from scripts.bench.cases import JVP, PASSES, RESULTS, Case
from scripts.bench.peers import Contender, contender

# rows that are compared as one vector: a single row of a gradient may be zero but for rounding
CHECK_BLOCK = 64
TOLERANCE = dict(float32=1e-5, bfloat16=1e-2, float16=2e-3)
# of as many bits, in which XLA and others multiply float32 on a GPU by default
TF32 = TOLERANCE["float16"]


class Program(NamedTuple):
    call: Callable[[], Any]  # asynchronous
    wait: Callable[[Any], Any]  # until what `call` returned is ready
    results: Callable[[Any], list[jax.Array]]  # what `call` returned, in the order of RESULTS


class TooLarge(Exception):
    """The program would not fit into memory."""


class NoReference(Exception):
    """What results are checked against failed."""


def compiled(contender: Contender, case: Case, passes: str):
    """The program that is timed, as XLA compiled it."""
    return _compiled(contender, case, passes)[-1]


@functools.cache
def _compiled(contender: Contender, case: Case, passes: str) -> list:
    # XLA's autotuning of the reference takes a minute on an H100, and may fail
    is_untuned = contender is DENSE and machine.on_gpu()
    options = {"xla_gpu_autotune_level": "0"} if is_untuned else None
    programs = traced(contender, case, passes)
    return [program.lower().compile(compiler_options=options) for program in programs]


def traced(contender: Contender, case: Case, passes: str) -> list[jax.stages.Traced]:
    """One program of (q, k, v, do, operands), in forward mode with three tangents in place of do;
    for the backward alone two: one that returns the residuals, and one that takes them."""

    def attend(operands):
        return lambda q, k, v: contender.attend(case, q, k, v, **operands)

    def forward(q, k, v, do, operands):
        return (attend(operands)(q, k, v),)

    def both(q, k, v, do, operands):
        o, vjp = jax.vjp(attend(operands), q, k, v)
        return o, *vjp(do)

    def residuals(q, k, v, do, operands):
        return jax.vjp(attend(operands), q, k, v)[1]

    def along(q, k, v, tangents, operands):
        return jax.jvp(attend(operands), (q, k, v), tangents)

    *qkv, do = case.shapes()
    operands = jax.eval_shape(lambda *kv: contender.operands(case, *kv), *qkv[1:])
    shapes = *qkv, tuple(qkv) if passes == JVP else do, operands
    run = {"forward": forward, "backward": residuals, "forward+backward": both, JVP: along}
    programs = [jax.jit(run[passes]).trace(*shapes)]
    if passes == "backward":
        residuals_of = programs[0].out_info
        programs.append(jax.jit(lambda vjp, do: vjp(do)).trace(residuals_of, shapes[3]))
    return programs


def program(contender: Contender, case: Case, passes: str) -> Program:
    """Ready to run on the case's inputs."""
    if contender.is_torch:
        return _torch_program(contender, case, passes)
    programs = _compiled(contender, case, passes)
    for one in programs:
        _must_fit(one.memory_analysis())
    arguments = (
        *_inputs(case, passes),
        jax.device_put(contender.operands(case, *case.inputs()[1:3])),
    )
    if passes == "backward":
        arguments = programs[0](*arguments), arguments[3]
    return Program(functools.partial(programs[-1], *arguments), jax.block_until_ready, list)


def _inputs(case: Case, passes: str) -> tuple:
    """q, k, v, and do or tangents."""
    *qkv, do = case.inputs()
    return *qkv, tuple(jnp.flip(x, 1) for x in qkv) if passes == JVP else do


def _must_fit(sizes):
    needed = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    if needed > memory_limit():
        raise TooLarge(
            f"it needs {needed / 1e9:.1f} GB, over the limit of {memory_limit() / 1e9:.1f} GB"
        )


def memory_limit() -> int:
    """Bytes that a program may take: all that JAX has of a GPU, or half of the machine's memory."""
    if stats := jax.devices()[0].memory_stats():
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _torch_program(contender: Contender, case: Case, passes: str) -> Program:
    import torch

    *qkv, do = map(torch.from_dlpack, case.inputs())
    operands = contender.operands(case, *case.inputs()[1:3])
    operands = {name: torch.from_dlpack(x) for name, x in operands.items()}

    def forward():
        return contender.attend(case, *qkv, **operands)

    def backward(o):
        return torch.autograd.grad(o, qkv, do, retain_graph=passes == "backward")

    def both():
        o = forward()
        return o, *backward(o)

    def wait(results):
        if do.is_cuda:
            torch.cuda.synchronize()

    def results(results):
        return [jnp.from_dlpack(x.detach().contiguous()) for x in results]

    if passes == "forward":
        return Program(lambda: (forward(),), wait, results)
    qkv = [x.requires_grad_() for x in qkv]
    call = both if passes != "backward" else functools.partial(backward, forward())
    return Program(call, wait, results)


# ---- is it right? ----


class CheckResult(NamedTuple):
    error: float  # the largest, against dense attention in float32
    status: str = "ok"  # or "wrong"
    reason: str = ""


@functools.cache
def check(contender: Contender, case: Case, passes: str) -> CheckResult:
    """Compares a contender with the reference on the first tokens and rows of the case."""
    case = _truncate(case)
    all_ = _all(passes)
    wanted = dict(zip(RESULTS[all_], expected(case, all_), strict=True))
    run = program(contender, case, passes)
    started = run.call()
    run.wait(started)
    results = zip(RESULTS[passes], run.results(started), strict=True)
    errors = {name: error(x, wanted[name]) for name, x in results}
    worst, tolerance = float(np.max([*errors.values()])), TOLERANCE[case.dtype]
    may_be_tf32 = contender.is_peer and case.dtype == "float32" and machine.on_gpu()
    if may_be_tf32 and tolerance < worst <= TF32:
        reason = "its error is that of TF32, in which it may multiply; pallas_flash uses float32"
        return CheckResult(worst, reason=reason)
    # a nan is not within it
    off = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= tolerance]
    reason = f"{', '.join(off)}; the tolerance is {tolerance:g}"
    return CheckResult(worst, "wrong", reason) if off else CheckResult(worst)


def _truncate(case: Case) -> Case:
    """The case with as many tokens and rows as dense attention can hold in memory."""
    T, S = min(case.T, check_length()), min(case.S, check_length())
    return case._replace(T=T, S=S, B=min(case.B, max(1, check_length() // S)))


def check_length() -> int:
    return 16384 if machine.on_gpu() else 8192


@functools.lru_cache(maxsize=2)
def expected(case: Case, passes: str) -> list[jax.Array]:
    """The RESULTS of dense attention."""
    try:
        wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        inputs = _inputs(case, passes)
        operands = dense(case).operands(case, *inputs[1:3])
        arguments = jax.tree.map(wide, (*inputs, operands))
        return jax.block_until_ready(reference(case, passes)(*arguments))
    except Exception as error:
        raise NoReference(f"{type(error).__name__}: {error}") from error


def reference(case: Case, passes: str):
    """Dense attention, compiled for `check` of these passes."""
    with jax.default_matmul_precision("highest"):
        return compiled(dense(case), _truncate(case)._replace(dtype="float32"), _all(passes))


def _all(passes: str) -> str:
    """One program has all results but the tangent."""
    return JVP if passes == JVP else PASSES[-1]


def _head_by_head(case: Case, q, k, v, mask):
    """Dense attention, which holds the scores of one head at a time."""
    k, v = (jnp.repeat(x, case.N // case.K, axis=2) for x in (k, v))

    @jax.checkpoint
    def one_head(qkv):
        q, k, v = qkv
        s = jnp.where(mask[0, 0], q @ k.T * case.H**-0.5, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    by_head = lambda x: jnp.moveaxis(x, 2, 1).reshape(case.B * case.N, x.shape[1], x.shape[3])
    o = lax.map(one_head, [by_head(x) for x in (q, k, v)])
    return jnp.moveaxis(o.reshape(case.B, case.N, case.T, case.value_size), 1, 2)


DENSE = Contender("dense", _head_by_head, operands=lambda case, *kv: dict(mask=case.dense_mask()))


def dense(case: Case) -> Contender:
    """What the results are compared with: DENSE, which has none of the further features."""
    return contender("reference") if case.extras else DENSE


def error(x, want) -> float:
    """The largest relative error of a block of CHECK_BLOCK rows of one head."""
    if x.shape != want.shape:
        raise ValueError(f"the shape must be {want.shape}; got {x.shape}.")
    return float(_error(x, want))


@jax.jit
def _error(x, want):
    def norm(x):  # [B, blocks, heads]
        squares = jnp.square(x).sum(-1)
        squares = jnp.pad(squares, ((0, 0), (0, -x.shape[1] % CHECK_BLOCK), (0, 0)))
        return jnp.sqrt(squares.reshape(x.shape[0], -1, CHECK_BLOCK, x.shape[2]).sum(2))

    return jnp.max(norm(x.astype(jnp.float32) - want) / jnp.maximum(norm(want), 1e-3))
