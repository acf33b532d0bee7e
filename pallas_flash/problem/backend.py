"""The contract between a call and an implementation: a Backend, its passes, and the one chosen."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from pallas_flash.masks.resolved_lists import LEAST_TABLE
from pallas_flash.problem.arguments import Operands, Problem, with_table
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import Pages


def no_lists(problem: Problem) -> bool:
    """The default `takes_lists`."""
    return False


class PagedKernel(NamedTuple):
    """A forward that reads keys and values in pages where they lie, by split-KV decoding."""

    why_not: Callable[[Problem, Pages], str | None]  # why it cannot read such pages, or None
    tiles: Callable[[Problem, Pages], Any]
    forward: Callable  # (problem, tiles, operands, PageTable, scales of keys and of values)
    # whether a problem with more rows than decoding takes had better attend to a copy of the pages
    copies_prompts: Callable[[Problem], bool] = lambda problem: True
    # whether it reads the keys that a problem's lists name; else it attends to a copy of the pages
    takes_lists: Callable[[Problem], bool] = no_lists


def never(tiles) -> bool:
    """The default `Backend.sums_delta`."""
    return False


def trace_now(problem: Problem, operands: Operands) -> None:
    """The default `Backend.results_like`: the forward is traced at once."""


class Backend(NamedTuple):
    """A row of the table: an implementation and what it can do. Where it can run a problem's
    forward, it can run the backward too."""

    name: str
    why_not: Callable[[Problem], str | None]  # None: it can run this problem; else the reason
    # None: it runs a problem that names no implementation
    why_not_by_default: Callable[[Problem], str | None]
    tiles: Callable[[Problem], Any]  # a hashable Tiles, or None
    # (problem, tiles, operands)                    -> o, online_softmax.SoftmaxState
    forward: Callable
    # (problem, tiles, operands, lse, do, delta) -> Gradients. lse is in the log base of its scores,
    # +inf for a row without keys; do and delta have the factor of `SoftmaxState.backward_lse`
    backward: Callable
    own_kernels: bool = False  # not XLA's: a GPU runs them by default only after the self-check
    is_interpretable: bool = True  # Pallas' interpreter runs its kernels where there is no GPU
    # forward mode; None: blockwise's. (problem, tiles, operands, their tangents, RowLse or what the
    # backward takes, o, the sinks' part of the tangent of lse) -> the tangents of o and lse. A
    # tangent that is None is zero
    tangent: Callable | None = None
    # whether it is a few products of whole arrays, which vmap and XLA's partitioner split unaided
    is_dense: bool = False
    # whether it attends by a problem's lists of keys; else by a table of their blocks
    takes_lists: Callable[[Problem], bool] = no_lists
    paged: PagedKernel | None = None  # None: it attends to a copy of the pages in order
    keeps_base_2: bool = False  # whether its scores are in the problem's log base, else in base e
    # whether its backward takes a RowScale for lse, and do and delta without a factor
    takes_row_scale: bool = False
    # whether the backward with these tiles takes DeltaTerms for delta, and sums them
    sums_delta: Callable = never
    # whether it has a backward with these tiles; else blockwise's serves
    has_backward: Callable = lambda tiles: True
    for_gradient: Callable = lambda tiles: tiles  # the tiles of a forward that a backward follows
    # (tiles, problem) -> tiles of another problem that name the same kernels; None: `tiles` does
    for_same_kernels: Callable | None = None
    # (tiles, problem, number of calls) -> the tiles of these calls under vmap
    for_calls: Callable = lambda tiles, problem, calls: tiles
    # (problem, operands) -> arrays of the shapes and dtypes of the forward's results: it is then
    # traced only when it is lowered
    results_like: Callable = trace_now
    # what each call copies for its kernels, in words
    copies: Callable[[Problem], str | None] = lambda problem: None
    # what a user should know of it on the GPU that a call is for
    remark: Callable[[], str | None] = lambda: None

    def __repr__(self):
        """The name and the wrappers of its passes; a jaxpr prints it often."""
        return repr(self.forward) if isinstance(self.forward, Pass) else self.name

    def __hash__(self):
        """A hash of two fields: each call takes it, and passes hold the backends they wrap."""
        return hash((self.name, self.forward))

    def derivatives(self, tiles) -> str:
        """The modes and orders of its derivatives, in words, and what else computes some."""
        if self.is_dense:
            return "every mode, of any order"
        if not self.own_kernels:
            return "every mode, of first and second order"
        has_tangent = self.tangent and (tiles is None or tiles.tangent)
        has_kernel = {"reverse": self.has_backward(tiles), "forward": has_tangent}
        lacking = " and ".join(mode for mode, has in has_kernel.items() if not has)
        by_blockwise = f"; {lacking} mode by blockwise" if lacking else ""
        return f"every mode, of first order, and of second by blockwise{by_blockwise}"

    def adds_in_any_order(self, problem: Problem) -> bool:
        """Whether its backward for a problem adds in any order, and another is deterministic."""
        in_order = dataclasses.replace(problem, deterministic=True)
        return self.tiles(problem) != self.tiles(in_order)

    def variants(self, problem: Problem) -> Iterator[Problem]:
        """The problem, and then, in order of preference, problems with the same results by other
        kernels: one of them runs where the self-check finds the former wrong."""
        yield problem
        if self.adds_in_any_order(self.converted(problem)):
            yield dataclasses.replace(problem, deterministic=True)

    def converted(self, problem: Problem) -> Problem:
        """The problem as it takes it: with a table in place of lists, where it takes none."""
        lists = problem.resolved_mask.lists
        if lists is None or not lists.has_table or self.takes_lists(problem):
            return problem
        return problem.with_table

    def convert(self, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
        """The problem and the operands as it takes them."""
        if self.converted(problem) is problem:
            return problem, operands
        return with_table(problem, operands)

    def why_no_lists(self, problem: Problem) -> str | None:
        """Why it cannot attend by a problem's lists of keys, or None."""
        lists = problem.resolved_mask.lists
        if lists is None or lists.has_table or self.takes_lists(problem):
            return None
        return (
            f"it takes lists as a table of blocks, with block * query_block >= {LEAST_TABLE}; got "
            f"{lists.block} * {lists.query_block}"
        )

    def log_base(self, problem: Problem) -> LogBase:
        """The log base of its scores."""
        return problem.log_base if self.keeps_base_2 else LogBase.E

    def tiles_like(self, tiles, problem: Problem):
        """Tiles of another problem for the same kernels; those of a forward that a backward follows
        where `tiles` are."""
        like, problem = self.for_same_kernels, self.converted(problem)
        new = self.tiles(problem) if like is None else like(tiles, problem)
        return self.for_gradient(new) if tiles == self.for_gradient(tiles) else new


