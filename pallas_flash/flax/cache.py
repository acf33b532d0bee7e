"""The caches of `FlashAttention` and attention to them: all tokens in one piece or in pages, or the
tokens of a window."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from pallas_flash import checks
from pallas_flash.attention import flash_attention
from pallas_flash.caches.paged import paged_attention
from pallas_flash.caches.pages import PagedCache
from pallas_flash.devices import sharding
from pallas_flash.masks import KeyLists
from pallas_flash.problem.call import is_data
from pallas_flash.problem.page_layout import PageLayout
from pallas_flash.tiled import quantised

PAGE = 64  # keys of a page of a rolling or quantised cache
_AXES = dict(k_scales="BSK", v_scales="BSK")


class KVCache(NamedTuple):
    """The keys (normalised and rotated) and values of the tokens so far; row b holds lengths[b] of
    them, from slot 0 on."""

    key: Real[Array, "B S K H"]
    value: Real[Array, "B S K H"]
    lengths: Int[Array, "B"]
    k_scales: Float[Array, "B S K"] | None = None  # of a cache in 8 bits
    v_scales: Float[Array, "B S K"] | None = None

    @property
    def axes(self) -> dict[str, str]:
        """A letter for each axis of a field that is no argument of `flash_attention`."""
        return _AXES


class RollingCache(NamedTuple):
    """The keys and values of the last S tokens: the token at position i is in slot i % S. Row b has
    had lengths[b] tokens."""

    key: Real[Array, "B S K H"]
    value: Real[Array, "B S K H"]
    lengths: Int[Array, "B"]
    k_scales: Float[Array, "B S K"] | None = None
    v_scales: Float[Array, "B S K"] | None = None

    @property
    def axes(self) -> dict[str, str]:
        """A letter for each axis of a field that is no argument of `flash_attention`."""
        return _AXES


# options of flash_attention that paged_attention has too
_PAGED = (
    "scale is_causal local_window_size logits_soft_cap sinks implementation query_seq_lengths"
).split()
Cache = KVCache | RollingCache | PagedCache
SomeCache = TypeVar("SomeCache", bound=Cache)


def empty(kind: Callable, batch: int, slots: int, heads: int, size: int, dtype) -> Any:
    """An empty KVCache or RollingCache; a quantised one has whole pages of slots."""
    dtype = quantised.cache_dtype(dtype)
    slots = -(-slots // PAGE) * PAGE if quantised.is_quantised(dtype) else slots
    shape = batch, slots, heads, size
    # two arrays, not one twice, so that a jitted step may be given the cache's memory
    # (donate_argnums)
    key, value = (jnp.zeros(shape, dtype) for _ in range(2))
    scales = (quantised.empty_scales(shape, dtype) for _ in range(2))
    return kind(key, value, jnp.zeros(batch, jnp.int32), *scales)


def rolling_slots(left: int, tokens: int) -> int:
    """How many slots hold `tokens` new tokens and the `left` before the first of them, in whole
    pages wherever in its page the first token lies."""
    return -(-(left + tokens + PAGE - 1) // PAGE) * PAGE


def attend(
    cache: Cache, query, key, value, left: int | None, mask, lengths, options: dict[str, Any]
):
    """The attention of T new tokens, of which the first `lengths` [B] are real (None: all), and the
    cache with these. Tokens without room get NaN. `options` are flash_attention's; a query
    sees `left` tokens before its own (None: all)."""
    T, start = query.shape[1], cache.lengths
    count = jnp.full_like(start, T) if lengths is None else _count(lengths, start, T)
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    real = None if lengths is None else count
    kwargs, is_quantised = options | dict(query_seq_lengths=real), cache.k_scales is not None
    new = dict(key=key, value=value, count=count)
    if isinstance(cache, KVCache) and not is_quantised:
        _, cache = sharding.map_cache(_append, cache, new)
        key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        o = flash_attention(
            query,
            key,
            value,
            mask=mask,
            key_value_seq_lengths=cache.lengths,
            query_offset=start,
            **kwargs,
        )
        return _or_nan(o, positions < key.shape[1]), cache
    kwargs.pop("deterministic")  # attention to pages has no gradient
    kwargs["mask"], known = mask, {*_PAGED}
    if isinstance(cache, PagedCache):
        # these get positions, which in a ring do not count from 0
        known |= {"score_mod", "mask"} if isinstance(mask, KeyLists) else {"score_mod"}
    given = {name for name, x in kwargs.items() if x is not None}
    if unsupported := [name for name in kwargs if name in given - known]:
        raise ValueError(_unsupported(cache, unsupported))
    kwargs = {name: x for name, x in kwargs.items() if x is not None}
    if not isinstance(cache, PagedCache):
        given = [name for name in ("sinks", "query_seq_lengths") if name in kwargs]
        arrays = {name: kwargs.pop(name) for name in given}
        if is_data(kwargs.get("scale")):  # one for each head, since devices share the heads
            arrays["scale"] = jnp.broadcast_to(kwargs.pop("scale"), query.shape[2])
        return sharding.map_cache(
            _attend_slots, cache, dict(query=query) | new | arrays, left, tuple(kwargs.items())
        )
    stored = cache.k_pages.dtype
    if not is_quantised and jnp.promote_types(stored, key.dtype) != stored:
        warnings.warn(
            f"the PagedCache stores {stored}, to which the layer's {key.dtype} is rounded"
            f": paged_cache(..., dtype=jnp.{key.dtype}) stores it as it is",
            stacklevel=3,
        )
    cache = cache.append(key, value, real)
    pages, scales = (cache.k_pages, cache.v_pages), (cache.k_scales, cache.v_scales)
    o = _paged(query, pages, scales, cache.page_table, cache.lengths, query_offset=start, **kwargs)
    # a row that lost tokens stays where it was, and so has no room for these either
    missing = (positions >= cache.lengths[:, None]) & (positions < (start + count)[:, None])
    return _or_nan(o, ~missing), cache


def _unsupported(cache: Cache, names: list[str]) -> str:
    """What a call with these options of flash_attention is told."""
    hints = dict.fromkeys(names, "An unquantised KVCache, from init_cache, does.")
    if isinstance(cache, PagedCache):
        hints["mask"] = (
            "Its mask is a masks.KeyLists alone: the layer's is_causal and local_window_size and "
            "the call's lengths hide keys too. A KVCache, from init_cache, takes any mask."
        )
    hints["dropout_rate"] = hints["dropout_rng"] = "layer.eval() turns dropout off."
    kind = "quantised KVCache" if isinstance(cache, KVCache) else type(cache).__name__
    told = dict.fromkeys(hints[name] for name in names)
    return " ".join([f"a {kind} does not support {', '.join(names)}.", *told])


def _count(lengths, start, T: int):
    """How many of T tokens are real: no other may count as stored."""
    lengths = checks.ints("lengths", lengths)
    if lengths.shape != start.shape:
        raise ValueError(f"lengths must be int32 [B] = {start.shape}; got {lengths.shape}.")
    return jnp.clip(lengths, 0, T)


def _paged(query, pages, scales, table, lengths, **options):
    """paged_attention to pages, which are cast to the query's dtype unless they have scales."""
    k_pages, v_pages = (
        x if scale is not None else x.astype(query.dtype)
        for x, scale in zip(pages, scales, strict=True)
    )
    options |= dict(zip(("k_scales", "v_scales"), scales, strict=True))
    return paged_attention(query, k_pages, v_pages, table, lengths, **options)


