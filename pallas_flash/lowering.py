"""What a program holds where it is lowered for a device that its calls were not traced for: kernels
on a GPU, else "blockwise".

Within jit nobody knows where the arrays lie that it will be given. So whoever finds a GPU while
tracing takes its kernels, and what serves elsewhere is traced only when the program is lowered for
it, in place of the kernels.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_flash import blockwise
from pallas_flash.backends import Backend, Choice, Half
from pallas_flash.kernels import device
from pallas_flash.online_softmax import LOWEST, Apart, SoftmaxState

GPUS = "cuda", "rocm"  # platforms
_log = logging.getLogger("pallas_flash")


class OnGpu(NamedTuple):
    """A half of kernels where a program is lowered for a GPU; for anything else that of blockwise,
    if nobody asked for them."""

    half: Half
    is_asked: bool

    def __call__(self, problem, tiles, *arrays):
        kernels = lambda *arrays: self.half.run(problem, tiles, *arrays)
        other = functools.partial(
            _forward if self.half.is_forward else _backward, self.half.backend, problem
        )
        return either(self.half.backend, self.is_asked, kernels, other, *arrays)


def by_platform(choice: Choice, is_asked: bool) -> Choice:
    """The choice for a call whose program may be lowered for something else than what it was traced
    for."""
    backend = choice.backend
    if not backend.own_kernels:
        return choice
    forward, backward = (OnGpu(Half(backend, is_forward), is_asked) for is_forward in (True, False))
    return choice._replace(backend=backend._replace(forward=forward, backward=backward))


def either(backend: Backend, is_asked: bool, kernels: Callable, other: Callable, *args):
    """kernels(*args) of a backend where the program is lowered for a GPU, else other(like, *args),
    with results like theirs. Whoever asks for kernels that Pallas' interpreter can run has them
    there too."""
    if (
        device.here().platform != "gpu"
        or not backend.own_kernels
        or (is_asked and backend.name != "hopper")
    ):
        return kernels(*args)
    other = functools.partial(_refuse, backend) if is_asked else other
    leaves, tree = jax.tree.flatten(args)
    call, out = jax.make_jaxpr(
        lambda *leaves: kernels(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*leaves)
    instead = lambda *leaves: jax.tree.leaves(other(out, *jax.tree.unflatten(tree, leaves)))
    results = either_p.bind(*leaves, call=call, instead=instead)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _forward(backend: Backend, problem, like, x):
    o, stats = blockwise.forward(problem, blockwise.tiles(problem).of_gradient(), x)
    return o, like_kernels(stats, like[1], backend.unit(problem))


def like_kernels(stats: SoftmaxState, like: SoftmaxState, unit: float) -> SoftmaxState:
    """Natural SoftmaxState in the unit and the form of kernels."""
    top = None if like.top is None else stats.largest * unit
    if like.l is None:
        return SoftmaxState(stats.lse(1.0) * unit, None, top)
    return stats._replace(m=jnp.maximum(stats.m * unit, LOWEST), top=top)


def _backward(backend: Backend, problem, like, x, lse, do, delta):
    """What do and delta of kernels have as a factor comes out as one of P."""
    rows = Apart(lse / backend.unit(problem), jnp.ones_like(lse), None)
    return blockwise.backward(problem, blockwise.tiles(problem).of_gradient(), x, rows, do, delta)


def _refuse(backend: Backend, *_):
    raise NotImplementedError(
        f"implementation {backend.name!r} was asked for, whose kernels are for a GPU, but the "
        "program is lowered for something "
        'else: implementation=None takes "blockwise" there.'
    )


either_p = Primitive("flash_attention_on_gpu")
either_p.multiple_results = True
either_p.def_impl(
    lambda *leaves, **parameters: jax.jit(functools.partial(either_p.bind, **parameters))(*leaves)
)
either_p.def_effectful_abstract_eval(lambda *_, call, instead: (call.out_avals, call.effects))


def _lower_kernels(ctx, *leaves, call, instead):
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *leaves)


def _lower_other(ctx, *leaves, call, instead):
    with device.on_cpu():
        return mlir.lower_fun(instead, multiple_results=True)(ctx, *leaves)


for _platform in GPUS:
    mlir.register_lowering(either_p, _lower_kernels, platform=_platform)
mlir.register_lowering(either_p, _lower_other)


def _batch(leaves, axes, *, call, instead):
    mapped = lambda f: jax.vmap(f, tuple(axes))
    results = either_p.bind(
        *leaves, call=jax.make_jaxpr(mapped(jaxpr_as_fun(call)))(*leaves), instead=mapped(instead)
    )
    return results, [0] * len(results)


batching.primitive_batchers[either_p] = _batch


# ---- what a user should know of a program that is lowered ----


def tell(ctx, name: str, is_blind: bool, call):
    """Of one that has `call` of an implementation in it, which is_blind: taken for a call that was
    not for a GPU."""
    module, gpus = (
        ctx.module_context,
        [platform for platform in ctx.module_context.platforms if platform in GPUS],
    )
    if gpus and is_blind:
        _once(
            f'a program for {gpus[0]} has "{name}" in it, not kernels, since it was not traced for '
            "a GPU. Trace it where one is "
            "the default device, or under jax.sharding.use_abstract_mesh with one as "
            "abstract_device."
        )
    if gpus and module.lowering_parameters.for_export and "pallas_call" in str(call):
        _once(
            "what is exported has Triton kernels in it, for which jax promises no compatibility: "
            "it wants disabled_checks="
            '[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]. '
            'implementation="blockwise" has none.'
        )


@functools.cache
def _once(text: str):
    _log.warning("pallas_flash: %s", text)
