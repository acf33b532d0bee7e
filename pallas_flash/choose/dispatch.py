"""Shards a call over its mesh, selects an implementation, applies differentiable attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import context_parallel
from pallas_flash.choose import selection
from pallas_flash.devices import sharding
from pallas_flash.devices.shared_arrays import canonicalize
from pallas_flash.jax_support import varying
from pallas_flash.problem import arguments
from pallas_flash.problem.call import Call
from pallas_flash.transforms import autodiff, derivative_modes, kernel_pass
from pallas_flash.transforms.partial_broadcast import axis_to_map, mapping_calls


def map_over_mesh(attend, call: Call):
    """attend(call), by each device on its part where arrays lie on a mesh."""
    call = context_parallel.resolve_context(call)
    mesh = sharding.find_mesh(call)
    if mesh is None and call.context is None and axis_to_map(call) is None:
        return attend(call)
    call, attend = canonicalize(call), mapping_calls(attend)
    if mesh is None:
        return attend(call)
    outputs = sharding.map_call(attend, call, mesh)
    if any(map(varying.varying_axes, jax.tree.leaves((call.query, call.key, call.value)))):
        return derivative_modes.without_reverse(outputs)
    return outputs


def results(return_residual: bool, o, lse, max_logits):
    """The results of a call: the output, or a tuple of it and the residuals that are requested."""
    residuals = [lse] * return_residual + [max_logits] * (max_logits is not None)
    return (o, *residuals) if residuals else o


def attend(call: Call):
    """o, lse and the largest logits, or None, of a call on one device."""
    if call.context is None:
        problem, operands = arguments.normalise(call)
        problem, choice = _choose(call, problem, operands)
    else:
        inner, problem, operands, collective = context_parallel.plan_pass(call.context, call)
        inner, choice = _choose(call, inner, operands)
        choice = choice.wrap(*collective)._replace(reverse_only=True)
        # all in which variants differ
        problem = dataclasses.replace(problem, deterministic=inner.deterministic)
    return _unflatten_batch(call, problem, *autodiff.attend(problem, choice, operands))


def _choose(call: Call, problem: arguments.Problem, operands: arguments.Operands):
    name = selection.requested(call.implementation)
    problem, choice = selection.choose(problem, name)
    checked = selection.checked_tangent, selection.is_right
    return problem, kernel_pass.wrap(choice, operands, name is not None, *checked)


def _unflatten_batch(call: Call, problem: arguments.Problem, o, *row_outputs):
    rows = np.shape(call.query)[:-1]
    like_rows = lambda x, *n: x if x.shape == (*rows, *n) else x.reshape(*rows, *n)
    return like_rows(o, problem.value_size), *jax.tree.map(
        lambda x: like_rows(jnp.swapaxes(x, 1, 2)), row_outputs
    )
