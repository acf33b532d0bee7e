"""The functions of interpreted.py for jax's Triton lowering, which compiles kernels by
`pl.pallas_call` for a GPU."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_flash.jax_support.jax_internals import mlir

barrier = plgpu.debug_barrier
# Pallas' interpreter has one thread, which waits for nobody.
mlir.register_lowering(jax.make_jaxpr(barrier)().eqns[0].primitive, lambda ctx: ())


def load(ref, inside, other):
    if inside is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=inside, other=jnp.asarray(other, ref.dtype))


def store(ref, x, inside):
    plgpu.store(ref, x, mask=inside)


def parameters(tiles) -> plgpu.CompilerParams | None:
    """How a `pl.pallas_call` is compiled on a GPU; None: nowhere."""
    return plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
