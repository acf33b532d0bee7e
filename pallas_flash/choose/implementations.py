"""The table of implementations, in the order of preference. No other file decides by a name."""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.kernels import joined, mma, pallas_call, triton
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.backend import Backend, PagedKernel, no_empty_axis
from pallas_flash.tiled import reference
from pallas_flash.tiled.blockwise.backend import BLOCKWISE, blockwise_backward, blockwise_tangent


def _no_gpu() -> str | None:
    on_gpu = hardware.here().platform == "gpu"
    return (
        None if on_gpu else "the call is not for a GPU: it would run in Pallas' interpreter, slowly"
    )


EARLIER = "an earlier algorithm, for comparison only: select it by name"
FEW = 64  # queries


GPUS_KERNELS = {9.0: "hopper", 10.0: "blackwell", 10.3: "blackwell"}  # by compute capability


def for_this_gpu() -> str | None:
    """The name of the Mosaic kernels for the GPU that a call is for; None where that is not
    NVIDIA's."""
    capability = hardware.compute_capability()
    return capability and GPUS_KERNELS.get(capability, "ampere")


def _better_kernels(problem: Problem) -> str | None:
    name = GPUS_KERNELS.get(hardware.compute_capability())
    return name and f"this GPU has kernels of its own, {name}'s: ask for it by name"


def _few_queries(problem: Problem) -> str | None:
    """Why few queries with a dense mask do not run the Hopper kernels by default: Triton's, where
    jax has them, read the mask unpacked."""
    if problem.mask is None or not isinstance(problem.queries, int) or problem.queries > FEW:
        return None
    if _triton_why_no_import():
        return None
    return f"packing a dense mask does not pay off for only {problem.queries} queries"


def _kernel(module: str, name: str) -> Callable:
    """A function of a module in `kernels`; the module, and with it Mosaic or Triton, is imported at
    the first call."""

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
    """The backward of a family of Mosaic kernels, or blockwise's where they have no tiles. The
    gradients of a bias and of arrays that a score_mod reads come from other kernels, which the
    families share, or from blockwise; XLA drops the results that nobody uses."""

    def backward(problem: Problem, tiles, operands: Operands, *rows) -> Gradients:
        if not tiles.has_backward:
            return blockwise_backward(problem.log_base, problem, operands, *rows)
        gradients = _kernel(module, "backward")(problem, tiles, operands, *rows)
        if not _has_score_gradients(problem):
            return gradients
        if (score_tiles := _kernel("mma.tuning", "score_tiles")(problem)) is None:
            by_blockwise = blockwise_backward(problem.log_base, problem, operands, *rows)
            bias, captured = by_blockwise.bias, by_blockwise.captured
        else:
            kernel = _kernel(_SCORES, "score_gradients")
            bias, captured = kernel(problem, score_tiles, operands, *rows)
        return gradients._replace(bias=bias, captured=captured)

    return backward


def _tangent(module: str) -> Callable:
    """The forward mode of a family of kernels. Blockwise adds what the tangents of arrays that a
    score_mod reads contribute, and computes all of it where the kernels have no tiles."""

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
            by_kernel = _kernel(module, "tangent")(*args)
            do, dlse = do + by_kernel[0], dlse + by_kernel[1]
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
    return no_empty_axis(problem)


REFERENCE = Backend(
    "reference",
    lambda p: None,
    lambda p: None,
    lambda p: None,
    lambda problem, tiles, operands: reference.attend(problem, operands),
    lambda problem, tiles, *args: reference.backward(problem, *args),
    is_dense=True,
    takes_lists=lambda p: True,
)


def _mosaic_family(
    name: str, folder: str, why_not_by_default: Callable, tangent: str | None = None
) -> Backend:
    """The row of the Mosaic kernels in a folder of `kernels`, and perhaps of another one's forward
    mode."""
    why_not = _kernel(folder, "why_not")
    modules = [f"{folder}.forward", f"{folder}.backward", tangent or f"{folder}.tangent"]
    return Backend(
        name,
        lambda p: joined(why_not(p), _no_tiles(p)) or _why_no_import(*modules, _SCORES),
        lambda p: _no_gpu() or why_not_by_default(p),
        _kernel(folder, "tiles"),
        _kernel(modules[0], "forward"),
        _mosaic_backward(modules[1]),
        tangent=_tangent(modules[2]),
        own_kernels=True,
        is_interpretable=False,
        takes_lists=mma.takes_lists,
        paged=PagedKernel(
            mma.why_no_pages,
            lambda p, pages: _kernel("mma.tuning", "decode_tiles")(p, pages.page, pages.stored),
            _kernel("mma.decode", "forward"),
            takes_lists=lambda p: True,
        ),
        keeps_base_2=True,
        copies=_kernel(folder, "copies"),
        has_backward=lambda tiles: tiles.has_backward,
    )


BACKENDS = (
    _mosaic_family("hopper", "hopper", _few_queries)._replace(
        for_same_kernels=_kernel("hopper", "tiles_like"),
        sums_delta=lambda tiles: tiles.dq is not None and tiles.dq.sums_delta,
    ),
    _mosaic_family("blackwell", "blackwell", lambda p: None, tangent="mma.tangent"),
    _mosaic_family("ampere", "mma", _better_kernels)._replace(remark=_kernel("mma", "remark")),
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
            lambda p, pages: triton.decode_tiles(p, pages.page),
            _kernel("triton.decode", "forward"),
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
