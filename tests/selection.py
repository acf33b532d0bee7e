"""Which tests run: all with --whole; without it the fast half, in which every value of every
parameter still occurs. On a GPU those alone that are marked `gpu`."""

import collections
import re
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import pytest

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2"
)


def whole_but(values: Iterable, *fast) -> list:
    """Parameters for `parametrize`, of which the fast half has only those in `fast`."""
    row = lambda value: value if isinstance(value, tuple) else (value,)
    return [
        value if value in fast else pytest.param(*row(value), marks=pytest.mark.whole)
        for value in values
    ]


ON_A_CPU = (
    "not marked gpu: it says what holds on a CPU, or of no device at all; JAX_PLATFORMS=cpu runs it"
)


def mark_for_a_gpu(item, on_gpu: bool):
    """Marks what compares an implementation on random numbers `gpu`; on a GPU, skips what is not
    marked so."""
    if {"implementation", "rng"} <= set(item.fixturenames):
        item.add_marker(pytest.mark.gpu)
    if on_gpu and not item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.skip(reason=ON_A_CPU))


def fast_half(items: list) -> list:
    """The tests not marked `whole`; of one with several parameters a diagonal."""
    by_function = collections.defaultdict(list)
    for item in items:
        if not _is_whole(item):
            by_function[item.function, item.path].append(item)
    return [
        tests[i]
        for tests in by_function.values()
        for i in diagonal([_values(test) for test in tests])
    ]


TURNS = 16
# what the table of implementations says, which any commit may make false; test_features.py, which
# says it of features, takes longer than a turn
EACH_TURN = ("test_selfcheck_command.py",)


def one_turn(items: list, number: int) -> list:
    """A sixteenth of the tests, which that number modulo 16 names, and all in the files of
    EACH_TURN."""
    is_due = lambda item: (zlib.crc32(item.nodeid.encode()) - number) % TURNS == 0
    return [item for item in items if item.path.name in EACH_TURN or is_due(item)]


def _is_whole(item) -> bool:
    """Marked `whole`: all of it, or the implementations named."""
    marker = item.get_closest_marker("whole")
    return marker is not None and (
        not marker.args or item.callspec.params["implementation"] in marker.args
    )


def diagonal(rows: list[tuple]) -> list[int]:
    """Of rows that hold a value for each parameter, one for each value of the longest parameter: of
    several rows that have it the one whose other values, and then whose combination of them,
    occurred least so far."""
    longest = max(
        range(len(rows[0])), key=lambda column: len({row[column] for row in rows}), default=None
    )
    if longest is None:
        return list(range(len(rows)))
    others = [
        tuple((column, value) for column, value in enumerate(row) if column != longest)
        for row in rows
    ]
    with_value, used, kept = collections.defaultdict(list), collections.Counter(), []
    for i, row in enumerate(rows):
        with_value[row[longest]].append(i)
    for candidates in with_value.values():
        kept.append(
            min(
                candidates, key=lambda i: (sum(used[other] for other in others[i]), used[others[i]])
            )
        )
        used.update([*others[kept[-1]], others[kept[-1]]])
    return kept


def _values(item) -> tuple:
    """One value for each parametrization of a test; ids, since a value need not be hashable."""
    params: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    named = [marker.args[0] for marker in item.iter_markers("parametrize")]
    together = [re.findall(r"\w+", names) if isinstance(names, str) else names for names in named]
    alone = [[name] for name in params if not any(name in names for names in together)]
    return tuple(tuple(id(params[name]) for name in names) for names in (*together, *alone))
