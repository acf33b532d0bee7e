"""Dispatches a call of `paged_attention` to an implementation that reads pages in place, or gathers
them first; and how kernels that read pages are self-checked.

Ragged tokens are the tokens of all rows of a batch, one row behind the other. Decoding takes them
as tiles, each with tokens of one row.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_flash import checks
from pallas_flash.choose import dispatch, implementations, selection
from pallas_flash.choose.selfcheck import comparison
from pallas_flash.jax_support import hardware, jax_internals, xla_cpu
from pallas_flash.kernels import joined
from pallas_flash.masks import Mask
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.call import PagedCall
from pallas_flash.problem.implementation import Choice, Implementation, PageReader
from pallas_flash.problem.page_layout import Pages, PageTable
from pallas_flash.tiled import quantised, split_kv
from pallas_flash.transforms import autodiff, derivative_modes, kernel_pass


def clip_ends(cu_seqlens: Int[Array, "B+1"], tokens: int) -> Int[Array, "B+1"]:
    """Clips traced cu_seqlens, which nothing can check, to ends in order and within the tokens."""
    return lax.cummax(jnp.clip(cu_seqlens, 0, tokens))


class Places(NamedTuple):
    """The row of each token, and its number in the row."""

    row: Int[Array, "tokens"]
    number: Int[Array, "tokens"]
    is_real: Bool[Array, "tokens"]  # whether it belongs to a row at all

    @classmethod
    def locate(cls, cu_seqlens: Int[Array, "B+1"], tokens: int) -> "Places":
        token, last = jnp.arange(tokens, dtype=jnp.int32), len(cu_seqlens) - 2
        row = jnp.minimum(
            jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32), last
        )
        return cls(
            row, token - cu_seqlens[row], (cu_seqlens[0] <= token) & (token < cu_seqlens[-1])
        )


class RaggedTiles(NamedTuple):
    """Tiles of `size` tokens of one row: as many as any cu_seqlens could need; the last may be
    empty."""

    row: Int[Array, "tiles"]
    first: Int[Array, "tiles"]  # the first token, by its number in the row
    count: Int[Array, "tiles"]
    source: Int[Array, "tiles size"]  # the index of each token among all
    tile: Int[Array, "tokens"]
    slot: Int[Array, "tokens"]  # the place of each token in its tile
    is_real: Bool[Array, "tokens"]

    @classmethod
    def divide(cls, cu_seqlens: Int[Array, "B+1"], tokens: int, size: int) -> "RaggedTiles":
        B, counts = len(cu_seqlens) - 1, jnp.diff(cu_seqlens)
        most = (tokens + min(B, tokens) * (size - 1)) // size
        # how many tiles the rows up to each one have
        stop = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
        start = jnp.concatenate([jnp.zeros(1, jnp.int32), stop[:-1]])
        tile = jnp.arange(most, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(stop, tile, side="right").astype(jnp.int32), B - 1)
        first = (tile - start[row]) * size
        source = (cu_seqlens[row] + first)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        row_of_token, number, is_real = Places.locate(cu_seqlens, tokens)
        count = jnp.clip(counts[row] - first, 0, size)
        return cls(
            row,
            first,
            count,
            jnp.clip(source, 0, tokens - 1),
            start[row_of_token] + number // size,
            number % size,
            is_real,
        )

    def rows_of(self, call: PagedCall) -> PagedCall:
        """The call with a batch row for each tile; in `call` query_offset is the position of each
        row's first token."""
        offset, score = jnp.broadcast_to(call.query_offset, call.lengths.shape), call.score_mod
        mask = call.mask
        if mask is not None:
            mask = dataclasses.replace(mask, indices=mask.indices[0, self.source])
        by_tile = lambda x: jnp.asarray(x)[self.row]
        if score is not None and score.mod.uses_batch:
            batch = score.indices(len(call.lengths), 1)[0][self.row]
            score = dataclasses.replace(score, batch=batch)
        return call.replace(
            query=call.query[self.source],
            page_table=by_tile(call.page_table),
            lengths=by_tile(call.lengths),
            query_offset=offset[self.row] + self.first,
            query_seq_lengths=self.count,
            mask=mask,
            score_mod=score,
        )

    def tokens(self, x, empty):
        """The tokens [tokens, ..] of x [tiles, size, ..]; `empty` for tokens of no row."""
        by_token = x[jnp.clip(self.tile, 0, len(x) - 1), jnp.clip(self.slot, 0, x.shape[1] - 1)]
        return jnp.where(self.is_real.reshape(-1, *(1,) * (x.ndim - 2)), by_token, empty)


