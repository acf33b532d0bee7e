"""The softmax of attention, one block at a time: a forward step, its end, and the backward's p and
ds. The functions take and return arrays.

Scores are logits in a `LogBase`. The kernels keep them in base 2, so that every exponential is an
exp2 (FlashAttention-2, arXiv:2307.08691, section 3). Scores that a bias or a score_mod may bring to
the ends of float32 stay in base e, and so do XLA's scores, since XLA turns an exp2 into a product
and an exp.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem.log_base import LOG2E, LogBase

# the maximum of no score; finite, so that no row needs a guard against inf - inf
LOWEST = float(jnp.finfo(jnp.float32).min)


class SoftmaxState(NamedTuple):
    """The running softmax of each row, in the log base b of its scores s: their maximum m, and
    l = sum b^(s - m). P = b^(s - m) / l.

    l is 0 if a row saw no key. If l is None, m is the whole log-sum-exp, and -inf if a row saw no
    key. A sink is a key that every row saw.
    """

    m: jax.Array
    l: jax.Array | None
    # the largest score, if it is requested and m may be another; -inf if there is none
    top: jax.Array | None = None

    @property
    def empty(self):
        return self.m == -jnp.inf if self.l is None else self.l == 0

    @property
    def largest(self):
        """The largest score of a row's keys, -inf where it saw none. No sink is among them."""
        return jnp.where(self.empty, -jnp.inf, self.m) if self.top is None else self.top

    def lse(self, log_base: LogBase):
        """The log-sum-exp of the logits, -inf for a row that saw no key."""
        m = log_base.to_e(self.m)
        if self.l is None:
            return m
        return jnp.where(self.empty, -jnp.inf, m + jnp.log(jnp.where(self.empty, 1.0, self.l)))

    def backward_lse(self, log_base: LogBase):
        """The lse that a backward takes: m + log_b l, and +inf for a row that saw no key, so that
        b^(s - lse) = 0. And P / b^(s - lse), None: 1, since lse rounds, at large logits even to
        m."""
        if self.l is None:
            return jnp.where(self.empty, jnp.inf, self.m), None
        l = jnp.where(self.empty, 1.0, self.l)
        lse = self.m + log_base.log(l)
        return jnp.where(self.empty, jnp.inf, lse), log_base.power(lse - self.m) / l

    def row_lse(self, log_base: LogBase) -> "RowLse":
        """The RowLse that the tangent of kernels takes."""
        return RowLse(*self.backward_lse(log_base))

    def in_base_e(self, log_base: LogBase) -> "SoftmaxState":
        """This state as blockwise has it: in base e, with an l that has the whole tangent of
        lse."""
        m = log_base.to_e(jnp.where(self.empty, LOWEST, self.m))
        fixed = lax.stop_gradient(m)
        l = jnp.exp(m - fixed) if self.l is None else self.l
        return SoftmaxState(fixed, jnp.where(self.empty, 0.0, l), self.top)

    def row_scale(self, dlse):
        """The RowScale that blockwise's backward takes. The m of a row that saw no key is finite:
        e^(-inf - m) = 0."""
        return RowScale(self.m, _inverse(self.l), dlse)


class RowLse(NamedTuple):
    """P = factor b^(s - lse) in the log base b of the scores."""

    lse: jax.Array  # +inf for a row that saw no key
    factor: jax.Array | None  # None: 1

    def row_scale(self, log_base: LogBase) -> "RowScale":
        factor = jnp.ones_like(self.lse) if self.factor is None else self.factor
        return RowScale(log_base.to_e(self.lse), factor, None)


class RowScale(NamedTuple):
    """What blockwise takes in place of the log-sum-exp: P = e^(s - m) inverse_sum, from the numbers
    that the forward computed. And the cotangent of lse, so that a block of all keys of its rows can
    sum their delta itself."""

    m: jax.Array  # in base e
    inverse_sum: jax.Array  # 1 / l
    dlse: jax.Array | None  # None: the block has a part of the rows' keys


class DeltaTerms(NamedTuple):
    """The terms of delta, for a backward that sums it while it reads do."""

    o: jax.Array  # [B, T, N, Hv]
    dlse: jax.Array  # [B, N, T]

    def sum(self, do, kept: float, empty):
        """delta [B, N, T] = rowsum(o * do) - dlse, from do divided by `kept`, the fraction of the
        weights that dropout kept; 0 for an empty row.

        d lse / d s = p, and ds = p * (dp - rowsum(o * do)): the cotangent of lse joins delta.
        """
        wide = self.dlse.dtype
        delta = xla_cpu.rowsum(self.o.astype(wide), do.astype(wide)).swapaxes(1, 2)
        delta = (delta if kept == 1 else delta * kept) - self.dlse
        return jnp.where(empty, 0.0, delta)


