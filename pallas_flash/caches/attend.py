"""Dispatches a call of `paged_attention` to an implementation that reads pages in place, or gathers
them first."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import checks
from pallas_flash.caches import ragged
from pallas_flash.choose import dispatch, implementations, selection
from pallas_flash.choose.selfcheck import comparison
from pallas_flash.jax_support import hardware, varying
from pallas_flash.kernels import joined
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.score_mod import BoundScoreMod
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.backend import Backend, Choice
from pallas_flash.problem.call import PagedCall
from pallas_flash.tiled import quantised, split_kv
from pallas_flash.transforms import autodiff, derivative_modes, lowering


def attend(call: PagedCall):
    """o [B, T, N, Hv], lse [B, T, N] and the largest logits, or None, of a call of paged_attention;
    with cu_seqlens_q [tokens, N, Hv] and [tokens, N]."""
    arrays = {
        name: x
        for name, x in call.arguments().items()
        if checks.is_array(x) or isinstance(x, BoundScoreMod)
    }
    return _attend_jit(call.replace(context=None, **dict.fromkeys(arrays)), arrays)


@functools.partial(jax.jit, static_argnums=0)
def _attend_jit(static: PagedCall, arrays):
    call, tiles = _in_rows(static.replace(**derivative_modes.no_first(arrays)))
    if tiles is None:
        return _attend_batch(call, is_ragged=False)
    o, lse, largest = _attend_batch(call, is_ragged=True)
    of_no_keys = -jnp.inf if call.sinks is None else call.sinks.astype(lse.dtype)
    largest = largest if largest is None else tiles.tokens(largest, -jnp.inf)
    return tiles.tokens(o, 0), tiles.tokens(lse, of_no_keys), largest


def _in_rows(call: PagedCall) -> tuple[PagedCall, ragged.Tiles | None]:
    """The call with an offset for each row; with cu_seqlens_q a row for each tile of tokens, and
    these tiles."""
    (_, page, K, _), (*_, T, N, _) = call.k_pages.shape, call.query.shape
    cu_seqlens = call.cu_seqlens_q
    cu_seqlens = None if cu_seqlens is None else ragged.within(cu_seqlens, T)
    if call.query_offset is None:
        new = T if call.query_seq_lengths is None else call.query_seq_lengths
        new = new if cu_seqlens is None else jnp.diff(cu_seqlens)
        held = jnp.minimum(call.lengths, call.page_table.shape[1] * page)
        call = call.replace(query_offset=held - new)
    if cu_seqlens is None:
        return call, None
    most = split_kv.max_rows(call.k_pages.shape[3], call.v_pages is None)
    tiles = ragged.Tiles.of(cu_seqlens, T, max(1, most * K // N))
    return tiles.rows_of(call), tiles


def plan(call: PagedCall) -> tuple[Problem, "Pages"]:
    """What there is to know of a call before an implementation is chosen."""
    call, tiles = _in_rows(call)
    _, problem, _, pages = _normalised(call, tiles is not None)
    return problem, pages


def _normalised(call: PagedCall, is_ragged: bool):
    """The call with keys and values of the shapes that the table gives, its problem and operands,
    and its pages."""
    (B, pages), both = call.page_table.shape, (call.k_pages, call.v_pages)
    both = [x for x in both if x is not None]
    is_stored = [quantised.is_quantised(x.dtype) for x in both]
    rows = [  # never made: their shapes are read
        jnp.broadcast_to(
            x[0, 0].astype(call.query.dtype if in_8_bits else x.dtype),
            (B, pages * x.shape[1], *x.shape[2:]),
        )
        for x, in_8_bits in zip(both, is_stored, strict=True)
    ]
    call = call.replace(key_value_seq_lengths=call.lengths)
    call = call.replace(**dict(zip(("key", "value"), rows, strict=False)))
    stored = next((str(x.dtype) for x, yes in zip(both, is_stored, strict=True) if yes), None)
    alone = {(True, False): "keys", (False, True): "values"}.get(tuple(is_stored))
    kind = Pages(tuple(x.shape for x in both), stored, is_ragged, alone)
    return call, *arguments.normalise(call), kind


def _attend_batch(call: PagedCall, is_ragged: bool):
    call, problem, operands, kind = _normalised(call, is_ragged)
    pages = dict(key=(call.k_pages, call.k_scales))
    pages |= {} if call.v_pages is None else dict(value=(call.v_pages, call.v_scales))
    implementation, page_table = call.implementation, call.page_table
    backend = choose(problem, kind, implementation)
    if copies(backend, problem, kind):
        dtype = call.key.dtype
        copied = functools.partial(_in_order, problem, operands.resolved_mask, page_table, dtype)
        return dispatch.attend(call.replace(**{name: copied(*x) for name, x in pages.items()}))
    scales = (tuple(x for _, x in pages.values()),) if kind.stored else ()
    operands = operands._replace(**{name: x for name, (x, _) in pages.items()})
    operands, scales = varying.vary_alike((operands, scales))
    table = jnp.clip(page_table, 0, call.k_pages.shape[0] - 1)
    is_requested = selection.requested(implementation) is not None
    traced_without_gpu = hardware.here().platform != "gpu"
    read = PagedPass(backend, is_requested, traced_without_gpu, problem, kind)
    o, stats = (read.bind if read.needs_gpu else read.run)(operands, table, *scales)
    log_base = backend.log_base(problem)
    rows = autodiff.lse_and_largest(log_base, problem, operands, stats)
    return o, *jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rows)


@dataclasses.dataclass(frozen=True)
class PagedPass(lowering.ByPlatform):
    """Reads pages where they lie."""

    problem: Problem
    pages: "Pages"

    def run(self, *args):
        return _in_place(self.problem, self.pages, self.backend, *args)

    def run_elsewhere(self, like, *args):
        o, stats = _in_place(self.problem, self.pages, implementations.BLOCKWISE, *args)
        return o, lowering.like_kernels(stats, like[1], self.backend.log_base(self.problem))


def _in_place(problem: Problem, pages: "Pages", backend: Backend, operands, table, *scales):
    """What an implementation reads out of pages where they lie."""
    kernel = backend.paged
    tiles = kernel.tiles(problem, pages.page, pages.stored)
    scales = [(*x, x[0])[:2] for x in scales]  # those of keys, where these are the values
    return kernel.forward(problem, tiles, operands.with_values(problem), table, *scales)


def _in_order(problem: Problem, seen: ResolvedMask, table, dtype, pages, scales):
    """The keys or values [B, S, K, n] of the rows, 0 where no query of a row looks: there may be
    NaN."""
    p = problem
    x = quantised.taken(pages, table)  # [B, pages, page, K, n]
    x = (
        x
        if scales is None
        else (x.astype(jnp.float32) * quantised.taken(scales, table)[..., None]).astype(dtype)
    )
    key = jnp.arange(p.keys, dtype=jnp.int32)[None, :, None, None]
    first, last = (
        n[:, None, None, None] for n in split_kv.reach(*split_kv.intervals(p, seen), p.keys)
    )
    return jnp.where((first <= key) & (key < last), x.reshape(p.batch, p.keys, *x.shape[3:]), 0)


class Pages(NamedTuple):
    """What there is to know of the pages of a call."""

    shapes: tuple[tuple[int, ...], ...]  # of keys, and of values if they are apart, [P, page, K, n]
    stored: str | None  # the dtype, where that is one of 8 bits
    is_ragged: bool  # rows of the batch are tiles, which share tables
    alone: str | None = None  # "keys" or "values", where these alone are in 8 bits

    @property
    def page(self) -> int:
        return self.shapes[0][1]

    def is_in_8_bits(self, name: str) -> bool:
        """Of "keys" or "values"."""
        return self.stored is not None and self.alone in (None, name)

    def itemsizes(self, dtype: str) -> list[int]:
        """Of a number of a key, and of a value, where those that are not in 8 bits have this
        dtype."""
        wide = jnp.dtype(dtype).itemsize
        return [1 if self.is_in_8_bits(name) else wide for name in ("keys", "values")]

    @property
    def entry(self) -> comparison.EntryPoint:
        """How kernels are checked that read such pages."""
        keys = -(-comparison.SIZES["keys"] // self.page) * self.page
        name = " ".join(filter(None, (f"pages of {self.page}", self.stored, self.alone)))
        return comparison.EntryPoint(name, self.results, widen=self.widen, sizes=dict(keys=keys))

    def results(self, problem: Problem, choice: Choice, operands: arguments.Operands, cotangents):
        """Of keys and values that are put into pages, the last of a row first."""
        if choice.backend.paged is None:
            return comparison.outputs(*autodiff.attend(problem, choice, operands))
        p = problem
        table = jnp.arange(p.batch * p.keys // self.page, dtype=jnp.int32).reshape(p.batch, -1)[
            :, ::-1
        ]
        paged = lambda x: x.reshape(-1, self.page, *x.shape[2:])[table.ravel()]
        arrays, scales = zip(*jax.tree.map(paged, [*self._in_8_bits(operands)]), strict=True)
        scales = (scales,) if self.stored else ()
        operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
        o, stats = _in_place(p, self, choice.backend, operands, table, *scales)
        log_base = choice.backend.log_base(p)
        return comparison.outputs(o, *autodiff.lse_and_largest(log_base, p, operands, stats))

    def widen(self, operands: arguments.Operands) -> arguments.Operands:
        arrays = (
            x if scales is None else x.astype(jnp.float32) * scales[..., None]
            for x, scales in self._in_8_bits(operands)
        )
        operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
        return comparison.widen(operands)

    def _in_8_bits(self, operands: arguments.Operands):
        """Keys, and values if they are apart, each with its scales, None where they are not in 8
        bits."""
        both = dict(keys=operands.key, values=operands.value)
        for name, x in [(name, x) for name, x in both.items() if x is not None]:
            yield quantised.quantised(x, self.stored) if self.is_in_8_bits(name) else (x, None)


def copies(backend: Backend, problem: Problem, pages: Pages) -> bool:
    """Whether an implementation attends to a copy of the pages in order."""
    if backend.paged is None:
        return True
    is_long = split_kv.why_not(problem) is not None and not pages.is_ragged
    return is_long and backend.paged.copies_prompts(problem)


@dataclasses.dataclass(frozen=True)
class Objections(selection.Objections):
    """What speaks against an implementation for a call with pages."""

    pages: Pages | None = None
    NAME = "call of paged_attention"

    def cannot(self, backend):
        pages, paged = self.pages, backend.paged
        if self._copies(backend):
            return super().cannot(backend)
        reason = backend.why_not(self._long)
        if pages.alone and not paged.takes_8_bits_alone:
            return joined(
                reason,
                f"it reads keys and values in 8 bits, or neither; got {pages.alone} alone in "
                f"{pages.stored}: triton and blockwise take them",
            )
        return joined(reason, paged.why_not(self.problem, pages.shapes, pages.stored))

    def checked(self, backend):
        if self._copies(backend):
            return super().checked(backend)
        return backend, self._long, self.pages.entry

    @property
    def _long(self) -> Problem:
        """The problem as decoding, whatever the length."""
        return dataclasses.replace(self.problem, keys=max(self.problem.keys, split_kv.KEYS))

    def _copies(self, backend):
        return copies(backend, self.problem, self.pages)


def choose(problem: Problem, pages: Pages, implementation: str | None, check=True) -> Backend:
    objections = Objections(problem, check, pages)
    return selection.first(problem, selection.requested(implementation), objections).backend
