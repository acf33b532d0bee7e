"""The table of implementations: what each can do, as fields. No other file decides by a name."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined, mma, pallas_call, triton
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.tiled import blockwise, reference
from pallas_flash.tiled.online_softmax import LogBase, RowLse


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
    """In place of a `Backend.sums_delta`."""
    return False


def unknown(problem: Problem, operands: Operands) -> None:
    """In place of a `Backend.results_like`: the forward is traced at once."""


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
    results_like: Callable = unknown
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


def _no_gpu() -> str | None:
    on_gpu = hardware.here().platform == "gpu"
    return (
        None if on_gpu else "the call is not for a GPU: it would run in Pallas' interpreter, slowly"
    )


EARLIER = "an earlier algorithm, for comparison only: select it by name"


def _on_hopper(problem: Problem) -> str | None:
    on_hopper = hardware.compute_capability() == 9.0
    return "this GPU has kernels of its own, hopper's: ask for it by name" if on_hopper else None


FEW = 64  # queries


def _few_queries(problem: Problem) -> str | None:
    """Why a call with a dense mask and few queries does not run the Hopper kernels by default: the
    Triton kernels, where there are any, read the mask as it is."""
    if problem.mask is None or not isinstance(problem.queries, int) or problem.queries > FEW:
        return None
    if _triton_why_no_import():
        return None
    return f"packing a dense mask does not pay off for only {problem.queries} queries"


def _no_empty_axis(problem: Problem) -> str | None:
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None


def _kernel(module: str, name: str) -> Callable:
    """A function of a module in `kernels`, which is imported, and with it Mosaic or Triton, when
    the function is first called."""

    def call_kernel(*args):
        return getattr(importlib.import_module(f"pallas_flash.kernels.{module}"), name)(*args)

    return call_kernel


@functools.cache
def _why_no_import(*modules: str) -> str | None:
    """Why modules in `kernels` cannot be imported here, or None."""
    try:
        for module in modules:
            importlib.import_module(f"pallas_flash.kernels.{module}")
        # another jax may lack a module, a name in it, or what a name was good for
    except Exception as error:
        return f"its kernels cannot be imported with jax {jax.__version__}: {error}"
    return None


_triton_why_no_import = functools.partial(
    _why_no_import, "pallas_call.by_triton", "triton.forward", "triton.backward", "triton.tangent"
)
_SCORES = "mma.score_gradients"


def _mosaic_backward(module: str) -> Callable:
    """Of a family of Mosaic kernels, or blockwise's where they have no tiles. The gradients of a
    bias and of what a score_mod reads come from other kernels, the same for each family, or again
    from blockwise's. XLA leaves out what nobody uses the result of."""

    def backward(problem: Problem, tiles, operands: Operands, *rows) -> Gradients:
        if not tiles.has_backward:
            return blockwise_backward(problem.log_base, problem, operands, *rows)
        gradients = _kernel(module, "backward")(problem, tiles, operands, *rows)
        if not _has_score_gradients(problem):
            return gradients
        if (of_scores := mma.score_tiles(problem)) is None:
            found = blockwise_backward(problem.log_base, problem, operands, *rows)
            return gradients._replace(bias=found.bias, captured=found.captured)
        found = _kernel(_SCORES, "score_gradients")(problem, of_scores, operands, *rows)
        return gradients._replace(**dict(zip(("bias", "captured"), found, strict=True)))

    return backward


def blockwise_backward(log_base: LogBase, problem: Problem, x: Operands, lse, *rows) -> Gradients:
    """Blockwise's, in place of the backward of kernels whose scores are in this log base."""
    scale = RowLse(lse, None).row_scale(log_base)
    return blockwise.backward(problem, blockwise.tiles(problem).of_gradient(), x, scale, *rows)


def blockwise_tangent(log_base: LogBase, problem: Problem, x: Operands, dx, rows, o, dlse):
    """Blockwise's, in place of the tangent of kernels whose scores are in this log base."""
    tiles, scale = blockwise.tiles(problem).of_gradient(), rows.row_scale(log_base)
    do, dlse = blockwise.tangent(problem, tiles, x, dx, scale, o, dlse)
    return do.astype(o.dtype), dlse


def _tangent(module: str) -> Callable:
    """Of a family of kernels; what the arrays of a score_mod add is blockwise's, and all of it
    where the kernels have no tiles."""

    def tangent(problem: Problem, tiles, operands: Operands, dx: Gradients, rows, o, dlse):
        fits = tiles.tangent is not None
        of_captured = Gradients(None, None, None, captured=dx.captured) if fits else dx
        if not jax.tree.leaves(of_captured):
            return _kernel(module, "tangent")(problem, tiles, operands, dx, rows, o, dlse)
        args = problem, operands, of_captured, rows, o, dlse
        do, dlse = blockwise_tangent(problem.log_base, *args)
        others = dx._replace(captured=jax.tree.map(lambda _: None, dx.captured))
        if fits and jax.tree.leaves(others):
            args = problem, tiles, operands, others, rows, o, jnp.zeros_like(dlse)
            more = _kernel(module, "tangent")(*args)
            do, dlse = do + more[0], dlse + more[1]
        return do, dlse

    return tangent


