"""`PagedCache`: keys and values in pages, which its rows take, fill, share and give back, by pure
functions for jax.jit."""

from __future__ import annotations  # help() shows annotations as they stand here

from collections.abc import Callable
from typing import NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_flash import checks
from pallas_flash.caches import ragged
from pallas_flash.caches.paged import PAGE, Options, paged_attention
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.devices import sharding
from pallas_flash.problem.page_layout import PageLayout
from pallas_flash.problem.signatures import in_lines
from pallas_flash.tiled import quantised


class PagedCache(NamedTuple):
    """Keys and values in P pages. Key i of row b is k_pages[page_table[b, i // page], i % page];
    an entry without a page is P. The fields have the names of `paged_attention`'s arguments.

    Its methods return a new cache and change nothing, so that they may be called inside of
    jax.jit.

    A token does not fit where no page is free, or where its row has max_length tokens. Outside of
    jax.jit `append` and `reserve` then raise; for this they read the cache's numbers, and so wait
    for the device. Inside, where nothing can raise, such tokens are left out and counted in `lost`,
    and the row takes no more: until it is released, `attend` gives it NaN, and its `lengths` is
    that of the tokens before. `shortage` says beforehand what an `append` would lack."""

    k_pages: Real[Array, "P page K H"]
    # of another dtype, where one of the two is in 8 bits; None: columns of the keys
    v_pages: Real[Array, "P page K H"] | None
    page_table: Int[Array, "B pages"]
    lengths: Int[Array, "B"]  # keys of each row
    users: Int[Array, "P"]  # how many rows have each page
    lost: Int[Array, "B"]  # tokens that did not fit since the row was last released
    k_scales: Float[Array, "P page K"] | None = None  # of a cache in 8 bits
    v_scales: Float[Array, "P page K"] | None = None

    @property
    def layout(self) -> PageLayout:
        return PageLayout()

    @property
    def axes(self) -> dict[str, str]:
        """A letter for each axis of a field that is no argument of `paged_attention`."""
        return dict(users="P", lost="B")

    @property
    def room(self) -> Int[Array, "B"]:
        """How many keys the pages of each row hold."""
        P, page = _pool_size(self)
        return jnp.sum(self.page_table < P, 1, dtype=jnp.int32) * page

    @unexpected.refused
    def shortage(self, tokens: Int[AnyArray, "#B"] | int) -> Shortage:
        """What an append of `tokens` more tokens to each row would lack, (pages, tokens): pages,
        int32 [], that would have to be free besides those that are; and tokens, int32 [B], of each
        row that would be beyond max_length, or follow lost ones. If all are 0, it fits."""
        tokens = self._by_row("tokens", tokens)
        cache, arrays, _ = _on_each_device(self, dict(tokens=tokens))
        return _shortage(cache, **arrays)

    @unexpected.refused
    def reserve(self, tokens: Int[AnyArray, "#B"] | int) -> PagedCache:
        """The cache with pages for `tokens` more tokens of each row. Inside of jax.jit a row gets
        them as long as there are free pages and entries of the table."""
        tokens = self._by_row("tokens", tokens)
        self._check_room("reserve", tokens)
        return _change(_reserve, self, tokens=tokens)

    @unexpected.refused
    def append(
        self,
        key: Float[AnyArray, "*B T K H"],
        value: Float[AnyArray, "*B T K H"] | None,
        count: Int[AnyArray, "#B"] | int | None = None,
        cu_seqlens: Int[AnyArray, "B+1"] | None = None,
    ) -> PagedCache:
        """The cache with the first `count` of T tokens added to each row, by default all, in pages
        as `reserve` gives them. With cu_seqlens, int32 [B + 1], key and value are [T, K, H], and
        row b takes the tokens from cu_seqlens[b] up to, not including, cu_seqlens[b + 1]."""
        B, key = len(self.page_table), checks.array("key", key)
        new, pages_of = dict(key=key), dict(key=self.k_pages)
        if self.v_pages is not None:
            new["value"], pages_of["value"] = checks.array("value", value), self.v_pages
        elif value is not None:
            raise ValueError("value must be None to match the cache, whose values are its keys'.")
        rows, letters = ((B,), "[B, T, K, H]") if cu_seqlens is None else ((), "[T, K, H]")
        for name, x in new.items():
            sizes = self.layout.sizes(pages_of[name].shape)
            fits = (*rows, *key.shape[len(rows) : len(rows) + 1], sizes["K"], sizes["H"])
            if x.shape != fits:
                raise ValueError(
                    f"{name} must be {letters} = {fits} to match the cache; got {x.shape}."
                )
        T = key.shape[-3]
        if cu_seqlens is None:
            new["count"] = jnp.clip(self._by_row("count", T if count is None else count), 0, T)
            self._check_room("append", new["count"])
            return sharding.map_cache(_append, self, new)[1]
        ends = checks.ints("cu_seqlens", cu_seqlens)
        if count is not None or ends.shape != (B + 1,):
            raise ValueError(
                f"cu_seqlens must be int32 [B + 1] = ({B + 1},), without count; got {ends.shape}."
            )
        checks.ends("cu_seqlens", ends, T, first=None)
        new["cu_seqlens"] = jnp.asarray(ends)
        if checks.is_constant(ends):
            self._check_room("append", jnp.diff(ragged.within(new["cu_seqlens"], T)))
        return sharding.map_cache(_append_ragged, self, new)[1]

    @unexpected.refused
    def release(self, rows: Bool[AnyArray, "B"]) -> PagedCache:
        """The cache with these rows empty, as if they had lost no tokens; their pages that no other
        row has are free again."""
        rows = checks.array("rows", rows)
        if rows.dtype != bool or rows.shape != self.lengths.shape:
            raise ValueError(
                f"rows must be bool [B] = {self.lengths.shape}, True: release; got {rows.dtype} "
                f"{rows.shape}."
            )
        return _change(_release, self, rows=rows)

    @unexpected.refused
    def share(self, source: Int[AnyArray, ""] | int, target: Int[AnyArray, ""] | int) -> PagedCache:
        """The cache in which row `target` begins as row `source`: both have the full pages of the
        source, and the target's own pages are released. Tokens behind the full pages are not
        shared; append them to the target. If one of the numbers is traced and is that of no row,
        nothing changes."""
        rows, B = dict(source=source, target=target), len(self.page_table)
        rows = {name: checks.ints(name, row) for name, row in rows.items()}
        for name, row in rows.items():
            if row.shape:
                raise ValueError(f"{name} must be the number of one row; got {row.shape}.")
            if isinstance(row, np.ndarray | np.generic) and not 0 <= row < B:
                raise ValueError(
                    f"{name} must be the number of a row, from 0 to {B - 1}; got {row}."
                )
        return _change(_share, self, **rows)

    @overload
    def attend(
        self, query: Float[AnyArray, "*B T N H"], **options: Unpack[Options]
    ) -> Float[Array, "*B T N Hv"]: ...
    @overload
    def attend(
        self,
        query: Float[AnyArray, "*B T N H"],
        *,
        return_residual: bool = False,
        return_max_logits: bool = False,
        **options: Unpack[Options],
    ) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "..."], ...]: ...
    @unexpected.refused
    def attend(self, query, **options):
        """`paged_attention` of the query to this cache, with its other options: value_size, if the
        cache holds keys alone. A row that lost tokens gets NaN."""
        pages = self.k_pages, self.v_pages, self.page_table, self.lengths
        scales = dict(k_scales=self.k_scales, v_scales=self.v_scales)
        results = paged_attention(query, *pages, **scales, **options)
        has_lost = self.lost > 0
        if (cu_seqlens := options.get("cu_seqlens_q")) is None:
            has_lost = has_lost[:, None]  # [B, T]
        else:
            ends = ragged.within(jnp.asarray(checks.ints("cu_seqlens_q", cu_seqlens)), len(query))
            tokens = ragged.Places.of(ends, len(query))
            has_lost = has_lost[tokens.row] & tokens.is_real  # [T]
        by_token = lambda x: has_lost.reshape(*has_lost.shape, *(1,) * (x.ndim - has_lost.ndim))
        return jax.tree.map(lambda x: jnp.where(by_token(x), jnp.nan, x), results)

    def _check_room(self, name: str, tokens):
        """Raises where the values are known and not all of `tokens` [B] new tokens of each row
        fit."""
        numbers = {name: getattr(self, name) for name in NUMBERS} | dict(tokens=tokens)
        if not all(map(checks.is_constant, numbers.values())):
            return
        numbers = jax.device_get(numbers)
        tokens, cache = numbers.pop("tokens"), self._replace(**numbers)
        if reasons := [*_why_no_room(cache, name, tokens)]:
            raise ValueError(" ".join(reasons))

    def _by_row(self, name: str, x) -> Int[Array, "B"]:
        """x as a number for each row; one number is for all."""
        x, shape = checks.ints(name, x), self.lengths.shape
        if x.shape not in (shape, (1,), ()):
            raise ValueError(
                f"{name} must be int32 [B] = {shape}, or one for all rows; got {x.shape}."
            )
        return jnp.broadcast_to(x, shape)


