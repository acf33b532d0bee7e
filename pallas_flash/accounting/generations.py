"""The generations of attention, each with its formulas: what its forward and backward cost, kernel
by kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_flash import autodiff, backends
from pallas_flash.accounting import costs, costs_hopper
from pallas_flash.accounting.costs import Cost
from pallas_flash.arguments import Problem
from pallas_flash.attention import normalised


class Generation(NamedTuple):
    forward: Callable  # (problem, tiles) -> Cost by kernel
    backward: Callable
    delta: Callable  # (problem) -> Cost
    extra_memory: Callable  # (problem) -> bytes


GENERATIONS = {
    "standard": Generation(
        costs.standard_forward, costs.standard_backward, costs.delta, costs.standard_memory
    ),
    "flash1": Generation(
        costs.flash1_forward, costs.flash1_backward, costs.delta, costs.flash1_memory
    ),
    "triton": Generation(
        costs.portable_forward, costs.portable_backward, costs.delta, costs.portable_memory
    ),
    "hopper": Generation(
        costs_hopper.forward, costs_hopper.backward, costs_hopper.delta, costs_hopper.memory
    ),
}


def forward(generation: str, problem: Problem, tiles: Any = None) -> dict[str, Cost]:
    """By kernel. `cast` and `merge` are no kernels but XLA's: float32 sums rounded to 16 bits, and
    decoding's parts joined."""
    return _named(generation).forward(
        _countable(problem), tiles or default_tiles(generation, problem)
    )


def backward(generation: str, problem: Problem, tiles: Any = None) -> dict[str, Cost]:
    """By kernel. `delta`, what the backward needs of o, do and dlse, and `cast` are no kernels but
    passes of XLA."""
    kernels = _named(generation).backward(
        _countable(problem), tiles or default_tiles(generation, problem)
    )
    return dict(delta=_named(generation).delta(problem)) | kernels


def extra_memory(generation: str, problem: Problem) -> dict[str, int]:
    """Bytes of the arrays that are neither operands nor results at the worst moment of the
    `forward` and the `backward`."""
    return _named(generation).extra_memory(_countable(problem))


def lower_bound(problem: Problem, sram: int) -> float:
    """T S H^2 / M: the elements that any exact algorithm moves for an SRAM of M = `sram` elements,
    but for a constant.

    Theorem 2 and proposition 3 of arXiv:2205.14135: flash1 moves Theta of it, and no algorithm less
    for all M in [H, S H].
    """
    p = problem
    return p.batch * p.heads * p.queries * p.keys * max(p.head_size, p.value_size) ** 2 / sram


def default_tiles(generation: str, problem: Problem) -> Any:
    """The tiles that an implementation takes unless told otherwise."""
    return {backend.name: backend for backend in backends.BACKENDS}[generation].tiles(problem)


def attention(implementation: str, tiles: Any = None, **call: Any) -> Callable:
    """(q, k, v) -> o by an implementation, with tiles of your own; `call` is what `flash_attention`
    takes by name."""

    def attend(q, k, v):
        problem, operands = normalised(q, k, v, **call)
        choice = backends.choose(problem, implementation)
        o, *_ = autodiff.attend(problem, choice._replace(tiles=tiles or choice.tiles), operands)
        return o

    return attend


def _named(generation: str) -> Generation:
    if generation not in GENERATIONS:
        raise ValueError(f"generation must be one of {', '.join(GENERATIONS)}; got {generation!r}.")
    return GENERATIONS[generation]


def _countable(p: Problem) -> Problem:
    has_data = p.resolved_mask.has_data or p.resolved_mask.where is not None
    if p.bias or p.mask or p.score or p.soft_cap or p.sinks or p.dropped or has_data:
        raise NotImplementedError(
            "the formulas know masks without data, no bias, dense mask, score_mod, soft cap, sinks "
            "or dropout: observe the "
            f"kernels. The call: {p}."
        )
    return p
