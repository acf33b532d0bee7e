"""What is around the passes of an implementation; and the custom_vjp of calls that have reverse
mode alone, since their passes exchange what several devices have."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import derivative_modes, online_softmax
from pallas_flash.arguments import Gradients, Operands, Problem
from pallas_flash.backends import Choice
from pallas_flash.devices.varying import vary_alike
from pallas_flash.online_softmax import LogBase, RowScale, SoftmaxState


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, choice: Choice, operands: Operands):
    o, stats = choice.backend.forward(problem, choice.tiles, operands)
    return o, *lse_and_largest(choice.backend.log_base(problem), problem, operands, stats)


def _forward(problem, choice, operands):
    # of what goes in, for the kernels, and of what comes out, where a transposition begins
    operands = _floats_through(derivative_modes.no_second, operands)
    o, stats = choice.backend.forward(problem, choice.backend.of_gradient(choice.tiles), operands)
    o, stats = named(o, stats)
    log_base = choice.backend.log_base(problem)
    lse, largest = lse_and_largest(log_base, problem, operands, stats)
    o, lse = derivative_modes.no_second((o, lse))
    return (o, lse, largest), (operands, o, stats._replace(top=None))


def named(o, stats: SoftmaxState):
    """Both, so that a policy of jax.checkpoint can keep them: the backward needs nothing else that
    is costly."""
    stats = jax.tree.map(lambda x: checkpoint_name(x, "flash_attention_lse"), stats)
    return checkpoint_name(o, "flash_attention_out"), stats


def lse_and_largest(log_base: LogBase, problem: Problem, operands: Operands, stats: SoftmaxState):
    """The log-sum-exp of the logits [B, N, T], which is the sink where that lies beyond the ends of
    the log base; and the largest logit, which has no derivative, or None where it is not asked
    for."""
    lse = stats.lse(log_base)
    if operands.sinks is not None:
        sinks = operands.sinks[None, :, None]
        lse = _with_tangent_of(lse, jnp.where(lse < 2e38, lse, jnp.maximum(lse, sinks)))
    if not problem.max_logits:
        return lse, None
    return lse, lax.stop_gradient(log_base.to_e(stats.largest))


@jax.custom_jvp
def _with_tangent_of(lse, value):
    """The value; its derivative is that of lse."""
    return value


@_with_tangent_of.defjvp
def _(primals, tangents):
    return primals[1], tangents[0]


def _backward(problem, choice, residuals, cotangents):
    second = derivative_modes.no_second
    found = second(gradients(problem, choice, residuals, second(cotangents[:2])))
    return (jax.tree.map(lambda _: None, residuals[0]).with_differentiable(found),)


def gradients(problem: Problem, choice: Choice, residuals, cotangents) -> Gradients:
    """Of the operands, by the cotangents of o and lse; `residuals` are the operands, o and the
    SoftmaxState."""
    operands = residuals[0]
    lse, do, delta = of_rows(problem, choice, residuals, cotangents)
    found = choice.backend.backward(problem, choice.tiles, operands, lse, do, delta)
    if operands.sinks is None:
        return found
    rows = lse if isinstance(lse, RowScale) else RowScale(lse, 1.0, None)
    weights = sink_weights(operands.sinks, rows, choice.backend.log_base(problem))
    of_sinks = -jnp.sum(weights * delta, axis=(0, 2)).astype(operands.sinks.dtype)
    return found._replace(sinks=of_sinks)


def of_rows(problem: Problem, choice: Choice, residuals, cotangents):
    """What the backward takes of each row: lse in the form of the backend, do and delta."""
    (operands, o, stats), (do, dlse) = residuals, cotangents
    # without them the rows that are not there, of which all may be NaN, have no lse
    if operands.sinks is not None:
        do, dlse = of_valid_rows(operands, do, dlse)
    wide, log_base = stats.m.dtype, choice.backend.log_base(problem)
    dlse = jnp.where(stats.empty, 0.0, dlse)
    if choice.backend.takes_row_scale:
        lse, factor = stats.row_scale(dlse), None
    else:
        lse, factor = stats.backward_lse(log_base)
    # P = factor * b^(s - lse) meets do alone, and what is made of do: so do takes the factor
    if factor is not None:
        dlse = dlse * factor
    # P is dropped and divided by the part that is kept where it meets do: so do takes the divisor
    # too
    if problem.dropped:
        factor = jnp.ones_like(stats.m) / problem.kept if factor is None else factor / problem.kept
    if factor is not None:
        do = (do.astype(wide) * jnp.swapaxes(factor, 1, 2)[..., None]).astype(do.dtype)
    # XLA may leave out its rounding to 16 bits here, and delta part from the kernels' do
    if do.dtype != wide:
        do = lax.optimization_barrier(do)
    # d lse / d s = p, and ds = p * (dp - rowsum(o * do)): the cotangent of lse joins delta.
    delta = jnp.swapaxes(jnp.sum(o.astype(wide) * do.astype(wide), axis=-1), 1, 2)
    delta = (delta if problem.kept == 1 else delta * problem.kept) - dlse
    return lse, do, jnp.where(stats.empty, 0.0, delta)


def of_valid_rows(operands: Operands, do, dlse):
    """do [B, T, N, Hv] and dlse [B, N, T] with 0 for queries beyond their lengths."""
    valid = operands.resolved_mask.valid(jnp.arange(do.shape[1], dtype=jnp.int32))
    if valid is None:
        return do, dlse
    return jnp.where(valid[:, :, None, None], do, 0), jnp.where(valid[:, None], dlse, 0)


def sink_weights(sinks, rows: RowScale, log_base: LogBase = LogBase.E):
    """The weights [B, N, T] of the sinks: of logits with the value 0, of which each row has one."""
    # as in online_softmax.start a maximum parts product and difference: one multiply-add would
    # round otherwise than lse did
    s = jnp.where(sinks == -jnp.inf, sinks, online_softmax.finite(log_base.from_e(sinks)))
    return log_base.power(s[None, :, None] - rows.m) * rows.inverse_sum


_attend.defvjp(_forward, _backward)
_attend_jit = jax.jit(_attend, static_argnums=(0, 1))


def attend(problem: Problem, choice: Choice, operands: Operands):
    """o [B, T, N, Hv] in the query's dtype, lse [B, N, T] in float32, which both may be
    differentiated, and the largest logits [B, N, T], None if they are not asked for."""
    operands = _floats_through(derivative_modes.first_in_reverse_alone, operands)
    return _attend_jit(problem, choice, vary_alike(operands))


def _floats_through(identity: Callable, x: Operands) -> Operands:
    """The operands, of which those that have derivatives went through."""
    return x.with_differentiable(identity(x.differentiable))
