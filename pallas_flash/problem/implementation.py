"""The contract between a call and an implementation: what each of them can do, its passes, and the
one that is chosen, with what is around its passes."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from pallas_flash.masks.resolved_mask import LEAST_TABLE
from pallas_flash.problem.arguments import Gradients, Operands, Problem, with_table
from pallas_flash.problem.log_base import LogBase
from pallas_flash.problem.page_layout import Pages, PageTable


class Implementation(abc.ABC):
    """An implementation of attention. Where it can run a problem's forward, it can run the backward
    too. Each has one instance, in the table of all: choose/implementations.py."""

    name: str
    # of the devices that its own kernels are for, as jax.Device has it; None: XLA's run anywhere
    platform: ClassVar[str | None] = None
    # whether Pallas' interpreter runs its kernels where there is no GPU
    is_interpretable: ClassVar[bool] = True
    # whether it is a few products of whole arrays, which JAX differentiates, and vmap and XLA's
    # partitioner split unaided
    is_dense: ClassVar[bool] = False
    # whether its backward takes a RowScale for lse, and do and delta without a factor
    takes_row_scale: ClassVar[bool] = False

    def __repr__(self):
        return self.name  # a jaxpr prints it often

    @property
    def own_kernels(self) -> bool:
        """Whether it has kernels that are not XLA's: by default only after the self-check."""
        return self.platform is not None

    # ---- whether it runs a problem ----

    @abc.abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run a problem that is `converted`, or None."""

    def why_not_by_default(self, problem: Problem) -> str | None:
        """Why it does not run a problem that names no implementation, or None."""
        return None

    def takes_lists(self, problem: Problem) -> bool:
        """Whether it attends by a problem's lists of keys; else by a table of their blocks."""
        return self.is_dense

    # ---- its passes ----

    @abc.abstractmethod
    def tiles(self, problem: Problem) -> Any:
        """Its block sizes for a problem, hashable, or None where it has none."""

    @abc.abstractmethod
    def forward(self, problem: Problem, tiles, x: Operands):
        """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T] of its rows."""

    @abc.abstractmethod
    def backward(self, problem: Problem, tiles, x: Operands, lse, do, delta) -> Gradients:
        """The gradients of the operands. lse is in the log base of its scores, +inf for a row
        without keys; do and delta have the factor of `SoftmaxState.backward_lse`."""

    def tangent(self, problem: Problem, tiles, x: Operands, dx: Gradients, rows, o, dlse):
        """The tangents of o and lse by the operands' tangents, of which one that is None is zero.
        `rows` is a RowLse, or what the backward takes; `dlse` the sinks' part of the tangent of
        lse."""
        raise NotImplementedError(f"{self.name} has no forward mode of its own")

    # ---- what it may say of them; by default, what most say ----

    def has_backward(self, tiles) -> bool:
        """Whether it has a backward with these tiles; else blockwise's serves."""
        return True

    def has_tangent(self, tiles) -> bool:
        """Whether it has a forward mode with these tiles; else blockwise's serves."""
        return False

    def log_base(self, problem: Problem) -> LogBase:
        """The log base of its scores."""
        return LogBase.E

    def sums_delta(self, tiles) -> bool:
        """Whether the backward with these tiles takes DeltaTerms for delta, and sums them."""
        return False

    def for_gradient(self, tiles) -> Any:
        """The tiles of a forward that a backward follows."""
        return tiles

    def for_same_kernels(self, tiles, problem: Problem) -> Any:
        """Tiles of another problem that name the same kernels as `tiles`."""
        return self.tiles(problem)

    def for_calls(self, tiles, problem: Problem, calls: int) -> Any:
        """The tiles of so many calls of a problem under vmap."""
        return tiles

    def results_like(self, problem: Problem, x: Operands) -> Any:
        """Arrays of the shapes and dtypes of the forward's results, which is then traced only when
        it is lowered; None: it is traced at once."""
        return None

    def copies(self, problem: Problem) -> str | None:
        """What each call copies for its kernels, in words, or None."""
        return None

    def remark(self) -> str | None:
        """What a user should know of it on the GPU that a call is for, or None."""
        return None

    # ---- what follows from these ----

    def derivatives(self, tiles) -> str:
        """The modes and orders of its derivatives, in words, and what else computes some."""
        if self.is_dense:
            return "every mode, of any order"
        if not self.own_kernels:
            return "every mode, of first and second order"
        has_kernel = dict(reverse=self.has_backward(tiles), forward=self.has_tangent(tiles))
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

    def tiles_like(self, tiles, problem: Problem) -> Any:
        """Tiles of another problem for the same kernels, of a forward that a backward follows where
        `tiles` are."""
        new = self.for_same_kernels(tiles, self.converted(problem))
        return self.for_gradient(new) if tiles == self.for_gradient(tiles) else new


