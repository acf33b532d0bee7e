"""Attention and its derivatives: a jax.custom_vjp ties the forward to the backward, and an equation
around it adds forward mode.

JAX turns a custom_vjp into its forward and an equation that is linear in the tangents. The
transpose of this equation is the backward, but the equation itself cannot be evaluated. `Attention`
has the same rule with a linear equation that a kernel evaluates, `Tangent`: its gradient is the
custom_vjp's, and there is a jax.jvp too. Blockwise computes what an implementation has no kernel
for.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash.jax_support.jax_internals import vary_alike
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import Choice
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import blockwise, online_softmax
from pallas_flash.tiled.blockwise.implementation import BLOCKWISE
from pallas_flash.tiled.online_softmax import DeltaTerms, RowScale, SoftmaxState
from pallas_flash.transforms import derivative_modes, equation
from pallas_flash.transforms.equation import LinearMap, floats


class Residuals(NamedTuple):
    operands: Operands
    o: jax.Array
    stats: SoftmaxState  # without its top


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(problem: Problem, choice: Choice, operands: Operands):
    """Attention: o [B, T, N, Hv] in the query's dtype and lse [B, N, T] in float32, both
    differentiable; and the largest logits [B, N, T], or None if they are not requested."""
    with jax.named_scope(problem.scope):
        x = vary_alike(operands).with_values(problem)
        if choice.reverse_only:
            x = _map_floats(derivative_modes.reverse_only, x)
            o, stats = attention(problem, choice, x)
        elif choice.implementation.is_dense:
            o, stats = choice.forward(problem, choice.tiles, x)
            o, stats = checkpoint_names(o, stats, _name_in_derivatives)
        else:
            o, stats = Attention(problem, choice)(x)
        return o, *lse_and_largest(choice.implementation.log_base(problem), problem, x, stats)


# ---- the tie ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(problem: Problem, choice: Choice, x: Operands):
    """The forward: o [B, T, N, Hv] in the query's dtype, and the SoftmaxState [B, N, T]."""
    return choice.forward(problem, choice.tiles, x)


def _forward(problem, choice, x):
    choice = choice.for_gradient()
    if choice.reverse_only:
        x = _map_floats(derivative_modes.no_second, x)
        o, stats = choice.forward(problem, choice.tiles, x)
    else:
        o, stats = Attention(problem, choice)(x)
    o, stats = checkpoint_names(o, stats)
    return (o, stats), Residuals(x, o, stats._replace(top=None))


def _backward(problem, choice, residuals, cotangents):
    (do, dstats), stats = derivative_modes.no_second(cotangents), residuals.stats
    # where there is an l, any m gives the same softmax: l = b^(lse - m) has all of lse's derivative
    log_base = choice.implementation.log_base(problem)
    dlse = log_base.from_e(dstats.m) if stats.l is None else stats.l * dstats.l
    wanted = jax.tree.map(lambda _: True, residuals.operands.differentiable)
    gradient = Gradient(problem, choice.for_gradient(), wanted).run(residuals, (do, dlse))
    return (jax.tree.map(lambda _: None, residuals.operands).with_differentiable(gradient),)


attention.defvjp(_forward, _backward)


# ---- forward mode ----

# traced once for a call and its derivative, if both have the same tiles
_attention = jax.jit(attention, static_argnums=(0, 1), inline=True)


@dataclasses.dataclass(frozen=True)
class Attention(equation.Equation):
    """`attention` with a forward mode."""

    primitive = equation.primitive("flash_attention", has_transpose=True)
    problem: Problem
    choice: Choice

    @property
    def run(self):
        return functools.partial(_attention, self.problem, self.choice)

    def results_like(self, x):
        return self.choice.results_like(self.problem, x)

    def push(self, args, tangents):
        """JAX's rule for a custom_vjp, written out."""
        choice, dx = self.choice.for_gradient(), tangents[0].differentiable
        (o, stats), residuals = _forward(self.problem, choice, *args)
        dstats = jax.tree.map(jnp.zeros_like, stats)
        if not jax.tree.leaves(dx):
            return (o, stats), (jnp.zeros_like(o), dstats)
        do, dlse = Tangent(self.problem, choice)(residuals, dx)
        if stats.l is None:  # as in `_backward`
            log_base = choice.implementation.log_base(self.problem)
            return (o, stats), (do, dstats._replace(m=log_base.from_e(dlse)))
        return (o, stats), (do, dstats._replace(l=stats.l * dlse))

    def pull(self, args, cotangents):
        """The transpose by the values, in which attention is linear."""
        choice, (x,) = self.choice.for_gradient(), args
        _, residuals = _forward(self.problem, choice, x)
        none = jax.tree.map(lambda _: False, x.differentiable)
        value_map = Gradient(self.problem, choice, none._replace(value=True))
        gradient = value_map(residuals, (cotangents[0], jnp.zeros_like(residuals.stats.m)))
        return (jax.tree.map(lambda _: None, x)._replace(value=gradient.value),)