@dataclasses.dataclass(frozen=True)
class Pass:
    """A base for wrappers: called as a backend's pass is, it does something around `inner`.
    `Choice.wrap` puts it in the pass's place."""

    takes_delta_terms: ClassVar[bool] = False  # else delta, which devices exchange
    backend: Backend
    name: Literal["forward", "backward", "tangent"]

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        raise NotImplementedError

    @property
    def inner(self) -> Callable:
        """The pass that is wrapped."""
        return getattr(self.backend, self.name)


class Choice(NamedTuple):
    """An implementation and its tiles for a problem."""

    backend: Backend
    tiles: Any
    # whether it has first derivatives in reverse mode alone: its passes exchange parts of devices
    reverse_only: bool = False

    def for_gradient(self) -> "Choice":
        """The choice for a forward with residuals, and its backward."""
        return self._replace(tiles=self.backend.for_gradient(self.tiles))

    def wrap(self, wrapper: type[Pass], *options) -> "Choice":
        """The choice with each pass replaced by wrapper(backend, its name, *options)."""
        return self._replace(backend=_wrapped(self.backend, wrapper, options))


@functools.lru_cache  # calls that are alike get the same object, which equals itself at once
def _wrapped(backend: Backend, wrapper: type[Pass], options: tuple) -> Backend:
    names = [name for name in ("forward", "backward", "tangent") if getattr(backend, name)]
    wrapped = backend._replace(**{name: wrapper(backend, name, *options) for name in names})
    return wrapped if wrapper.takes_delta_terms else wrapped._replace(sums_delta=never)


def no_empty_axis(problem: Problem) -> str | None:
    """Why tiles do not fit: which axes are empty. None: none is."""
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None
