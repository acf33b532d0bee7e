"""`paged_attention`: attention of a few new tokens to keys and values that lie in pages, which rows
may share."""

from __future__ import annotations  # help() shows annotations as they stand here

from typing import Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_flash import checks, scores
from pallas_flash.caches import tables
from pallas_flash.caches.attend import attend
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.checks.sizes import Sizes
from pallas_flash.choose import dispatch
from pallas_flash.devices import sharding
from pallas_flash.jax_support import hardware
from pallas_flash.masks import KeyLists
from pallas_flash.mods.bound import BoundScoreMod
from pallas_flash.problem.call import ImplementationName, PagedCall, ScoreMod, in_lines
from pallas_flash.tiled import quantised

PAGE = 8  # a page is a multiple of so many keys


class Options(TypedDict, total=False):
    """For type checkers: the arguments of `paged_attention` by name, except what tells its
    overloads apart."""

    query_seq_lengths: Int[AnyArray, "B"] | None
    query_offset: Int[AnyArray, "B"] | None
    cu_seqlens_q: Int[AnyArray, "B+1"] | None
    mask: KeyLists | None
    scale: float | Float[AnyArray, "..."] | None
    is_causal: bool
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, "N"] | None
    k_scales: Float[AnyArray, "P page K"] | None
    v_scales: Float[AnyArray, "P page K"] | None
    score_mod: ScoreMod | None
    value_size: int | None
    implementation: ImplementationName | None


_Query = Float[AnyArray, "*B T N H"]
_Keys = Real[AnyArray, "P page K H"]
_Values = Real[AnyArray, "P page K Hv"]
_Table = Int[AnyArray, "B pages"]
_Lengths = Int[AnyArray, "B"]
_Output = Float[Array, "*B T N Hv"]
_Residual = Float[Array, "*B T N"]


