"""Lowers a call that was traced for a GPU: kernels on a GPU, and "blockwise" on other platforms.

Within jit the device that will run the program is unknown. A call that is traced where a GPU is the
default takes its kernels; blockwise replaces them in a program that is lowered for another
platform, and is traced only then.
"""

import dataclasses
import functools
import logging

import jax

from pallas_flash.jax_support import hardware, jax_internals
from pallas_flash.jax_support.jax_internals import mlir
from pallas_flash.problem.implementation import Implementation
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled.online_softmax import SoftmaxState, finite
from pallas_flash.transforms import equation

GPUS = "cuda", "rocm"  # platforms
ON_GPU = equation.primitive("flash_attention_on_gpu")
ANYWHERE = equation.primitive("flash_attention_call")
_log = logging.getLogger("pallas_flash")


@dataclasses.dataclass(frozen=True)
class ByPlatform(equation.Rules):
    """Lowers `run`, or `run_elsewhere` where kernels were traced for a GPU and the program is
    lowered for another platform; kernels that were requested by name raise there."""

    implementation: Implementation
    is_requested: bool
    traced_without_gpu: bool

    @property
    def needs_gpu(self) -> bool:
        """Whether `run` is for GPUs alone. Kernels that were requested by name and that Pallas'
        interpreter can run are used everywhere."""
        runs_anywhere = self.is_requested and self.implementation.is_interpretable
        return self.implementation.own_kernels and not self.traced_without_gpu and not runs_anywhere

    @property
    def primitive(self):
        return ON_GPU if self.needs_gpu else ANYWHERE

    def run_elsewhere(self, like, *args):
        """The results of `run` by blockwise, in the form of `like`."""
        raise NotImplementedError

    def lower(self, ctx, *leaves, jaxpr, **trees):
        self._warn(jax_internals.target(ctx), jaxpr)
        return super().lower(ctx, *leaves, jaxpr=jaxpr, **trees)

    def lower_elsewhere(self, ctx, *leaves, jaxpr, in_tree, out_tree):
        name = self.implementation.name
        if self.is_requested:
            raise NotImplementedError(
                f"implementation {name!r} runs on GPUs only, but the program is lowered for "
                'another platform; implementation=None takes "blockwise" there.'
            )
        like = jax.tree.unflatten(out_tree, jaxpr.out_avals)
        flat = self.flat(functools.partial(self.run_elsewhere, like), in_tree=in_tree)
        with hardware.on_cpu():
            return mlir.lower_fun(flat, multiple_results=True)(ctx, *leaves)

    def _warn(self, target: jax_internals.Target, jaxpr):
        """Warns of a program for a GPU that calls an implementation without kernels, chosen by
        default for a call that was not traced for a GPU, or that is exported with Triton
        kernels."""
        gpus = [platform for platform in target.platforms if platform in GPUS]
        if gpus and self.traced_without_gpu and not self.is_requested:
            _once(
                f'a program for {gpus[0]} runs "{self.implementation.name}", not the GPU kernels, '
                "since it was not traced for a GPU. Trace it where a GPU is the default device, or "
                "under jax.sharding.use_abstract_mesh with a GPU as abstract_device."
            )
        if gpus and target.is_export and "pallas_call" in str(jaxpr):
            _once(
                "the exported program contains Triton kernels, for which jax guarantees no "
                "compatibility: jax.export needs disabled_checks="
                '[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]. '
                'implementation="blockwise" has none.'
            )


for _platform in GPUS:
    mlir.register_lowering(ON_GPU, equation.lower, platform=_platform)
mlir.register_lowering(ON_GPU, functools.partial(equation.lower, method="lower_elsewhere"))


@functools.cache
def _once(text: str):
    _log.warning("pallas_flash: %s", text)


def like_kernels(stats: SoftmaxState, like: SoftmaxState, log_base: LogBase) -> SoftmaxState:
    """A SoftmaxState in base e, converted to the log base and the fields of kernels."""
    top = None if like.top is None else log_base.from_e(stats.largest)
    if like.l is None:
        return SoftmaxState(log_base.from_e(stats.lse(LogBase.E)), None, top)
    return stats._replace(m=finite(log_base.from_e(stats.m)), top=top)
