"""The softmax of attention, one block at a time: a forward step, its end, and the backward's p and
ds. Plain values only.

The kernels keep scores in units of log 2, so that every exponential is an exp2 (FlashAttention-2,
arXiv:2307.08691, section 3). Scores that a bias or a score_mod may bring to the ends of float32
stay natural, and so do XLA's scores, since XLA turns an exp2 into a product and an exp. The `unit`
of scores is the factor by which natural ones are multiplied.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# the maximum of no score; finite, so that no row needs a guard against inf - inf
LOWEST = float(jnp.finfo(jnp.float32).min)


class SoftmaxState(NamedTuple):
    """Of each row's softmax, P = 2^(s - m) / l: the maximum m of its scores, in their unit, and the
    sum l of 2^(s - m), which is e^(s - m) where they are natural.

    l is 0 where a row saw no key. Where l is None, m is the whole log-sum-exp, and -inf where a row
    saw no key. A sink is a key that every row saw.
    """

    m: jax.Array
    l: jax.Array | None
    # the largest score, if it is asked for and m may be another: -inf where there is none
    top: jax.Array | None = None

    @property
    def empty(self):
        return self.m == -jnp.inf if self.l is None else self.l == 0

    @property
    def largest(self):
        """The largest score of a row's keys, in their unit, -inf where it saw none. No sink is
        among them."""
        return jnp.where(self.empty, -jnp.inf, self.m) if self.top is None else self.top

    def lse(self, unit: float = LOG2E):
        """The natural log-sum-exp, -inf for a row that saw no key."""
        m = self.m / unit
        return (
            m
            if self.l is None
            else jnp.where(self.empty, -jnp.inf, m + jnp.log(jnp.where(self.empty, 1.0, self.l)))
        )

    def in_one(self, unit: float = LOG2E):
        """What a backward takes: the log-sum-exp in one number, +inf for a row that saw no key, so
        that 2^(s - it) = 0; and the factor (None: 1) by which 2^(s - it) is less than P, since at
        large logits m + log2 l rounds, even to m."""
        if self.l is None:
            return jnp.where(self.empty, jnp.inf, self.m), None
        l = jnp.where(self.empty, 1.0, self.l)
        lse = self.m + jnp.log2(l) * (unit / LOG2E)
        return jnp.where(self.empty, jnp.inf, lse), power(lse - self.m, unit) / l

    def row_scale(self, dlse):
        """What blockwise's backward takes. The m of a row that saw no key is finite: e^(-inf - m) =
        0."""
        return RowScale(self.m, _inverse(self.l), dlse)


class RowScale(NamedTuple):
    """In place of the log-sum-exp: P = e^(s - m) inverse_sum is made of what the forward computed.
    And the cotangent of lse, so that a block of all keys of its rows can sum their delta itself."""

    m: jax.Array  # natural
    inverse_sum: jax.Array  # 1 / l
    dlse: jax.Array | None  # None: the rows have keys elsewhere too


def power(x, unit: float = LOG2E):
    """e^(x / unit): 2^x in units of log 2."""
    return jnp.exp2(x if unit == LOG2E else x * (LOG2E / unit))


def scores(qk, bias, scale: float, soft_cap: float | None, unit: float = LOG2E):
    """unit * c * tanh((scale * qk + bias) / c): what the softmax sees, from q k^T. Shapes
    broadcast. A bias is natural."""
    # first of all: a product at the end and less m would be one multiply-add
    of_x = unit if soft_cap is None else 1.0
    s = qk * (scale * of_x)
    s = s if bias is None else s + bias
    return s if soft_cap is None else soft_cap * unit * jnp.tanh(s / soft_cap)


def scores_apart(qk, scale: float, soft_cap: float | None):
    """s, and a factor above 0 for `step`: their product is `scores` without a bias, less the
    constant soft_cap.

    c tanh(x / c) = c - 2 c / (1 + e^(2 x / c)), by an exp2 and a reciprocal square root: the tanh
    of NVIDIA GPUs errs by 2^-11, times the soft cap.
    """
    if soft_cap is None:
        return qk, scale * LOG2E
    root = lax.rsqrt(1.0 + jnp.exp2(qk * (2 * LOG2E * scale / soft_cap)))
    return -(root * root), 2 * soft_cap * LOG2E


def start(zeros, sink=None, unit: float = LOG2E, with_top: bool = False) -> SoftmaxState:
    """Those before any key, of the shape of `zeros`. A sink, a logit that broadcasts against it, is
    as if a key with this score and the value 0 had passed by. `with_top`: the largest score is
    asked for, and m may be another."""
    top = zeros - jnp.inf if with_top else None
    if sink is None:
        return SoftmaxState(zeros + LOWEST, zeros, top)
    sink = zeros + sink  # Mosaic has no choice of vectors by a scalar
    return SoftmaxState(finite(sink * unit), jnp.where(sink > -jnp.inf, zeros + 1.0, zeros), top)


def finite(s):
    """A score that units of log 2 may have brought beyond the ends of float32, at one of them."""
    return jnp.minimum(jnp.maximum(s, LOWEST), -LOWEST)


def step(
    s, stats: SoftmaxState, scale: float | None = None, slack: float = 0.0, unit: float = LOG2E
):
    """Adds the scores s [.., q, k] to the running SoftmaxState [.., q].

    Returns p = 2^(s - m'), the factor alpha = 2^(m - m') that older sums must be scaled by, and the
    new SoftmaxState. A `scale` above 0 multiplies s where a fused multiply-add can do it, at no
    cost. A maximum that grows by no more than `slack` stays what it was, and alpha is 1: any m'
    gives the same P = p / l, and none of p exceeds 2^slack.
    """
    m, l, top = stats
    highest = jnp.max(s, axis=-1)
    highest = highest if scale is None else highest * scale
    m_new = jnp.where(highest > m + slack, highest, m) if slack else jnp.maximum(m, highest)
    alpha = power(m - m_new, unit)
    p = power((s if scale is None else s * scale) - _each(m_new, s), unit)
    return (
        p,
        alpha,
        SoftmaxState(
            m_new,
            l * alpha + jnp.sum(p, axis=-1),
            None if top is None else jnp.maximum(top, highest),
        ),
    )


def _each(row, like):
    """The value of each row [..], repeated along the last axis of `like` [.., n]."""
    return lax.broadcast_in_dim(row, like.shape, range(row.ndim))


def finish(o, l, kept: float = 1.0):
    """The output o / l, of weights of which dropout kept the part `kept`; 0 for a row that saw no
    key."""
    return o * _each(_inverse(l if kept == 1.0 else l * kept), o)


def _inverse(l):
    """1 / l, and 1 for a row that saw no key."""
    return 1.0 / jnp.where(l == 0, 1.0, l)


def merge_all(o, stats: SoftmaxState, axis: int, unit: float = LOG2E):
    """Of the attention of the same rows to several sets of keys, along an axis of o [.., n] and
    stats [..], that to all."""
    stats, top = _in_two(stats), None if stats.top is None else jnp.max(stats.top, axis)
    highest = lax.stop_gradient(jnp.max(stats.m, axis, keepdims=True))
    l = stats.l * power(stats.m - highest, unit)
    total = jnp.sum(l, axis, keepdims=True)
    part = l / jnp.where(total == 0, 1.0, total)
    return jnp.sum(o * part[..., None], axis), SoftmaxState(
        jnp.squeeze(highest, axis), jnp.squeeze(total, axis), top
    )


def merge(one, other, unit: float = LOG2E):
    """Of the attention of the same rows [B, T, N] to two sets of keys, each (o, SoftmaxState), that
    to both: o is wide. It has a top if the one has."""
    top = None if one[1].top is None else jnp.maximum(one[1].top, other[1].largest)
    (o, a), (o_other, b) = (
        (o.astype(jnp.float32) if o.dtype.itemsize < 4 else o, _in_two(stats))
        for o, stats in (one, other)
    )
    m = lax.stop_gradient(jnp.maximum(a.m, b.m))
    l, l_other = (part.l * power(part.m - m, unit) for part in (a, b))
    both = l + l_other
    part = lambda l: jnp.swapaxes(l / jnp.where(both == 0, 1.0, both), 1, 2)[..., None]
    return o * part(l) + o_other * part(l_other), SoftmaxState(m, both, top)


def _in_two(stats: SoftmaxState) -> SoftmaxState:
    """With an l, and with a maximum that is finite."""
    l = jnp.where(stats.empty, 0.0, jnp.ones_like(stats.m) if stats.l is None else stats.l)
    return SoftmaxState(jnp.maximum(stats.m, LOWEST), l)


def natural(s, unit: float):
    """Scores in this unit, in natural ones."""
    return s if unit == 1.0 else s * (1 / unit)


def gradients(p, dp, delta, seen, tanh):
    """p and dlogits = p * (dp - delta), both 0 where `seen` (None: nowhere) hides a score; each
    row's delta broadcasts against p. The logits are those before a soft cap, which made `tanh` of
    them (None: there is no soft cap)."""
    ds = capped(p * (dp - delta), tanh)
    if seen is not None:
        p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)
    return p, ds


def with_tanh(logits: Callable, soft_cap: float | None, unit: float):
    """logits(unit), made by `scores`, and their tanh, None without a soft cap: 1 where that is
    reached, as no quotient is."""
    if soft_cap is None:
        return logits(unit), None
    tanh = logits(1.0 / soft_cap)
    return tanh * (soft_cap * unit), tanh


def capped(ds, tanh, seen=None):
    """The cotangent of what a soft cap was put on, from that of what came of it; 0 where `seen`
    (None: nowhere) hides a score, of which the tanh may be NaN."""
    if tanh is None:
        return ds
    ds = ds * (1.0 - jnp.square(tanh))
    return ds if seen is None else jnp.where(seen, ds, 0.0)


def gradients_apart(s, scale: float, lse, soft_cap: float | None):
    """p, and what dp - delta must be multiplied by to give dlogits, from s and scale of
    `scores_apart`.

    `lse` is in units of log 2, less the constant soft_cap, and broadcasts against s.
    """
    p = jnp.exp2(s * scale - lse)
    return p, capped_apart(p, s, soft_cap)


def capped_apart(ds, s, soft_cap: float | None):
    """The cotangent of what a soft cap was put on, from that of what came of it, and s of
    `scores_apart`."""
    # 1 - tanh^2 is 4 (1 - r) r, and s = -r
    return ds if soft_cap is None else ds * (-4.0 * s * (1.0 + s))
