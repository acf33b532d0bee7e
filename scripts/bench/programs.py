"""A contender's pass over a case as a program that is ready to run: compiled by XLA, or torch's;
and its verdict."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts.bench import machine
from scripts.bench.cases import PASSES, RESULTS, Case
from scripts.bench.peers import Contender

# rows that are compared as one vector: a single row of a gradient may be zero but for rounding
CHECK_BLOCK = 64
TOLERANCE = dict(float32=1e-5, bfloat16=1e-2, float16=2e-3)
# as many bits; what XLA and others make of float32 on a GPU, unless asked not to
TF32 = TOLERANCE["float16"]


class Program(NamedTuple):
    call: Callable[[], Any]  # starts it
    wait: Callable[[Any], Any]  # until what `call` returned is there
    results: Callable[[Any], list[jax.Array]]  # of what `call` returned, as RESULTS names them


class TooLarge(Exception):
    """The program would not fit into the memory."""


def compiled(contender: Contender, case: Case, passes: str):
    """The program that is timed, which XLA has compiled."""
    return _compiled(contender, case, passes)[-1]


@functools.cache
def _compiled(contender: Contender, case: Case, passes: str) -> list:
    """One program of (q, k, v, do, operands); two for the backward alone, the first of which gives
    what the second takes."""

    def attend(operands):
        return lambda q, k, v: contender.attend(case, q, k, v, **operands)

    def forward(q, k, v, do, operands):
        return (attend(operands)(q, k, v),)

    def both(q, k, v, do, operands):
        o, vjp = jax.vjp(attend(operands), q, k, v)
        return o, *vjp(do)

    def residuals(q, k, v, do, operands):
        return jax.vjp(attend(operands), q, k, v)[1]

    shapes = (
        *case.shapes(),
        jax.eval_shape(lambda *kv: contender.operands(case, *kv), *case.shapes()[1:3]),
    )
    first = jax.jit(
        {"forward": forward, "backward": residuals, "forward+backward": both}[passes]
    ).trace(*shapes)
    programs = [first.lower().compile()]
    if passes == "backward":
        backward = jax.jit(lambda vjp, do: vjp(do)).trace(first.out_info, shapes[3])
        programs.append(backward.lower().compile())
    return programs


def program(contender: Contender, case: Case, passes: str) -> Program:
    """Ready to run, with inputs."""
    if contender.is_torch:
        return _torch_program(contender, case, passes)
    programs = _compiled(contender, case, passes)
    for one in programs:
        _must_fit(one.memory_analysis())
    arguments = *case.inputs(), jax.device_put(contender.operands(case, *case.inputs()[1:3]))
    if passes == "backward":
        arguments = programs[0](*arguments), arguments[3]
    return Program(functools.partial(programs[-1], *arguments), jax.block_until_ready, list)


def _must_fit(sizes):
    needed = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    if needed > memory_limit():
        raise TooLarge(
            f"it needs {needed / 1e9:.1f} GB, over the limit of {memory_limit() / 1e9:.1f} GB"
        )


def memory_limit() -> int:
    """Bytes that a program may take: all that JAX has of a GPU, or half the machine's."""
    stats = jax.devices()[0].memory_stats()
    return (
        stats["bytes_limit"]
        if stats
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )


def _torch_program(contender: Contender, case: Case, passes: str) -> Program:
    import torch

    *qkv, do = (torch.from_dlpack(x) for x in case.inputs())
    operands = {
        name: torch.from_dlpack(x)
        for name, x in contender.operands(case, *case.inputs()[1:3]).items()
    }

    def forward():
        return contender.attend(case, *qkv, **operands)

    def backward(o):
        return torch.autograd.grad(o, qkv, do, retain_graph=passes == "backward")

    def both():
        o = forward()
        return o, *backward(o)

    if passes == "forward":
        call = lambda: (forward(),)
    else:
        qkv = [x.requires_grad_() for x in qkv]
        o = forward() if passes == "backward" else None
        call = both if o is None else functools.partial(backward, o)
    wait = lambda results: torch.cuda.synchronize() if do.is_cuda else None
    return Program(
        call, wait, lambda results: [jnp.from_dlpack(x.detach().contiguous()) for x in results]
    )