def scores(qk, bias, scale: float, soft_cap: float | None, log_base: LogBase):
    """The scores log_b(e) c tanh((scale q k^T + bias) / c), and the tanh; without a soft cap c,
    log_b(e) scale q k^T + bias and None. Shapes broadcast. With a bias the base is e."""
    # log_b(e) first: a product at the end, minus m, would become one multiply-add
    s = qk * (scale * log_base.log_e if soft_cap is None else scale)
    s = s if bias is None else s + bias
    if soft_cap is None:
        return s, None
    tanh = jnp.tanh(s / soft_cap)
    return soft_cap * log_base.log_e * tanh, tanh


def factored_scores(qk, scale: float, soft_cap: float | None):
    """s, and a factor above 0 for `step`. Their product is `scores` without a bias, in base 2,
    minus the constant soft_cap.

    c tanh(x / c) = c - 2 c / (1 + e^(2 x / c)), by an exp2 and a reciprocal square root. The tanh
    of NVIDIA GPUs errs by 2^-11, times the soft cap.
    """
    if soft_cap is None:
        return qk, scale * LOG2E
    root = lax.rsqrt(1.0 + jnp.exp2(qk * (2 * LOG2E * scale / soft_cap)))
    return -(root * root), 2 * soft_cap * LOG2E


def start(zeros, log_base: LogBase, sink=None, with_top: bool = False) -> SoftmaxState:
    """The state before any key, in the shape of `zeros`. A sink, a logit that broadcasts against
    it, counts as a key with this logit and the value 0. `with_top`: the largest score is requested,
    and m may be another."""
    top = zeros - jnp.inf if with_top else None
    if sink is None:
        return SoftmaxState(zeros + LOWEST, zeros, top)
    sink = zeros + sink  # Mosaic has no choice of vectors by a scalar
    m = finite(log_base.from_e(sink))
    return SoftmaxState(m, jnp.where(sink > -jnp.inf, zeros + 1.0, zeros), top)


def finite(s):
    """s, clipped to the ends of float32, beyond which base 2 may have brought it."""
    return jnp.minimum(jnp.maximum(s, LOWEST), -LOWEST)


@jax.custom_jvp
def with_tangent_of(x, value):
    """Returns the value, with the derivative of x."""
    return value


@with_tangent_of.defjvp
def _(primals, tangents):
    return primals[1], tangents[0]


def step(
    s,
    stats: SoftmaxState,
    log_base: LogBase,
    scale: float | None = None,
    rescale_threshold: float = 0.0,
):
    """Adds the scores s [.., q, k] in base b to the running SoftmaxState [.., q].

    Returns p = b^(s - m'), the factor alpha = b^(m - m') that older sums must be scaled by, and the
    new SoftmaxState. A `scale` above 0 multiplies s where a fused multiply-add can do it, at no
    cost.
    """
    stats, alpha = raise_maximum(s, stats, log_base, scale, rescale_threshold)
    p, stats = weights(s, stats, log_base, scale)
    return p, alpha, stats


def raise_maximum(
    s,
    stats: SoftmaxState,
    log_base: LogBase,
    scale: float | None = None,
    rescale_threshold: float = 0.0,
):
    """Raises the maximum to m' by whole rows of scores: the SoftmaxState with l scaled by alpha,
    and alpha. A maximum that grows by no more than `rescale_threshold` stays, and alpha is 1: any
    m' gives the same P = p / l, and no p exceeds b^rescale_threshold."""
    m, l, top = stats
    highest = jnp.max(s, axis=-1)
    highest = highest if scale is None else highest * scale
    m_new = (
        jnp.where(highest > m + rescale_threshold, highest, m)
        if rescale_threshold
        else jnp.maximum(m, highest)
    )
    alpha = log_base.power(m - m_new)
    top = None if top is None else jnp.maximum(top, highest)
    return SoftmaxState(m_new, l * alpha, top), alpha


