"""The table of implementations, and which of them serves a problem."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_flash import blockwise, reference
from pallas_flash.arguments import Gradients, Operands, Problem
from pallas_flash.kernels import device, hopper, triton


class Backend(NamedTuple):
    """An implementation. One that can run the forward of a problem can also run its backward."""

    name: str
    why_not: Callable[[Problem], str | None]  # None: it can run this problem; else the reason
    # None: it is taken unasked where it can run
    why_not_by_default: Callable[[Problem], str | None]
    tiles: Callable[[Problem], Any]  # a hashable Tiles, or None
    # (problem, tiles, operands)                    -> o, online_softmax.SoftmaxState
    forward: Callable
    # lse in its unit, +inf for a row that saw no key; do and delta have the factor of
    # `SoftmaxState.in_one`: (problem, tiles, operands, lse, do, delta) -> Gradients
    backward: Callable
    own_kernels: bool = False  # not XLA's: a GPU runs them unasked only after selfcheck.py
    of_gradient: Callable = lambda tiles: tiles  # the tiles of a forward that the backward follows
    # its backward takes for lse the `online_softmax.RowScale`, and so do and delta as they are
    is_apart: bool = False
    # what is copied for its kernels in each call
    copies: Callable[[Problem], str | None] = lambda problem: None
    # its scores, of whose maxima its SoftmaxState are; else they are in the problem's unit
    is_natural: bool = True

    def unit(self, problem: Problem) -> float:
        """What natural scores are times in it."""
        return 1.0 if self.is_natural else problem.unit

    def tiles_like(self, tiles, problem: Problem):
        """The tiles of another problem: of a forward that a backward follows where these are."""
        new = self.tiles(problem)
        return self.of_gradient(new) if tiles == self.of_gradient(tiles) else new


@dataclasses.dataclass(frozen=True)
class Pass:
    """The forward or the backward pass of a backend, called as that is: a base for what does
    something around `run`, and then stands in the backend's place by `Choice.wrap`."""

    backend: Backend
    is_forward: bool

    def __call__(self, problem: Problem, tiles, operands: Operands, *rows):
        return self.run(problem, tiles, operands, *rows)

    def run(self, problem: Problem, tiles, operands: Operands, *rows):
        """The backend's own pass."""
        function = self.backend.forward if self.is_forward else self.backend.backward
        return function(problem, tiles, operands, *rows)


class Choice(NamedTuple):
    """An implementation, and its tiles for a problem."""

    backend: Backend
    tiles: Any

    def wrap(self, wrapper: type[Pass], *options) -> "Choice":
        """The same, with both passes in a wrapper(backend, is_forward, *options)."""
        forward, backward = (wrapper(self.backend, way, *options) for way in (True, False))
        return self._replace(backend=self.backend._replace(forward=forward, backward=backward))


# why this machine does not take it unasked, though it could run
WhyNotHere = Callable[[Backend], str | None]


def _no_gpu() -> str | None:
    on_gpu = device.here().platform == "gpu"
    return (
        None if on_gpu else "the call is not for a GPU: it would run in Pallas' interpreter, slowly"
    )


FEW = 64  # queries


def _few_queries(problem: Problem) -> str | None:
    """Why the Hopper kernels are not for a call with a mask that is an array."""
    if problem.mask is None or not isinstance(problem.queries, int) or problem.queries > FEW:
        return None
    return (
        f"XLA prepares a mask that is an array, which takes long beside {problem.queries} queries"
    )


def _no_empty_axis(problem: Problem) -> str | None:
    p = problem
    sizes = dict(B=p.batch, T=p.queries, S=p.keys, N=p.heads, H=p.head_size, Hv=p.value_size)
    empty = [name for name, size in sizes.items() if size == 0]
    return f"{', '.join(empty)} = 0: there is nothing to tile" if empty else None


def _kernel(module: str, name: str) -> Callable:
    """A function of a module in `kernels`, which is imported, and with it Mosaic or Triton, when
    the function is first called."""
    return lambda *args: getattr(importlib.import_module(f"pallas_flash.kernels.{module}"), name)(
        *args
    )


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


_triton_why_no_import = functools.partial(_why_no_import, "triton.forward", "triton.backward")
_hopper_why_no_import = functools.partial(_why_no_import, "hopper.forward", "hopper.backward")


def _hopper_backward(problem: Problem, tiles, operands: Operands, *rows) -> Gradients:
    """The gradients of a bias and of what a score_mod reads come from the Triton kernels, which XLA
    leaves out where nobody uses the result."""
    gradients = _kernel("hopper.backward", "backward")(problem, tiles, operands, *rows)
    if not _has_score_gradients(problem):
        return gradients
    of_scores = _kernel("triton.backward", "of_scores")
    bias, captured = of_scores(problem, triton.tiles(problem), operands, *rows)
    return gradients._replace(bias=bias, captured=captured)