@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values | None,
    page_table: _Table,
    lengths: _Lengths,
    *,
    query_seq_lengths: Int[AnyArray, "B"] | None = None,
    query_offset: Int[AnyArray, "B"] | None = None,
    cu_seqlens_q: Int[AnyArray, "B+1"] | None = None,
    mask: KeyLists | None = None,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    k_scales: Float[AnyArray, "P page K"] | None = None,
    v_scales: Float[AnyArray, "P page K"] | None = None,
    score_mod: ScoreMod | None = None,
    value_size: int | None = None,
    implementation: ImplementationName | None = None,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[False] = False,
) -> _Output: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values | None,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[_Output, _Residual]: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values | None,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Output, _Residual]: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values | None,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Output, _Residual, _Residual]: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values | None,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[Options],
) -> _Output | tuple[_Output, _Residual] | tuple[_Output, _Residual, _Residual]: ...
@unexpected.refused
def paged_attention(
    query: Float[AnyArray, "*B T N H"],
    k_pages: Real[AnyArray, "P page K H"],
    v_pages: Real[AnyArray, "P page K Hv"] | None,
    page_table: Int[AnyArray, "B pages"],
    lengths: Int[AnyArray, "B"],
    *,
    query_seq_lengths: Int[AnyArray, "B"] | None = None,
    query_offset: Int[AnyArray, "B"] | None = None,
    cu_seqlens_q: Int[AnyArray, "B+1"] | None = None,
    mask: KeyLists | None = None,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    k_scales: Float[AnyArray, "P page K"] | None = None,
    v_scales: Float[AnyArray, "P page K"] | None = None,
    score_mod: ScoreMod | None = None,
    value_size: int | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "..."], ...]:
    """`flash_attention` of the newest tokens of each row to the row's keys, which lie in pages.

    `PagedCache.attend` calls it with the arrays of a cache.

    Row b has lengths[b] keys; key i of it is k_pages[page_table[b, i // page], i % page]. Pages may
    be in any order, and rows may share them. An entry of the table that no visible key needs, as
    beyond the lengths or before a window, may be anything; one that is needed must be a page from 0
    to P - 1. Outside of jax.jit this is checked: the call reads the table and the lengths, and so
    waits for the device. Inside, another number is taken for the nearest page, a length beyond the
    table for its end, and the result is that of these keys. There is no derivative. On a mesh with
    explicit axes the batch and the heads may be sharded, the pages by heads alone.

    Args:
      query: [B, T, N, H], the newest tokens of each row, or with cu_seqlens_q [T, N, H]; N is a
        multiple of K. With up to 64 rows, T N / K, pages are read where they lie; with up to 512,
        where v_pages is None and H is above 256. With more, as in a prompt, all pages in the table
        are first copied in order, and the kernels of `flash_attention` run; "blockwise" copies them
        only if they hold no more keys than there are rows.
      k_pages: [P, page, K, H], where page is a multiple of 8.
      v_pages: [P, page, K, Hv]; or None, with value_size.
      page_table: int32 [B, pages of a row].
      lengths: int32 [B], how many keys each row has, its new tokens' included; at most as many
        as its pages hold. Keys of a page beyond them may be NaN.
      query_seq_lengths: int32 [B]: how many of the T queries of each row, from the first on, are
        real; all by default. The others get 0.
      query_offset: int32 [B], the position of each row's first query. By default the real queries
        are at the last of the row's keys: it is lengths - query_seq_lengths, or lengths - T.
      cu_seqlens_q: int32 [B + 1], ascending: the query is [T, N, H], and row b has the tokens from
        cu_seqlens_q[b] up to, not including, cu_seqlens_q[b + 1]: of some rows a prompt, of others
        one token, of others none. Tokens of no row are padding. Up to 64 K / N tokens of a row at a
        time are decoding, and no page is copied.
      mask: a `masks.KeyLists`, for T queries: a query sees the keys of its row that its list names,
        by their positions in the row, and that nothing else hides. With cu_seqlens_q indices are
        [T, L, n], and query_block is 1. "hopper", "blackwell", "ampere" and "blockwise" read these
        keys alone, for any number of queries; the others copy all pages in the table.
      scale, local_window_size, logits_soft_cap, sinks, score_mod: as in `flash_attention`.
      is_causal, return_residual, return_max_logits: as there, but is_causal is True by default.
      k_scales, v_scales: float32 [P, page, K], for pages of int8, float8_e4m3fn or float8_e5m2: a
        key is its entry in the page times its scale, as a `PagedCache` has them. Keys alone or
        values alone may be in 8 bits. Pages that are read where they lie stay as they are in
        memory: logits and weights are multiplied by the scales. A copy has the query's dtype.
      value_size: Hv, with v_pages=None: the values are the first Hv columns of the keys, with their
        scales, as in `flash_attention`.
      implementation: as in `flash_attention`; "triton" and "blockwise" read any pages where they
        lie, keys or values alone in 8 bits too. "hopper", "blackwell" and "ampere" do if pages are
        of 8, 16, 32, or a multiple of 64 keys, keys and values alike in 8 bits or not. For this H
        and Hv must be multiples of 16 up to 128, of 32 up to 256, of 64 above, in 8 bits of 32 at
        least. Below compute capability 9.0, pages of 8 keys need multiples of 64, and pages of 16
        keys of 32; in 8 bits 128 and 64, and 64 for Hv above 128. `explain_paged` says what runs.
        "reference", "flash1" and "standard" always copy pages.

    Returns:
      The output [B, T, N, Hv] in the query's dtype; with return_residual or return_max_logits, a
      tuple of it and float32 [B, T, N], as in `flash_attention`. With cu_seqlens_q none has an axis
      B.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot run this call, or a derivative is asked
        for.

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_flash import paged_attention, paged_cache
      >>> sizes = dict(batch=2, max_length=64, kv_heads=2, head_size=16, pages=10, page=8)
      >>> new = jnp.ones((2, 20, 2, 16))  # [B, T, K, H]
      >>> pool = paged_cache(**sizes, dtype=jnp.float32).append(new, new)
      >>> query = jnp.ones((2, 1, 8, 16))  # the newest token of each row
      >>> pages = pool.k_pages, pool.v_pages, pool.page_table
      >>> paged_attention(query, *pages, pool.lengths).shape  # or pool.attend(query)
      (2, 1, 8, 16)
    """
    return_residual = checks.flag("return_residual", return_residual)
    call = PagedCall(
        query=query,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        lengths=lengths,
        query_seq_lengths=query_seq_lengths,
        query_offset=query_offset,
        cu_seqlens_q=cu_seqlens_q,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        score_mod=score_mod,
        value_size=value_size,
        implementation=implementation,
        return_max_logits=return_max_logits,
    )
    call = checked(call)
    mesh, score_mod = sharding.find_mesh(call), call.score_mod
    if mesh is not None and score_mod is not None:
        call = call.replace(
            score_mod=score_mod.with_indices(call.lengths.shape, call.query.shape[-2])
        )
    with hardware.at(call.arguments().values()):
        results = attend(call) if mesh is None else sharding.map_paged_call(attend, call, mesh)
    return dispatch.results(return_residual, *results)


in_lines(paged_attention)


def bind_call(*args, **kwargs) -> PagedCall:
    """The call of paged_attention with these arguments."""
    bound = unexpected.bind(paged_attention, args, kwargs)
    bound.apply_defaults()
    checks.flag("return_residual", bound.arguments.pop("return_residual"))
    return checked(PagedCall(**bound.arguments))


