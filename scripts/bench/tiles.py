"""Calls of attention by tiles that no call chooses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# the public functions take no tiles
from pallas_flash import attention
from pallas_flash.choose import selection
from pallas_flash.kernels.hopper import tuning
from pallas_flash.problem.arguments import Problem
from pallas_flash.transforms import autodiff


class Change(NamedTuple):
    """A new value for a field of one of the kernels that an implementation's tiles describe."""

    kernel: str
    field: str
    value: bool | int | str


def parse(text: str) -> list[Change]:
    """Changes typed as "KERNEL.FIELD=VALUE, ..."."""
    changes = []
    for change in text.split(", "):
        place, _, value = change.partition("=")
        kernel, _, field = place.partition(".")
        if not (kernel and field and value):
            form = "KERNEL.FIELD=VALUE, ..., as dq.stages=2, fused.block_q=64"
            raise ValueError(f"tiles must be {form}; got {text!r}.")
        try:
            changes.append(Change(kernel, field, number(value)))
        except ValueError:
            changes.append(Change(kernel, field, value))
    return changes


def number(text: str) -> bool | int:
    bools = {"True": True, "False": False}
    return bools[text] if text in bools else int(text)


def changed(tiles, changes: list[Change]):
    """The tiles with other values; NotImplementedError where there is no such field, or where they
    have these values already."""
    default = tiles
    for kernel, field, value in changes:
        if kernel not in getattr(tiles, "_fields", ()):
            raise NotImplementedError(f"its tiles have no kernel {kernel}")
        if (current := getattr(tiles, kernel)) is None:
            raise NotImplementedError(f"it runs no kernel {kernel} here")
        if field not in current._fields:
            raise NotImplementedError(f"the tiles of {kernel} have no field {field}")
        tiles = tiles._replace(**{kernel: current._replace(**{field: value})})
    if tiles == default:
        raise NotImplementedError("the tiles are the same by default")
    return tiles


def one_kernel(problem: Problem, implementation: str) -> Any:
    """Tiles of a backward in one kernel, however few keys queries see; NotImplementedError where
    there is none."""
    found = tuning.tiles(problem, fused=True) if implementation == "hopper" else None
    if found is None or found.fused is None:
        raise NotImplementedError("it has no backward in one kernel")
    return found


def attend(change: Callable[[Any], Any] | None, in_one_kernel: bool, *args, **call) -> jax.Array:
    """flash_attention(*args, **call), which names an implementation, by the tiles that `change`
    makes of its."""
    problem, operands = attention.normalised(*args, **call)
    _, choice = selection.first(problem, name := call["implementation"])
    tiles = one_kernel(problem, name) if in_one_kernel else choice.tiles
    tiles = change(tiles) if change else tiles
    return autodiff.attend(problem, choice._replace(tiles=tiles), operands)[0]
