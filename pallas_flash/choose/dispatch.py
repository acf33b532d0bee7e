"""Shards a call over its mesh, selects an implementation, applies differentiable attention.

A bias or mask may broadcast over only some of the leading axes, as [B, 1, N, T, S] does beside a
query [B, R, T, N, H]. The call becomes B calls of R batch rows, which share it, without a copy.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import checks, context_parallel
from pallas_flash.choose import selection
from pallas_flash.devices import sharding
from pallas_flash.devices.sharding import has_explicit_axes
from pallas_flash.devices.shared_arrays import array_axes, canonicalize, collect_arrays, with_arrays
from pallas_flash.jax_support.jax_internals import varying_axes
from pallas_flash.problem import arguments
from pallas_flash.problem.call import Call
from pallas_flash.transforms import autodiff, derivative_modes, kernel_pass


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
    if any(map(varying_axes, jax.tree.leaves((call.query, call.key, call.value)))):
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
        differ = "deterministic", "waits_for_reads"
        problem = dataclasses.replace(problem, **{name: getattr(inner, name) for name in differ})
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


def map_calls(attend: Callable, call: Call):
    """attend(call), whose results have the leading axes of query first, as one call or as several
    side by side, each of which has all of the leading axes of every bias and mask, or none. The
    call is in canonical form."""
    if (axis := axis_to_map(call)) is None:
        return attend(call)
    return _map_over_axis(mapping_calls(attend), call, axis)


@functools.lru_cache(64)  # one function of each: jax compiles it once
def mapping_calls(attend: Callable) -> Callable[[Call], Any]:
    """`map_calls` as a function of the call alone."""
    return functools.partial(map_calls, attend)


def _map_over_axis(attend: Callable, call: Call, axis: int):
    """attend(call) as a call for each entry of a leading axis."""
    if call.context is None:
        checks.from_shapes(arguments.normalise, call)  # errors are of the whole call
    arrays, lead = collect_arrays(call), call.query.ndim - 3
    in_axes = {}
    for path, x in arrays.items():
        letters = array_axes(path, call)
        missing = lead + len(letters) - 1 - x.ndim  # of the leading axes, the first
        at = axis - missing if letters.startswith("B") and axis >= missing else None
        if at is not None and x.shape[at] == 1:
            arrays[path], at = jnp.squeeze(x, at), None
        in_axes[path] = at
    rest = with_arrays(call, dict.fromkeys(arrays))
    run = lambda arrays: attend(with_arrays(rest, arrays))
    return jax.vmap(run, (in_axes,), axis)(arrays)


def axis_to_map(call: Call) -> int | None:
    """The last of the leading axes to map a call over, chosen for the fewest calls in which each
    bias and mask has all of the other axes or none. None: one call does, or an explicit mesh
    forbids it."""
    lead = getattr(call.query, "shape", ())[:-3]
    each = [_broadcasts(getattr(call, name), lead) for name in ("bias", "mask")]
    if not any(each):
        return None
    axes = [axis for axis, n in enumerate(lead) if n != 1]

    def fits(mapped):
        return all(len({of[axis] for axis in axes if axis not in mapped}) < 2 for of in each if of)

    candidates = itertools.chain.from_iterable(
        itertools.combinations(axes, count) for count in range(len(axes))
    )
    size = lambda n: n if isinstance(n, int) else 2**31  # a symbol of jax.export
    calls = lambda mapped: math.prod(size(lead[axis]) for axis in mapped)
    best = min(filter(fits, candidates), key=calls, default=())
    return max(best) if best and not has_explicit_axes(call.query) else None


def _broadcasts(x, lead: tuple[int, ...]) -> list[bool] | None:
    """Whether an array [.., N, T, S] broadcasts over each of the leading axes; None where x is no
    array of such a shape."""
    if not checks.is_array(x):
        return None
    shape = (1,) * (len(lead) + 3 - len(x.shape)) + x.shape
    sizes = list(zip(shape[:-3], lead, strict=False))
    if len(shape) != len(lead) + 3 or any(n not in (1, m) for n, m in sizes):
        return None
    return [n == 1 for n, _ in sizes]