for _method in "append release reserve share shortage".split():
    in_lines(getattr(PagedCache, _method))


class Shortage(NamedTuple):
    """The pages and the tokens' places that an `append` would lack."""

    pages: Int[Array, ""]
    tokens: Int[Array, "B"]


NUMBERS = "page_table", "lengths", "users", "lost"  # fields that methods change besides the pages


def _pool_size(cache: PagedCache) -> tuple[int, int]:
    """The number of pages, and the keys of a page."""
    sizes = cache.layout.sizes(cache.k_pages.shape)
    return sizes["P"], sizes["C"]


def _on_each_device(cache: PagedCache, arrays: dict) -> tuple[PagedCache, dict, Callable]:
    """The cache, the arrays, and a function of a new cache. On a mesh with explicit axes the
    numbers of both are whole on each device, and the function shards those of the new cache as
    before."""
    mesh = sharding.find_explicit(sharding.collect_meshes(jax.tree.leaves((cache, arrays))))
    if mesh is None:
        return cache, arrays, lambda new: new
    placed = lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec))
    whole = lambda x: placed(x, PartitionSpec())
    numbers = {name: getattr(cache, name) for name in NUMBERS}
    specs = {name: jax.typeof(x).sharding.spec for name, x in numbers.items()}
    back = lambda new: new._replace(
        **{name: placed(getattr(new, name), spec) for name, spec in specs.items()}
    )
    return cache._replace(**jax.tree.map(whole, numbers)), jax.tree.map(whole, arrays), back