def _attend_slots(
    cache: KVCache | RollingCache,
    left: int | None,
    options: tuple,
    *,
    query,
    key,
    value,
    count,
    **arrays,
):
    """Attention to a cache whose slots serve as pages. The slots of a RollingCache are a ring:
    the table of a row begins with the page of the oldest token in sight."""
    is_ring, (B, S) = isinstance(cache, RollingCache), cache.key.shape[:2]
    pages, start, options = S // PAGE, cache.lengths, dict(options) | arrays
    row, token, page = (jnp.arange(n, dtype=jnp.int32) for n in (B, query.shape[1], pages))
    row, token = row[:, None], token[None]
    positions = start[:, None] + token
    slot = jnp.where(token < count[:, None], positions % S if is_ring else positions, S)
    cache = quantised.write(cache, (row, slot), key=key, value=value)
    cache = cache._replace(lengths=(start + count).astype(start.dtype))
    first = jnp.maximum(start - left, 0) // PAGE if is_ring else jnp.zeros_like(start)
    table = row * pages + (first[:, None] + page[None]) % pages
    as_pages = lambda x: None if x is None else PageLayout().split(x, PAGE)
    kv, scales = (cache.key, cache.value), (cache.k_scales, cache.v_scales)
    lengths, options["query_offset"] = cache.lengths - first * PAGE, start - first * PAGE
    o = _paged(query, [*map(as_pages, kv)], [*map(as_pages, scales)], table, lengths, **options)
    return (o if is_ring else _or_nan(o, positions < S)), cache


