"""Shards a call over its mesh, selects an implementation, applies differentiable attention."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import (
    arguments,
    autodiff,
    backends,
    context_parallel,
    derivative_modes,
    lowering,
    selection,
    varying,
    vmap,
)
from pallas_flash.call import Call
from pallas_flash.devices import ring, sharding, ulysses
from pallas_flash.devices.call import canonicalize
from pallas_flash.kernels import device
from pallas_flash.partial_broadcast import axis_to_map, map_calls
from pallas_flash.selfcheck import verdicts

NO_CALLBACK = (
    "a mask_mod or score_mod that calls jax.pure_callback does not run on a mesh with Auto axes, "
    "where XLA would end the process. Give the mesh explicit axes, or call within jax.shard_map."
)


def on_devices(attend, call: Call):
    """attend(call) of what each device has, where arrays lie on a mesh."""
    call = context_parallel.resolve_context(call)
    mesh = sharding.find_mesh(call)
    if mesh is not None or call.context is not None or axis_to_map(call) is not None:
        call = canonicalize(call)
    if mesh is None:
        return attend(call)
    outputs = sharding.map_call(attend, call, mesh)
    if any(map(varying.varying_axes, (call.query, call.key, call.value))):
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
    problem, choice, operands = _plan(call)
    return _unflatten_batch(call, problem, *autodiff.attend(problem, choice, operands))


def _plan(call: Call):
    context, implementation = call.context, call.implementation
    if isinstance(context, context_parallel.AllToAll):
        problem, operands = arguments.normalise(context_parallel.exchange_heads(context, call))
        choice = _over_explicit_axes(_choose(problem, implementation), operands)
        choice = choice.wrap(ulysses.UlyssesPass, context.names)
        operands = ulysses.localize_rows(context.names, problem, operands, call.sinks)
        return problem, choice._replace(reverse_only=True), operands
    if context is not None:
        loop, pair, problem, operands = context_parallel.plan_ring(context, call)
        choice = _choose(pair, implementation).wrap(ring.RingPass, loop)
        return problem, choice._replace(reverse_only=True), operands
    problem, operands = arguments.normalise(call)
    choice = _over_explicit_axes(_choose(problem, implementation), operands)
    return problem, _over_auto_axes(choice, operands), operands


def _choose(problem, implementation) -> backends.Choice:
    choice = selection.choose(problem, implementation)
    is_requested = selection.requested(implementation) is not None
    if choice.backend.own_kernels:
        choice = choice if is_requested else choice.wrap(verdicts.CheckedPass)
        choice = choice.wrap(lowering.PlatformPass, is_requested)
    if choice.backend.is_dense:
        return choice
    return choice.wrap(vmap.BatchedPass, not is_requested and device.here().platform != "gpu")


def _over_explicit_axes(choice: backends.Choice, operands) -> backends.Choice:
    if not sharding.has_explicit_axes(operands.query):
        return choice
    return choice.wrap(sharding.ShardMappedPass)._replace(reverse_only=True)


def _over_auto_axes(choice: backends.Choice, operands) -> backends.Choice:
    """The choice on a mesh with Auto axes; the reference is products and sums, which XLA's
    partitioner knows."""
    if choice.backend.is_dense or not sharding.lies_on_auto_axes(operands):
        return choice
    mods = operands.resolved_mask.mask_mod, operands.score
    if any(mod is not None and "pure_callback" in mod.primitives for mod in mods):
        raise NotImplementedError(NO_CALLBACK)
    try:
        # not at the top: it needs of jax what is not public
        from pallas_flash.devices import partition
    except (ImportError, AttributeError) as error:
        lacks = (
            f"jax {jax.__version__} lacks what keeps arrays on a mesh with Auto axes where they are"
        )
        warnings.warn(f"{lacks}: they are gathered. {error}", stacklevel=7)
        return choice
    choice = choice.wrap(partition.PartitionedPass)
    # jax looks into the jaxpr of a program for equations whose lowering needs the devices
    return choice._replace(backend=choice.backend._replace(results_like=backends.unknown))


def _unflatten_batch(call: Call, problem, o, *row_outputs):
    rows = np.shape(call.query)[:-1]
    return o.reshape(*rows, problem.value_size), *jax.tree.map(
        lambda x: jnp.swapaxes(x, 1, 2).reshape(rows), row_outputs
    )
