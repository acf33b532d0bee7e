"""Ring attention: keys and values go around the devices, and each device's queries attend to the
keys that it holds at that step.

A device holds its part of a sequence in chunks, one batch row each; a pair is one chunk of queries
and one of keys. The outputs of the pairs are merged by their log-sum-exp. The backward gets the
log-sum-exp over all keys, so the gradients of the pairs add up. Where a slice of the heads fills a
GPU, the slices go around one after the other, and the buffers hold one slice.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.checks import sums
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import Pass
from pallas_flash.tiled import online_softmax, schedule
from pallas_flash.tiled.online_softmax import SoftmaxState


class Loop(NamedTuple):
    """The steps of a ring over an axis of the mesh: at step t device i has the keys of device
    i + first - t."""

    axis: tuple[str, ...]
    devices: int
    chunks: int  # of a device: one, or one from the front of the sequence and one from its back
    first: int
    steps: int
    wraps: bool  # whether the last device sends to the first

    @classmethod
    def shortest(
        cls,
        axis: tuple[str, ...],
        devices: int,
        chunks: int,
        resolved_mask: ResolvedMask,
        queries: int,
    ) -> "Loop":
        """The shortest loop that brings each of `queries` rows the keys that are visible to it, as
        far as the mask is static."""
        ends = (
            schedule.key_ranges(resolved_mask, queries, queries // devices) if chunks == 1 else []
        )
        size = resolved_mask.keys // devices
        distances = [
            (keys.first // size - i, (keys.last - 1) // size - i)
            for i, keys in enumerate(ends)
            if keys.first < keys.last
        ]
        lowest = min((a for a, _ in distances), default=0)
        highest = max((b for _, b in distances), default=-1)
        if chunks > 1 or highest - lowest >= devices:
            return cls(axis, devices, chunks, 0, devices, True)
        return cls(axis, devices, chunks, highest, highest - lowest + 1, highest > 0)

    def chunk_indices(self, device):
        """The indices of a device's chunks in the sequence, [C]."""
        return jnp.stack([jnp.asarray(device), 2 * self.devices - 1 - device][: self.chunks])

    def device_at(self, t):
        """The device whose keys this one has at step t."""
        device = lax.axis_index(self.axis) + self.first - t
        return device % self.devices if self.wraps else device

    def is_on_mesh(self, device):
        return (device >= 0) & (device < self.devices)

    def send(self, x, by: int, wraps: bool = True):
        """Sends x to the device `by` places further, and returns what arrives: without `wraps` 0
        where no device sends."""
        to = [
            (i, (i + by) % self.devices)
            for i in range(self.devices)
            if wraps or 0 <= i + by < self.devices
        ]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis, to), x) if by else x

    def run(self, step: Callable, keys, carry):
        """carry = step(t, keys, carry) for all t, while the next keys are on their way."""
        if self.steps == 0:
            return carry
        both = lambda t, state: (self.send(state[0], 1, self.wraps), step(t, *state))
        keys, carry = schedule.loop(
            0, self.steps - 1, both, (self.send(keys, -self.first, self.wraps), carry)
        )
        return step(self.steps - 1, keys, carry)

    def run_round_trip(self, step: Callable, keys, carry, dkv):
        """carry, dkv = step(t, keys, carry, dkv) for all t, where dkv goes around with the keys and
        ends on the device that they come from. Both are sent during the next step. The last step,
        too, sends keys, which nobody needs: else it could not be part of the loop."""
        if self.steps == 0:
            return carry, dkv
        send_on = lambda keys: self.send(keys, 1, self.wraps)
        both = lambda t, state: (
            send_on(state[0]),
            *step(t, state[0], state[1], self.send(state[2], 1)),
        )
        keys = self.send(keys, -self.first, self.wraps)
        start = send_on(keys), *step(0, keys, carry, dkv)
        _, carry, dkv = schedule.loop(1, self.steps, both, start)
        return carry, self.send(dkv, self.first - self.steps + 1)