def _change(change: Callable, cache: PagedCache, **arrays) -> PagedCache:
    """The cache after change(cache, **arrays), which changes its numbers alone."""
    cache, arrays, back = _on_each_device(cache, arrays)
    return back(change(cache, **arrays))


def _needed(cache: PagedCache, tokens, xp):
    """The number of new pages that `tokens` more tokens of each row need, and the number of these
    tokens that the row's table cannot hold. xp is NumPy for a cache of NumPy's arrays."""
    (P, page), pages = _pool_size(cache), cache.page_table.shape[1]
    # a row that lost tokens takes no more: the next would follow a gap
    fitting = xp.where(cache.lost > 0, 0, xp.minimum(tokens, pages * page - cache.lengths))
    present = xp.sum(cache.page_table < P, 1, dtype=np.int32)
    return xp.maximum(-(-(cache.lengths + fitting) // page) - present, 0), tokens - fitting


def _shortage(cache: PagedCache, tokens, xp=jnp) -> Shortage:
    needed, beyond = _needed(cache, tokens, xp)
    free = xp.sum(cache.users == 0, dtype=np.int32)
    return Shortage(xp.maximum(xp.sum(needed, dtype=np.int32) - free, 0), xp.maximum(beyond, 0))


def _why_no_room(cache: PagedCache, name: str, tokens):
    """Yields a reason for each limit that `tokens` [B] more tokens would pass, in a cache whose
    numbers are NumPy's."""
    (P, page), pages = _pool_size(cache), cache.page_table.shape[1]
    lacking = _shortage(cache, tokens, np)
    if lacking.pages:
        free = np.sum(cache.users == 0)
        few = "1 page" if lacking.pages == 1 else f"{lacking.pages} pages"
        yield (
            f"{name} lacks {few}: it needs {lacking.pages + free}, and {free} of {P} "
            f"{'is' if free == 1 else 'are'} free. Release rows, or make the cache with more: "
            "paged_cache(pages=...)."
        )
    for b in np.flatnonzero(lacking.tokens)[:1]:
        yield (
            f"row {b} lost {cache.lost[b]} tokens, and takes no more until it is released."
            if cache.lost[b]
            else f"row {b} has {cache.lengths[b]} tokens and cannot take {tokens[b]} more: its "
            f"table holds {pages * page}. Make the cache with a larger max_length."
        )


def _reserve(cache: PagedCache, *, tokens) -> PagedCache:
    P, page = _pool_size(cache)
    first, number = cache.room // page, jnp.arange(cache.page_table.shape[1], dtype=jnp.int32)[None]
    needed, _ = _needed(cache, tokens, jnp)
    wanted = (number >= first[:, None]) & (number < (first + needed)[:, None])
    order = jnp.argsort(cache.users > 0, stable=True).astype(jnp.int32)  # free pages first
    nth = jnp.cumsum(wanted.ravel(), dtype=jnp.int32).reshape(wanted.shape) - 1
    given = wanted & (nth < jnp.sum(cache.users == 0, dtype=jnp.int32))
    table = jnp.where(given, order[jnp.clip(nth, 0, P - 1)], cache.page_table)
    users = cache.users.at[jnp.where(given, table, P)].add(1, mode="drop")
    return cache._replace(page_table=table, users=users)


def _release(cache: PagedCache, *, rows) -> PagedCache:
    P, _ = _pool_size(cache)
    users = cache.users.at[jnp.where(rows[:, None], cache.page_table, P)].add(-1, mode="drop")
    table = jnp.where(rows[:, None], P, cache.page_table)
    lengths, lost = (jnp.where(rows, 0, x) for x in (cache.lengths, cache.lost))
    return cache._replace(page_table=table, users=users, lengths=lengths, lost=lost)


def _share(cache: PagedCache, *, source, target) -> PagedCache:
    (P, page), B = _pool_size(cache), len(cache.page_table)
    rows = (jnp.arange(B, dtype=jnp.int32) == target) & (0 <= source) & (source < B)
    full, pages = cache.lengths[source] // page, cache.page_table[source]
    entries = jnp.where(jnp.any(rows) & (jnp.arange(len(pages), dtype=jnp.int32) < full), pages, P)
    cache = _release(cache, rows=rows)
    table = jnp.where(rows[:, None], entries, cache.page_table)
    lengths = jnp.where(rows, full * page, cache.lengths)
    users = cache.users.at[entries].add(1, mode="drop")
    return cache._replace(page_table=table, lengths=lengths, users=users)


def _append(cache: PagedCache, *, key, count, value=None) -> tuple[None, PagedCache]:
    """Appends the first `count` [B] tokens of each row."""
    row = jnp.arange(len(count), dtype=jnp.int32)[:, None]
    token = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    return None, _append_at(cache, count, row, token, True, key, value)


def _append_ragged(cache: PagedCache, *, key, cu_seqlens, value=None) -> tuple[None, PagedCache]:
    """Appends ragged tokens, one row behind the other."""
    ends = ragged.within(cu_seqlens, len(key))
    return None, _append_at(cache, jnp.diff(ends), *ragged.Places.of(ends, len(key)), key, value)


def _append_at(cache: PagedCache, count, row, token, is_real, key, value) -> PagedCache:
    """Appends `count` [B] tokens to each row. Those of key and value have the indices `row`, and
    among the new tokens of a row `token`; those that are not real are left out."""
    (P, page), pages, start = _pool_size(cache), cache.page_table.shape[1], cache.lengths
    cache = _reserve(cache, tokens=count)
    fitting = jnp.minimum(count, cache.room - start)
    lengths, lost = start + fitting, cache.lost + count - fitting
    at = start[row] + token
    number = cache.page_table[row, jnp.minimum(at // page, pages - 1)]
    number = jnp.where(is_real & (at < lengths[row]), number, P)
    slots = cache.layout.arrange(P=number, C=at % page, K=slice(None))
    cache = quantised.write(cache, slots, k_pages=key, v_pages=value)
    return cache._replace(lengths=lengths, lost=lost)


@unexpected.refused
def paged_cache(
    batch: int,
    max_length: int,
    kv_heads: int,
    head_size: int,
    *,
    pages: int,
    page: int = 64,
    dtype=jnp.bfloat16,
    value_dtype=None,
    values_are_keys: bool = False,
) -> PagedCache:
    """An empty cache of `pages` pages of `page` tokens each, for `batch` rows of up to max_length
    tokens.

    With the dtypes int8, float8_e4m3fn and float8_e5m2 the cache is quantised: each token and head
    has a float32 scale, in k_scales and v_scales. The output then
    errs by 1%, 4% and 8% (norms, for normally distributed numbers; bfloat16: 0.3%). value_dtype is
    that of the values, by default `dtype`: one of the two may be of 8 bits and the other not. On a
    CPU float8 is copied whole in each call, int8 is not.

    With values_are_keys the cache holds keys alone, whose first columns are the values:
    append(key, None) and attend(query, value_size=...).

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_flash import paged_cache
      >>> cache = paged_cache(2, 64, kv_heads=2, head_size=16, pages=10, page=8)
      >>> new = jnp.ones((2, 20, 2, 16))  # [B, T, K, H]
      >>> cache = cache.append(new, new, count=jnp.array([20, 3]))
      >>> cache.lengths.tolist(), cache.room.tolist()
      ([20, 3], [24, 8])
    """
    sizes = dict(batch=batch, max_length=max_length, kv_heads=kv_heads, head_size=head_size)
    for name, size in (sizes | dict(pages=pages)).items():
        checks.count(name, size)
    if checks.count("page", page) % PAGE:
        raise ValueError(f"page must be a multiple of {PAGE} keys; got {page}.")
    dtype = quantised.cache_dtype(dtype)
    value_dtype = dtype if value_dtype is None else quantised.cache_dtype(value_dtype)
    values_are_keys = checks.flag("values_are_keys", values_are_keys)
    shape = PageLayout().arrange(P=pages, C=page, K=kv_heads, H=head_size)
    table = jnp.full((batch, -(-max_length // page)), pages, jnp.int32)
    zeros = lambda n: jnp.zeros(n, jnp.int32)
    dtypes = [dtype, value_dtype][: 1 if values_are_keys else 2]
    key, value = (*(jnp.zeros(shape, each) for each in dtypes), None)[:2]
    scales = (quantised.empty_scales(shape, each) for each in dtypes)
    return PagedCache(key, value, table, zeros(batch), zeros(pages), zeros(batch), *scales)
