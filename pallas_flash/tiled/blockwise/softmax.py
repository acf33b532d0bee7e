"""The online softmax of XLA's scores, in base e: a step over one block of keys, and P recomputed in
the backward.

Scores may be plain products q k^T. Their `scale` is then applied to their difference from the
maximum. In one multiply-add, scale q k^T - m would exceed 0 by the rounding of m, and its
exponential would overflow where m is large. Where `rows_are_finite` each row has a score above
-inf, so m needs no guard, and a CPU's library computes the product and its softmax in one call."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.tiled.online_softmax import LOWEST, SoftmaxState, finish


def step(
    axis: int, s, state: SoftmaxState | None, scale: float = 1.0, rows_are_finite: bool = False
):
    """Adds scores with the keys along `axis` to the running SoftmaxState. Returns P before its
    division, the factor of earlier sums, and the new state. In a first step `state` is None, and so
    is the factor.

    The new m has no tangent: any m gives the same P. JAX's derivative of a maximum divides by how
    many scores equal it, and none does where XLA computes them twice and rounds differently.
    """
    highest = jnp.max(s, axis) if rows_are_finite else jnp.max(s, axis, initial=LOWEST)
    m = lax.stop_gradient(highest if state is None else jnp.maximum(state.m, highest))
    p = jnp.exp(_times(scale, s - jnp.expand_dims(m, axis)))
    total = jnp.sum(p, axis)
    if state is None:
        return p, None, SoftmaxState(m, total)
    alpha = jnp.exp(_times(scale, state.m - m))
    top = None if state.top is None else lax.stop_gradient(jnp.maximum(state.top, jnp.max(s, axis)))
    return p, alpha, SoftmaxState(m, state.l * alpha + total, top)


def scaled_maximum(m, scale: float):
    """The finite maximum of the scaled scores, given the m of `step`."""
    return m if scale == 1.0 else jnp.maximum(_times(scale, m), LOWEST)


def probabilities(
    s, m, inverse_sum, scale: float, rows_are_finite: bool = False, is_whole_row: bool = False
):
    """P of scores with the keys along the last axis, given the `RowScale` of each row; 0 where its
    m is +inf. Where inverse_sum is None P is not divided: scores that have their scale alone allow
    it. From scores without their scale their own maximum is subtracted first, as in `step`. If
    these are all scores of their rows, P is divided by their own sum, as in the forward: XLA then
    computes P once in a program that has both."""
    if scale == 1.0:
        p = jnp.exp(s - m)
        return p if inverse_sum is None else p * inverse_sum
    p, _, block = step(-1, s, None, scale, rows_are_finite)
    if is_whole_row:
        return finish(p, block.l)
    highest = jnp.expand_dims(scaled_maximum(block.m, scale), -1)
    return p * (jnp.exp(highest - m) * inverse_sum)


def with_tangent(
    scores: Callable, x: list, dx: list, m, inverse_sum, scale: float, rows_are_finite: bool = False
):
    """`probabilities` of scores(*x), and P times the tangent of the scaled scores along dx, in
    which None is zero; None where all of it is."""
    changes = [d is not None for d in dx]
    pick = lambda x: [a for a, c in zip(x, changes, strict=True) if c]

    def varied(changing):
        changing = iter(changing)
        return scores(*(next(changing) if c else a for a, c in zip(x, changes, strict=True)))

    s, ds = jax.jvp(varied, (pick(x),), (pick(dx),)) if any(changes) else (scores(*x), None)
    p = probabilities(s, m, inverse_sum, scale, rows_are_finite)
    return p, None if ds is None else p * _times(scale, ds)


def delta(p, dp, visible):
    """The sum of P dP of each row over its visible scores (None: all). It is rowsum(o do) if these
    are all scores of the row."""
    if visible is not None:
        return jnp.sum(jnp.where(visible, p * dp, 0.0), -1, keepdims=True)
    return xla_cpu.rowsum(p, dp)[..., None]


def _times(scale: float, s):
    return s if scale == 1.0 else s * scale