class PageReader(Implementation):
    """An implementation with a forward, by split-KV decoding, that reads keys and values in pages
    where they lie; any other attends to a copy of the pages in order."""

    @abc.abstractmethod
    def why_no_pages(self, problem: Problem, pages: Pages) -> str | None:
        """Why it cannot read such pages, or None."""

    @abc.abstractmethod
    def page_tiles(self, problem: Problem, pages: Pages) -> Any:
        """Its block sizes for pages."""

    @abc.abstractmethod
    def forward_from_pages(self, problem: Problem, tiles, x: Operands, table: PageTable, scales):
        """o and the SoftmaxState, as `forward`; `scales` are the keys' and the values'."""

    def copies_prompts(self, problem: Problem) -> bool:
        """Whether a problem with more rows than decoding takes had better attend to a copy of the
        pages."""
        return True

    def takes_lists_of_pages(self, problem: Problem) -> bool:
        """Whether it reads the keys that a problem's lists name; else it attends to a copy of the
        pages."""
        return False


@dataclasses.dataclass(frozen=True)
class Pass:
    """A base for what is around a pass: called as the pass is, it does something around `inner`."""

    takes_delta_terms: ClassVar[bool] = False  # else delta, which devices exchange
    implementation: Implementation
    name: Literal["forward", "backward", "tangent"]
    inner: Callable  # the implementation's method of this name, or another Pass around it

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        raise NotImplementedError


class Choice(NamedTuple):
    """An implementation and its tiles for a problem, and what is around its passes."""

    implementation: Implementation
    tiles: Any
    around: tuple[tuple[type[Pass], tuple], ...] = ()  # classes and their options, the inner first
    # whether it has first derivatives in reverse mode alone: its passes exchange parts of devices
    reverse_only: bool = False
    traces_at_once: bool = False  # whether its forward may not wait until it is lowered

    def for_gradient(self) -> "Choice":
        """The choice for a forward with residuals, and its backward."""
        return self._replace(tiles=self.implementation.for_gradient(self.tiles))

    def wrap(self, wrapper: type[Pass], *options) -> "Choice":
        """The choice with wrapper(implementation, name, inner, *options) around each pass."""
        return self._replace(around=(*self.around, (wrapper, options)))

    @property
    def forward(self) -> Callable:
        return self._wrapped("forward", self.implementation.forward)

    @property
    def backward(self) -> Callable:
        return self._wrapped("backward", self.implementation.backward)

    @property
    def tangent(self) -> Callable:
        return self._wrapped("tangent", self.implementation.tangent)

    def _wrapped(self, name: str, inner: Callable) -> Callable:
        for wrapper, options in self.around:
            inner = wrapper(self.implementation, name, inner, *options)
        return inner

    @property
    def sums_delta(self) -> bool:
        """Whether the backward takes DeltaTerms for delta, and sums them."""
        takes_terms = all(wrapper.takes_delta_terms for wrapper, _ in self.around)
        return takes_terms and self.implementation.sums_delta(self.tiles)

    def results_like(self, problem: Problem, x: Operands) -> Any:
        """`Implementation.results_like`, where the forward may wait until it is lowered."""
        return None if self.traces_at_once else self.implementation.results_like(problem, x)


def no_empty_axis(problem: Problem) -> str | None:
    """Why tiles do not fit: which axes are empty. None: none is."""
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None