def _has_score_gradients(problem: Problem) -> bool:
    p = problem
    return p.bias is not None or (p.score is not None and len(p.score.tables) > 0)


def _no_tiles(problem: Problem) -> str | None:
    """Why no Pallas kernel can tile a problem."""
    symbols = [
        str(n) for n in (problem.batch, problem.queries, problem.keys) if not isinstance(n, int)
    ]
    if symbols:
        return f"a kernel's grid must be static; got the symbolic dimensions {', '.join(symbols)}"
    if getattr(jax.config, "eager_constant_folding", False):  # under ensure_compile_time_eval
        return (
            "its kernels must be traced, and jax.ensure_compile_time_eval would evaluate their "
            "operations eagerly"
        )
    return _no_empty_axis(problem)


BLOCKWISE = Backend(
    "blockwise",
    _no_empty_axis,
    lambda p: None,
    lambda p: blockwise.tiles(p),
    blockwise.forward,
    blockwise.backward,
    tangent=lambda *args: blockwise.tangent(*args),
    paged=PagedKernel(
        lambda *_: None,
        lambda p, page, _: blockwise.decode_tiles(p, page),
        blockwise.decode.forward,
        # it reads no page that no query sees, and a table may be much longer than its rows
        copies_prompts=lambda p: p.keys <= p.queries * p.group,
        takes_8_bits_alone=True,
    ),
    takes_row_scale=True,
    of_gradient=lambda tiles: tiles.of_gradient(),
    of_calls=lambda *args: blockwise.of_calls(*args),
    results_like=blockwise.results_like,
)
REFERENCE = Backend(
    "reference",
    lambda p: None,
    lambda p: None,
    lambda p: None,
    lambda problem, tiles, operands: reference.attend(problem, operands),
    lambda problem, tiles, *args: reference.backward(problem, *args),
    is_dense=True,
)


def _mosaic_family(
    name: str, why_not_by_default: Callable[[Problem], str | None], tangent: str = "mma.tangent"
) -> Backend:
    """Mosaic kernels for GPUs of one generation: the package of that name in `kernels`."""
    why_not, modules = _kernel(name, "why_not"), (f"{name}.forward", f"{name}.backward")
    return Backend(
        name,
        lambda p: joined(why_not(p), _no_tiles(p)) or _why_no_import(*modules, tangent, _SCORES),
        lambda p: _no_gpu() or why_not_by_default(p),
        _kernel(name, "tiles"),
        _kernel(modules[0], "forward"),
        _mosaic_backward(modules[1]),
        tangent=_tangent(tangent),
        own_kernels=True,
        is_interpretable=False,
        paged=PagedKernel(mma.why_no_pages, mma.decode_tiles, _kernel("mma.decode", "forward")),
        keeps_base_2=True,
        copies=_kernel(name, "copies"),
        has_backward=lambda tiles: tiles.has_backward,
    )


BACKENDS = (
    _mosaic_family("hopper", _few_queries, tangent="hopper.tangent")._replace(
        of_same_kernels=_kernel("hopper", "tiles_like"),
        sums_delta=lambda tiles: tiles.dq is not None and tiles.dq.sums_delta,
    ),
    _mosaic_family("ampere", _on_hopper)._replace(remark=_kernel("ampere", "remark")),
    Backend(
        "triton",
        lambda p: _no_tiles(p) or triton.why_not(p) or _triton_why_no_import(),
        lambda p: _no_gpu(),
        lambda p: triton.tiles(p),
        _kernel("triton.forward", "forward"),
        _kernel("triton.backward", "backward"),
        tangent=_tangent("triton.tangent"),
        own_kernels=True,
        paged=PagedKernel(
            triton.why_no_pages,
            lambda p, page, _: triton.decode_tiles(p, page),
            _kernel("triton.decode", "forward"),
            takes_8_bits_alone=True,
        ),
        keeps_base_2=True,
    ),
    BLOCKWISE,
    REFERENCE,
    *(
        Backend(
            name,
            lambda p, m=module: (
                _no_tiles(p)
                or pallas_call.why_not(p)
                or _why_no_import(m)
                or _kernel(m, "why_not")(p)
            ),
            lambda p: EARLIER,
            *(_kernel(module, function) for function in ("tiles", "forward", "backward")),
            own_kernels=True,
            keeps_base_2=True,
            remark=pallas_call.remark,
        )
        for name, module in (("flash1", "classic.flash1"), ("standard", "classic.standard"))
    ),
)


def names() -> tuple[str, ...]:
    return tuple(backend.name for backend in BACKENDS)


def find(name: str) -> Backend:
    return BACKENDS[names().index(name)]
