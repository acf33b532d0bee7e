"""The one custom_vjp that ties forward and backward of every implementation together."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import derivative_modes, online_softmax
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Choice
from pallas_flash.devices.varying import vary_alike
from pallas_flash.online_softmax import LogBase, RowScale, SoftmaxState


def _second_of(choice: Choice) -> Callable:
    """What lets the second derivatives through that an implementation has."""
    return {
        "none": derivative_modes.no_second,
        "forward over reverse": derivative_modes.second_in_forward_alone,
        "all": lambda x: x,
    }[choice.backend.second_derivatives]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, choice: Choice, operands: Operands):
    o, stats = choice.backend.forward(problem, choice.tiles, operands)
    return o, *lse_and_largest(choice.backend.log_base(problem), problem, operands, stats)


def _forward(problem, choice, operands):
    # of what goes in, for the kernels, and of what comes out, where a transposition begins
    second = _second_of(choice)
    operands = _floats_through(second, operands)
    o, stats = choice.backend.forward(problem, choice.backend.of_gradient(choice.tiles), operands)
    # Named, so that a policy of jax.checkpoint can keep them: the backward needs nothing else that
    # is costly.
    o = checkpoint_name(o, "flash_attention_out")
    stats = jax.tree.map(lambda x: checkpoint_name(x, "flash_attention_lse"), stats)
    log_base = choice.backend.log_base(problem)
    lse, largest = lse_and_largest(log_base, problem, operands, stats)
    o, lse = second((o, lse))
    return (o, lse, largest), (operands, o, stats._replace(top=None))


def lse_and_largest(log_base: LogBase, problem: Problem, operands: Operands, stats: SoftmaxState):
    """The log-sum-exp of the logits [B, N, T], which is the sink where that lies beyond the ends of
    the log base; and the largest logit, which has no derivative, or None where it is not asked
    for."""
    lse = stats.lse(log_base)
    if operands.sinks is not None:
        lse = jnp.where(lse < 2e38, lse, jnp.maximum(lse, operands.sinks[None, :, None]))
    if not problem.max_logits:
        return lse, None
    return lse, lax.stop_gradient(log_base.to_e(stats.largest))


def _backward(problem, choice, residuals, cotangents):
    operands, o, stats = residuals
    second = _second_of(choice)
    do, dlse = second(cotangents[:2])
    # without them the rows that are not there, of which all may be NaN, have no lse
    if operands.sinks is not None:
        do, dlse = _of_valid_rows(operands, do, dlse)
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
    delta = jnp.where(stats.empty, 0.0, delta)
    gradients = second(choice.backend.backward(problem, choice.tiles, operands, lse, do, delta))
    gradients = gradients._replace(sinks=_sinks_gradient(log_base, operands.sinks, lse, delta))
    return (jax.tree.map(lambda _: None, operands).with_differentiable(gradients),)


def _of_valid_rows(operands: Operands, do, dlse):
    """do [B, T, N, Hv] and dlse [B, N, T] with 0 for queries beyond their lengths."""
    valid = operands.resolved_mask.valid(jnp.arange(do.shape[1], dtype=jnp.int32))
    if valid is None:
        return do, dlse
    return jnp.where(valid[:, :, None, None], do, 0), jnp.where(valid[:, None], dlse, 0)


def _sinks_gradient(log_base: LogBase, sinks, lse, delta):
    """The gradient of the sinks: that of logits with the value 0, of which each row has one; None
    without them."""
    if sinks is None:
        return None
    lse, delta = (lse.m, lse.inverse_sum * delta) if isinstance(lse, RowScale) else (lse, delta)
    # as in online_softmax.start a maximum parts product and difference: one multiply-add would
    # round otherwise than lse did
    s = jnp.where(sinks == -jnp.inf, sinks, online_softmax.finite(log_base.from_e(sinks)))
    p = log_base.power(s[None, :, None] - lse)
    return -jnp.sum(p * delta, axis=(0, 2)).astype(sinks.dtype)


_attend.defvjp(_forward, _backward)
_attend_jit = jax.jit(_attend, static_argnums=(0, 1))
_forward_jit = jax.jit(lambda forward, *args: forward(*args), static_argnums=(0, 1, 2))


def attend(problem: Problem, choice: Choice, operands: Operands):
    """o [B, T, N, Hv] in the query's dtype, lse [B, N, T] in float32, which both may be
    differentiated, and the largest logits [B, N, T], None if they are not asked for."""
    operands = _floats_through(derivative_modes.first_in_reverse_alone, operands)
    return _attend_jit(problem, choice, vary_alike(operands))


def _floats_through(identity: Callable, x: Operands) -> Operands:
    """The operands, of which those that have derivatives went through."""
    return x.with_differentiable(identity(x.differentiable))


def attend_in_forward_mode(problem: Problem, choice: Choice, operands: Operands):
    """The same for jax.jvp, in the memory of the forward: the running sums have tangents, which are
    sums of their own."""
    o, stats = _forward_jit(choice.backend.forward, problem, choice.tiles, vary_alike(operands))
    return o, *lse_and_largest(choice.backend.log_base(problem), problem, operands, stats)