COPIES_ALL = "it copies all pages, and lists name some of their keys"


def attend(call: PagedCall):
    """o [B, T, N, Hv], lse [B, T, N] and the largest logits, or None, of a call of paged_attention;
    with cu_seqlens_q [tokens, N, Hv] and [tokens, N]."""
    arrays = {
        name: x
        for name, x in call.arguments().items()
        if x is not None and (checks.is_array(x) or isinstance(x, BoundScoreMod | Mask))
    }
    return _attend_jit(call.replace(context=None, **dict.fromkeys(arrays)), arrays)


@functools.partial(jax.jit, static_argnums=0)
def _attend_jit(static: PagedCall, arrays):
    call, tiles = _in_rows(static.replace(**derivative_modes.no_first(arrays)))
    if tiles is None:
        return _attend_batch(call, is_ragged=False)
    o, lse, largest = _attend_batch(call, is_ragged=True)
    blind_lse = -jnp.inf if call.sinks is None else call.sinks.astype(lse.dtype)
    largest = largest if largest is None else tiles.tokens(largest, -jnp.inf)
    return tiles.tokens(o, 0), tiles.tokens(lse, blind_lse), largest


def _in_rows(call: PagedCall) -> tuple[PagedCall, RaggedTiles | None]:
    """The call with an offset for each batch row. With cu_seqlens_q each tile of tokens becomes a
    row, and the tiles are returned too."""
    sizes, (*_, T, N, _) = call.layout.sizes(call.k_pages.shape), call.query.shape
    cu_seqlens = call.cu_seqlens_q
    cu_seqlens = None if cu_seqlens is None else clip_ends(cu_seqlens, T)
    if call.query_offset is None:
        new = T if call.query_seq_lengths is None else jnp.clip(call.query_seq_lengths, 0, T)
        new = new if cu_seqlens is None else jnp.diff(cu_seqlens)
        keys = jnp.minimum(call.lengths, call.page_table.shape[1] * sizes["C"])
        call = call.replace(query_offset=keys - new)
    if cu_seqlens is None:
        return call, None
    most = split_kv.max_ragged_rows(sizes["H"], call.v_pages is None)
    tiles = RaggedTiles.divide(cu_seqlens, T, max(1, most * sizes["K"] // N))
    return tiles.rows_of(call), tiles


def plan(call: PagedCall) -> tuple[Problem, Pages]:
    """The problem of a call, and its pages: what an implementation is chosen by."""
    call, tiles = _in_rows(call)
    _, problem, _, pages = _normalise(call, tiles is not None)
    return problem, pages


def _normalise(call: PagedCall, is_ragged: bool):
    """The call with keys and values of the shapes that the table gives, its problem and operands,
    and its pages."""
    (B, pages), arrays = call.page_table.shape, [call.k_pages]
    arrays += [] if call.v_pages is None else [call.v_pages]
    is_stored = [quantised.is_quantised(x.dtype) for x in arrays]
    new = dict(key_value_seq_lengths=call.lengths)
    for name, x, in_8_bits in zip(("key", "value"), arrays, is_stored, strict=False):
        sizes, dtype = call.layout.sizes(x.shape), call.query.dtype if in_8_bits else x.dtype
        shape = B, pages * sizes["C"], sizes["K"], sizes["H"]
        new[name] = jnp.zeros_like(x, shape=shape, dtype=dtype)  # nobody reads what is in it
    call = call.replace(**new)
    stored = next((str(x.dtype) for x, yes in zip(arrays, is_stored, strict=True) if yes), None)
    alone = {(True, False): "keys", (False, True): "values"}.get(tuple(is_stored))
    pages = Pages(tuple(x.shape for x in arrays), stored, is_ragged, alone, call.layout)
    return call, *arguments.normalise(call), pages


def _attend_batch(call: PagedCall, is_ragged: bool):
    call, problem, operands, pages = _normalise(call, is_ragged)
    arrays = dict(key=(call.k_pages, call.k_scales))
    arrays |= {} if call.v_pages is None else dict(value=(call.v_pages, call.v_scales))
    table = jnp.clip(call.page_table, 0, call.k_pages.shape[0] - 1)
    implementation = choose(problem, pages, call.implementation)
    if gathers_pages(implementation, problem, pages):
        options = problem, pages, operands.resolved_mask, table, call.key.dtype
        return dispatch.attend(
            call.replace(**{name: _gather(*options, *x) for name, x in arrays.items()})
        )
    scales = tuple(scales for _, scales in arrays.values())
    operands = operands._replace(**{name: x for name, (x, _) in arrays.items()})
    operands, scales = jax_internals.vary_alike((operands, scales))
    is_requested = selection.requested(call.implementation) is not None
    read = PagedPass(implementation, is_requested, hardware.here().platform, problem, pages)
    o, stats = (read.bind if read.needs_platform else read.run)(operands, table, scales)
    log_base = implementation.log_base(problem)
    rows = autodiff.lse_and_largest(log_base, problem, operands, stats)
    return o, *jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), rows)


