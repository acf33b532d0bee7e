"""The online softmax of XLA's scores, in base e: a step over one block of keys, and P again in the
backward.

Scores may be plain products q k^T, whose `scale` meets them after their maximum is off: a product
less m, in one multiply-add, would exceed 0 by the rounding of m, and its exponential overflow where
m is large. Where `rows_are_finite` each row has a score above -inf, and m needs no guard; then a
CPU's library takes the product and its softmax in one call.
"""

import jax.numpy as jnp
from jax import lax

from pallas_flash.tiled.online_softmax import LOWEST, SoftmaxState, finish


def step(
    axis: int, s, state: SoftmaxState | None, scale: float = 1.0, rows_are_finite: bool = False
):
    """Adds scores with the keys along `axis` to the running SoftmaxState: P before its division,
    the factor of what was summed before, and the new state. Without a step before, `state` is None,
    and so is the factor.

    The new m has no tangent: any m gives the same P. JAX's own derivative of a maximum divides by
    how many scores equal it, and that is none where XLA computes them twice and rounds otherwise.
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
    """The maximum of the scaled scores, from that of `step`; finite, as that is."""
    return m if scale == 1.0 else jnp.maximum(_times(scale, m), LOWEST)


def probabilities(
    s, m, inverse_sum, scale: float, rows_are_finite: bool = False, is_whole_row: bool = False
):
    """P of scores with the keys along the last axis, from the `RowScale` of each row; 0 where its m
    is +inf. Scores that lack their scale meet their own maximum first, as in `step`; if these are
    all scores of their rows, their own sum is the rows', and P is what the forward had: in one
    program XLA computes it once."""
    if scale == 1.0:
        return jnp.exp(s - m) * inverse_sum
    p, _, block = step(-1, s, None, scale, rows_are_finite)
    if is_whole_row:
        return finish(p, block.l)
    highest = jnp.expand_dims(scaled_maximum(block.m, scale), -1)
    return p * (jnp.exp(highest - m) * inverse_sum)


def delta(p, dp, visible):
    """sum P dP of each row over its visible scores (None: all): if those are all its keys,
    rowsum(o do)."""
    products = p * dp if visible is None else jnp.where(visible, p * dp, 0.0)
    return jnp.sum(products, -1, keepdims=True)


def _times(scale: float, s):
    return s if scale == 1.0 else s * scale