def checked(call: PagedCall) -> PagedCall:
    """The call with its arguments as arrays. Raises where they do not fit."""
    query, k_pages = checks.array("query", call.query), checks.array("k_pages", call.k_pages)
    v_pages, names = call.v_pages, ("k_pages", "v_pages")
    if not checks.values_are_keys(call.value_size, k_pages, v_pages, names):
        v_pages = checks.array("v_pages", v_pages)
    table = checks.ints("page_table", call.page_table)
    lengths, starts = checks.ints("lengths", call.lengths), call.cu_seqlens_q
    starts = None if starts is None else checks.ints("cu_seqlens_q", starts)
    _check(query, k_pages, v_pages, table, lengths, starts)
    if starts is not None:
        checks.ends("cu_seqlens_q", starts, len(query), first=None)
    scales = dict(k_scales=call.k_scales, v_scales=call.v_scales)
    scales = {name: None if x is None else checks.array(name, x) for name, x in scales.items()}
    quantised.check(query.dtype, k_pages, v_pages, **scales)
    sinks = None if call.sinks is None else checks.array("sinks", call.sinks)
    number, factors = checks.scale(call.scale, query.shape[-1] ** -0.5, query.shape[-2])
    if starts is not None and call.query_seq_lengths is not None:
        raise ValueError(
            "query_seq_lengths cannot go with cu_seqlens_q, which says how many tokens each row "
            "has."
        )
    rows = dict(query_seq_lengths=call.query_seq_lengths, query_offset=call.query_offset)
    rows = {name: _by_row(name, x, lengths.shape) for name, x in rows.items()}
    sizes, score_mod = PagedCall.layout.sizes(k_pages.shape), call.score_mod
    if score_mod is not None:
        keys = len(table), table.shape[1] * sizes["C"]
        score_mod = BoundScoreMod.bind(
            scores.fitting(score_mod, query.shape[-2], keys), checks.sums(query.dtype)
        )
    call = call.replace(
        query=query,
        mask=None if call.mask is None else _lists(call.mask, query.shape, sizes["K"]),
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=table,
        lengths=lengths,
        cu_seqlens_q=starts,
        scale=number if factors is None else factors,
        sinks=sinks,
        score_mod=score_mod,
        **rows,
        **scales,
    )
    tables.check(call)
    return call


def _lists(mask, shape: tuple[int, ...], kv_heads: int) -> KeyLists:
    """The lists of keys of a query of this shape."""
    if not isinstance(mask, KeyLists):
        raise TypeError(
            "mask must be a masks.KeyLists, of positions in a row; got "
            f"{checks.description(mask)}. is_causal, lengths, local_window_size and a score_mod "
            "hide keys too."
        )
    *lead, T, N, _ = shape
    if not lead and mask.query_block > 1:
        raise ValueError(
            "KeyLists.query_block must be 1 with cu_seqlens_q, a list for each token; got "
            f"{mask.query_block}."
        )
    sizes = Sizes(tuple(lead), dict(T=T, N=N, K=kv_heads))
    return mask.fitting(sizes).for_mesh(sizes.lead, N, kv_heads)


def _by_row(name: str, x, shape: tuple[int, ...]):
    if x is None:
        return None
    x = checks.ints(name, x)
    if x.shape != shape and (name, x.shape) != ("query_offset", ()):
        raise ValueError(f"{name} must be int32 [B] = {shape}; got {x.shape}.")
    return x


def _check(query, k_pages, v_pages, page_table, lengths, cu_seqlens_q):
    named = dict(
        query=query, k_pages=k_pages, v_pages=v_pages, page_table=page_table, lengths=lengths
    )
    padded = "[B, T, N, H], or with cu_seqlens_q [T, N, H]"
    packed = "[T, N, H] with cu_seqlens_q [B + 1]"
    shapes = dict(query=padded if cu_seqlens_q is None else packed)
    shapes |= dict(k_pages="[P, page, K, H]", v_pages="[P, page, K, Hv]")
    shapes |= dict(page_table="[B, pages]", lengths="[B]")
    for name in [name for name in shapes if named[name] is not None]:
        shape = shapes[name]
        got = jnp.shape(named[name])
        if len(got) != shape.partition("]")[0].count(",") + 1 or 0 in got:
            raise ValueError(f"{name} must be {shape}, no size 0; got {got}.")
    if cu_seqlens_q is not None and cu_seqlens_q.ndim != 1:
        raise ValueError(
            f"cu_seqlens_q must be int32 [B + 1], in ascending order; got {cu_seqlens_q.shape}."
        )
    B = query.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    sizes = PagedCall.layout.sizes(k_pages.shape)
    if sizes["C"] % PAGE:
        raise ValueError(
            f"k_pages must be [P, page, K, H] with pages of a multiple of {PAGE} keys; got "
            f"{k_pages.shape}."
        )
    if sizes["H"] != query.shape[-1]:
        raise ValueError(
            f"k_pages must be [P, page, K, H] with the H of query {query.shape}; got "
            f"{k_pages.shape}."
        )
    if query.shape[-2] % sizes["K"]:
        raise ValueError(
            f"k_pages must be [P, page, K, H], the N = {query.shape[-2]} of query a multiple of K; "
            f"got {k_pages.shape}. Do "
            "the heads come before the pages? Here they come after them: jnp.moveaxis(x, 0, 2)."
        )
    if v_pages is not None and v_pages.shape[:-1] != k_pages.shape[:-1]:
        raise ValueError(
            f"v_pages must be [P, page, K, Hv] like k_pages {k_pages.shape}; got {v_pages.shape}."
        )
    if page_table.shape[0] != B or lengths.shape != (B,):
        raise ValueError(
            f"page_table [B, pages] and lengths [B] must have the same B rows, here {B}, as query "
            "or cu_seqlens_q; got "
            f"{page_table.shape} and {lengths.shape}."
        )