@dataclasses.dataclass(frozen=True)
class PagedPass(kernel_pass.ByPlatform):
    """The forward of an implementation that reads pages in place."""

    problem: Problem
    pages: Pages

    def run(self, *args):
        return attend_in_place(self.problem, self.pages, self.implementation, *args)

    def run_elsewhere(self, like, *args):
        o, stats = attend_in_place(self.problem, self.pages, implementations.BLOCKWISE, *args)
        return o, kernel_pass.like_kernels(
            stats, like[1], self.implementation.log_base(self.problem)
        )


def _gather(p: Problem, pages: Pages, mask: ResolvedMask, table, dtype, x, scales):
    """The keys or values [B, S, K, n] of the batch rows, with 0 where no query of a row looks:
    there may be NaN."""
    x = pages.layout.join(xla_cpu.gather(x, table))
    if scales is not None:
        scales = pages.layout.join(xla_cpu.gather(scales, table))
        x = (xla_cpu.widen(x, jnp.float32) * scales[..., None]).astype(dtype)
    key = jnp.arange(p.keys, dtype=jnp.int32)[None, :, None, None]
    first, last = (
        n[:, None, None, None] for n in split_kv.reach(*split_kv.intervals(p, mask), p.keys)
    )
    return jnp.where((first <= key) & (key < last), x, 0)


# ---- which implementation ----


def gathers_pages(implementation: Implementation, problem: Problem, pages: Pages) -> bool:
    """Whether an implementation attends to a copy of the pages in order."""
    if not isinstance(implementation, PageReader):
        return True
    if problem.resolved_mask.lists is not None:
        return not implementation.takes_lists_of_pages(problem)
    is_long = split_kv.why_not(problem) is not None and not pages.is_ragged
    return is_long and implementation.copies_prompts(problem)


