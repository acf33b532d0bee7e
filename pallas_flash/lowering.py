"""A call traced for a GPU, in a program that is lowered for another device: kernels on a GPU, else
"blockwise".

Within jit it is unknown on which device the program will run. A call that finds a GPU while tracing
takes its kernels; blockwise replaces them when the program is lowered for another platform, and is
traced only then.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_flash import blockwise, equation, jax_internals
from pallas_flash.backends import Backend, Pass, blockwise_tangent
from pallas_flash.jax_internals import mlir
from pallas_flash.kernels import device
from pallas_flash.online_softmax import LOWEST, LogBase, RowScale, SoftmaxState

GPUS = "cuda", "rocm"  # platforms
_log = logging.getLogger("pallas_flash")


@dataclasses.dataclass(frozen=True)
class PlatformPass(Pass):
    """A pass of kernels where the program is lowered for a GPU, else blockwise's; or an error, if
    the kernels were requested by name."""

    is_requested: bool

    def __call__(self, problem, tiles, operands, *rows):
        kernels = functools.partial(self.inner, problem, tiles)
        passes = dict(forward=_forward, backward=_backward, tangent=_tangent)
        other = functools.partial(passes[self.name], self.backend, problem)
        return by_platform(self.backend, self.is_requested, kernels, other, operands, *rows)


def by_platform(backend: Backend, is_requested: bool, kernels: Callable, other: Callable, *args):
    """kernels(*args) of a backend where the program is lowered for a GPU, else other(like, *args),
    with results in the form of `like`. Kernels requested by name that Pallas' interpreter can run
    are used everywhere."""
    if (
        device.here().platform != "gpu"
        or not backend.own_kernels
        or (is_requested and backend.is_interpretable)
    ):
        return kernels(*args)
    other = functools.partial(_refuse, backend) if is_requested else other
    return equation.bind(kernels, GpuOnly(other), *args)


def _forward(backend: Backend, problem, like, x):
    o, stats = blockwise.forward(problem, blockwise.tiles(problem).of_gradient(), x)
    return o, like_kernels(stats, like[1], backend.log_base(problem))


def like_kernels(stats: SoftmaxState, like: SoftmaxState, log_base: LogBase) -> SoftmaxState:
    """A SoftmaxState in base e, in the log base and the form of kernels."""
    top = None if like.top is None else log_base.from_e(stats.largest)
    if like.l is None:
        return SoftmaxState(log_base.from_e(stats.lse(LogBase.E)), None, top)
    return stats._replace(m=jnp.maximum(log_base.from_e(stats.m), LOWEST), top=top)


def _backward(backend: Backend, problem, like, x, lse, do, delta):
    """do and delta have a factor that kernels expect, and lse is without it: P gets it."""
    rows = RowScale(backend.log_base(problem).to_e(lse), jnp.ones_like(lse), None)
    return blockwise.backward(problem, blockwise.tiles(problem).of_gradient(), x, rows, do, delta)


def _tangent(backend: Backend, problem, like, *args):
    return blockwise_tangent(backend.log_base(problem), problem, *args)


def _refuse(backend: Backend, *_):
    raise NotImplementedError(
        f"implementation {backend.name!r} runs on GPUs only, but the program is lowered for "
        'another platform; implementation=None takes "blockwise" there.'
    )


@dataclasses.dataclass(frozen=True)
class GpuOnly(equation.KeptUnderVmap):
    """The rules of kernels in whose place other(like, *args) runs where there is no GPU."""

    primitive = equation.primitive("flash_attention_on_gpu")
    other: Callable

    def lower_elsewhere(self, ctx, *leaves, jaxpr, in_tree, out_tree, **_):
        like = jax.tree.unflatten(out_tree, jaxpr.out_avals)
        other = self.vmap(lambda *leaves: self.other(like, *jax.tree.unflatten(in_tree, leaves)))
        flat = lambda *leaves: jax.tree.leaves(other(*leaves))
        with device.on_cpu():
            return mlir.lower_fun(flat, multiple_results=True)(ctx, *leaves)


def _lower_elsewhere(ctx, *leaves, rules: GpuOnly, **parameters):
    return rules.lower_elsewhere(ctx, *leaves, **parameters)


for _platform in GPUS:
    mlir.register_lowering(GpuOnly.primitive, equation.lower, platform=_platform)
mlir.register_lowering(GpuOnly.primitive, _lower_elsewhere)


# ---- warnings about a program that is lowered ----


def warn(ctx, name: str, is_blind: bool, jaxpr):
    """Warns of a program for a GPU that calls an implementation without kernels, chosen by default
    for a call that was not traced for a GPU (is_blind), or that is exported with Triton kernels."""
    target = jax_internals.target(ctx)
    gpus = [platform for platform in target.platforms if platform in GPUS]
    if gpus and is_blind:
        _once(
            f'a program for {gpus[0]} runs "{name}", not the GPU kernels, since it was not traced '
            "for a GPU. Trace it where a GPU is the default device, or under "
            "jax.sharding.use_abstract_mesh with a GPU as abstract_device."
        )
    if gpus and target.is_export and "pallas_call" in str(jaxpr):
        _once(
            "the exported program contains Triton kernels, for which jax guarantees no "
            "compatibility: jax.export needs disabled_checks="
            '[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]. '
            'implementation="blockwise" has none.'
        )


@functools.cache
def _once(text: str):
    _log.warning("pallas_flash: %s", text)