def weights(
    s,
    stats: SoftmaxState,
    log_base: LogBase,
    scale: float | None = None,
    exp2: Callable = jnp.exp2,
):
    """p = b^(s - m) of some or all columns of scores, after the maximum has been raised, and the
    SoftmaxState with their sum."""
    p = log_base.power((s if scale is None else s * scale) - _each(stats.m, s), exp2)
    return p, stats._replace(l=stats.l + jnp.sum(p, axis=-1))


def _each(row, like):
    """The value of each row [..], repeated along the last axis of `like` [.., n]."""
    return lax.broadcast_in_dim(row, like.shape, range(row.ndim))


def finish(o, l, kept: float = 1.0):
    """The output o / l, where dropout kept the fraction `kept` of the weights; 0 for a row that saw
    no key."""
    return o * _each(_inverse(l if kept == 1.0 else l * kept), o)


def _inverse(l):
    """1 / l, and 1 for a row that saw no key."""
    return 1.0 / jnp.where(l == 0, 1.0, l)


def merge(parts: Sequence[SoftmaxState], log_base: LogBase, differentiable: bool = True):
    """Merges the states of the same rows over several sets of keys. Returns the share of each set
    in the softmax of all, by which its output is multiplied before all are added, and the
    SoftmaxState of all. It has a top if the first part has one. Inside kernels, which know no
    stop_gradient, it is not differentiable."""
    # part by part: along an axis of their array XLA would compute a sum of each maximum, in a
    # kernel of its own
    maxima, sums = zip(*map(_with_sum, parts), strict=True)
    highest = functools.reduce(jnp.maximum, maxima)
    highest = lax.stop_gradient(highest) if differentiable else highest
    sums = [l * log_base.power(m - highest) for m, l in zip(maxima, sums, strict=True)]
    total, top = functools.reduce(operator.add, sums), None
    if parts[0].top is not None:
        top = functools.reduce(jnp.maximum, [x.largest for x in parts])
    inverse = _inverse(total)
    return [l * inverse for l in sums], SoftmaxState(highest, total, top)


def merge_axis(o, parts: SoftmaxState, axis: int, log_base: LogBase):
    """Merges the outputs o [..., Hv] and the states [...], without a top, of many sets of keys
    along an axis: as `merge`, in a few kernels of XLA's however many they are."""
    maxima, sums = _with_sum(parts)
    highest = lax.stop_gradient(jnp.max(maxima, axis, keepdims=True))
    sums = sums * log_base.power(maxima - highest)
    total = jnp.sum(sums, axis, keepdims=True)
    # else XLA would write o times the shares to memory before it adds
    shares = lax.optimization_barrier(sums * _inverse(total))
    stats = SoftmaxState(highest.squeeze(axis), total.squeeze(axis))
    return jnp.sum(o * shares[..., None], axis), stats


def _with_sum(stats: SoftmaxState):
    """The maximum, finite, and the sum."""
    l = jnp.where(stats.empty, 0.0, jnp.ones_like(stats.m) if stats.l is None else stats.l)
    return jnp.maximum(stats.m, LOWEST), l


def gradients(p, factor, visible, tanh):
    """p, and p * factor times the derivative of the soft cap, from the `tanh` of `scores`; both 0
    where a score is not `visible` (None: all are). In a backward the factor is dp - delta."""
    ds = soft_cap_vjp(p * factor, tanh)
    if visible is not None:
        p, ds = jnp.where(visible, p, 0.0), jnp.where(visible, ds, 0.0)
    return p, ds


def soft_cap_vjp(ds, tanh, visible=None):
    """The cotangent of the logits before the soft cap, from that after it and the tanh of `scores`;
    0 where a score is not `visible` (None: all are), whose tanh may be NaN."""
    if tanh is None:
        return ds
    ds = ds * (1.0 - jnp.square(tanh))
    return ds if visible is None else jnp.where(visible, ds, 0.0)


def factored_gradients(s, scale: float, lse, soft_cap: float | None, exp2: Callable = jnp.exp2):
    """p, and the factor that makes dlogits of dp - delta, from s and scale of `factored_scores`.

    `lse` is in base 2, minus the constant soft_cap, and broadcasts against s.
    """
    p = exp2(s * scale - lse)
    return p, factored_soft_cap_vjp(p, s, soft_cap)


def factored_soft_cap_vjp(ds, s, soft_cap: float | None):
    """`soft_cap_vjp`, from s of `factored_scores`."""
    # 1 - tanh^2 is 4 (1 - r) r, and s = -r
    return ds if soft_cap is None else ds * (-4.0 * s * (1.0 + s))
