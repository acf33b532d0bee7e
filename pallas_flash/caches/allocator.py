"""The allocator of a `PagedCache`: which pages its rows take, fill, share and give back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_flash.caches import attend
from pallas_flash.devices import sharding
from pallas_flash.tiled import quantised

PagedCache = Any  # pages.py has it


class Shortage(NamedTuple):
    """The pages and the tokens' places that an `append` would lack."""

    pages: Int[Array, ""]
    tokens: Int[Array, "B"]


ROOM = "page_table", "lengths", "users", "lost"  # fields that say what fits
NUMBERS = (*ROOM, "appended")  # fields of several numbers that methods change


def pool_size(cache: PagedCache) -> tuple[int, int]:
    """The number of pages, and the keys of a page."""
    sizes = cache.layout.sizes(cache.k_pages.shape)
    return sizes["P"], sizes["C"]


def on_each_device(cache: PagedCache, arrays: dict) -> tuple[PagedCache, dict, Callable]:
    """The cache, the arrays, and a function of a new cache. On a mesh with explicit axes the
    numbers of both are whole on each device, and the function shards the numbers of the new cache
    as before."""
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


def change(change: Callable, cache: PagedCache, **arrays) -> PagedCache:
    """The cache after change(cache, **arrays), which changes its numbers alone."""
    cache, arrays, back = on_each_device(cache, arrays)
    return back(change(cache, **arrays))


def _needed(cache: PagedCache, tokens, xp):
    """The number of new pages that `tokens` more tokens of each row need, and the number of these
    tokens that the row's table cannot hold. xp is NumPy for a cache of NumPy's arrays."""
    (P, page), pages = pool_size(cache), cache.page_table.shape[1]
    # a row that lost tokens takes no more: the next would follow a gap
    fitting = xp.where(cache.lost > 0, 0, xp.minimum(tokens, pages * page - cache.lengths))
    present = xp.sum(cache.page_table < P, 1, dtype=np.int32)
    return xp.maximum(-(-(cache.lengths + fitting) // page) - present, 0), tokens - fitting


def shortage(cache: PagedCache, tokens, xp=jnp) -> Shortage:
    needed, beyond = _needed(cache, tokens, xp)
    free = xp.sum(cache.users == 0, dtype=np.int32)
    return Shortage(xp.maximum(xp.sum(needed, dtype=np.int32) - free, 0), xp.maximum(beyond, 0))


def why_no_room(cache: PagedCache, name: str, tokens):
    """Yields a reason for each limit that `tokens` [B] more tokens would pass, in a cache whose
    numbers are NumPy's."""
    (P, page), pages = pool_size(cache), cache.page_table.shape[1]
    lacking = shortage(cache, tokens, np)
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


def reserve(cache: PagedCache, *, tokens) -> PagedCache:
    P, page = pool_size(cache)
    first, number = cache.room // page, jnp.arange(cache.page_table.shape[1], dtype=jnp.int32)[None]
    needed, _ = _needed(cache, tokens, jnp)
    wanted = (number >= first[:, None]) & (number < (first + needed)[:, None])
    order = jnp.argsort(cache.users > 0, stable=True).astype(jnp.int32)  # free pages first
    nth = jnp.cumsum(wanted.ravel(), dtype=jnp.int32).reshape(wanted.shape) - 1
    given = wanted & (nth < jnp.sum(cache.users == 0, dtype=jnp.int32))
    table = jnp.where(given, order[jnp.clip(nth, 0, P - 1)], cache.page_table)
    users = cache.users.at[jnp.where(given, table, P)].add(1, mode="drop")
    return cache._replace(page_table=table, users=users)


def release(cache: PagedCache, *, rows) -> PagedCache:
    P, _ = pool_size(cache)
    users = cache.users.at[jnp.where(rows[:, None], cache.page_table, P)].add(-1, mode="drop")
    table = jnp.where(rows[:, None], P, cache.page_table)
    by_row = {name: getattr(cache, name) for name in ("lengths", "lost", "appended")}
    by_row = {name: jnp.where(rows, 0, x) for name, x in by_row.items()}
    return cache._replace(page_table=table, users=users, **by_row)


def share(cache: PagedCache, *, source, target) -> PagedCache:
    (P, page), B = pool_size(cache), len(cache.page_table)
    rows = (jnp.arange(B, dtype=jnp.int32) == target) & (0 <= source) & (source < B)
    rows &= source != target
    full, pages = cache.lengths[source] // page, cache.page_table[source]
    entries = jnp.where(jnp.any(rows) & (jnp.arange(len(pages), dtype=jnp.int32) < full), pages, P)
    cache = release(cache, rows=rows)
    table = jnp.where(rows[:, None], entries, cache.page_table)
    lengths = jnp.where(rows, full * page, cache.lengths)
    users = cache.users.at[entries].add(1, mode="drop")
    return cache._replace(page_table=table, lengths=lengths, users=users)


def append(cache: PagedCache, *, key, count, value=None) -> tuple[None, PagedCache]:
    """Appends the first `count` [B] tokens of each row."""
    T = key.shape[1]
    row = jnp.arange(len(count), dtype=jnp.int32)[:, None]
    token = jnp.arange(T, dtype=jnp.int32)[None]
    cache = cache._replace(append_length=jnp.full((), T, jnp.int32))
    return None, _append_at(cache, count, row, token, True, key, value)


def append_ragged(cache: PagedCache, *, key, cu_seqlens, value=None) -> tuple[None, PagedCache]:
    """Appends ragged tokens, one row behind the other."""
    ends = attend.clip_ends(cu_seqlens, len(key))
    cache = cache._replace(append_length=jnp.zeros((), jnp.int32))
    places = attend.Places.locate(ends, len(key))
    return None, _append_at(cache, jnp.diff(ends), *places, key, value)


def _append_at(cache: PagedCache, count, row, token, is_real, key, value) -> PagedCache:
    """Appends `count` [B] tokens to each row. A token of key and value is of row `row`, at `token`
    among the row's new tokens; one that is not real is left out."""
    (P, page), pages, start = pool_size(cache), cache.page_table.shape[1], cache.lengths
    cache = reserve(cache, tokens=count)
    fitting = jnp.minimum(count, cache.room - start)
    lengths, lost = start + fitting, cache.lost + count - fitting
    at = start[row] + token
    number = cache.page_table[row, jnp.minimum(at // page, pages - 1)]
    number = jnp.where(is_real & (at < lengths[row]), number, P)
    slots = cache.layout.arrange(P=number, C=at % page, K=slice(None))
    cache = quantised.write(cache, slots, k_pages=key, v_pages=value)
    return cache._replace(lengths=lengths, lost=lost, appended=fitting)