class Slice(NamedTuple):
    """A slice of arrays [B * C, .., shared * slices * n, ..], which is [B, .., shared * n, ..]. It
    has one of the C chunks, and one slice of the heads, or of the heads that share each key
    head."""

    chunks: int = 1
    chunk: Any = 0
    shared: int = 1
    slices: int = 1
    index: Any = 0

    def take(self, y, axis: int = 0):
        """The slice of y, whose heads are on `axis`; 0: y has none."""
        if y is None or self._is_all(axis):
            return y
        shape, starts, sizes = self._bounds(y.shape, axis)
        new = lax.dynamic_slice(y.reshape(shape), starts, sizes)
        heads = () if axis == 0 else (*y.shape[1:axis], y.shape[axis] // self.slices)
        return new.reshape(y.shape[0] // self.chunks, *heads, *y.shape[axis + 1 :])

    def put(self, y, new, axis: int = 0):
        """y with `new` in place of the slice."""
        if self._is_all(axis):
            return new
        shape, starts, sizes = self._bounds(y.shape, axis)
        return lax.dynamic_update_slice(y.reshape(shape), new.reshape(sizes), starts).reshape(
            y.shape
        )

    def _is_all(self, axis: int) -> bool:
        return self.chunks == 1 and (axis == 0 or self.slices == 1)

    def _bounds(self, whole, axis: int):
        """The shape of y with axes for chunks and slices, and in it the slice's start and sizes."""
        sizes = [whole[0] // self.chunks, self.chunks]
        starts = {1: self.chunk}
        if axis > 0:
            starts[len(sizes) + axis] = self.index
            n = whole[axis] // (self.shared * self.slices)
            sizes += [*whole[1:axis], self.shared, self.slices, n]
        shape = *sizes, *whole[axis + 1 :]
        return (
            shape,
            _int32([starts.get(i, 0) for i in range(len(shape))]),
            [1 if i in starts else size for i, size in enumerate(shape)],
        )


# a pair with so many queries, over batch rows and heads, fills all SMs of a GPU
ROWS = 2**14


def head_slices(problem: Problem, chunks: int) -> tuple[int, int]:
    """The number of slices of the key heads, which go around one by one, and of the query heads
    that share one: as many as leave `ROWS` to a pair. It is 1 and 1 where a bias or mask array, a
    mask_mod or a score_mod may differ between heads."""
    p = problem
    if any(x is not None for x in (p.bias, p.mask, p.resolved_mask.mask_mod, p.score)):
        return 1, 1
    most = p.batch // chunks * p.queries * p.heads // ROWS
    by_key = schedule.divisor(p.kv_heads, most)
    return by_key, schedule.divisor(p.group, most // by_key)


@dataclasses.dataclass(frozen=True)
class RingPass(Pass):
    """A pass over all pairs of the loop, by the implementation's pass for a pair."""

    loop: Loop

    def __call__(self, problem: Problem, tiles, x: Operands, *rest):
        slices, groups = head_slices(problem, self.loop.chunks)
        is_forward = self.name == "forward"
        axes = _head_axes(problem) if is_forward else Gradients(2, 2, 2)

        def run(heads, x, *rest):
            trip = RoundTrip(self, groups, heads, problem, tiles, x)
            return trip.forward() if is_forward else trip.backward(*rest)

        def run_slice(n, outputs):
            heads = Slice(slices=slices, index=n)
            return jax.tree.map(heads.put, outputs, run(heads, x, *rest), axes)

        if slices == 1:
            return run(Slice(), x, *rest)
        outputs = jax.eval_shape(functools.partial(run, Slice()), x, *rest)
        zeros = jax.tree.map(lambda y: _zeros(x.query, y.shape, y.dtype), outputs)
        return schedule.loop(0, slices, run_slice, zeros)


def take_heads(x: Operands, heads: Slice) -> Operands:
    """The operands of a slice of the heads."""
    return x._replace(
        query=heads.take(x.query, 2),
        key=heads.take(x.key, 2),
        value=heads.take(x.value, 2),
        sinks=None if x.sinks is None else heads.take(x.sinks[None], 1)[0],
        seeds=heads.take(x.seeds, 1),
    )


def pair_problem(loop: Loop, problem: Problem, x: Operands) -> Problem:
    """The problem of one pair."""

    def pair(x):
        slices, groups = head_slices(problem, loop.chunks)
        x = take_heads(x, Slice(slices=slices))
        rows = Slice(loop.chunks, 0, problem.kv_heads // slices, groups)
        return pair_operands(loop, problem, x, (x.key, x.value), 0, rows, 0)

    return problem.for_part(jax.eval_shape(pair, x))


def pair_operands(
    loop: Loop, problem: Problem, x: Operands, keys, device, rows: Slice, b
) -> Operands:
    """The operands of a pair: this device's `rows`, and chunk b of the `keys`, K and V, of
    `device`."""
    key, value = (Slice(loop.chunks, b).take(y) for y in keys)
    first = jnp.maximum(loop.chunk_indices(device)[b], 0) * problem.keys
    resolved_mask = x.resolved_mask.narrow(ResolvedMask.BY_BATCH + ResolvedMask.BY_QUERY, rows.take)
    if resolved_mask.mask_mod is not None:
        resolved_mask = dataclasses.replace(
            resolved_mask, mask_mod=resolved_mask.mask_mod.take_rows(rows.take)
        )
    tile = lambda y: (
        None
        if y is None
        else lax.dynamic_slice(y, *_tile_bounds(loop, problem, y, device, rows.chunk, b))
    )
    return x._replace(
        query=rows.take(x.query, 2),
        key=key,
        value=value,
        bias=tile(x.bias),
        sinks=None,
        mask=tile(x.mask),
        resolved_mask=resolved_mask.slice_keys(first, problem.keys),
        seeds=None if x.seeds is None else dropout.moved(rows.take(x.seeds, 1), column=first),
        score=None if x.score is None else x.score.take_rows(rows.take).slice_keys(first),
    )


def _tile_bounds(loop: Loop, problem: Problem, y, device, a, b):
    """Where the tile of a pair begins in a bias or mask [.., T | 1, S | 1] of this device's rows,
    and its sizes."""
    C, sizes = loop.chunks, (problem.queries, problem.keys)
    starts = a, jnp.maximum(device, 0) * C + b
    starts = [
        n * size if length > 1 else 0
        for n, size, length in zip(starts, sizes, y.shape[2:], strict=True)
    ]
    return _int32((0, 0, *starts)), (
        *y.shape[:2],
        *(min(n, size) for n, size in zip(y.shape[2:], sizes, strict=True)),
    )


def _int32(starts) -> list[jax.Array]:
    """The start of a slice in one dtype: with jax_enable_x64, numbers of Python and of loops have
    two."""
    return [jnp.asarray(start, jnp.int32) for start in starts]


def _zeros(like, shape, dtype):
    """Zeros that vary over the same devices as `like`."""
    return jnp.zeros_like(like, shape=shape, dtype=dtype)


def _head_axes(problem: Problem):
    """The axes of the heads in the outputs of a forward."""
    return 2, SoftmaxState(1, 1, 1 if problem.max_logits else None)


class RoundTrip(NamedTuple):
    """A slice of the heads on its way around the ring."""

    pass_: RingPass
    groups: int  # slices of the query heads that share a key head; they attend one by one
    heads: Slice
    problem: Problem  # of all chunks and heads
    tiles: Any
    x: Operands  # of all heads

    def forward(self):
        p, pass_, x = self.problem, self.pass_, take_heads(self.x, self.heads)
        B, T, N, _ = x.query.shape
        wide = sums(x.query.dtype)
        sinks = None if x.sinks is None else x.sinks[None, :, None]
        log_base = pass_.implementation.log_base(p)
        start = online_softmax.start(self.zeros((B, N, T), wide), log_base, sinks, p.max_logits)
        axes = _head_axes(p)

        def merge(rows, _, p, pair, carry):
            o, old = jax.tree.map(rows.take, carry, axes)
            o_pair, stats = pass_.inner(p, self.tiles, pair)
            shares, stats = online_softmax.merge([old, stats], log_base)
            # [B, T, N, 1]
            old_share, pair_share = (jnp.swapaxes(x, 1, 2)[..., None] for x in shares)
            o = o * old_share + o_pair.astype(wide) * pair_share
            return jax.tree.map(rows.put, carry, (o, stats), axes)

        attend = lambda t, keys, carry: self.each_pair(t, keys, merge, carry)
        start = self.zeros((B, T, N, p.value_size), wide), start
        o, stats = pass_.loop.run(attend, (x.key, x.value), start)
        return o.astype(x.query.dtype), stats

    def backward(self, lse, do, delta) -> Gradients:
        loop, wide, x = self.pass_.loop, delta.dtype, take_heads(self.x, self.heads)
        if self.pass_.implementation.takes_row_scale:  # a pair has a part of the keys
            lse = lse._replace(dlse=None)
        zeros = lambda y: None if y is None else self.zeros(y.shape, wide)

        def plus(y, at: Slice, new, axis=0):
            return at.put(y, at.take(y, axis) + new.astype(wide), axis)

        def step(t, keys, carry, dkv):
            def add(rows, b, p, pair, carry):
                (dq, dbias, captured), (dk, dv) = carry
                take = lambda y, axis: rows.take(self.heads.take(y, axis), axis)
                row_arrays = jax.tree.map(lambda y: take(y, 1), lse), take(do, 2), take(delta, 1)
                new = self.pass_.inner(p, self.tiles, pair, *row_arrays)
                if dbias is not None:
                    at = _tile_bounds(loop, self.problem, dbias, loop.device_at(t), rows.chunk, b)
                    tile = lax.dynamic_slice(dbias, *at) + new.bias.astype(wide)
                    dbias = lax.dynamic_update_slice(dbias, tile, at[0])
                keys = Slice(loop.chunks, b)
                dkv = plus(dk, keys, new.key), plus(dv, keys, new.value)
                captured = tuple(map(jnp.add, captured, new.captured))
                return (plus(dq, rows, new.query, 2), dbias, captured), dkv

            start = carry, (zeros(x.key), zeros(x.value))
            carry, new = self.each_pair(t, keys, add, start)
            return carry, jax.tree.map(jnp.add, dkv, new)  # last, so that products overlap sending

        captured = tuple(map(zeros, self.x.differentiable.captured))
        start = (zeros(x.query), zeros(x.bias), captured), (zeros(x.key), zeros(x.value))
        (dq, dbias, captured), (dk, dv) = loop.run_round_trip(step, (x.key, x.value), *start)
        gradients = Gradients(dq, dk, dv, dbias, captured=captured)
        like = self.x.differentiable._replace(sinks=None)
        return jax.tree.map(lambda dy, y: dy.astype(y.dtype), gradients, like)

    def each_pair(self, t, keys, step: Callable, carry):
        """carry = step(rows, b, problem, operands, carry) for all pairs, `rows` and a chunk b of
        keys, that may see each other."""
        p, loop, x = self.problem, self.pass_.loop, self.x
        device, chunks = loop.device_at(t), loop.chunks

        def visit(n, carry):
            a, b, group = n // chunks % chunks, n % chunks, n // chunks**2
            rows = Slice(chunks, a, keys[0].shape[2], self.groups, group)
            pair = lambda: pair_operands(loop, p, take_heads(x, self.heads), keys, device, rows, b)
            is_visible = loop.is_on_mesh(device) & pair().resolved_mask.any_visible(p.queries)

            def visited(carry):  # slices its operands here, and only if the pair is visible
                operands = pair()
                return step(rows, b, p.for_part(operands), operands, carry)

            return lax.cond(is_visible, visited, lambda carry: carry, carry)

        pairs = chunks**2 * self.groups
        return visit(0, carry) if pairs == 1 else schedule.loop(0, pairs, visit, carry)

    def zeros(self, shape, dtype):
        return _zeros(self.x.query, shape, dtype)
