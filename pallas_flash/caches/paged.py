"""`paged_attention`: attention of a few new tokens to keys and values that lie in pages, which rows may share."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_flash import arguments, autodiff, backends, checks, decode, dispatch, modes, quantised, scores
from pallas_flash.arguments import Problem
from pallas_flash.attention import Implementation
from pallas_flash.backends import Backend
from pallas_flash.checks import AnyArray
from pallas_flash.devices import sharding
from pallas_flash.kernels import device
from pallas_flash.machine import selfcheck
from pallas_flash.rules import reads
from pallas_flash.rules.score import Score
from pallas_flash.rules.visibility import Visibility

PAGE = 8  # a page is a multiple of so many keys
IN_PLACE = ("hopper", "portable", "blockwise")  # read pages where they lie


class _Options(TypedDict, total=False):
    """For type checkers: the arguments of `paged_attention` by name, without return_residual, which tells its overloads apart."""

    query_seq_lengths: Int[AnyArray, "B"] | None
    query_offset: Int[AnyArray, "B"] | None
    scale: float | Float[AnyArray, "..."] | None
    is_causal: bool
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, "N"] | None
    k_scales: Float[AnyArray, "P page K"] | None
    v_scales: Float[AnyArray, "P page K"] | None
    score_mod: Callable[..., Array] | None
    implementation: Implementation | None


_Query = Float[AnyArray, "B T N H"]
_Keys = Real[AnyArray, "P page K H"]
_Values = Real[AnyArray, "P page K Hv"]
_Table = Int[AnyArray, "B pages"]
_Lengths = Int[AnyArray, "B"]
_Output = Float[Array, "B T N Hv"]
_Residual = Float[Array, "B T N"]


@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> _Output: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[_Output, _Residual]: ...
@overload
def paged_attention(
    query: _Query,
    k_pages: _Keys,
    v_pages: _Values,
    page_table: _Table,
    lengths: _Lengths,
    *,
    return_residual: bool,
    **options: Unpack[_Options],
) -> _Output | tuple[_Output, _Residual]: ...
def paged_attention(
    query: Float[AnyArray, "B T N H"],
    k_pages: Real[AnyArray, "P page K H"],
    v_pages: Real[AnyArray, "P page K Hv"],
    page_table: Int[AnyArray, "B pages"],
    lengths: Int[AnyArray, "B"],
    *,
    query_seq_lengths: Int[AnyArray, "B"] | None = None,
    query_offset: Int[AnyArray, "B"] | None = None,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    k_scales: Float[AnyArray, "P page K"] | None = None,
    v_scales: Float[AnyArray, "P page K"] | None = None,
    score_mod: Callable[..., Array] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """`flash_attention` of the newest tokens of each row to the row's keys, which lie in pages.

    Row b has lengths[b] keys; key i of it is k_pages[page_table[b, i // page], i % page]. Pages may be in any order, and rows may
    share them. An entry of the table that no visible key needs may be anything; an entry that is needed must be a page from 0 to
    P - 1. Any other number is taken for the nearest page, and the result is that of this page's keys. There is no derivative. On
    a mesh with explicit axes the batch and the heads may be sharded, the pages by heads alone.

    Args:
      query: [B, T, N, H], the newest tokens of each row; N is a multiple of K. Up to T N / K = 64 pages are read where they lie.
        For more, as in a prompt, all pages in the table are first copied in order, and the kernels of `flash_attention` run;
        "blockwise" copies them only if they hold no more than T N / K keys.
      k_pages: [P, page, K, H], where page is a multiple of 8.
      v_pages: [P, page, K, Hv].
      page_table: int32 [B, pages of a row].
      lengths: int32 [B], how many keys each row has, those of its new tokens included. Keys of a page beyond them may be NaN.
      query_seq_lengths: int32 [B]: how many of the T queries of each row are real; all by default.
      query_offset: int32 [B], the position of each row's first query; by default the queries are at the last of the row's keys.
      scale, is_causal, local_window_size, logits_soft_cap, sinks, score_mod, return_residual: as in `flash_attention`; causal by
        default.
      k_scales, v_scales: float32 [P, page, K], for pages of int8 or float8_e4m3fn: a key is its entry in the page times its
        scale, as `PagedCache` makes them. Pages that are read where they lie stay as they are in memory: logits and weights are
        multiplied by the scales. A copy has the query's dtype.
      implementation: as in `flash_attention`; "hopper" reads pages where they lie if they are of 8, 16, 32, or a multiple of 64
        keys, but not in 8 bits, nor with a score_mod. "reference", "flash1" and "standard" always copy them.

    Returns:
      The output [B, T, N, Hv] in the query's dtype; with return_residual, the pair (output, lse), lse float32 [B, T, N].

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot run this call, or a derivative is asked for.
    """
    query, k_pages, v_pages = (checks.array(*x) for x in (("query", query), ("k_pages", k_pages), ("v_pages", v_pages)))
    table, lengths = checks.ints("page_table", page_table), checks.ints("lengths", lengths)
    _check(query, k_pages, v_pages, table, lengths)
    scales = dict(k_scales=k_scales, v_scales=v_scales)
    scales = {name: None if x is None else checks.array(name, x) for name, x in scales.items()}
    quantised.check(k_pages, v_pages, **scales)
    sinks = None if sinks is None else checks.array("sinks", sinks)
    number, factors = checks.scale(scale, query.shape[-1] ** -0.5, query.shape[2])
    call = dict(query=query, k_pages=k_pages, v_pages=v_pages, page_table=table, lengths=lengths, sinks=sinks)
    for name, x in dict(query_seq_lengths=query_seq_lengths, query_offset=query_offset).items():
        call[name] = None if x is None else checks.ints(name, x)
        if x is not None and call[name].shape != lengths.shape and (name, call[name].shape) != ("query_offset", ()):
            raise ValueError(f"{name} must be int32 [B] = {lengths.shape}; got {call[name].shape}.")
    if local_window_size is not None:
        window = checks.window(local_window_size)
        local_window_size = window.left, window.right
    call |= dict(is_causal=checks.flag("is_causal", is_causal), local_window_size=local_window_size)
    call |= dict(logits_soft_cap=checks.number("logits_soft_cap", logits_soft_cap, None, positive=True))
    if score_mod is not None:
        call["score_mod"] = Score.of_call(scores.fitting(score_mod, query.shape[2]), checks.sums(query.dtype))
    call |= dict(implementation=implementation, mask=None, context=None, scale=number if factors is None else factors, **scales)
    return_residual = checks.flag("return_residual", return_residual)
    mesh = sharding.mesh_of(call)
    if mesh is not None and score_mod is not None:
        call["score_mod"] = call["score_mod"].numbered(lengths.shape, query.shape[2])
    o, lse = _attend(**call) if mesh is None else sharding.pages_by_device(_attend, call, mesh)
    return (o, lse) if return_residual else o


def _attend(implementation, **call):
    arrays = {name: x for name, x in call.items() if checks.is_array(x) or isinstance(x, Score)}
    static = {name: x for name, x in call.items() if name not in arrays}
    return _attend_jit(implementation, tuple(static.items()), arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_jit(implementation, static, arrays):
    call = dict(static) | modes.no_first(arrays)
    del call["context"]
    k_pages, v_pages, table, lengths = (call.pop(name) for name in ("k_pages", "v_pages", "page_table", "lengths"))
    k_scales, v_scales = call.pop("k_scales"), call.pop("v_scales")
    (B, pages), page = table.shape, k_pages.shape[1]
    if call["query_offset"] is None:
        new = call["query"].shape[1] if call["query_seq_lengths"] is None else call["query_seq_lengths"]
        call["query_offset"] = jnp.minimum(lengths, pages * page) - new
    dtype = k_pages.dtype if k_scales is None else call["query"].dtype
    like = lambda x: jnp.broadcast_to(x[0, 0].astype(dtype), (B, pages * page, *x.shape[2:]))  # never made: its shape is read
    call |= dict.fromkeys(("bias", "query_segment_ids", "key_value_segment_ids", "dropout_rng"))
    call |= dict(key=like(k_pages), value=like(v_pages), key_value_seq_lengths=lengths, dropout_rate=0.0, deterministic=True)
    problem, operands = arguments.normalise(**call)
    backend = _chosen(problem, page, None if k_scales is None else str(k_pages.dtype), implementation)
    if _copies(backend.name, problem):
        copied = functools.partial(_in_order, problem, operands.visibility, table, dtype)
        return dispatch.attend(backend.name, None, **call | dict(key=copied(k_pages, k_scales), value=copied(v_pages, v_scales)))
    scales = () if k_scales is None else ((k_scales, v_scales),)
    operands, scales = reads.vary_alike((operands._replace(key=k_pages, value=v_pages), scales))
    module = importlib.import_module(f"pallas_flash.{'' if backend.name == 'blockwise' else 'kernels.'}{backend.name}")
    forward = importlib.import_module(f"{module.__name__}.decode").forward
    o, stats = forward(problem, module.decode_tiles(problem, page), operands, jnp.clip(table, 0, k_pages.shape[0] - 1), *scales)
    return o, jnp.swapaxes(autodiff.natural_lse(backend.unit(problem), operands, stats), 1, 2)


def _in_order(problem: Problem, seen: Visibility, table, dtype, pages, scales):
    """The keys or values [B, S, K, n] of the rows, 0 where no query of a row looks: there may be NaN."""
    p = problem
    x = quantised.taken(pages, table)  # [B, pages, page, K, n]
    x = x if scales is None else (x.astype(jnp.float32) * quantised.taken(scales, table)[..., None]).astype(dtype)
    by_query = seen.narrow(Visibility.BY_BATCH, lambda a: a[:, None])
    row, key = jnp.arange(p.queries, dtype=jnp.int32)[None], jnp.arange(p.keys, dtype=jnp.int32)[:, None, None]
    first, last = (n[:, None, None, None] for n in decode.reach(*jnp.broadcast_arrays(*by_query.interval(row), row)[:2], p.keys))
    return jnp.where((first <= key) & (key < last), x.reshape(p.batch, p.keys, *x.shape[3:]), 0)


def _copies(name: str, problem: Problem) -> bool:
    """Whether an implementation attends to a copy of the pages in order."""
    p = problem
    if name == "blockwise":  # what nobody sees it does not read: a table may be much longer than its rows
        return decode.why_not(p) is not None and p.keys <= p.queries * p.group
    return name not in IN_PLACE or decode.why_not(p) is not None


def _chosen(problem: Problem, page: int, stored: str | None, implementation: str | None) -> Backend:
    asked = selfcheck.asked_for(implementation)
    if asked is not None and (why_not := _why_not(asked, problem, page, stored)):
        cannot = f"implementation {asked!r} cannot run this call of paged_attention"
        raise NotImplementedError(f"{cannot}: {why_not}. The call: {problem}.")
    decoding = dataclasses.replace(problem, keys=max(problem.keys, decode.KEYS))  # the kernel is the one without pages
    checked = lambda backend: problem if _copies(backend.name, problem) else decoding
    here = lambda backend: _why_not(backend.name, problem, page, stored) or selfcheck.why_not(backend, checked(backend))
    return backends.choose(problem, asked, here).backend


def _why_not(name: str, problem: Problem, page: int, stored: str | None) -> str | None:
    """Why an implementation does not read pages of this size, or `stored` in these 8 bits, where they lie; None: it does, or it
    copies them."""
    if name == "blockwise" or _copies(name, problem):
        return None
    if name == "hopper" and problem.score is not None:
        return "its decoding takes no score_mod: portable and blockwise do"
    if name == "hopper" and stored:
        return f"wgmma multiplies pages as they lie, in {problem.dtype}; got {stored}: portable and blockwise take them"
    capability = device.compute_capability()
    if stored == "float8_e4m3fn" and capability and capability < 8.9:
        return f"float8_e4m3fn needs an NVIDIA GPU of compute capability 8.9 or higher; this one has {capability}: int8 does not"
    if name == "hopper" and page % 64 and 64 % page:
        return f"it takes pages of 8, 16, 32 or a multiple of 64 keys; got {page}"
    if name == "hopper" and problem.value_size > 128:
        return f"pages of values wider than 128 leave no registers; got {problem.value_size}"
    return None


def _check(query, k_pages, v_pages, page_table, lengths):
    named = dict(query=query, k_pages=k_pages, v_pages=v_pages, page_table=page_table, lengths=lengths)
    shapes = dict(query="[B, T, N, H]", k_pages="[P, page, K, H]", v_pages="[P, page, K, Hv]")
    shapes |= dict(page_table="[B, pages]", lengths="[B]")
    for name, shape in shapes.items():
        got = jnp.shape(named[name])
        if len(got) != shape.count(",") + 1 or 0 in got:
            raise ValueError(f"{name} must be {shape}, no size 0; got {got}.")
    B = query.shape[0]
    if k_pages.shape[1] % PAGE:
        raise ValueError(f"k_pages must be [P, page, K, H] with pages of a multiple of {PAGE} keys; got {k_pages.shape}.")
    if k_pages.shape[3] != query.shape[3]:
        raise ValueError(f"k_pages must be [P, page, K, H] with the H of query {query.shape}; got {k_pages.shape}.")
    if query.shape[2] % k_pages.shape[2]:
        raise ValueError(
            f"k_pages must be [P, page, K, H], the N = {query.shape[2]} of query a multiple of K; got {k_pages.shape}. Do "
            "the heads come before the pages? Here they come after them: jnp.moveaxis(x, 0, 2)."
        )
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(f"v_pages must be [P, page, K, Hv] like k_pages {k_pages.shape}; got {v_pages.shape}.")
    if page_table.shape[0] != B or jnp.shape(lengths) != (B,):
        raise ValueError(
            f"page_table [B, pages] and lengths [B] must have the B = {B} rows of query; got {page_table.shape} and "
            f"{jnp.shape(lengths)}."
        )
