"""`PagedCache`: keys and values in pages, which its rows take, fill, share and give back, by pure
functions for jax.jit."""

from __future__ import annotations  # help() shows annotations as they stand here

from typing import NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from pallas_flash import checks
from pallas_flash.caches import allocator, attend
from pallas_flash.caches.allocator import Shortage
from pallas_flash.caches.paged import PAGE, Options, paged_attention
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.devices import sharding
from pallas_flash.problem import arguments
from pallas_flash.problem.call import in_lines
from pallas_flash.problem.page_layout import PageLayout
from pallas_flash.tiled import quantised


class PagedCache(NamedTuple):
    """Keys and values in P pages. Key i of row b is k_pages[page_table[b, i // page], i % page];
    an entry without a page is P. The fields have the names of `paged_attention`'s arguments.

    Its methods return a new cache and change nothing, so that they may be called inside of
    jax.jit.

    A token does not fit where no page is free, or where its row has max_length tokens. Outside of
    jax.jit `append` and `reserve` then raise; for this they read the cache's numbers, and so wait
    for the device. Inside, where nothing can raise, such tokens are left out and counted in `lost`,
    and the row takes no more. Until it is released, `attend` gives it NaN, and its `lengths` is
    that of the tokens before. `shortage` says beforehand what an `append` would lack."""

    k_pages: Real[Array, "P page K H"]
    # of another dtype, where one of the two is in 8 bits; None: columns of the keys
    v_pages: Real[Array, "P page K H"] | None
    page_table: Int[Array, "B pages"]
    lengths: Int[Array, "B"]  # keys of each row
    users: Int[Array, "P"]  # how many rows have each page
    lost: Int[Array, "B"]  # tokens that did not fit since the row was last released
    appended: Int[Array, "B"]  # tokens that each row got from the last append
    append_length: Int[Array, ""]  # the T of that append; 0: its tokens were packed
    k_scales: Float[Array, "P page K"] | None = None  # of a cache in 8 bits
    v_scales: Float[Array, "P page K"] | None = None

    @property
    def layout(self) -> PageLayout:
        return PageLayout()

    @property
    def axes(self) -> dict[str, str]:
        """A letter for each axis of a field that is no argument of `paged_attention`."""
        return dict(users="P", lost="B", appended="B", append_length="")

    @property
    def room(self) -> Int[Array, "B"]:
        """How many keys the pages of each row hold."""
        P, page = allocator.pool_size(self)
        return jnp.sum(self.page_table < P, 1, dtype=jnp.int32) * page

    @unexpected.refused
    def shortage(self, tokens: Int[AnyArray, "#B"] | int) -> Shortage:
        """What an append of `tokens` more tokens to each row would lack, (pages, tokens). Pages,
        int32 [], would have to be free besides the free ones. Tokens, int32 [B], are those of each
        row that would be beyond max_length, or follow lost ones. If all are 0, it fits."""
        tokens = jnp.asarray(self._by_row("tokens", tokens))
        cache, arrays, _ = allocator.on_each_device(self, dict(tokens=tokens))
        return allocator.shortage(cache, **arrays)

    @unexpected.refused
    def reserve(self, tokens: Int[AnyArray, "#B"] | int) -> PagedCache:
        """The cache with pages for `tokens` more tokens of each row. Inside of jax.jit a row gets
        them as long as there are free pages and entries of the table."""
        tokens = self._by_row("tokens", tokens)
        self._check_room("reserve", tokens)
        return allocator.change(allocator.reserve, self, tokens=jnp.asarray(tokens))

    @unexpected.refused
    def append(
        self,
        key: Float[AnyArray, "*B T K H"],
        value: Float[AnyArray, "*B T K H"] | None,
        count: Int[AnyArray, "#B"] | int | None = None,
        cu_seqlens: Int[AnyArray, "B+1"] | None = None,
        *,
        cu_seqlens_q: Int[AnyArray, "B+1"] | None = None,
    ) -> PagedCache:
        """The cache with the first `count` of T tokens added to each row, by default all, in pages
        as `reserve` gives them. With cu_seqlens, or cu_seqlens_q, int32 [B + 1], key and value are
        [T, K, H], and row b takes the tokens from cu_seqlens[b] up to, not including,
        cu_seqlens[b + 1]. A cache in 8 bits quantises them."""
        name, cu_seqlens = _cu_seqlens(cu_seqlens, cu_seqlens_q)
        new = dict(key=checks.array("key", key))
        if self.v_pages is not None:
            new["value"] = checks.array("value", value)
        elif value is not None:
            raise ValueError("value must be None to match the cache, whose values are its keys'.")
        self._check_tokens(new, cu_seqlens is not None)
        T = new["key"].shape[-3]
        if cu_seqlens is None:
            count = self._by_row("count", T if count is None else count, T)
            self._check_room("append", count)
            new["count"] = jnp.clip(count, 0, T)
            return sharding.map_cache(allocator.append, self, new)[1]
        if count is not None:
            raise ValueError(f"count cannot go with {name}, which says how many tokens a row gets.")
        ends = self._ends(name, cu_seqlens, T)
        new["cu_seqlens"] = jnp.asarray(ends)
        if checks.is_constant(ends):
            self._check_room("append", jnp.diff(attend.clip_ends(new["cu_seqlens"], T)))
        return sharding.map_cache(allocator.append_ragged, self, new)[1]

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
        return allocator.change(allocator.release, self, rows=rows)

    @unexpected.refused
    def share(self, source: Int[AnyArray, ""] | int, target: Int[AnyArray, ""] | int) -> PagedCache:
        """The cache in which row `target` begins as row `source`: both have the full pages of the
        source, and the target's own pages are released. Tokens behind the full pages are not
        shared; append them to the target. If both are one row, or one of the numbers is traced and
        is that of no row, nothing changes."""
        rows, B = dict(source=source, target=target), len(self.page_table)
        rows = {name: checks.ints(name, row) for name, row in rows.items()}
        for name, row in rows.items():
            if row.shape:
                raise ValueError(f"{name} must be the number of one row; got {row.shape}.")
            if isinstance(row, np.ndarray | np.generic) and not 0 <= row < B:
                raise ValueError(
                    f"{name} must be the number of a row, from 0 to {B - 1}; got {row}."
                )
        return allocator.change(allocator.share, self, **rows)

    @overload
    def attend(
        self,
        query: Float[AnyArray, "*B T N H"],
        *,
        cu_seqlens: Int[AnyArray, "B+1"] | None = None,
        **options: Unpack[Options],
    ) -> Float[Array, "*B T N Hv"]: ...
    @overload
    def attend(
        self,
        query: Float[AnyArray, "*B T N H"],
        *,
        cu_seqlens: Int[AnyArray, "B+1"] | None = None,
        return_residual: bool = False,
        return_max_logits: bool = False,
        **options: Unpack[Options],
    ) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "..."], ...]: ...
    @unexpected.refused
    def attend(self, query, *, cu_seqlens=None, **options):
        """`paged_attention` of the query to this cache, with its other options: value_size, if the
        cache holds keys alone. cu_seqlens is another name of cu_seqlens_q.

        A query [B, T, N, H] with T > 1 and the T of the last `append` is that of the tokens
        appended. Row b has as many real queries as it got tokens (query_seq_lengths), so that a
        padded prompt is right as it is. A query of another T, or with T = 1, is that of the last T
        tokens of each row. query_seq_lengths and query_offset say otherwise. A row that lost tokens
        gets NaN."""
        query = checks.array("query", query)
        pages = dict(k_pages=self.k_pages, v_pages=self.v_pages, page_table=self.page_table)
        pages |= dict(lengths=self.lengths, k_scales=self.k_scales, v_scales=self.v_scales)
        if given := [name for name in options if name in pages]:
            raise TypeError(
                f"attend() passes the cache's own {' and '.join(given)}: leave out what is not of "
                "the query. query_seq_lengths says how many queries of a row are real."
            )
        name, cu_seqlens = _cu_seqlens(cu_seqlens, options.pop("cu_seqlens_q", None))
        if cu_seqlens is not None:
            T = len(query) if query.ndim == 3 else None
            cu_seqlens = self._ends(name, cu_seqlens, T)
        has_lost, is_padded = self.lost > 0, cu_seqlens is None and query.ndim == 4
        if not (is_padded and query.shape[1] == 1):
            if checks.is_known(self.lost):  # the queries of tokens that were lost do not raise
                pages["lengths"] = jnp.where(has_lost, 0, self.lengths)
            options |= self._queries(query.shape[1], options) if is_padded else {}
        results = paged_attention(query, **pages, cu_seqlens_q=cu_seqlens, **options)
        if cu_seqlens is None:
            has_lost = has_lost[:, None]  # [B, T]
        else:
            ends = attend.clip_ends(jnp.asarray(cu_seqlens), len(query))
            tokens = attend.Places.locate(ends, len(query))
            has_lost = has_lost[tokens.row] & tokens.is_real  # [T]
        by_token = lambda x: has_lost.reshape(*has_lost.shape, *(1,) * (x.ndim - has_lost.ndim))
        return jax.tree.map(lambda x: jnp.where(by_token(x), jnp.nan, x), results)

    def _queries(self, T: int, options: dict) -> dict:
        """Which of T queries are real and where they are, unless the options say it."""
        if any(options.get(name) is not None for name in ("query_seq_lengths", "query_offset")):
            return {}
        count = jnp.where(self.append_length == T, self.appended, T)
        if checks.flag("is_causal", options.get("is_causal", True)):
            return dict(query_seq_lengths=count)
        # all may be real, as a decoder's queries to an encoder's keys
        return dict(query_offset=self.lengths - count)

    def _check_room(self, name: str, tokens):
        """Raises where the values are known and not all of `tokens` [B] new tokens of each row
        fit."""
        numbers = {name: getattr(self, name) for name in allocator.ROOM} | dict(tokens=tokens)
        if not all(map(checks.is_constant, numbers.values())):
            return
        numbers = jax.device_get(numbers)
        tokens, cache = numbers.pop("tokens"), self._replace(**numbers)
        if reasons := [*allocator.why_no_room(cache, name, tokens)]:
            raise ValueError(" ".join(reasons))

    def _check_tokens(self, new: dict[str, Array], is_packed: bool):
        """Raises where keys and values, under these names, do not fit the cache or each other."""
        rows, letters = ((), "[T, K, H]") if is_packed else (self.lengths.shape, "[B, T, K, H]")
        pages_of = dict(key=self.k_pages, value=self.v_pages)
        for name, x in new.items():
            sizes, first = self.layout.sizes(pages_of[name].shape), len(rows)
            fits = (*rows, *new["key"].shape[first : first + 1], sizes["K"], sizes["H"])
            if x.shape != fits:
                raise ValueError(
                    f"{name} must be {letters} = {fits} to match the cache; got {x.shape}."
                )
            if str(x.dtype) not in arguments.DTYPES:
                raise TypeError(
                    f"{name} must be {', '.join(arguments.DTYPES)}, as a model computes it; a "
                    f"cache in 8 bits quantises it. Got {x.dtype}. If it is quantised, append "
                    f"{name}.astype(jnp.float32) times its scales."
                )

    def _ends(self, name: str, x, T: int | None = None) -> Int[AnyArray, "B+1"]:
        """x as the ends of the rows among T tokens."""
        x, shape = checks.ints(name, x), (len(self.lengths) + 1,)
        if x.shape != shape:
            raise ValueError(f"{name} must be int32 [B + 1] = {shape}; got {x.shape}.")
        checks.ends(name, x, T, first=None)
        return x

    def _by_row(self, name: str, x, most: int | None = None) -> Int[AnyArray, "B"]:
        """x as a number for each row, NumPy's where it is known; one number is for all."""
        x, shape = checks.ints(name, x), self.lengths.shape
        if x.shape not in (shape, (1,), ()):
            raise ValueError(
                f"{name} must be int32 [B] = {shape}, or one for all rows; got {x.shape}."
            )
        if not checks.is_known(x):
            return jnp.broadcast_to(x, shape)
        x = np.broadcast_to(jax.device_get(x), shape)
        if x.min() < 0 or (most is not None and x.max() > most):
            upper = "or more" if most is None else f"to the {most} tokens given"
            raise ValueError(f"{name} must be 0 {upper}; got {x.tolist()}.")
        return x


for _method in "append release reserve share shortage".split():
    in_lines(getattr(PagedCache, _method))


def _cu_seqlens(cu_seqlens, cu_seqlens_q):
    """The argument that has two names: the one that is given, and its value."""
    if cu_seqlens is not None and cu_seqlens_q is not None:
        raise TypeError("cu_seqlens and cu_seqlens_q are two names of one argument; got both.")
    named = dict(cu_seqlens=cu_seqlens, cu_seqlens_q=cu_seqlens_q)
    return next(((name, x) for name, x in named.items() if x is not None), ("cu_seqlens", None))


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
    append(key, None) and attend(query, value_size=...). value_dtype is then None.

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
    if values_are_keys and value_dtype is not None:
        raise ValueError(
            "value_dtype must be None with values_are_keys, whose values are columns of the keys "
            f"and have their dtype; got {jnp.dtype(value_dtype)}."
        )
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
    numbers = dict(users=pages, lengths=batch, lost=batch, appended=batch, append_length=())
    numbers = {name: zeros(shape) for name, shape in numbers.items()}
    scales = dict(zip(("k_scales", "v_scales"), scales, strict=False))
    return PagedCache(key, value, table, **numbers, **scales)
