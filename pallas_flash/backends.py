"""The table of implementations, and which of them serves a problem."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_flash import blockwise, reference
from pallas_flash.arguments import Problem
from pallas_flash.kernels import device, hopper, portable
from pallas_flash.kernels.classic import flash1, standard


class Backend(NamedTuple):
    """An implementation. One that can run the forward of a problem can also run its backward."""

    name: str
    why_not: Callable[[Problem], str | None]  # None: it can run this problem; else the reason
    why_not_by_default: Callable[[Problem], str | None]  # None: it is taken unasked where it can run
    tiles: Callable[[Problem], Any]  # a hashable Tiles, or None
    forward: Callable  # (problem, tiles, operands)                    -> o, lse
    backward: Callable  # (problem, tiles, operands, o, lse, do, delta) -> dq, dk, dv, dbias (None without a bias)


class Choice(NamedTuple):
    backend: Backend
    tiles: Any


def _on_gpu() -> bool:
    return device.compute_capability() is not None or jax.default_backend() == "gpu"


def _no_empty_axis(problem: Problem) -> str | None:
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None


def _no_tiles(problem: Problem) -> str | None:
    """Why no Pallas kernel can tile a problem."""
    symbols = [str(n) for n in (problem.batch, problem.queries, problem.keys) if not isinstance(n, int)]
    if symbols:
        return f"a kernel's grid is made of known sizes; got {', '.join(symbols)} of jax.export"
    return _no_empty_axis(problem)


BACKENDS = (
    Backend(
        "hopper",
        lambda p: _no_tiles(p) or hopper.why_not(p),
        hopper.why_not_by_default,
        lambda p: hopper.tiles(p),
        hopper.forward,
        hopper.backward,
    ),
    Backend(
        "portable",
        lambda p: _no_tiles(p) or portable.why_not(p),
        lambda p: None if _on_gpu() else "there is no GPU: it would run in Pallas' interpreter, slowly",
        lambda p: portable.tiles(p),
        portable.forward,
        portable.backward,
    ),
    Backend(
        "blockwise",
        _no_empty_axis,
        lambda p: None,
        lambda p: blockwise.tiles(p),
        blockwise.forward,
        blockwise.backward,
    ),
    Backend(
        "reference",
        lambda p: None,
        lambda p: None,
        lambda p: None,
        lambda problem, tiles, operands: reference.attend(problem, operands),
        lambda problem, tiles, *args: reference.backward(problem, *args),
    ),
    *(
        Backend(
            name,
            lambda p, kernels=kernels: _no_tiles(p) or portable.why_not(p) or kernels.why_not(p),
            lambda p: "an earlier algorithm, kept to compare with: ask for it by name",
            lambda p, kernels=kernels: kernels.tiles(p),
            kernels.forward,
            kernels.backward,
        )
        for name, kernels in (("flash1", flash1), ("standard", standard))
    ),
)
NAMES = tuple(backend.name for backend in BACKENDS)
OF_JAX_NN = ("xla", "cudnn")  # its names for what it has; here they choose, as None does


def choose(problem: Problem, implementation: str | None = None) -> Choice:
    """The implementation asked for, or the first in the table that runs the problem and is taken unasked."""
    if implementation is not None and implementation not in NAMES + OF_JAX_NN:
        raise ValueError(
            f"implementation must be None or one of {', '.join(NAMES)}, or jax.nn's {' or '.join(OF_JAX_NN)}, which choose as "
            f"None does; got {implementation!r}."
        )
    implementation = None if implementation in OF_JAX_NN else implementation
    for backend in BACKENDS:
        if implementation not in (None, backend.name):
            continue
        why_not = backend.why_not(problem)
        if implementation is not None and why_not:
            raise NotImplementedError(f"implementation {implementation!r} cannot run this call: {why_not}. The call: {problem}.")
        if implementation is not None or not (why_not or backend.why_not_by_default(problem)):
            return Choice(backend, backend.tiles(problem))
    raise AssertionError("the reference runs everything")


def why_not_taken(problem: Problem, taken: Backend, asked_for: bool) -> dict[str, str]:
    """For each other implementation, why `taken` was taken before it."""

    def reason(backend):
        if why_not := backend.why_not(problem):
            return why_not
        if asked_for:
            return f"{taken.name} was asked for"
        return backend.why_not_by_default(problem) or f"{taken.name} comes before it"

    return {backend.name: reason(backend) for backend in BACKENDS if backend is not taken}