# ---- is it right? ----


class Verdict(NamedTuple):
    error: float  # the largest, against dense attention in float32
    status: str = "ok"  # or "wrong"
    reason: str = ""


@functools.cache
def check(contender: Contender, case: Case, passes: str) -> Verdict:
    """Of a part of the case."""
    case = _checked_part(case)
    run = program(contender, case, passes)
    started = run.call()
    run.wait(started)
    right = dict(zip(RESULTS[PASSES[-1]], expected(case), strict=True))
    errors = {
        name: error(x, right[name])
        for name, x in zip(RESULTS[passes], run.results(started), strict=True)
    }
    return _verdict(
        errors,
        TOLERANCE[case.dtype],
        may_be_tf32=contender.is_peer and case.dtype == "float32" and machine.on_gpu(),
    )


def _verdict(errors: dict[str, float], tolerance: float, may_be_tf32: bool) -> Verdict:
    worst = float(np.max([*errors.values()]))
    if tolerance < worst <= TF32 and may_be_tf32:
        return Verdict(
            worst,
            reason="its error is that of TF32, in which it may multiply; pallas_flash multiplies "
            "in float32",
        )
    # nan is not
    off = [f"{name} is off by {e:.1e}" for name, e in errors.items() if not e <= tolerance]
    return (
        Verdict(worst, "wrong", f"{', '.join(off)}; the tolerance is {tolerance:g}")
        if off
        else Verdict(worst)
    )


def _checked_part(case: Case) -> Case:
    """The first tokens, and of many rows the first: the dense scores of more fit into few
    machines."""
    T, S = min(case.T, check_length()), min(case.S, check_length())
    return case._replace(T=T, S=S, B=min(case.B, max(1, check_length() // S)))


def check_length() -> int:
    return 16384 if machine.on_gpu() else 8192


@functools.lru_cache(maxsize=2)
def expected(case: Case) -> list[jax.Array]:
    """o, dq, dk, dv."""
    with jax.default_matmul_precision("highest"):
        one = compiled(DENSE, case._replace(dtype="float32"), PASSES[-1])
    return one(*(x.astype(jnp.float32) for x in case.inputs()), DENSE.operands(case))


def _head_by_head(case: Case, q, k, v, visible):
    """Dense attention of one head after the other, lest the scores of all take the memory."""
    k, v = (jnp.repeat(x, case.N // case.K, axis=2) for x in (k, v))

    @jax.checkpoint
    def one_head(x):
        q, k, v = x
        s = jnp.where(visible[0, 0], q @ k.T * case.H**-0.5, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    heads = [
        jnp.moveaxis(x, 2, 1).reshape(case.B * case.N, x.shape[1], x.shape[3]) for x in (q, k, v)
    ]
    o = lax.map(one_head, heads)
    return jnp.moveaxis(o.reshape(case.B, case.N, case.T, case.value_size), 1, 2)


DENSE = Contender("dense", _head_by_head, operands=lambda case, *kv: dict(visible=case.visible()))


def error(x, want) -> float:
    """The largest relative error of a block of neighbouring rows of one head."""
    if x.shape != want.shape:
        raise ValueError(f"the shape must be {want.shape}; got {x.shape}.")
    return float(_error(x, want))


@jax.jit
def _error(x, want):
    def size(x):  # [B, blocks, heads]
        squares = jnp.square(x).sum(-1)
        squares = jnp.pad(squares, ((0, 0), (0, -x.shape[1] % CHECK_BLOCK), (0, 0)))
        return jnp.sqrt(squares.reshape(x.shape[0], -1, CHECK_BLOCK, x.shape[2]).sum(2))

    return jnp.max(size(x.astype(jnp.float32) - want) / jnp.maximum(size(want), 1e-3))
