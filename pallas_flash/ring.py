"""Ring attention: keys and values go around the devices, and the queries of each attend to what passes by.

Within a device a sequence lies in chunks, each a batch row of its own; a pair is one chunk of queries and one of keys. What the
pairs give is merged by its log-sum-exp; in the backward, which takes that of all keys, the gradients of the pairs add up.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, online_softmax, schedule
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Backend, Choice
from pallas_flash.checks import sums
from pallas_flash.online_softmax import Statistics
from pallas_flash.visibility import Visibility


class Loop(NamedTuple):
    """How the keys of a mesh axis go around: at step t device i has the keys of device i + first - t."""

    axis: tuple[str, ...]
    devices: int
    chunks: int  # of a device: two are one from the front of the sequence and one from its back
    first: int
    steps: int
    wraps: bool  # whether the last device sends to the first

    @classmethod
    def of(cls, axis: tuple[str, ...], devices: int, chunks: int, visibility: Visibility, queries: int) -> "Loop":
        """The shortest loop that brings each of `queries` rows the keys that it may see by what is known while tracing."""
        ends = schedule.key_ranges(visibility, queries, queries // devices) if chunks == 1 else []
        size = visibility.keys // devices
        apart = [(first // size - i, (last - 1) // size - i) for i, (first, last, _) in enumerate(ends) if first < last]
        lowest, highest = min((a for a, _ in apart), default=0), max((b for _, b in apart), default=-1)
        if chunks > 1 or highest - lowest >= devices:
            return cls(axis, devices, chunks, 0, devices, True)
        return cls(axis, devices, chunks, highest, highest - lowest + 1, highest > 0)

    def numbers(self, device):
        """The numbers in the sequence of a device's chunks, [C]."""
        return jnp.stack([jnp.asarray(device), 2 * self.devices - 1 - device][: self.chunks])

    def device_at(self, t):
        """Whose keys this device has at step t."""
        device = lax.axis_index(self.axis) + self.first - t
        return device % self.devices if self.wraps else device

    def is_there(self, device):
        return (device >= 0) & (device < self.devices)

    def sent(self, x, by: int, wraps: bool = True):
        """What the device `by` places before this one has; without `wraps` 0 where there is none."""
        to = [(i, (i + by) % self.devices) for i in range(self.devices) if wraps or 0 <= i + by < self.devices]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis, to), x) if by else x

    def go(self, step: Callable, keys, carry):
        """carry = step(t, keys, carry) for all t; the next keys are on their way meanwhile."""
        if self.steps == 0:
            return carry
        both = lambda t, state: (self.sent(state[0], 1, self.wraps), step(t, *state))
        keys, carry = schedule.loop(0, self.steps - 1, both, (self.sent(keys, -self.first, self.wraps), carry))
        return step(self.steps - 1, keys, carry)


class Half(NamedTuple):
    """The forward or the backward of a backend, around the loop; to be called as that is."""

    backend: Backend
    loop: Loop
    is_forward: bool

    def __call__(self, problem: Problem, tiles, x: Operands, *rest):
        return (_forward if self.is_forward else _backward)(self, problem, tiles, x, *rest)

    def each_pair(self, problem: Problem, x: Operands, t, keys, step: Callable, carry):
        """carry = step(a, b, problem, operands, carry) of all pairs of chunks a and b that may see each other."""
        device, chunks = self.loop.device_at(t), self.loop.chunks

        def visit(n, carry):
            a, b = n // chunks, n % chunks
            pair = operands_of(self.loop, problem, x, keys, device, a, b)
            some = self.loop.is_there(device) & pair.visibility.sees_any(problem.queries)
            return lax.cond(some, lambda carry: step(a, b, problem_of(problem, pair), pair, carry), lambda carry: carry, carry)

        return visit(0, carry) if chunks == 1 else schedule.loop(0, chunks**2, visit, carry)


def around(loop: Loop, choice: Choice) -> Choice:
    name = f"{choice.backend.name} in a ring"  # whose gradient has no derivative
    forward, backward = (Half(choice.backend, loop, is_forward) for is_forward in (True, False))
    return choice._replace(backend=choice.backend._replace(name=name, forward=forward, backward=backward))


def problem_of(problem: Problem, x: Operands) -> Problem:
    """The problem of a pair."""
    shape = lambda a: None if a is None else a.shape
    visibility = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x.visibility)
    sizes = dict(batch=x.query.shape[0], bias=shape(x.bias), mask=shape(x.mask))
    return dataclasses.replace(problem, visibility=visibility, sinks=False, **sizes)


