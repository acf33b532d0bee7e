"""The softmax of attention, one block at a time: a forward step, its end, and the backward's p and ds. Plain values only.

Scores are kept in units of log 2, so that every exponential is an exp2 (FlashAttention-2, arXiv:2307.08691, section 3).
"""

import math

import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
LOWEST = float(jnp.finfo(jnp.float32).min)  # the maximum of no score; finite, so that no row needs a guard against inf - inf


def scores(qk, bias, scale: float, soft_cap: float | None):
    """log2(e) * c * tanh((scale * qk + bias) / c): what the softmax sees, from q k^T. Shapes broadcast."""
    if bias is None and soft_cap is None:
        return qk * (scale * LOG2E)
    s = qk * scale
    if bias is not None:
        s = jnp.where(bias == -jnp.inf, bias, jnp.maximum(s + bias, LOWEST / 2))  # a finite bias hides nothing
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    return s * LOG2E


def scores_apart(qk, scale: float, soft_cap: float | None):
    """s, and a factor above 0 for `step`: their product is `scores` without a bias, less the constant soft_cap.

    c tanh(x / c) = c - 2 c / (1 + e^(2 x / c)), by an exp2 and a reciprocal square root: the tanh of NVIDIA GPUs errs by 2^-11,
    times the soft cap. `finish` adds the constant.
    """
    if soft_cap is None:
        return qk, scale * LOG2E
    root = lax.rsqrt(1.0 + jnp.exp2(qk * (2 * LOG2E * scale / soft_cap)))
    return -(root * root), 2 * soft_cap * LOG2E


def step(s, m, l, scale: float | None = None):
    """Adds the scores s [.., q, k] to the running maximum m and sum l [.., q].

    Returns p = 2^(s - m'), the factor alpha = 2^(m - m') that older sums must be scaled by, and the new m' and l'. A `scale`
    above 0 multiplies s where a fused multiply-add can do it, at no cost.
    """
    highest = jnp.max(s, axis=-1)
    m_new = jnp.maximum(m, highest if scale is None else highest * scale)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2((s if scale is None else s * scale) - _each(m_new, s))
    return p, alpha, m_new, l * alpha + jnp.sum(p, axis=-1)


def _each(row, like):
    """The value of each row [..], repeated along the last axis of `like` [.., n]."""
    return lax.broadcast_in_dim(row, like.shape, range(row.ndim))


def finish(o, m, l, constant: float = 0.0):
    """The output o / l and the natural log-sum-exp; 0 and -inf for a row that saw no key.

    `constant` is what all scores lacked, in natural units.
    """
    empty = l == 0
    l = jnp.where(empty, 1.0, l)
    return o * _each(1.0 / l, o), jnp.where(empty, -jnp.inf, m * LN2 + jnp.log(l) + constant)


def gradients(s, seen, lse, dp, delta, soft_cap: float | None):
    """p and dlogits = p * (dp - delta), from scores s and dp [.., q, k], lse and delta [.., q].

    `seen` (or None: all) hides scores; where a row saw no key its lse must come as +inf, so that p = 0.
    """
    p = jnp.exp2(s - (lse * LOG2E)[..., None])
    ds = p * (dp - delta[..., None])
    if soft_cap is not None:
        ds = ds * (1.0 - jnp.square(s * (LN2 / soft_cap)))
    if seen is not None:
        p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)
    return p, ds


def gradients_apart(s, scale: float, lse, soft_cap: float | None):
    """p, and what dp - delta must be multiplied by to give dlogits, from s and scale of `scores_apart`.

    `lse` is in units of log 2, less the constant soft_cap, and broadcasts against s.
    """
    p = jnp.exp2(s * scale - lse)
    return p, p if soft_cap is None else p * (-4.0 * s * (1.0 + s))  # 1 - tanh^2 is 4 (1 - r) r, and s = -r
