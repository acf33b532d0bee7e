"""A bias or mask may broadcast over only some of the leading axes, as [B, 1, N, T, S] does beside a
query [B, R, T, N, H]: the call becomes B calls of R batch rows, which share it, without a copy."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import checks
from pallas_flash.devices.sharding import has_explicit_axes
from pallas_flash.devices.shared_arrays import array_axes, collect_arrays, with_arrays
from pallas_flash.problem import arguments
from pallas_flash.problem.call import Call


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
