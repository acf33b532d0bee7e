"""Shards a call over its mesh, selects an implementation, applies differentiable attention."""

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
from pallas_flash.transforms.partial_broadcast import axis_to_map, map_calls


def map_over_mesh(attend, call: Call):
    """attend(call) of what each device has, where arrays lie on a mesh."""
    call = context_parallel.resolve_context(call)
    mesh = sharding.find_mesh(call)
    if mesh is not None or call.context is not None or axis_to_map(call) is not None:
        call = canonicalize(call)
    if mesh is None:
        return attend(call)
    outputs = sharding.map_call(attend, call, mesh)
    if any(map(varying.varying_axes, jax.tree.leaves((call.query, call.key, call.value)))):
        return derivative_modes.without_reverse(outputs)
    return outputs


def results(return_residual: bool, o, lse, max_logits):
    """What a call returns: the output, or a tuple of it and the residuals that are requested."""
    more = (*([lse] if return_residual else []), *([] if max_logits is None else [max_logits]))
    return (o, *more) if more else o


def attend(call: Call):
    """o, lse and the largest logits, or None, of a call as one device has it."""
    if (axis := axis_to_map(call)) is not None:
        return map_calls(attend, call, axis)
    if call.context is None:
        problem, operands = arguments.normalise(call)
        choice = _choose(call, problem, operands)
    else:
        inner, problem, operands, collective = context_parallel.plan_pass(call.context, call)
        choice = _choose(call, inner, operands).wrap(*collective)._replace(reverse_only=True)
    return _unflatten_batch(call, problem, *autodiff.attend(problem, choice, operands))


def _choose(call: Call, problem: arguments.Problem, operands: arguments.Operands):
    choice = selection.choose(problem, call.implementation)
    is_requested = selection.requested(call.implementation) is not None
    return kernel_pass.wrap(choice, operands, is_requested, selection.checked_tangent)


def _unflatten_batch(call: Call, problem: arguments.Problem, o, *row_outputs):
    rows = np.shape(call.query)[:-1]
    return o.reshape(*rows, problem.value_size), *jax.tree.map(
        lambda x: jnp.swapaxes(x, 1, 2).reshape(rows), row_outputs
    )