@dataclasses.dataclass(frozen=True)
class _Map(LinearMap):
    """A linear map by an implementation's pass; JAX differentiates only blockwise's."""

    problem: Problem
    choice: Choice

    @property
    def log_base(self) -> LogBase:
        return self.choice.implementation.log_base(self.problem)

    def differentiable(self, residuals: Residuals):
        if self.choice.implementation.takes_row_scale:
            return self, residuals
        choice = Choice(BLOCKWISE, BLOCKWISE.tiles(self.problem)).for_gradient()
        (x, o, stats), log_base = residuals, self.log_base
        if x.sinks is not None:  # clipped as the scores that the maxima are of
            x = x._replace(sinks=log_base.to_e(sink_scores(x.sinks, log_base)))
        residuals = Residuals(x, o, stats.in_base_e(log_base))
        return dataclasses.replace(self, choice=choice), residuals


@dataclasses.dataclass(frozen=True)
class Tangent(_Map):
    """Maps the operands' tangents to the tangents of o [B, T, N, Hv] and lse [B, N, T]."""

    def run(self, residuals: Residuals, x: Gradients):
        choice, (operands, o, stats) = self.choice, residuals
        if choice.implementation.takes_row_scale:
            rows = scale = stats.row_scale(None)
        else:
            rows = stats.row_lse(self.log_base)
            scale = RowScale(rows.lse, 1.0 if rows.factor is None else rows.factor, None)
        dlse = jnp.zeros_like(stats.m)
        if x.sinks is not None:
            dsinks = x.sinks[None, :, None].astype(dlse.dtype)
            dlse = dsinks * sink_weights(operands.sinks, scale, self.log_base)
        args = operands, x._replace(sinks=None), rows, o, dlse
        do, dlse = choice.tangent(self.problem, choice.tiles, *args)
        do, dlse = zero_padded_rows(operands, do, dlse)
        return do.astype(o.dtype), dlse

    def results_like(self, residuals, x):
        return residuals.o, residuals.stats.m

    def transposed(self, x):
        is_there = jax.tree.map(lambda a: a is not None, x, is_leaf=lambda a: a is None)
        return Gradient(self.problem, self.choice, is_there)

    def vjp_of_residuals(self, residuals, x, cotangents):
        return _second(self, residuals, x, cotangents)


@dataclasses.dataclass(frozen=True)
class Gradient(_Map):
    """Maps the cotangents of o and lse to the gradients of the operands named in `wanted`."""

    wanted: Gradients  # of bools

    def run(self, residuals, x):
        return self._pick(gradients(self.problem, self.choice, residuals, x))

    def results_like(self, residuals, x):
        return self._pick(residuals.operands.differentiable)

    def _pick(self, x: Gradients) -> Gradients:
        return jax.tree.map(lambda wanted, a: a if wanted else None, self.wanted, x)

    def transposed(self, x):
        return Tangent(self.problem, self.choice)

    def vjp_of_residuals(self, residuals, x, cotangents):
        return _second(self.transposed(x), residuals, cotangents, x)


# ---- second derivatives ----


def _second(tangent: Tangent, residuals: Residuals, dx: Gradients, cotangents):
    """The gradient of <cotangents, tangent(residuals, dx)> with respect to the floats of the
    residuals."""
    by_blockwise, in_base_e = tangent.differentiable(residuals)
    problem, tiles = by_blockwise.problem, by_blockwise.choice.tiles
    operands, _, stats = in_base_e  # nothing of o: `blockwise.derivatives`
    rows, do, delta = prepare_cotangents(problem, by_blockwise.choice, in_base_e, cotangents)
    _, dlse = by_blockwise.run(in_base_e, dx)
    problem, x = by_blockwise.choice.implementation.convert(problem, operands)
    gradients, d_inverse_sum = blockwise.second(problem, tiles, x, dx, rows, do, delta, dlse)
    if operands.sinks is not None:
        along = 0.0 if dx.sinks is None else dx.sinks[None, :, None].astype(delta.dtype)

        def sinks_term(sinks, inverse_sum):
            weights = sink_weights(sinks, rows._replace(inverse_sum=inverse_sum))
            return -jnp.sum((along - dlse) * weights * delta)

        by_each = jax.grad(sinks_term, argnums=(0, 1))(operands.sinks, rows.inverse_sum)
        gradients, d_inverse_sum = gradients._replace(sinks=by_each[0]), d_inverse_sum + by_each[1]
    dl = jnp.where(stats.empty, 0.0, -d_inverse_sum * jnp.square(rows.inverse_sum))
    zeros = jax.tree.map(jnp.zeros_like, residuals)
    zeros = zeros._replace(operands=zeros.operands.with_differentiable(gradients))
    if residuals.stats.l is None:
        dstats = zeros.stats._replace(m=tangent.log_base.to_e(dl))
    else:
        dstats = zeros.stats._replace(l=dl)
    pairs = zip(floats(zeros._replace(stats=dstats)), floats(residuals), strict=True)
    return [a.astype(like.dtype) for a, like in pairs]