@dataclasses.dataclass(frozen=True)
class Objections(selection.Objections):
    """What speaks against an implementation for a call with pages."""

    pages: Pages | None = None
    NAME = "call of paged_attention"

    def cannot(self, implementation):
        if self._gathers(implementation):
            return super().cannot(implementation)
        reason = implementation.why_not(self._as_decoding)
        return joined(reason, implementation.why_no_pages(self.problem, self.pages))

    def by_default(self, implementation):
        if reason := super().by_default(implementation):
            return reason
        has_lists = self.problem.resolved_mask.lists is not None
        return COPIES_ALL if has_lists and self._gathers(implementation) else None

    def checked(self, implementation):
        if self._gathers(implementation):
            return super().checked(implementation)
        return [self._as_decoding], entry_point(self.pages)

    @property
    def _as_decoding(self) -> Problem:
        """The problem with as many keys as decoding takes at least."""
        return dataclasses.replace(self.problem, keys=max(self.problem.keys, split_kv.KEYS))

    def _gathers(self, implementation):
        return gathers_pages(implementation, self.problem, self.pages)


def choose(problem: Problem, pages: Pages, name: str | None, check=True) -> Implementation:
    objections = Objections(problem, check, pages)
    _, choice = selection.first(problem, selection.requested(name), objections)
    return choice.implementation


# ---- pages in place ----


def attend_in_place(
    problem: Problem, pages: Pages, implementation: PageReader, x: Operands, numbers, scales
):
    """o and the SoftmaxState by an implementation that reads pages: `x` has them as keys and
    values, `numbers` [B, pages] has the pages of each batch row. Scales are None where there
    are none."""
    tiles = implementation.page_tiles(problem, pages)
    table = PageTable(numbers, pages.page, pages.layout)
    scales = (*scales, scales[0])[:2]  # the keys' scales, where keys are the values
    x = x.with_values(problem)
    with jax.named_scope(problem.scope):
        return implementation.forward_from_pages(problem, tiles, x, table, scales)


def entry_point(pages: Pages) -> comparison.EntryPoint:
    """How the self-check calls kernels that read such pages."""
    keys = -(-comparison.SIZES["keys"] // pages.page) * pages.page
    name = " ".join(filter(None, (f"pages of {pages.page}", pages.stored, pages.alone)))
    results, widen = (functools.partial(f, pages) for f in (_results, _widen))
    sizes, convert = dict(keys=keys), lambda _, problem: problem  # it reads lists in pages
    return comparison.EntryPoint(name, results, widen=widen, sizes=sizes, convert=convert)


def _results(pages: Pages, p: Problem, choice: Choice, operands: Operands, cotangents):
    """The outputs for keys and values that are put into pages, the last of a row first."""
    if not isinstance(choice.implementation, PageReader):
        return comparison.outputs(*autodiff.attend(p, choice, operands))
    numbers = jnp.arange(p.batch * p.keys // pages.page, dtype=jnp.int32)
    numbers = numbers.reshape(p.batch, -1)[:, ::-1]
    in_pages = lambda x: pages.layout.split(x, pages.page)[numbers.ravel()]
    arrays, scales = zip(*jax.tree.map(in_pages, [*_quantise(pages, operands)]), strict=True)
    operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
    o, stats = attend_in_place(p, pages, choice.implementation, operands, numbers, scales)
    log_base = choice.implementation.log_base(p)
    return comparison.outputs(o, *autodiff.lse_and_largest(log_base, p, operands, stats))


def _widen(pages: Pages, operands: Operands) -> Operands:
    """The operands in float32, keys and values as their 8 bits stand for them."""
    arrays = (
        x if scales is None else x.astype(jnp.float32) * scales[..., None]
        for x, scales in _quantise(pages, operands)
    )
    operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
    return comparison.widen(operands)


def _quantise(pages: Pages, x: Operands):
    """Yields keys, and values if there are any, each with its scales, None where it is not in 8
    bits."""
    for name, array in dict(keys=x.key, values=x.value).items():
        if array is not None:
            in_8_bits = pages.is_in_8_bits(name)
            yield quantised.quantise(array, pages.stored) if in_8_bits else (array, None)
