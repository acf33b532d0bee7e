"""The contract between a call and an implementation: a Backend, its passes, and the one chosen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase


class PagedKernel(NamedTuple):
    """Attends to keys and values in pages where they lie: rows of split_kv.py, forward only."""

    # why it cannot read pages of these shapes [P, page, K, n] and, if of 8 bits, this dtype
    why_not: Callable[[Problem, tuple[tuple[int, ...], ...], str | None], str | None]
    # for pages of so many keys, and of this dtype of 8 bits
    tiles: Callable[[Problem, int, str | None], Any]
    forward: Callable  # (problem, tiles, operands, table, scales if of 8 bits)
    # whether it had better attend to a copy in order, of a problem whose rows are not one tile
    copies_prompts: Callable[[Problem], bool] = lambda problem: True
    takes_8_bits_alone: bool = False  # whether keys or values alone may be in 8 bits


def never(tiles) -> bool:
    """The default `Backend.sums_delta`."""
    return False


def trace_now(problem: Problem, operands: Operands) -> None:
    """The default `Backend.results_like`: the forward is traced at once."""


class Backend(NamedTuple):
    """An implementation, and what it can do. One that can run the forward of a problem can also run
    its backward."""

    name: str
    why_not: Callable[[Problem], str | None]  # None: it can run this problem; else the reason
    # None: it runs a problem that names no implementation
    why_not_by_default: Callable[[Problem], str | None]
    tiles: Callable[[Problem], Any]  # a hashable Tiles, or None
    # (problem, tiles, operands)                    -> o, online_softmax.SoftmaxState
    forward: Callable
    # lse in its log base, +inf for a row that saw no key; do and delta have the factor of
    # `SoftmaxState.backward_lse`: (problem, tiles, operands, lse, do, delta) -> Gradients
    backward: Callable
    own_kernels: bool = False  # not XLA's: a GPU runs them by default only after the self-check
    is_interpretable: bool = True  # Pallas' interpreter runs its kernels where there is no GPU
    # forward mode, for which blockwise's serves where this is None: (problem, tiles, operands,
    # their tangents, online_softmax.RowLse or what the backward takes, o, the sinks' part of the
    # tangent of lse) -> the tangents of o and lse; a tangent that is None is zero
    tangent: Callable | None = None
    # a few products of whole arrays, which vmap maps and XLA's partitioner cuts by themselves
    is_dense: bool = False
    paged: PagedKernel | None = None  # None: it attends to a copy of the pages in order
    keeps_base_2: bool = False  # its scores are in the problem's log base, else in base e
    # its backward takes for lse the `online_softmax.RowScale`, and so do and delta as they are
    takes_row_scale: bool = False
    # whether the backward with these tiles takes for delta the `online_softmax.DeltaTerms`
    sums_delta: Callable = never
    # whether the backward with these tiles is its own; else it is blockwise's
    has_backward: Callable = lambda tiles: True
    of_gradient: Callable = lambda tiles: tiles  # the tiles of a forward that the backward follows
    # (tiles, problem) -> the tiles of a problem, of the same kernels as these; None: all problems
    # have the same
    of_same_kernels: Callable | None = None
    # the tiles of so many calls under vmap: (tiles, problem, calls)
    of_calls: Callable = lambda tiles, problem, calls: tiles
    # (problem, operands) -> arrays of the shapes and dtypes of the forward's results, which is then
    # traced when it is lowered
    results_like: Callable = trace_now
    # what is copied for its kernels in each call
    copies: Callable[[Problem], str | None] = lambda problem: None
    # what a user should know of it on the GPU that a call is for
    remark: Callable[[], str | None] = lambda: None

    def __repr__(self):
        """Its name, and what is around its passes; a jaxpr prints it often."""
        return repr(self.forward) if isinstance(self.forward, Pass) else self.name

    def __hash__(self):
        """By little of it: each call takes it, and passes hold the backends that they wrap."""
        return hash((self.name, self.forward))

    def derivatives(self, tiles) -> str:
        """In which modes, of which order, and by what where that is something else."""
        if self.is_dense:
            return "every mode, of any order"
        if not self.own_kernels:
            return "every mode, of first and second order"
        has_tangent = self.tangent and (tiles is None or tiles.tangent)
        has_kernel = {"reverse": self.has_backward(tiles), "forward": has_tangent}
        lacking = " and ".join(mode for mode, has in has_kernel.items() if not has)
        more = f"; {lacking} mode by blockwise" if lacking else ""
        return f"every mode, of first order, and of second by blockwise{more}"

    def adds_in_any_order(self, problem: Problem) -> bool:
        """Whether its backward does, instead of another that is deterministic."""
        in_order = dataclasses.replace(problem, deterministic=True)
        return self.tiles(problem) != self.tiles(in_order)

    def log_base(self, problem: Problem) -> LogBase:
        """Of its scores."""
        return problem.log_base if self.keeps_base_2 else LogBase.E

    def tiles_like(self, tiles, problem: Problem):
        """The tiles of another problem: of the same kernels, and of a forward that a backward
        follows where these are."""
        like = self.of_same_kernels
        new = self.tiles(problem) if like is None else like(tiles, problem)
        return self.of_gradient(new) if tiles == self.of_gradient(tiles) else new


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass of a backend, called as that is: a base for what does something around `inner`, and
    stands in the backend's place by `Choice.wrap`."""

    takes_delta_terms: ClassVar[bool] = False  # else delta, as it is exchanged between devices
    backend: Backend
    name: Literal["forward", "backward", "tangent"]

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        raise NotImplementedError

    @property
    def inner(self) -> Callable:
        """The backend's own pass."""
        return getattr(self.backend, self.name)


class Choice(NamedTuple):
    """An implementation, and its tiles for a problem."""

    backend: Backend
    tiles: Any
    # first derivatives in reverse mode alone: its passes exchange what several devices have
    reverse_only: bool = False

    def for_gradient(self) -> "Choice":
        """That of a forward that the backward follows, and of the backward."""
        return self._replace(tiles=self.backend.of_gradient(self.tiles))

    def wrap(self, wrapper: type[Pass], *options) -> "Choice":
        """The same, with each pass in a wrapper(backend, its name, *options)."""
        return self._replace(backend=_wrapped(self.backend, wrapper, options))


@functools.lru_cache  # calls that are alike get the same object, which equals itself at once
def _wrapped(backend: Backend, wrapper: type[Pass], options: tuple) -> Backend:
    names = [name for name in ("forward", "backward", "tangent") if getattr(backend, name)]
    wrapped = backend._replace(**{name: wrapper(backend, name, *options) for name in names})
    return wrapped if wrapper.takes_delta_terms else wrapped._replace(sums_delta=never)


def no_empty_axis(problem: Problem) -> str | None:
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None