def operands_of(loop: Loop, problem: Problem, x: Operands, keys, device, a, b) -> Operands:
    """The operands of a pair: this device's chunk a of queries, and chunk b of the `keys`, K and V, of `device`."""
    rows, C = (lambda y: _chunk(y, loop.chunks, a)), loop.chunks
    key, value = (_chunk(y, C, b) for y in keys)
    first = jnp.maximum(loop.numbers(device)[b], 0) * problem.keys
    visibility = x.visibility.narrow(Visibility.BY_BATCH + Visibility.BY_QUERY, rows)
    if (where := visibility.where) is not None:
        batch = where.batch if where.batch is None else rows(where.batch)
        visibility = dataclasses.replace(visibility, where=dataclasses.replace(where, offset=rows(where.offset), batch=batch))
    tile = lambda y: None if y is None else _tile(y, *_at(loop, problem, y, device, a, b))
    return x._replace(
        query=rows(x.query),
        key=key,
        value=value,
        bias=tile(x.bias),
        sinks=None,
        mask=tile(x.mask),
        visibility=visibility.of_keys(first, problem.keys),
        seeds=None if x.seeds is None else dropout.moved(rows(x.seeds), column=first),
    )


def _at(loop: Loop, problem: Problem, y, device, a, b):
    """Where the tile of a pair begins in a bias or mask [.., T | 1, S | 1] of this device's rows, and its sizes."""
    C, sizes = loop.chunks, (problem.queries, problem.keys)
    starts = a, jnp.maximum(device, 0) * C + b
    starts = [n * size if length > 1 else 0 for n, size, length in zip(starts, sizes, y.shape[2:], strict=True)]
    return (0, 0, *starts), (*y.shape[:2], *(min(n, size) for n, size in zip(y.shape[2:], sizes, strict=True)))


def _tile(y, starts, sizes):
    return lax.dynamic_slice(y, starts, sizes)


def _chunk(y, chunks: int, n):
    """Of [B * C, ..] the chunk n of each batch row."""
    return y if chunks == 1 else lax.dynamic_index_in_dim(y.reshape(-1, chunks, *y.shape[1:]), n, 1, keepdims=False)


def _put(y, chunks: int, n, new):
    """y with another chunk n."""
    if chunks == 1:
        return new
    return lax.dynamic_update_index_in_dim(y.reshape(-1, chunks, *y.shape[1:]), new, n, 1).reshape(y.shape)


def _zeros(like, shape, dtype):
    """Zeros that vary over the same devices."""
    return jnp.zeros_like(like, shape=shape, dtype=dtype)


def _forward(half: Half, problem: Problem, tiles, x: Operands):
    B, T, N, _ = x.query.shape
    wide, C = sums(x.query.dtype), half.loop.chunks
    sinks = None if x.sinks is None else x.sinks[None, :, None]
    start = Statistics(*online_softmax.start(_zeros(x.query, (B, N, T), wide), sinks))

    def attend(t, keys, carry):
        def merged(a, b, p, pair, carry):
            own = jax.tree.map(lambda y: _chunk(y, C, a), carry)
            new = online_softmax.merge(own, half.backend.forward(p, tiles, pair))
            return jax.tree.map(lambda y, y_new: _put(y, C, a, y_new), carry, new)

        return half.each_pair(problem, x, t, keys, merged, carry)

    o, stats = half.loop.go(attend, (x.key, x.value), (_zeros(x.query, (B, T, N, problem.value_size), wide), start))
    return o.astype(x.query.dtype), stats


def _backward(half: Half, problem: Problem, tiles, x: Operands, o, lse, do, delta):
    loop, C, wide = half.loop, half.loop.chunks, delta.dtype
    zeros = lambda y: None if y is None else _zeros(x.query, y.shape, wide)

    def step(t, keys, carry):
        (dq, dbias), dkv = carry
        dkv = loop.sent(dkv, 1)  # what the devices before found goes along with the keys, and then further, home

        def added(a, b, p, pair, carry):
            (dq, dbias), dkv = carry
            by_row = (_chunk(y, C, a) for y in (o, lse, do, delta))
            new_dq, *new_dkv, new_dbias = half.backend.backward(p, tiles, pair, *by_row)
            plus = lambda y, n, new: _put(y, C, n, _chunk(y, C, n) + new.astype(wide))
            if dbias is not None:
                starts, sizes = _at(loop, problem, dbias, loop.device_at(t), a, b)
                dbias = lax.dynamic_update_slice(dbias, _tile(dbias, starts, sizes) + new_dbias.astype(wide), starts)
            return (plus(dq, a, new_dq), dbias), tuple(plus(y, b, new) for y, new in zip(dkv, new_dkv, strict=True))

        return half.each_pair(problem, x, t, keys, added, ((dq, dbias), dkv))

    start = (zeros(x.query), zeros(x.bias)), (zeros(x.key), zeros(x.value))
    (dq, dbias), dkv = loop.go(step, (x.key, x.value), start)
    dkv = loop.sent(dkv, loop.first - loop.steps + 1) if loop.steps else dkv  # home
    typed = lambda dy, y: None if y is None else dy.astype(y.dtype)
    return typed(dq, x.query), *map(typed, dkv, (x.key, x.value)), typed(dbias, x.bias)