# ---- what is around the kernels ----


def checkpoint_names(o, stats: SoftmaxState, name: Callable = checkpoint_name):
    """Names o and the row statistics, so that a policy of jax.checkpoint can save them: the
    backward needs no other costly result."""
    stats = jax.tree.map(lambda x: name(x, "flash_attention_lse"), stats)
    return name(o, "flash_attention_out"), stats


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _name_in_derivatives(x, name: str):
    """Returns x, named in derivatives alone: `checkpoint_name` has no transpose and no jet rule."""
    return x


@_name_in_derivatives.defjvp
def _(name, primals, tangents):
    return checkpoint_name(primals[0], name), tangents[0]


def lse_and_largest(log_base: LogBase, problem: Problem, operands: Operands, stats: SoftmaxState):
    """The log-sum-exp of the logits [B, N, T], which is the sink where that lies beyond float32 in
    the log base; and the largest logit, without a derivative, or None where it is not requested."""
    lse = stats.lse(log_base)
    if operands.sinks is not None:
        sinks = operands.sinks[None, :, None]
        at_end = jnp.maximum(lse, sinks)
        lse = online_softmax.with_tangent_of(lse, jnp.where(lse < 2e38, lse, at_end))
    if not problem.max_logits:
        return lse, None
    return lse, lax.stop_gradient(log_base.to_e(stats.largest))


def gradients(problem: Problem, choice: Choice, residuals, cotangents) -> Gradients:
    """Gradients of the operands by the cotangents of o and lse; `residuals` are the operands, o and
    the SoftmaxState."""
    operands = residuals[0]
    lse, do, delta = prepare_cotangents(problem, choice, residuals, cotangents)
    gradients = choice.backward(problem, choice.tiles, operands, lse, do, delta)
    if operands.sinks is None:
        return gradients
    rows = lse if isinstance(lse, RowScale) else RowScale(lse, 1.0, None)
    weights = sink_weights(operands.sinks, rows, choice.implementation.log_base(problem))
    dsinks = -jnp.sum(weights * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    return gradients._replace(sinks=dsinks)


def prepare_cotangents(problem: Problem, choice: Choice, residuals, cotangents):
    """The arrays of each row that the backward takes: lse in the form that it asks for, do, and
    delta or its terms."""
    (operands, o, stats), (do, dlse) = residuals, cotangents
    do, dlse = zero_padded_rows(operands, do, dlse)
    wide, log_base = stats.m.dtype, choice.implementation.log_base(problem)
    dlse = jnp.where(stats.empty, 0.0, dlse)
    if choice.implementation.takes_row_scale:
        lse, factor = stats.row_scale(dlse), None
    else:
        lse, factor = stats.backward_lse(log_base)
    # P = factor * b^(s - lse) multiplies do alone, and what is made of do: so do takes the factor
    if factor is not None:
        dlse = dlse * factor
    # dropout divides P by the fraction that it keeps where P multiplies do: so do takes the divisor
    if problem.dropped:
        factor = jnp.ones_like(stats.m) / problem.kept if factor is None else factor / problem.kept
    if factor is not None:
        do = (do.astype(wide) * jnp.swapaxes(factor, 1, 2)[..., None]).astype(do.dtype)
    # XLA may leave out its rounding to 16 bits here, and delta part from the kernels' do
    if do.dtype != wide:
        do = lax.optimization_barrier(do)
    terms = DeltaTerms(o, dlse)
    if choice.sums_delta:
        return lse, do, terms
    return lse, do, terms.sum(do, problem.kept, stats.empty)


def zero_padded_rows(operands: Operands, do, dlse):
    """do [B, T, N, Hv] and dlse [B, N, T] with 0 for queries beyond their lengths, which may be
    NaN. Without sinks these rows have no lse, and need no zeros."""
    valid = operands.resolved_mask.valid(jnp.arange(do.shape[1], dtype=jnp.int32))
    if operands.sinks is None or valid is None:
        return do, dlse
    return jnp.where(valid[:, :, None, None], do, 0), jnp.where(valid[:, None], dlse, 0)


def sink_weights(sinks, rows: RowScale, log_base: LogBase = LogBase.E):
    """The softmax weights [B, N, T] of the sinks, the logits that each row has one of."""
    s = sink_scores(sinks, log_base)
    return log_base.power(s[None, :, None] - rows.m) * rows.inverse_sum


def sink_scores(sinks, log_base: LogBase):
    """The sinks as scores, clipped as in online_softmax.start; -inf remains."""
    # the maximum separates product and difference: a multiply-add would round differently from lse
    s = online_softmax.finite(log_base.from_e(sinks))
    return jnp.where(sinks == -jnp.inf, sinks, s)


def _map_floats(identity: Callable, x: Operands) -> Operands:
    """The operands with `identity` applied to the differentiable ones."""
    return x.with_differentiable(identity(x.differentiable))