def _append(cache: KVCache, *, key, value, count) -> tuple[None, KVCache]:
    """Appends key and value [B, T, K, H] to the tokens of each row. Only the first `count` of them
    are real; the others lie beyond the new length, where nobody looks. A token past the last slot
    is dropped."""
    row = jnp.arange(len(key), dtype=jnp.int32)[:, None]
    token = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    lengths = (cache.lengths + count).astype(cache.lengths.dtype)
    slots = row, cache.lengths[:, None] + token
    return None, quantised.write(cache, slots, key=key, value=value)._replace(lengths=lengths)


def _or_nan(o, has_room):
    return jnp.where(has_room[..., None, None], o, jnp.nan)


def check(cache: Cache, x, left: int | None, heads: int, size: int):
    """Raises where a cache does not fit the inputs x [B, T, D], or a layer with `heads` key/value
    heads of `size` columns."""
    if not isinstance(cache, Cache):
        hint = (
            " A call returns the pair (y, cache): pass its second part."
            if isinstance(cache, tuple)
            else ""
        )
        raise TypeError(
            "cache must be a KVCache, a RollingCache or a PagedCache, from init_cache, "
            f"init_rolling_cache or paged_cache; got {checks.description(cache)}.{hint}"
        )
    B, T, _ = x.shape
    name, shape, rows = type(cache).__name__, cache[0].shape, cache.lengths.shape[0]
    if isinstance(cache, PagedCache):
        if cache.v_pages is None:
            raise ValueError("the PagedCache must hold values: paged_cache(...) has room for them.")
        sizes = cache.layout.sizes(shape)
        if (sizes["K"], sizes["H"], rows) != (heads, size, B):
            raise ValueError(
                f"the PagedCache must have {B} rows and pages of [{heads}, {size}] keys; got "
                f"{rows} and {(sizes['K'], sizes['H'])}."
            )
        return
    slots = B, *shape[1:2], heads, size
    if isinstance(cache, RollingCache) and left is None:
        raise ValueError(
            f"a {name} holds a window's tokens, which needs a causal layer with local_window_size; "
            f"this one has no window or is not causal: make the cache with init_cache({B}, "
            "max_length)."
        )
    if shape != slots:
        make = "init_rolling_cache" if isinstance(cache, RollingCache) else "init_cache"
        raise ValueError(
            f"cache.key must be [B, max_length, K, H] = ({B}, max_length, {heads}, {size}) to "
            "match "
            f"inputs_q {x.shape} and the layer; got {shape}. Make it with {make}({B}, max_length)."
        )
    if isinstance(cache, RollingCache) and rolling_slots(left, T) > shape[1]:
        raise ValueError(
            f"a {name} of {shape[1]} slots takes up to {shape[1] - left - PAGE + 1} tokens at a "
            f"time after a window of {left}; "
            f"got {T}. Give a prompt in pieces, or make the cache with init_rolling_cache({B}, "
            f"tokens={T})."
        )
    if T > shape[1]:
        raise ValueError(
            f"the {T} tokens of inputs_q must fit into the cache's max_length; got {shape[1]}."
        )
