"""The one custom_vjp that ties forward and backward of every implementation together."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import online_softmax
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Choice


@jax.custom_jvp
def _first_order(x):
    """x, which has no derivative in its turn: the implementations' loops have none, and say so less clearly."""
    return x


@_first_order.defjvp
def _no_second_order(primals, tangents):
    raise NotImplementedError('flash_attention has first derivatives alone; implementation="reference" has second ones.')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, choice: Choice, operands: Operands):
    o, stats = choice.backend.forward(problem, choice.tiles, operands)
    return o, stats.lse()


def _forward(problem, choice, operands):
    if choice.backend.name != "reference":
        operands = Operands(*_first_order(operands[:5]), *operands[5:])
    o, stats = choice.backend.forward(problem, choice.tiles, operands)
    # Named, so that a policy of jax.checkpoint can keep them: the backward needs nothing else that is costly.
    o = checkpoint_name(o, "flash_attention_out")
    stats = jax.tree.map(lambda x: checkpoint_name(x, "flash_attention_lse"), stats)
    return (o, stats.lse()), (operands, o, stats)


def _backward(problem, choice, residuals, cotangents):
    operands, o, stats = residuals
    do, dlse = cotangents if choice.backend.name == "reference" else _first_order(cotangents)
    if operands.sinks is not None:  # without them the rows that are not there, of which all may be NaN, have no lse
        do, dlse = _of_live_rows(operands, do, dlse)
    lse, factor = stats.in_one()
    wide = lse.dtype
    if factor is not None:  # P = factor * 2^(s - lse) meets do alone, and what is made of do: so do takes the factor
        do = (do.astype(wide) * jnp.swapaxes(factor, 1, 2)[..., None]).astype(do.dtype)
        dlse = dlse * factor
    if problem.dropped:  # P is dropped and divided by the part that is kept where it meets do: so do takes the divisor too
        do = (do.astype(wide) / problem.kept).astype(do.dtype)
    do = lax.optimization_barrier(do)  # or XLA may leave out its rounding to 16 bits here, and delta part from the kernels' do
    # d lse / d s = p, and ds = p * (dp - rowsum(o * do)): the cotangent of lse joins delta.
    delta = jnp.einsum("btnh,btnh->bnt", o.astype(wide), do.astype(wide), precision="highest")
    delta = (delta if problem.kept == 1 else delta * problem.kept) - dlse
    delta = jnp.where(stats.empty, 0.0, delta)
    dq, dk, dv, dbias = choice.backend.backward(problem, choice.tiles, operands, o, lse, do, delta)
    return (Operands(dq, dk, dv, dbias, _of_sinks(operands.sinks, lse, delta), None, None),)


def _of_live_rows(operands: Operands, do, dlse):
    """do [B, T, N, Hv] and dlse [B, N, T] with 0 for queries beyond their lengths."""
    live = operands.visibility.live(jnp.arange(do.shape[1], dtype=jnp.int32))
    if live is None:
        return do, dlse
    return jnp.where(live[:, :, None, None], do, 0), jnp.where(live[:, None], dlse, 0)


def _of_sinks(sinks, lse, delta):
    """The gradient of the sinks: that of logits with the value 0, of which each row has one; None without them."""
    if sinks is None:
        return None
    p = jnp.exp2((sinks * online_softmax.LOG2E)[None, :, None] - lse)
    return -jnp.sum(p * delta, axis=(0, 2)).astype(sinks.dtype)


_attend.defvjp(_forward, _backward)
_attend_jit = jax.jit(_attend, static_argnums=(0, 1))


def attend(problem: Problem, choice: Choice, operands: Operands):
    """o [B, T, N, Hv] in the query's dtype, lse [B, N, T] in float32; both may be differentiated."""
    return _attend_jit(problem, choice, _vary_alike(operands))


def _vary_alike(operands: Operands) -> Operands:
    """Inside of shard_map: all operands vary over every axis of the mesh that one of them varies over, as an implementation's
    loops need. What was the same on all devices gets the sum of its gradients."""
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: lax.pcast(x, tuple(axes - varying(x)), to="varying") if axes - varying(x) else x, operands)
