"""`PagedCache`: keys and values in pages, which its rows take, fill, share and give back. Pure
functions, for jax.jit."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_flash import checks, quantised
from pallas_flash.caches import ragged
from pallas_flash.caches.paged import PAGE
from pallas_flash.checks import AnyArray
from pallas_flash.devices import sharding


class PagedCache(NamedTuple):
    """Keys and values in P pages. Key i of row b is k_pages[page_table[b, i // page], i % page];
    an entry without a page is P. The fields have the names of `paged_attention`'s arguments.

    Its methods return a new cache and change nothing, so that they may be called inside of
    jax.jit."""

    k_pages: Real[Array, "P page K H"]
    # of another dtype, where one of the two is in 8 bits; None: columns of the keys
    v_pages: Real[Array, "P page K H"] | None
    page_table: Int[Array, "B pages"]
    lengths: Int[Array, "B"]  # keys of each row
    users: Int[Array, "P"]  # how many rows have each page
    k_scales: Float[Array, "P page K"] | None = None  # of a cache in 8 bits
    v_scales: Float[Array, "P page K"] | None = None

    @property
    def room(self) -> Int[Array, "B"]:
        """How many keys the pages of each row hold."""
        P, page = self.k_pages.shape[:2]
        return jnp.sum(self.page_table < P, 1, dtype=jnp.int32) * page

    def reserve(self, tokens: Int[AnyArray, "#B"] | int) -> "PagedCache":
        """The cache with pages for `tokens` more tokens of each row, as long as there are free
        pages and entries of the table."""
        return _changed(_reserved, self, tokens=self._by_row("tokens", tokens))

    def append(
        self,
        key: Float[AnyArray, "*B T K H"],
        value: Float[AnyArray, "*B T K H"] | None,
        count: Int[AnyArray, "#B"] | int | None = None,
        cu_seqlens: Int[AnyArray, "B+1"] | None = None,
    ) -> "PagedCache":
        """The cache with the first `count` of T tokens added to each row, by default all, in pages
        as `reserve` gives them. With cu_seqlens, int32 [B + 1], key and value are [T, K, H], and
        row b takes the tokens from cu_seqlens[b] up to, not including, cu_seqlens[b + 1]. Tokens
        for which there is no room are left out; `lengths` says how many there are."""
        B, key = len(self.page_table), checks.array("key", key)
        new, slots_of = dict(key=key), dict(key=self.k_pages)
        if self.v_pages is not None:
            new["value"], slots_of["value"] = checks.array("value", value), self.v_pages
        elif value is not None:
            raise ValueError("value must be None to match the cache, whose values are its keys'.")
        rows, letters = ((B,), "[B, T, K, H]") if cu_seqlens is None else ((), "[T, K, H]")
        for name, x in new.items():
            slots = slots_of[name]
            fits = (*rows, *key.shape[len(rows) : len(rows) + 1], *slots.shape[2:])
            if x.shape != fits:
                raise ValueError(
                    f"{name} must be {letters} = {fits} to match the cache; got {x.shape}."
                )
        T = key.shape[-3]
        if cu_seqlens is None:
            new["count"] = jnp.clip(self._by_row("count", T if count is None else count), 0, T)
            return sharding.map_cache(_appended, self, new)[1]
        ends = checks.ints("cu_seqlens", cu_seqlens)
        if count is not None or ends.shape != (B + 1,):
            raise ValueError(
                f"cu_seqlens must be int32 [B + 1] = ({B + 1},), without count; got {ends.shape}."
            )
        ragged.check("cu_seqlens", ends, T)
        new["cu_seqlens"] = jnp.asarray(ends)
        return sharding.map_cache(_appended_ragged, self, new)[1]

    def release(self, rows: Bool[AnyArray, "B"]) -> "PagedCache":
        """The cache with these rows empty; their pages that no other row has are free again."""
        rows = jnp.asarray(rows)
        if rows.dtype != bool or rows.shape != self.lengths.shape:
            raise ValueError(
                f"rows must be bool [B] = {self.lengths.shape}, True: release; got {rows.dtype} "
                f"{rows.shape}."
            )
        return _changed(_released, self, rows=rows)

    def share(
        self, source: Int[AnyArray, ""] | int, target: Int[AnyArray, ""] | int
    ) -> "PagedCache":
        """The cache in which row `target` begins as row `source`: both have the full pages of the
        source, and the target's own pages are released. Tokens behind the full pages are not
        shared; append them to the target. If one of the numbers is traced and is that of no row,
        nothing changes."""
        rows, B = (
            {
                name: checks.ints(name, row)
                for name, row in dict(source=source, target=target).items()
            },
            len(self.page_table),
        )
        for name, row in rows.items():
            if row.shape:
                raise ValueError(f"{name} must be the number of one row; got {row.shape}.")
            if isinstance(row, np.ndarray | np.generic) and not 0 <= row < B:
                raise ValueError(
                    f"{name} must be the number of a row, from 0 to {B - 1}; got {row}."
                )
        return _changed(_shared, self, **rows)

    def _by_row(self, name: str, x) -> Int[Array, "B"]:
        """A number for each row, given so or as one for all."""
        x, shape = checks.ints(name, x), self.lengths.shape
        if x.shape not in (shape, (1,), ()):
            raise ValueError(
                f"{name} must be int32 [B] = {shape}, or one for all rows; got {x.shape}."
            )
        return jnp.broadcast_to(x, shape)


def _changed(change: Callable, cache: PagedCache, **arrays) -> PagedCache:
    """change(cache, **arrays), which changes page_table, lengths and users; on a mesh with explicit
    axes, meanwhile, each device has these whole."""
    numbers = {name: getattr(cache, name) for name in ("page_table", "lengths", "users")}
    mesh = sharding.find_explicit(sharding.collect_meshes(jax.tree.leaves((cache, arrays))))
    if mesh is None:
        return change(cache, **arrays)
    placed = lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec))
    whole = lambda x: placed(x, PartitionSpec())
    new = change(cache._replace(**jax.tree.map(whole, numbers)), **jax.tree.map(whole, arrays))
    return new._replace(
        **{
            name: placed(getattr(new, name), jax.typeof(x).sharding.spec)
            for name, x in numbers.items()
        }
    )


def _reserved(cache: PagedCache, *, tokens) -> PagedCache:
    P, page = cache.k_pages.shape[:2]
    held, number = cache.room // page, jnp.arange(cache.page_table.shape[1], dtype=jnp.int32)[None]
    more = jnp.maximum(-(-(cache.lengths + tokens) // page) - held, 0)
    wanted = (number >= held[:, None]) & (number < (held + more)[:, None])
    order = jnp.argsort(cache.users > 0, stable=True).astype(jnp.int32)  # free pages first
    nth = jnp.cumsum(wanted.ravel(), dtype=jnp.int32).reshape(wanted.shape) - 1
    given = wanted & (nth < jnp.sum(cache.users == 0, dtype=jnp.int32))
    table = jnp.where(given, order[jnp.clip(nth, 0, P - 1)], cache.page_table)
    users = cache.users.at[jnp.where(given, table, P)].add(1, mode="drop")
    return cache._replace(page_table=table, users=users)


def _released(cache: PagedCache, *, rows) -> PagedCache:
    P = cache.k_pages.shape[0]
    users = cache.users.at[jnp.where(rows[:, None], cache.page_table, P)].add(-1, mode="drop")
    table = jnp.where(rows[:, None], P, cache.page_table)
    return cache._replace(page_table=table, users=users, lengths=jnp.where(rows, 0, cache.lengths))


def _shared(cache: PagedCache, *, source, target) -> PagedCache:
    (P, page), B = cache.k_pages.shape[:2], len(cache.page_table)
    rows = (jnp.arange(B, dtype=jnp.int32) == target) & (0 <= source) & (source < B)
    full, pages = cache.lengths[source] // page, cache.page_table[source]
    entries = jnp.where(jnp.any(rows) & (jnp.arange(len(pages), dtype=jnp.int32) < full), pages, P)
    cache = _released(cache, rows=rows)
    table, lengths = (
        jnp.where(rows[:, None], entries, cache.page_table),
        jnp.where(rows, full * page, cache.lengths),
    )
    return cache._replace(
        page_table=table, lengths=lengths, users=cache.users.at[entries].add(1, mode="drop")
    )


def _appended(cache: PagedCache, *, key, count, value=None) -> tuple[None, PagedCache]:
    """With the first `count` [B] of the tokens of each row."""
    row, token = (
        jnp.arange(len(count), dtype=jnp.int32)[:, None],
        jnp.arange(key.shape[1], dtype=jnp.int32)[None],
    )
    return None, _with_tokens(cache, count, row, token, True, key, value)


def _appended_ragged(cache: PagedCache, *, key, cu_seqlens, value=None) -> tuple[None, PagedCache]:
    """With the tokens of all rows, one row behind the other."""
    ends = ragged.within(cu_seqlens, len(key))
    return None, _with_tokens(cache, jnp.diff(ends), *ragged.Places.of(ends, len(key)), key, value)


def _with_tokens(cache: PagedCache, count, row, token, is_real, key, value) -> PagedCache:
    """With `count` [B] more tokens of each row; key and value are those with these rows and, among
    the row's, these numbers."""
    (P, page), pages, start = cache.k_pages.shape[:2], cache.page_table.shape[1], cache.lengths
    cache = _reserved(cache, tokens=count)
    lengths = jnp.minimum(start + count, cache.room).astype(start.dtype)
    at = start[row] + token
    entry = cache.page_table[row, jnp.minimum(at // page, pages - 1)]
    to = jnp.where(is_real & (at < lengths[row]), entry, P), at % page
    return quantised.written(cache, to, k_pages=key, v_pages=value)._replace(lengths=lengths)


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
    has a float32 scale, which `paged_attention` takes as k_scales and v_scales. The output then
    errs by 1%, 4% and 8% (norms, for normally distributed numbers; bfloat16: 0.3%). value_dtype is
    that of the values, by default `dtype`: one of the two may be of 8 bits and the other not. On a
    CPU float8 is copied whole in each call, int8 is not.

    With values_are_keys the cache holds keys alone, of which `paged_attention` takes the first
    columns as values: append(key, None), and paged_attention(query, cache.k_pages, None,
    cache.page_table, cache.lengths, value_size=...).

    Examples:
      >>> import jax.numpy as jnp
      >>> from pallas_flash import paged_cache
      >>> cache = paged_cache(2, 64, kv_heads=2, head_size=16, pages=10, page=8)
      >>> new = jnp.ones((2, 20, 2, 16))  # [B, T, K, H]
      >>> cache = cache.append(new, new, count=jnp.array([20, 3]))
      >>> cache.lengths.tolist(), cache.room.tolist()
      ([20, 3], [24, 8])
    """
    if page % PAGE or page <= 0:
        raise ValueError(f"page must be a multiple of {PAGE} keys; got {page}.")
    shape = pages, page, kv_heads, head_size
    table, zeros = (
        jnp.full((batch, -(-max_length // page)), pages, jnp.int32),
        lambda n: jnp.zeros(n, jnp.int32),
    )
    dtypes = [dtype, dtype if value_dtype is None else value_dtype][: 1 if values_are_keys else 2]
    key, value = (*(jnp.zeros(shape, each) for each in dtypes), None)[:2]
    scales = (quantised.empty_scales(shape, each) for each in dtypes)
    return PagedCache(key, value, table, zeros(batch), zeros(pages), *scales)
