"""Which implementation runs a call, and why not another: by the call's argument, the environment,
the table's order, and what this machine's self-check found."""

import os
from collections.abc import Callable
from typing import NamedTuple

from pallas_flash import backends
from pallas_flash.arguments import Problem
from pallas_flash.backends import Backend, Choice, blockwise_tangent
from pallas_flash.selfcheck import comparison, verdicts

JAX_NN_NAMES = ("xla", "cudnn")  # of what jax.nn has; here they choose, as None does


def choose(problem: Problem, implementation: str | None = None, check: bool = True) -> Choice:
    """The implementation that the call or the environment names, or the first that is a default and
    right on this machine. Without `check` nothing runs, and kernels never checked count as
    right."""
    why_not_here = lambda backend: verdicts.why_not(backend, problem, check)
    return first(problem, requested(implementation), why_not_here)


def requested(implementation: str | None = None) -> str | None:
    """The implementation that a call names, or else PALLAS_FLASH_IMPLEMENTATION."""
    if implementation not in (None, *JAX_NN_NAMES):
        return implementation
    name, names = os.environ.get("PALLAS_FLASH_IMPLEMENTATION") or None, backends.names()
    if name not in (None, *names):
        raise ValueError(
            f"PALLAS_FLASH_IMPLEMENTATION must be unset or one of {', '.join(names)}; got {name!r}."
        )
    return name


def first(
    problem: Problem,
    name: str | None = None,
    why_not_here: Callable[[Backend], str | None] = lambda backend: None,
) -> Choice:
    """The implementation of this name, or the first in the table that runs the problem by default
    and that why_not_here says nothing against."""
    if name is not None:
        return _named(problem, name)
    for backend in backends.BACKENDS:
        # the cheap check comes first: why_not may import kernels
        if backend.why_not_by_default(problem) or backend.why_not(problem):
            continue
        if not why_not_here(backend):
            return Choice(backend, backend.tiles(problem))
    raise AssertionError("the reference runs everything")


def _named(problem: Problem, name: str) -> Choice:
    if name not in backends.names():
        raise ValueError(
            f"implementation must be None or one of {', '.join(backends.names())}, or jax.nn's "
            f"{' or '.join(JAX_NN_NAMES)}, which mean the same as None; got {name!r}."
        )
    backend = backends.find(name)
    if why_not := backend.why_not(problem):
        raise NotImplementedError(
            f"implementation {name!r} cannot run this call: {why_not}. The call: {problem}."
        )
    return Choice(backend, backend.tiles(problem))


def checked_tangent(backend: Backend, problem: Problem, tiles, *args):
    """The forward mode of kernels, which is checked where it is first asked for; blockwise's, if it
    is wrong."""
    if verdicts.why_not(backend, problem, entry=comparison.FORWARD_MODE):
        return blockwise_tangent(backend.log_base(problem), problem, *args)
    return backend.tangent(problem, tiles, *args)


class Against(NamedTuple):
    """What speaks against an implementation for a call; None: nothing."""

    cannot: Callable[[Backend], str | None]
    by_default: Callable[[Backend], str | None]
    here: Callable[[Backend], str | None]  # as far as this machine's self-check is known
    is_known: Callable[[Backend], bool]

    @classmethod
    def flash_attention(cls, problem: Problem) -> "Against":
        return cls(
            lambda backend: backend.why_not(problem),
            lambda backend: backend.why_not_by_default(problem),
            lambda backend: verdicts.why_not(backend, problem, check=False),
            lambda backend: verdicts.is_known(backend, problem),
        )


def reasons(
    taken: Backend, implementation: str | None, against: Against
) -> tuple[dict[str, str], str | None]:
    """For each implementation that was not taken, why; and on what condition the one was."""
    name, conditions = requested(implementation), []
    if implementation in JAX_NN_NAMES:
        conditions.append(
            f"chosen: {implementation!r} is a name of jax.nn, and chooses as None does"
        )
    if name is None and not against.is_known(taken):
        conditions.append(
            "if its self-check passes on this machine: the first call runs it, or python -m "
            "pallas_flash"
        )
    elif name not in (None, implementation):
        conditions.append("as PALLAS_FLASH_IMPLEMENTATION says")

    def why_not(backend: Backend) -> str:
        if reason := against.cannot(backend):
            return reason
        if name is not None:
            return f"{taken.name} was selected by name"
        return (
            against.by_default(backend) or against.here(backend) or f"{taken.name} comes before it"
        )

    others = [backend for backend in backends.BACKENDS if backend is not taken]
    return {backend.name: why_not(backend) for backend in others}, ", ".join(conditions) or None