def _has_score_gradients(problem: Problem) -> bool:
    p = problem
    return p.bias is not None or (p.score is not None and len(p.score.tables) > 0)


def _no_score_gradients(problem: Problem) -> str | None:
    """Why the Triton kernels do not compute them."""
    if not _has_score_gradients(problem):
        return None
    why_not = triton.why_not(problem) or _triton_why_no_import()
    return why_not and (
        "the gradients of a bias, and of float arrays that a score_mod reads, come from the Triton "
        f"kernels: {why_not}"
    )


def _no_tiles(problem: Problem) -> str | None:
    """Why no Pallas kernel can tile a problem."""
    symbols = [
        str(n) for n in (problem.batch, problem.queries, problem.keys) if not isinstance(n, int)
    ]
    if symbols:
        return f"a kernel's grid is made of known sizes; got {', '.join(symbols)} of jax.export"
    if getattr(jax.config, "eager_constant_folding", False):  # under ensure_compile_time_eval
        return (
            "its kernels are traced, and jax.ensure_compile_time_eval would evaluate what they "
            "are made of"
        )
    return _no_empty_axis(problem)


BACKENDS = (
    Backend(
        "hopper",
        lambda p: (
            _no_tiles(p) or hopper.why_not(p) or _hopper_why_no_import() or _no_score_gradients(p)
        ),
        lambda p: _no_gpu() or _few_queries(p),
        lambda p: hopper.tiles(p),
        _kernel("hopper.forward", "forward"),
        _hopper_backward,
        own_kernels=True,
        copies=lambda p: hopper.copies(p),
        is_natural=False,
    ),
    Backend(
        "triton",
        lambda p: _no_tiles(p) or triton.why_not(p) or _triton_why_no_import(),
        lambda p: _no_gpu(),
        lambda p: triton.tiles(p),
        _kernel("triton.forward", "forward"),
        _kernel("triton.backward", "backward"),
        own_kernels=True,
        is_natural=False,
    ),
    Backend(
        "blockwise",
        _no_empty_axis,
        lambda p: None,
        lambda p: blockwise.tiles(p),
        blockwise.forward,
        blockwise.backward,
        is_apart=True,
        of_gradient=lambda tiles: tiles.of_gradient(),
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
            lambda p, m=module: (
                _no_tiles(p) or triton.why_not(p) or _why_no_import(m) or _kernel(m, "why_not")(p)
            ),
            lambda p: "an earlier algorithm, kept to compare with: ask for it by name",
            *(_kernel(module, function) for function in ("tiles", "forward", "backward")),
            own_kernels=True,
            is_natural=False,
        )
        for name, module in (("flash1", "classic.flash1"), ("standard", "classic.standard"))
    ),
)
NAMES = tuple(backend.name for backend in BACKENDS)
OF_JAX_NN = ("xla", "cudnn")  # its names for what it has; here they choose, as None does


def choose(
    problem: Problem,
    implementation: str | None = None,
    why_not_here: WhyNotHere = lambda backend: None,
) -> Choice:
    """The implementation asked for, or the first in the table that runs the problem and is taken
    unasked."""
    implementation = None if implementation in OF_JAX_NN else implementation
    if implementation not in (None, *NAMES):
        raise ValueError(
            f"implementation must be None or one of {', '.join(NAMES)}, or jax.nn's "
            f"{' or '.join(OF_JAX_NN)}, which mean the "
            f"same as None; got {implementation!r}."
        )
    for backend in BACKENDS:
        if implementation not in (None, backend.name):
            continue
        # comes first: why_not may import the kernels
        if implementation is None and backend.why_not_by_default(problem):
            continue
        why_not = backend.why_not(problem)
        if implementation is not None and why_not:
            raise NotImplementedError(
                f"implementation {implementation!r} cannot run this call: {why_not}. The call: "
                f"{problem}."
            )
        if not why_not and (implementation is not None or not why_not_here(backend)):
            return Choice(backend, backend.tiles(problem))
    raise AssertionError("the reference runs everything")


def why_not_taken(
    problem: Problem, taken: Backend, asked_for: bool, why_not_here: WhyNotHere
) -> dict[str, str]:
    """For each other implementation, why `taken` was taken before it."""

    def reason(backend):
        if why_not := backend.why_not(problem):
            return why_not
        if asked_for:
            return f"{taken.name} was asked for"
        return (
            backend.why_not_by_default(problem)
            or why_not_here(backend)
            or f"{taken.name} comes before it"
        )

    return {backend.name: reason(backend) for backend in BACKENDS if backend is not taken}
